"""The server on the real stack: starts that fail and what is said of them, rollback, orphans, logs, secrets, two ranks.

The tests share one node, which serves tier baseline, and build on each other in the order of this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from gpuwright.hostdata import Sources
from gpuwright.ladder import TookEffect
from gpuwright.node import run_server
from gpuwright.spec import NodeSpec, build_spec
from tests import sshd
from tests.fleet.nodes import within
from tests.lab.conftest import PYINFRA, Lab, Run, alive, children, free_ports, ok
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
    blind = ("--data", "ignored_checks=" + json.dumps({"model-whole": "the test wants a server that crashes"}))
    run = node.deploy(*SERVICE, "--data", "tier=no-radix", "--data", f"model={model}", *blind)
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
    spec = spec_of(node)
    shown = TookEffect(seen=["Capture piecewise CUDA graph end"], never=["Cuda graph is disabled because"])
    asked = replace(spec, ladder=spec.ladder.model_copy(update={"took_effect": shown}))
    line = run_server(asked, ["wait"], {}, "supervisor").stdin
    done = subprocess.run([sys.executable, "-I", "-u", "-"], input=line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "it came up, but the tier did not take effect:\n    never logged: Capture piecewise" in done.stdout
    assert re.search(r"\n    logged: .*Cuda graph is disabled because of using torch native", done.stdout), done.stdout
    status = ok(node.deploy("--dry")).said
    assert "expected serving, found not running" in status and "left of an earlier" not in status


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("kill $child; sleep 300", r"its process sglang::scheduler_TP0.* \(pid \d+\) ended, and it lives on"),
        ("touch {root}/run/go; sleep 300", r"port \d+ was taken by pid {pid} \(.*pytest.*\) meanwhile"),
    ],
    ids=["a child is gone", "the port is gone"],
)  # fmt: skip
def test_a_server_that_cannot_come_up_any_more_is_not_waited_for(node: Lab, after: str, said: str) -> None:
    """A stand-in for an engine that lives on after what it cannot survive, under the real supervisor."""
    script, go = node.root / "launch" / "stand_in.sh", node.root / "run" / "go"
    go.unlink(missing_ok=True)
    script.write_text(
        "#!/bin/bash\nbash -c 'exec -a sglang::scheduler_TP0 sleep 300' & child=$!\nsleep 2\n"
        + after.format(root=node.root)
        + "\n"
    )
    script.chmod(0o755)
    spec = spec_of(node)
    conf = Path(spec.supervisor_conf.path)
    conf.write_text(spec.supervisor_conf.text.replace(spec.active_script.path, str(script)))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        subprocess.Popen([sys.executable, "-I", "-u", "-"], text=True, **pipes) as started,
        socket.socket() as held,
    ):
        assert started.stdin is not None and started.stdout is not None
        started.stdin.write(run_server(spec, ["stop", "start", "wait"], {}, "supervisor").stdin)
        started.stdin.close()
        if "go" in after and within(30, go.exists):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", node.port))
            held.listen()
        output = started.stdout.read()
    assert started.returncode == 1
    script.unlink()
    assert re.search(f"tier baseline did not come up: {said.format(pid=os.getpid())}", output), output
    assert not subprocess.run(["pgrep", "-f", "sglang::scheduler_TP0"], capture_output=True, text=True).stdout


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
    os.truncate(log, 110_000_000)  # sparse
    get(node.port, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4}})
    assert within(20, lambda: log.with_name(log.name + ".1").exists() and log.stat().st_size < 1_000_000)
    assert ok(node.deploy(*NO_SMOKE)).changed == [], "a rotated log is no reason to do anything"
    log.with_name(log.name + ".1").unlink()


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
    os.environ["GPUWRIGHT_TEST_ADMIN"] = "the-admins-key"  # with it, the cache is emptied for nobody else
    secrets = json.dumps({"api-key": "env:GPUWRIGHT_TEST_KEY", "admin-api-key": "env:GPUWRIGHT_TEST_ADMIN"})
    small = json.dumps({"smoke": {"levels": [1], "input_len": 64, "output_len": 32, "min_duration_s": 0.1}})
    run = ok(node.deploy("--data", f"secrets={secrets}", "--data", f"profiles={small}"))
    assert "verdict: accepted" in run.said, "the cache was emptied before each repeat"
    assert run.changed == [p.LAUNCHERS, p.SERVER, p.RECORD, p.SMOKE], "bench_serving is let in"
    generate = ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}})
    assert get(node.port, *generate)[0] == 401 and get(node.port, *generate, key=key)[0] == 200
    path = node.root / "run" / "secrets.yaml"
    assert path.stat().st_mode & 0o777 == 0o600
    found = subprocess.run(["grep", "-rlF", key, node.root, "--exclude-dir=venv"], capture_output=True, text=True)
    holders = {Path(name) for name in found.stdout.split()}
    assert holders == {path, path.with_name("ready.json")}, "not in a log, a script, a record or a result"
    assert {holder.stat().st_mode & 0o777 for holder in holders} == {0o600} and path.parent.stat().st_mode & 0o77 == 0
    for pid in [node.pid(), *children(node.pid())]:
        assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert key not in run.said
    del os.environ["GPUWRIGHT_TEST_KEY"], os.environ["GPUWRIGHT_TEST_ADMIN"]
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


class Pair:
    """Two hosts that serve one model together: this machine, and this machine over SSH with a root of its own."""

    def __init__(self, roots: list[Path], ports: list[int], inventory: Path) -> None:
        self.roots, self.ports, self.inventory = roots, ports, inventory

    def deploy(self, *arguments: str, deploy: str = "deploy.py") -> Run:
        done = subprocess.run(
            [PYINFRA, self.inventory, deploy, "-y", "--json", *arguments],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Run(done.returncode, done.stderr, json.loads(done.stdout) if done.stdout.strip() else None)

    def pids(self) -> list[int]:
        return [json.loads((root / "run" / "server.json").read_text())["pid"] for root in self.roots]

    def log(self, rank: int) -> str:
        return (self.roots[rank] / "logs" / "sglang-server-baseline.log").read_text()


@pytest.fixture(scope="module")
def pair(node: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    reason = sshd.reason_to_skip()
    if reason:
        pytest.skip(reason)
    ok(node.deploy(deploy="stop.py"))
    folder = tmp_path_factory.mktemp("pair")
    model = folder / "model"
    python = [node.venv / "bin" / "python", "-c", OPT, model]
    subprocess.run(python, check=True, env={"LD_LIBRARY_PATH": str(node.root / "lib")}, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(node.root / "model" / name, model)
    other = folder / "root"  # the stack of the first, in a root of its own
    other.mkdir()
    for name in ("venv", "tools", "lib"):
        (other / name).symlink_to(node.root / name)
    inventory = folder / "inventory" / "lab.py"
    inventory.parent.mkdir()
    roots, (*ports, rendezvous) = [node.root, other], free_ports(3)
    common = {
        "ladder": "lab-cpu-2", "cluster": {"group": "pair", "port": rendezvous}, "smoke": "never",
        "model": {"kind": "folder", "path": str(model)}, "cluster_address": "127.0.0.1",
        "stages": ["system", "model", "launchers", "service"],
    }  # fmt: skip
    with sshd.running(folder) as server:
        data = [common | {"root": str(root), "port": port} for root, port in zip(roots, ports, strict=True)]
        hosts = [("@local", data[0]), ("127.0.0.1", data[1] | server.data())]
        inventory.write_text(f"lab = pair = {hosts!r}\n")
        found = Pair(roots, ports, inventory)
        yield found
        found.deploy(deploy="stop.py")


def test_two_hosts_serve_one_model_together(pair: Pair) -> None:
    run = ok(pair.deploy())
    assert p.SERVER in run.changed
    asked = {"text": "one", "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}
    status, text = get(pair.ports[0], "/generate", asked)
    assert status == 200 and len(json.loads(text)["output_ids"]) == 12
    for rank in (0, 1):
        assert f"TP{rank}] Load weight end" in pair.log(rank)
    assert "Using KV cache dtype: torch.bfloat16" in pair.log(0)
    assert ok(pair.deploy()).changed == []


def test_what_restarts_one_rank_restarts_all(pair: Pair) -> None:
    before = pair.pids()
    script = pair.roots[1] / "launch" / "run_tp2_baseline.sh"
    script.write_text(script.read_text() + "# an edit by hand\n")
    started = pair.roots[1] / "run" / "server.json"
    record = json.loads(started.read_text())
    record["runs_on"]["launch script"] = "another"
    started.write_text(json.dumps(record))
    run = ok(pair.deploy())
    assert "restart tier baseline, because 127.0.0.1 restarts" in run.said
    assert not set(before) & set(pair.pids()) and get(pair.ports[0], "/health")[0] == 200


def test_a_limit_that_would_start_one_rank_alone_is_refused(pair: Pair) -> None:
    run = pair.deploy("--limit", "@local")
    assert run.code == 1 and "@local serves together with 127.0.0.1, which --limit leaves out" in run.said
