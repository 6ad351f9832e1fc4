"""Before anything is changed: can this host do the job?"""

from __future__ import annotations

from pyinfra.api.operation import operation

from gpuwright.plan import PREFLIGHT
from gpuwright.spec import NodeSpec
from operations.stage import Commands, converge


@operation()
def check_node(spec: NodeSpec) -> Commands:
    """Stop the host when something it needs is missing, with the remedy. Reads the observation; runs nothing."""
    yield from converge(spec, PREFLIGHT, "the host has what the stack needs", lambda state, changes: [])
