"""One launch script for every tier of the node's ladder."""

from __future__ import annotations

from pyinfra.api.operation import operation

from gpuwright import node
from gpuwright.plan import LAUNCHERS, Change, stale_scripts
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState
from operations.stage import Commands, converge


@operation()
def write_scripts(spec: NodeSpec) -> Commands:
    """Write the launch scripts that differ, remove those of no tier. Reads the observation."""

    def build(state: NodeState, changes: list[Change]) -> list[node.NodeCommand]:
        differing = {change.what for change in changes}
        files = [file for file in (*spec.scripts, *spec.secret_files) if file.path in differing]
        return [node.write_files(spec, files, stale_scripts(spec, state))]

    yield from converge(spec, LAUNCHERS, f"{len(spec.scripts)} launch scripts are as rendered", build)
