"""Acceptance: an honest run is a result; each way a run can lie is named by its rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gpuwright.hostdata import Smoke
from gpuwright.results import make_record, table
from gpuwright.smoke import PROMPTS, Level, judge, judge_run, levels
from tests.make import lab_spec

LEVEL = Level(concurrency=2, prompts=4, input_len=64, output_len=8, seed=1)


def raw(**changed: Any) -> dict[str, Any]:
    """bench_serving's record of an honest run, as far as it is read."""
    honest = {
        "completed": 4, "total_output_tokens": 32, "total_output_tokens_retokenized": 31, "duration": 0.5,
        "ttfts": [0.02, 0.03, 0.02, 0.05], "output_lens": [8, 8, 8, 8], "errors": ["", "", "", ""],
        "generated_texts": ["abc", "def", "ghi", "jkl"], "request_throughput": 8.0, "output_throughput": 64.0,
        "p99_ttft_ms": 50.0, "median_tpot_ms": 2.0, "p99_itl_ms": 3.0, "concurrency": 1.9,
    }  # fmt: skip
    return honest | changed


def bench(*records: dict[str, Any], **changed: Any) -> dict[str, Any]:
    lines = [json.dumps(record) for record in records or (raw(),)]
    return {"lines": lines, "exit_code": 0, "timed_out": False, "seconds": 1.0, "raw": "/r/c2.jsonl"} | changed


def test_an_honest_run_is_accepted_with_its_figures() -> None:
    judged = judge(LEVEL, bench(), 20000)
    assert judged.accepted and not judged.queued
    assert judged.figures["output_throughput"] == 64.0 and judged.figures["ttft_median_ms"] == 25.0


@pytest.mark.parametrize(
    ("run", "rule"),
    [
        (bench(raw(completed=3)), "completed: 3 of 4 requests completed"),
        (bench(raw(errors=["", "boom", "", ""])), "no-errors: 1 requests failed, the first with 'boom'"),
        (bench(raw(ttfts=[0.0, 0.02, 0.02, 0.02])), "ttft: the lowest time to first token is 0.00 ms"),
        (bench(raw(ttfts=[])), "ttft: "),
        (bench(raw(total_output_tokens_retokenized=0)), "retokenised: 0 of 32 tokens found again in the text"),
        (bench(raw(total_output_tokens_retokenized=40)), "retokenised: 40 of 32"),
        (bench(raw(total_output_tokens=0, total_output_tokens_retokenized=0)), "retokenised: 0 of 0"),
        (bench(raw(output_lens=[8, 8, 7, 8])), "lengths: 1 answers are not 8 tokens long"),
        (bench(raw(generated_texts=["!" * 40, "b", "c", "d"])), "no-filler: 1 answers are filler"),
        (bench(raw(generated_texts=["nan nan nan nan", "b", "c", "d"])), "no-filler: 1 answers are filler"),
        (bench(raw(), raw()), "one-record: 2 lines in the output file"),
        (bench(lines=[]), "one-record: 0 lines in the output file"),
        (bench(lines=["not json"]), "readable: the record lacks"),
        (bench({"completed": 4}), "readable: the record lacks 'total_output_tokens'"),
        (bench(exit_code=1), "exit-code: bench_serving ended with exit code 1"),
        (bench(timed_out=True), "in-time: stopped after 1.0 s"),
    ],
)
def test_each_lie_is_named_and_has_no_figures(run: dict[str, Any], rule: str) -> None:
    judged = judge(LEVEL, run, 20000)
    assert not judged.accepted and not judged.figures
    assert any(broken.startswith(rule) for broken in judged.broken), judged.broken


def test_more_than_the_server_holds_is_labelled_queued() -> None:
    assert judge(LEVEL, bench(), 2 * (64 + 8) - 1).queued
    assert not judge(LEVEL, bench(), 2 * (64 + 8)).queued
    assert not judge(LEVEL, bench(), None).queued


def summary(**changed: Any) -> dict[str, Any]:
    answers = [{"text": f"answer {n}"} for n in range(len(PROMPTS))]
    return {
        "generated_before": answers, "generated_after": answers, "processes_before": [1, 2], "processes_after": [1, 2],
        "levels": [], "max_total_num_tokens": 20000, "host": {}, "started_at": "t", "seconds": 3,
    } | changed  # fmt: skip


OTHER = [{"text": "other"} for _ in PROMPTS]


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"generated_before": OTHER}, "deterministic: greedy answers differ before and after the load"),
        ({"generated_after": [{"error": "HTTP 500"}, *OTHER[1:]]}, "generates-after: "),
        ({"generated_before": [{"text": " "}, *OTHER[1:]]}, "generates-before: "),
        ({"generated_after": [{"text": "!" * 32}, *OTHER[1:]]}, "generates-after: "),
        ({"processes_after": [1, 3]}, "same-server: "),
        ({"processes_before": [], "processes_after": []}, "same-server: "),
    ],
)
def test_the_run_as_a_whole_is_judged(changed: dict[str, Any], rule: str) -> None:
    assert judge_run(summary()) == []
    assert [broken for broken in judge_run(summary(**changed)) if broken.startswith(rule)]


def test_levels_come_from_data() -> None:
    found = levels(Smoke(levels=[10, 1], prompts_per_concurrency=4, min_prompts=8, input_len=5, output_len=6))
    assert [(level.concurrency, level.prompts) for level in found] == [(1, 8), (10, 40)]
    argv = found[1].argv("127.0.0.1", 31000, "/m")
    pairs = {
        "--max-concurrency": "10", "--num-prompts": "40", "--random-input-len": "5", "--random-output-len": "6",
        "--random-range-ratio": "1.0", "--warmup-requests": "10",
    }  # fmt: skip
    assert {name: argv[argv.index(name) + 1] for name in pairs} == pairs


def record_of(edit: Callable[[list[dict[str, Any]]], None]) -> tuple[dict[str, Any], str]:
    spec = lab_spec(smoke_benchmark={"levels": [2], "prompts_per_concurrency": 2, "min_prompts": 4, "output_len": 8})
    runs = [bench()]
    edit(runs)
    record = make_record(spec, summary(levels=runs), "run-1", "abc")
    return record, table(record)


def test_a_record_carries_the_three_digests_and_the_verdict() -> None:
    record, text = record_of(lambda runs: None)
    spec = lab_spec()
    assert record["verdict"] == "accepted"
    assert record["runtime_digest"] == spec.runtime_digest and record["patch_set_digest"] == spec.patch_set_digest
    assert len(record["spec_digest"]) == 64 and record["packages"]["torch"] == "2.9.1"
    assert "64.0" in text and "verdict: accepted" in text


def test_a_rejected_level_shows_no_figure_and_says_why() -> None:
    record, text = record_of(lambda runs: runs[0].update(bench(raw(completed=3))))
    assert record["verdict"] == "rejected" and record["levels"][0]["figures"] == {}
    assert "REJECTED" in text and "64.0" not in text
    assert "concurrency 2 breaks completed: 3 of 4 requests completed" in text
