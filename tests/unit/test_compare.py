"""Comparison and gates: a difference is one only beyond the repeats' own scatter, and only between equal conditions."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from gpuwright.__main__ import main
from gpuwright.compare import Ratio, agreement, as_json, compare, judged, ratio, reference_for, report
from gpuwright.gates import canary_gate, tier_gate
from gpuwright.record import Record, dump, folder_name
from tests.make import bench_spec, catalogue, record, summary

RULES = catalogue().acceptance.comparison
BASELINE, OTHER = bench_spec(), bench_spec(tier="no-radix")
REFERENCE = record(BASELINE, run="r-base")


def against(tok_s: dict[int, list[float]] | None = None, **changed: Any) -> Any:
    return compare(REFERENCE, record(OTHER, tok_s, run="r-other", **changed), RULES)


def test_the_interval_is_welchs_over_the_logarithms() -> None:
    """Equal variances of three and three: 4 degrees of freedom, whose 97.5 % quantile is 2.776 in every table."""
    step = 0.02
    one, other = ([math.exp(middle + n * step) for n in (-1, 0, 1)] for middle in (5.0, 5.1))
    found = ratio(one, other, 0.95)
    reach = 2.776 * step * math.sqrt(2 / 3)
    assert (found.low, found.mid, found.high) == pytest.approx(
        [math.exp(0.1 + n * reach) for n in (-1, 0, 1)], rel=1e-4
    )


def test_repeats_without_any_scatter_have_no_interval() -> None:
    found = ratio([100.0] * 3, [50.0] * 3, 0.95)
    assert (found.low, found.mid, found.high) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.04, 1.2, "faster"),
        (0.8, 0.96, "slower"),
        (0.95, 1.05, "same"),
        (0.97, 1.03, "same"),
        (1.02, 1.2, "unresolved"),
        (0.8, 0.98, "unresolved"),
        (0.5, 2.0, "unresolved"),
        (0.942, 0.9705, "unresolved"),
    ],
)
def test_a_difference_is_one_only_where_the_whole_interval_lies_beyond_the_noise(
    low: float, high: float, verdict: str
) -> None:
    assert judged(Ratio(low, (low * high) ** 0.5, high), 0.03) == verdict


def test_faster_same_and_slower() -> None:
    assert against().verdict == "same"
    assert against({2: [300.0, 301.0, 302.0], 8: [800.0, 810.0, 790.0]}).verdict == "faster"
    slower = against({2: [300.0, 301.0, 302.0], 8: [400.0, 405.0, 402.0]})
    assert slower.verdict == "slower" and [level.verdict for level in slower.levels] == ["faster", "slower"]
    assert "0.503" in report(slower) and "verdict: slower" in report(slower)
    assert as_json(slower)["levels"][1]["output_tok_s"]["ratio"] == pytest.approx(0.503, abs=1e-3)


def test_scatter_of_the_repeats_leaves_a_difference_unresolved_and_says_what_would_have_shown() -> None:
    found = against({2: [60.0, 200.0, 100.0], 8: [800.0, 810.0, 790.0]})
    assert found.verdict == "unresolved" and [level.verdict for level in found.levels] == ["unresolved", "same"]
    low, mid, high = (getattr(found.levels[0].throughput, name) for name in ("low", "mid", "high"))
    visible = found.levels[0].visible
    assert visible == found.visible > 0.5
    assert (1 - visible) * high / mid == pytest.approx(1 - found.noise), "a little slower, and it would be called so"
    assert low < mid < high and f"-{visible:.0%}  unresolved" in report(found)


def test_a_reference_against_itself_seldom_cries_wolf() -> None:
    """Seeded: 3 % of scatter and 3 % of noise floor, 400 pairs of runs with three repeats of four levels each."""
    draw = random.Random(1)
    alarms = 0
    for _ in range(400):
        levels = [
            ratio(
                [draw.lognormvariate(0, 0.03) for _ in range(3)], [draw.lognormvariate(0, 0.03) for _ in range(3)], 0.95
            )
            for _ in range(4)
        ]
        alarms += any(judged(found, 0.03) == "slower" for found in levels)
    assert alarms / 400 < 0.02


@pytest.mark.parametrize(
    ("changed", "differing"),
    [
        ({"driver": "580.2"}, "driver: None and 580.2"),
        ({"host": summary(BASELINE)["host"] | {"kernel": "6.2"}}, "machine kernel: 6.1 and 6.2"),
        ({"model": {"path": "/m", "digest": "b" * 64}}, "model: aaaaaaaaaaaaaaaa and bbbbbbbbbbbbbbbb"),
    ],
)
def test_two_machines_or_models_are_not_compared_and_the_field_is_named(
    changed: dict[str, Any], differing: str
) -> None:
    found = against(**changed)
    assert found.verdict == "not comparable" and found.why == [f"other {differing}"] and not found.levels
    assert f"not comparable: other {differing}" in report(found)


def test_another_runtime_load_or_patch_set_is_not_compared() -> None:
    other = bench_spec(tier="no-radix", patches="none")
    found = compare(REFERENCE, record(other, run="x"), RULES)
    assert [what.partition(":")[0] for what in found.why][-2:] == ["other runtime digest", "other patch set"]
    load = {"levels": [2, 8], "input_len": 65, "output_len": 32, "prompts_per_concurrency": 8, "min_duration_s": 0.1}
    spec = bench_spec(tier="no-radix", profiles={"smoke": load})
    made = summary(spec)
    for level in made["levels"]:
        for run in level["repeats"]:
            run["facts"] |= {"input_lens": [65, 65]}
    found = compare(REFERENCE, record(spec, run="x", levels=made["levels"]), RULES)
    assert found.why[0] == "other load: input_len 64 and 65" and found.verdict == "not comparable"


def test_noise_is_no_condition() -> None:
    load = BASELINE.profile.model_dump() | {"noise": 0.5}
    spec = bench_spec(tier="no-radix", profiles={"smoke": load})
    found = compare(REFERENCE, record(spec, {2: [120.0, 121.0, 122.0], 8: [800.0, 801.0, 802.0]}), RULES)
    assert found.verdict == "same" and found.noise == 0.5


def test_a_rejected_level_is_never_compared() -> None:
    made = summary(OTHER)
    made["levels"][1]["repeats"][1]["exit_code"] = 1
    found = against(levels=made["levels"])
    assert [level.concurrency for level in found.levels] == [2] and not found.passes
    assert found.verdict == "not comparable"
    assert found.why == ["the candidate's level of concurrency 8 is not accepted"]
    backwards = compare(record(OTHER, run="x", levels=made["levels"]), REFERENCE, RULES)
    assert backwards.why == ["the reference's level of concurrency 8 is not accepted"]
    (why,) = against(processes_after=[9]).why
    assert why.startswith("the candidate run breaks same-server: ")


def answering(tokens: list[int]) -> dict[str, Any]:
    made = summary(OTHER)
    answers = [{"text": "x", "tokens": tokens} for _ in made["before"]["answers"]]
    probe = {"answers": answers, "other_ways": {}}
    return {"before": probe | {"again": answers, "asked_otherwise": 0}, "after": probe}


def test_a_fast_tier_that_answers_differently_is_seen() -> None:
    fast = {2: [400.0, 401.0, 402.0], 8: [1600.0, 1601.0, 1602.0]}
    wrong = against(fast, **answering([99] * 32))
    assert wrong.verdict == "different answers" and wrong.agreement == 0 and not wrong.passes
    assert "answers agree with the reference's, from their beginning, for 0% of their tokens" in report(wrong)
    silent = REFERENCE.model_copy(update={"answers": []})
    unknown = compare(silent, record(OTHER, run="x"), RULES)
    assert unknown.verdict == "not comparable" and unknown.why == ["no answers are on record for the same prompts"]


def test_numerics_may_leave_the_reference_late() -> None:
    made = summary(OTHER)
    answers = [dict(a, tokens=[*a["tokens"][:24], *[999] * 8]) for a in made["before"]["answers"]]
    probe = {"answers": answers, "other_ways": {}}
    found = against(before=probe | {"again": answers, "asked_otherwise": 0}, after=probe)
    assert found.agreement == 0.75 and found.verdict == "same"
    assert agreement(REFERENCE, REFERENCE) == 1.0


def test_the_reference_is_the_latest_run_that_can_be_compared() -> None:
    other = record(OTHER, run="r-other")
    old = record(BASELINE, run="old", started_at="2026-01-01T00:00:00Z")
    newest = record(BASELINE, run="newest", started_at="2026-12-31T00:00:00Z", driver="other")
    rejected = record(BASELINE, run="rejected", started_at="2026-12-30T00:00:00Z", processes_after=[7])
    assert reference_for(other, [old, REFERENCE, newest, rejected, other], "baseline") == REFERENCE
    assert reference_for(other, [newest, other], "baseline") == newest, "then the comparison says what differs"
    assert reference_for(other, [record(bench_spec("elsewhere"), run="x")], "baseline") is None
    made = summary(BASELINE, started_at="2026-12-29T00:00:00Z")
    made["levels"][1]["repeats"][1]["exit_code"] = 1
    partly = record(BASELINE, run="partly", levels=made["levels"], started_at=made["started_at"])
    assert reference_for(other, [old, REFERENCE, partly, other], "baseline") == REFERENCE, "the whole one, though older"
    assert reference_for(other, [partly, other], "baseline") == partly


def test_eight_gpus_with_another_power_limit_are_told_once() -> None:
    gpu = {"index": 0, "name": "X", "memory_mib": 1.0, "power_limit_w": 600.0, "max_sm_clock_mhz": 2430.0,
           "sm_clock_mhz": None, "power_w": None, "temperature_c": None}  # fmt: skip
    one = against(gpus=[gpu | {"index": n} for n in range(8)]).candidate
    other = record(OTHER, run="y", gpus=[gpu | {"index": n, "power_limit_w": 450.0} for n in range(8)])
    assert compare(one, other, RULES).why == ["other gpus: power_limit_w 600.0 and 450.0"]
    assert compare(REFERENCE, other, RULES).why == ["other gpus: 0 and 8"]


SLOW = {2: [100.0, 101.0, 102.0], 8: [400.0, 405.0, 402.0]}


def test_the_gate_lets_a_tier_through_that_is_no_slower() -> None:
    spec = bench_spec(tier="no-radix", gate="baseline")
    assert tier_gate(spec, [REFERENCE, record(spec, run="r-other")]).passed
    slow = tier_gate(spec, [REFERENCE, record(spec, SLOW, run="r-other")])
    assert not slow.passed and slow.why == "tier no-radix is slower than baseline at concurrency 2, 8"
    assert "verdict: slower" in slow.text


def test_the_gate_is_closed_where_there_is_nothing_to_compare() -> None:
    spec = bench_spec(tier="no-radix", gate="baseline")
    assert tier_gate(spec, []).why == "tier no-radix has no accepted result by profile smoke to compare"
    alone = tier_gate(spec, [record(spec, run="r-other")])
    assert (
        "tier baseline has no result on @local to compare with; deploy it once first: --data tier=baseline" in alone.why
    )
    apart = tier_gate(spec, [REFERENCE, record(spec, run="r-other", driver="x")])
    assert apart.why == "tier no-radix cannot be compared with baseline: other driver: None and x"
    wrong = tier_gate(spec, [REFERENCE, record(spec, run="r-other", **answering([99] * 32))])
    assert wrong.why == "tier no-radix answers differently from baseline"
    accepted = record(spec, run="r-other")
    rejected = record(spec, run="r-other", processes_after=[3], started_at="2026-12-01T00:00:00Z")
    assert "has no accepted result" in tier_gate(spec, [REFERENCE, accepted, rejected]).why, "the latest counts"


def test_the_gate_says_what_it_could_not_have_seen() -> None:
    spec = bench_spec(tier="no-radix", gate="baseline")
    noisy = tier_gate(spec, [REFERENCE, record(spec, {2: [60.0, 200.0, 100.0], 8: [800.0, 810.0, 790.0]}, run="x")])
    assert noisy.passed and "could have seen only a slowdown of" in noisy.text


def test_a_tier_is_not_held_against_itself() -> None:
    assert tier_gate(bench_spec(gate="baseline"), []).passed


def test_only_what_a_canary_has_passed_goes_further() -> None:
    spec, canary = bench_spec("gpu-02"), bench_spec("gpu-01")
    passed = record(canary, run="r-canary")
    assert canary_gate(spec, ["gpu-01"], [passed], ()).passed
    assert canary_gate(spec, ["gpu-01"], [], ["gpu-01"]).passed, "the canary of this run tells of its result itself"
    closed = canary_gate(spec, ["gpu-01"], [], ())
    assert not closed.passed and "no canary host (gpu-01) has a passing result for spec" in closed.why
    assert "--limit canary" in closed.why and "--data canary_gate=off" in closed.why
    elsewhere = record(bench_spec("gpu-03"), run="x")
    other_spec = record(bench_spec("gpu-01", tier="no-radix"), run="y")
    rejected = record(canary, run="z", processes_after=[5])
    assert not canary_gate(spec, ["gpu-01"], [elsewhere, other_spec, rejected], ()).passed
    later = record(canary, run="later", processes_after=[5], started_at="2026-12-01T00:00:00Z")
    assert not canary_gate(spec, ["gpu-01"], [passed, later], ()).passed, "the latest of a canary counts"
    assert canary_gate(spec, ["gpu-00", "gpu-01"], [passed], ()).passed, "one canary is enough"


def test_a_canary_that_did_not_pass_the_tier_gate_has_not_passed() -> None:
    spec, canary = (bench_spec(host, tier="no-radix", gate="baseline") for host in ("gpu-02", "gpu-01"))
    base = record(bench_spec("gpu-01"), run="r-base")
    assert canary_gate(spec, ["gpu-01"], [base, record(canary, run="x")], ()).passed
    slow = canary_gate(spec, ["gpu-01"], [base, record(canary, SLOW, run="x")], ["gpu-01"])
    assert not slow.passed and "on a canary, tier no-radix is slower than baseline" in slow.why
    assert not canary_gate(spec, ["gpu-01"], [], ["gpu-01"]).passed, "without its record nobody knows"


def written(folder: Path, *records: Record) -> Path:
    for each in records:
        path = folder / folder_name(each.inventory_host) / f"{each.run}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump(each))
    return folder


def test_compare_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path, REFERENCE, record(OTHER, SLOW, run="r-other"))
    results = ["--results", str(folder)]
    assert main(["compare", "no-radix", *results]) == 2
    assert "@local: no-radix against baseline (r-other against r-base)" in capsys.readouterr().out
    assert main(["compare", "baseline", "no-radix", "--json", *results]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "faster"
    paths = [str(folder / "local" / f"{run}.json") for run in ("r-base", "r-base")]
    assert main(["compare", *paths]) == 0
    assert main(["compare", "no-radx", *results]) == 1
    assert 'no run of a tier "no-radx" is on record; did you mean "no-radix"?' in capsys.readouterr().err
    assert main(["compare", "baseline", *results]) == 1
    assert "tier baseline has no other run on @local" in capsys.readouterr().err
    written(tmp_path, record(bench_spec("gpu-01"), run="r-gpu"))
    (folder / "local" / "old.json").write_text("{}")
    assert main(["compare", "baseline", *results]) == 1
    assert "was run on several hosts, so say which: --host @local or --host gpu-01" in capsys.readouterr().err
