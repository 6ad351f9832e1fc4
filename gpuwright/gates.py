"""What a result lets through: a tier no slower than another, and a spec that a canary has run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuwright.compare import compare, reference_for, report
from gpuwright.record import Record, latest
from gpuwright.spec import NodeSpec


@dataclass(frozen=True)
class Gated:
    """A gate's answer. `why`: what it lacks; `text`: the comparison behind it."""

    passed: bool
    why: str = ""
    text: str = ""


def tier_gate(spec: NodeSpec, records: Sequence[Record]) -> Gated:
    """Whether the host's latest result for this spec is no slower than one of the tier that `gate` names."""
    tier, wanted = spec.data.gate, (spec.spec_digest, spec.benchmark_digest)
    if tier == spec.tier.name:
        return Gated(True)
    own = [r for r in records if r.inventory_host == spec.host and (r.spec_digest, r.benchmark_digest) == wanted]
    candidate = latest(own)
    if candidate is None or candidate.verdict != "accepted":
        return Gated(False, f"tier {spec.tier.name} has no accepted result by profile {spec.data.profile} to compare")
    return _against(spec, candidate, records)


def _against(spec: NodeSpec, candidate: Record, records: Iterable[Record]) -> Gated:
    tier = spec.data.gate
    reference = reference_for(candidate, records, tier)
    if reference is None:
        hint = f"deploy it once first: --data tier={tier} --data profile={candidate.profile}"
        return Gated(False, f"tier {tier} has no result on {candidate.inventory_host} to compare with; {hint}")
    found = compare(reference, candidate, spec.acceptance.comparison)
    text = report(found)
    if found.verdict == "unresolved":
        text += (
            f"\n  the gate lets it through, but could have seen only a slowdown of {found.visible:.0%} or more: the "
            "repeats scatter; more `repeats`, or profile=full, see more"
        )
    if found.passes:
        return Gated(True, text=text)
    at = ", ".join(str(level.concurrency) for level in found.levels if level.verdict == "slower")
    why = {
        "slower": f"tier {candidate.tier} is slower than {tier} at concurrency {at}",
        "different answers": f"tier {candidate.tier} answers differently from {tier}",
    }.get(found.verdict, f"tier {candidate.tier} cannot be compared with {tier}: " + "; ".join(found.why[:3]))
    return Gated(False, why, text)


def canary_gate(spec: NodeSpec, canaries: Sequence[str], records: Sequence[Record], passed_on: Sequence[str]) -> Gated:
    """Whether a host outside the canaries may be brought to this spec.

    `records`: those of this machine, of which the latest of each canary for this spec counts; `passed_on`: canaries of
    this run whose own latest result for it is accepted. With a tier gate, the canary's result must pass that too, which
    only its record can show.
    """
    own = [r for r in records if r.spec_digest == spec.spec_digest]
    last = [latest(r for r in own if r.inventory_host == canary) for canary in canaries]
    passing = [record for record in last if record is not None and record.verdict == "accepted"]
    if spec.data.gate not in ("off", spec.tier.name):
        judged = [_against(spec, record, records) for record in passing]
        if any(each.passed for each in judged):
            return Gated(True)
        if judged:
            return Gated(False, f"on a canary, {judged[-1].why}", judged[-1].text)
    elif passing or passed_on:
        return Gated(True)
    return Gated(
        False,
        f"no canary host ({', '.join(canaries)}) has a passing result for spec {spec.spec_digest[:12]}, tier "
        f"{spec.tier.name}\n    -> deploy there first: --limit canary; to go on without: --data canary_gate=off\n"
        "    -> a host with a bind, port, root or model path of its own has a spec of its own, which no canary has",
    )
