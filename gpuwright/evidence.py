"""What a benchmark run says about its tier, proposed as a change of the tiers file of the stack it ran on."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gpuwright.acceptance import Comparison
from gpuwright.catalogue import CATALOG
from gpuwright.compare import compare, reference_for
from gpuwright.errors import GpuwrightError, nearest
from gpuwright.ladder import Tiers
from gpuwright.record import Record, folder_name
from gpuwright.yamlfile import Loc, line_of, load_yaml, read_yaml, shown

TOLD = ("sglang", "flashinfer-python", "torch")  # what a tier's fate depends on, of the stack's distributions


def proposal(
    record: Record,
    records: Sequence[Record],
    rules: Comparison,
    status: str | None,
    catalog: Path = CATALOG,
) -> str:
    """A unified diff that adds `record` to its tier's evidence, in the file of the stack it ran on, and sets the
    status: the given one; else `works` where it is the reference tier itself, or found as fast or faster; `rejected`
    where it is slower or answers differently; where nobody can tell, the status it has, or `open` where that is
    `blocked`.

    Raises GpuwrightError where the run is no evidence for that, or is there already, or the ladder has no such tier.
    """
    if record.verdict == "rejected" and status != "blocked":
        raise GpuwrightError(
            f"{record.run} is rejected, so no evidence that its tier works; if the tier itself fails: --status blocked"
        )
    if record.verdict == "accepted" and status == "blocked":
        raise GpuwrightError(
            f"{record.run} is accepted: a tier that serves is not blocked; if not worth it: --status rejected"
        )
    what, settled = _what(record), status or ("works" if record.tier == record.reference else None)
    reference = reference_for(record, records, record.reference) if record.tier != record.reference else None
    if record.verdict == "accepted" and record.tier != record.reference:
        if reference is None:
            what += f"; no run of {record.reference} to compare with"
        else:
            found = compare(reference, record, rules)
            what += f"; {found.verdict} against {reference.tier}"
            if found.levels:
                what += ": output tok/s x " + ", ".join(
                    f"{level.throughput.mid:.2f} at {level.concurrency}{' (queued)' if level.queued else ''}"
                    for level in found.levels
                )
            elif found.why:
                what += f": {found.why[0]}"
            settled = settled or _SETTLED.get(found.verdict)
    path = catalog / "tiers" / f"{record.stack}.yaml"
    if not path.is_file():
        stacks = [each.stem for each in path.parent.glob("*.yaml")]
        raise GpuwrightError(f'there is no stack "{record.stack}" any more; {nearest(record.stack, stacks)}')
    written = path.read_text(encoding="utf-8")
    changed = _changed(written, path, record, settled, what)
    name = shown(path)
    diff = difflib.unified_diff(written.splitlines(True), changed.splitlines(True), f"a/{name}", f"b/{name}")
    return "".join(diff)


_SETTLED = {"faster": "works", "same": "works", "slower": "rejected", "different answers": "rejected"}


def _what(record: Record) -> str:
    if record.verdict == "rejected":
        rules = record.broken or [rule for level in record.levels for rule in level.broken]
        return f"a benchmark by profile {record.profile} was rejected: {rules[0]}"
    at = ", ".join(
        f"{level.median.output_tok_s:.0f} at {level.concurrency}{' (queued)' if level.queued else ''}"
        for level in record.levels
        if level.median
    )
    return f"accepted by profile {record.profile}: output tok/s {at}"


def _changed(text: str, path: Path, record: Record, settled: str | None, what: str) -> str:
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
    known = tier.get("status", "open")
    status = settled or ("open" if known == "blocked" else known)
    if any(Path(str(each.get("result", ""))).stem == record.run for each in tier.get("evidence", [])):
        raise GpuwrightError(f"{record.run} is evidence of tier {record.tier} already")
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
        number = line("status") - 1
        rows[number] = re.sub(r"status: *\w+", f"status: {status}", rows[number], count=1)
    else:
        rows.insert(line("evidence") - 1 if "evidence" in tier else end, f"{indent}status: {status}")
    changed = "\n".join(rows) + "\n"
    try:
        again = yaml.safe_load(changed)["ladders"][record.ladder]["tiers"][index]
        right = (again["status"], again["evidence"][-1]["what"]) == (status, what)
    except (yaml.YAMLError, KeyError, IndexError, TypeError):
        right = False
    if not right:
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
        "result": f"results/{folder_name(record.inventory_host)}/{record.run}.json",
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
