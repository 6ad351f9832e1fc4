"""The rendered launch scripts: golden, valid shell, quoted, and ending in `exec`."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from gpuwright import REPOSITORY
from gpuwright.errors import InputErrors
from gpuwright.hostdata import Sources
from gpuwright.spec import Member, NodeFile, NodeSpec, build_spec
from tests.make import catalogue, gpu_spec, group_data, lab_spec

GOLDEN = REPOSITORY / "tests" / "golden"
MEMBERS = (Member("gpu-01", "10.0.0.1"), Member("gpu-02", "10.0.0.2"))


def rank(number: int) -> NodeSpec:
    """The spec of one of two nodes of eight GPUs."""
    data = group_data("all", "gpu") | {"ladder": "glm5-nvfp4-2x8", "cluster": {"group": "pair"}}
    return build_spec(MEMBERS[number].name, data, catalogue(), Sources((), []), MEMBERS)


SPECS = {"gpu": gpu_spec(), "lab": lab_spec(), "pair-0": rank(0), "pair-1": rank(1)}
SCRIPTS = {f"{name}/{Path(f.path).name}": f for name, spec in SPECS.items() for f in spec.scripts}
SERVICES = {f"{name}/{Path(f.path).name}": f for name in ("gpu", "lab") for f in SPECS[name].service_files}


@pytest.mark.parametrize("name", SCRIPTS | SERVICES)
def test_a_file_is_as_recorded(name: str) -> None:
    path, text = GOLDEN / name, (SCRIPTS | SERVICES)[name].text.replace(str(REPOSITORY), "/checkout")
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, "if the change is meant: make golden"


def test_no_golden_file_is_left_over() -> None:
    assert {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.*")} == {
        name for name in SCRIPTS | SERVICES if "." in name
    }


def test_the_scripts_of_the_case_it_was_built_from_are_named_as_there() -> None:
    names = [Path(script.path).name for script in gpu_spec().scripts]
    assert names == [
        "run_tp8_baseline.sh", "run_tp8_fp4_cudnn.sh", "run_tp8_piecewise.sh", "run_tp8_ep8.sh", "run_tp8_mscclpp.sh",
        "run_tp8_piecewise_ep8.sh", "run_tp8_mtp.sh", "run_tp8_torch_compile.sh", "run_tp8_dp_attention.sh",
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_valid_shell(name: str, tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(SCRIPTS[name].text)
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "--severity=style", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def run_with_stub(
    script: NodeFile, root: Path, given: dict[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Run a script for real in the environment `given`, with a python in its venv that prints what the server gets."""
    python = root / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    path = root / "script.sh"
    path.write_text(script.text)
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$$" "$@" --env--\nenv -0\n')
    python.chmod(0o755)
    env = dict(given or {})
    started = subprocess.Popen(["/bin/bash", path], stdout=subprocess.PIPE, env=env)
    out, _ = started.communicate(timeout=20)
    parts = out.decode().rstrip("\0").split("\0")
    assert parts[0] == str(started.pid), "the script must exec the server, so that supervisor's pid is the server's"
    end = parts.index("--env--")
    return parts[1:end], dict(part.split("=", 1) for part in parts[end + 1 :])


def test_arguments_and_environment_reach_the_server_as_written(tmp_path: Path) -> None:
    root = tmp_path / "a root with 'spaces'".replace("'", "")
    spec = lab_spec(root=str(root))
    arguments, env = run_with_stub(spec.active_script, root)
    assert arguments == [
        "-m", "sglang.launch_server", "--model-path", f"{root}/model", "--host", "127.0.0.1", "--port", "31000",
        "--tp-size", "1", "--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph",
        "--max-total-tokens", "20000", "--chunked-prefill-size", "2048", "--random-seed", "1",
        "--sleep-on-idle",
    ]  # fmt: skip
    expected = spec.environment(spec.tier)
    assert {name: env[name] for name in expected} == expected
    assert env["PATH"].startswith(f"{root}/venv/bin:")
    assert env["LD_LIBRARY_PATH"] == f"{root}/lib"
    cache = f"{root}/cache/{spec.runtime_digest[:16]}"
    assert env["FLASHINFER_WORKSPACE_BASE"] == f"{cache}/flashinfer"


def test_a_tier_overrides_the_ladder_and_can_leave_arguments_out() -> None:
    spec = gpu_spec(tier="mtp")
    arguments = spec.arguments(spec.tier)
    assert "--moe-runner-backend cutlass" in arguments and "--moe-runner-backend flashinfer_cutlass" not in arguments
    without = spec.tier.model_copy(update={"without": ["enable-metrics"]})
    assert "--enable-metrics" in arguments and "--enable-metrics" not in spec.arguments(without)


def test_the_same_input_gives_the_same_bytes() -> None:
    assert [s.text for s in gpu_spec().scripts] == [s.text for s in gpu_spec().scripts]


def test_whoever_starts_a_script_the_server_gets_the_written_environment(tmp_path: Path) -> None:
    spec = lab_spec(root=str(tmp_path))
    noise = {
        "PATH": "/usr/bin:/bin",
        "LD_PRELOAD": "",
        "HTTP_PROXY": "http://proxy.example",
        "PYTHONPATH": "/elsewhere",
    }
    _, quiet = run_with_stub(spec.active_script, tmp_path, {"PATH": "/usr/bin:/bin"})
    _, loud = run_with_stub(spec.active_script, tmp_path, noise | {"GPUWRIGHT_SUPERVISED": str(tmp_path)})
    own = {"GPUWRIGHT_SCRIPT", "GPUWRIGHT_SUPERVISED", "PWD", "SHLVL", "_"}
    expected = spec.environment(spec.tier)
    assert {name: value for name, value in loud.items() if name not in own} == expected
    assert {name: value for name, value in quiet.items() if name not in own} == expected
    assert loud["GPUWRIGHT_SUPERVISED"] == str(tmp_path), "what a supervisor started can be told by its mark"


def test_two_nodes_of_eight_differ_in_their_rank_alone() -> None:
    first, second = (spec.active_script.text.splitlines() for spec in (SPECS["pair-0"], SPECS["pair-1"]))
    differing = [(a.strip(), b.strip()) for a, b in zip(first, second, strict=True) if a != b]
    assert differing == [("# node 0 of 2", "# node 1 of 2"), ("--node-rank 0 \\", "--node-rank 1 \\")]
    text = SPECS["pair-1"].active_script.text
    assert "--nnodes 2" in text and "--dist-init-addr 10.0.0.1:20000" in text and "--tp-size 16" in text
    assert SPECS["pair-1"].script_name(SPECS["pair-1"].tier) == "run_tp16_baseline.sh"


SECRET = "s3cret'key$(x)"


def test_secrets_reach_the_server_by_a_file_and_stand_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    (tmp_path / "token").write_text("t0ken\n")
    sources = {"api-key": "env:MY_KEY", "HF_TOKEN": f"file:{tmp_path}/token"}
    root = tmp_path / "root"
    spec = lab_spec(root=str(root), secrets=sources)
    text = spec.active_script.text + "".join(file.text for file in spec.service_files)
    assert SECRET not in text and "t0ken" not in text and SECRET not in repr(spec)
    assert f"--config {root}/run/secrets.yaml" in text
    assert [(file.path, file.mode) for file in spec.secret_files] == [
        (f"{root}/run/secrets.yaml", 0o600),
        (f"{root}/run/secrets.env", 0o600),
    ]
    for file in spec.secret_files:
        Path(file.path).parent.mkdir(parents=True, exist_ok=True)
        Path(file.path).write_text(file.text)
    assert yaml.safe_load(spec.secret_files[0].text) == {"api-key": SECRET}
    arguments, env = run_with_stub(spec.active_script, root)
    assert SECRET not in " ".join(arguments) and env["HF_TOKEN"] == "t0ken"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("env:NOT_SET_AT_ALL", "the variable NOT_SET_AT_ALL is not set on this machine"),
        ("file:/nonexistent/key", "/nonexistent/key cannot be read: No such file"),
    ],
)
def test_a_secret_that_is_not_there_is_named(source: str, said: str) -> None:
    with pytest.raises(InputErrors, match=said):
        _ = lab_spec(secrets={"api-key": source}).secret_files


def test_a_secret_does_not_change_what_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for value in ("one", "two"):
        monkeypatch.setenv("MY_KEY", value)
        digests.append(lab_spec(secrets={"api-key": "env:MY_KEY"}).spec_digest)
    assert digests[0] == digests[1]


def test_what_a_unit_awaits_the_server_by_ends_with_the_server(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "await_server.py"
    path.write_text(lab_spec(port=port).systemd_files[2].text)
    main = subprocess.Popen(["sleep", "60"])
    waiting = subprocess.Popen([sys.executable, "-I", path], env={"MAINPID": str(main.pid)}, stderr=subprocess.PIPE)
    time.sleep(2.5)
    assert waiting.poll() is None, "there is no answer yet, and the server lives"
    main.kill()
    main.wait()
    assert waiting.wait(10) == 1 and b"the server ended" in waiting.communicate()[1]


def test_what_a_unit_awaits_the_server_by_ends_when_it_answers(tmp_path: Path) -> None:
    class Late(http.server.BaseHTTPRequestHandler):
        answers = iter((503, 200))

        def do_GET(self) -> None:
            self.send_response(next(self.answers))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Late) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        path = tmp_path / "await_server.py"
        path.write_text(lab_spec(port=server.server_address[1]).systemd_files[2].text)
        env = {"MAINPID": str(os.getpid()), "http_proxy": "http://192.0.2.1:1"}
        assert subprocess.run([sys.executable, "-I", path], env=env, timeout=30).returncode == 0
        server.shutdown()
