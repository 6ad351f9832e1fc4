"""The drift check on real nodes: what it sees, what it costs, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from gpuwright.drift import CONVERGE
from tests.fleet import nodes
from tests.fleet.conftest import Check, Control, by_name, sessions, snapshot, start_up
from tests.fleet.nodes import Node
from tests.lab.conftest import ok

SITE = "/opt/gpuwright/venv/lib/python3.11/site-packages"
SCRIPT = "/opt/gpuwright/launch/run_tp1_baseline.sh"
UNIT = "/etc/systemd/system/sglang-server.service"
LIMITS = "/etc/security/limits.d/90-sglang-server.conf"
PATCHED = "flashinfer/jit/cpp_ext.py"
DROP_IN = f"{UNIT}.d/mine.conf"

# --- a converged fleet ---------------------------------------------------------------


def test_a_converged_fleet_is_clean(control: Control) -> None:
    checked = control.check()
    assert (checked.code, set(checked.statuses.values())) == (0, {"clean"}), checked.out
    assert list(checked.hosts) == ["node-1", "node-2", "node-3"]
    assert all(set(checked.cases(name).values()) == {"passed"} for name in checked.hosts)
    assert 'gpuwright_drift_drifted{host="node-2"} 0.0' in checked.prom
    visited = control.pyinfra("drift.py", "-y")
    assert visited.code == 0 and visited.said.count("clean: ") == 3, visited.said


def test_a_check_takes_one_command_of_a_host(control: Control, three: list[Node]) -> None:
    for visit in (control.check, lambda: control.pyinfra("drift.py", "-y")):
        before = [sessions(node) for node in three]
        assert visit().code == 0
        assert [sessions(node) - count - 1 for node, count in zip(three, before, strict=True)] == [1, 1, 1]


@pytest.mark.parametrize("user", ["root", "admin"])
def test_nothing_is_written_on_a_node(three: list[Node], control: Control, tmp_path: Path, user: str) -> None:
    """Not even for a while: a file that comes and goes changes the time of its folder."""
    admin = {"_sudo": True} if user == "admin" else {}
    visitor = Control(tmp_path, by_name(three, user, **admin))
    visitor.check()  # a user's first login makes what it makes
    before = [snapshot(node) for node in three]
    assert len(before[0]) > 20_000 and UNIT in before[0] and "/tmp" in before[0]
    assert visitor.check().code == 0
    assert visitor.check("--data", "integrity=deep", "--diff").code == 0
    for visit in ("drift.py", "doctor.py"):
        said = visitor.pyinfra(visit, "-y", "--data", "integrity=deep")
        assert said.code == 0, said.said
    for node, then in zip(three, before, strict=True):
        now = snapshot(node)
        assert {path: (then.get(path), now.get(path)) for path in then.keys() ^ now.keys()} == {}
        assert {path: (then[path], now[path]) for path in then if then[path] != now[path]} == {}


# --- hands on a node -----------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """What someone does on a node by hand; in which stage and words the check must tell of it, and show it."""

    line: str
    stage: str
    says: str
    shows: str = ""


EDITS = [
    Edit(f"echo 'import os' >>{SITE}/sglang/utils.py", "runtime", "sglang/utils.py"),
    Edit(f"rm {SITE}/flashinfer/comm/__init__.py", "runtime", "lacks flashinfer/comm/__init__.py"),
    Edit(
        f"cd /opt/gpuwright/patches; cp originals/$(grep -A3 '\"{PATCHED}\"' applied.json | "
        f"sed -n 's/.*pristine\": \"\\([0-9a-f]*\\).*/\\1/p') {SITE}/{PATCHED}",
        "patches", f"{PATCHED} by flashinfer-cuda-version-from-torch: expected applied, found pristine",
    ),
    Edit(f"echo 'export HF_TOKEN=hf_abc' >>{SCRIPT}; echo '# by hand' >>{SCRIPT}", "launchers", SCRIPT, "+# by hand"),
    Edit(f"sed -i 's/^Restart=.*/Restart=no/' {UNIT}", "service", UNIT, "+Restart=no"),
    Edit(
        f"mkdir {UNIT}.d; printf '[Service]\\nNice=-5\\n' >{DROP_IN}; systemctl daemon-reload",
        "service", f"{DROP_IN} changes the unit, and is not of gpuwright",
    ),
    Edit("chmod 755 /opt/gpuwright/run", "system", "/opt/gpuwright/run: expected mode 0700, found mode 0755"),
    Edit("mount -o remount,size=512M /dev/shm", "system", "shared-memory"),
    Edit(f"sed -i 's/nofile 1048576/nofile 4096/' {LIMITS}", "system", LIMITS, "+* - nofile 4096"),
    Edit("truncate -s 1000 /opt/gpuwright/model/tokenizer.json", "model", "/opt/gpuwright/model/tokenizer.json"),
]  # fmt: skip


def test_each_edit_by_hand_is_found_in_its_stage_and_one_deploy_mends_them_all(
    control: Control, three: list[Node]
) -> None:
    node = three[1]
    seen: set[str] = set()
    for edit in EDITS:
        node.run(edit.line)
        checked = control.check("--diff")
        assert checked.code == 2, (edit, checked.out)
        assert checked.statuses == {"node-1": "clean", "node-2": "drift", "node-3": "clean"}, (edit, checked.out)
        found = {str(each): each for each in checked.findings("node-2") if str(each) not in seen}
        assert {each.stage for each in found.values()} == {edit.stage}, (edit, list(found))
        assert {each.kind for each in found.values()} == {"corrective"}
        assert any(edit.says in text for text in found), (edit, list(found))
        assert checked.cases("node-2")[edit.stage] == "failure" and set(checked.cases("node-1").values()) == {"passed"}
        seen |= set(found)
        if edit.shows:
            (shown,) = [each.diff for each in found.values() if each.what == edit.says]
            assert edit.shows in shown.splitlines() and edit.shows in checked.out, shown
        for text in (checked.out, checked.err, checked.junit, checked.prom, str(checked.report)):
            assert "hf_abc" not in text
    before = sessions(node)
    assert control.check("--diff", "--limit", "node-2").code == 2
    assert sessions(node) - before - 1 == 2, "one more command fetches the text of what differs"
    visited = control.pyinfra("drift.py", "-y", "--diff")
    assert visited.code == 2 and "hf_abc" not in visited.said and "+# by hand" in visited.said

    refused = control.deploy("--limit", "node-2")
    assert refused.code == 1 and f"{DROP_IN} changes the unit" in refused.said, refused.said
    assert "-> systemctl revert sglang-server" in refused.said, "it is told what to do about what is not ours"
    node.run("systemctl revert sglang-server")
    mended = ok(control.deploy())
    assert all(each["success"] in ([], ["node-2"]) for each in (mended.answer or {})["results"]["operations"])
    assert (control.check().code, ok(control.deploy()).changed) == (0, [])


def test_a_unit_file_that_was_deleted_comes_back(control: Control, three: list[Node]) -> None:
    """systemd still knows the unit then, as of a file that is not there: it is no one else's."""
    three[2].run(f"rm {UNIT}")
    (found,) = control.check("--limit", "node-3").findings("node-3")
    assert (found.stage, found.what, found.found) == ("service", UNIT, "absent")
    assert ok(control.deploy("--limit", "node-3")).changed == ["service | configure supervisor"]
    assert control.check().code == 0


def test_what_the_repository_has_changed_is_intentional(control: Control) -> None:
    checked = control.check("--data", "tier=no-radix")
    assert checked.code == 2 and set(checked.statuses.values()) == {"drift"}
    assert {each.kind for name in checked.hosts for each in checked.findings(name)} == {"intentional"}
    assert 'kind="intentional",stage="service"} ' in checked.prom


# --- errors beside verdicts ----------------------------------------------------------


def test_a_host_that_cannot_be_judged_stands_beside_the_verdicts_of_the_others(
    three: list[Node], control: Control, tmp_path: Path
) -> None:
    one, two, _ = three
    away = {"unreachable": two.data() | {"ssh_port": 9}}
    refused = {"refused": two.data("plain") | {"_sudo": True}}
    mixed = Control(tmp_path, {"well": one.data()} | away | refused)
    checked = mixed.check()
    assert checked.code == 1, checked.out
    assert checked.statuses == {"refused": "error", "unreachable": "error", "well": "clean"}
    assert "it could not be reached" in checked.hosts["unreachable"].error
    assert checked.hosts["refused"].error.startswith("sudo is refused: sudo: a password is required -> ")
    assert {name: set(checked.cases(name).values()) for name in checked.hosts} == {
        "refused": {"error"}, "unreachable": {"error"}, "well": {"passed"},
    }  # fmt: skip
    visited = mixed.pyinfra("drift.py", "-y", "--json")
    assert visited.code == 1 and visited.answer is not None, visited.said
    assert {each["host"]: each["status"] for each in visited.answer["hosts"]} == checked.statuses
    assert "sudo is refused" in visited.said and "password:" not in visited.said, "nobody is asked"


def test_a_user_who_may_not_read_the_state_is_told_so_and_of_nothing_else(
    three: list[Node], control: Control, tmp_path: Path
) -> None:
    checked = Control(tmp_path, by_name(three[:1], "plain")).check()
    (finding,) = checked.findings("node-1")
    assert checked.code == 1 and checked.statuses == {"node-1": "error"}
    assert finding.kind == "unknown" and "/opt/gpuwright/run" in finding.what and "uid 1001" in finding.what
    assert finding.mend == "run as its owner, or with _sudo"
    assert set(checked.cases("node-1").values()) == {"error"}, "no stage of it is called well"


# What comes first on a user's PATH in the place of python3.
HALF = """/usr/bin/python3 "$@" | head -c 3000"""
KILLED = """/usr/bin/python3 "$@" | head -c 3000 & sleep 0.3; kill -9 $$"""
DROPPED = """pid=$$
until [ "$(cat /proc/$pid/comm)" = sshd ]; do pid=$(ps -o ppid= $pid | tr -d ' '); done
kill -9 $pid"""


@contextlib.contextmanager
def python3(script: str, node: Node) -> Iterator[None]:
    path = node.tree / "root" / "bin" / "python3"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    with start_up('PATH="$HOME/bin:$PATH"', node):
        yield


def test_half_an_answer_is_an_error_and_never_a_verdict(control: Control, three: list[Node]) -> None:
    """Exit code 0 with half of the JSON; the interpreter killed in the middle; the connection killed in the middle."""
    first, second, third = three
    with python3(HALF, first), python3(KILLED, second), python3(DROPPED, third):
        checked, visited, deployed = control.check(), control.pyinfra("drift.py", "-y"), control.deploy()
    assert checked.code == 1 and set(checked.statuses.values()) == {"error"}, checked.out
    assert [checked.findings(name) for name in checked.hosts] == [[], [], []], "nothing is made up"
    assert "the observation is not usable" in checked.hosts["node-1"].error
    assert "it could not be observed" in checked.hosts["node-2"].error
    assert checked.hosts["node-3"].error
    assert visited.code == 1 and visited.said.count("error: ") == 3
    assert deployed.code == 1 and "No hosts remaining!" in deployed.said
    assert (control.check().code, ok(control.deploy()).changed) == (0, [])


def test_a_fleet_that_cannot_be_reached_at_all_is_named_host_by_host(three: list[Node], tmp_path: Path) -> None:
    away = Control(tmp_path, by_name(three, ssh_port=9))
    checked = away.check()
    assert checked.code == 1 and checked.statuses == dict.fromkeys(("node-1", "node-2", "node-3"), "error")
    assert all(f"{name}  error: it could not be reached" in checked.out for name in checked.hosts)
    assert {case for name in checked.hosts for case in checked.cases(name).values()} == {"error"}
    assert list(checked.cases("node-1")) == list(CONVERGE)


def test_no_host_is_an_error(control: Control, tmp_path: Path) -> None:
    checked = control.check("--limit", "node-9")
    assert checked.code == 1 and '"node-9" matches no host' in checked.err and checked.report is None
    nobody = Control(tmp_path, {}).check()
    assert nobody.code == 1 and "names no host" in nobody.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_check_that_is_told_to_end_reports_what_it_knows(
    control: Control, three: list[Node], number: signal.Signals
) -> None:
    asked = three[1].tree / "root" / "asked"
    with python3("touch ~/asked; sleep 60", three[1]):
        check = subprocess.Popen(
            control.check_command(), cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert nodes.within(20, asked.exists)
        asked.unlink()
        assert not nodes.within(1.5, lambda: check.poll() is not None), "it waits for node-2"
        check.send_signal(number)
        out, err = check.communicate(timeout=20)
    ended: Check = control.read_check(check.returncode, out, err)
    assert ended.code == 1 and ended.statuses == {"node-1": "clean", "node-2": "error", "node-3": "clean"}, err
    assert ended.hosts["node-2"].error == "the check was interrupted before it answered"
    assert set(ended.cases("node-2").values()) == {"error"} and "Traceback" not in err
