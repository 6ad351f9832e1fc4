"""The node scripts, run for real as the node runs them: `python3 -I -u -` with the script on stdin."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwright.hostdata import TinyModel
from gpuwright.node import NODE_SCRIPTS, observe, script
from gpuwright.state import NodeState, parse_observation
from tests.make import lab_spec


def run(name: str, request: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-u", "-"], input=script(name, request), capture_output=True, text=True
    )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


SCRIPTS = sorted(path.stem for path in NODE_SCRIPTS.glob("*.py") if path.stem != "common")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_python_3_9_and_needs_the_standard_library_alone(name: str) -> None:
    tree = ast.parse(script(name, {}), feature_version=(3, 9))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


# --- write_files


def test_files_are_written_with_their_mode_and_others_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "old.sh", tmp_path / "sub" / "näw.sh"
    old.write_text("old")
    row = {"path": str(new), "text": "päth\n'quoted' \\n \U0001f600\n", "mode": 0o750}
    done = run("write_files", {"files": [row], "remove": [str(old), str(tmp_path / "never")]})
    assert done.returncode == 0, done.stderr
    assert new.read_text() == row["text"] and stat.S_IMODE(new.stat().st_mode) == 0o750
    assert not old.exists() and [path.name for path in new.parent.iterdir()] == [new.name]


def test_a_hard_link_is_not_written_through(tmp_path: Path) -> None:
    cached, installed = tmp_path / "cached", tmp_path / "installed"
    cached.write_text("pristine")
    os.link(cached, installed)
    run("write_files", {"files": [{"path": str(installed), "text": "new", "mode": 0o644}], "remove": []})
    assert (cached.read_text(), installed.read_text()) == ("pristine", "new")


# --- patch_files


def patch_request(folder: Path, steps: list[tuple[bytes, bytes]], **changed: Any) -> dict[str, Any]:
    rows = [
        {"id": f"p{i}", "pre": sha256(a), "post": sha256(b), "diff": unified(a, b)} | changed
        for i, (a, b) in enumerate(steps)
    ]
    return {
        "site": str(folder),
        "originals": str(folder / "originals"),
        "stamp": str(folder / "stamp"),
        "files": [{"path": "module.py", "steps": rows}],
    }


def unified(a: bytes, b: bytes) -> str:
    """A unified diff as git and GNU diff write it, with the mark for a missing last newline."""
    rows = []
    for row in difflib.unified_diff(lines(a), lines(b), "a/module.py", "b/module.py"):
        rows.append(row if row.endswith("\n") else row + "\n\\ No newline at end of file\n")
    return "".join(rows)


def lines(data: bytes) -> list[str]:
    text = data.decode()
    parts = text.split("\n")
    return [part + "\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "originals").mkdir()
    (tmp_path / "stamp").write_text("{}")
    return tmp_path


ONE, TWO, THREE = b"a = 1\nb = 2\nc = 3\n", b"a = 1\nb = 20\nc = 3\n", b"a = 1\nb = 20\nc = 3\nd = 4\n"


def test_a_chain_is_applied_and_the_pristine_file_kept(site: Path) -> None:
    module = site / "module.py"
    module.write_bytes(ONE)
    module.chmod(0o640)
    inode = module.stat().st_ino
    done = run("patch_files", patch_request(site, [(ONE, TWO), (TWO, THREE)]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert module.read_bytes() == THREE
    assert stat.S_IMODE(module.stat().st_mode) == 0o640 and module.stat().st_ino != inode
    assert (site / "originals" / sha256(ONE)).read_bytes() == ONE
    assert not (site / "stamp").exists(), "what was proved of the old content must be proved anew"


def test_a_partly_patched_file_is_finished(site: Path) -> None:
    (site / "module.py").write_bytes(TWO)
    assert run("patch_files", patch_request(site, [(ONE, TWO), (TWO, THREE)])).returncode == 0
    assert (site / "module.py").read_bytes() == THREE


def test_applying_twice_is_applying_once(site: Path) -> None:
    (site / "module.py").write_bytes(ONE)
    run("patch_files", patch_request(site, [(ONE, TWO)]))
    inode = (site / "module.py").stat().st_ino
    assert run("patch_files", patch_request(site, [(ONE, TWO)])).returncode == 0
    assert (site / "module.py").stat().st_ino == inode


@pytest.mark.parametrize(
    ("content", "changed", "expected"),
    [
        (b"a = 7\n", {}, "is not the content of any known state; left as it is"),
        (ONE, {"post": "0" * 64}, "the result's sha256 is"),
        (ONE, {"diff": unified(ONE, TWO).replace(" a = 1", " a = 9")}, "line 1 is not what the diff expects"),
        (ONE, {"diff": unified(ONE, b"a = (\n"), "post": sha256(b"a = (\n")}, "SyntaxError"),
    ],
)
def test_a_wrong_file_or_diff_leaves_the_file_as_it_is(
    site: Path, content: bytes, changed: dict[str, str], expected: str
) -> None:
    (site / "module.py").write_bytes(content)
    done = run("patch_files", patch_request(site, [(ONE, TWO)], **changed))
    assert done.returncode == 1 and expected in done.stdout + done.stderr
    assert (site / "module.py").read_bytes() == content


def test_a_missing_file_is_named(site: Path) -> None:
    done = run("patch_files", patch_request(site, [(ONE, TWO)]))
    assert done.returncode == 1 and "module.py: No such file" in done.stdout


TEXT = st.lists(st.sampled_from(["", "a", "b", " ", "+", "-x", "@@ -1 +1 @@", "--- a", "\\"]), max_size=12)


@given(TEXT, TEXT, st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_diff_applies_to_exactly_its_result(old: list[str], new: list[str], end_old: bool, end_new: bool) -> None:
    a = "\n".join(old).encode() + (b"\n" if old and end_old else b"")
    b = "\n".join(new).encode() + (b"\n" if new and end_new else b"")
    if a == b:
        return
    namespace: dict[str, Any] = {"__name__": "node"}
    text = script("patch_files", {"files": [], "stamp": "/nonexistent", "site": "", "originals": ""})
    exec(text, namespace)
    assert namespace["apply"](a, unified(a, b).encode(), "x") == b


# --- tiny_model


def test_the_tiny_model_is_byte_identical_every_time(tmp_path: Path) -> None:
    model = TinyModel(kind="tiny").model_dump(exclude={"kind"})
    folder = tmp_path / "model"
    assert run("tiny_model", {"path": str(folder), "model": model}).returncode == 0
    manifest = json.loads((folder / "gpuwright-model.json").read_text())
    # Made on CPython 3.11, x86-64; the same integers give the same bytes anywhere.
    assert manifest["files"]["model.safetensors"] == "7927332f833df800d20bff9f7b29bc9aa60430b551635d13712f07ab9b58ab49"
    assert manifest["files"]["tokenizer.json"] == "70657e1753958085e67f828b26754b498f045b57ee2fd121f3bf4f976261205d"
    assert manifest["model"] == model
    for name, digest in manifest["files"].items():
        assert sha256((folder / name).read_bytes()) == digest
    size = (folder / "model.safetensors").stat().st_size
    assert size == 1_877_648


# --- observe


def observed(spec: Any) -> NodeState:
    command = observe(spec)
    done = subprocess.run(["sh", "-c", command.line], input=command.stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return parse_observation("a login shell that prints\n" + done.stdout)


def make_distribution(site: Path, name: str, files: dict[str, bytes], installer: bool = True) -> Path:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    rows = [f"{path},sha256=x,{len(data)}" for path, data in files.items()]
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")
    if installer:
        (info / "INSTALLER").write_text("uv")
    return info


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node's root with a venv of hand-made distributions, each damaged in one way."""
    site = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "venv" / "bin").mkdir()
    (tmp_path / "venv" / "bin" / "python").touch()
    (tmp_path / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\nversion_info = 3.12.3\n")
    make_distribution(site, "whole", {"whole/__init__.py": b"x"})
    make_distribution(site, "Under_Scored.Name", {"us/__init__.py": b"x"})
    make_distribution(site, "lacking", {"lacking/a.py": b"x"})
    (site / "lacking" / "a.py").unlink()
    make_distribution(site, "truncated", {"truncated/a.py": b"xyz"})
    (site / "truncated" / "a.py").write_bytes(b"x")
    make_distribution(site, "cut_off", {"cut/a.py": b"x"}, installer=False)
    (make_distribution(site, "unrecorded", {}) / "RECORD").unlink()
    make_distribution(site, "shares", {"build_backend.py": b"xx"})
    make_distribution(site, "shares_too", {"build_backend.py": b"yyyy"})
    make_distribution(site, "patched", {"flashinfer/jit/cpp_ext.py": b"pristine"})
    (site / "flashinfer" / "jit" / "cpp_ext.py").write_bytes(b"edited, of another size")
    return tmp_path


def test_damage_is_found_and_named(node: Path) -> None:
    state = observed(lab_spec(root=str(node)))
    assert state.venv is not None and state.venv.python == "3.12.3"
    assert set(state.venv.distributions) == {
        "whole", "under-scored-name", "lacking", "truncated", "cut-off", "unrecorded", "shares", "shares-too",
        "patched",
    }  # fmt: skip
    assert state.venv.damaged == {
        "lacking": "lacks lacking/a.py",
        "truncated": "truncated/a.py has 1 bytes, not the recorded 3",
        "cut-off": "has no INSTALLER: its installation was cut off",
        "unrecorded": "has no readable RECORD",
    }
    seen = state.patched["flashinfer/jit/cpp_ext.py"]
    assert seen is not None and seen.sha256 == sha256(b"edited, of another size")


def test_observing_writes_nothing(node: Path) -> None:
    def tree() -> dict[str, tuple[int, int]]:
        return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in node.rglob("*")}

    before = tree()
    observed(lab_spec(root=str(node)))
    assert tree() == before


def test_a_host_with_nothing_of_ours(tmp_path: Path) -> None:
    state = observed(lab_spec(root=str(tmp_path / "not" / "there"), port=1))
    assert state.root_writable and state.disk_free_bytes > 0 and state.memory_bytes > 0
    assert state.venv is None and state.tools is None and state.model is None and state.state is None
    assert state.server.pid is None and not state.server.supervised and state.port is None
    assert state.commands["sh"]


def test_a_port_held_by_another_process_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        state = observed(lab_spec(port=held.getsockname()[1]))
    assert state.port is not None and state.port.pid == os.getpid() and "pytest" in state.port.command


def test_an_interpreter_that_cannot_run_is_not_taken(tmp_path: Path) -> None:
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert observed(lab_spec(interpreter=str(shim))).interpreter is None


@pytest.mark.parametrize("answer", ["", "Traceback …", '{"version": 2}', '{"version": 1}', "[]", '{"version": 1'])
def test_an_unusable_answer_is_quoted(answer: str) -> None:
    from gpuwright.errors import GpuwrightError

    with pytest.raises(GpuwrightError, match="the observation is not usable") as caught:
        parse_observation(answer)
    assert repr(answer) in str(caught.value)
