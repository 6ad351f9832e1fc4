"""The same server under a real systemd: a booted Debian container that has this machine's node at the same path.

The tests share one container and build on each other, in the order of this file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from gpuwright.drift import Report
from tests.fleet.nodes import within
from tests.lab import container
from tests.lab.conftest import RESULTS, Lab, Run, ok
from tests.lab.test_server import healthy

UNIT = "gpuwright-lab"
STAGES = "stages=system,launchers,service"


class Node:
    """The container, and the lab's node in it."""

    def __init__(self, lab: Lab, machine: container.Container, inventory: Path) -> None:
        self.lab, self.machine, self.inventory = lab, machine, inventory

    def deploy(self, *arguments: str, deploy: str = "deploy.py", timeout: float = 600) -> Run:
        lab = Lab(self.lab.root, self.lab.port)
        lab.inventory = str(self.inventory)
        return lab.deploy("--data", STAGES, *arguments, deploy=deploy, timeout=timeout)

    def show(self, name: str) -> str:
        """A property of the unit, by systemd's own account."""
        return self.machine.run(f"systemctl show {UNIT} --value -p {name}")

    def pids(self) -> list[int]:
        """The processes of the unit's control group."""
        group = self.show("ControlGroup")
        files = f"/sys/fs/cgroup/{{.,systemd,unified}}{group}/cgroup.procs"  # of whichever hierarchy there is
        return sorted({int(pid) for pid in self.machine.run(f"cat {files} 2>/dev/null", check=False).split()})

    def alive(self, pids: list[int]) -> list[int]:
        return [pid for pid in pids if self.machine.run(f"test -d /proc/{pid} && echo yes", check=False) == "yes"]


@pytest.fixture(scope="module")
def node(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    reason = container.reason_to_skip() or container.refusal()
    if reason:
        pytest.skip(reason)
    ok(lab.deploy("--data", "stages=preflight,system,runtime,patches,model,launchers"))
    ok(lab.deploy(deploy="stop.py"))
    folder = REPOSITORY / ".lab" / "container"  # on the disk of the base tree, so that a copy is quick
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    machine = container.Container(folder, [lab.root, container.interpreter_folder()])
    machine.prepare()
    machine.boot()
    inventory = tmp_path_factory.mktemp("inventory") / "lab.py"
    data = machine.data() | {"supervisor": "auto", "unit": UNIT, "system": {"shared-memory": 1}}
    inventory.write_text(f"lab = [('127.0.0.1', {data!r})]\n")
    yield Node(lab, machine, inventory)
    machine.end()
    shutil.rmtree(folder)


def test_where_pid_1_is_systemd_a_unit_keeps_the_server(node: Node) -> None:
    run = ok(node.deploy())
    assert run.changed[:3] == [p.SETTINGS, p.CONFIGURE, p.SERVER]
    assert node.machine.run(f"systemctl is-enabled {UNIT}-settings") == "enabled", "a unit beside the server's"
    assert f"/etc/systemd/system/{UNIT}.service: expected sha256" in run.said
    record = node.lab.record()
    assert record["manager"] == "systemd" and record["ready_at"] and healthy(node.lab)
    assert (node.show("ActiveState"), node.show("MainPID")) == ("active", str(record["pid"]))
    assert (node.show("KillMode"), node.show("LimitMEMLOCK")) == ("control-group", "infinity")
    assert node.machine.run(f"systemctl is-enabled {UNIT}") == "enabled"
    prlimit = "prlimit -o SOFT,HARD --noheadings --raw --memlock --nofile --pid"
    locked, files = (line.split() for line in node.machine.run(f"{prlimit} {record['pid']}").splitlines())
    most = node.machine.run(f"{prlimit} 1").split()[1]  # PID 1 cannot give what it may not have itself
    assert locked == [most, most] and files[0] == files[1], "as much as there is; the script raises the soft limit"
    assert len(node.pids()) >= 3 and record["pid"] in node.pids(), "the scheduler and the detokenizer too"
    assert not (node.lab.root / "run" / "supervisord.conf").exists()
    assert "Init torch distributed ends" in (node.lab.root / "logs" / "sglang-server-baseline.log").read_text()


def test_logrotate_rotates_the_log_under_the_server(node: Node) -> None:
    log = node.lab.root / "logs" / "sglang-server-baseline.log"
    os.truncate(log, 110_000_000)  # sparse
    node.machine.run(f"logrotate /etc/logrotate.d/{UNIT}")
    assert log.with_name(log.name + ".1").exists() and log.stat().st_size < 1_000_000
    log.with_name(log.name + ".1").unlink()
    assert healthy(node.lab)
    assert within(10, lambda: log.stat().st_size > 0), "it logs on, from the beginning"


def test_the_server_of_a_unit_is_benchmarked_over_ssh(node: Node) -> None:
    small = {"levels": [4], "input_len": 64, "output_len": 32, "min_duration_s": 0.1}
    run = ok(node.deploy("--data", f"{STAGES},smoke", "--data", "profiles=" + json.dumps({"smoke": small})))
    assert run.changed == [p.SMOKE] and "[127.0.0.1]   concurrency 4, repeat 3 of 3: " in run.said
    (path,) = (RESULTS / "127.0.0.1").glob("*.json")
    record = json.loads(path.read_text())
    assert record["verdict"] == "accepted" and record["host"]["name"] == node.machine.run("hostname")
    assert json.loads((node.lab.root / "results" / path.name).read_text()) == record, "on both sides"


def test_a_second_deploy_changes_nothing(node: Node) -> None:
    pid = node.show("MainPID")
    assert ok(node.deploy()).changed == [] and node.show("MainPID") == pid


def verdict(node: Node) -> tuple[int, list[str]]:
    """check.py's exit code, and what it found."""
    data = ["--data", f"root={node.lab.root}", "--data", f"port={node.lab.port}", "--data", STAGES]
    done = subprocess.run(
        [sys.executable, "check.py", str(node.inventory), *data, "-q", "--json", "-"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    (host,) = Report.model_validate_json(done.stdout).hosts
    return done.returncode, [f"{each.kind} {each.stage}: {each}" for each in host.findings]


def test_what_was_done_to_the_unit_by_hand_is_drift(node: Node) -> None:
    pid = node.show("MainPID")
    assert verdict(node) == (0, [])
    node.machine.run(f"systemctl disable {UNIT}")
    assert verdict(node) == (2, [f"corrective service: unit {UNIT}: expected started at boot, found not enabled"])
    assert ok(node.deploy()).changed == [p.SERVER] and verdict(node) == (0, [])
    drop_in = f"/etc/systemd/system/{UNIT}.service.d/override.conf"
    write = f"mkdir -p $(dirname {drop_in}) && printf '[Service]\nEnvironment=X=1\n' >{drop_in}"
    node.machine.run(f"{write} && systemctl daemon-reload")
    code, (found,) = verdict(node)
    assert code == 2 and found == f"corrective service: {drop_in} changes the unit, and is not of gpuwright"
    refused = node.deploy()
    assert refused.code == 1 and f"-> systemctl revert {UNIT}" in refused.said
    node.machine.run(f"rm -r $(dirname {drop_in}) && systemctl daemon-reload")
    assert verdict(node) == (0, [])
    unit = f"/etc/systemd/system/{UNIT}.service"
    node.machine.run(f"cp -p {unit} /tmp/unit && echo '# by hand' >>{unit}")
    code, found = verdict(node)
    assert code == 2 and found[0].startswith(f"corrective service: {unit}: expected sha256")
    assert ok(node.deploy()).changed == [p.CONFIGURE, p.SERVER], "and systemd is told to read it"
    assert verdict(node) == (0, []) and node.show("MainPID") == pid, "all the while the same server"


def test_a_tier_that_crashes_is_diagnosed_and_the_unit_before_it_serves_again(node: Node) -> None:
    before = node.pids()
    model = json.dumps({"kind": "folder", "path": "/nonexistent/model"})
    refused = node.deploy("--data", "tier=no-radix", "--data", f"model={model}")
    assert (
        refused.code == 1 and "not started:" in refused.said and "model-whole: expected a whole model" in refused.said
    )
    blind = ("--data", "ignored_checks=" + json.dumps({"model-whole": "the test wants a server that crashes"}))
    run = node.deploy("--data", "tier=no-radix", "--data", f"model={model}", *blind)
    assert run.code == 1 and "tier no-radix did not come up: it ended" in run.said
    assert "[model-path-missing]" in run.said and "tier baseline serves again" in run.said
    assert not node.alive(before) and healthy(node.lab)
    unit = node.machine.run(f"cat /etc/systemd/system/{UNIT}.service")
    assert "tier baseline" in unit and node.show("NeedDaemonReload") == "no"
    pid = node.show("MainPID")
    assert ok(node.deploy()).changed == [p.LAUNCHERS] and node.show("MainPID") == pid


def test_another_tier_replaces_the_server_and_all_its_children(node: Node) -> None:
    before = node.pids()
    assert ok(node.deploy("--data", "tier=no-radix")).changed == [p.CONFIGURE, p.SERVER, p.RECORD]
    assert not node.alive(before) and healthy(node.lab) and node.lab.record()["tier"] == "no-radix"
    assert node.lab.record()["pid"] in node.pids()


def test_a_killed_parent_leaves_nothing_and_is_started_again_by_systemd(node: Node) -> None:
    before, parent = node.pids(), node.lab.record()["pid"]
    node.machine.run(f"kill -9 {parent}")
    assert within(60, lambda: node.show("MainPID") not in ("0", str(parent)))
    assert not node.alive(before), "the whole control group went"
    assert "[gpuwright] the server ended: signal (killed KILL)" in Path(node.lab.record()["log"]).read_text()
    pid = node.show("MainPID")
    run = ok(node.deploy("--data", "tier=no-radix"))
    assert run.changed == [p.SERVER] and "after a crash or a reboot" in run.said and healthy(node.lab)
    assert node.show("MainPID") == pid == str(node.lab.record()["pid"]), "it is taken over, not started once more"
    assert ok(node.deploy("--data", "tier=no-radix")).changed == []


def test_a_unit_that_cannot_start_gives_up_and_says_so(node: Node) -> None:
    script = node.lab.root / "launch" / "run_tp1_no_radix.sh"
    script.write_text("#!/bin/sh\nexit 3\n")
    node.machine.run(f"systemctl kill -s KILL {UNIT}")
    assert within(90, lambda: node.show("ActiveState") == "failed")
    run = ok(node.deploy("--data", "tier=no-radix"))
    assert run.changed == [p.LAUNCHERS, p.SERVER] and healthy(node.lab)
    assert "expected serving, found not running (failed (exit-code)" in run.said, run.said


def test_the_server_comes_up_again_with_the_node(node: Node) -> None:
    node.machine.reboot()
    assert within(120, lambda: healthy_or_not_yet(node.lab))
    run = ok(node.deploy("--data", "tier=no-radix"))
    assert run.changed == [p.SERVER] and "taking over pid" in run.said


def healthy_or_not_yet(lab: Lab) -> bool:
    try:
        return healthy(lab)
    except OSError:
        return False


def test_another_unit_leaves_nothing_of_the_one_before(node: Node) -> None:
    before = node.pids()
    run = ok(node.deploy("--data", "tier=no-radix", "--data", "unit=gpuwright-other"))
    assert f"unit {UNIT}: expected absent, found left of another supervisor" in run.said, run.said
    files = node.machine.run("ls /etc/systemd/system /etc/logrotate.d").split()
    assert "gpuwright-other.service" in files and f"{UNIT}.service" not in files and UNIT not in files
    assert not node.alive(before) and healthy(node.lab)
    assert ok(node.deploy("--data", "tier=no-radix", "--data", "unit=gpuwright-other")).changed == []


def test_supervisor_can_take_over_from_systemd_and_back(node: Node) -> None:
    run = ok(node.deploy("--data", "tier=no-radix", "--data", "supervisor=supervisor"))
    assert "kept by supervisor, found kept by unit gpuwright-other" in run.said, run.said
    assert node.lab.record()["manager"] == "supervisor" and healthy(node.lab)
    assert "gpuwright-other.service" not in node.machine.run("ls /etc/systemd/system").split()
    run = ok(node.deploy())
    assert node.lab.record()["manager"] == "systemd" and healthy(node.lab)
    assert not (node.lab.root / "run" / "supervisord.conf").exists()
    assert "supervisord" not in node.machine.run("ps -eo args")
    assert ok(node.deploy()).changed == []


def test_stopping_leaves_no_process_and_no_start_at_boot(node: Node) -> None:
    before = node.pids()
    ok(node.deploy(deploy="stop.py"))
    assert not node.alive(before)
    assert node.show("ActiveState") == "inactive"
    assert node.machine.run(f"systemctl is-enabled {UNIT}", check=False) == "disabled"
