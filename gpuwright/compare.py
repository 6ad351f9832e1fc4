"""Two benchmark runs beside each other: what keeps them from being compared, how much faster one is, and whether the
answers are still the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpuwright.acceptance import Comparison
from gpuwright.record import LevelRecord, Record, aligned, latest, prefix_share

LevelWord = Literal["faster", "same", "slower", "unresolved"]
Verdict = Literal["faster", "same", "slower", "unresolved", "different answers", "not comparable"]


@dataclass(frozen=True)
class Ratio:
    """Candidate over reference: the quotient of the geometric means, and the interval that holds the true one."""

    low: float
    mid: float
    high: float

    def __str__(self) -> str:
        return f"{self.mid:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class LevelVerdict:
    """One level. Under fixed concurrency and lengths throughput is the inverse of a request's whole latency, so it
    alone decides; TTFT and TPOT are shown to say where a difference comes from. `visible`: the least slowdown (a share
    of the throughput) that this comparison would have called slower.
    """

    concurrency: int
    queued: bool
    throughput: Ratio
    ttft: Ratio
    tpot: Ratio
    verdict: LevelWord
    visible: float

    @property
    def words(self) -> str:
        """The verdict, and that a queue was measured."""
        return self.verdict + (", queued" if self.queued else "")


@dataclass(frozen=True)
class Compared:
    """A candidate against a reference. `why`: what keeps them from being compared: conditions beside the tier that are
    not the same, broken rules, levels that are not accepted in both. `agreement`: the mean share of each answer, in
    tokens, that agrees with the reference's from its beginning.
    """

    reference: Record
    candidate: Record
    why: list[str]
    levels: list[LevelVerdict]
    agreement: float | None
    verdict: Verdict
    noise: float

    @property
    def passes(self) -> bool:
        """Whether a gate lets the candidate through: seen slower at no level, with the reference's answers."""
        return self.verdict in ("faster", "same", "unresolved")

    @property
    def visible(self) -> float:
        """The least slowdown that would have been seen at every level, as a share; 0 without a level."""
        return max((level.visible for level in self.levels), default=0.0)


def ratio(reference: Sequence[float], candidate: Sequence[float], confidence: float) -> Ratio:
    """The ratio of two sets of repeats (positive, two or more each), by Welch's interval over their logarithms."""
    from scipy import stats  # a second to import, and needed by nobody who does not compare

    ours, theirs = [math.log(value) for value in candidate], [math.log(value) for value in reference]
    mid = math.fsum(ours) / len(ours) - math.fsum(theirs) / len(theirs)
    if max(ours) == min(ours) and max(theirs) == min(theirs):
        return Ratio(math.exp(mid), math.exp(mid), math.exp(mid))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one side may have no scatter at all
        interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(confidence)
    return Ratio(math.exp(interval.low), math.exp(mid), math.exp(interval.high))


def judged(found: Ratio, noise: float) -> LevelWord:
    """What a ratio of throughputs says. A difference: where the whole interval lies beyond the noise. The same: where
    the ratio lies within it, and the interval within twice of it. Else the repeats scatter too much to tell.
    """
    if found.high < 1 - noise:
        return "slower"
    if found.low > 1 + noise:
        return "faster"
    near = abs(found.mid - 1) <= noise and 1 - 2 * noise <= found.low and found.high <= 1 + 2 * noise
    return "same" if near else "unresolved"


def conditions(record: Record) -> dict[str, Any]:
    """What two runs must share before they are compared: everything but the tier."""
    steady = ("index", "name", "memory_mib", "power_limit_w", "max_sm_clock_mhz")
    return {
        "host": record.inventory_host,
        **{f"machine {name}": value for name, value in record.host.model_dump().items()},
        "gpu_count": record.gpu_count,
        "gpus": [{name: getattr(gpu, name) for name in steady} for gpu in record.gpus],
        "driver": record.driver,
        "stack": record.stack,
        "engine": record.engine,
        "ladder": record.ladder,
        "ladder's arguments": record.ladder_args,
        "ladder's environment": record.ladder_env,
        "packages": record.packages,
        "runtime digest": record.runtime_digest[:16],
        "patch set": record.patch_set_digest[:16],
        "model": record.model.digest[:16],
        "load": {name: value for name, value in record.load.items() if name != "noise"},
        "benchmark digest": record.benchmark_digest[:16],
    }


def differences(reference: Record, candidate: Record) -> list[str]:
    """Each condition that two runs do not share, with both values."""
    one, other = conditions(reference), conditions(candidate)
    return [f"{name}: {_apart(one[name], other[name])}" for name in one if one[name] != other[name]]


def _apart(one: Any, other: Any) -> str:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        told = [f"{name} {one.get(name, 'absent')} and {other.get(name, 'absent')}" for name in names[:5]]
        return ", ".join(told) + more
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{len(one)} and {len(other)}"
        apart = dict.fromkeys(_apart(a, b) for a, b in zip(one, other, strict=True) if a != b)
        return ", ".join(apart)  # eight GPUs with another power limit are told once
    return f"{one} and {other}"


def agreement(reference: Record, candidate: Record) -> float | None:
    """The mean, over the prompts that both were asked, of the share of the reference's tokens that the candidate's
    answer repeats from its beginning; 1.0 where all are the same, None where they share no prompt.
    """
    theirs = {answer.prompt: answer.tokens for answer in reference.answers if answer.tokens}
    shares = [prefix_share(theirs[a.prompt], a.tokens) for a in candidate.answers if a.prompt in theirs and a.tokens]
    return math.fsum(shares) / len(shares) if shares else None


def compare(reference: Record, candidate: Record, rules: Comparison) -> Compared:
    """Judge a candidate by a reference run."""
    noise = float(candidate.load.get("noise", 0.0))
    why = [f"other {what}" for what in differences(reference, candidate)]
    for which, run in (("reference", reference), ("candidate", candidate)):
        why += [f"the {which} run breaks {rule}" for rule in run.broken]
    answers = agreement(reference, candidate)
    if answers is None:
        why.append("no answers are on record for the same prompts")
    levels: list[LevelVerdict] = []
    if not why:
        for each in candidate.levels:
            one, other = reference.level(each.concurrency), candidate.level(each.concurrency)
            if one is None or other is None:
                which = "candidate" if other is None else "reference"
                why.append(f"the {which}'s level of concurrency {each.concurrency} is not accepted")
            else:
                levels.append(_level(one, other, rules.confidence, noise))
    return Compared(reference, candidate, why, levels, answers, _verdict(why, levels, answers, rules), noise)


def _verdict(why: list[str], levels: list[LevelVerdict], answers: float | None, rules: Comparison) -> Verdict:
    if why or answers is None:
        return "not comparable"
    if answers < rules.same_answers:
        return "different answers"
    words = [level.verdict for level in levels]
    order: tuple[LevelWord, ...] = ("slower", "unresolved", "faster", "same")
    return next(word for word in order if word in words)


def _level(one: LevelRecord, other: LevelRecord, confidence: float, noise: float) -> LevelVerdict:
    def of(name: str) -> Ratio:
        before, after = ([getattr(figures, name) for figures in level.kept] for level in (one, other))
        return ratio(before, after, confidence)

    throughput = of("output_tok_s")
    return LevelVerdict(
        other.concurrency,
        one.queued or other.queued,
        throughput,
        of("ttft_mean_ms"),
        of("tpot_mean_ms"),
        judged(throughput, noise),
        1 - (1 - noise) * throughput.mid / throughput.high,
    )


def reference_for(candidate: Record, records: Iterable[Record], tier: str) -> Record | None:
    """The run of `tier` on the candidate's host to compare it with: the latest accepted one under equal conditions;
    else the latest of those with some accepted level; else the latest at all, so that the comparison says what differs.
    """
    runs = [r for r in records if r.inventory_host == candidate.inventory_host and r.tier == tier]
    runs = [r for r in runs if r.run != candidate.run and r.ladder == candidate.ladder]
    equal = [r for r in runs if not r.broken and not differences(r, candidate)]
    whole = [r for r in equal if r.verdict == "accepted"]
    partly = [r for r in equal if any(level.accepted for level in r.levels)]
    return latest(whole or partly or runs)


def report(found: Compared) -> str:
    """A comparison as a person reads it in a terminal."""
    one, other = found.reference, found.candidate
    lines = [f"{other.inventory_host}: {other.tier} against {one.tier} ({other.run} against {one.run})"]
    if found.levels:
        head = ("concurrency", "output tok/s", "TTFT", "TPOT", "slower shows from", "verdict")
        rows = [head]
        for level in found.levels:
            figures = (str(level.throughput), str(level.ttft), str(level.tpot), f"-{level.visible:.0%}")
            rows.append((str(level.concurrency), *figures, level.words))
        lines += [f"  {line}" for line in aligned(rows)]
        lines.append(f"  ratios with their intervals; differences within {found.noise:.0%} count as noise")
    if found.agreement is not None:
        lines.append(
            f"  answers agree with the reference's, from their beginning, for {found.agreement:.0%} of their tokens"
        )
    lines += [f"  not comparable: {what}" for what in found.why]
    lines.append(f"  verdict: {found.verdict}")
    return "\n".join(lines)


def as_json(found: Compared) -> dict[str, Any]:
    """A comparison as data."""

    def interval(of: Ratio) -> dict[str, float]:
        return {"low": of.low, "ratio": of.mid, "high": of.high}

    return {
        "reference": found.reference.run,
        "candidate": found.candidate.run,
        "verdict": found.verdict,
        "passes": found.passes,
        "why": found.why,
        "answers_agree": found.agreement,
        "noise": found.noise,
        "levels": [
            {"concurrency": level.concurrency, "queued": level.queued, "verdict": level.verdict,
             "slower_shows_from": level.visible, "output_tok_s": interval(level.throughput),
             "ttft_mean_ms": interval(level.ttft), "tpot_mean_ms": interval(level.tpot)}
            for level in found.levels
        ],
    }  # fmt: skip
