"""The model: the lab's is made, a GPU node's is checked."""

from __future__ import annotations

from pyinfra.api.operation import operation

from gpuwright import node
from gpuwright.plan import MODEL
from gpuwright.spec import NodeSpec
from operations.stage import Commands, converge


@operation()
def provide_model(spec: NodeSpec) -> Commands:
    """Make the tiny model, or stop the host when its model folder is not whole. Reads the observation."""
    yield from converge(spec, MODEL, "the model is whole", lambda state, changes: node.make_tiny_model(spec))
