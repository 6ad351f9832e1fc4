"""The model: the lab's is made, a GPU node's is checked."""

from __future__ import annotations

from collections.abc import Iterator

from pyinfra.api import operation
from pyinfra.api.command import PyinfraCommand

from gpuwright import node
from gpuwright.plan import MODEL
from gpuwright.spec import NodeSpec
from operations.stage import converge


@operation()
def provide_model(spec: NodeSpec) -> Iterator[PyinfraCommand]:
    """Make the tiny model, or stop the host when its model folder is not whole. Reads the observation."""
    yield from converge(spec, MODEL, "the model is whole", lambda state, changes: list(node.make_tiny_model(spec)))
