"""The scripts that take, hand out and fetch wheels, run for real on this machine."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.nodes import started, within
from tests.index import serving
from tests.unit.test_node_scripts import run, sha256

TOKEN = "t0ken"
A, B = "a-1.0-py3-none-any.whl", "b-1.0-py3-none-any.whl"
TEXTS = {A: b"a" * 3_000_000, B: b"b" * 10}


def rows(*files: str) -> list[dict[str, Any]]:
    return [{"file": file, "size": len(TEXTS[file]), "sha256": sha256(TEXTS[file])} for file in files]


def answer(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def take(folder: Path, action: str, *files: str, **more: Any) -> Any:
    request = {"folder": str(folder), "action": action, "wheels": rows(*files), "last": True, "stale": []}
    return run("take_wheels", {**request, "copy_from": None, **more})


def put(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file).write_bytes(TEXTS[file])
    return folder


# --- taking


def test_a_part_has_its_name_once_it_is_the_wheel(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    assert answer(take(wheels, "prepare", A, B)) == {"parts": {A: 0, B: 0}, "wrong": {}}
    (wheels / "parts" / f"{A}.part").write_bytes(TEXTS[A])
    (wheels / "parts" / f"{B}.part").write_bytes(TEXTS[B][:4])
    assert answer(take(wheels, "prepare", A, B))["parts"] == {A: 3_000_000, B: 4}
    assert answer(take(wheels, "settle", A, B))["wrong"] == {B: "expected 10 bytes, found 4"}
    assert (wheels / A).read_bytes() == TEXTS[A] and not (wheels / B).exists()
    part = wheels / "parts" / f"{B}.part"
    assert part.read_bytes() == b"bbbb", "more of it may come"
    part.write_bytes(b"c" * 10)
    assert "expected sha256" in answer(take(wheels, "settle", B))["wrong"][B] and not part.exists()
    part.write_bytes(TEXTS[B])
    assert answer(take(wheels, "settle", B))["wrong"] == {}
    assert sorted(path.name for path in wheels.iterdir()) == [A, B], "and no folder of parts"
    assert answer(take(wheels, "settle", A, B))["wrong"] == {}, "another deploy may have been quicker"


def test_what_is_of_no_lock_goes_and_an_empty_folder_with_it(tmp_path: Path) -> None:
    wheels = put(tmp_path / "wheels", A, B)
    take(wheels, "prepare", stale=[A])
    assert [path.name for path in wheels.iterdir()] == [B]
    take(wheels, "prepare", stale=[B])
    assert not wheels.exists()
    assert answer(take(wheels, "prepare")) == {"parts": {}, "wrong": {}}


def test_on_this_machine_wheels_are_copied_and_verified(tmp_path: Path) -> None:
    source, wheels = put(tmp_path / "source", A, B), tmp_path / "wheels"
    (source / B).write_bytes(b"c" * 10)
    found = answer(take(wheels, "prepare", A, B, copy_from=str(source)))["wrong"]
    assert list(found) == [B] and (wheels / A).read_bytes() == TEXTS[A] and not (wheels / B).exists()


def test_a_wheel_that_is_not_the_locks_is_named_and_removed_before_it_is_installed(tmp_path: Path) -> None:
    wheels = put(tmp_path / "wheels", A)
    assert take(wheels, "check", A).returncode == 0
    (wheels / A).write_bytes(b"x" * 3_000_000)
    done = take(wheels, "check", A, B)
    assert done.returncode == 1 and not (wheels / A).exists()
    assert done.stdout.startswith(f"{wheels / A} is not the wheel of the lock, and was removed: expected sha256 ")
    assert f"{wheels / B} is not there\n" in done.stdout and "deploy again" in done.stdout


def test_wheels_that_do_not_fit_are_not_begun(tmp_path: Path) -> None:
    request = {"folder": str(tmp_path / "w"), "action": "prepare", "last": True, "stale": [], "copy_from": None}
    done = run("take_wheels", {**request, "wheels": [{"file": A, "size": 1 << 60, "sha256": "0" * 64}]})
    assert done.returncode == 1 and "MB of wheels are to come: make room" in done.stdout


# --- handing out, and fetching


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """serve(**request): a server of the wheels in tmp_path/source, ended at the end."""
    begun: list[dict[str, Any]] = []
    put(tmp_path / "source", A, B)

    def start(**changed: Any) -> dict[str, Any]:
        request = {"action": "start", "folder": str(tmp_path / "source"), "address": "127.0.0.1", "token": TOKEN}
        begun.append(answer(run("serve_wheels", {**request, "idle_s": 60, "limit_s": 60, **changed})))
        return begun[-1]

    yield start
    for server in (each for each in begun if "pid" in each):
        run("serve_wheels", {"action": "stop", **server})
        assert ended(server)


def ended(server: dict[str, Any]) -> bool:
    """Whether a server ends within some seconds."""
    return within(5, lambda: not started(server["pid"]))


def pull(folder: Path, port: int, *files: str, token: str = TOKEN) -> dict[str, Any]:
    request = {"folder": str(folder), "wheels": rows(*files), "last": True, "address": "127.0.0.1", "port": port}
    return answer(run("pull_wheels", {**request, "token": token}))


def test_wheels_are_fetched_from_where_they_were_left(tmp_path: Path, serve: Callable[..., dict[str, Any]]) -> None:
    wheels, port = tmp_path / "wheels", serve()["port"]
    put(wheels / "parts")
    (wheels / "parts" / f"{A}.part").write_bytes(TEXTS[A][:2_000_000])
    assert pull(wheels, port, A, B) == {"came": [A, B], "problem": ""}
    assert {path.name: path.read_bytes() for path in wheels.iterdir()} == TEXTS


def test_only_the_rest_of_a_file_is_sent(serve: Callable[..., dict[str, Any]]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", serve()["port"], timeout=5)
    connection.request("GET", f"/{TOKEN}/{A}", headers={"Range": "bytes=2999990-"})
    got = connection.getresponse()
    assert (got.status, got.headers["Content-Range"]) == (206, "bytes 2999990-2999999/3000000")
    assert got.read() == b"a" * 10


@pytest.mark.parametrize(
    "path",
    [f"/{TOKEN}/{A}x", f"/other/{A}", f"/{A}", f"/{TOKEN}/", f"/{TOKEN}/..%2Fsource%2F{A}", f"/{TOKEN}/%2Fetc%2Fx.whl"],
)
def test_nothing_else_is_handed_out(serve: Callable[..., dict[str, Any]], path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", serve()["port"], timeout=5)
    connection.request("GET", path)
    assert connection.getresponse().status == 404


def test_connections_are_bounded(serve: Callable[..., dict[str, Any]]) -> None:
    port = serve()["port"]
    idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(40)]
    time.sleep(0.5)
    closed = [each for each in idle if _is_closed(each)]
    assert 20 < len(closed) < 40, "most are turned away, and some wait for a request"
    for each in idle:
        each.close()
    time.sleep(0.5)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", f"/{TOKEN}/{B}")
    assert connection.getresponse().read() == TEXTS[B]


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_what_a_peer_gives_wrong_is_not_taken(tmp_path: Path, serve: Callable[..., dict[str, Any]]) -> None:
    port, wheels = serve()["port"], tmp_path / "wheels"
    put(wheels / "parts")
    (tmp_path / "source" / A).write_bytes(b"x" * 3_000_000)
    found = pull(wheels, port, B, A)
    assert found["came"] == [B] and found["problem"].startswith(f"{A} came wrong: expected sha256 ")
    assert not (wheels / A).exists() and list((wheels / "parts").iterdir()) == []
    (tmp_path / "source" / A).write_bytes(b"x")
    assert pull(wheels, port, A)["problem"] == f"its {A} has another size"
    (tmp_path / "source" / A).unlink()
    assert pull(wheels, port, A)["problem"] == "it answers HTTP 404"


def test_a_peer_that_is_not_there_is_said_so(tmp_path: Path, serve: Callable[..., dict[str, Any]]) -> None:
    server = serve()
    os.kill(server["pid"], signal.SIGKILL)
    assert ended(server)
    assert pull(tmp_path / "wheels", server["port"], A)["problem"] == "[Errno 111] Connection refused"
    assert "cannot listen at 192.0.2.1" in serve(address="192.0.2.1")["problem"]


@pytest.mark.parametrize("each_time", [1_000_000, 0])
def test_a_connection_that_breaks_is_gone_on_with_while_it_brings_something(tmp_path: Path, each_time: int) -> None:
    begins = []

    class Breaks(http.server.BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            begins.append(int(self.headers["Range"][len("bytes=") : -1]))
            self.send_response(206)
            self.send_header("Content-Length", str(len(TEXTS[A]) - begins[-1]))
            self.end_headers()
            self.wfile.write(TEXTS[A][begins[-1] :][:each_time])

    put(tmp_path / "wheels" / "parts")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Breaks) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = pull(tmp_path / "wheels", server.server_address[1], A)
        server.shutdown()
    if each_time:
        assert found == {"came": [A], "problem": ""} and begins == [0, 1_000_000, 2_000_000]
    else:
        assert found == {"came": [], "problem": "it ends the connection"} and begins == [0, 0, 0]


def test_a_server_ends_by_itself(serve: Callable[..., dict[str, Any]]) -> None:
    begun, idle, limited = time.monotonic(), serve(idle_s=1), serve(limit_s=1)
    for server in (idle, limited):
        assert ended(server)
    assert time.monotonic() - begun < 6


def test_only_the_process_that_was_started_is_ended(serve: Callable[..., dict[str, Any]]) -> None:
    server = serve()
    run("serve_wheels", {"action": "stop", **server, "started": server["started"] + 1})
    time.sleep(0.2)
    assert started(server["pid"])


# --- asking an index


@pytest.mark.parametrize(
    ("login", "said"),
    [
        (["me", "pw"], ""),
        (["me", "other"], "refuses `index_credentials` (HTTP 401)"),
        (None, "asks for a login: set `index_credentials` (HTTP 401)"),
    ],
)
def test_an_index_that_does_not_let_us_in_is_named(tmp_path: Path, login: list[str] | None, said: str) -> None:
    with serving(put(tmp_path / "wheels", A), login="me:pw") as index:
        done = run("ask_index", {"index": index.url, "name": "a", "login": login})
    assert (done.returncode, done.stdout) == ((1, f"{index.url} {said}\n") if said else (0, "")), done.stderr
    done = run("ask_index", {"index": index.url, "name": "a", "login": login})
    assert done.returncode == 0, "an index that is not there is left to the installer"
