"""Benchmark records: one JSON a run, judged, with all that two runs must share before they are compared."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuwright import REPOSITORY
from gpuwright.acceptance import broken
from gpuwright.errors import GpuwrightError
from gpuwright.node_module import node_module
from gpuwright.smoke import Level, levels
from gpuwright.spec import NodeSpec
from gpuwright.yamlfile import shown

RESULTS = Path(os.environ.get("GPUWRIGHT_RESULTS") or REPOSITORY / "results")
SCHEMA = REPOSITORY / "docs" / "schema" / "benchmark-record-2.json"


class Part(BaseModel):
    """Base of the record's models: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Figures(Part):
    """What bench_serving measured in one repeat, or the medians of a level's: tokens/s, requests/s, ms, s."""

    output_tok_s: float = Field(description="output tokens per second, as bench_serving prints it")
    total_tok_s: float = Field(description="input and output tokens per second")
    requests_s: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    itl_p99_ms: float
    e2e_p50_ms: float
    mean_concurrency: float
    duration_s: float


class Repeat(Part):
    """One run of bench_serving. `raw` is its file on the node; figures only when no rule is broken."""

    number: int = Field(description="0 is the warm-up, which is never counted")
    seed: int
    discarded: bool
    accepted: bool
    broken: list[str]
    seconds: float = Field(description="wall time of the load generator, its start and warm-ups included")
    client_cpu_s: float = Field(description="its CPU time from the start of the load; it works in one thread")
    raw: str
    sha256: str | None = Field(description="of the raw file, if it wrote one")
    figures: Figures | None


class LevelRecord(Part):
    """One level: its repeats, and over the kept ones each figure's median and spread ([lowest, highest]).

    `queued`: the server cannot hold that many requests at once, so the level measures its queue.
    """

    concurrency: int
    prompts: int
    input_len: int
    output_len: int
    queued: bool
    accepted: bool
    broken: list[str]
    repeats: list[Repeat]
    median: Figures | None
    spread: dict[str, tuple[float, float]]

    @property
    def kept(self) -> list[Figures]:
        """The figures of the repeats that count."""
        return [run.figures for run in self.repeats if run.figures is not None and not run.discarded]


class Gpu(Part):
    """A GPU as nvidia-smi told of it before the load: MiB, W, MHz, °C."""

    index: int
    name: str
    memory_mib: float | None
    power_limit_w: float | None
    max_sm_clock_mhz: float | None
    sm_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None


class Machine(Part):
    """The node itself."""

    name: str
    cpu: str
    cpus: int = Field(description="that this process may use")
    memory_gib: int
    kernel: str


class Model(Part):
    """The model folder. `digest`: sha256 over names and sizes of its files and its config's content."""

    path: str
    digest: str


class Answer(Part):
    """The greedy answer to a deterministic prompt before the load: text, and token ids."""

    prompt: str
    text: str
    tokens: list[int]


class Record(Part):
    """One benchmark run. `broken`: the rules about the run as a whole that it breaks; then nothing in it counts."""

    version: Literal[2]
    run: str
    verdict: Literal["accepted", "rejected"]
    broken: list[str]
    unobserved: list[str] = Field(description="what could not be read on the node, with the reason")
    ended_early: str | None = Field(description="why levels or repeats are missing")
    started_at: str
    seconds: float
    load_seconds: float = Field(description="of it, in bench_serving")
    spec_digest: str
    runtime_digest: str
    patch_set_digest: str
    benchmark_digest: str = Field(description="over the profile's load and the probe")
    revision: str
    inventory_host: str
    host: Machine
    gpu_count: int = Field(description="as stated by the ladder's tp, never inferred; 0 without GPUs")
    gpus: list[Gpu]
    driver: str | None
    stack: str
    engine: str
    ladder: str
    tier: str
    reference: str = Field(description="the ladder's first tier, which the others are measured against")
    ladder_args: list[str]
    ladder_env: dict[str, str]
    argv: list[str]
    env: dict[str, str]
    patches: list[str]
    packages: dict[str, str]
    model: Model
    max_total_num_tokens: int | None
    max_running_requests: int | None
    profile: str
    load: dict[str, Any]
    answers: list[Answer]
    levels: list[LevelRecord]

    @property
    def path(self) -> Path:
        """Where the record lies on the control machine."""
        return RESULTS / folder_name(self.inventory_host) / f"{self.run}.json"

    def level(self, concurrency: int) -> LevelRecord | None:
        """The level of that concurrency, if it counts."""
        found = (each for each in self.levels if each.concurrency == concurrency and each.accepted)
        return None if self.broken else next(found, None)


def folder_name(host: str) -> str:
    """A host's folder in results/."""
    return host.lstrip("@").replace("/", "_")


def make_record(
    spec: NodeSpec, summary: Mapping[str, Any], run_id: str, revision: str, packages: Mapping[str, str]
) -> Record:
    """The record of a run that files/node/bench.py summed up, judged. `packages`: the versions the server imports."""
    rules = spec.acceptance.rules
    runs = {found["concurrency"]: found["repeats"] for found in summary["levels"]}
    judged = [_level(spec, level, runs.get(level.concurrency, []), summary) for level in levels(spec.profile)]
    run_broken = broken(rules, "run", _run_facts(spec, summary))
    prompts, answers = spec.acceptance.probe.prompts, summary["before"]["answers"]
    base = spec.reference
    return Record.model_validate({
        "version": 2,
        "run": run_id,
        "verdict": "accepted" if not run_broken and all(level.accepted for level in judged) else "rejected",
        "broken": run_broken,
        **{key: summary[key] for key in _AS_OBSERVED},
        "unobserved": [*summary["unobserved"], *_unstable(spec, summary)],
        "spec_digest": spec.spec_digest,
        "runtime_digest": spec.runtime_digest,
        "patch_set_digest": spec.patch_set_digest,
        "benchmark_digest": spec.benchmark_digest,
        "revision": revision,
        "inventory_host": spec.host,
        "gpu_count": spec.ladder.tp if spec.data.device == "cuda" else 0,
        "stack": spec.stack.name,
        "engine": spec.stack.engine_pin,
        "ladder": spec.data.ladder,
        "tier": spec.tier.name,
        "reference": base.name,
        "ladder_args": spec.arguments(base),
        "ladder_env": spec.environment(base),
        "argv": spec.arguments(spec.tier),
        "env": spec.environment(spec.tier),
        "patches": [patch.id for patch in spec.patches],
        "packages": dict(packages),
        "profile": spec.data.profile,
        "load": spec.profile.model_dump(),
        "answers": [
            {"prompt": prompt, "text": answer.get("text", ""), "tokens": answer.get("tokens", [])}
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
        "levels": judged,
    })  # fmt: skip


_AS_OBSERVED = (
    "ended_early", "started_at", "seconds", "load_seconds", "host", "gpus", "driver", "model", "max_total_num_tokens",
    "max_running_requests",
)  # fmt: skip


def _level(spec: NodeSpec, level: Level, runs: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> LevelRecord:
    asked = {name: getattr(level, name) for name in ("prompts", "concurrency", "input_len", "output_len")}
    needed = level.concurrency * (level.input_len + level.output_len)
    tokens, running = summary["max_total_num_tokens"], summary["max_running_requests"]
    queued = bool((tokens and needed > tokens) or (running and level.concurrency > running))
    rules = spec.acceptance.rules
    excused = [rule for rule in rules if not rule.timing]
    repeats = []
    for run in runs:
        known = {name: run[name] for name in ("timed_out", "seconds", "exit_code", "client_cpu_s", "flushed")}
        facts = {**run["facts"], **known, **asked, "queued": queued, "min_duration_s": spec.profile.min_duration_s}
        found = broken(excused if run["discarded"] else rules, "repeat", facts)
        told = ("number", "seed", "discarded", "seconds", "client_cpu_s", "raw", "sha256")
        repeats.append(
            Repeat(
                **{name: run[name] for name in told},
                accepted=not found,
                broken=found,
                figures=None if found else facts["figures"],
            )
        )
    kept = [run for run in repeats if not run.discarded]
    good = [run.figures for run in kept if run.figures is not None]
    warm_up = [rule for run in repeats if run.discarded for rule in run.broken]
    counted = {"concurrency": level.concurrency, "kept": len(kept), "accepted": len(good), "warm_up": warm_up}
    found = broken(rules, "level", counted)
    columns = {name: [getattr(each, name) for each in good] for name in Figures.model_fields} if not found else {}
    return LevelRecord(
        **asked,
        queued=queued,
        accepted=not found,
        broken=found,
        repeats=repeats,
        median=Figures(**{name: statistics.median(values) for name, values in columns.items()}) if columns else None,
        spread={name: (min(values), max(values)) for name, values in columns.items()},
    )


def _run_facts(spec: NodeSpec, summary: Mapping[str, Any]) -> dict[str, Any]:
    is_filler = node_module("raw_facts").is_filler
    prompts, before = spec.acceptance.probe.prompts, summary["before"]
    unanswered, filled, disagreeing = [], [], []
    for moment in ("before", "after"):
        for prompt, answer in zip(prompts, summary[moment]["answers"], strict=True):
            if "error" in answer or not answer["tokens"]:
                unanswered.append(f"{moment} the load {prompt!r} was answered with {answer.get('error', 'no token')}")
            elif answer["text"] and is_filler(answer["text"]):
                filled.append(f"{moment} the load {prompt!r} was answered with {answer['text'][:40]!r}")
        number = before["asked_otherwise"]
        expected = summary[moment]["answers"][number].get("text")
        for way, other in summary[moment]["other_ways"].items():
            if "error" in other or (number in _stable(summary) and other["text"] != expected):
                said = repr(other["text"]) if "text" in other else other["error"]
                disagreeing.append(
                    f"{moment} the load, {way} gave {said} to {prompts[number]!r}, generate {expected!r}"
                )
    pairs = list(zip(before["answers"], summary["after"]["answers"], strict=True))
    shares = [prefix_share(one.get("tokens", []), other.get("tokens", [])) for one, other in pairs]
    return {
        "unanswered": unanswered,
        "filler_answers": filled,
        "changed_answers": [repr(prompts[n]) for n in _stable(summary) if pairs[n][0] != pairs[n][1]],
        "answers_kept": statistics.fmean(shares),
        "disagreeing": disagreeing,
        **{name: summary[name] for name in ("processes_before", "processes_after", "xids", "max_total_num_tokens")},
        "server_version": summary["server_version"],
        "engine_version": spec.stack.engine_version,
        "gpus_stated": spec.gpus_here,
        "gpus_seen": len(summary["gpus"]),
    }


def _stable(summary: Mapping[str, Any]) -> list[int]:
    """The prompts, by number, that the idle server answered twice the same."""
    first, again = summary["before"]["answers"], summary["before"]["again"]
    return [number for number, answer in enumerate(first) if answer == again[number]]


def _unstable(spec: NodeSpec, summary: Mapping[str, Any]) -> list[str]:
    total, stable = len(spec.acceptance.probe.prompts), len(_stable(summary))
    told = (
        f"whether the load changes {total - stable} of {total} answers: the idle server itself gives them differently"
    )
    return [told] if stable < total else []


def prefix_share(expected: Sequence[int], found: Sequence[int]) -> float:
    """The share of the expected tokens that the found ones repeat from the beginning; 0 where none is expected."""
    agree = next((n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    return (min(len(expected), len(found)) if agree is None else agree) / len(expected) if expected else 0.0


def dump(record: Record) -> str:
    """A record as it is written to disk."""
    return json.dumps(record.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def schema() -> str:
    """The published JSON schema of a record."""
    title = {"title": "gpuwright benchmark record, version 2"}
    return json.dumps(Record.model_json_schema(mode="serialization") | title, indent=1) + "\n"


def read_record(path: Path) -> Record:
    """The record in a file. Raises GpuwrightError where it is none of this version."""
    try:
        return Record.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GpuwrightError(f"{shown(path)} cannot be read: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError) as error:
        detail = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(map(str, detail["loc"])) or "the file"
        raise GpuwrightError(f"{shown(path)} is no benchmark record of version 2: {where}: {detail['msg']}") from None


def read_records(folder: Path, *hosts: str) -> tuple[list[Record], list[str]]:
    """(every record below a folder, or those of `hosts`, oldest first; why the other JSON files are none)."""
    records, problems = [], []
    for path in sorted(path for name in map(folder_name, hosts or "*") for path in folder.glob(f"{name}/*.json")):
        try:
            records.append(read_record(path))
        except GpuwrightError as error:
            problems.append(str(error))
    return sorted(records, key=lambda record: (record.started_at, record.run)), problems


def latest(records: Iterable[Record]) -> Record | None:
    """The run that was started last."""
    return max(records, key=lambda record: (record.started_at, record.run), default=None)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines: every column but the last to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) + "  " + row[-1]
        for row in rows
    ]


def table(record: Record) -> str:
    """A run as a person reads it in a terminal: one line a level, rejected ones with the rules they break."""
    head = ("concurrency", "requests", "output tok/s", "spread", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "verdict")
    rows: list[tuple[str, ...]] = [head]
    for level in record.levels:
        shown = ["-"] * 5
        if level.median is not None:
            low, high = level.spread["output_tok_s"]
            names = ("output_tok_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
            shown = [f"{getattr(level.median, name):.1f}" for name in names]
            shown.insert(1, f"{low:.1f}-{high:.1f}")
        verdict = ("accepted, queued" if level.queued else "accepted") if level.accepted else "REJECTED"
        rows.append((str(level.concurrency), f"{len(level.kept)} x {level.prompts}", *shown, verdict))
    lines = aligned(rows)
    lines.insert(
        0, f"{record.inventory_host}: tier {record.tier}, profile {record.profile}, spec {record.spec_digest[:12]}"
    )
    for level in record.levels:
        lines += [f"  concurrency {level.concurrency} breaks {rule}" for rule in level.broken]
        for run in level.repeats if level.broken else ():
            name = "the discarded repeat" if run.discarded else f"repeat {run.number}"
            lines += [f"    {name} breaks {rule}" for rule in run.broken]
    lines += [f"  the run breaks {rule}" for rule in record.broken]
    lines += [f"  not observed: {what}" for what in record.unobserved]
    lines += [f"  ended early: {record.ended_early}"] if record.ended_early else []
    lines.append(f"  verdict: {record.verdict}; bench_serving took {record.load_seconds:.0f} of {record.seconds:.0f} s")
    return "\n".join(lines)
