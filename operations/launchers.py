"""One launch script for every tier of the node's ladder."""

from __future__ import annotations

from collections.abc import Iterator

from pyinfra.api import operation
from pyinfra.api.command import PyinfraCommand

from gpuwright import node
from gpuwright.plan import LAUNCHERS, Change, stale_scripts
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState
from operations.stage import converge


@operation()
def write_scripts(spec: NodeSpec) -> Iterator[PyinfraCommand]:
    """Write the launch scripts that differ, remove those of no tier. Reads the observation."""

    def build(state: NodeState, changes: list[Change]) -> list[node.NodeCommand | PyinfraCommand]:
        differing = {change.what for change in changes}
        files = [file for file in spec.scripts if file.path in differing]
        return [node.write_files(spec, files, stale_scripts(spec, state))]

    yield from converge(spec, LAUNCHERS, f"{len(spec.scripts)} launch scripts are as rendered", build)
