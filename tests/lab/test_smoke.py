"""The benchmark on the real stack: two tiers compared, a gate that stays closed, a run killed, a server that dies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from gpuwright.node import script
from tests.lab.conftest import RESULTS, Lab, Run, ok
from tests.lab.test_server import within

LOCAL = RESULTS / "local"
PROFILE = {
    "levels": [8], "input_len": 64, "output_len": 32, "prompts_per_concurrency": 8, "min_duration_s": 0.2,
    "noise": 0.3, "timeout_s": 60, "repeats": 5,
}  # fmt: skip
SMALL = ("--data", "profiles=" + json.dumps({"smoke": PROFILE}))
SLOW = ("--data", "tier=one-at-a-time", "--data", "gate=baseline")


@pytest.fixture(scope="module")
def node(lab: Lab) -> Lab:
    """The lab with tier baseline."""
    ok(lab.deploy("--data", "smoke=never"))
    return lab


def records(node: Lab) -> list[dict[str, Any]]:
    paths = sorted((node.root / "results").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text()) for path in paths]


def verdicts(run: Run) -> list[str]:
    return [line.split("verdict: ")[1] for line in run.said.splitlines() if "] " in line and "  verdict: " in line]


def test_two_tiers_end_in_a_comparison_and_the_gate_closes_on_the_slower_one(node: Lab) -> None:
    ok(node.deploy(*SMALL))
    run = node.deploy(*SMALL, *SLOW)
    assert run.code == 1
    assert "verdict: accepted; bench_serving took" in run.said, "slow is no reason to reject a run"
    assert "one-at-a-time against baseline" in run.said and "slower, queued" in run.said
    assert "tier one-at-a-time is slower than baseline at concurrency 8" in run.said
    assert "answers agree with the reference's, from their beginning, for 100% of their tokens" in run.said


def test_the_gate_stays_closed_when_nothing_is_measured_anew(node: Lab) -> None:
    before = len(records(node))
    run = node.deploy(*SMALL, *SLOW)
    assert run.code == 1 and "is slower than baseline at concurrency 8" in run.said
    assert len(records(node)) == before


def test_a_second_run_repeats_the_verdict(node: Lab) -> None:
    run = node.deploy(*SMALL, *SLOW, "--data", "smoke=always")
    assert run.code == 1 and verdicts(run)[-1] == "slower"
    first, second = (each for each in records(node) if each["tier"] == "one-at-a-time")
    assert first["levels"][0]["accepted"] and second["levels"][0]["accepted"]
    assert first["run"] != second["run"] and first["spec_digest"] == second["spec_digest"]


def test_records_lost_here_are_fetched_from_the_node(node: Lab) -> None:
    for record in records(node):
        (LOCAL / f"{record['run']}.json").unlink(missing_ok=True)
    run = node.deploy(*SMALL, *SLOW)
    assert run.code == 1 and "is slower than baseline at concurrency 8" in run.said
    for record in records(node):
        assert json.loads((LOCAL / f"{record['run']}.json").read_text()) == record


def test_a_run_that_is_killed_leaves_no_load_and_no_half_record(node: Lab) -> None:
    ok(node.deploy("--data", "smoke=never"))
    before = {path.name for path in (node.root / "results").rglob("*.json")}
    raw = node.root / "results" / "raw"

    def measuring() -> bool:
        return any(raw.glob("*.part/c8-r1.log"))

    with node.killed_log.open("w") as log:
        running = subprocess.Popen(
            node.command("deploy.py", "-y", *SMALL, "--data", "smoke=always"),
            cwd=REPOSITORY, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    assert within(120, measuring), node.killed_log.read_text()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert within(10, lambda: not loads(node)), (
        "the load generator has a process group of its own, and ends all the same"
    )
    assert {path.name for path in (node.root / "results").rglob("*.json")} == before
    assert len(list(raw.glob("*.part"))) == 1
    run = ok(node.deploy(*SMALL, "--data", "smoke=always"))
    assert run.changed == [p.SMOKE] and list(raw.glob("*.part")) == []


def loads(node: Lab) -> list[str]:
    """The live processes that hold a file of results/raw/ open, or work in it: the load generator."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if str(node.root / "results" / "raw") in str((folder / "cwd").readlink()):
                    found.append(folder.name)
    return found


def test_a_server_that_dies_under_load_gives_no_result(node: Lab) -> None:
    raw, before = node.root / "results" / "raw", len(records(node))
    pid = node.pid()

    def kill() -> None:
        if within(120, lambda: any(raw.glob("*.part/c8-r1.log"))):
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    run = node.deploy(*SMALL, "--data", "smoke=always")
    thread.join()
    assert run.code == 1 and "verdict: rejected" in run.said
    assert f"ended early: the server's process {pid}" in run.said, "nobody waits for a server that is gone"
    assert "the run breaks same-server" in run.said or "the run breaks generates" in run.said
    record = records(node)[-1]
    assert len(records(node)) == before + 1 and record["verdict"] == "rejected"
    assert not record["levels"][0]["accepted"] and record["levels"][0]["median"] is None
    assert re.search(
        "repeat 1 breaks (exit-code: bench_serving ended with exit code|in-time: it was stopped after)", run.said
    )
    assert Path(record["levels"][0]["repeats"][1]["raw"]).with_suffix(".log").exists(), "what it said is kept"
    ok(node.deploy(*SMALL))
    assert node.pid() != pid and node.record()["pid"] == node.pid() and node.record()["ready_at"]


POOL = """
import sys
from torch._inductor import config
config.worker_start_method, config.compile_threads = "subprocess", 2
from torch._inductor.async_compile import AsyncCompile
AsyncCompile.warm_pool()
print("ready", flush=True)
sys.stdin.read()
"""
ASK = """
pid = REQUEST["pid"]
record = {"pgid": pid, "started_ticks": process(pid)["started"], "boot_id": boot_id()}
print(json.dumps([server_processes(record), serving(record)]))
"""


def test_torchs_compile_workers_are_none_of_the_servers_processes(node: Lab) -> None:
    """Inductor starts them for a tier with torch.compile, and ends them by itself once it has nothing for them."""
    python = node.venv / "bin" / "python"
    with subprocess.Popen(
        [python, "-I", "-c", POOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=node.env, start_new_session=True
    ) as pool:
        try:
            assert pool.stdout is not None and pool.stdout.readline() == b"ready\n"
            text = script("bench", {"root": str(node.root), "run_id": "none", "pid": pool.pid})
            assert text.endswith("\nmain()\n")
            done = node.python(text.removesuffix("main()\n") + ASK)
            assert done.returncode == 0, done.stderr
            whole, serving = json.loads(done.stdout)
            assert len(whole) > 1 and serving == [pool.pid]
        finally:
            os.killpg(pool.pid, signal.SIGKILL)


def test_a_server_of_another_tier_is_not_measured(node: Lab) -> None:
    before = len(records(node))
    run = node.deploy(*SMALL, "--data", "stages=smoke", "--data", "tier=no-radix")
    assert run.code == 1 and "the server that runs is not tier no-radix as it is declared" in run.said
    assert len(records(node)) == before
