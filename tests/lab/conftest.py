"""The lab: one real node on this machine, shared by all tests of this folder, which run in the order of the file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuwright import REPOSITORY

PYINFRA = str(Path(sys.executable).with_name("pyinfra"))
ROOT = REPOSITORY / ".lab" / "test"
RESULTS = REPOSITORY / ".lab" / "test-results"  # so that the tests' runs are not among their user's
PYTHONS = ((3, 10), (3, 11), (3, 12))
DISK_GIB = 25  # two stacks in uv's cache


def reason_to_skip() -> str | None:
    """Why this machine cannot be a lab node, or None."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "the stack's wheels are for Linux on x86-64"
    if sys.version_info[:2] not in PYTHONS:
        return "the stack is locked for Python 3.10 to 3.12"
    for tool in ("cc", "c++", "openssl"):
        if not shutil.which(tool):
            return f"there is no {tool}"
    if shutil.disk_usage(REPOSITORY).free < DISK_GIB * 1024**3:
        return f"less than {DISK_GIB} GiB of disk are free"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = reason_to_skip()
    for item in items:
        if "tests/lab/" in str(item.path):
            item.add_marker(pytest.mark.lab)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Run:
    """A finished deploy: exit code, what it said, and its JSON where it printed one."""

    code: int
    said: str
    answer: dict[str, Any] | None

    @property
    def changed(self) -> list[str]:
        """The operations that changed something, in order."""
        assert self.answer is not None, self.said
        return [op["name"] for op in self.answer["results"]["operations"] if op["success"]]

    @property
    def planned(self) -> list[str]:
        """The operations a dry run would run."""
        assert self.answer is not None, self.said
        return [op["name"] for op in self.answer["plan"] if op["hosts_with_change"]]


def ok(run: Run) -> Run:
    """The run, after checking that it ended well."""
    assert run.code == 0, run.said
    return run


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Lab:
    """The node under test, and the commands a user has for it."""

    def __init__(self, root: Path, port: int) -> None:
        self.root, self.port, self.inventory = root, port, "inventory/lab.py"
        self.killed_log = root.with_suffix(".killed.log")
        self.venv = root / "venv"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = self.venv / "lib" / version / "site-packages"
        self.patched = self.site / "flashinfer" / "jit" / "cpp_ext.py"

    def command(self, deploy: str, *arguments: str) -> list[str]:
        data = ["--data", f"root={self.root}", "--data", f"port={self.port}"]
        return [PYINFRA, self.inventory, deploy, *data, *arguments]

    def deploy(self, *arguments: str, timeout: float = 900, deploy: str = "deploy.py") -> Run:
        """Run a deploy to its end; `-y` unless `--dry` is asked for."""
        mode = [] if "--dry" in arguments else ["-y"]
        done = subprocess.run(
            self.command(deploy, *mode, "--json", *arguments),
            cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        answer = json.loads(done.stdout) if done.stdout.strip() else None
        return Run(done.returncode, done.stderr, answer)

    def kill_deploy_when(self, ready: Callable[[], bool], *, path: str | None = None, timeout: float = 600) -> None:
        """Start a deploy and SIGKILL it with all it started, as soon as `ready()`."""
        env = os.environ | ({"PATH": path} if path else {})
        with (self.killed_log).open("w") as log:
            running = subprocess.Popen(
                self.command("deploy.py", "-y", "--data", "smoke=never"),
                cwd=REPOSITORY, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=env,
            )  # fmt: skip
            deadline = time.monotonic() + timeout
            while not ready():
                if running.poll() is not None or time.monotonic() > deadline:
                    break
                time.sleep(0.002)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        said = (self.killed_log).read_text()
        assert running.returncode == -signal.SIGKILL, f"the deploy ended before it could be killed:\n{said}"

    def record(self) -> dict[str, Any]:
        """The server's record."""
        found: dict[str, Any] = json.loads((self.root / "run" / "server.json").read_text())
        return found

    def pid(self) -> int:
        """The server's process id as supervisor says it (not the way the deploy finds it)."""
        control = self.root / "tools" / "bin" / "supervisorctl"
        done = subprocess.run(
            [control, "-c", self.root / "run" / "supervisord.conf", "pid", "sglang-server"],
            capture_output=True,
            text=True,
        )
        return int(done.stdout)

    @property
    def env(self) -> dict[str, str]:
        """The environment of the node's Python."""
        return {"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], "LD_LIBRARY_PATH": str(self.root / "lib")}

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run code in the node's venv."""
        return subprocess.run(
            [self.venv / "bin" / "python", "-I", "-"], input=code, capture_output=True, text=True, env=self.env
        )


def free_ports(count: int) -> list[int]:
    """Ports that are free, below the range from which the kernel gives ports to whoever asks for any."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(max(1024, lowest - 6000), lowest), 200):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} ports below {lowest} are free")


def children(pid: int) -> list[int]:
    """Every live descendant of a process."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(row.split()[0]): int(row.split()[1]) for row in listed.splitlines()}
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def alive(pid: int) -> bool:
    """Whether a process lives (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    for folder in (ROOT, RESULTS):
        shutil.rmtree(folder, ignore_errors=True)
    ROOT.parent.mkdir(exist_ok=True)
    os.environ["GPUWRIGHT_RESULTS"] = str(RESULTS)
    node = Lab(ROOT, free_ports(1)[0])
    yield node
    if ROOT.exists():
        node.deploy(deploy="stop.py")
        shutil.rmtree(ROOT)
    shutil.rmtree(RESULTS, ignore_errors=True)
    del os.environ["GPUWRIGHT_RESULTS"]
    node.killed_log.unlink(missing_ok=True)
