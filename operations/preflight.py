"""Before anything is changed: can this host do the job?"""

from __future__ import annotations

from pyinfra import host, logger, state  # type: ignore[attr-defined]
from pyinfra.api.operation import operation

from gpuwright import gates
from gpuwright.plan import CANARY, PREFLIGHT, Change, examine_node
from gpuwright.record import RESULTS, read_records
from gpuwright.spec import NodeSpec
from operations.stage import Commands, converge, observe_peer, observed, specs


@operation()
def ask_canary(spec: NodeSpec) -> Commands:
    """Stop a host outside group canary that would get a spec which no canary host has a passing result for. Reads the
    observation and results/, and the observation of the run's canaries where results/ does not tell; runs nothing.
    """
    canaries = [each.name for each in state.inventory.groups.get("canary", [])]
    if not canaries or host.name in canaries:
        host.noop("this host is a canary" if canaries else "there is no group canary in this inventory")
        return
    if not spec.data.serve:
        host.noop("this host does not serve, so there is nothing that a canary could have measured")
        return
    found = observed(spec)
    if found is not None and (found.state or {}).get("spec_digest") == spec.spec_digest:
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
    """The canaries of this run whose latest result for this spec is accepted. A record's name begins with its time."""
    passed = []
    for peer in specs():
        seen = observe_peer(peer) if peer.host in canaries else None
        own = [result for result in seen.results if result.spec_digest == spec.spec_digest] if seen else []
        if own and max(own, key=lambda result: result.file).verdict == "accepted":
            passed.append(peer.host)
    return passed


@operation()
def check_node(spec: NodeSpec) -> Commands:
    """Stop the host when something it needs is missing, with the remedy. Reads the observation; runs nothing."""
    found = observed(spec)
    result = examine_node(spec, found) if found else None
    better = [each for each in result.findings if each.counts and each.check.severity == "should"] if result else []
    if better:
        ids = ", ".join(each.check.id for each in better)
        host.log(f"    {len(better)} things should be better ({ids}): doctor.py says how", logger.warning)
    settled = f"the host has what the stack needs ({result.summary})" if result else ""
    yield from converge(spec, PREFLIGHT, settled, lambda state, changes: [])
