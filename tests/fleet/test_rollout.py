"""Bringing a fleet to a new state: in order, with hosts that fail, and interrupted at every stage."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuwright import plan as p
from tests.fleet import nodes
from tests.fleet.conftest import Control, Running, by_name
from tests.fleet.nodes import Node
from tests.lab.conftest import Run, ok

OTHER = ("--data", "tier=no-radix")  # a change of the repository, which every host is to get
ROLLED_OUT = [p.CONFIGURE, p.RECORD]


def changes(run: Run) -> dict[str, list[str]]:
    """What changed on which hosts."""
    assert run.answer is not None, run.said
    return {each["name"]: sorted(each["success"]) for each in run.answer["results"]["operations"] if each["success"]}


# --- in order ------------------------------------------------------------------------


def test_the_canary_goes_first_and_then_the_rest(control: Control) -> None:
    assert changes(ok(control.deploy("--limit", "canary", *OTHER))) == {step: ["node-1"] for step in ROLLED_OUT}
    assert control.check(*OTHER).statuses == {"node-1": "clean", "node-2": "drift", "node-3": "drift"}
    assert changes(ok(control.deploy(*OTHER))) == {step: ["node-2", "node-3"] for step in ROLLED_OUT}
    assert control.check(*OTHER).code == 0
    ok(control.deploy())


@pytest.fixture
def read_only(three: list[Node]) -> Node:
    """A node whose root is mounted read-only, as ext4 does it after an error of the disk."""
    node = three[1]
    node.run("mount --bind /opt/gpuwright /opt/gpuwright; mount -o remount,bind,ro /opt/gpuwright")
    return node


@pytest.mark.parametrize("serial", [[], ["--serial"]], ids=["side by side", "one by one"])
def test_a_host_that_fails_neither_stops_nor_hides_the_others(
    control: Control, read_only: Node, serial: list[str]
) -> None:
    failed = control.deploy(*OTHER, *serial)
    checked = control.check(*OTHER)
    read_only.run("umount /opt/gpuwright")
    assert failed.code == 1 and failed.answer is not None, failed.said
    assert failed.answer["results"]["failed_hosts"] == ["node-2"]
    assert changes(failed) == {step: ["node-1", "node-3"] for step in ROLLED_OUT}
    assert re.search(r"\[node-2\] +! root-writable: expected /opt/gpuwright", failed.said), failed.said
    if serial:
        hosts = re.findall(r"\[(node-\d)\] +(?:No changes|Success|Error)", failed.said)
        assert len([name for name, before in zip(hosts, ["", *hosts], strict=False) if name != before]) == 3
    assert checked.code == 2 and checked.statuses == {"node-1": "clean", "node-2": "drift", "node-3": "clean"}
    assert changes(ok(control.deploy(*OTHER))) == {step: ["node-2"] for step in ROLLED_OUT}
    assert set(changes(ok(control.deploy()))) == set(ROLLED_OUT) and control.check().code == 0


@pytest.mark.parametrize("name", ["deploy.py", "drift.py", "doctor.py", "stop.py"])
def test_a_typo_in_limit_is_an_error(control: Control, name: str) -> None:
    """pyinfra itself would run on no host, and exit with 0."""
    wrong = control.pyinfra(name, "-y", "--limit", "cannary")
    assert (
        wrong.code == 1 and '--limit "cannary" matches no host of this inventory; did you mean "canary"?' in wrong.said
    )
    assert "Connecting" not in wrong.said


def test_a_typo_in_limit_is_an_error_of_the_check(control: Control) -> None:
    for limit in ("cannary", "canary,node-4"):
        wrong = control.check("--limit", limit)
        assert wrong.code == 1 and "matches no host of this inventory" in wrong.err and not wrong.out


# --- interrupted ---------------------------------------------------------------------


def forget(node: Node, *paths: str) -> None:
    """As if it had never been deployed to, or not these parts of it."""
    node.run(
        f"rm -rf {' '.join(paths or ['/opt/gpuwright'])} /etc/systemd/system/sglang-server*; systemctl daemon-reload"
    )


def interrupted(node: Node, folder: Path, step: str, how: Callable[[Running, Node], None]) -> Run:
    """A deploy to this node, to which that happens as soon as it changes something in a step."""
    alone = Control(folder / node.name, by_name([node]), patience=(2, 6))
    running = alone.start()
    try:
        running.await_line(f"--> Starting operation: {step}", 90)
        begun = re.compile(rf"Starting operation: {re.escape(step)}.*\n(?:.*\n)*? +\[{node.name}\] +~ ")
        assert nodes.within(30, lambda: bool(begun.search(running.said()))), running.said()
        how(running, node)
        return running.end(90)
    finally:
        running.kill()


def ctrl_c(running: Running, node: Node) -> None:
    running.interrupt()


def sigterm(running: Running, node: Node) -> None:
    running.terminate()


def reboot(running: Running, node: Node) -> None:
    node.reboot()


def cut_off(running: Running, node: Node) -> None:
    """The cable is pulled, and found only after the deploy has given up."""
    node.cut()
    assert nodes.within(40, lambda: running.process.poll() is not None), "it waits for a node that is gone"
    node.mend()


def loose_cable(running: Running, node: Node) -> None:
    """The cable is pulled, and put back before anyone gives up."""
    node.cut()
    time.sleep(2)
    node.mend()


EARLY = [(p.FOLDERS, ctrl_c), (p.SYNC, cut_off), (p.APPLY, reboot)]
LATE = [(p.MODEL, sigterm), (p.LAUNCHERS, reboot), (p.CONFIGURE, cut_off)]
LATER = [(p.SETTINGS, loose_cable), (p.MODEL, cut_off), (p.RECORD, ctrl_c)]
CODES = {
    ctrl_c: 0,  # a bug of pyinfra 3.10: who presses Ctrl-C must not read the exit code
    sigterm: -signal.SIGTERM,
    cut_off: 1,
    reboot: 1,
    loose_cable: 0,  # nothing was noticed
}
LATE_PATHS = (
    "/opt/gpuwright/model",
    "/opt/gpuwright/launch",
    "/opt/gpuwright/state.json",
    "/etc/security/limits.d/90-*",
)


@pytest.mark.parametrize(
    ("blows", "paths"), [(EARLY, ()), (LATE, LATE_PATHS), (LATER, LATE_PATHS)], ids=["early", "late", "later"]
)
def test_a_deploy_interrupted_at_any_stage_is_finished_by_the_next(
    control: Control, three: list[Node], tmp_path: Path, blows: list[tuple[str, Callable[[Running, Node], None]]],
    paths: tuple[str, ...],
) -> None:  # fmt: skip
    """One node a stage, side by side."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: forget(node, *paths), three))
        steps, hows = zip(*blows, strict=True)
        runs = list(pool.map(interrupted, three, [tmp_path] * 3, steps, hows))
    for run, (step, how) in zip(runs, blows, strict=True):
        assert run.code == CODES[how], (step, how, run.said)
        assert "Traceback" not in run.said, run.said
    next_one = ok(control.deploy(timeout=300))
    assert next_one.answer is not None and next_one.answer["results"]["failed_hosts"] == []
    assert control.check().code == 0, control.check().out
    assert ok(control.deploy()).changed == []
