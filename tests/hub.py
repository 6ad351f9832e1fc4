"""A Hugging Face hub on loopback: the part of its API by which files are fetched, with faults that can be set.

Small files come from the hub itself and are named by git's blob id; large ones (LFS) by their sha256 and a redirect to
another origin, as on huggingface.co, where the credential must not follow. The faults are in what is sent of a file.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

EVER = 1 << 30
BLOCK = 1 << 16


def blob_id(content: bytes) -> str:
    """The name git gives a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Fault:
    """What goes wrong with a file, `times` times: `after` so many bytes of an answer, or in its content."""

    kind: str  # cut (closed in order), reset (TCP RST), hold (nothing more comes), corrupt (one byte is another)
    times: int = 1
    after: int = 0


@dataclass
class Request:
    """A request for a file's content."""

    name: str
    range: str | None
    authorization: str | None
    redirected: bool
    sent: int = 0


@dataclass
class Hub:
    """One repository at one commit, and what has been asked of it."""

    repo: str
    revision: str
    files: dict[str, bytes]
    lfs: set[str]
    token: str | None = None
    faults: dict[str, Fault] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent(self, name: str) -> int:
        """Bytes of a file's content that were sent, over all answers."""
        return sum(request.sent for request in self.requests if request.name == name)

    def ranges(self, name: str) -> list[str | None]:
        """The Range header of each request for a file's content, in order."""
        return [request.range for request in self.requests if request.name == name]

    def take_fault(self, name: str) -> Fault | None:
        """The fault of one more answer, None where it is to go well."""
        with self.lock:
            fault = self.faults.get(name)
            if not fault or not fault.times:
                return None
            fault.times -= 1
            return fault

    def info(self) -> dict[str, Any]:
        """The repository as /api/models/<repo>/revision/<commit>?blobs=True shows it."""
        siblings: list[dict[str, Any]] = []
        for name, content in self.files.items():
            row = {"rfilename": name, "size": len(content), "blobId": blob_id(content)}
            if name in self.lfs:
                digest = hashlib.sha256(content).hexdigest()
                pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n"
                row |= {"blobId": blob_id(pointer.encode())}
                row |= {"lfs": {"sha256": digest, "size": len(content), "pointerSize": len(pointer)}}
            siblings.append(row)
        return {"id": self.repo, "modelId": self.repo, "sha": self.revision, "siblings": siblings}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    """The hub's HTTP, one thread a connection."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            with hub.lock:
                hub.asked.append(f"{self.command} {self.path}")
            resolve = f"/{hub.repo}/resolve/"
            if path.startswith("/cdn/"):  # a signed URL: no credential needed
                self.content(path.removeprefix("/cdn/"), redirected=True)
            elif hub.token and self.headers["Authorization"] != f"Bearer {hub.token}":
                message = "Invalid credentials in Authorization header" if self.headers["Authorization"] else ""
                self.refuse(401, "", message or "Invalid username or password.")
            elif not path.startswith((resolve, f"/api/models/{hub.repo}/")):
                self.refuse(404, "RepoNotFound", "Repository not found")
            elif path == f"/api/models/{hub.repo}/revision/{hub.revision}":
                self.answer(200, {"Content-Type": "application/json"}, json.dumps(hub.info()).encode())
            elif not path.startswith(f"{resolve}{hub.revision}/"):
                self.refuse(404, "RevisionNotFound", "Invalid rev id")
            else:
                self.resolve(path.removeprefix(f"{resolve}{hub.revision}/"))

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def refuse(self, status: int, code: str, message: str) -> None:
            headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
            self.answer(status, headers, json.dumps({"error": message}).encode())

        def resolve(self, name: str) -> None:
            if name not in hub.files:
                self.refuse(404, "EntryNotFound", "Entry not found")
            elif name in hub.lfs:
                content = hub.files[name]
                headers = {
                    "X-Repo-Commit": hub.revision,
                    "X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                    "X-Linked-Size": str(len(content)),
                    "Location": f"http://localhost:{hub.port}/cdn/{name}",
                }
                self.answer(302, headers, b"")
            else:
                self.content(name, redirected=False)

        def content(self, name: str, *, redirected: bool) -> None:
            content = hub.files[name]
            asked = self.headers["Range"]
            start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            if start >= len(content) and asked:
                self.answer(416, {"Content-Range": f"bytes */{len(content)}"}, b"")
                return
            etag = hashlib.sha256(content).hexdigest() if redirected else blob_id(content)
            self.send_response(206 if asked else 200)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", hub.revision)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content) - start))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if self.command != "HEAD":
                request = Request(name, asked, self.headers["Authorization"], redirected)
                with hub.lock:
                    hub.requests.append(request)
                self.send_content(request, content[start:], hub.take_fault(name))

        def send_content(self, request: Request, content: bytes, fault: Fault | None) -> None:
            if fault and fault.kind == "corrupt":
                content, fault = content[:-1] + bytes([content[-1] ^ 1]), None
            end = fault.after if fault else len(content)
            for at in range(0, end, BLOCK):
                try:
                    request.sent += self.wfile.write(content[at : min(at + BLOCK, end)])
                except OSError:  # the client is gone
                    self.close_connection = True
                    return
            if fault and fault.kind == "hold":
                hub.held.set()
                self.connection.recv(1)  # until the client is gone
            if fault and fault.kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.rfile.close()
                self.connection.close()  # at once: a shutdown before it would be an end in order
            if fault:
                self.close_connection = True

    return Handler


class Server(ThreadingHTTPServer):
    """Its threads end with the test; a client that is gone is no error of it."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve it on 127.0.0.1, on a port that is free."""
    with Server(("127.0.0.1", 0), handler(hub)) as server:
        hub.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
