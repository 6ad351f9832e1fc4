"""The rendered launch scripts: golden, valid shell, quoted, and ending in `exec`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from gpuwright.spec import NodeFile
from tests.make import gpu_spec, lab_spec

GOLDEN = REPOSITORY / "tests" / "golden"
SCRIPTS = {
    f"{name}/{Path(f.path).name}": f for name, spec in (("gpu", gpu_spec()), ("lab", lab_spec())) for f in spec.scripts
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_as_recorded(name: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SCRIPTS[name].text)
    assert path.read_text() == SCRIPTS[name].text, "if the change is meant: make golden"


def test_no_golden_script_is_left_over() -> None:
    assert {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.sh")} == set(SCRIPTS)


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


def run_with_stub(script: NodeFile, root: Path) -> tuple[list[str], dict[str, str]]:
    """Run a script for real, with a python in its venv that prints what the server would get."""
    python = root / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$$" "$@" --env--\nenv -0\n')
    python.chmod(0o755)
    started = subprocess.Popen(["env", "-i", "bash", "-c", script.text], stdout=subprocess.PIPE)
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
