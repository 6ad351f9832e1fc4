"""The wheelhouse: which wheels a lock has in a folder, how they are gathered, and what a plan makes of them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from gpuwright import plan as p
from gpuwright import wheelhouse
from gpuwright.errors import GpuwrightError, InputErrors
from gpuwright.lockfile import Lock, lock_path, read_lock
from gpuwright.node import NodeCommand, install_tools, sync_venv
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState
from gpuwright.wheelhouse import gather, named_by, platform_tags, read_wheelhouse
from tests.index import serving
from tests.make import catalogue, empty_state, lab_spec, settled_state
from tests.operations.test_operations import request_of

STACK = catalogue().stacks["sources-only"]


def make(folder: Path, name: str, version: str = "1.0", tags: str = "py3-none-any") -> Path:
    """A wheel that pip and uv install."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-{tags}.whl", f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def lock_of(*paths: Path) -> Lock:
    """A lock of these wheels."""
    text = ""
    for path in paths:
        name, version, *_ = path.name.split("-")
        text += f"{name}=={version} \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{sha256(path)}\n"
    lock = paths[0].parent / "lock.txt"
    lock.write_text(f"# a comment\n{text}")
    return read_lock(lock)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- which wheels


def test_a_lock_names_the_hashes_of_each_distribution() -> None:
    lock = read_lock(lock_path(STACK, "3.12"))
    assert lock.hashes.keys() == lock.versions.keys() and all(len(each) == 2 for each in lock.hashes.values())
    assert len(set().union(*lock.hashes.values())) == lock.text.count("--hash=sha256:")


def test_a_platform_runs_the_wheels_of_every_older_one() -> None:
    tags = platform_tags("x86_64-manylinux_2_28")
    assert tags[0] == "manylinux_2_28_x86_64" and tags[-1] == "linux_x86_64"
    assert {"manylinux2014_x86_64", "manylinux_2_5_x86_64", "manylinux1_x86_64"} <= set(tags)
    with pytest.raises(GpuwrightError, match='platform "windows"'):
        platform_tags("windows")


def test_the_best_wheel_that_the_python_takes_counts(tmp_path: Path) -> None:
    tags = ["py3-none-any", "cp312-cp312-manylinux_2_17_x86_64", "cp311-cp311-manylinux_2_28_x86_64"]
    tags += ["cp310-abi3-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_34_x86_64", "cp312-cp312-macosx_11_0_arm64"]
    wheels = {tag: make(tmp_path, "one", tags=tag) for tag in tags}
    lock = lock_of(*wheels.values())
    lock = replace(lock, hashes={"one": frozenset(map(sha256, wheels.values()))})

    def best(python: str) -> str:
        return read_wheelhouse(tmp_path, lock, STACK, python).wheels["one"].file

    assert [best("3.12"), best("3.11"), best("3.10")] == [wheels[tag].name for tag in (tags[1], tags[2], tags[3])]


def test_a_wheel_of_another_content_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    one, two = make(tmp_path, "one"), make(tmp_path, "two")
    lock = lock_of(one, two)
    one.write_bytes(b"other")
    two.unlink()
    found = read_wheelhouse(tmp_path, lock, STACK, "3.12")
    assert found.wheels == {} and found.lacking["two"] == "is not there"
    assert found.lacking["one"].startswith(f"has another content than the lock names ({one.name}: sha256 ")


def test_what_was_hashed_is_not_read_again_while_it_is_as_it_was(tmp_path: Path) -> None:
    lock = lock_of(one := make(tmp_path, "one"))
    wheelhouse._remember(tmp_path)
    times = one.stat()
    one.write_bytes(b"x" * times.st_size)
    os.utime(one, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read_wheelhouse(tmp_path, lock, STACK, "3.12").lacking == {}
    os.utime(one)
    assert "one" in read_wheelhouse(tmp_path, lock, STACK, "3.12").lacking
    (tmp_path / "hashes.json").write_text("[half")
    assert "one" in read_wheelhouse(tmp_path, lock, STACK, "3.12").lacking


def test_wheels_are_known_by_their_names(tmp_path: Path) -> None:
    lock = lock_of(make(tmp_path, "One_Two", "1.0"))
    assert named_by("One_Two-1.0.0-py3-none-any.whl", [lock]) and named_by("one_two-1.0-cp39-cp39-win32.whl", [lock])
    assert not named_by("one_two-1.1-py3-none-any.whl", [lock]) and not named_by("notes.txt", [lock])


# --- gathering


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an index that pip is set up for, with two wheels; a stack is locked to them."""
    folder = tmp_path / "index"
    wheels = [make(folder, "one"), make(folder, "two")]
    stack, tools = lock_of(wheels[0]), lock_of(wheels[1])
    (tmp_path / "stack.txt").write_text(stack.text)
    (tmp_path / "tools.txt").write_text(tools.text)
    monkeypatch.setattr(wheelhouse, "lock_path", lambda stack, python: tmp_path / "stack.txt")
    monkeypatch.setattr(wheelhouse, "TOOLS_LOCK", tmp_path / "tools.txt")
    with serving(folder) as running:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        yield folder


def test_what_is_missing_is_fetched_and_nothing_twice(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "to"
    assert gather(STACK, "3.12", to, prune=False).endswith("2 fetched")
    assert "1 of 1 wheels to fetch: one" in capfd.readouterr().out
    there = [".lock", "hashes.json", *sorted(path.name for path in index.glob("*.whl"))]
    assert sorted(path.name for path in to.iterdir()) == there
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/none")
    assert gather(STACK, "3.12", to, prune=False).endswith("nothing to fetch")
    assert capfd.readouterr().out == "", "pip was not even asked"
    other = make(to, "three")
    assert gather(STACK, "3.12", to, prune=False).endswith(f"of no lock (--prune removes them): {other.name}")
    assert gather(STACK, "3.12", to, prune=True).endswith(f"removed, of no lock: {other.name}") and not other.exists()


def test_what_was_damaged_is_fetched_anew(index: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    (to / ".fetching-killed").mkdir(parents=True)
    gather(STACK, "3.12", to, prune=False)
    assert not (to / ".fetching-killed").exists()
    one = to / "one-1.0-py3-none-any.whl"
    one.write_bytes(b"cut")
    assert gather(STACK, "3.12", to, prune=False).endswith("1 fetched") and one.read_bytes() != b"cut"


def test_what_cannot_be_had_is_one_clear_error(index: Path, tmp_path: Path) -> None:
    (index / "one-1.0-py3-none-any.whl").write_bytes(b"not what the lock names")
    with pytest.raises(GpuwrightError, match=r"(?s)can be had:\nERROR: THESE PACKAGES DO NOT MATCH .* one==1.0"):
        gather(STACK, "3.12", tmp_path / "to", prune=False)
    (index / "one-1.0-py3-none-any.whl").unlink()
    with pytest.raises(GpuwrightError, match=r"ERROR: No matching distribution found for one==1.0"):
        gather(STACK, "3.12", tmp_path / "to", prune=False)
    with pytest.raises(GpuwrightError, match=r"sources-only is locked for Python 3.10, 3.11, 3.12, not 3.13"):
        gather(STACK, "3.13", tmp_path / "to", prune=False)
    assert [path.name for path in (tmp_path / "to").iterdir()] == [".lock"]


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpuwright", "wheelhouse", "sourcs-only", "--python", "3.12"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == 'there is no stack "sourcs-only"; did you mean "sources-only"?\n'


# --- the plan


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> NodeSpec:
    """A lab node of a small lock, whose wheels are all in its wheelhouse."""
    folder, tools = tmp_path_factory.mktemp("wheelhouse"), tmp_path_factory.mktemp("tools")
    lab = lab_spec(wheelhouse=str(folder), patches="none")
    lock = lock_of(make(folder, "one"), make(folder, "two"))
    tools_lock = lock_of(make(tools, "uv"), make(tools, "supervisor"))
    for path in tools.glob("*.whl"):
        (folder / path.name).write_bytes(path.read_bytes())
    return replace(lab, lock=lock, tools_lock=tools_lock)


def of(spec: NodeSpec, state: NodeState) -> list[str]:
    return [str(change) for change in p.plan(spec, state).of(p.WHEELS)]


def without(spec: NodeSpec, name: str, **changed: object) -> NodeState:
    """A settled node that lacks a distribution."""
    state = settled_state(spec)
    assert state.venv is not None
    left = {key: value for key, value in state.venv.distributions.items() if key != name}
    venv = state.venv.model_copy(update={"distributions": left})
    return state.model_copy(update={"venv": venv, **changed})


def test_a_whole_node_needs_no_wheels(spec: NodeSpec) -> None:
    elsewhere = replace(spec, data=spec.data.model_copy(update={"wheelhouse": "/none"}))
    assert p.plan(spec, settled_state(spec)).changes == p.plan(elsewhere, settled_state(spec)).changes == ()


def test_a_fresh_node_needs_all_of_both_locks(spec: NodeSpec) -> None:
    assert {wheel.distribution for wheel in p.wheels_to_send(spec, empty_state(spec))} == {
        "one", "two", "uv", "supervisor",
    }  # fmt: skip
    (said,) = of(spec, empty_state(spec))
    assert said == "4 wheels, 0.0 MB: expected in /opt/gpuwright/wheels, found absent"


def test_a_node_needs_what_it_installs_and_does_not_have(spec: NodeSpec) -> None:
    state = without(spec, "one")
    (wheel,) = p.wheels_to_send(spec, state)
    (change,) = p.plan(spec, state).of(p.WHEELS)
    assert wheel.distribution == "one" and change.keys == ("distribution one",) and not change.follows
    there = state.model_copy(update={"wheels": {wheel.file: wheel.size}})
    assert of(spec, there) == [] and p.needed_wheels(spec, there) == [wheel]
    cut = state.model_copy(update={"wheels": {wheel.file: 1, f"parts/{wheel.file}.part": 300_000}})
    assert p.wheels_to_send(spec, cut) == [wheel] and of(spec, cut)[0].endswith("found 0.3 MB of them")


def test_another_python_takes_every_wheel(spec: NodeSpec) -> None:
    state = settled_state(spec)
    assert state.venv is not None
    other = state.model_copy(update={"venv": state.venv.model_copy(update={"python": "3.10.1"})})
    assert {wheel.distribution for wheel in p.wheels_to_send(spec, other)} == {"one", "two"}


def test_what_this_machine_lacks_stops_the_host_before_anything_is_changed(spec: NodeSpec) -> None:
    data = spec.data.model_copy(update={"wheelhouse": "/none/wheels"})
    lacking = replace(spec, data=data)
    plan = p.plan(lacking, without(lacking, "one"))
    said = "/none/wheels on this machine lacks 1 wheel: one is not there\n    -> make wheelhouse STACK="
    for step in (p.PREFLIGHT, p.WHEELS):
        (change,) = plan.of(step)
        assert change.blocked and change.what.startswith(said), change.what
        assert change.what.endswith("PYTHON=3.12 TO=/none/wheels")


def test_wheels_of_no_lock_go(spec: NodeSpec) -> None:
    own = next(iter(spec.stack_wheels.wheels.values()))
    lies = {own.file: own.size, f"parts/{own.file}.part": 1, "old-1.0-py3-none-any.whl": 2_000_000, "parts/x.part": 1}
    state = settled_state(spec, wheels=lies)
    assert p.stale_wheels(spec, state) == ["old-1.0-py3-none-any.whl", "parts/x.part"]
    assert of(spec, state) == [
        "old-1.0-py3-none-any.whl, parts/x.part (2.0 MB): expected absent, found a wheel of no lock"
    ]
    from_index = lab_spec()
    assert p.stale_wheels(from_index, settled_state(from_index, wheels=lies)) == list(lies)


# --- commands


def shell(command: object) -> str:
    assert isinstance(command, NodeCommand)
    return command.line


def test_installing_from_wheels_asks_nothing_else(spec: NodeSpec) -> None:
    _, check, pip = install_tools(spec)
    assert {row["file"] for row in request_of(check, "take_wheels")["wheels"]} == {
        "uv-1.0-py3-none-any.whl", "supervisor-1.0-py3-none-any.whl",
    }  # fmt: skip
    wanted = "--require-hashes --isolated --no-index --find-links /opt/gpuwright/wheels -r "
    assert wanted in shell(pip)
    _, check, sync, _ = sync_venv(spec, without(spec, "one"))
    request = request_of(check, "take_wheels")
    assert request["action"] == "check" and [row["file"] for row in request["wheels"]] == ["one-1.0-py3-none-any.whl"]
    assert "/tools/bin/uv --offline --no-config pip sync " in shell(sync)
    assert "--only-binary :all: --allow-empty-requirements --no-index --find-links /opt/gpuwright/wheels " in shell(
        sync
    )


INDEX = "https://wheels.example/simple/"


def test_an_index_is_that_of_uv_and_of_pip() -> None:
    own = lab_spec(index=INDEX)
    _, ask, pip = install_tools(own)
    assert json.loads(json.loads(ask.stdin.split("json.loads(")[1].split(")\n")[0]))["login"] is None
    assert f"PIP_INDEX_URL={INDEX} " in shell(pip) and pip.stdin == ""
    assert f"installing from {INDEX} failed: check `index` in group_data" in shell(pip)
    sync = sync_venv(own, empty_state(own))[-2]
    assert f"UV_DEFAULT_INDEX={INDEX} " in shell(sync) and sync.stdin == ""


def test_a_login_goes_in_over_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGIN", "me:p/w@1:x")
    own = lab_spec(index=INDEX, index_credentials="env:LOGIN")
    pip, sync = install_tools(own)[-1], sync_venv(own, empty_state(own))[-2]
    assert pip.stdin == "https://me:p%2Fw%401%3Ax@wheels.example/simple/\n"
    assert sync.stdin == "me\np/w@1:x\n" and f"UV_DEFAULT_INDEX=gpuwright={INDEX}" in shell(sync)
    assert "IFS= read -r UV_INDEX_GPUWRIGHT_USERNAME && export UV_INDEX_GPUWRIGHT_USERNAME && " in shell(sync)
    for command in (*install_tools(own), *sync_venv(own, empty_state(own))):
        assert "p/w" not in command.line and "p%2Fw" not in command.line


# --- what is declared


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"index": "https://me:pw@wheels.example/simple"}, "index: holds credentials, which messages would show"),
        ({"index": "wheels.example"}, "index: "),
        ({"index_credentials": "me:hunter2"}, "index_credentials: is not env:NAME or file:PATH"),
        ({"index_credentials": "env:LOGIN"}, "index_credentials: are given, and no `index`"),
        ({"wheelhouse": "w", "index": INDEX}, "wheelhouse: and `index` are both set"),
        ({"wheelhouse": "w", "python_download": True}, "python_download: asks the network"),
        ({"installer_env": {"UV_DEFAULT_INDEX": INDEX}}, "UV_DEFAULT_INDEX: the index of uv and of pip is set by"),
        (
            {"installer_env": {"HTTPS_PROXY": "http://me:hunter2@proxy"}},
            "HTTPS_PROXY holds credentials, which",
        ),
    ],
)
def test_where_wheels_come_from_is_said_once_and_without_secrets(data: dict[str, object], said: str) -> None:
    with pytest.raises(InputErrors) as caught:
        lab_spec(**data)
    assert said in str(caught.value) and "pw" not in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize("value", ["", "me", "me:", ":pw"])
def test_a_login_is_a_user_and_a_password(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LOGIN", value)
    with pytest.raises(InputErrors) as caught:
        _ = lab_spec(index=INDEX, index_credentials="env:LOGIN").index_login
    assert "index_credentials: " in str(caught.value) and "pw" not in str(caught.value)
