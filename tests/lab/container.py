"""A Debian node with systemd as PID 1, in a container on this machine, reached over SSH on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.debian import base
from tests.debian import reason_to_skip as reason_to_skip
from tests.debian import refusal as refusal


@dataclass
class Container:
    """A booted container. It shares this machine's network; `bound` are folders of this machine at the same path."""

    folder: Path
    bound: list[Path]

    def __post_init__(self) -> None:
        self.tree, self.key = self.folder / "tree", self.folder / "key"
        self.known_hosts, self.console = self.folder / "known_hosts", self.folder / "console.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def prepare(self) -> None:
        """A copy of the base tree, with an sshd on loopback that knows one key."""
        subprocess.run(["cp", "-a", base(), self.tree], check=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        (self.tree / "root" / ".ssh").mkdir(mode=0o700, exist_ok=True)
        (self.tree / "root" / ".ssh" / "authorized_keys").write_text(self.key.with_suffix(".pub").read_text())
        options = f"Port {self.port}\nListenAddress 127.0.0.1\nUsePAM no\n"
        (self.tree / "etc" / "ssh" / "sshd_config.d" / "test.conf").write_text(options)
        host_key = (self.tree / "etc" / "ssh" / "ssh_host_ed25519_key.pub").read_text()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {host_key}")

    def boot(self) -> None:
        """Boot, and wait until it answers over SSH."""
        binds = [f"--bind={path}" for path in self.bound]
        with self.console.open("wb") as console:
            self.process = subprocess.Popen(
                ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", f"--directory={self.tree}",
                 "--machine=gpuwright-test", "--kill-signal=SIGRTMIN+3", *binds],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
        self.wait_for_boot()

    def reboot(self) -> None:
        """Reboot it: its nspawn ends, and leaves it to whoever runs it to start it again."""
        self.run("systemctl reboot", check=False)
        self.process.wait(60)
        self.boot()

    def wait_for_boot(self) -> None:
        """Wait until it answers over SSH and has started what it starts."""
        deadline = time.monotonic() + 90
        while self.run("systemctl is-system-running --wait", check=False) not in ("running", "degraded"):
            assert self.process.poll() is None, self.console.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, self.console.read_text(errors="replace")[-3000:]
            time.sleep(0.5)

    def run(self, line: str, *, check: bool = True) -> str:
        """A command's output, over ssh: another way in than the deploy's."""
        options = [f"UserKnownHostsFile={self.known_hosts}", "BatchMode=yes", "ConnectTimeout=5"]
        done = subprocess.run(
            ["ssh", *(part for option in options for part in ("-o", option)), "-i", self.key, "-p", str(self.port),
             "root@127.0.0.1", line],
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def data(self) -> dict[str, Any]:
        """How pyinfra reaches it."""
        return {
            "ssh_port": self.port, "ssh_user": "root", "ssh_key": str(self.key), "ssh_allow_agent": False,
            "ssh_known_hosts_file": str(self.known_hosts), "ssh_look_for_keys": False,
        }  # fmt: skip

    def end(self) -> None:
        """Power it off; killed after 30 s, by the process group of its nspawn."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def interpreter_folder() -> Path:
    """The folder that the venv's interpreter lives in, so that a container can run it at the same path."""
    return Path(os.path.realpath(sys.executable)).parent.parent
