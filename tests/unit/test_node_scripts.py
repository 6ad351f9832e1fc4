"""The node scripts, run for real as the node runs them: `python3 -I -u -` with the script on stdin."""

from __future__ import annotations

import ast
import base64
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwright import series
from gpuwright.hostdata import TinyModel
from gpuwright.node import NODE_SCRIPTS, _keep_builds, observe, run_server, script
from gpuwright.patches import exact_applier
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
    beside = {"bench": {"requests", "sglang"}, "fetch_model": {"huggingface_hub"}}  # they run in the venv's Python
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | beside.get(name, set())


def test_an_observation_does_not_wait_for_a_pipe_in_the_models_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    spec = lab_spec(root=str(tmp_path / "root"), model={"kind": "folder", "path": str(tmp_path)})
    done = subprocess.run(
        [sys.executable, "-I", "-u", "-"], input=observe(spec).stdin, capture_output=True, text=True, timeout=60
    )
    model = parse_observation(done.stdout).model
    assert model is not None and model.model_type is None and model.files == {}


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


def test_nothing_is_written_where_another_deploy_came_in_between(tmp_path: Path) -> None:
    unit, state = tmp_path / "unit", tmp_path / "state.json"
    unit.write_text("ours")
    row = {"path": str(state), "text": "deployed", "mode": 0o644}
    request = {"files": [row], "remove": [], "only_where": {str(unit): sha256(b"ours")}}
    assert run("write_files", request).returncode == 0 and state.read_text() == "deployed"
    state.unlink()
    for other in ("another's", None):
        unit.write_text(other) if other else unit.unlink()
        done = run("write_files", request)
        assert done.returncode == 1 and not state.exists()
        assert done.stdout.startswith(f"not recorded: {unit} is not as this deploy left it")
        assert done.stdout.endswith("deploy again\n")


def test_what_the_machine_refuses_is_said_without_a_traceback() -> None:
    row = {"path": "/proc/none/state.json", "text": "", "mode": 0o644}
    done = run("write_files", {"files": [row], "remove": []})
    assert (done.returncode, done.stderr) == (1, "failed: /proc/none: No such file or directory\n")


# --- patch_files


def patch_request(folder: Path, steps: list[tuple[bytes, bytes]], **changed: Any) -> dict[str, Any]:
    rows = [
        {"id": f"p{i}", "pre": sha256(a), "post": sha256(b), "diff": unified(a, b)} | changed
        for i, (a, b) in enumerate(steps)
    ]
    place = {"site": str(folder / "site"), "path": "module.py"}
    item = {**place, "distribution": "dist", "pristine": sha256(ONE), "steps": rows}
    return {
        "originals": str(folder / "originals"),
        "manifest": str(folder / "applied.json"),
        "stamp": str(folder / "stamp"),
        "files": [item | {"known": [sha256(TWO), sha256(THREE), sha256(b"old\n")], "forget": False}],
    }


def unified(a: bytes, b: bytes) -> str:
    return series.unified(a, b, "module.py")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A root with originals, a stamp, and a venv's site-packages reached through a symbolic link."""
    (tmp_path / "originals").mkdir()
    (tmp_path / "stamp").write_text("{}")
    (tmp_path / "real").mkdir()
    (tmp_path / "site").symlink_to("real")
    return tmp_path


ONE, TWO, THREE = b"a = 1\nb = 2\nc = 3\n", b"a = 1\nb = 20\nc = 3\n", b"a = 1\nb = 20\nc = 3\nd = 4\n"
CHAIN = [(ONE, TWO), (TWO, THREE)]


def manifest(site: Path) -> dict[str, Any]:
    path = site / "applied.json"
    return json.loads(path.read_text()) if path.exists() else {}


def test_a_chain_is_applied_and_the_pristine_file_kept(site: Path) -> None:
    module = site / "real" / "module.py"
    module.write_bytes(ONE)
    module.chmod(0o640)
    inode = module.stat().st_ino
    done = run("patch_files", patch_request(site, CHAIN))
    assert done.returncode == 0, done.stdout + done.stderr
    assert module.read_bytes() == THREE
    assert stat.S_IMODE(module.stat().st_mode) == 0o640 and module.stat().st_ino != inode
    assert (site / "site").is_symlink(), "a symlinked site-packages stays one"
    assert (site / "originals" / sha256(ONE)).read_bytes() == ONE
    assert manifest(site)["module.py"] == {"pristine": sha256(ONE), "post": sha256(THREE), "distribution": "dist"}
    assert not (site / "stamp").exists(), "what was proved of the old content must be proved anew"


def test_a_file_that_is_of_another_version_by_now_is_forgotten(site: Path) -> None:
    module = site / "real" / "module.py"
    module.write_bytes(ONE)
    request = patch_request(site, CHAIN)
    assert run("patch_files", request).returncode == 0 and manifest(site)
    module.write_bytes(b"of another version\n")
    request["files"][0] |= {"steps": [], "forget": True}
    done = run("patch_files", request)
    assert (done.returncode, done.stdout) == (0, "forgot module.py\n")
    assert manifest(site) == {} and module.read_bytes() == b"of another version\n"


def test_a_file_of_another_owner_keeps_its_owner(site: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    module = site / "real" / "module.py"
    module.write_bytes(ONE)
    os.chown(module, 65534, 65534)
    assert run("patch_files", patch_request(site, CHAIN)).returncode == 0
    assert module.read_bytes() == THREE and (module.stat().st_uid, module.stat().st_gid) == (65534, 65534)


@pytest.mark.parametrize("content", [TWO, THREE])
def test_a_partly_or_wholly_patched_file_is_finished(site: Path, content: bytes) -> None:
    (site / "real" / "module.py").write_bytes(content)
    assert run("patch_files", patch_request(site, CHAIN)).returncode == 0
    assert (site / "real" / "module.py").read_bytes() == THREE and "module.py" in manifest(site)


def test_applying_twice_is_applying_once(site: Path) -> None:
    module = site / "real" / "module.py"
    module.write_bytes(ONE)
    run("patch_files", patch_request(site, CHAIN))
    inode = module.stat().st_ino
    assert run("patch_files", patch_request(site, CHAIN)).returncode == 0
    assert module.stat().st_ino == inode


def test_an_earlier_image_of_ours_is_redone_from_the_kept_original(site: Path) -> None:
    module = site / "real" / "module.py"
    module.write_bytes(b"old\n")
    lacking = run("patch_files", patch_request(site, CHAIN))
    assert lacking.returncode == 1 and "is not kept on this node: install dist anew" in lacking.stdout
    (site / "originals" / sha256(ONE)).write_bytes(ONE)
    assert run("patch_files", patch_request(site, CHAIN)).returncode == 0
    assert module.read_bytes() == THREE


def test_a_damaged_original_is_not_used(site: Path) -> None:
    (site / "real" / "module.py").write_bytes(THREE)
    (site / "originals" / sha256(ONE)).write_bytes(b"damaged")
    done = run("patch_files", patch_request(site, []))
    assert done.returncode == 1 and "is damaged" in done.stdout
    assert (site / "real" / "module.py").read_bytes() == THREE


def test_without_steps_the_pristine_content_comes_back_byte_for_byte(site: Path) -> None:
    module = site / "real" / "module.py"
    module.write_bytes(ONE)
    run("patch_files", patch_request(site, CHAIN))
    done = run("patch_files", patch_request(site, []))
    assert done.returncode == 0 and module.read_bytes() == ONE and manifest(site) == {}
    assert run("patch_files", patch_request(site, [])).returncode == 0, "and once more"


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
    (site / "real" / "module.py").write_bytes(content)
    done = run("patch_files", patch_request(site, [(ONE, TWO)], **changed))
    assert done.returncode == 1 and expected in done.stdout + done.stderr
    assert (site / "real" / "module.py").read_bytes() == content


def test_a_foreign_file_is_not_put_back_either(site: Path) -> None:
    (site / "real" / "module.py").write_bytes(b"a = 7\n")
    assert run("patch_files", patch_request(site, [])).returncode == 1
    assert (site / "real" / "module.py").read_bytes() == b"a = 7\n"


def test_a_missing_file_is_named(site: Path) -> None:
    done = run("patch_files", patch_request(site, [(ONE, TWO)]))
    assert done.returncode == 1 and "module.py: No such file" in done.stdout


NOBODY = 65534


def run_unprivileged(folder: Path, request: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run patch_files as a user who is not root, on a tree that is that user's."""
    if os.geteuid() != 0:
        return run("patch_files", request)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    for parent in folder.parents:
        if len(parent.parts) > 2:  # pytest's own folders, which are root's alone
            parent.chmod(parent.stat().st_mode | 0o055)
    command = ["/usr/bin/python3", "-I", "-u", "-"]  # one that any user may run
    return subprocess.run(command, input=script("patch_files", request), capture_output=True, text=True, user=NOBODY)


def test_an_unprivileged_owner_can_patch_and_put_back(site: Path) -> None:
    module = site / "real" / "module.py"
    module.write_bytes(ONE)
    done = run_unprivileged(site, patch_request(site, CHAIN))
    assert done.returncode == 0, done.stdout + done.stderr
    assert module.read_bytes() == THREE
    assert run_unprivileged(site, patch_request(site, [])).returncode == 0
    assert module.read_bytes() == ONE


def test_a_read_only_site_packages_gives_a_clear_error(site: Path) -> None:
    """As an unprivileged user, whom a folder's mode binds."""
    (site / "real" / "module.py").write_bytes(ONE)
    (site / "real").chmod(0o555)
    done = run_unprivileged(site, patch_request(site, CHAIN))
    (site / "real").chmod(0o755)
    assert done.returncode == 1
    assert "cannot be written (Permission denied): make site-packages writable for uid" in done.stdout, done.stderr
    assert (site / "real" / "module.py").read_bytes() == ONE


KILLER = """
import builtins, os, signal, sys
_count = 0
def _at():
    global _count
    _count += 1
    if _count == KILL_AT:
        os.kill(os.getpid(), signal.SIGKILL)
def _killing(real):
    def call(*arguments, **options):
        _at()  # before the call takes effect
        result = real(*arguments, **options)
        _at()  # and after it
        return result
    return call
class _File:
    def __init__(self, real): self.real = real
    def __enter__(self): return self
    def __exit__(self, *a): self.real.close()
    def write(self, data):
        _at()
        self.real.write(data[: len(data) // 2]); self.real.flush()
        _at()  # with half of it written
        self.real.write(data[len(data) // 2 :])
    def __getattr__(self, name): return getattr(self.real, name)
_open = builtins.open
def _opening(path, mode="r", *a, **k):
    return _File(_open(path, mode, *a, **k)) if "w" in mode else _open(path, mode, *a, **k)
builtins.open = _opening
for _name in ("replace", "unlink", "chmod", "fsync"):
    setattr(os, _name, _killing(getattr(os, _name)))
"""


@pytest.mark.parametrize("wanted", ["apply", "put back"])
def test_killed_at_any_write_the_file_is_old_or_new_and_the_next_run_finishes(tmp_path: Path, wanted: str) -> None:
    kills = 0
    for at in range(1, 200):
        folder = tmp_path / str(at)
        for name in ("originals", "site"):
            (folder / name).mkdir(parents=True)
        (folder / "stamp").write_text("{}")
        module = folder / "site" / "module.py"
        module.write_bytes(ONE)
        if wanted == "put back":
            assert run("patch_files", patch_request(folder, CHAIN)).returncode == 0
            (folder / "stamp").write_text("{}")
        old, new = (ONE, THREE) if wanted == "apply" else (THREE, ONE)
        request = patch_request(folder, CHAIN if wanted == "apply" else [])
        text = KILLER.replace("KILL_AT", str(at)) + script("patch_files", request)
        killed = subprocess.run([sys.executable, "-I", "-u", "-"], input=text, capture_output=True, text=True)
        assert module.read_bytes() in (old, new), f"killed at write {at}"
        if module.read_bytes() != ONE:
            assert (folder / "originals" / sha256(ONE)).read_bytes() == ONE and "module.py" in manifest(folder)
        assert run("patch_files", request).returncode == 0
        assert module.read_bytes() == new and ("module.py" in manifest(folder)) == (wanted == "apply")
        assert [path.name for path in module.parent.iterdir()] == ["module.py"], "nothing is left beside it"
        if killed.returncode == 0:
            break
        assert killed.returncode == -9, killed.stderr
        kills += 1
    assert kills >= (20 if wanted == "apply" else 12), "every write was killed before, in the middle and after"


TEXT = st.lists(st.sampled_from(["", "a", "b", " ", "+", "-x", "@@ -1 +1 @@", "--- a", "\\"]), max_size=12)


@given(TEXT, TEXT, st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_apply_then_revert_is_the_identity(old: list[str], new: list[str], end_old: bool, end_new: bool) -> None:
    a = "\n".join(old).encode() + (b"\n" if old and end_old else b"")
    b = "\n".join(new).encode() + (b"\n" if new and end_new else b"")
    if a == b:
        return
    apply = exact_applier()
    assert apply(a, unified(a, b).encode()) == b
    assert apply(apply(a, unified(a, b).encode()), unified(b, a).encode()) == a


@given(st.lists(TEXT, min_size=2, max_size=4, unique_by=tuple))
@settings(max_examples=25, deadline=None)
def test_any_chain_applied_twice_is_applied_once_and_put_back_is_as_before(texts: list[list[str]]) -> None:
    contents = [("\n".join(text) + "\n").encode() for text in texts]
    contents = list(dict.fromkeys(contents))
    if len(contents) < 2:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "originals").mkdir()
        (folder / "site").mkdir()
        module = folder / "site" / "module.txt"
        module.write_bytes(contents[0])
        request = patch_request(folder, list(itertools.pairwise(contents)))
        request["files"][0] |= {
            "path": "module.txt",
            "pristine": sha256(contents[0]),
            "known": [*map(sha256, contents[1:])],
        }
        back = json.loads(json.dumps(request))
        back["files"][0]["steps"] = []
        assert run("patch_files", request).returncode == 0 and module.read_bytes() == contents[-1]
        inode = module.stat().st_ino
        assert run("patch_files", request).returncode == 0 and module.stat().st_ino == inode
        assert run("patch_files", back).returncode == 0 and module.read_bytes() == contents[0]


# --- keep_foreign


def test_a_foreign_file_is_copied_and_shown_against_what_it_was_edited_from(site: Path) -> None:
    edited = THREE + b"e = 5\n"
    (site / "real" / "module.py").write_bytes(edited)
    request = patch_request(site, CHAIN) | {"foreign": str(site / "foreign")}
    without = run("keep_foreign", request)
    assert without.returncode == 0 and "no original is kept" in without.stdout
    (site / "originals" / sha256(ONE)).write_bytes(ONE)
    done = run("keep_foreign", request)
    assert "--- the file after p1\n+++ as it was found\n" in done.stdout and done.stdout.endswith("+e = 5\n")
    (copy,) = (site / "foreign").iterdir()
    assert copy.read_bytes() == edited and copy.name == f"{sha256(edited)[:16]}-module.py"
    assert (site / "real" / "module.py").read_bytes() == edited


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
    return parse_observation("a login shell that prints, and half a line \x1b[1m" + done.stdout + "\nbye {}\n")


def recorded(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def make_distribution(site: Path, name: str, files: dict[str, bytes], installer: bool = True) -> Path:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    rows = [f"{path},sha256={recorded(data)},{len(data)}" for path, data in files.items()]
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
    compiled = "whole/__pycache__/__init__.cpython-312.pyc"
    make_distribution(site, "whole", {"whole/__init__.py": b"x", compiled: b"as pip recorded it"})
    (site / compiled).write_bytes(b"as Python wrote it anew")
    make_distribution(site, "Under_Scored.Name", {"us/__init__.py": b"x"})
    make_distribution(site, "lacking", {"lacking/a.py": b"x"})
    (site / "lacking" / "a.py").unlink()
    make_distribution(site, "truncated", {"truncated/a.py": b"xyz"})
    (site / "truncated" / "a.py").write_bytes(b"x")
    make_distribution(site, "edited", {"edited/a.py": b"x = 1"})
    (site / "edited" / "a.py").write_bytes(b"x = 2")
    make_distribution(site, "binary", {"binary/a.so": b"x = 1"})
    (site / "binary" / "a.so").write_bytes(b"x = 2")
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
        "patched", "edited", "binary",
    }  # fmt: skip
    assert state.venv.damaged == {
        "lacking": "lacks lacking/a.py",
        "truncated": "truncated/a.py has 1 bytes, not the recorded 3",
        "edited": "edited/a.py has another content than recorded",
        "cut-off": "has no INSTALLER: its installation was cut off",
        "unrecorded": "has no readable RECORD",
    }
    seen = state.patched["flashinfer/jit/cpp_ext.py"]
    assert seen is not None and seen.sha256 == sha256(b"edited, of another size")


def test_what_is_found_does_not_depend_on_how_the_work_is_shared_out(node: Path) -> None:
    """Among one process, or among as many as there may be: a digest is kept, and another day compared with."""
    spec, shared = lab_spec(root=str(node)), "1 + sum(map(weight, items)) // 100_000"
    script = observe(spec).stdin
    assert script.count(shared) == 1
    found = []
    for jobs in ("1", "2", "8"):
        text = script.replace("min(8, os.cpu_count() or 1, " + shared, f"min({jobs}, 8")
        done = subprocess.run(["python3", "-IBu", "-"], input=text, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout)["venv"])
    assert found[0] == found[1] == found[2] and found[0]["installed"]["newest"]


def test_a_venv_whose_python_has_become_another_is_none(node: Path) -> None:
    """As after an upgrade of the system: /usr/bin/python3 is another Python, and sees nothing of what is installed."""
    python = node / "venv" / "bin" / "python"
    python.unlink()
    for name, there in (("python3.12", True), ("python3.13", False), ("python3", True)):
        (node / name).touch()
        python.symlink_to(node / name)
        assert (observed(lab_spec(root=str(node))).venv is not None) == there
        python.unlink()


def test_another_build_of_the_same_version_is_found(node: Path) -> None:
    """Whole by its own account: it was installed by hand from a wheel of one's own."""
    (node / "run").mkdir()
    spec = lab_spec(root=str(node))
    site, builds = node / "venv" / "lib" / "python3.12" / "site-packages", node / "run" / "builds.json"

    def keep(*anew: str) -> None:
        command = _keep_builds(spec, list(anew))
        done = subprocess.run(["python3", "-IBu", "-"], input=command.stdin, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def problem() -> str | None:
        state = observed(spec)
        assert state.venv is not None
        return state.venv.damaged.get("whole")

    assert problem() is None, "nothing is on record yet"
    keep()
    assert problem() is None and len(json.loads(builds.read_text())) == 10, "all but the one without a RECORD"
    info = site / "whole-1.0.dist-info"
    (info / "REQUESTED").touch()
    (info / "RECORD").write_text((info / "RECORD").read_text() + "whole-1.0.dist-info/REQUESTED,,\n")
    assert problem() is None, "another installer's metadata of the same wheel"
    shutil.rmtree(info)
    make_distribution(site, "whole", {"whole/__init__.py": b"mine"})
    assert problem() == "is another build of this version than the deploy installed"
    keep("edited")
    assert problem() is not None, "what a sync has not installed keeps its record"
    keep("whole")
    assert problem() is None


def test_deep_reads_everything_and_remembers_what_it_read(node: Path) -> None:
    (node / "run").mkdir()
    spec = lab_spec(root=str(node), integrity="deep")
    for _ in range(2):
        state = observed(spec)
        assert state.venv is not None
        assert state.venv.damaged["binary"] == "binary/a.so has another content than recorded"
        assert state.venv.damaged["edited"] == "edited/a.py has another content than recorded"
    remembered = node / "run" / "integrity.json"
    before = remembered.stat().st_mtime_ns
    site = node / "venv" / "lib" / "python3.12" / "site-packages"
    good = site / "binary" / "a.so"
    good.write_bytes(b"x = 1")
    state = observed(spec)
    assert state.venv is not None and "binary" not in state.venv.damaged, "a changed file is read again"
    assert remembered.stat().st_mtime_ns > before


def test_observing_writes_nothing(node: Path) -> None:
    def tree() -> dict[str, tuple[int, int]]:
        return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in node.rglob("*")}

    before = tree()
    observed(lab_spec(root=str(node)))
    assert tree() == before


def test_a_host_with_nothing_of_ours(tmp_path: Path) -> None:
    state = observed(lab_spec(root=str(tmp_path / "not" / "there"), port=1))
    assert state.root_writable and state.readings["memory"]["total"] > 0
    assert state.readings["mounts"]["root"]["free"] > 0
    assert state.venv is None and state.tools is None and state.model is None and state.state is None
    assert state.server.pid is None and state.server.manager is None and state.port is None
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


# --- server: what is ours, without a supervisor


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the mark of this root's supervisor, in no record and under nobody."""
    env = {"GPUWRIGHT_SUPERVISED": str(tmp_path), "PATH": os.environ["PATH"]}
    (tmp_path / "run").mkdir()
    process = subprocess.Popen(["sleep", "300"], env=env, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def server_request(root: Path, *actions: str, **changed: Any) -> dict[str, Any]:
    spec = lab_spec(root=str(root), unit="gpuwright-test-of-nothing")
    text = run_server(spec, list(actions), {}, "supervisor").stdin.splitlines()[1]
    request: dict[str, Any] = json.loads(json.loads(text[len("REQUEST = json.loads(") : -1]))
    return request | changed


def test_a_process_with_our_mark_is_an_orphan_and_another_is_not(
    tmp_path: Path, marked: subprocess.Popen[bytes]
) -> None:
    orphans = observed(lab_spec(root=str(tmp_path))).server.orphans
    assert [(orphan.pid, orphan.command) for orphan in orphans] == [(marked.pid, "sleep 300")]
    assert observed(lab_spec(root=f"{tmp_path}2")).server.orphans == [], "a root whose name only begins so"


def test_stopping_ends_and_names_an_orphan_and_nothing_else(tmp_path: Path, marked: subprocess.Popen[bytes]) -> None:
    other = subprocess.Popen(["sleep", "301"], env={"GPUWRIGHT_SUPERVISED": f"{tmp_path}2"}, executable="/bin/sleep")
    threading.Thread(target=marked.wait, daemon=True).start()  # reap it
    try:
        done = run("server", server_request(tmp_path, "stop"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"ending a process left of an earlier server: {marked.pid} sleep 300" in done.stdout
        assert marked.wait(10) == -signal.SIGTERM and other.poll() is None
    finally:
        other.kill()
        other.wait()


# Two rows of a stand-in for nvidia-smi: what it says while the driver still frees the memory, and after that.
NAMED = ("$pid", "0, 700"), ("", "0, 10")  # it names processes, as on a host
UNNAMED = ("", "0, 70000"), ("", "0, 10")  # it names none, as in most containers


@pytest.mark.parametrize("answers", [NAMED, UNNAMED], ids=["named", "unnamed"])
def test_stopping_waits_until_the_driver_has_the_memory_back(
    tmp_path: Path, marked: subprocess.Popen[bytes], answers: tuple[tuple[str, str], tuple[str, str]]
) -> None:
    tool, since = tmp_path / "bin" / "nvidia-smi", tmp_path / "freed"
    tool.parent.mkdir()
    (apps, used), (no_apps, unused) = answers
    tool.write_text(
        f"#!/bin/sh\npid={marked.pid}\necho x >> {tmp_path}/calls\n"
        f"[ $(wc -l < {tmp_path}/calls) -lt 9 ] || touch {since}\n"
        f'case "$1$([ -e {since} ] && echo later)" in\n'
        f'  *index,memory.usedlater) echo "{unused}";; *index,memory.used) echo "{used}";;\n'
        f'  *index*) echo 0;; *pidlater) echo "{no_apps}";; *) echo "{apps}";;\nesac\n'
    )
    tool.chmod(0o755)
    threading.Thread(target=marked.wait, daemon=True).start()
    done = subprocess.run(
        [sys.executable, "-I", "-u", "-"], input=script("server", server_request(tmp_path, "stop")),
        capture_output=True, text=True, env={"PATH": f"{tool.parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert since.exists(), "it has asked until the memory was back"


def test_without_a_server_before_it_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    done = run("server", server_request(tmp_path, "roll_back"))
    assert done.returncode == 0 and "there is none to go back to" in done.stdout
    previous = {"tier": "baseline", "request": {"runs_on": {}}, "files": []}
    (tmp_path / "run" / "previous.json").write_text(json.dumps(previous))
    done = run("server", server_request(tmp_path, "roll_back"))
    assert done.returncode == 0 and "started from the very same" in done.stdout


def test_a_failure_is_read_with_its_part_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    log = tmp_path / "server.log"
    log.write_text("an earlier start\nthis start\n")
    failure = {"tier": "x", "why": "it ended", "log": str(log), "log_offset": len("an earlier start\n")}
    request = {"root": str(tmp_path), "most_bytes": 1000}
    assert json.loads(run("failure", request).stdout) == {"failure": None, "text": ""}
    (tmp_path / "run" / "failure.json").write_text(json.dumps(failure))
    assert json.loads(run("failure", request).stdout) == {"failure": failure, "text": "this start\n"}
    assert json.loads(run("failure", request | {"most_bytes": 6}).stdout)["text"] == "start\n"
    log.write_text("rotated\n")
    assert json.loads(run("failure", request).stdout)["text"] == "rotated\n", "a log that was rotated is read whole"


@pytest.mark.parametrize(
    ("record", "code", "said"),
    [
        (
            {"started_at": "later", "tier": "x", "runs_on": {}, "ready_at": "later"},
            0,
            "another deploy has started tier x",
        ),
        ({"started_at": "later", "tier": "x", "runs_on": {"a": "b"}, "ready_at": "later"}, 1, "(tier x): deploy again"),
        ({"started_at": "later", "tier": "x", "runs_on": {}}, 1, "has changed the server meanwhile"),
        (None, 1, "(tier none): deploy again"),
    ],
)
def test_a_deploy_that_was_overtaken_leaves_the_server_alone(
    tmp_path: Path, record: dict[str, Any] | None, code: int, said: str, marked: subprocess.Popen[bytes]
) -> None:
    if record:
        (tmp_path / "run" / "server.json").write_text(json.dumps(record))
    done = run("server", server_request(tmp_path, "stop", saw="earlier"))
    assert done.returncode == code and said in done.stdout and marked.poll() is None


# --- bench


def function_of(name: str, *functions: str) -> str:
    """The source of some functions of a node script, which as a whole cannot be run here."""
    tree = ast.parse((NODE_SCRIPTS / f"{name}.py").read_text())
    return "\n".join(ast.unparse(n) for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in functions)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(("needed", "code"), [(64, 0), (4000, 1)])
def test_open_files_are_raised_as_far_as_the_user_may_and_else_refused_before_any_load(needed: int, code: int) -> None:
    """The user may have 100 and has 10."""
    source = (
        "import resource, sys\n"
        "def fail(message):\n    print(message)\n    sys.exit(1)\n"
        f"{function_of('bench', 'raise_open_files')}\n"
        f"raise_open_files({needed})\n"
        f"assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == {needed}\n"
    )
    limits = "import resource, os, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (10, 100)); os.setuid(65534); "
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{limits}exec(sys.argv[1])", source], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    if code:
        assert "the benchmark needs 4000 open files, and this user may have 100\n    -> raise nofile" in done.stdout


H200 = "0, NVIDIA H200, 143771, 700.00, 1980, 345, 99.17, 34, 580.159.04\n"  # of a real one, 2026-11-30


@pytest.mark.parametrize(
    ("said", "code", "gpus", "driver", "unknown"),
    [
        (H200, 0, [("NVIDIA H200", 143771.0, 700.0)], "580.159.04", None),
        (H200.replace("700.00", "[N/A]"), 0, [("NVIDIA H200", 143771.0, None)], "580.159.04", None),
        ("NVIDIA-SMI has failed\n", 9, [], None, "nvidia-smi: NVIDIA-SMI has failed"),
        ("", 0, [], None, None),
        ("garbage\n", 0, [], None, "nvidia-smi: garbage"),
    ],
)
def test_what_nvidia_smi_says_of_the_gpus(
    said: str, code: int, gpus: list[Any], driver: str | None, unknown: str | None, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '%s' '{said}'\nexit {code}\n")
    tool.chmod(0o755)
    names: dict[str, Any] = {"REQUEST": {"device": "cuda"}, "subprocess": subprocess}
    exec(function_of("bench", "nvidia_smi"), names)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{tmp_path}:{before}"
    try:
        found, version, why = names["nvidia_smi"]()
    finally:
        os.environ["PATH"] = before
    assert [(gpu["name"], gpu["memory_mib"], gpu["power_limit_w"]) for gpu in found] == gpus
    assert (version, why) == (driver, unknown)


def test_the_time_left_is_told_from_the_waves_of_the_levels() -> None:
    names: dict[str, Any] = {}
    exec(function_of("bench", "left"), names)
    levels = [{"concurrency": c, "prompts": p, "repeats": [0] * 4} for c, p in ((1, 8), (10, 20))]
    assert names["left"](levels, {}) is None
    assert names["left"](levels, {1: [8.0]}) == 3 * 8 + 4 * 2, "eight waves of a second, then two waves each"
    assert names["left"](levels, {1: [8.0] * 4, 10: [5.0]}) == 15


INFO = {"max_total_num_tokens": 20000}
STARTED = {"tier": "baseline", "runs_on": {"runtime": "x"}}


@pytest.mark.parametrize(
    ("record", "info", "gpus", "said"),
    [
        (STARTED, INFO, 8, None),
        (None, INFO, 8, "the server that runs is not tier baseline as this deploy left it"),
        (STARTED | {"tier": "ep8"}, INFO, 8, "the server that runs is not tier baseline as this deploy left it"),
        (STARTED | {"runs_on": {"runtime": "y"}}, INFO, 8, "the server that runs is not tier baseline"),
        (
            STARTED,
            {"error": "HTTP 401: no"},
            8,
            "does not say how many tokens it holds, so nobody could tell a queue: /s",
        ),
        (STARTED, INFO, 7, "8 GPUs are stated for this node (tp of the ladder), and 7 are there: a reason"),
    ],
)
def test_what_cannot_give_a_result_is_refused_before_any_load(
    record: dict[str, Any] | None, info: dict[str, Any], gpus: int, said: str | None
) -> None:
    class Ended(Exception):
        pass

    def fail(message: str) -> None:
        raise Ended(message)

    request = {"tier": "baseline", "runs_on": {"runtime": "x"}, "gpus": 8}
    names: dict[str, Any] = {"REQUEST": request, "fail": fail}
    exec(function_of("bench", "refuse_another_server"), names)
    if said is None:
        names["refuse_another_server"](record, info, [{}] * gpus, None)
        return
    with pytest.raises(Ended, match=re.escape(said)):
        names["refuse_another_server"](record, info, [{}] * gpus, "a reason")


# --- an adopted interpreter


def test_what_an_adopted_interpreter_has_is_seen_as_an_import_would(tmp_path: Path) -> None:
    """By an interpreter with two folders: the first wins; a .pth file's folders count, its code is not run; what is
    installed in editable form is not there.
    """
    first, second = (tmp_path / name / "site-packages" for name in ("a", "b"))
    for site, version in ((first, b"one"), (second, b"two")):
        make_distribution(site, "torch", {"torch/__init__.py": version})
    make_distribution(second, "einops", {"einops.pth": b"inner\n# no\nimport os; os.mkdir('ran')\nabsent\n"})
    (second / "inner").mkdir()
    make_distribution(second, "numpy", {"__editable__.numpy.pth": b"/elsewhere\n"})
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c \'import sys; sys.path[:0] = ["{first}", "{second}"]; \'"$3"\n'
    )
    python.chmod(0o755)
    spec = lab_spec(root=str(tmp_path / "root"), adopt={"interpreter": str(python)})
    seen = observed(spec).adopted
    assert seen is not None and seen.sites[:2] == [str(first), str(second)]
    found = {name: row.site for name, row in seen.distributions.items() if row.site.startswith(str(tmp_path))}
    assert found == {"torch": str(first), "einops": str(second)} and not (tmp_path / "ran").exists()
    assert seen.distributions["einops"].folders == [str(second / "inner")]
    before = seen.distributions["torch"].content
    (first / "torch" / "__init__.py").write_bytes(b"new")
    again = observed(spec).adopted
    assert again is not None and again.distributions["torch"].content != before
    assert again.distributions["torch"].newest == "torch/__init__.py"
    assert observed(lab_spec(adopt={"interpreter": "/nowhere/python"})).adopted is None
