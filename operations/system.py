"""The node's folders."""

from __future__ import annotations

from pyinfra.api.operation import operation

from gpuwright import node
from gpuwright.plan import FOLDERS
from gpuwright.spec import NodeSpec
from operations.stage import Commands, converge


@operation()
def create_folders(spec: NodeSpec) -> Commands:
    """Make the folders under `root` with their modes. Reads the observation; may run `install -d`."""
    yield from converge(spec, FOLDERS, "the folders are there", lambda state, changes: node.make_folders(spec))
