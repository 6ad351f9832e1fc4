"""The same deploy over real SSH: a private sshd on loopback, with its own host key and a log of every session."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from tests.lab.conftest import reason_to_skip

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
REASON = reason_to_skip() or (None if SSHD and os.geteuid() == 0 else "needs root and sshd (openssh-server)")
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@dataclass
class Node:
    """A node reached over SSH: its root, its inventory file, sshd's log."""

    root: Path
    inventory: Path
    log: Path
    known_hosts: Path
    host_key: Path

    def deploy(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [Path(sys.executable).with_name("pyinfra"), self.inventory, "deploy.py", "-y", "--json", *arguments],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def sessions(self) -> int:
        """Commands sent so far, by sshd's own count."""
        return self.log.read_text().count("Starting session: command")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("ssh")
    root = REPOSITORY / ".lab" / "ssh"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, known_hosts = folder / "sshd.log", folder / "known_hosts"
    known_hosts.write_text(f"[127.0.0.1]:{port} " + (folder / "host.pub").read_text())
    Path("/run/sshd").mkdir(exist_ok=True)
    options = [
        f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {folder}/host", f"AuthorizedKeysFile {folder}/user.pub",
        "StrictModes no", "PasswordAuthentication no", "PermitRootLogin yes", "LogLevel VERBOSE", "PidFile none",
        "UsePAM no",
    ]  # fmt: skip
    conf = folder / "sshd_config"
    conf.write_text("\n".join(options) + "\n")
    assert SSHD is not None
    server = subprocess.Popen([SSHD, "-D", "-f", conf, "-E", log])
    inventory = folder / "inventory" / "lab.py"  # the file's name makes its hosts the group `lab`
    inventory.parent.mkdir()
    data = {
        "ssh_port": port, "ssh_user": "root", "ssh_key": f"{folder}/user", "ssh_known_hosts_file": str(known_hosts),
        "root": str(root), "port": 1024, "ssh_allow_agent": False, "ssh_look_for_keys": False,
    }  # fmt: skip
    inventory.write_text(f"lab = [('127.0.0.1', {data!r})]\n")
    deadline = time.monotonic() + 10
    while "Server listening" not in (log.read_text() if log.exists() else ""):
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    yield Node(root, inventory, log, known_hosts, folder / "host")
    server.terminate()
    server.wait(timeout=10)
    shutil.rmtree(root, ignore_errors=True)


STAGES = ("--data", "stages=preflight,system,runtime,patches,model,launchers")


def changed(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [op["name"] for op in json.loads(done.stdout)["results"]["operations"] if op["success"]]


def test_a_node_is_brought_to_its_state_over_ssh(node: Node) -> None:
    done = node.deploy(*STAGES)
    assert changed(done) == [
        p.FOLDERS, p.TOOLS, p.VENV, p.SYNC, p.STUB, p.VERIFY, p.APPLY, p.PROBE, p.MODEL, p.LAUNCHERS,
    ]  # fmt: skip
    assert "[127.0.0.1] torch-cuda: holds" in done.stderr, "long work is shown while it runs"


def test_a_converged_deploy_takes_at_most_8_commands(node: Node) -> None:
    before = node.sessions()
    assert changed(node.deploy(*STAGES)) == []
    used = node.sessions() - before
    assert 1 <= used <= 8, f"{used} SSH commands"


def test_an_unknown_host_key_is_refused(node: Node) -> None:
    known = node.known_hosts.read_text()
    node.known_hosts.write_text("")
    before = node.sessions()
    done = node.deploy(*STAGES)
    node.known_hosts.write_text(known)
    assert done.returncode == 1 and node.sessions() == before


def test_bad_input_sends_no_command(node: Node) -> None:
    before = node.sessions()
    done = node.deploy("--data", "tier=basline")
    assert done.returncode == 1 and 'did you mean "baseline"?' in done.stderr
    assert node.sessions() == before
