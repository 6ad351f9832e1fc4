"""The server on the real stack: starts that fail and what is said of them, rollback, orphans, logs, secrets, two ranks.

The tests share one node, which serves tier baseline, and build on each other in the order of this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwright import plan as p
from gpuwright.hostdata import Sources
from gpuwright.node import run_server
from gpuwright.spec import Member, NodeSpec, build_spec
from tests.lab.conftest import Lab, Run, alive, children, ok
from tests.make import catalogue, group_data

NO_SMOKE = ("--data", "smoke=never")
SERVICE = ("--data", "stages=launchers,service")


@pytest.fixture(scope="module")
def node(lab: Lab) -> Lab:
    ok(lab.deploy(*NO_SMOKE))
    return lab


def spec_of(node: Lab, **data: Any) -> NodeSpec:
    own = {"root": str(node.root), "port": node.port}
    return build_spec("@local", group_data("all", "lab") | own | data, catalogue(), Sources((), []))


def get(port: int, path: str, body: Any = None, key: str | None = None, timeout: float = 60) -> tuple[int, str]:
    """(status, text) of a request to the server."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def healthy(node: Lab) -> bool:
    return get(node.port, "/health")[0] == 200


def serves_baseline_again(node: Lab, run: Run) -> None:
    assert run.code == 1 and "going back to tier baseline, which was ready before" in run.said
    assert "tier baseline serves again" in run.said
    assert healthy(node) and node.record()["tier"] == "baseline" and node.record()["ready_at"]
    assert node.pid() == node.record()["pid"]


def test_a_tier_that_crashes_on_start_is_diagnosed_and_the_one_before_it_serves_again(node: Lab) -> None:
    model = json.dumps({"kind": "folder", "path": "/nonexistent/model"})
    old = [node.pid(), *children(node.pid())]
    run = node.deploy(*SERVICE, "--data", "tier=no-radix", "--data", f"model={model}")
    assert "tier no-radix did not come up: it ended" in run.said
    assert "[model-path-missing]" in run.said and "'/nonexistent/model'" in run.said
    assert f"the whole log: {node.root}/logs/sglang-server-no-radix.log" in run.said
    serves_baseline_again(node, run)
    assert not [pid for pid in old if alive(pid)]


def test_after_a_rollback_the_next_deploy_of_what_serves_does_not_restart_it(node: Lab) -> None:
    pid = node.pid()
    assert ok(node.deploy(*NO_SMOKE)).changed == [p.LAUNCHERS], "the scripts of the failed attempt"
    assert node.pid() == pid and ok(node.deploy(*NO_SMOKE)).changed == []


def test_a_tier_that_hangs_meets_its_deadline(node: Lab) -> None:
    """Every process of it is stopped while it loads, as by a GPU that does not answer: only SIGKILL ends it."""
    hung: list[int] = []

    def hang() -> None:
        def loading() -> bool:
            with contextlib.suppress(OSError, ValueError):
                return bool(node.record()["tier"] == "no-overlap")
            return False

        if within(120, loading):
            hung.append(node.record()["pid"])
            os.killpg(hung[0], signal.SIGSTOP)

    thread = threading.Thread(target=hang)
    thread.start()
    run = node.deploy(*SERVICE, "--data", "tier=no-overlap", "--data", "ready_timeout_s=10")
    thread.join()
    assert "tier no-overlap did not come up: it was not ready within 10 s; the last" in run.said
    assert "s of them: starting" in run.said and "still there after 5 s, so killed" in run.said
    serves_baseline_again(node, run)
    assert hung and not alive(hung[0])
    ok(node.deploy(*NO_SMOKE))


def test_a_tier_that_did_not_take_effect_is_a_failure(node: Lab) -> None:
    """As when piecewise CUDA graphs disable themselves with a line in the log: it answers, and must not stay."""
    line = run_server(spec_of(node), ["wait"], {}, "supervisor").stdin
    seen = json.dumps(json.dumps(["Using KV cache dtype: torch.bfloat16"]))[1:-1]
    asked = json.dumps(json.dumps(["Capture piecewise CUDA graph end"]))[1:-1]
    assert seen in line
    done = subprocess.run(
        [sys.executable, "-I", "-u", "-"], input=line.replace(seen, asked), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "it came up, but the tier did not take effect:\n    never logged: Capture piecewise" in done.stdout
    status = ok(node.deploy("--dry")).said
    assert "expected serving, found not running" in status and "left of an earlier" not in status


def test_orphans_are_found_named_and_ended_even_when_no_record_tells_of_them(node: Lab) -> None:
    """The supervisor is killed and the record is lost. (Of a killed parent SGLang's children end by themselves.)"""
    ok(node.deploy(*NO_SMOKE))
    parent = node.pid()
    family = [parent, *children(parent)]
    control = [node.root / "tools" / "bin" / "supervisorctl", "-c", node.root / "run" / "supervisord.conf"]
    os.kill(int(subprocess.run([*control, "pid"], capture_output=True, text=True).stdout), signal.SIGKILL)
    (node.root / "run" / "server.json").unlink()
    assert all(alive(pid) for pid in family) and healthy(node), "it serves, and nobody keeps it"
    run = ok(node.deploy(*NO_SMOKE))
    assert run.changed == [p.SERVER]
    assert "(sglang::scheduler" in run.said and run.said.count("expected ended, found left of an earlier server") >= 3
    assert f"ending a process left of an earlier server: {parent}" in run.said
    assert not [pid for pid in family if alive(pid)] and healthy(node)


def test_a_log_is_rotated(node: Lab) -> None:
    log = node.root / "logs" / "sglang-server-baseline.log"
    os.truncate(log, 100_000_000)  # sparse
    get(node.port, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4}})
    assert within(20, lambda: log.with_name(log.name + ".1").exists() and log.stat().st_size < 1_000_000)
    assert ok(node.deploy(*NO_SMOKE)).changed == [], "a rotated log is no reason to do anything"
    log.with_name(log.name + ".1").unlink()


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def test_a_supervisor_that_gave_up_is_quoted_and_the_server_started_again(node: Lab) -> None:
    """The server crashes and its script has become unusable: three starts, then FATAL."""
    script = node.root / "launch" / "run_tp1_baseline.sh"
    script.write_text("#!/bin/sh\nexit 3\n")
    for pid in [node.pid(), *children(node.pid())]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    control = [node.root / "tools" / "bin" / "supervisorctl", "-c", node.root / "run" / "supervisord.conf", "status"]
    assert within(60, lambda: "FATAL" in subprocess.run(control, capture_output=True, text=True).stdout)
    run = ok(node.deploy(*NO_SMOKE))
    assert "expected serving, found not running (FATAL)" in run.said
    assert run.changed == [p.LAUNCHERS, p.SERVER] and healthy(node)


def test_an_api_key_is_asked_for_and_stands_nowhere_but_in_its_file(node: Lab) -> None:
    key = "a-very-secret-key"
    os.environ["GPUWRIGHT_TEST_KEY"] = key
    secrets = json.dumps({"api-key": "env:GPUWRIGHT_TEST_KEY"})
    small = json.dumps({"levels": [1], "min_prompts": 2, "input_len": 16, "output_len": 8})
    run = ok(node.deploy("--data", f"secrets={secrets}", "--data", f"smoke_benchmark={small}"))
    assert run.changed == [p.LAUNCHERS, p.SERVER, p.RECORD, p.SMOKE], "bench_serving is let in"
    generate = ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}})
    assert get(node.port, *generate)[0] == 401 and get(node.port, *generate, key=key)[0] == 200
    path = node.root / "run" / "secrets.yaml"
    assert path.stat().st_mode & 0o777 == 0o600
    found = subprocess.run(["grep", "-rlF", key, node.root, "--exclude-dir=venv"], capture_output=True, text=True)
    assert found.stdout.split() == [str(path)], "not in a log, a script, a record or a result"
    for pid in [node.pid(), *children(node.pid())]:
        assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert key not in run.said
    del os.environ["GPUWRIGHT_TEST_KEY"]
    assert ok(node.deploy(*NO_SMOKE)).changed == [p.LAUNCHERS, p.SERVER, p.RECORD]
    assert not path.exists() and get(node.port, *generate)[0] == 200


OPT = """
import sys, torch
from transformers import OPTConfig, OPTForCausalLM
torch.manual_seed(1)
config = OPTConfig(
    vocab_size=128, hidden_size=128, num_hidden_layers=2, ffn_dim=256, num_attention_heads=4,
    max_position_embeddings=4096, word_embed_proj_dim=128, bos_token_id=127, eos_token_id=127, pad_token_id=127,
    init_std=0.2,
)
OPTForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""


@pytest.fixture
def two_ranks(node: Lab, tmp_path: Path) -> Iterator[list[tuple[NodeSpec, subprocess.Popen[bytes], Path]]]:
    """Both ranks of ladder lab-cpu-2, each from the launch script its node would get."""
    ok(node.deploy(deploy="stop.py"))
    model = tmp_path / "model"
    python = [node.venv / "bin" / "python", "-c", OPT, model]
    subprocess.run(python, check=True, env={"LD_LIBRARY_PATH": str(node.root / "lib")}, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(node.root / "model" / name, model)
    pair = (Member("rank-0", "127.0.0.1"), Member("rank-1", "127.0.0.1"))
    ports = [node.port, node.port + 1]
    ranks = []
    for number, member in enumerate(pair):
        data = group_data("all", "lab") | {
            "root": str(node.root), "port": ports[number], "ladder": "lab-cpu-2",
            "cluster": {"group": "pair", "port": node.port + 2}, "model": {"kind": "folder", "path": str(model)},
        }  # fmt: skip
        spec = build_spec(member.name, data, catalogue(), Sources((), []), pair)
        script, log = tmp_path / f"rank-{number}.sh", tmp_path / f"rank-{number}.log"
        script.write_text(spec.active_script.text)
        with log.open("wb") as handle:
            started = subprocess.Popen(
                ["/bin/bash", script], stdout=handle, stderr=handle, stdin=subprocess.DEVNULL, start_new_session=True
            )
        ranks.append((spec, started, log))
    yield ranks
    for _, started, _ in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def test_two_ranks_serve_one_model_together(two_ranks: list[tuple[NodeSpec, subprocess.Popen[bytes], Path]]) -> None:
    def answers(spec: NodeSpec) -> bool:
        try:
            return get(spec.data.port, "/health", timeout=25)[0] == 200
        except OSError:
            return False

    said = "\n".join(str(log) for _, _, log in two_ranks)
    for spec, started, log in two_ranks:
        ready = within(180, lambda spec=spec, started=started: answers(spec) or started.poll() is not None)
        assert ready and started.poll() is None, f"{said}\n{log.read_text()[-3000:]}"
    first = two_ranks[0][0]
    asked = {"text": "one", "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}
    status, text = get(first.data.port, "/generate", asked)
    assert status == 200 and len(json.loads(text)["output_ids"]) == 12
    for number, (spec, _, log) in enumerate(two_ranks):
        assert f"TP{number}] Load weight end" in log.read_text()
        for pattern in spec.ladder.took_effect.seen if not spec.rank else []:
            assert pattern in log.read_text()
