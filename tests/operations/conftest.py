"""pyinfra's own state around an operation, with the observation given instead of taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pyinfra.api.command import FunctionCommand, PyinfraCommand, StringCommand
from pyinfra.api.config import Config
from pyinfra.api.inventory import Inventory
from pyinfra.api.state import State
from pyinfra.context import ctx_host, ctx_state

from gpuwright.node import NodeCommand
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState
from operations import stage

Collect = Callable[..., list[NodeCommand | PyinfraCommand]]


def core(command: PyinfraCommand) -> NodeCommand | PyinfraCommand:
    """The core's command inside pyinfra's, so that a test compares what would run on the node."""
    if isinstance(command, StringCommand):
        return NodeCommand(command.get_raw_value(), command.connector_arguments.get("_stdin", ""))
    if isinstance(command, FunctionCommand) and command.function is stage.stream:
        return command.args[0]  # type: ignore[no-any-return]
    return command


@pytest.fixture
def collect() -> Iterator[Collect]:
    """collect(operation, spec, state): the exact commands an operation yields for a node in that state."""
    state = State(Inventory((["@local", "gpu-01"], {}), canary=(["gpu-01"], {})), Config())
    host = state.inventory.get_host("@local")
    stage._observations.clear()

    def run(operation: object, spec: NodeSpec, observed: NodeState) -> list[NodeCommand | PyinfraCommand]:
        with ctx_state.use(state), ctx_host.use(host):
            stage._observations[host.name] = (False, observed)
            return [core(command) for command in operation._inner(spec=spec)]  # type: ignore[attr-defined]

    yield run
    stage._observations.clear()
