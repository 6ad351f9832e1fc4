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
from gpuwright.record import LevelRecord, Record

Verdict = Literal["faster", "same", "slower", "different answers", "not comparable"]


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
    alone decides; TTFT and TPOT are shown to say where a difference comes from.
    """

    concurrency: int
    queued: bool
    throughput: Ratio
    ttft: Ratio
    tpot: Ratio
    verdict: Literal["faster", "same", "slower"]


@dataclass(frozen=True)
class Compared:
    """A candidate against a reference. `differs`: what beside the tier is not the same; `agreement`: the mean share of
    each answer, in tokens, that agrees with the reference's from its beginning; `missing`: levels not accepted in both.
    """

    reference: Record
    candidate: Record
    differs: list[str]
    levels: list[LevelVerdict]
    missing: list[int]
    agreement: float | None
    verdict: Verdict
    noise: float

    @property
    def passes(self) -> bool:
        """Whether a gate lets the candidate through: as fast as the reference at every level, with its answers."""
        return self.verdict in ("faster", "same") and not self.missing


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


def judged(found: Ratio, noise: float) -> Literal["faster", "same", "slower"]:
    """What a ratio of throughputs says: a difference only where the whole interval lies beyond the noise."""
    if found.high < 1 - noise:
        return "slower"
    return "faster" if found.low > 1 + noise else "same"


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
        return ", ".join(f"{name} {one.get(name, 'absent')} and {other.get(name, 'absent')}" for name in names[:5])
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return ", ".join(f"{a} and {b}" for a, b in zip(one, other, strict=True) if a != b)
    return f"{one} and {other}"


def agreement(reference: Record, candidate: Record) -> float | None:
    """The mean, over the prompts that both were asked, of the share of the reference's tokens that the candidate's
    answer repeats from its beginning; 1.0 where all are the same, None where they share no prompt.
    """
    theirs = {answer.prompt: answer.tokens for answer in reference.answers if answer.tokens}
    shares = []
    for answer in candidate.answers:
        if answer.prompt in theirs:
            expected = theirs[answer.prompt]
            pairs = zip(expected, answer.tokens, strict=False)
            first = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(answer.tokens)))
            shares.append(first / len(expected))
    return math.fsum(shares) / len(shares) if shares else None


def compare(reference: Record, candidate: Record, rules: Comparison) -> Compared:
    """Judge a candidate by a reference run."""
    noise = float(candidate.load.get("noise", 0.0))
    differs = differences(reference, candidate)
    differs += [f"{which} run breaks {rule}" for which, run in (("reference", reference), ("candidate", candidate))
                for rule in run.broken]  # fmt: skip
    levels, missing = [], []
    for each in candidate.levels:
        one, other = reference.level(each.concurrency), candidate.level(each.concurrency)
        if one is None or other is None:
            missing.append(each.concurrency)
        elif not differs:
            levels.append(_level(one, other, rules.confidence, noise))
    answers = agreement(reference, candidate)
    verdict: Verdict
    if differs or not levels:
        verdict = "not comparable"
    elif answers is None or answers < rules.same_answers:
        verdict = "different answers"
    elif any(level.verdict == "slower" for level in levels):
        verdict = "slower"
    else:
        verdict = "faster" if any(level.verdict == "faster" for level in levels) else "same"
    return Compared(reference, candidate, differs, levels, missing, answers, verdict, noise)


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
    )


def reference_for(candidate: Record, records: Iterable[Record], tier: str) -> Record | None:
    """The latest run of `tier` on the candidate's host that can be compared with it; if none can, the latest at all."""
    runs = [r for r in records if r.inventory_host == candidate.inventory_host and r.tier == tier]
    runs = [r for r in runs if r.run != candidate.run and r.ladder == candidate.ladder]
    usable = [r for r in runs if not r.broken and not differences(r, candidate) and any(x.accepted for x in r.levels)]
    return max(usable or runs, key=lambda record: (record.started_at, record.run), default=None)


def report(found: Compared) -> str:
    """A comparison as a person reads it in a terminal."""
    one, other = found.reference, found.candidate
    lines = [f"{other.inventory_host}: {other.tier} against {one.tier} ({other.run} against {one.run})"]
    if found.levels:
        head = ("concurrency", "output tok/s", "TTFT", "TPOT", "verdict")
        rows = [head]
        for level in found.levels:
            verdict = level.verdict + (", queued" if level.queued else "")
            figures = (str(level.throughput), str(level.ttft), str(level.tpot))
            rows.append((str(level.concurrency), *figures, verdict))
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines += [
            "  " + "  ".join(c.rjust(w) for c, w in zip(r[:-1], widths, strict=False)) + "  " + r[-1] for r in rows
        ]
        lines.append(f"  ratios with their intervals; differences within {found.noise:.0%} count as noise")
    lines += [f"  no accepted result on both sides at concurrency {level}" for level in found.missing]
    if found.agreement is not None:
        lines.append(f"  answers agree with the reference's for {found.agreement:.0%} of their tokens")
    lines += [f"  differs in {what}" for what in found.differs]
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
        "differs": found.differs,
        "answers_agree": found.agreement,
        "noise": found.noise,
        "levels": [
            {"concurrency": level.concurrency, "queued": level.queued, "verdict": level.verdict,
             "output_tok_s": interval(level.throughput), "ttft_mean_ms": interval(level.ttft),
             "tpot_mean_ms": interval(level.tpot)}
            for level in found.levels
        ],
        "missing": found.missing,
    }  # fmt: skip
