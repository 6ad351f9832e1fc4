"""What a benchmark run says about its tier, proposed as a change of catalog/tiers.yaml."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gpuwright.acceptance import Comparison
from gpuwright.catalogue import CATALOG
from gpuwright.compare import compare, reference_for
from gpuwright.errors import GpuwrightError, nearest
from gpuwright.ladder import Tiers
from gpuwright.record import Record
from gpuwright.yamlfile import Loc, line_of, load_yaml, read_yaml, shown

TOLD = ("sglang", "flashinfer-python", "torch")  # what a tier's fate depends on, of the stack's distributions


def proposal(
    record: Record,
    records: Sequence[Record],
    rules: Comparison,
    status: str | None,
    path: Path = CATALOG / "tiers.yaml",
) -> str:
    """A unified diff that adds `record` to its tier's evidence and sets the status: the given one; else `works` for an
    accepted run that is no slower than the reference tier's, and `rejected` for one that is.

    Raises GpuwrightError where the run is no evidence, or the ladder has no such tier any more.
    """
    if record.verdict == "rejected" and status != "blocked":
        raise GpuwrightError(
            f"{record.run} is rejected, so no evidence that its tier works; if the tier itself fails: --status blocked"
        )
    what = _what(record)
    settled = status or "works"
    reference = reference_for(record, records, record.reference) if record.tier != record.reference else None
    if reference is not None and record.verdict == "accepted":
        found = compare(reference, record, rules)
        if found.levels:
            ratios = ", ".join(f"{level.throughput.mid:.2f} at {level.concurrency}" for level in found.levels)
            what += f"; {found.verdict}: output tok/s against {reference.tier} x {ratios}"
            if status is None and found.verdict in ("slower", "different answers"):
                settled = "rejected"
    written = path.read_text(encoding="utf-8")
    changed = _changed(written, path, record, settled, what)
    name = shown(path)
    diff = difflib.unified_diff(written.splitlines(True), changed.splitlines(True), f"a/{name}", f"b/{name}")
    return "".join(diff)


def _what(record: Record) -> str:
    if record.verdict == "rejected":
        rules = record.broken or [rule for level in record.levels for rule in level.broken]
        return f"a benchmark by profile {record.profile} was rejected: {rules[0]}"
    at = ", ".join(f"{level.median.output_tok_s:.0f} at {level.concurrency}" for level in record.levels if level.median)
    return f"accepted by profile {record.profile}: output tok/s {at}"


def _changed(text: str, path: Path, record: Record, status: str, what: str) -> str:
    """The file with the evidence in it: comments and order stay, so it is lines that are put in."""
    value, lines = read_yaml(path)
    load_yaml(path, Tiers)  # a file that is wrong already is not added to
    ladders = value["ladders"]
    if record.ladder not in ladders:
        raise GpuwrightError(f'there is no ladder "{record.ladder}" any more; {nearest(record.ladder, ladders)}')
    tiers = ladders[record.ladder]["tiers"]
    names = [tier["name"] for tier in tiers]
    if record.tier not in names:
        raise GpuwrightError(
            f'ladder {record.ladder} has no tier "{record.tier}" any more; {nearest(record.tier, names)}'
        )
    index = names.index(record.tier)
    tier: dict[str, Any] = tiers[index]
    at: Loc = ("ladders", record.ladder, "tiers", index)
    rows = text.splitlines()
    first = line_of(lines, at) or 1
    indent = " " * (len(rows[first - 1]) - len(rows[first - 1].lstrip(" ")) + 2)
    entry = _entry(record, what, indent + "  ")

    def line(key: str) -> int:
        loc: Loc = (*at, key)
        return lines[loc]

    if "evidence" in tier:  # the later place first, so that the earlier one keeps its line
        end = _end(rows, line("evidence"), indent)
        rows[end:end] = entry
    else:
        end = _end(rows, first, indent, tier=True)
        rows[end:end] = [f"{indent}evidence:", *entry]
    if "status" in tier:
        rows[line("status") - 1] = f"{indent}status: {status}"
    else:
        rows.insert(line("evidence") - 1 if "evidence" in tier else end, f"{indent}status: {status}")
    changed = "\n".join(rows) + "\n"
    again = yaml.safe_load(changed)["ladders"][record.ladder]["tiers"][index]
    if (again["status"], again["evidence"][-1]["what"]) != (status, what):
        by_hand = "\n".join([f"{indent}status: {status}", f"{indent}evidence:", *entry])
        raise GpuwrightError(f"{shown(path)} is laid out in a way that cannot be added to; by hand:\n{by_hand}")
    return changed


def _end(rows: list[str], start: int, indent: str, *, tier: bool = False) -> int:
    """The index behind the block that begins at line `start` (from 1): of a key, or of the whole `tier`."""
    end = start
    for number in range(start, len(rows)):
        row = rows[number]
        if not row.strip() or row.lstrip().startswith("#"):
            continue
        deeper = row.startswith(indent) if tier else row.startswith(indent + " ")
        if not deeper:
            break
        end = number + 1
    return end


def _entry(record: Record, what: str, indent: str) -> list[str]:
    versions = {name: record.packages[name] for name in TOLD if name in record.packages}
    row = {
        "seen": record.started_at[:10],
        "what": what,
        "versions": versions,
        "patch_set": record.patch_set_digest[:16],
        "result": shown(record.path),
    }
    lines = []
    for number, (key, value) in enumerate(row.items()):
        text = _flow(value) if isinstance(value, dict) else _scalar(str(value))
        lines.append(f"{indent}{'- ' if not number else '  '}{key}: {text}")
    return lines


def _flow(value: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {_scalar(version)}" for name, version in value.items()) + "}"


def _scalar(text: str) -> str:
    """Text as YAML that reads back as this very text: plain, where it does inside a list too, else as JSON."""
    try:
        return text if yaml.safe_load(f"[{text}, {text}]") == [text, text] else json.dumps(text)
    except yaml.YAMLError:
        return json.dumps(text)
