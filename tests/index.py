"""A package index for tests: a folder of wheels in the simple layout (PEP 503), for who has the login."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from packaging.utils import canonicalize_name


@dataclass
class Index:
    """A running index: its URL, the files it has handed out, the requests it has refused."""

    url: str
    served: set[str] = field(default_factory=set)
    refused: int = 0


@contextmanager
def serving(folder: Path, address: str = "127.0.0.1", login: str = "") -> Iterator[Index]:
    """Serve the wheels of `folder` at `address`; with `login` (USER:PASSWORD), to its owner alone."""
    expected = f"Basic {base64.b64encode(login.encode()).decode()}" if login else None

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            if expected and self.headers.get("Authorization") != expected:
                index.refused += 1
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="wheels"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            first, _, name = unquote(self.path).strip("/").partition("/")
            files = {path.name: path for path in folder.glob("*.whl")}
            if first == "simple":
                mine = [file for file in files if canonicalize_name(file.partition("-")[0]) == name]
                self.answer("".join(f'<a href="/files/{file}">{file}</a>\n' for file in mine).encode(), "text/html")
            elif first == "files" and name in files:
                index.served.add(name)
                self.answer(files[name].read_bytes(), "application/octet-stream")
            else:
                self.send_error(404)

        def answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

    server = http.server.ThreadingHTTPServer((address, 0), Handler)
    server.daemon_threads = True
    index = Index(f"http://{address}:{server.server_address[1]}/simple")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
