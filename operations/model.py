"""The model: the lab's is made, the hub's is fetched, a folder that is there is checked."""

from __future__ import annotations

from pyinfra.api.operation import operation

from gpuwright import node
from gpuwright.plan import CONFIG, MODEL
from gpuwright.spec import NodeSpec
from operations.stage import Commands, converge


@operation()
def provide_model(spec: NodeSpec) -> Commands:
    """Make the tiny model, fetch the hub's, or stop the host when its model folder is not whole. Reads the observation;
    may run files/node/tiny_model.py, or files/node/fetch_model.py in the venv's Python.
    """
    yield from converge(spec, MODEL, "the model is whole", lambda state, changes: node.provide_model(spec))


@operation()
def read_config(spec: NodeSpec) -> Commands:
    """Prove that the venv's transformers reads the model's config. Reads the observation; may run the venv's Python."""
    yield from converge(spec, CONFIG, "its config was read", lambda state, changes: node.read_config(spec, state))
