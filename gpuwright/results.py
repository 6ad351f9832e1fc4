"""Benchmark records: what is kept of a run, and how it is shown."""

from __future__ import annotations

import json
from typing import Any

from gpuwright.smoke import judge, judge_run, levels
from gpuwright.spec import NodeSpec

RECORD_VERSION = 1


def make_record(spec: NodeSpec, summary: dict[str, Any], run_id: str, revision: str) -> dict[str, Any]:
    """The record of a run, its levels judged. `verdict` is accepted only when no rule at all is broken."""
    judged = [
        judge(level, run, summary["max_total_num_tokens"])
        for level, run in zip(levels(spec.data.smoke_benchmark), summary["levels"], strict=True)
    ]
    broken = judge_run(summary)
    accepted = not broken and all(level.accepted for level in judged)
    return {
        "version": RECORD_VERSION,
        "run": run_id,
        "verdict": "accepted" if accepted else "rejected",
        "broken": broken,
        "spec_digest": spec.spec_digest,
        "runtime_digest": spec.runtime_digest,
        "patch_set_digest": spec.patch_set_digest,
        "revision": revision,
        "inventory_host": spec.host,
        "host": summary["host"],
        "started_at": summary["started_at"],
        "seconds": summary["seconds"],
        "stack": spec.stack.name,
        "ladder": spec.data.ladder,
        "tier": spec.tier.name,
        "patches": [patch.id for patch in spec.patches],
        "packages": {name: spec.lock.versions[name] for name in _TOLD if name in spec.lock.versions},
        "argv": spec.arguments(spec.tier),
        "env": spec.environment(spec.tier),
        "max_total_num_tokens": summary["max_total_num_tokens"],
        "levels": [
            {
                "concurrency": one.level.concurrency,
                "prompts": one.level.prompts,
                "input_len": one.level.input_len,
                "output_len": one.level.output_len,
                "accepted": one.accepted,
                "broken": one.broken,
                "queued": one.queued,
                "figures": one.figures,
                "raw": run["raw"],
            }
            for one, run in zip(judged, summary["levels"], strict=True)
        ],
    }


_TOLD = ("sglang", "torch", "flashinfer-python", "sgl-kernel", "transformers", "triton", "nvidia-nccl-cu12")


def dump(record: dict[str, Any]) -> str:
    """A record as it is written to disk."""
    return json.dumps(record, indent=1) + "\n"


def table(record: dict[str, Any]) -> str:
    """A run as a person reads it in a terminal: one line a level, rejected ones with the rules they break."""
    head = ("concurrency", "requests", "output tok/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "verdict")
    rows: list[tuple[str, ...]] = [head]
    for level in record["levels"]:
        figures = level["figures"]
        keys = ("output_throughput", "ttft_median_ms", "ttft_p99_ms", "tpot_median_ms")
        shown = [f"{figures[key]:.1f}" if figures else "-" for key in keys]
        verdict = ("accepted, queued" if level["queued"] else "accepted") if level["accepted"] else "REJECTED"
        rows.append((str(level["concurrency"]), str(level["prompts"]), *shown, verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) + "  " + row[-1]
        for row in rows
    ]
    lines.insert(0, f"{record['inventory_host']}: tier {record['tier']}, spec {record['spec_digest'][:12]}")
    for level in record["levels"]:
        lines += [f"  concurrency {level['concurrency']} breaks {rule}" for rule in level["broken"]]
    lines += [f"  the run breaks {rule}" for rule in record["broken"]]
    lines.append(f"  verdict: {record['verdict']}")
    return "\n".join(lines)
