"""`tiers record`: a run becomes evidence as a diff of its stack's tiers, which keeps every comment and reads back."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwright.catalogue import CATALOG, load_catalogue
from gpuwright.errors import GpuwrightError
from gpuwright.evidence import proposal
from gpuwright.ladder import standing
from gpuwright.record import Record
from tests.make import bench_spec, catalogue, gpu_spec, record

RULES = catalogue().acceptance.comparison
STACK = "sglang-0.5.9-cu128"
TIERS = f"tiers/{STACK}.yaml"
WRITTEN = (CATALOG / TIERS).read_text()


def applied(tmp_path: Path, run: Record, records: list[Record], status: str | None = None) -> str:
    """Its stack's tiers file after `git apply` of the proposal."""
    diff = proposal(run, records, RULES, status)
    name = f"tiers/{run.stack}.yaml"
    target = tmp_path / "catalog" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text((CATALOG / name).read_text())
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    return target.read_text()


def tier(text: str, ladder: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(t for t in yaml.safe_load(text)["ladders"][ladder]["tiers"] if t["name"] == name)
    return found


def test_an_accepted_run_makes_its_tier_work(tmp_path: Path) -> None:
    spec = bench_spec(tier="no-radix")
    base, run = record(bench_spec(), run="r-base"), record(spec, run="r-other")
    text = applied(tmp_path, run, [base, run])
    found = tier(text, "lab-cpu", "no-radix")
    assert found["status"] == "works"
    (evidence,) = found["evidence"]
    assert evidence["seen"] == "2026-11-30" and evidence["result"] == "results/local/r-other.json"
    assert evidence["versions"] == {name: spec.lock.versions[name] for name in ("sglang", "flashinfer-python", "torch")}
    assert evidence["patch_set"] == spec.patch_set_digest[:16]
    assert evidence["what"] == (
        "accepted by profile smoke: output tok/s 201 at 2, 800 at 8; same against baseline: output tok/s x 1.00 at 2, "
        "1.00 at 8"
    )
    diff = proposal(run, [base, run], RULES, None).splitlines()[2:]
    assert [line for line in diff if line.startswith("-")] == [], "nothing that was written is lost"


def test_the_catalogue_reads_the_evidence_and_the_tier_stands(tmp_path: Path) -> None:
    spec = bench_spec(tier="no-radix")
    text = applied(tmp_path, record(spec, run="r-other"), [record(bench_spec(), run="r-base")])
    for path in CATALOG.iterdir():
        if path.name != "tiers":
            (tmp_path / "catalog" / path.name).symlink_to(path)
    for path in (CATALOG / "tiers").iterdir():
        if path.stem != STACK:
            (tmp_path / "catalog" / "tiers" / path.name).symlink_to(path)
    read = load_catalogue(tmp_path / "catalog")
    found = next(t for t in read.ladders[STACK]["lab-cpu"].tiers if t.name == "no-radix")
    assert (tmp_path / "catalog" / TIERS).read_text() == text
    assert standing(found, spec.lock.versions, spec.patch_set_digest).status == "works"
    assert standing(found, {**spec.lock.versions, "torch": "9"}, spec.patch_set_digest).status == "open"


def test_a_slower_tier_is_proposed_as_rejected(tmp_path: Path) -> None:
    base = record(bench_spec(), run="r-base")
    slow = record(bench_spec(tier="no-radix"), {2: [50.0, 51.0, 52.0], 8: [90.0, 91.0, 92.0]}, run="r-other")
    found = tier(applied(tmp_path, slow, [base]), "lab-cpu", "no-radix")
    assert found["status"] == "rejected"
    assert "; slower against baseline: output tok/s x 0.25 at 2, 0.11 at 8" in found["evidence"][0]["what"]
    assert tier(applied(tmp_path, slow, [base], "works"), "lab-cpu", "no-radix")["status"] == "works"


def test_evidence_is_added_to_what_a_tier_has(tmp_path: Path) -> None:
    spec = gpu_spec(tier="piecewise", profiles={"smoke": bench_spec().profile.model_dump()})
    gpu = {"index": 0, "name": "X", "memory_mib": 1.0, "power_limit_w": 600.0, "max_sm_clock_mhz": 2430.0,
           "sm_clock_mhz": None, "power_w": None, "temperature_c": None}  # fmt: skip
    run = record(spec, run="r-gpu", gpus=[gpu] * 8)
    base = gpu_spec(profiles={"smoke": bench_spec().profile.model_dump()})
    runs = [record(base, run="r-base", gpus=[gpu] * 8), run]
    before, after = (tier(text, "glm5-nvfp4", "piecewise") for text in (WRITTEN, applied(tmp_path, run, runs)))
    assert after["status"] == "works" and after["evidence"][:2] == before["evidence"] and len(after["evidence"]) == 3
    assert after["note"] == before["note"]


def test_a_rejected_run_is_no_evidence_unless_the_tier_is_blocked_by_it(tmp_path: Path) -> None:
    run = record(bench_spec(tier="no-radix"), run="r-other", processes_after=[9])
    with pytest.raises(GpuwrightError, match="is rejected, so no evidence that its tier works"):
        proposal(run, [], RULES, None)
    found = tier(applied(tmp_path, run, [], "blocked"), "lab-cpu", "no-radix")
    assert found["status"] == "blocked"
    assert found["evidence"][0]["what"].startswith(
        "a benchmark by profile smoke was rejected: same-server: the server's"
    )


def test_what_nobody_can_tell_leaves_the_status_and_says_why(tmp_path: Path) -> None:
    noisy = record(bench_spec(tier="no-radix"), {2: [60.0, 200.0, 100.0], 8: [800.0, 810.0, 790.0]}, run="r-other")
    alone = tier(applied(tmp_path, noisy, []), "lab-cpu", "no-radix")
    assert alone["status"] == "open" and alone["evidence"][0]["what"].endswith("; no run of baseline to compare with")
    base = record(bench_spec(), run="r-base")
    unresolved = tier(applied(tmp_path, noisy, [base]), "lab-cpu", "no-radix")
    assert unresolved["status"] == "open" and "; unresolved against baseline" in unresolved["evidence"][0]["what"]
    apart = tier(applied(tmp_path, noisy.model_copy(update={"driver": "x"}), [base]), "lab-cpu", "no-radix")
    assert "not comparable against baseline: other driver: None and x" in apart["evidence"][0]["what"]
    blocked = noisy.model_copy(update={"ladder": "glm5-nvfp4", "tier": "piecewise"})
    assert tier(applied(tmp_path, blocked, []), "glm5-nvfp4", "piecewise")["status"] == "open", "it served"


def test_a_queue_is_told_and_a_layout_that_cannot_be_added_to_is_left_alone(tmp_path: Path) -> None:
    run = record(bench_spec(tier="no-radix"), run="r-other", max_running_requests=7)
    found = tier(applied(tmp_path, run, []), "lab-cpu", "no-radix")
    assert "output tok/s 201 at 2, 800 at 8 (queued)" in found["evidence"][0]["what"]
    path = tmp_path / TIERS
    path.parent.mkdir(exist_ok=True)
    old = "        args: {disable-radix-cache: true}\n"
    path.write_text(WRITTEN.replace(old, old + "        evidence: []\n"))
    with pytest.raises(GpuwrightError, match="laid out in a way that cannot be added to; by hand:"):
        proposal(run, [], RULES, None, tmp_path)
    path.write_text(WRITTEN.replace(old, old + "        status: open  # a comment\n"))
    assert "+        status: works  # a comment\n" in proposal(
        run, [record(bench_spec(), run="b")], RULES, None, tmp_path
    )


def test_a_tier_that_serves_is_not_blocked_and_no_run_is_evidence_twice(tmp_path: Path) -> None:
    run = record(bench_spec(tier="no-radix"), run="r-other")
    with pytest.raises(GpuwrightError, match="is accepted: a tier that serves is not blocked"):
        proposal(run, [], RULES, "blocked")
    path = tmp_path / TIERS
    path.parent.mkdir(exist_ok=True)
    path.write_text(applied(tmp_path, run, []))
    with pytest.raises(GpuwrightError, match="r-other is evidence of tier no-radix already"):
        proposal(run, [], RULES, None, tmp_path)


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"tier": "x"}, 'no tier "x" any more'),
        ({"ladder": "y"}, 'no ladder "y"'),
        ({"stack": "sglang-0.5.8"}, 'no stack "sglang-0.5.8" any more'),
    ],
)
def test_a_tier_that_is_gone(update: dict[str, str], said: str) -> None:
    run = record(bench_spec(tier="no-radix"), run="r").model_copy(update=update)
    with pytest.raises(GpuwrightError, match=said):
        proposal(run, [], RULES, None)


def test_every_tier_of_the_catalogue_can_be_added_to(tmp_path: Path) -> None:
    """Whatever its layout: the last of the file, one with comments, one with evidence, a ladder with an anchor."""
    run = record(bench_spec(), run="r")
    for stack, ladders in catalogue().ladders.items():
        for name, each in ((name, each) for name, ladder in ladders.items() for each in ladder.tiers):
            own = run.model_copy(update={"stack": stack, "ladder": name, "tier": each.name})
            text = applied(tmp_path, own, [])
            assert tier(text, name, each.name)["evidence"][-1]["result"] == "results/local/r.json"
