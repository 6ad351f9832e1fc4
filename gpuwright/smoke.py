"""The smoke benchmark: what is run, and which of it may be called a result."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuwright.hostdata import Smoke

PROMPTS = ("The quick brown fox jumps over the lazy dog.", "1 + 1 =", "Once upon a time")
PROMPT_TOKENS = 32
RETOKENISED = (0.9, 1.1)
# Text of a model that computes NaN: token 0, which is "!" in most vocabularies, over and over.
FILLER = re.compile(r"!{16,}|(nan[\s,]*){4,}", re.I)


@dataclass(frozen=True)
class Level:
    """One concurrency level: how many prompts, of how many tokens in and out."""

    concurrency: int
    prompts: int
    input_len: int
    output_len: int
    seed: int

    @property
    def about(self) -> str:
        """The level in words."""
        return f"{self.prompts} requests of {self.input_len} tokens in, {self.output_len} out"

    def argv(self, address: str, port: int, model: str) -> list[str]:
        """Arguments of sglang.bench_serving: fixed lengths, one warm-up per concurrent request, an empty cache."""
        return [
            "--backend", "sglang", "--host", address, "--port", str(port), "--model", model, "--tokenizer", model,
            "--dataset-name", "random-ids", "--random-range-ratio", "1.0",
            "--random-input-len", str(self.input_len), "--random-output-len", str(self.output_len),
            "--num-prompts", str(self.prompts), "--max-concurrency", str(self.concurrency),
            "--warmup-requests", str(self.concurrency), "--flush-cache", "--seed", str(self.seed),
            "--disable-tqdm", "--output-details",
        ]  # fmt: skip


def levels(smoke: Smoke) -> list[Level]:
    """The levels of a smoke benchmark, lowest first."""
    return [
        Level(
            concurrency,
            max(smoke.min_prompts, concurrency * smoke.prompts_per_concurrency),
            smoke.input_len,
            smoke.output_len,
            smoke.seed,
        )
        for concurrency in sorted(set(smoke.levels))
    ]


@dataclass(frozen=True)
class Judged:
    """One level after judgement. `broken` names each acceptance rule it breaks, and how; figures only when none.

    `queued`: the server cannot hold that many requests at once, so the level measures its queue.
    Times are in ms, throughput in tokens/s.
    """

    level: Level
    broken: list[str]
    queued: bool = False
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        """Whether this may be called a result."""
        return not self.broken


def judge(level: Level, run: dict[str, Any], max_total_num_tokens: int | None) -> Judged:
    """Judge one run of bench_serving by its raw output, `run["lines"]` (the JSONL it appended to).

    bench_serving counts any HTTP 200 stream as a success of the *requested* length (sglang issue 12389) and ends with
    exit code 0 on partial failure (issue 2805), so its own summary decides nothing here.
    """
    broken: list[str] = []

    def rule(name: str, holds: bool, found: str) -> None:
        if not holds:
            broken.append(f"{name}: {found}")

    rule("in-time", not run["timed_out"], f"stopped after {run['seconds']} s")
    rule("exit-code", run["exit_code"] == 0, f"bench_serving ended with exit code {run['exit_code']}")
    rule("one-record", len(run["lines"]) == 1, f"{len(run['lines'])} lines in the output file")
    if broken:
        return Judged(level, broken)
    try:
        raw = json.loads(run["lines"][0])
        completed, generated = raw["completed"], raw["total_output_tokens"]
        retokenised, ttfts = raw["total_output_tokens_retokenized"], raw["ttfts"]
        errors, lengths = [e for e in raw["errors"] if e], raw["output_lens"]
        texts: Sequence[str] = raw["generated_texts"]
    except (ValueError, KeyError, TypeError) as error:
        return Judged(level, [f"readable: the record lacks {error}"])
    rule("completed", completed == level.prompts, f"{completed} of {level.prompts} requests completed")
    rule(
        "no-errors", not errors, f"{len(errors)} requests failed, the first with {errors[0][:120]!r}" if errors else ""
    )
    slowest = min(ttfts, default=0)
    rule("ttft", slowest > 0, f"the lowest time to first token is {slowest * 1000:.2f} ms: nothing was streamed")
    ratio = retokenised / generated if generated else 0.0
    low, high = RETOKENISED
    rule("retokenised", low <= ratio <= high, f"{retokenised} of {generated} tokens found again in the text")
    short = [length for length in lengths if length != level.output_len]
    rule("lengths", not short, f"{len(short)} answers are not {level.output_len} tokens long" if short else "")
    filler = [text for text in texts if FILLER.search(text)]
    rule("no-filler", not filler, f"{len(filler)} answers are filler, such as {filler[0][:40]!r}" if filler else "")
    if broken:
        return Judged(level, broken)
    needed = level.concurrency * (level.input_len + level.output_len)
    figures = {
        "request_throughput": raw["request_throughput"],
        "output_throughput": raw["output_throughput"],
        "ttft_median_ms": statistics.median(ttfts) * 1000,
        "ttft_p99_ms": raw["p99_ttft_ms"],
        "tpot_median_ms": raw["median_tpot_ms"],
        "itl_p99_ms": raw["p99_itl_ms"],
        "mean_concurrency": raw["concurrency"],
        "duration_s": raw["duration"],
    }
    return Judged(level, [], max_total_num_tokens is not None and needed > max_total_num_tokens, figures)


def judge_run(summary: dict[str, Any]) -> list[str]:
    """The rules about a run as a whole that `summary` (results/raw/<run>/summary.json) breaks."""
    broken = []
    before, after = summary["generated_before"], summary["generated_after"]
    for moment, answers in (("before", before), ("after", after)):
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            text = answer.get("text", "")
            if "error" in answer:
                broken.append(f"generates-{moment}: {prompt!r} was answered with {answer['error']}")
            elif not text.strip() or FILLER.search(text):
                broken.append(f"generates-{moment}: {prompt!r} was answered with {text[:40]!r}")
    if not broken and before != after:
        broken.append("deterministic: greedy answers differ before and after the load")
    if summary["processes_before"] != summary["processes_after"] or not summary["processes_before"]:
        broken.append(
            "same-server: the server's processes were "
            f"{summary['processes_before']} before and {summary['processes_after']} after"
        )
    return broken
