"""Records: what a run leaves, judged; its schema; its table; and what a record never holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuwright.errors import GpuwrightError
from gpuwright.hostdata import Profile
from gpuwright.record import SCHEMA, dump, make_record, read_record, read_records, schema, table
from gpuwright.smoke import levels, seeds
from operations.smoke import append
from tests.make import bench_spec, gpu_spec, record, repeat, summary

SPEC = bench_spec()


def test_levels_come_from_the_profile() -> None:
    profile = Profile(levels=[10, 1], prompts_per_concurrency=4, min_prompts=8, warmup_per_concurrency=2, input_len=5,
                      output_len=6)  # fmt: skip
    found = levels(profile)
    assert [(level.concurrency, level.prompts, level.warmups) for level in found] == [(1, 8, 2), (10, 40, 20)]
    argv = found[1].argv("127.0.0.1", 31000, "/m", 7)
    pairs = {
        "--max-concurrency": "10", "--num-prompts": "40", "--random-input-len": "5", "--random-output-len": "6",
        "--random-range-ratio": "1.0", "--warmup-requests": "20", "--seed": "7",
    }  # fmt: skip
    assert {name: argv[argv.index(name) + 1] for name in pairs} == pairs
    assert {"--flush-cache", "--output-details", "--tokenize-prompt"} <= set(argv)


def test_repeats_have_seeds_of_their_own_and_at_least_three_are_kept() -> None:
    profile = Profile(levels=[1, 2, 10, 11], input_len=5, output_len=6, seed=5)
    found = [seed for level in levels(profile) for seed in seeds(profile, level)]
    assert len(found) == 4 * 4 and len(set(found)) == len(found)
    with pytest.raises(ValueError, match="greater than or equal to 3"):
        Profile(levels=[1], input_len=5, output_len=6, repeats=2)


def test_an_honest_run_is_accepted_with_medians_and_spreads_of_the_kept_repeats() -> None:
    found = record(SPEC)
    assert found.verdict == "accepted" and found.broken == []
    first = found.levels[0]
    assert first.median is not None and first.median.output_tok_s == 201.0
    assert first.spread["output_tok_s"] == (200.0, 202.0)
    assert [run.discarded for run in first.repeats] == [True, False, False, False]
    assert [figures.output_tok_s for figures in first.kept] == [200.0, 202.0, 201.0], "the warm-up's 1.0 is not in it"


def test_a_record_carries_the_digests_and_what_ran() -> None:
    found = record(SPEC)
    assert (found.spec_digest, found.runtime_digest) == (SPEC.spec_digest, SPEC.runtime_digest)
    assert (found.patch_set_digest, found.benchmark_digest) == (SPEC.patch_set_digest, SPEC.benchmark_digest)
    other = make_record(SPEC, summary(SPEC), "r", "abc", {"torch": "9.9"})
    assert found.packages["torch"] == "2.9.1" and other.packages == {"torch": "9.9"}, "as found, not as locked"
    assert "--device cpu" in found.argv
    assert found.gpu_count == 0 and found.reference == "baseline" and found.engine == "sglang==0.5.9"


def rejected_repeat(**facts: Any) -> dict[str, Any]:
    """A summary in which the second repeat of the first level is not honest."""
    made = summary(SPEC)
    level = levels(SPEC.profile)[0]
    made["levels"][0]["repeats"][2] = repeat(level, 2, 200.0, **facts)
    return {"levels": made["levels"]}


def test_one_rejected_repeat_rejects_its_level_which_has_no_figure_and_says_why() -> None:
    found = record(SPEC, **rejected_repeat(completed=15))
    level = found.levels[0]
    assert found.verdict == "rejected" and not level.accepted and level.median is None and level.spread == {}
    assert level.broken == ["repeats: 2 of 3 repeats are accepted, and at least 3 must be"]
    assert level.repeats[2].broken == ["completed: 15 of 16 requests completed"] and level.repeats[2].figures is None
    assert found.level(2) is None and found.level(8) is not None, "the other level counts"
    text = table(found)
    assert "REJECTED" in text and "201.0" not in text and "repeat 2 breaks completed: 15 of 16" in text


def test_a_repeat_that_hung_or_crashed() -> None:
    made = summary(SPEC)
    runs = made["levels"][0]["repeats"]
    runs[1] |= {"timed_out": True, "exit_code": -9, "facts": {"lines": 0, "problem": ""}}
    runs[2] |= {"exit_code": 1, "facts": {"lines": 0, "problem": ""}}
    found = record(SPEC, levels=made["levels"]).levels[0]
    assert found.repeats[1].broken == ["in-time: it was stopped after 2.0 s"]
    assert found.repeats[2].broken == ["exit-code: bench_serving ended with exit code 1"]


def test_of_the_discarded_repeat_only_its_timing_is_excused() -> None:
    made = summary(SPEC)
    made["levels"][0]["repeats"][0]["facts"] |= {"duration_s": 0.01, "mean_concurrency": 0.1}
    assert record(SPEC, levels=made["levels"]).verdict == "accepted"
    made["levels"][0]["repeats"][0]["facts"] |= {"filler": 3, "first_filler": "!!"}
    found = record(SPEC, levels=made["levels"])
    assert found.verdict == "rejected" and found.levels[0].median is None
    assert found.levels[0].broken == ['warm-up: the discarded repeat: no-filler: 3 answers are filler, such as "!!"']


def test_a_run_that_ended_early_has_its_other_levels_rejected() -> None:
    made = summary(SPEC)
    made["levels"] = made["levels"][:1]
    made["levels"][0]["repeats"] = made["levels"][0]["repeats"][:2]
    found = record(SPEC, levels=made["levels"], ended_early="the server's process 7 ended")
    assert [level.broken for level in found.levels] == [
        ["repeats: 1 of 1 repeats are accepted, and at least 3 must be"],
        ["repeats: 0 of 0 repeats are accepted, and at least 3 must be"],
    ]
    assert "ended early: the server's process 7 ended" in table(found)


def test_a_run_whose_server_was_restarted_counts_nowhere() -> None:
    found = record(SPEC, processes_after=[1, 9])
    assert found.verdict == "rejected" and all(level.accepted for level in found.levels)
    assert found.level(2) is None and found.level(8) is None
    assert "the run breaks same-server: the server's processes were 1, 2 before and 1, 9 after" in table(found)


def answers(**changed: Any) -> dict[str, Any]:
    made = summary(SPEC)["after"]
    first = {name: value for name, value in (made["answers"][0] | changed).items() if value is not None}
    return {"answers": [first, *made["answers"][1:]], "other_ways": made["other_ways"]}


@pytest.mark.parametrize(
    ("moment", "probe", "rule"),
    [
        ("after", answers(text=None, error="HTTP 500"), "generates: after the load 'The quick brown fox"),
        ("before", answers(tokens=[]), "generates: before the load"),
        ("after", answers(tokens=[7] * 32), "deterministic: greedy answers differ"),
        ("after", answers(text="!" * 40), "no-filler-answers: the model computes NaN"),
        ("after", answers(tokens=[9]), "deterministic: greedy answers differ"),
        ("after", answers() | {"other_ways": {"completions, streamed": {"error": "x"}}}, "interfaces-agree: after the"),
        (
            "before",
            answers() | {"other_ways": {"completions": {"text": "b"}}},
            "interfaces-agree: before the load, comp",
        ),
    ],
)
def test_what_the_probe_finds_rejects_the_run(moment: str, probe: dict[str, Any], rule: str) -> None:
    found = record(SPEC, **{moment: summary(SPEC)[moment] | probe})
    assert found.verdict == "rejected" and [each for each in found.broken if each.startswith(rule)], found.broken


def test_what_an_idle_server_answers_differently_each_time_is_not_held_against_the_load() -> None:
    made = summary(SPEC)
    before, after = made["before"], made["after"]
    before["again"] = [dict(before["answers"][0], text="other", tokens=[5] * 32), *before["answers"][1:]]
    before["asked_otherwise"] = 1
    after["answers"] = before["again"]
    for moment in (before, after):
        moment["other_ways"] = {"completions": {"text": "answer 1"}}
    found = record(SPEC, before=before, after=after)
    assert found.verdict == "accepted"
    assert found.unobserved == [
        "whether the load changes 1 of 8 answers: the idle server itself gives them differently"
    ]
    wild = [dict(answer, tokens=[9] * 32) for answer in before["answers"]]
    found = record(SPEC, before=before | {"again": wild}, after=after | {"answers": wild})
    assert [rule.partition(":")[0] for rule in found.broken] == ["answers-hold"]


def test_more_than_the_server_holds_at_once_is_labelled_queued() -> None:
    def queued(**changed: Any) -> list[bool]:
        return [level.queued for level in record(SPEC, **changed).levels]

    assert queued() == [False, False]
    assert queued(max_total_num_tokens=8 * (64 + 32) - 1) == [False, True]
    assert queued(max_running_requests=7) == [False, True]
    assert "accepted, queued" in table(record(SPEC, max_running_requests=7))


def test_gpus_are_stated_by_the_ladder_and_must_be_there() -> None:
    spec = gpu_spec(profiles={"smoke": SPEC.profile.model_dump()})
    gpu = {"index": 0, "name": "X", "memory_mib": 1.0, "power_limit_w": 600.0, "max_sm_clock_mhz": 2430.0,
           "sm_clock_mhz": None, "power_w": None, "temperature_c": None}  # fmt: skip
    seven = record(spec, gpus=[gpu | {"index": n} for n in range(7)], driver="580.1")
    assert seven.gpu_count == 8 and seven.broken == ["gpus-as-stated: 8 GPUs are stated, and 7 are there"]
    assert record(spec, gpus=[gpu | {"index": n} for n in range(8)], xids=["NVRM: Xid 79"]).broken == [
        "no-new-xid: the kernel log has new GPU errors: NVRM: Xid 79"
    ]
    unread = record(spec, gpus=[gpu] * 8, xids=None, unobserved=["kernel log: dmesg: not permitted"])
    assert unread.verdict == "accepted" and "not observed: kernel log: dmesg: not permitted" in table(unread)


def test_a_record_validates_against_the_published_schema() -> None:
    assert SCHEMA.read_text() == schema(), "run python -m gpuwright schema"
    jsonschema.validate(json.loads(dump(record(SPEC))), json.loads(schema()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(dump(record(SPEC))) | {"version": 3}, json.loads(schema()))


def test_no_secret_is_in_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-verysecret")
    spec = bench_spec(secrets={"api-key": "env:KEY", "HF_TOKEN": "env:KEY"})
    assert any("sk-verysecret" in file.text for file in spec.secret_files)
    assert "sk-verysecret" not in dump(record(spec)) and "--config" in dump(record(spec))


def test_records_are_read_back_and_what_is_none_is_said(tmp_path: Path) -> None:
    one = record(SPEC)
    folder = tmp_path / "local"
    append(folder / "b.json", dump(record(SPEC, run="run-2", started_at="2026-12-01T00:00:00Z")))
    append(folder / "a.json", dump(one))
    (folder / "old.json").write_text('{"version": 1}')
    (folder / "half.json").write_text(dump(one)[:200])
    found, problems = read_records(tmp_path)
    assert [each.run for each in found] == ["run-1", "run-2"] and found[0] == one
    assert len(problems) == 2 and "half.json is no benchmark record of version 2" in problems[0]
    with pytest.raises(GpuwrightError, match=r"none\.json cannot be read"):
        read_record(tmp_path / "none.json")


def test_records_are_added_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "host" / "run.json"
    append(path, "one")
    append(path, "one")
    with pytest.raises(GpuwrightError, match="records are never replaced"):
        append(path, "two")
    assert path.read_text() == "one" and [each.name for each in path.parent.iterdir()] == ["run.json"]
