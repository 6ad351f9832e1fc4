"""The active tier's server, under supervisor or systemd."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from pyinfra import logger
from pyinfra.api.command import FunctionCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State

from gpuwright import node
from gpuwright.diagnose import diagnose, report
from gpuwright.plan import (
    CONFIGURE,
    PRUNE,
    RECORD,
    SERVER,
    manager,
    manager_files,
    runs_on,
    server_actions,
    stale_manager_files,
    unused_caches,
)
from gpuwright.spec import NodeSpec
from operations.stage import Commands, converge, revision, run, to_pyinfra


@operation()
def configure(spec: NodeSpec) -> Commands:
    """Write what the node's supervisor is configured by. Reads the observation."""
    yield from converge(
        spec,
        CONFIGURE,
        "the supervisor is configured",
        lambda state, changes: [
            node.write_files(spec, list(manager_files(spec, state)), stale_manager_files(spec, state))
        ],
    )


@operation()
def run_tier(spec: NodeSpec) -> Commands:
    """Have the active tier serve: restarted only when something it runs on has changed, and awaited until it answers.

    Reads the observation; may run files/node/server.py.
    """
    yield from converge(
        spec,
        SERVER,
        f"tier {spec.tier.name} serves",
        lambda state, changes: [
            FunctionCommand(serve, (spec, server_actions(spec, state), runs_on(spec, state), manager(spec, state)), {})
        ],
    )


def serve(
    state: State, host: Host, spec: NodeSpec, actions: list[str], started_on: dict[str, str], manager: str
) -> bool:
    """Run the actions. When the tier does not come up, say why, go back to the one before it, and fail this host."""
    if run(host, node.run_server(spec, actions, started_on, manager), print_output=True)[0]:
        return True
    fetched, text = run(host, node.read_failure(spec))
    answer: dict[str, Any] = json.loads(text) if fetched else {"failure": None, "text": ""}
    if answer["failure"] is None:  # it failed before anything was started, and has said why
        return False
    found = diagnose(answer["text"], spec.signatures)
    for line in report(found, answer["failure"]["log"]).splitlines():
        host.log(f"  {line}", logger.info)
    run(host, node.run_server(spec, ["roll_back"], started_on, manager), print_output=True)
    return False


@operation()
def prune_caches(spec: NodeSpec) -> Commands:
    """Remove JIT caches of runtimes no longer declared. Reads the observation; may run `rm`."""
    yield from converge(
        spec,
        PRUNE,
        "no cache is unused",
        lambda state, changes: node.prune_caches(spec, unused_caches(spec, state)),
    )


@operation()
def record(spec: NodeSpec) -> Commands:
    """Write state.json, when another spec was deployed last. Reads the observation."""
    at = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    yield from converge(
        spec, RECORD, "this spec is on record", lambda state, changes: node.record_state(spec, revision(), at)
    )


@operation(is_idempotent=False, idempotent_notice="stopping is always run; a stopped server stays stopped")
def stop(spec: NodeSpec) -> Commands:
    """End the server with all its children, and keep its supervisor from starting it again."""
    yield to_pyinfra(node.run_server(spec, ["stop", "shut_down"], {}, "supervisor"))
