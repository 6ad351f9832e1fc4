"""Nodes that reach no public index: installed from a wheelhouse, which each wheel leaves once, and from an index with a
login.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from gpuwright.wheelhouse import gather
from tests.fleet import nodes
from tests.fleet.conftest import Control, by_name
from tests.fleet.nodes import Fleet, Node
from tests.fleet.test_rollout import changes
from tests.index import serving
from tests.lab.conftest import Run, ok
from tests.make import catalogue

FLEET = Fleet(REPOSITORY / ".lab" / "fleet-wheels", "gwwheel0", "10.213.81")
ROOT = "/opt/gpuwright"
INSTALL = ("--data", "stages=preflight,system,runtime")
RUNTIME = [p.WHEELS, p.TOOLS, p.VENV, p.SYNC, p.STUB, p.VERIFY]
SGLANG = "sglang-0.5.9-py3-none-any.whl"


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels for these nodes, gathered as a user does."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    gather(catalogue().stacks["sources-only"], "3.11", folder, prune=False)
    return folder


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.whl"))


@pytest.fixture(scope="module")
def four() -> Iterator[list[Node]]:
    """Four nodes without a way out of their own network."""
    if reason := nodes.reason_to_skip() or FLEET.refusal():
        pytest.skip(reason)
    with nodes.running(FLEET, [f"node-{number}" for number in range(1, 5)]) as fleet:
        for node in fleet:
            node.run("ip route del default")
            assert node.ssh("timeout 3 bash -c '</dev/tcp/192.0.2.1/443'").returncode == 1, "it reaches nothing outside"
        yield fleet


def bytes_for(size: int, hosts: int) -> int:
    """The most that may be sent for so many bytes of wheels: with SSH's and TCP's own, and each host's scripts."""
    return int(1.03 * size) + 1_500_000 * hosts


def control_of(folder: Path, fleet: list[Node], wheelhouse: Path, **data: Any) -> Control:
    return Control(folder, by_name(fleet, wheelhouse=str(wheelhouse), **data))


def forget(*fleet: Node) -> None:
    for node in fleet:
        node.run(f"rm -rf {ROOT} ~/.cache/uv")


def sent() -> int:
    """The bytes that this machine has sent into the fleet's network: what nodes send each other is not among them."""
    return int(Path(f"/sys/class/net/{FLEET.bridge}/statistics/tx_bytes").read_text())


def deployed(control: Control, *arguments: str) -> tuple[Run, int]:
    """A deploy that ends well, and the bytes that this machine sent for it."""
    before = sent()
    run = ok(control.deploy(*INSTALL, *arguments))
    return run, sent() - before


def wheels_on(node: Node) -> dict[str, str]:
    """Each wheel on a node with its sha256, by another way than a deploy's."""
    lines = node.run(f"cd {ROOT}/wheels && find . -type f | sort | xargs sha256sum").splitlines()
    return {line.split()[1][2:]: line.split()[0] for line in lines}


def hashes(folder: Path) -> dict[str, str]:
    return {name: row["sha256"] for name, row in json.loads((folder / "hashes.json").read_text()).items()}


def flip(path: Path, *, keep_time: bool = False) -> None:
    """Change one byte in the middle of a file."""
    found = path.stat()
    with path.open("r+b") as handle:
        handle.seek(found.st_size // 2)
        byte = handle.read(1)[0]
        handle.seek(found.st_size // 2)
        handle.write(bytes([byte ^ 1]))
    if keep_time:
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


# --- a rollout -----------------------------------------------------------------------


def test_a_rollout_takes_each_wheel_from_this_machine_once(four: list[Node], wheelhouse: Path, tmp_path: Path) -> None:
    control = control_of(tmp_path, four[:3], wheelhouse)
    planned = control.pyinfra("deploy.py", "--dry", *INSTALL)
    said = f"~ 4 wheels, 30.8 MB: expected in {ROOT}/wheels, found absent"
    assert planned.said.count(said) == 3, planned.said
    run, count = deployed(control)
    assert changes(run) == {step: ["node-1", "node-2", "node-3"] for step in [p.FOLDERS, p.SETTINGS, *RUNTIME]}
    assert size_of(wheelhouse) < count < bytes_for(size_of(wheelhouse), 3)
    assert run.said.count("from this machine in") == 1 and run.said.count(" 30.8 MB from node-") == 2, run.said
    for node in four[:3]:
        assert wheels_on(node) == hashes(wheelhouse)
        assert node.run("ps -eo args | grep '[p]ython3 -IBu' || true") == "", "nobody hands anything out any more"
    assert control.check(*INSTALL).code == 0
    again, count = deployed(control)
    assert again.changed == [] and count < bytes_for(0, 3)


def test_hosts_that_were_deployed_to_before_hand_on_what_they_have(
    four: list[Node], wheelhouse: Path, tmp_path: Path
) -> None:
    control = control_of(tmp_path, [four[0], four[3]], wheelhouse)
    run, count = deployed(control)
    assert changes(run)[p.SYNC] == ["node-4"] and "from this machine" not in run.said and count < bytes_for(0, 4), (
        run.said
    )
    assert wheels_on(four[3]) == hashes(wheelhouse)


def test_without_peers_every_host_is_sent_its_own(four: list[Node], wheelhouse: Path, tmp_path: Path) -> None:
    forget(*four[2:])
    run, count = deployed(control_of(tmp_path, four[2:], wheelhouse, wheels_from_peers=False))
    assert 2 * size_of(wheelhouse) < count < bytes_for(2 * size_of(wheelhouse), 4)
    assert run.said.count("from this machine in") == 2 and "MB from node-" not in run.said


def test_what_is_sent_in_batches_is_handed_on_while_the_next_are_sent(
    four: list[Node], wheelhouse: Path, tmp_path: Path
) -> None:
    fleet = four[1:]
    forget(*fleet)
    control = control_of(tmp_path, fleet, wheelhouse)
    small = "\nfrom operations import wheels\n\nwheels.BATCH = 6_000_000\n"
    control.inventory.write_text(control.inventory.read_text() + small)
    run, count = deployed(control)
    assert size_of(wheelhouse) < count < bytes_for(size_of(wheelhouse), 3)
    assert run.said.count("from this machine in") == 4, run.said
    assert [wheels_on(node) for node in fleet] == [hashes(wheelhouse)] * 3


def test_a_peer_that_is_not_reached_or_gives_something_wrong_is_left(
    four: list[Node], wheelhouse: Path, tmp_path: Path
) -> None:
    one, two, three, _ = four
    flip(one.tree / ROOT[1:] / "wheels" / SGLANG)
    forget(two, three)
    three.run(f"ip route add unreachable {one.address}")
    three.run(f"ip route add unreachable {two.address}")
    run, count = deployed(control_of(tmp_path, four[:3], wheelhouse))
    three.run(f"ip route del unreachable {one.address}; ip route del unreachable {two.address}")
    assert f"[node-2]     not from node-1, but from elsewhere: {SGLANG} came wrong: expected sha256" in run.said, (
        run.said
    )
    assert "[node-3]     not from node-1, but from elsewhere: [Errno 113] No route to host" in run.said, run.said
    assert wheels_on(two) == wheels_on(three) == hashes(wheelhouse) != wheels_on(one)
    assert count < bytes_for(2 * size_of(wheelhouse), 3)
    shutil.copyfile(wheelhouse / SGLANG, one.tree / ROOT[1:] / "wheels" / SGLANG)


def test_a_peer_that_is_lost_while_it_hands_on_is_left(four: list[Node], wheelhouse: Path, tmp_path: Path) -> None:
    """What has come from it is kept, and the rest comes from this machine."""
    source, node, _, _ = four
    forget(node)
    control = control_of(tmp_path, [source, node], wheelhouse)
    parts = node.tree / ROOT[1:] / "wheels" / "parts"

    def there() -> int:
        with contextlib.suppress(OSError):
            return sum(path.stat().st_size for path in parts.glob("uv-*.part"))
        return 0

    source.run("tc qdisc add dev host0 root tbf rate 40mbit burst 64kb latency 400ms")  # uv's wheel takes 3.5 s
    before, running = sent(), control.start(*INSTALL)
    try:
        assert nodes.within(60, lambda: there() > 1_000_000), running.said()
        source.run("pkill -f '^python3 -IBu -$'")
        done = ok(running.end())
    finally:
        running.kill()
        source.run("tc qdisc del dev host0 root")
    assert "not from node-1, but from elsewhere: [Errno 111] Connection refused" in done.said, done.said
    assert "MB from this machine in" in done.said and wheels_on(node) == hashes(wheelhouse)
    assert sent() - before < bytes_for(size_of(wheelhouse), 2)


# --- cut off, and wrong --------------------------------------------------------------


def test_what_was_sent_before_a_kill_is_not_sent_again(four: list[Node], wheelhouse: Path, tmp_path: Path) -> None:
    node = four[3]
    forget(node)
    control = control_of(tmp_path, [node], wheelhouse)
    parts = node.tree / ROOT[1:] / "wheels" / "parts"

    def there() -> int:
        return sum(path.stat().st_size for path in parts.glob("*.part"))

    running = control.start(*INSTALL)
    try:
        assert nodes.within(60, lambda: there() > 2_000_000), running.said()
    finally:
        running.kill()
    kept = there()
    assert 2_000_000 < kept < size_of(wheelhouse), "it was killed midway"
    planned = control.pyinfra("deploy.py", "--dry", *INSTALL)
    assert f"found {kept / 1e6:.1f} MB of them" in planned.said, planned.said
    _, count = deployed(control)
    assert count < bytes_for(size_of(wheelhouse) - kept, 1)
    assert wheels_on(node) == hashes(wheelhouse)
    assert control.check(*INSTALL).code == 0


def test_a_wheel_that_was_changed_on_a_node_is_not_installed(
    four: list[Node], wheelhouse: Path, tmp_path: Path
) -> None:
    node = four[0]
    control = control_of(tmp_path, [node], wheelhouse)
    node.run(f"rm {ROOT}/venv/lib/python3.11/site-packages/sglang/utils.py")
    path = f"{ROOT}/wheels/{SGLANG}"
    flip(node.tree / path[1:])
    refused = control.deploy(*INSTALL)
    assert (
        refused.code == 1 and f"{path} is not the wheel of the lock, and was removed: expected sha256" in refused.said
    )
    mended = ok(control.deploy(*INSTALL))
    assert p.WHEELS in mended.changed and p.SYNC in mended.changed and wheels_on(node) == hashes(wheelhouse)
    assert control.check(*INSTALL).code == 0


@pytest.mark.parametrize("keep_time", [False, True], ids=["edited", "rotten"])
def test_a_wheel_that_was_changed_in_the_wheelhouse_is_not_taken(
    four: list[Node], wheelhouse: Path, tmp_path: Path, keep_time: bool
) -> None:
    """One whose time of writing tells so is refused before anything is changed; of another, its node tells."""
    node, other = four[0], tmp_path / "other"
    shutil.copytree(wheelhouse, other)
    flip(other / SGLANG, keep_time=keep_time)
    forget(node)
    control = control_of(tmp_path, [node], other)
    refused = control.deploy(*INSTALL)
    assert refused.code == 1, refused.said
    if keep_time:
        assert f"{SGLANG} came wrong, and was not taken: expected sha256" in refused.said
        assert SGLANG not in wheels_on(node)
    else:
        assert f"sglang has another content than the lock names ({SGLANG}: sha256 " in refused.said
        assert f"-> make wheelhouse STACK=sources-only PYTHON=3.11 TO={other}" in refused.said
        assert node.run(f"ls {ROOT} 2>&1 || true").endswith("No such file or directory"), "nothing was changed"
    ok(control_of(tmp_path, [node], wheelhouse).deploy(*INSTALL))


def test_a_whole_node_needs_no_wheels(four: list[Node], tmp_path: Path) -> None:
    """Neither its own nor those of the machine that checks it."""
    node = four[0]
    kept = wheels_on(node)
    node.run(f"mv {ROOT}/wheels /root/wheels")
    empty = control_of(tmp_path, [node], tmp_path / "none")
    assert empty.check(*INSTALL).code == 0 and ok(empty.deploy(*INSTALL)).changed == []
    node.run(f"mv /root/wheels {ROOT}/wheels; touch {ROOT}/wheels/left_pad-1.0-py3-none-any.whl")
    checked = empty.check(*INSTALL)
    assert checked.code == 2 and [each.step for each in checked.findings("node-1")] == [p.WHEELS]
    assert ok(empty.deploy(*INSTALL)).changed == [p.WHEELS] and wheels_on(node) == kept
    ok(Control(tmp_path, by_name([node])).deploy(*INSTALL))
    assert node.run(f"ls -d {ROOT}/wheels 2>&1 || true").endswith("No such file or directory"), "an index needs none"


@pytest.mark.parametrize("user", ["admin", "plain"])
def test_users_with_and_without_sudo(four: list[Node], wheelhouse: Path, tmp_path: Path, user: str) -> None:
    fleet = four[1:3]
    own = {"root": f"/home/{user}/gpuwright", "system": {}, "supervisor": "supervisor"}
    data = own if user == "plain" else {"_sudo": True}
    forget(*fleet)
    control = Control(tmp_path, by_name(fleet, user, wheelhouse=str(wheelhouse), **data))
    run, _ = deployed(control)
    assert run.said.count(" MB from node-") == 1, run.said
    root, owner = (own["root"], "plain") if user == "plain" else (ROOT, "root")
    for node in fleet:
        assert node.run(f"find {root} ! -user {owner}") == "" and SGLANG in node.run(f"ls {root}/wheels")
    assert control.check(*INSTALL).code == 0
    for node in fleet:
        node.run(f"rm -rf {root}")


def test_a_file_that_was_edited_comes_back_from_the_wheels(four: list[Node], wheelhouse: Path, tmp_path: Path) -> None:
    """Also one that is patched, whose distribution the patches stage installs anew."""
    node, stages = four[3], ("--data", "stages=preflight,system,runtime,patches")
    control = control_of(tmp_path, [node], wheelhouse, patches_foreign="replace")
    ok(control.deploy(*stages))
    site = f"{ROOT}/venv/lib/python3.11/site-packages"
    node.run(f"rm -r {ROOT}/wheels; echo >>{site}/flashinfer/jit/cpp_ext.py")
    mended = ok(control.deploy(*stages))
    assert mended.changed[:2] == [p.WHEELS, p.APPLY] and "1 wheel, 7.6 MB" in mended.said, mended.said
    assert control.check(*stages).code == 0 and ok(control.deploy(*stages)).changed == []


def test_this_machine_as_a_node_copies_them(four: list[Node], wheelhouse: Path, tmp_path: Path) -> None:
    """With `four`, as that is where a fleet can be."""
    data = {"root": str(tmp_path / "root"), "system": {}, "supervisor": "supervisor", "unit": "none-of-this-machine"}
    control = Control(tmp_path, {"@local": {**data, "wheelhouse": str(wheelhouse)}})
    ok(control.deploy(*INSTALL))
    there = tmp_path / "root" / "wheels"
    assert sorted(path.name for path in there.iterdir()) == sorted(hashes(wheelhouse))
    assert all(path.stat().st_nlink == 1 for path in there.iterdir()), "a file of its own"
    assert control.check(*INSTALL).code == 0 and ok(control.deploy(*INSTALL)).changed == []


# --- an index of one's own -----------------------------------------------------------

LOGIN = "fetcher:s3cret/p@ss"


def test_an_index_with_a_login(four: list[Node], wheelhouse: Path, tmp_path: Path) -> None:
    """The password is in no process's arguments, in nothing that is said, and in no file of the node."""
    node, password = four[2], LOGIN.partition(":")[2]
    forget(node)
    with serving(wheelhouse, FLEET.gateway, LOGIN) as index:
        trusted = {"PIP_TRUSTED_HOST": FLEET.gateway}
        data = {"index": index.url, "index_credentials": "env:INDEX_LOGIN", "installer_env": trusted}
        control = Control(tmp_path, by_name([node], **data), env={"INDEX_LOGIN": LOGIN})
        watch = "nohup sh -c 'while sleep 0.02; do ps axww -o args; done' >/tmp/ps 2>&1 & echo $!"
        watcher = node.run(watch)
        try:
            run = ok(control.deploy(*INSTALL))
        finally:
            node.run(f"kill {watcher}")
        assert index.served == {path.name for path in wheelhouse.glob("*.whl")}
        seen = node.run("cat /tmp/ps; rm /tmp/ps")
        assert "pip install" in seen and "uv pip sync" in seen
        for form in (password, "s3cret"):
            assert form not in seen and form not in run.said
            found = node.run(f"grep -rlF --binary-files=text '{form}' {ROOT} /root /tmp /etc /var/log || true")
            assert found == "", found
        assert control.check(*INSTALL).code == 0 and ok(control.deploy(*INSTALL)).changed == []
        forget(node)
        wrong = Control(tmp_path, control.hosts, env={"INDEX_LOGIN": "fetcher:wr0ng"})
        refused = wrong.deploy(*INSTALL)
        assert refused.code == 1 and "wr0ng" not in refused.said
        assert f"{index.url} refuses `index_credentials` (HTTP 401)" in refused.said, refused.said
