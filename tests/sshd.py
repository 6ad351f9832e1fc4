"""A private sshd on loopback, with its own host key and a log of every session."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BINARY = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


def reason_to_skip() -> str | None:
    """Why this machine cannot run one, or None."""
    return None if BINARY and os.geteuid() == 0 else "needs root and sshd (openssh-server)"


@dataclass
class Sshd:
    """A running sshd: its folder, its port, its log."""

    folder: Path
    port: int
    pid: int

    @property
    def log(self) -> Path:
        return self.folder / "sshd.log"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def data(self) -> dict[str, Any]:
        """How pyinfra reaches it."""
        return {
            "ssh_port": self.port, "ssh_user": "root", "ssh_key": f"{self.folder}/user", "ssh_allow_agent": False,
            "ssh_known_hosts_file": str(self.known_hosts), "ssh_look_for_keys": False,
        }  # fmt: skip

    def sessions(self) -> int:
        """Commands sent so far, by its own count."""
        return self.log.read_text().count("Starting session: command")


@contextmanager
def running(folder: Path, names: Iterable[str] = ("127.0.0.1",), *options: str) -> Iterator[Sshd]:
    """Start one that keeps its files in `folder`, and end it by its process.

    It listens on 127.0.0.1. `names`: the addresses by which it is known; sshd itself listens on no more than 16, so how
    the others lead to it is the caller's affair. `options`: lines of its configuration, which win over these.
    """
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    Path("/run/sshd").mkdir(exist_ok=True)
    lines = [
        *options, f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {folder}/host",
        f"AuthorizedKeysFile {folder}/user.pub", "StrictModes no", "PasswordAuthentication no",
        "PermitRootLogin yes", "LogLevel VERBOSE", "PidFile none", "UsePAM no",
    ]  # fmt: skip
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    assert BINARY is not None
    server = subprocess.Popen([BINARY, "-D", "-f", folder / "sshd_config", "-E", folder / "sshd.log"])
    sshd = Sshd(folder, port, server.pid)
    key = (folder / "host.pub").read_text()
    sshd.known_hosts.write_text("".join(f"[{name}]:{port} {key}" for name in names))
    deadline = time.monotonic() + 10
    while "Server listening" not in (sshd.log.read_text() if sshd.log.exists() else ""):
        assert server.poll() is None and time.monotonic() < deadline, sshd.log.read_text()
        time.sleep(0.05)
    try:
        yield sshd
    finally:
        server.terminate()
        server.wait(timeout=10)
