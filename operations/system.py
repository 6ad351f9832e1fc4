"""The node's folders."""

from __future__ import annotations

from collections.abc import Iterator

from pyinfra.api import operation
from pyinfra.api.command import PyinfraCommand

from gpuwright import node
from gpuwright.plan import FOLDERS
from gpuwright.spec import NodeSpec
from operations.stage import converge


@operation()
def create_folders(spec: NodeSpec) -> Iterator[PyinfraCommand]:
    """Make the folders under `root` with their modes. Reads the observation; may run `install -d`."""
    yield from converge(spec, FOLDERS, "the folders are there", lambda state, changes: list(node.make_folders(spec)))
