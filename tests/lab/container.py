"""A Debian node with systemd as PID 1, in a container on this machine, reached over SSH on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuwright import REPOSITORY

PACKAGES = "systemd,systemd-sysv,dbus,openssh-server,python3,libnuma1,logrotate,iproute2,procps,g++,openssl"
BASE = REPOSITORY / ".lab" / "debian"


def reason_to_skip() -> str | None:
    """Why this machine cannot boot a container, or None."""
    if os.geteuid() != 0:
        return "needs root, to boot a container"
    for tool in ("systemd-nspawn", "debootstrap", "ssh"):
        if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin"):
            return f"needs {tool} (systemd-container, debootstrap, openssh-client)"
    return None if _mirror() else "needs Debian's package sources in /etc/apt, for debootstrap"


def _mirror() -> str | None:
    """This machine's own Debian mirror."""
    for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
        if path.suffix in (".list", ".sources") and path.is_file():
            for line in path.read_text().splitlines():
                words = line.split()
                for word in words[1:] if words[:1] in (["deb"], ["URIs:"]) else []:
                    if word.startswith("http") and word.rstrip("/").endswith("/debian"):
                        return word
    return None


def base() -> Path:
    """A pristine tree, made once: about a minute and 300 MB."""
    made_of = BASE / "made-of"
    if not made_of.exists() or made_of.read_text() != PACKAGES:
        mirror = _mirror()
        assert mirror is not None
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(BASE), mirror]
        for _ in range(2):  # a mirror may answer badly once
            shutil.rmtree(BASE, ignore_errors=True)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stdout[-3000:]
        made_of.write_text(PACKAGES)
    return BASE


def refusal() -> str | None:
    """What keeps this machine from starting any container, such as a sandbox without namespaces, or None."""
    command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--directory={base()}", "/bin/true"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return None if done.returncode == 0 else f"this machine starts no container: {done.stderr.strip()[-300:]}"


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
