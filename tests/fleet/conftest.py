"""Three nodes for all tests of this folder that deploy, and the commands that a user of them has."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as tree
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuwright import REPOSITORY
from gpuwright.drift import Finding, Report, Verdict
from tests.fleet import nodes
from tests.fleet.nodes import Fleet, Node
from tests.lab.conftest import Run, ok

FLEET = Fleet(REPOSITORY / ".lab" / "fleet-control", "gwctrl0", "10.213.80")
PYINFRA = str(Path(sys.executable).with_name("pyinfra"))

INVENTORY = """\
from operations import transport
from operations.limit import require_match

transport.KEEPALIVE_S, transport.GONE_S = {patience}
fleet = {hosts!r}
canary = {canary!r}
require_match(fleet=fleet, canary=canary)
"""


@dataclass(frozen=True)
class Check:
    """A finished check.py: exit code, what it printed, its report, and its JUnit file."""

    code: int
    out: str
    err: str
    report: Report | None
    junit: str
    prom: str

    @property
    def hosts(self) -> dict[str, Verdict]:
        assert self.report is not None, self.err
        return {each.host: each for each in self.report.hosts}

    @property
    def statuses(self) -> dict[str, str]:
        """clean, drift or error, by host."""
        return {name: each.status for name, each in self.hosts.items()}

    def findings(self, host: str) -> list[Finding]:
        return self.hosts[host].findings

    def cases(self, host: str) -> dict[str, str]:
        """JUnit's word by stage of a host: passed, failure, error or skipped."""
        (suite,) = [each for each in tree.fromstring(self.junit) if each.get("name") == host]
        return {str(case.get("name")): case[0].tag if len(case) else "passed" for case in suite}


@dataclass
class Running:
    """A pyinfra run under way, in a process group of its own, as a terminal's foreground job is."""

    process: subprocess.Popen[str]
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def await_line(self, text: str, timeout: float = 60) -> None:
        """Wait until it has said this."""
        there = nodes.within(timeout, lambda: text in self.said() or self.process.poll() is not None)
        assert there and text in self.said(), f"{text!r} was not said:\n{self.said()}"

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        self.process.terminate()

    def end(self, timeout: float = 60) -> Run:
        """Its exit code and what it said, after waiting for its end."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it still runs after {timeout} s:\n{self.said()}")
        finally:
            self.kill()
        return Run(self.process.returncode, self.said(), None)

    def kill(self) -> None:
        """End what may be left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Control:
    """A control machine: an inventory whose hosts are in group `fleet`, and the commands for it."""

    folder: Path
    hosts: dict[str, dict[str, Any]]
    canary: list[str] = field(default_factory=list)
    patience: tuple[int, int] = (30, 90)  # as operations/transport.py has it: keepalive, and when a node is gone
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inventory = self.folder / "inventory" / "fleet.py"
        self.inventory.parent.mkdir(parents=True, exist_ok=True)
        text = INVENTORY.format(hosts=list(self.hosts.items()), canary=self.canary, patience=self.patience)
        self.inventory.write_text(text)

    def pyinfra(self, *arguments: str, timeout: float = 120) -> Run:
        """Run a deploy file to its end, with the inventory: `deploy.py -y`."""
        done = self._run([PYINFRA, str(self.inventory), *arguments], timeout)
        answer = json.loads(done.stdout) if done.stdout.strip() and "--json" in arguments else None
        return Run(done.returncode, done.stderr, answer)

    def deploy(self, *arguments: str, timeout: float = 120) -> Run:
        return self.pyinfra("deploy.py", "-y", "--json", *arguments, timeout=timeout)

    def start(self, *arguments: str, log: str = "deploy.log") -> Running:
        """Begin `deploy.py -y`."""
        path = self.folder / log
        with path.open("w") as file:
            process = subprocess.Popen(
                [PYINFRA, str(self.inventory), "deploy.py", "-y", *arguments], cwd=REPOSITORY, text=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=os.environ | self.env,
            )  # fmt: skip
        return Running(process, path)

    def check(self, *arguments: str, timeout: float = 120) -> Check:
        paths = {name: self.folder / f"check.{name}" for name in ("json", "junit", "prom")}
        done = self._run(self.check_command(*arguments), timeout)
        return self.read_check(done.returncode, done.stdout, done.stderr, paths)

    def check_command(self, *arguments: str) -> list[str]:
        """check.py with all of its reports, of which those of an earlier one are removed."""
        options: list[str] = []
        for name in ("json", "junit", "prom"):
            path = self.folder / f"check.{name}"
            path.unlink(missing_ok=True)
            options += [f"--{name}", str(path)]
        return [sys.executable, "check.py", str(self.inventory), *options, *arguments]

    def read_check(self, code: int, out: str, err: str, paths: dict[str, Path] | None = None) -> Check:
        paths = paths or {name: self.folder / f"check.{name}" for name in ("json", "junit", "prom")}
        texts = {name: path.read_text() if path.exists() else "" for name, path in paths.items()}
        report = Report.model_validate_json(texts["json"]) if texts["json"] else None
        return Check(code, out, err, report, texts["junit"], texts["prom"])

    def _run(self, command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=REPOSITORY, env=os.environ | self.env, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=timeout, start_new_session=True, text=True, errors="replace",
        )  # fmt: skip


def sessions(node: Node) -> int:
    """The commands that were sent to it so far, by sshd's own log; this question is one of them."""
    return int(node.run("journalctl --sync; journalctl --unit=ssh --output=cat | grep -c 'Starting session: command'"))


def snapshot(node: Node) -> dict[str, str]:
    """Everything on its disk and in its /tmp: size, mode, owner, inode, and when each was written and changed. Without
    what sshd, systemd and their logs write of a login.
    """
    own = "/proc /sys /dev /run /var/log/journal /var/log/wtmp /var/log/btmp /var/log/lastlog"
    left_out = " ".join(f"-path {path} -prune -o" for path in own.split())
    listed = node.run(f"find / /tmp -xdev {left_out} -printf '%p\\t%s %m %U:%G %i %T@ %C@ %l\\n'")
    return dict(line.split("\t", 1) for line in listed.splitlines())


@contextlib.contextmanager
def start_up(lines: str, *fleet: Node, user: str = "root") -> Iterator[None]:
    """Have a user's shell read these lines first: before the test whether it is interactive, as conda's set-up is."""
    files = [node.tree / ("root" if user == "root" else f"home/{user}") / ".bashrc" for node in fleet]
    kept = [path.read_bytes() for path in files]
    for path, text in zip(files, kept, strict=True):
        path.write_bytes(lines.encode("latin-1") + b"\n" + text)
    try:
        yield
    finally:
        for path, text in zip(files, kept, strict=True):
            path.write_bytes(text)


def by_name(fleet: list[Node], user: str = "root", **data: Any) -> dict[str, dict[str, Any]]:
    """The hosts of an inventory."""
    return {node.name: node.data(user) | data for node in fleet}


@pytest.fixture(scope="session")
def three() -> Iterator[list[Node]]:
    """Three nodes that are as declared, whose sshd logs each command."""
    if reason := nodes.reason_to_skip() or FLEET.refusal():
        pytest.skip(reason)
    with nodes.running(FLEET, ["node-1", "node-2", "node-3"]) as fleet:
        for node in fleet:
            node.run("echo LogLevel VERBOSE >/etc/ssh/sshd_config.d/verbose.conf; systemctl reload ssh")
        yield fleet


@pytest.fixture(scope="module")
def control(three: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Control:
    """Who brought the three nodes to their state, and is to find them so."""
    found = Control(tmp_path_factory.mktemp("control"), by_name(three), canary=["node-1"])
    ok(found.deploy())
    return found
