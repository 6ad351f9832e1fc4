"""Before anything is changed: can this host do the job?"""

from __future__ import annotations

from collections.abc import Iterator

from pyinfra.api import operation
from pyinfra.api.command import PyinfraCommand

from gpuwright.plan import PREFLIGHT
from gpuwright.spec import NodeSpec
from operations.stage import converge


@operation()
def check_node(spec: NodeSpec) -> Iterator[PyinfraCommand]:
    """Stop the host, with a remedy for each, when something it needs is missing. Reads the observation; runs nothing."""
    yield from converge(spec, PREFLIGHT, "the host has what the stack needs", lambda state, changes: [])
