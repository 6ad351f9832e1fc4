"""The fetch of a model, by the node script in the node's venv, from a hub on loopback whose faults the tests choose.

GPUWRIGHT_TEST_PYTHON names an interpreter to take instead of the lab node's, such as that of a venv that is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuwright.node import script
from tests import hub as hubs
from tests.hub import EVER, Fault, Hub
from tests.lab.conftest import Lab, ok

MIB = 1 << 20
HALF, KEPT = (
    7 * MIB + MIB // 2,
    7 * MIB,
)  # where the hub stops in the large file, and whole MiB of it, which are written
LARGE, SMALL, NESTED = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "a b/ü#1.jinja"
REVISION = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_aTokenThatIsNowhereElse"


def contents() -> dict[str, bytes]:
    """A model of two shards and what is beside them, the same every time."""
    rng = random.Random(2026)
    index = {"metadata": {"total_size": 15 * MIB}, "weight_map": {"a.weight": LARGE, "b.weight": SMALL}}
    return {
        "config.json": b'{"model_type": "gpt2"}\n',
        ".gitattributes": b"*.safetensors filter=lfs\n",
        NESTED: b"{{ messages }}\n",
        "empty.txt": b"",
        "model.safetensors.index.json": json.dumps(index).encode(),
        SMALL: rng.randbytes(3 * MIB),
        LARGE: rng.randbytes(12 * MIB),
    }


FILES = contents()


@dataclass
class Fetcher:
    """The command that fetches from a hub into a folder, as a deploy sends it to the node."""

    python: str
    folder: Path
    hub: Hub

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def start(self, **changes: Any) -> subprocess.Popen[str]:
        request = {
            "path": str(self.model), "repo": self.hub.repo, "revision": REVISION, "endpoint": self.hub.endpoint,
            "token": None, "manifest": str(self.folder / "manifest.json"),
        }  # fmt: skip
        command = ["env", "-i", "PATH=/usr/bin:/bin", f"HOME={self.folder}/home", self.python, "-I", "-u", "-"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdin
        process.stdin.write(script("fetch_model", request | changes))
        process.stdin.close()
        return process

    def run(self, expected: int = 0, **changes: Any) -> str:
        """What it said, after checking its exit code."""
        with self.start(**changes) as process:
            assert process.stdout
            said = process.stdout.read()
        assert process.returncode == expected, said
        return said

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        return found

    def found(self) -> dict[str, bytes]:
        """What lies in the model's folder, but for what is kept there of unfinished files."""
        paths = [path for path in self.model.rglob("*") if path.is_file()]
        names = {path.relative_to(self.model).as_posix(): path for path in paths}
        return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".cache/")}

    def unfinished(self) -> list[int]:
        """The sizes of unfinished files."""
        return [path.stat().st_size for path in self.model.glob(".cache/gpuwright/*.incomplete")]

    def kill_when_held(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL it once the hub has stopped sending and what it sent is on disk."""
        assert self.hub.held.wait(30)
        deadline = time.monotonic() + 30
        while KEPT not in self.unfinished() or len(self.found()) < len(FILES) - 1:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    given = os.environ.get("GPUWRIGHT_TEST_PYTHON")
    if given:
        return given
    lab: Lab = request.getfixturevalue("lab")
    ok(lab.deploy("--data", "stages=preflight,system,runtime,patches"))
    return str(lab.venv / "bin" / "python")


@pytest.fixture
def fetcher(python: str, tmp_path: Path) -> Iterator[Fetcher]:
    with hubs.running(Hub("org/name", REVISION, dict(FILES), {LARGE, SMALL})) as hub:
        yield Fetcher(python, tmp_path, hub)


def test_every_file_is_fetched_once_and_its_row_says_what_it_is_known_by(fetcher: Fetcher) -> None:
    fetcher.model.mkdir()
    (fetcher.model / "notes.txt").write_text("someone's own")
    first, last = fetcher.run().splitlines()
    assert first == "org/name at 0123456789ab: 7 of 7 files to fetch or verify, 0.01 GiB to come"
    assert re.fullmatch(r"all 7 files are verified; 0\.01 GiB came in \d+ s", last)
    assert fetcher.found() == FILES | {"notes.txt": b"someone's own"}
    assert {name: fetcher.hub.sent(name) for name in FILES} == {name: len(FILES[name]) for name in FILES}
    manifest = fetcher.manifest()
    rows = manifest.pop("files")
    assert manifest == {"repo": "org/name", "revision": REVISION, "complete": True}
    for name in FILES:
        path = fetcher.model / name
        git = subprocess.run(["git", "hash-object", "--no-filters", path], capture_output=True, text=True, check=True)
        large = {"sha256": hashlib.sha256(FILES[name]).hexdigest()}
        proof = large if name in (LARGE, SMALL) else {"blob": git.stdout.strip()}
        known = {"size": len(FILES[name]), "mtime_ns": path.stat().st_mtime_ns, "inode": path.stat().st_ino}
        assert rows.pop(name) == proof | known
    assert not rows and not fetcher.unfinished()


def test_a_second_run_fetches_nothing_and_reads_no_file_that_is_as_listed(fetcher: Fetcher) -> None:
    fetcher.run()
    before, path = fetcher.manifest(), fetcher.model / LARGE
    stat = path.stat()
    path.write_bytes(bytes(len(FILES[LARGE])))  # which only a reading could tell
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    fetcher.hub.requests.clear()
    assert "0 of 7 files to fetch or verify, 0.00 GiB to come" in fetcher.run()
    assert fetcher.hub.requests == [] and fetcher.manifest() == before


def test_a_file_that_is_not_as_listed_is_hashed_and_fetched_only_if_wrong(fetcher: Fetcher) -> None:
    fetcher.run()
    fetcher.hub.requests.clear()
    (fetcher.model / SMALL).touch()
    damaged = bytearray(FILES[LARGE])
    damaged[12345] ^= 1
    (fetcher.model / LARGE).write_bytes(damaged)
    (fetcher.model / "config.json").unlink()
    assert "3 of 7 files to fetch or verify" in fetcher.run()
    assert sorted(request.name for request in fetcher.hub.requests) == ["config.json", LARGE]
    assert fetcher.found() == FILES and fetcher.manifest()["complete"]
    assert fetcher.manifest()["files"][SMALL]["mtime_ns"] == (fetcher.model / SMALL).stat().st_mtime_ns


def test_files_that_someone_put_there_are_taken_as_they_are_if_right(fetcher: Fetcher) -> None:
    fetcher.model.mkdir()
    for name in (LARGE, "config.json"):
        (fetcher.model / name).write_bytes(FILES[name])
    fetcher.run()
    assert {request.name for request in fetcher.hub.requests} == set(FILES) - {LARGE, "config.json", "empty.txt"}
    assert fetcher.found() == FILES and fetcher.manifest()["complete"]


def test_another_commit_fetches_only_what_differs_in_it(fetcher: Fetcher) -> None:
    fetcher.run()
    fetcher.hub.requests.clear()
    fetcher.hub.revision = "f" * 40
    fetcher.hub.files["config.json"] = b'{"model_type": "gpt_neo"}\n'
    fetcher.run(revision="f" * 40)
    assert [request.name for request in fetcher.hub.requests] == ["config.json"]
    assert fetcher.found() == fetcher.hub.files
    assert fetcher.manifest()["complete"] and fetcher.manifest()["revision"] == "f" * 40


@pytest.mark.parametrize(("kind", "word"), [("cut", "peer closed connection"), ("reset", "ReadError; again in 1 s")])
def test_a_broken_connection_is_taken_up_where_it_was(fetcher: Fetcher, kind: str, word: str) -> None:
    fetcher.hub.faults[LARGE] = Fault(kind, times=2, after=5 * MIB + 1)
    assert word in fetcher.run()
    ranges = fetcher.hub.ranges(LARGE)
    starts = [int(value.removeprefix("bytes=").removesuffix("-")) if value else 0 for value in ranges]
    # What a reset finds in the socket's buffer is lost.
    assert starts == [0, 5 * MIB, 10 * MIB] if kind == "cut" else 0 == starts[0] < starts[1] < starts[2] <= 10 * MIB
    assert fetcher.hub.sent(LARGE) < 2 * len(FILES[LARGE])
    assert fetcher.found() == FILES and fetcher.manifest()["complete"]


def test_a_connection_that_never_lasts_is_given_up_after_a_while(fetcher: Fetcher) -> None:
    fetcher.hub.faults[SMALL] = Fault("reset", times=EVER)
    began = time.monotonic()
    said = fetcher.run(expected=1)
    assert re.findall(r"ReadError; again in (\d+) s", said) == ["1", "2", "4", "8", "16"]
    assert 31 <= time.monotonic() - began < 60
    assert f"{fetcher.hub.endpoint} cannot be reached" in said.splitlines()[-1]
    assert SMALL not in fetcher.found() and "complete" not in fetcher.manifest()


def test_a_hub_that_stalls_is_asked_again_and_the_wait_is_seen(fetcher: Fetcher) -> None:
    fetcher.hub.faults[LARGE] = Fault("hold", after=HALF)
    said = fetcher.run().splitlines()
    assert [line for line in said if " of 7 files, " in line] == [said[1]]
    assert re.fullmatch(r"6 of 7 files, 0\.01 GiB of 0\.01 GiB, \d+ MiB/s, about \d+ min left", said[1])
    assert fetcher.hub.ranges(LARGE) == [None, f"bytes={KEPT}-"]
    assert fetcher.found() == FILES


def test_a_file_that_came_wrong_once_is_fetched_once_more(fetcher: Fetcher) -> None:
    fetcher.hub.faults = {LARGE: Fault("corrupt"), "config.json": Fault("corrupt")}
    said = fetcher.run()
    assert said.count("came wrong: expected") == 2
    assert fetcher.hub.ranges(LARGE) == [None, None] == fetcher.hub.ranges("config.json")
    assert fetcher.found() == FILES and fetcher.manifest()["complete"]


@pytest.mark.parametrize(("name", "kind"), [(LARGE, "sha256"), ("config.json", "blob")])
def test_a_file_that_comes_wrong_always_is_named_and_does_not_stay(fetcher: Fetcher, name: str, kind: str) -> None:
    fetcher.hub.faults[name] = Fault("corrupt", times=EVER)
    said = fetcher.run(expected=1)
    wrong = FILES[name][:-1] + bytes([FILES[name][-1] ^ 1])
    expected, found = [
        hashlib.sha256(data).hexdigest() if kind == "sha256" else hubs.blob_id(data) for data in (FILES[name], wrong)
    ]
    assert f"{name} came wrong twice: expected {kind} {expected}, found {found}. Check what is between" in said
    assert len(fetcher.hub.ranges(name)) == 2
    assert name not in fetcher.found() and name not in fetcher.manifest()["files"]
    assert "complete" not in fetcher.manifest() and len(FILES[name]) not in fetcher.unfinished()


def test_a_run_that_was_killed_is_gone_on_with_from_what_it_left(fetcher: Fetcher) -> None:
    fetcher.hub.faults[LARGE] = Fault("hold", after=HALF)
    fetcher.kill_when_held(fetcher.start())
    assert LARGE not in fetcher.found() and "complete" not in fetcher.manifest()
    fetcher.hub.requests.clear()
    fetcher.run()
    assert [(request.name, request.range) for request in fetcher.hub.requests] == [(LARGE, f"bytes={KEPT}-")]
    assert fetcher.hub.sent(LARGE) == len(FILES[LARGE]) - KEPT
    assert fetcher.found() == FILES and fetcher.manifest()["complete"] and not fetcher.unfinished()


def test_half_a_file_of_another_commit_is_not_gone_on_with(fetcher: Fetcher) -> None:
    fetcher.hub.faults[LARGE] = Fault("hold", after=HALF)
    fetcher.kill_when_held(fetcher.start())
    fetcher.hub.revision = "f" * 40
    fetcher.hub.files[LARGE] = FILES[LARGE][::-1]
    fetcher.hub.requests.clear()
    assert "came wrong" not in fetcher.run(revision="f" * 40)
    assert fetcher.hub.ranges(LARGE) == [None]
    assert fetcher.found() == fetcher.hub.files and not fetcher.unfinished()


def test_two_at_once_do_not_write_one_file(fetcher: Fetcher) -> None:
    fetcher.hub.faults[LARGE] = Fault("hold", after=HALF)
    first = fetcher.start()
    assert fetcher.hub.held.wait(30)
    with fetcher.start() as second:
        assert second.stdout
        assert second.stdout.readline() == f"another process is fetching into {fetcher.model}: waiting for it to end\n"
        fetcher.kill_when_held(first)
        assert "all 7 files are verified" in second.stdout.read()
    assert second.returncode == 0
    assert fetcher.found() == FILES and not fetcher.unfinished()


def test_files_that_a_later_commit_has_no_more_go_and_others_stay(fetcher: Fetcher) -> None:
    fetcher.run()
    (fetcher.model / "own.txt").write_text("someone's own")
    (fetcher.model / "empty.txt").write_text("edited since")
    del fetcher.hub.files[SMALL], fetcher.hub.files["empty.txt"]
    fetcher.hub.revision = "f" * 40
    fetcher.run(revision="f" * 40)
    assert SMALL not in fetcher.found() and set(fetcher.found()) >= {"own.txt", "empty.txt", LARGE}
    assert set(fetcher.manifest()["files"]) == set(FILES) - {SMALL, "empty.txt"}


def test_a_token_is_asked_for_and_is_nowhere_but_in_the_requests_to_the_hub(fetcher: Fetcher) -> None:
    fetcher.hub.token = TOKEN
    said = fetcher.run(expected=1)
    assert f"{fetcher.hub.endpoint}/org/name is private, gated or not there (HTTP 401): set `token`" in said
    assert "refuses `token` (HTTP 401)" in fetcher.run(expected=1, token="hf_another")
    assert fetcher.hub.requests == [] and fetcher.found() == {}
    fetcher.hub.faults[LARGE] = Fault("hold", after=HALF)
    process = fetcher.start(token=TOKEN)
    assert fetcher.hub.held.wait(30)
    lines = {path: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    assert lines[Path(f"/proc/{process.pid}/cmdline")].endswith(b"-I\0-u\0-\0")
    assert [path for path, line in lines.items() if TOKEN.encode() in line] == []
    fetcher.kill_when_held(process)
    said = fetcher.run(token=TOKEN)
    assert fetcher.found() == FILES and TOKEN not in said
    written = [path for path in fetcher.folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert written == []
    sent = {(request.redirected, request.authorization) for request in fetcher.hub.requests}
    assert sent == {(False, f"Bearer {TOKEN}"), (True, None)}  # not to the other origin


def test_a_token_that_cannot_be_one_is_refused_without_being_shown(fetcher: Fetcher) -> None:
    said = fetcher.run(expected=1, token=f"{TOKEN}\n")
    assert "`token` holds a space or a line break" in said and TOKEN not in said
    assert fetcher.hub.asked == []


@pytest.fixture
def small_disk(fetcher: Fetcher) -> Iterator[Fetcher]:
    """The model's folder on a disk of 1000 MiB, in memory, of which nothing is used."""
    fetcher.model.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1000m", "none", fetcher.model], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk needs root: {mounted.stderr.strip()}")
    yield fetcher
    subprocess.run(["umount", fetcher.model], check=True)


def test_too_little_disk_is_said_before_anything_is_fetched(small_disk: Fetcher) -> None:
    lacking = (sum(map(len, FILES.values())) + 1024 * MIB - 1000 * MIB) / 1024 / MIB
    said = small_disk.run(expected=1)
    assert f"{small_disk.model} lacks {lacking:.2f} GiB of disk for 0.01 GiB and 1 GiB beside: make room" in said
    assert small_disk.hub.requests == [] and small_disk.found() == {}
    subprocess.run(["mount", "-o", "remount,size=1100m", small_disk.model], check=True)
    small_disk.run()
    subprocess.run(["mount", "-o", "remount,size=1000m", small_disk.model], check=True)
    small_disk.run()  # nothing is to come: it needs no room
    assert small_disk.found() == FILES


def test_a_folder_that_cannot_be_written_is_named(small_disk: Fetcher) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk.model], check=True)
    said = small_disk.run(expected=1)
    assert f"{small_disk.model} cannot be written" in said and "Read-only file system" in said


def test_what_is_not_there_is_named(fetcher: Fetcher) -> None:
    endpoint = fetcher.hub.endpoint
    assert f"org/name has no commit {'e' * 40}: see {endpoint}/org/name" in fetcher.run(1, revision="e" * 40)
    assert f"{endpoint}/org/none is not found (HTTP 404): mend the name" in fetcher.run(1, repo="org/none")
    said = fetcher.run(1, endpoint="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached ([Errno 111] Connection refused): check `endpoint`" in said
    assert fetcher.found() == {} and fetcher.hub.requests == []


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "a//evil", ".cache/gpuwright/lock", "a\\evil"])
def test_a_name_that_leaves_the_folder_is_refused(fetcher: Fetcher, name: str) -> None:
    fetcher.hub.files = {"config.json": b"{}", name: b"evil"}
    assert f"has a file named {name!r}, which has no place in {fetcher.model}" in fetcher.run(expected=1)
    assert fetcher.hub.requests == [] and fetcher.found() == {}
    assert not list(fetcher.folder.rglob("*evil*"))


def test_the_hub_here_serves_the_stock_client_which_keeps_nothing_of_a_broken_file(fetcher: Fetcher) -> None:
    """That the stand-in speaks as a hub does, and why its client's own download is not used."""
    code = (
        "import sys\n"
        "from huggingface_hub import hf_hub_download\n"
        "endpoint, folder, revision, *names = sys.argv[1:]\n"
        "for name in names:\n"
        "    hf_hub_download('org/name', name, revision=revision, endpoint=endpoint, local_dir=folder)\n"
    )

    def download(*names: str) -> subprocess.CompletedProcess[str]:
        arguments = [fetcher.hub.endpoint, str(fetcher.folder / "stock"), REVISION, *names]
        env = {"PATH": "/usr/bin:/bin", "HOME": str(fetcher.folder), "HF_HUB_DISABLE_XET": "1"}
        return subprocess.run([fetcher.python, "-I", "-c", code, *arguments], capture_output=True, text=True, env=env)

    fetcher.hub.faults[LARGE] = Fault("reset", after=HALF)
    broken = download(LARGE)
    assert broken.returncode == 1 and "ReadError" in broken.stderr
    assert not list((fetcher.folder / "stock").rglob("*.incomplete"))
    done = download(*FILES)
    assert done.returncode == 0, done.stderr
    assert fetcher.hub.ranges(LARGE) == [None, None]
    for name, content in FILES.items():
        assert (fetcher.folder / "stock" / name).read_bytes() == content
