"""The same deploy over real SSH: a private sshd on loopback, with its own host key and a log of every session."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from gpuwright.hostdata import Sources
from gpuwright.spec import build_spec
from tests import sshd
from tests.lab.conftest import reason_to_skip
from tests.make import catalogue, group_data

REASON = reason_to_skip() or sshd.reason_to_skip()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@dataclass
class Node:
    """A node reached over SSH: its root, its inventory file, its sshd."""

    root: Path
    inventory: Path
    sshd: sshd.Sshd

    def deploy(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [Path(sys.executable).with_name("pyinfra"), self.inventory, "deploy.py", "-y", "--json", *arguments],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def sessions(self) -> int:
        """Commands sent so far, by sshd's own count."""
        return self.sshd.sessions()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("ssh")
    root = REPOSITORY / ".lab" / "ssh"
    shutil.rmtree(root, ignore_errors=True)
    inventory = folder / "inventory" / "lab.py"  # the file's name makes its hosts the group `lab`
    inventory.parent.mkdir()
    with sshd.running(folder) as server:
        data = server.data() | {"root": str(root), "port": 1024}
        inventory.write_text(f"lab = [('127.0.0.1', {data!r})]\n")
        yield Node(root, inventory, server)
    shutil.rmtree(root, ignore_errors=True)


STAGES = ("--data", "stages=preflight,system,runtime,patches,model,launchers")


def changed(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [op["name"] for op in json.loads(done.stdout)["results"]["operations"] if op["success"]]


def test_a_node_is_brought_to_its_state_over_ssh(node: Node) -> None:
    done = node.deploy(*STAGES)
    assert changed(done) == [
        p.FOLDERS, p.TOOLS, p.VENV, p.SYNC, p.STUB, p.VERIFY, p.APPLY, p.PROBE, p.MODEL, p.CONFIG,
        p.LAUNCHERS,
    ]  # fmt: skip
    assert "[127.0.0.1] torch-cuda: holds" in done.stderr, "long work is shown while it runs"


def test_a_converged_deploy_takes_at_most_8_commands(node: Node) -> None:
    before = node.sessions()
    assert changed(node.deploy(*STAGES)) == []
    used = node.sessions() - before
    assert 1 <= used <= 8, f"{used} SSH commands"


def test_only_what_a_canary_has_passed_reaches_the_other_hosts(node: Node) -> None:
    """One machine by two names, so that both hosts have the same spec; the canary tells of its result over SSH."""
    key = (node.sshd.folder / "host.pub").read_text()
    with node.sshd.known_hosts.open("a") as known:
        known.write(f"[localhost]:{node.sshd.port} {key}")
    data = node.sshd.data() | {"root": str(node.root), "port": 1024}
    inventory = node.inventory.with_name("lab_two.py")
    hosts = [("127.0.0.1", data), ("localhost", data)]
    inventory.write_text(f"lab = {hosts!r}\ncanary = ['127.0.0.1']\n")
    two = Node(node.root, inventory, node.sshd)
    done = two.deploy(*STAGES)
    assert done.returncode == 1
    assert "[localhost]     ! no canary host (127.0.0.1) has a passing result for spec" in done.stderr
    assert "--limit canary" in done.stderr and "[127.0.0.1]     !" not in done.stderr
    off = two.deploy(*STAGES, "--data", "canary_gate=off")
    assert off.returncode == 0 and "[localhost]     the canary gate is off: no canary host" in off.stderr
    spec = build_spec("localhost", group_data("all", "lab") | data_of(data), catalogue(), Sources((), []))
    result = {"spec_digest": spec.spec_digest, "benchmark_digest": "any", "verdict": "accepted"}
    (node.root / "results" / "run.json").write_text(json.dumps(result))
    assert changed(two.deploy(*STAGES)) == []


def data_of(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if not name.startswith("ssh_")}


def doctor(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("pyinfra"), node.inventory, "doctor.py", *arguments],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_the_doctor_takes_one_command_changes_nothing_and_asks_no_question(node: Node, tmp_path: Path) -> None:
    before, sessions = sorted(node.root.rglob("*")), node.sessions()
    done = doctor(node, "--data", f"save_observation={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "[127.0.0.1]   passes: " in done.stderr and "Press enter" not in done.stderr
    assert node.sessions() - sessions == 1 and sorted(node.root.rglob("*")) == before
    saved = tmp_path / "127.0.0.1.json"
    command = [sys.executable, "-m", "gpuwright", "doctor", saved, "--group", "lab"]
    judged = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert judged.returncode == 0 and "127.0.0.1.json: passes: " in judged.stdout


def test_the_doctor_prints_json(node: Node) -> None:
    done = doctor(node, "--json", "--data", "min_memory_gib=99999")
    assert done.returncode == 2
    answer = json.loads(done.stdout)
    (host,) = answer["hosts"]
    assert (host["host"], host["passes"], answer["unreached"]) == ("127.0.0.1", False, [])
    assert next(each["id"] for each in host["findings"] if each["status"] == "failed") == "memory"


def test_the_doctor_s_exit_code_is_2_where_a_must_does_not_hold(node: Node) -> None:
    done = doctor(node, "--data", "min_memory_gib=99999")
    assert done.returncode == 2
    assert "must   failed   memory: expected 99999 GiB of memory; found" in done.stderr
    assert "-> use a larger host, or set `min_memory_gib` if you know better" in done.stderr


def test_a_host_that_cannot_be_reached_is_an_error_and_does_not_hide_the_others(node: Node) -> None:
    inventory = node.inventory.with_name("other") / "lab.py"
    inventory.parent.mkdir(exist_ok=True)
    data = node.sshd.data() | {"root": str(node.root), "port": 1024}
    away = data | {"ssh_hostname": "127.0.0.1", "ssh_port": 9}
    inventory.write_text(f"lab = [('127.0.0.1', {data!r}), ('gone', {away!r})]\n")
    done = doctor(Node(node.root, inventory, node.sshd), "-y")
    assert done.returncode == 1, done.stderr
    assert "gone could not be examined" in done.stderr and "[127.0.0.1]   passes: " in done.stderr


def test_an_unknown_host_key_is_refused(node: Node) -> None:
    known = node.sshd.known_hosts.read_text()
    node.sshd.known_hosts.write_text("")
    before = node.sessions()
    done = node.deploy(*STAGES)
    node.sshd.known_hosts.write_text(known)
    assert done.returncode == 1 and node.sessions() == before


def test_bad_input_sends_no_command(node: Node) -> None:
    before = node.sessions()
    done = node.deploy("--data", "tier=basline")
    assert done.returncode == 1 and 'did you mean "baseline"?' in done.stderr
    assert node.sessions() == before
