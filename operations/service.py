"""The active tier's server, under supervisor."""

from __future__ import annotations

from datetime import datetime, timezone

from pyinfra.api.operation import operation

from gpuwright import node
from gpuwright.plan import CONFIGURE, PRUNE, RECORD, SERVER, runs_on, server_actions, unused_caches
from gpuwright.spec import NodeSpec
from operations.stage import Commands, converge, revision, to_pyinfra


@operation()
def configure(spec: NodeSpec) -> Commands:
    """Write supervisor's configuration. Reads the observation."""
    yield from converge(
        spec,
        CONFIGURE,
        "supervisor is configured",
        lambda state, changes: [node.write_files(spec, [spec.supervisor_conf])],
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
        lambda state, changes: node.run_server(spec, server_actions(spec, state), runs_on(spec, state)),
    )


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
    """End the server with all its children, and supervisor."""
    for command in node.run_server(spec, ["stop", "shut_down"], {}):
        yield to_pyinfra(command)
