"""The active tier's server, under supervisor or systemd."""

from __future__ import annotations

import json
import uuid
from datetime import datetime, timezone
from typing import Any

from pyinfra import logger
from pyinfra.api.command import FunctionCommand, StringCommand
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
    Change,
    manager,
    manager_files,
    restarts,
    runs_on,
    server_actions,
    unused_caches,
)
from gpuwright.preflight import shell_failure
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState, last_line
from operations.stage import Commands, converge, observe_peer, revision, run, specs, to_pyinfra


@operation()
def configure(spec: NodeSpec) -> Commands:
    """Write what the node's supervisor is configured by. Reads the observation."""
    yield from converge(
        spec,
        CONFIGURE,
        "the supervisor is configured",
        lambda state, changes: [node.write_files(spec, list(manager_files(spec, state)))],
    )


@operation()
def run_tier(spec: NodeSpec) -> Commands:
    """Have the active tier serve: restarted only when something it runs on has changed, and awaited until it answers.

    Reads the observation, for a cluster also that of its other hosts; may run files/node/server.py.
    """
    peers = [peer for peer in specs() if peer.host != spec.host and peer.host in {m.name for m in spec.members}]
    lacking = {member.name for member in spec.members} - {spec.host, *(peer.host for peer in peers)}
    if lacking:
        yield StringCommand(
            shell_failure(f"{', '.join(sorted(lacking))} of this cluster cannot be reached: not started")
        )
        return
    restarting = [peer.host for peer in peers if spec.data.serve and restarts(peer, observe_peer(peer))]
    yield from converge(
        spec,
        SERVER,
        f"tier {spec.tier.name} serves",
        lambda state, changes: [FunctionCommand(serve, (spec, *_how(spec, state, bool(restarting))), {})],
        also=[Change(SERVER, f"restart tier {spec.tier.name}, because {', '.join(restarting)} restarts")]
        if restarting
        else [],
    )


def _how(spec: NodeSpec, state: NodeState, restart: bool) -> tuple[list[str], dict[str, str], str, str | None]:
    actions = ["stop", "start", "wait"] if restart and spec.data.serve else server_actions(spec, state)
    return actions, runs_on(spec, state), manager(spec, state), (state.server.record or {}).get("started_at")


def serve(
    state: State,
    host: Host,
    spec: NodeSpec,
    actions: list[str],
    started_on: dict[str, str],
    manager: str,
    saw: str | None,
) -> bool:
    """Run the actions. When the tier does not come up, say why, go back to the one before it, and fail this host."""
    attempt = uuid.uuid4().hex
    if run(host, node.run_server(spec, actions, started_on, manager, attempt, saw), print_output=True)[0]:
        return True
    fetched, text = run(host, node.read_failure(spec))
    answer: dict[str, Any] = json.loads(last_line(text)) if fetched else {"failure": None}
    if (answer["failure"] or {}).get("attempt") != attempt:  # it failed before anything was started, and has said why
        return False
    found = diagnose(answer["text"], spec.signatures)
    for line in report(found, answer["failure"]["log"]).splitlines():
        host.log(f"  {line}", logger.info)
    run(host, node.run_server(spec, ["roll_back"], started_on, manager, attempt), print_output=True)
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
        spec, RECORD, "this spec is on record", lambda state, changes: node.record_state(spec, state, revision(), at)
    )


@operation(is_idempotent=False, idempotent_notice="stopping is always run; a stopped server stays stopped")
def stop(spec: NodeSpec) -> Commands:
    """End the server with all its children, and keep its supervisor from starting it again."""
    yield to_pyinfra(node.run_server(spec, ["stop", "shut_down"], {}, "supervisor"))
