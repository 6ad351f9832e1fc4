"""check.py as automation runs it, where no node is needed: usage, input, hosts that cannot be reached, reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from operations.drift import _refusal


def check(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "check.py", *arguments],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """Two hosts that nobody can reach, and this machine with nothing of ours on it."""
    path = tmp_path / "inventory" / "lab.py"
    path.parent.mkdir()
    away = {"ssh_hostname": "127.0.0.1", "ssh_port": 9, "root": "/nonexistent/gpuwright"}
    here = {"root": str(tmp_path / "root"), "port": 1025}
    hosts = [("gone-1", away), ("gone-2", away), ("@local", here)]
    path.write_text(f"lab = {hosts!r}\ncanary = ['gone-1']\n")
    return path


@pytest.mark.parametrize(("arguments", "said"), [
    ((), "the following arguments are required: INVENTORY"),
    (("inventory/nowhere.py",), "there is no inventory inventory/nowhere.py"),
    (("inventory/gpu.py", "--limit", "canry"), '"canry" matches no host of this inventory; did you mean "canary"?'),
    (("inventory/gpu.py", "--limit", "gpu-01.example,gpu-99*"), '"gpu-99*" matches no host'),
    (("inventory/gpu.py", "--data", "tier"), "--data tier: expected KEY=VALUE"),
    (("inventory/gpu.py", "--limt", "canary"), "unrecognized arguments"),
])  # fmt: skip
def test_wrong_usage_is_an_error_with_its_reason(arguments: tuple[str, ...], said: str) -> None:
    done = check(*arguments)
    assert (done.returncode, done.stdout) == (1, "") and said in done.stderr


def test_bad_input_is_an_error_of_every_host_and_none_is_touched(inventory: Path, tmp_path: Path) -> None:
    done = check(inventory, "--data", "tier=basline", "--json", tmp_path / "r.json")
    assert done.returncode == 1 and 'did you mean "baseline"?' in done.stderr
    hosts = json.loads((tmp_path / "r.json").read_text())["hosts"]
    assert [host["status"] for host in hosts] == ["error"] * 3
    assert all("bad input, and no host was touched" in host["error"] for host in hosts)


def test_a_host_that_cannot_be_reached_does_not_hide_the_others(inventory: Path, tmp_path: Path) -> None:
    reports = [tmp_path / "new" / name for name in ("r.json", "r.xml", "r.prom")]
    done = check(inventory, "--json", reports[0], "--junit", reports[1], "--prom", reports[2])
    assert done.returncode == 1, done.stdout
    assert "gone-1  error: it could not be reached: " in done.stdout
    assert "3 hosts: 1 drift, 2 error" in done.stdout and "deploy.py -y --limit @local" in done.stdout
    hosts = {host["host"]: host for host in json.loads(reports[0].read_text())["hosts"]}
    assert hosts["gone-2"]["status"] == "error" and hosts["gone-2"]["findings"] == []
    found = hosts["@local"]["findings"]
    assert {each["kind"] for each in found} == {"intentional"} and found[0]["what"].endswith("folders in it")
    assert not (tmp_path / "root").exists(), "looking makes nothing"
    assert all(path.exists() for path in reports) and len(list(reports[0].parent.iterdir())) == 3


def test_where_no_host_can_be_reached_each_is_named(inventory: Path) -> None:
    done = check(inventory, "--limit", "gone-*", "--json", "-", "-q")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and [host["host"] for host in report["hosts"]] == ["gone-1", "gone-2"]


def test_help_says_what_the_exit_codes_mean() -> None:
    done = check("--help")
    assert done.returncode == 0 and "2: one has drifted" in done.stdout and "docs/drift.md" in done.stdout


@pytest.mark.parametrize(("said", "expected"), [
    ("sudo: a password is required\n", "sudo is refused: sudo: a password is required -> allow it without a password"),
    ("noise\nplain is not in the sudoers file.\n", "sudo is refused: plain is not in the sudoers file. -> allow it"),
    ("bash: sudo: command not found\n", "sudo is refused: bash: sudo: command not found -> install sudo"),
    ("Traceback\nOSError: disk\n", "it could not be observed: OSError: disk"),
    ("", "it could not be observed: the command ended at once"),
])  # fmt: skip
def test_what_a_host_says_instead_of_an_answer(said: str, expected: str) -> None:
    assert _refusal(said).startswith(expected)
