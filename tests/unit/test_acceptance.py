"""Acceptance: an honest file is a result; each way a file can lie is named by its rule.

tests/unit/raw/ holds files that sglang.bench_serving 0.5.9 wrote against the lab's server: 48 requests, 64 tokens in,
32 out, concurrency 4. `aborted`: POST /abort_request in the middle; `not-streamed`: --disable-stream; `varied-lengths`:
--random-range-ratio 0.0; `completions`: --backend sglang-oai. bench_serving ended with exit code 0 for every one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwright.__main__ import main
from gpuwright.acceptance import FACTS, Acceptance, Scope, acceptance_errors, broken, judge_file
from gpuwright.catalogue import CATALOG
from gpuwright.node_module import node_module
from gpuwright.yamlfile import Origin, load_yaml
from tests.make import catalogue

RAW = Path(__file__).parent / "raw"
HONEST = (RAW / "honest-c4.jsonl").read_text()
ASKED = {"concurrency": 4, "prompts": 48, "input_len": 64, "output_len": 32}
RULES = catalogue().acceptance.rules
raw_facts: Callable[[str], dict[str, Any]] = node_module("raw_facts").raw_facts


def judge(text: str, **asked: int) -> list[str]:
    return judge_file(RULES, text, ASKED | asked, 0.3)


def damaged(edit: Callable[[dict[str, Any]], None]) -> str:
    """The honest file after `edit`."""
    raw = json.loads(HONEST)
    edit(raw)
    return json.dumps(raw)


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.update(values)


def at(name: str, index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(raw: dict[str, Any]) -> None:
        raw[name][index] = value

    return edit


def all_of(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.update({name: [value] * 48})


@pytest.mark.parametrize("name", ["honest-c4", "completions"])
def test_an_honest_file_is_accepted(name: str) -> None:
    text = (RAW / f"{name}.jsonl").read_text()
    assert judge(text) == []
    assert judge_file(RULES, text, {}, 0.3) == [], "what was asked is in the file too"


def test_the_throughput_is_what_bench_serving_printed_for_the_file() -> None:
    printed = dict(re.findall(r"^(.+?):\s+([0-9.]+)\s*$", (RAW / "honest-c4.log").read_text(), re.M))
    figures = raw_facts(HONEST)["figures"]
    for ours, theirs in (
        ("output_tok_s", "Output token throughput (tok/s)"),
        ("requests_s", "Request throughput (req/s)"),
        ("ttft_p50_ms", "Median TTFT (ms)"),
        ("ttft_p99_ms", "P99 TTFT (ms)"),
        ("tpot_p50_ms", "Median TPOT (ms)"),
        ("mean_concurrency", "Concurrency"),
        ("duration_s", "Benchmark duration (s)"),
    ):
        assert f"{figures[ours]:.2f}" == printed[theirs], ours


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("aborted", ["output-lengths: answers are 2 to 32 tokens long, asked for 32"]),
        (
            "not-streamed",
            [
                "streamed: 48 answers did not arrive token by token",
                "consistent: the summary does not follow from its own requests (itl_p99_ms, tpot_mean_ms, tpot_p50_ms, "
                "tpot_p99_ms)",
            ],
        ),
        (
            "varied-lengths",
            [
                "output-lengths: answers are 1 to 32 tokens long, asked for 32",
                "input-lengths: prompts are 3 to 64 tokens long, asked for 64",
            ],
        ),
    ],
)
def test_files_that_bench_serving_called_a_success(name: str, rules: list[str]) -> None:
    assert judge((RAW / f"{name}.jsonl").read_text()) == rules


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (damaged(at("ttfts", 3, 0.0)), "ttft: the lowest time to first token is 0.00 ms"),
        (damaged(all_of("ttfts", 0.0)), "ttft: "),
        (damaged(put(completed=47)), "completed: 47 of 48 requests completed"),
        (
            damaged(at("errors", 0, "Traceback\nValueError: boom")),
            'no-errors: 1 requests failed, the first with "Value',
        ),
        (damaged(at("errors", 0, " \n")), 'no-errors: 1 requests failed, the first with ""'),
        (damaged(at("output_lens", 5, 7)), "output-lengths: answers are 7 to 32 tokens long, asked for 32"),
        (damaged(at("input_lens", 5, 7)), "input-lengths: prompts are 7 to 64 tokens long, asked for 64"),
        (HONEST + HONEST, "one-record: the file holds 2 records"),
        ("", "one-record: the file holds 0 records"),
        (HONEST[:5000], "readable: it is not JSON"),
        ("[]", "readable: it is no JSON object"),
        (damaged(lambda raw: raw.pop("output_throughput")), "readable: it has no number for output_throughput"),
        (damaged(lambda raw: raw.pop("ttfts")), "readable: it has no ttfts: run bench_serving with --output-details"),
        (damaged(lambda raw: raw["ttfts"].pop()), "readable: its lists are not of one length: 48 input_lens"),
        (damaged(put(ttfts=["x"] * 48)), "readable: its lists hold what they should not"),
        (
            damaged(at("generated_texts", 0, '{"error": "no"}')),
            "no-error-text: 1 answers are error messages, such as ",
        ),
        (damaged(at("generated_texts", 0, "502 Bad Gateway")), "no-error-text: "),
        (damaged(at("itls", 0, [-0.5] * 31)), "clock: 31 intervals are negative or no number"),
        (damaged(at("ttfts", 0, -1.0)), "clock: 1 intervals are negative"),
        (damaged(put(duration=-1.0)), "clock: 1 intervals are negative or no number, 48 requests took longer than the"),
        (
            damaged(put(duration=0)),
            "clock: 1 intervals are negative or no number, 48 requests took longer than the run",
        ),
        (damaged(at("ttfts", 0, math.nan)), "clock: 1 intervals are negative or no number"),
        (
            damaged(at("ttfts", 0, 99.0)),
            "clock: 0 intervals are negative or no number, 1 requests took longer than the",
        ),
        (damaged(at("generated_texts", 0, "nan, nan, NaN, nan")), 'no-filler: 1 answers are filler, such as "nan'),
        (damaged(lambda raw: raw.update(generated_texts=["", "x"] * 24)), "answered: 24 of 48 answers are empty"),
        (damaged(at("generated_texts", 0, "!" * 32)), "no-filler: 1 answers are filler"),
        (damaged(all_of("generated_texts", "same")), "varied: all 48 answers to different random prompts"),
        (damaged(put(total_output_tokens_retokenized=0)), "retokenised: 0 of 1536 tokens are found again in the text"),
        (damaged(put(total_output_tokens_retokenized=9999)), "retokenised: 9999 of 1536"),
        (damaged(put(total_output_tokens=0, output_throughput=0.0)), "retokenised: "),
        (
            damaged(put(output_throughput=3267.0)),
            "consistent: the summary does not follow from its own requests (output_",
        ),
        (
            damaged(put(median_ttft_ms=0.1)),
            "consistent: the summary does not follow from its own requests (ttft_p50_ms)",
        ),
        (damaged(put(mean_ttft_ms=-1)), "consistent: the summary does not follow from its own requests (ttft_mean_ms)"),
        (
            damaged(put(mean_tpot_ms=math.nan)),
            "consistent: the summary does not follow from its own requests (tpot_mean",
        ),
        (
            damaged(put(total_throughput=9e9)),
            "consistent: the summary does not follow from its own requests (total_tok_s)",
        ),
        (damaged(put(p99_ttft_ms=0.1)), "consistent: the summary does not follow from its own requests (ttft_p99_ms)"),
        (
            damaged(put(concurrency=400.0)),
            "consistent: the summary does not follow from its own requests (mean_concurren",
        ),
        (damaged(put(p99_itl_ms=0)), "consistent: the summary does not follow from its own requests (itl_p99_ms)"),
        (damaged(all_of("itls", [1e-9] * 31)), "concurrency: the mean concurrency was 0."),
        (damaged(put(duration=0.2)), "duration: it lasted 0.20 s"),
        (damaged(put(max_concurrency=1)), "as-asked: the record is of concurrency 1"),
    ],
)
def test_each_damage_is_named(text: str, rule: str) -> None:
    assert any(found.startswith(rule) for found in judge(text)), judge(text)


@pytest.mark.parametrize(
    "text", ["Wow!!!!!!!!!!!!!!!! ok, that is a long answer", "<!DOCTYPE html><p>", "nan is not a number"]
)
def test_an_answer_may_shout(text: str) -> None:
    assert judge(damaged(at("generated_texts", 0, text))) == []


@pytest.mark.parametrize(
    "text", ["a long and sane beginning of an answer, and then " + "!" * 20, "so it goes: nan nan nan nan"]
)
def test_an_answer_that_ends_in_filler_is_filler(text: str) -> None:
    (found,) = judge(damaged(at("generated_texts", 0, text)))
    assert found.startswith("no-filler: 1 answers are filler")


def silent(raw: dict[str, Any], count: int) -> None:
    """The first answers of special tokens alone: no text, and so no times."""
    for number in range(count):
        raw["generated_texts"][number], raw["ttfts"][number], raw["itls"][number] = "", 0.0, []


def test_of_a_hundred_answers_one_may_be_of_special_tokens_alone() -> None:
    facts = raw_facts(damaged(lambda raw: silent(raw, 1)))
    assert (facts["empty_texts"], facts["unstreamed"]) == (1, 0) and facts["min_ttft_ms"] > 0
    assert any(each.startswith("answered: 1 of 48") for each in judge(damaged(lambda raw: silent(raw, 1))))
    found = judge(damaged(lambda raw: silent(raw, 48)))
    assert any(each.startswith("answered: 48 of 48") for each in found)


def test_short_answers_may_end_a_moment_after_their_last_token() -> None:
    def short(raw: dict[str, Any]) -> None:
        raw.update(itls=[[0.004]] * 48, output_lens=[2] * 48, random_output_len=2, total_output_tokens=96)
        raw.update(total_output_tokens_retokenized=96, output_throughput=96 / raw["duration"])
        raw.update(
            total_throughput=(96 + 64 * 48) / raw["duration"], mean_tpot_ms=4.7, median_tpot_ms=4.7, p99_tpot_ms=4.9
        )

    assert "tpot_p50_ms" not in raw_facts(damaged(short))["untrue"]


def test_a_file_without_a_limit_of_concurrency_can_be_judged() -> None:
    assert judge_file(RULES, damaged(put(max_concurrency=None)), {}, 0.3) == []


def test_a_message_is_one_line_whatever_the_model_said() -> None:
    (found,) = judge(damaged(at("generated_texts", 0, '{"error": "a\nb\x1b[31m"}')))
    assert "\n" not in found and "\x1b" not in found


def test_more_requests_than_were_sent_is_not_a_success() -> None:
    assert judge(HONEST, prompts=49) == ["completed: 48 of 49 requests completed"]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(HONEST)), st.binary(max_size=8))
def test_no_damage_raises(position: int, junk: bytes) -> None:
    """Cut off anywhere, or with anything put in: judged, never an exception."""
    piece = junk.decode("utf-8", "replace")
    for text in (HONEST[:position], HONEST[:position] + piece + HONEST[position:]):
        judge(text)


json_values = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=4)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(json.loads(HONEST).keys())), json_values)
def test_no_value_raises(key: str, value: Any) -> None:
    judge(damaged(put(**{key: value})))


def test_every_rule_about_a_repeat_uses_facts_that_a_file_gives() -> None:
    of_the_run = {"timed_out", "seconds", "exit_code", "client_cpu_s", "flushed", "queued", "min_duration_s"}
    asked = {"prompts", "concurrency", "input_len", "output_len"}
    assert set(raw_facts(HONEST)) | of_the_run | asked == set(FACTS["repeat"])


RUN = {
    "unanswered": [], "filler_answers": [], "changed_answers": [], "answers_kept": 1.0, "disagreeing": [],
    "server_version": "0.5.9", "engine_version": "0.5.9", "processes_before": [1, 2],
    "processes_after": [1, 2], "xids": [], "max_total_num_tokens": 20000, "gpus_stated": 0, "gpus_seen": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({}, None),
        ({"xids": None}, None),
        ({"unanswered": ["before: HTTP 500"]}, "generates: before: HTTP 500"),
        ({"filler_answers": ["x"]}, "no-filler-answers: the model computes NaN or repeats itself: x"),
        (
            {"changed_answers": ["'1 + 1 ='"]},
            "deterministic: greedy answers differ before and after the load: '1 + 1 ='",
        ),
        ({"disagreeing": ["x"]}, "interfaces-agree: x"),
        ({"answers_kept": 0.4}, "answers-hold: after the load, answers agree with those before it for 40 %"),
        ({"server_version": "0.5.8"}, "same-engine: the server says it is 0.5.8, and the stack is 0.5.9"),
        ({"processes_after": [1, 3]}, "same-server: the server's processes were 1, 2 before and 1, 3 after"),
        ({"processes_after": [1, 2, 3]}, None),
        ({"processes_before": [], "processes_after": []}, "same-server: the server's processes were none before"),
        ({"xids": ["NVRM: Xid 79"]}, "no-new-xid: the kernel log has new GPU errors: NVRM: Xid 79"),
        ({"max_total_num_tokens": None}, "capacity-known: "),
        ({"gpus_stated": 8, "gpus_seen": 7}, "gpus-as-stated: 8 GPUs are stated, and 7 are there"),
    ],
)
def test_the_run_as_a_whole(changed: dict[str, Any], rule: str | None) -> None:
    found = broken(RULES, "run", RUN | changed)
    assert found == [] if rule is None else [each for each in found if each.startswith(rule)]


def test_a_rule_that_cannot_be_judged_is_broken() -> None:
    (rule,) = (rule for rule in RULES if rule.id == "repeats")
    assert broken([rule], "level", {"concurrency": 1}) == ["repeats: cannot be judged (kept >= 3 and accepted == kept)"]


def test_every_rule_is_seen_broken_and_seen_kept() -> None:
    """Each by facts of its scope: a rule that nothing breaks, or that nothing keeps, says nothing."""
    honest = raw_facts(HONEST)
    run = {"timed_out": False, "exit_code": 0, "seconds": 2.0, "client_cpu_s": 0.1, "flushed": True, "queued": False}
    kept: dict[Scope, dict[str, Any]] = {
        "repeat": {**honest, **run, **ASKED, "min_duration_s": 0.3},
        "level": {"concurrency": 4, "kept": 3, "accepted": 3, "warm_up": []},
        "run": RUN,
    }
    breaks: dict[str, dict[str, Any]] = {
        "in-time": {"timed_out": True}, "exit-code": {"exit_code": 1}, "one-record": {"lines": 2},
        "readable": {"problem": "x"}, "as-asked": {"told_input_len": 1}, "completed": {"completed": 1},
        "no-errors": {"failed": 1}, "ttft": {"min_ttft_ms": 0}, "streamed": {"unstreamed": 1},
        "clock": {"impossible": 1},
        "answered": {"empty_texts": 40}, "retokenised": {"retokenised": 0}, "output-lengths": {"output_lens": [1, 32]},
        "input-lengths": {"input_lens": [1, 64]}, "consistent": {"untrue": ["x"]}, "duration": {"duration_s": 0.1},
        "concurrency": {"mean_concurrency": 1}, "client-keeps-up": {"client_cpu_s": 9},
        "flushed": {"flushed": False},
        "no-filler": {"filler": 1}, "no-error-text": {"error_texts": 1}, "varied": {"distinct_texts": 1},
        "repeats": {"accepted": 2}, "warm-up": {"warm_up": ["x"]}, "generates": {"unanswered": ["x"]},
        "no-filler-answers": {"filler_answers": ["x"]}, "deterministic": {"changed_answers": ["x"]},
        "answers-hold": {"answers_kept": 0.1}, "interfaces-agree": {"disagreeing": ["x"]},
        "same-server": {"processes_after": []}, "same-engine": {"server_version": "x"}, "no-new-xid": {"xids": ["x"]},
        "capacity-known": {"max_total_num_tokens": None}, "gpus-as-stated": {"gpus_stated": 8},
    }  # fmt: skip
    assert set(breaks) == {rule.id for rule in RULES}
    for rule in RULES:
        assert broken([rule], rule.of, kept[rule.of]) == [], rule.id
        (found,) = broken([rule], rule.of, kept[rule.of] | breaks[rule.id])
        assert found.startswith(f"{rule.id}: ") and "cannot be judged" not in found and "{{" not in found


def test_a_queue_may_drain_for_long() -> None:
    facts = {"queued": True, "mean_concurrency": 2.2, "concurrency": 4}
    (rule,) = (rule for rule in RULES if rule.id == "concurrency")
    assert broken([rule], "repeat", facts) == []
    assert broken([rule], "repeat", facts | {"queued": False}) and broken(
        [rule], "repeat", facts | {"mean_concurrency": 1.9}
    )


def test_a_bad_rule_is_named_by_file_line_and_key() -> None:
    acceptance, _ = load_yaml(CATALOG / "acceptance.yaml", Acceptance)
    rule = acceptance.rules[0]
    bad = acceptance.model_copy(
        update={
            "rules": [
                rule.model_copy(update={"require": "not timed_uot"}),
                rule.model_copy(update={"id": "x", "require": "1 +"}),
                rule.model_copy(update={"id": "x", "found": "{{ secs }}"}),
            ]
        }
    )
    said = [str(error) for error in acceptance_errors(bad, Origin(CATALOG / "acceptance.yaml", {("rules", 0): 9}))]
    assert said[0] == (
        'catalog/acceptance.yaml:9: rules[0].require: there is no "timed_uot"\n    did you mean "timed_out"?'
    )
    assert "rules[1].require: is not an expression" in said[1]
    assert '"x" is used twice' in said[2] and 'there is no "secs"' in said[3]


def test_judge_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    honest = ["judge", str(RAW / "honest-c4.jsonl"), "--min-duration", "0.3"]
    assert main(honest) == 0
    assert capsys.readouterr().out == f"{RAW / 'honest-c4.jsonl'}: accepted\n"
    assert main([*honest, "--prompts", "50", "--concurrency", "8", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "rejected" and [rule.partition(":")[0] for rule in said["broken"]] == [
        "as-asked",
        "completed",
        "concurrency",
    ]
    assert main(["judge", str(RAW / "aborted.jsonl"), "--min-duration", "0.3"]) == 2
    assert "  breaks output-lengths: answers are 2 to 32" in capsys.readouterr().out
    assert main(["judge", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl cannot be read: No such file" in capsys.readouterr().err
