"""Nodes that are hostile or odd, and control machines that are: each deployed to, and checked."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpuwright import plan as p
from tests.fleet.conftest import FLEET, Control, by_name, start_up
from tests.fleet.nodes import Node, call
from tests.fleet.test_rollout import OTHER, ROLLED_OUT, changes
from tests.lab.conftest import ok

# --- shells --------------------------------------------------------------------------

TALKS = r"""echo "Welcome to $(hostname)! {not json}"; echo '{"version": 4}'; echo "last login: never" >&2
trap 'echo "{goodbye"; echo logout' EXIT
printf '\033]0;%s\007\033[1;31mno end of line\033[0m' "$(hostname)" """
RUBBISH = r"""printf '\377\376\000\200 caf\351\n'; printf '\377\376\000 caf\351\n' >&2; printf '\303'"""
SLOW = "sleep 2"


def test_a_shell_that_talks_or_is_slow_changes_nothing(control: Control, three: list[Node]) -> None:
    talks, rubbish, slow = three
    profile = slow.tree / "etc" / "profile"
    kept = profile.read_text()
    profile.write_text(f"{SLOW}; echo slowly\n{kept}")
    with start_up(TALKS, talks), start_up(RUBBISH, rubbish), start_up(SLOW, slow):
        deployed = ok(control.deploy(*OTHER))
        checked, examined = control.check(*OTHER), control.pyinfra("doctor.py", "-y")
        again = ok(control.deploy(*OTHER))
    profile.write_text(kept)
    assert changes(deployed) == {step: ["node-1", "node-2", "node-3"] for step in ROLLED_OUT}
    assert checked.code == 0, checked.out
    assert checked.hosts["node-3"].seconds and checked.hosts["node-3"].seconds > 2
    assert examined.code == 0 and "Traceback" not in deployed.said + examined.said
    assert again.changed == []
    ok(control.deploy())


def test_neither_side_s_locale_matters(control: Control, three: list[Node], tmp_path: Path) -> None:
    latin = "export LC_ALL=POSIX LANG=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONIOENCODING=latin-1"
    env = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "latin-1"}
    abroad = Control(tmp_path, by_name(three[:1]), env=env)
    with start_up(latin, three[0]):
        three[0].run("echo '# Überhänge, 温度' >>/opt/gpuwright/launch/run_tp1_baseline.sh")
        checked = abroad.check("--diff")
        assert checked.code == 2 and "# Überhänge, 温度" in checked.findings("node-1")[0].diff, checked.err
        assert ok(abroad.deploy()).changed == ["launchers | write launch scripts"]
        assert abroad.check().code == 0


# --- what a node lacks ---------------------------------------------------------------


def test_a_node_without_python_is_told_so_and_the_others_go_on(control: Control, three: list[Node]) -> None:
    three[1].run("mv /usr/bin/python3 /usr/bin/python3.away")
    deployed, checked, examined = control.deploy(*OTHER), control.check(*OTHER), control.pyinfra("doctor.py", "-y")
    three[1].run("mv /usr/bin/python3.away /usr/bin/python3")
    missing = "there is no python3 on this host, by which everything is observed and done: install it (3.9 or later)"
    assert deployed.code == 1 and f"[node-2] {missing}" in deployed.said, deployed.said
    assert changes(deployed) == {step: ["node-1", "node-3"] for step in ROLLED_OUT}
    assert checked.code == 1 and checked.statuses == {"node-1": "clean", "node-2": "error", "node-3": "clean"}
    assert checked.hosts["node-2"].error == f"it could not be observed: {missing}"
    assert examined.code == 1 and missing in examined.said and examined.said.count("passes: ") == 2
    assert changes(ok(control.deploy(*OTHER))) == {step: ["node-2"] for step in ROLLED_OUT}
    ok(control.deploy())


@pytest.fixture
def small_disk(three: list[Node]) -> Iterator[Node]:
    """A node whose root is a file system of its own, of which nothing is free."""
    node, root = three[2], "/opt/gpuwright"
    node.run(f"cp -a {root} /tmp/kept; mount -t tmpfs -o size=400M,mode=755 tmpfs {root}; cp -a /tmp/kept/. {root}")
    node.run(f"rm -rf /tmp/kept; dd if=/dev/zero of={root}/filler bs=1k status=none || true")
    yield node
    node.run(f"umount {root}")


def test_a_full_disk_fails_its_host_and_leaves_nothing_half_written(
    control: Control, small_disk: Node, tmp_path: Path
) -> None:
    texts = "/opt/gpuwright/launch /opt/gpuwright/run /opt/gpuwright/state.json /etc/systemd/system/*.service"
    hashes = f"find {texts} -type f ! -name .lock | sort | xargs sha256sum"
    before = small_disk.run(hashes)
    stopped = control.deploy(*OTHER)
    assert stopped.code == 1 and "disk" in stopped.said and stopped.said.count("[node-3]     ! ") >= 1, stopped.said
    assert small_disk.run(hashes) == before, "it was stopped before anything was changed"
    anyway = control.deploy(*OTHER, "--data", "min_free_disk_gib=0", "--data", "port=31001")
    assert anyway.code == 1 and "[node-3] " in anyway.said and "No space left on device" in anyway.said, anyway.said
    assert "Traceback" not in anyway.said, anyway.said
    assert small_disk.run("find /opt/gpuwright /etc/systemd/system -name '*.gpuwright-new'") == ""
    checked = control.check(*OTHER, "--data", "min_free_disk_gib=0", "--data", "port=31001")
    assert checked.code == 2 and checked.statuses == {"node-1": "clean", "node-2": "clean", "node-3": "drift"}
    small_disk.run("rm /opt/gpuwright/filler")
    lax = ("--data", "min_free_disk_gib=0")
    ok(control.deploy(*OTHER, *lax))
    assert control.check(*OTHER, *lax).code == 0 and ok(control.deploy(*OTHER, *lax)).changed == []
    ok(control.deploy(*lax))


def test_files_of_another_time_are_those_they_are(control: Control, three: list[Node]) -> None:
    """A node's clock that was wrong, and is put right: what was written lies in the future, or long ago.

    The clock itself cannot be set: containers share their host's.
    """
    for node, when in zip(three, ("2040-01-01", "1971-01-01", "2040-01-01"), strict=True):
        node.run(f"find /opt/gpuwright /etc/systemd/system/sglang* -exec touch -h -d {when} {{}} +")
    assert control.check("--data", "integrity=deep").code == 0
    assert ok(control.deploy()).changed == []
    three[1].run("echo >>/opt/gpuwright/venv/lib/python3.11/site-packages/sglang/utils.py")
    assert changes(ok(control.deploy())) == {step: ["node-2"] for step in (p.SYNC, p.VERIFY, p.APPLY)}
    assert control.check().code == 0


# --- users ---------------------------------------------------------------------------


def test_users_with_and_without_sudo(control: Control, three: list[Node], tmp_path: Path) -> None:
    """A user without sudo has a root of his own, one with it does what root does, one who is refused it fails alone."""
    own = {"root": "/home/plain/gpuwright", "supervisor": "supervisor", "system": {}}
    hosts = {
        "unprivileged": three[0].data("plain") | own,
        "sudoer": three[1].data("admin") | {"_sudo": True},
        "refused": three[2].data("plain") | {"_sudo": True},
    }
    users = Control(tmp_path, hosts)
    deployed = users.deploy(*OTHER)
    assert deployed.code == 1 and deployed.answer is not None, deployed.said
    assert deployed.answer["results"]["failed_hosts"] == ["refused"]
    assert "sudo: a password is required" in deployed.said and "password:" not in deployed.said.replace("sudo:", "")
    checked = users.check(*OTHER)
    assert checked.statuses == {"unprivileged": "clean", "sudoer": "clean", "refused": "error"}, checked.out
    assert changes(ok(users.deploy(*OTHER, "--limit", "unprivileged", "--limit", "sudoer"))) == {}
    assert three[0].run("journalctl --quiet _COMM=sudo | grep -c plain || true") == "0", "no sudo was tried for it"
    assert three[0].run("find / -xdev -user plain -not -path '/home/plain/*' -not -path '/proc/*'") == "/home/plain"
    assert three[1].run("find /opt/gpuwright ! -user root") == "", "what sudo writes is root's"
    three[0].run("rm -rf /home/plain/gpuwright")
    ok(control.deploy())


def test_sudo_is_used_for_the_hosts_settings_alone(control: Control, three: list[Node], tmp_path: Path) -> None:
    """By a user whose root is his own: what is not a setting of the host is done, and owned, by him."""
    node = three[1]
    own = {"root": "/home/admin/gpuwright", "supervisor": "supervisor", "settings_sudo": True, "unit": "admins"}
    kept = "/var/lib/gpuwright/home/admin/gpuwright"

    def user(**system: Any) -> Control:
        return Control(tmp_path, {"node-2": node.data("admin") | own | {"system": system}})

    def shm_kib() -> int:
        return int(node.run("df --output=size -k /dev/shm | tail -1"))

    before, since = shm_kib(), node.run("date '+%F %T'")
    set_up = user(**{"open-files": 4096, "shared-memory": 3})
    ok(set_up.deploy(*OTHER))
    assert shm_kib() == 3 << 20 != before
    assert "4096" in node.run("cat /etc/security/limits.d/90-admins.conf")
    assert node.run(f"find {kept} ! -user root") == "" and "shared-memory" in node.run(f"cat {kept}/system.json")
    assert node.run("systemctl is-enabled admins-settings") == "enabled"
    assert node.run("find /home/admin/gpuwright ! -user admin") == "", "nothing of his root is root's"
    assert set_up.check(*OTHER).code == 0 and ok(set_up.deploy(*OTHER)).changed == []
    used = node.run(f"journalctl -q -o cat _COMM=sudo --since '{since}'")
    assert used.count("COMMAND=") == 1, "one operation, once: a check and a deploy that changes nothing need none"
    node.run("mount -o remount,size=2G /dev/shm")
    checked = set_up.check(*OTHER)
    assert checked.code == 2 and {each.stage for each in checked.findings("node-2")} == {"system"}
    assert changes(ok(set_up.deploy(*OTHER))) == {p.SETTINGS: ["node-2"]}
    node.run("rm -rf /home/admin/gpuwright")
    given_up = user()
    ok(given_up.deploy("--data", "stages=system"))
    assert shm_kib() == before, "also after his root was deleted"
    assert "admins" not in node.run("ls /etc/security/limits.d /etc/systemd/system")
    node.run(f"rm -rf /home/admin/gpuwright {kept}")
    ok(control.deploy())


# --- keys ----------------------------------------------------------------------------


def test_a_host_key_that_has_changed_or_is_unknown_is_refused(
    three: list[Node], control: Control, tmp_path: Path
) -> None:
    """By the default of group all: the inventory says nothing about it."""
    known = tmp_path / "known_hosts"
    one, two, well = three
    known.write_text(f"{one.address} {two.host_key.read_text()}")
    other = {"ssh_known_hosts_file": str(known)}
    strangers = Control(tmp_path, {"changed": one.data() | other, "unknown": two.data() | other, "well": well.data()})
    assert not any("strict" in key for data in strangers.hosts.values() for key in data)
    changed, unknown = (
        f"Host key for {one.address} does not match",
        f"No host key for {two.address} found in known_hosts",
    )
    for name in ("deploy.py", "drift.py", "doctor.py"):
        run = strangers.pyinfra(name, "-y")
        assert run.code == 1 and changed in run.said and unknown in run.said, run.said
        assert "[well] " in run.said and "[changed] Connected" not in run.said
    checked = strangers.check()
    assert checked.statuses == {"changed": "error", "unknown": "error", "well": "clean"} and checked.code == 1
    assert changed in checked.hosts["changed"].error and unknown in checked.hosts["unknown"].error
    assert known.read_text().count("\n") == 1, "no key was added"


def test_the_agent_is_not_forwarded(three: list[Node], control: Control, tmp_path: Path) -> None:
    """Not even where its user's own ssh would: who is root on one node must not get at the others by it."""
    said = call("ssh-agent", "-s")
    agent = dict(part.strip().split("=", 1) for part in said.replace("\n", ";").split(";") if "=" in part)
    try:
        subprocess.run(["ssh-add", "-q", FLEET.key], env=os.environ | agent, check=True)
        (tmp_path / ".ssh").mkdir()
        (tmp_path / ".ssh" / "config").write_text("Host *\n  ForwardAgent yes\n")
        env = {"SSH_AUTH_SOCK": agent["SSH_AUTH_SOCK"], "HOME": str(tmp_path)}
        node = three[0]
        data = {key: value for key, value in node.data().items() if key != "ssh_key"} | {"ssh_allow_agent": True}
        user = Control(tmp_path, {"node-1": data}, env=env)
        with start_up('echo "agent: <$SSH_AUTH_SOCK>" >>~/agents', node):
            assert user.check().code == 0, "it logs in by its agent"
            ok(user.deploy())
        seen = set(node.run("cat ~/agents; rm ~/agents").splitlines())
        assert seen == {"agent: <>"}
    finally:
        os.kill(int(agent["SSH_AGENT_PID"]), 15)


# --- two control machines ------------------------------------------------------------


def test_two_deploys_at_once_leave_what_one_of_them_declares(
    control: Control, three: list[Node], tmp_path: Path
) -> None:
    """From nothing; of one host both declare the same. Each may fail and say why; no host is a mixture."""
    for node in three:
        node.run("rm -rf /opt/gpuwright /etc/systemd/system/sglang-server*; systemctl daemon-reload")
    same, *apart = control.hosts
    other = Control(tmp_path, control.hosts | {name: control.hosts[name] | {"tier": "no-radix"} for name in apart})
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda each: each.deploy(timeout=300), (control, other)))
    for run in runs:
        assert run.code == 0 or "deploy again" in run.said, run.said
    mine, others = control.check().statuses, other.check().statuses
    assert mine[same] == "clean" == others[same]
    assert all({mine[name], others[name]} == {"clean", "drift"} for name in apart), (mine, others, runs)
    for node in three:
        assert node.run("find /opt/gpuwright /etc -name '*.gpuwright-new'") == ""
    ok(control.deploy())
    assert control.check().code == 0 and ok(control.deploy()).changed == []
