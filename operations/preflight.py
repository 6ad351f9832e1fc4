"""Before anything is changed: can this host do the job?"""

from __future__ import annotations

from pyinfra import host, logger, state  # type: ignore[attr-defined]
from pyinfra.api.operation import operation

from gpuwright import gates
from gpuwright.plan import CANARY, PREFLIGHT, Change
from gpuwright.record import RESULTS, read_records
from gpuwright.spec import NodeSpec
from operations.stage import Commands, converge, observe_peer, observed, specs


@operation()
def ask_canary(spec: NodeSpec) -> Commands:
    """Stop a host outside group canary that would get a spec which no canary host has a passing result for. Reads the
    observation and results/, and the observation of the run's canaries where results/ does not tell; runs nothing.
    """
    canaries = [each.name for each in state.inventory.groups.get("canary", [])]
    found = observed(spec)
    if not canaries or host.name in canaries or found is None:
        host.noop("this host is a canary" if host.name in canaries else "there is no group canary in this inventory")
        return
    if (found.state or {}).get("spec_digest") == spec.spec_digest:
        host.noop("nothing new would be deployed here")
        return
    records = read_records(RESULTS, *canaries)[0]
    verdict = gates.canary_gate(spec, canaries, records, ())
    if not verdict.passed:
        verdict = gates.canary_gate(spec, canaries, records, _passed_on(spec, canaries))
    if not verdict.passed and spec.data.canary_gate == "off":
        for line in f"the canary gate is off: {verdict.why}".splitlines():
            host.log(f"    {line}", logger.warning)
        host.noop("left out by canary_gate=off")
        return
    for line in verdict.text.splitlines():
        host.log(f"    {line}", logger.info)
    yield from converge(
        spec,
        CANARY,
        f"a canary host has a passing result for spec {spec.spec_digest[:12]}",
        lambda state, changes: [],
        also=() if verdict.passed else [Change(CANARY, verdict.why, blocked=True)],
    )


def _passed_on(spec: NodeSpec, canaries: list[str]) -> list[str]:
    """The canaries of this run on which an accepted result for this spec lies."""
    peers = {peer.host: observe_peer(peer) for peer in specs() if peer.host in canaries}
    wanted = (spec.spec_digest, "accepted")
    return [
        name for name, seen in peers.items() if seen and wanted in [(r.spec_digest, r.verdict) for r in seen.results]
    ]


@operation()
def check_node(spec: NodeSpec) -> Commands:
    """Stop the host when something it needs is missing, with the remedy. Reads the observation; runs nothing."""
    yield from converge(spec, PREFLIGHT, "the host has what the stack needs", lambda state, changes: [])
