"""The drift check of a node that serves: what the running server is, beside what lies on the disk.

The tests share one node, which serves tier baseline, and build on each other in the order of this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from gpuwright.drift import Report, Verdict
from tests.fleet.nodes import within
from tests.lab.conftest import Lab, ok

NO_SMOKE = ("--data", "smoke=never")


@pytest.fixture(scope="module")
def node(lab: Lab) -> Iterator[Lab]:
    ok(lab.deploy(*NO_SMOKE))
    yield lab
    ok(lab.deploy(*NO_SMOKE))


def check(node: Lab, *arguments: str) -> tuple[int, Verdict]:
    """check.py's exit code and its verdict on the node."""
    data = ["--data", f"root={node.root}", "--data", f"port={node.port}"]
    done = subprocess.run(
        [sys.executable, "check.py", node.inventory, *data, "-q", "--json", "-", *arguments],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    (verdict,) = Report.model_validate_json(done.stdout).hosts
    return done.returncode, verdict


def said(verdict: Verdict) -> list[str]:
    return [f"{each.kind} {each.stage}: {each}" for each in verdict.findings]


def tree(root: Path) -> dict[str, tuple[int, int, int, int]]:
    """Everything under a node's root but what a running server writes: its log, its sockets, its JIT caches."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in [".", *names]:
            path = Path(folder) / name
            stat = path.lstat()
            found[str(path)] = (stat.st_mtime_ns, stat.st_size, stat.st_mode, stat.st_ino)
    return {path: stat for path, stat in found.items() if not path.startswith((f"{root}/logs", f"{root}/cache"))}


def test_a_deployed_node_is_clean_and_the_check_writes_nothing(node: Lab) -> None:
    before = tree(node.root)
    assert len(before) > 40_000, "the whole venv, too"
    code, verdict = check(node)
    assert (code, verdict.status, said(verdict)) == (0, "clean", [])
    assert verdict.deployed is not None and verdict.deployed.tier == "baseline"
    code, _ = check(node, "--data", "integrity=deep", "--diff")
    assert code == 0
    assert tree(node.root) == before


def test_drift_py_says_the_same_and_its_exit_code_is_the_verdict(node: Lab) -> None:
    run = node.deploy(deploy="drift.py")
    assert run.code == 0 and "[@local]   clean: preflight, system" in run.said
    other = node.deploy("--data", "tier=no-radix", deploy="drift.py")
    assert other.code == 2 and "intentional service" in other.said
    report = json.loads(
        subprocess.run(
            node.command("drift.py", "-y", "--json"), cwd=REPOSITORY, capture_output=True, text=True
        ).stdout
    )  # fmt: skip
    assert [host["status"] for host in report["hosts"]] == ["clean"]


def test_a_server_that_was_started_before_a_patch_is_drift(node: Lab) -> None:
    """The pristine file comes back under it, as a reinstall by hand brings it; what runs is not what lies there."""
    ours, pid = node.patched.read_bytes(), node.pid()
    (original,) = [
        path for path in (node.root / "patches" / "originals").iterdir() if b"get_cuda_version" in path.read_bytes()
    ]
    node.patched.write_bytes(original.read_bytes())
    code, verdict = check(node)
    assert code == 2
    first, second = said(verdict)
    assert first.startswith("corrective patches: flashinfer/jit/cpp_ext.py by") and "found pristine" in first
    assert second.startswith("corrective service: restart tier baseline, because of: patches, installed files (")
    assert "flashinfer/jit/cpp_ext.py was written last" in second
    node.patched.write_bytes(ours)
    assert check(node)[0] == 0 and node.pid() == pid, "the very content that it was started on is back"


def test_an_edited_engine_file_is_found_in_the_venv_and_in_the_server(node: Lab) -> None:
    target = node.site / "sglang" / "version.py"
    ours = target.read_bytes()
    target.write_bytes(ours + b"# by hand\n")
    code, verdict = check(node)
    target.write_bytes(ours)
    assert code == 2
    assert [each.stage for each in verdict.findings] == ["runtime", "service"]
    assert "sglang: expected 0.5.9, whole, found sglang/version.py has" in said(verdict)[0]


def test_a_process_of_other_arguments_and_variables_than_its_script_is_drift_and_is_replaced(node: Lab) -> None:
    """Started by hand from an edited script, which was put back afterwards: nothing on the disk shows it."""
    script = node.root / "launch" / "run_tp1_baseline.sh"
    ours, before = script.read_text(), node.pid()
    edited = ours.replace("--max-total-tokens 20000", "--max-total-tokens 10000").replace(
        "export OMP_NUM_THREADS=2", "export OMP_NUM_THREADS=1\nexport HF_TOKEN=hf_never_shown"
    )
    assert edited.count("10000") == 1 and "hf_never_shown" in edited
    script.write_text(edited)
    control = [node.root / "tools" / "bin" / "supervisorctl", "-c", node.root / "run" / "supervisord.conf"]
    subprocess.run([*control, "stop", "sglang-server"], check=True, capture_output=True)
    starting = subprocess.Popen([*control, "start", "sglang-server"], stdout=subprocess.DEVNULL)  # waits until it is up

    def engine() -> bool:
        pid = node.pid()
        return pid != before and pid > 0 and b"sglang.launch_server" in Path(f"/proc/{pid}/cmdline").read_bytes()

    assert within(30, engine)
    starting.terminate()
    starting.wait()
    script.write_text(ours)
    script.chmod(0o755)
    code, verdict = check(node)
    found = said(verdict)[-1]
    assert code == 2 and found.startswith(f"corrective service: tier baseline, pid {node.pid()}: expected what its")
    assert "--max-total-tokens is 10000, not 20000" in found
    assert "variable OMP_NUM_THREADS is 1, not 2" in found and "variable HF_TOKEN is not in it" in found
    assert "hf_never_shown" not in verdict.model_dump_json()
    run = ok(node.deploy(*NO_SMOKE))
    assert run.changed == [p.SERVER] and check(node)[0] == 0
