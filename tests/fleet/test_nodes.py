"""The nodes that the other tests of a fleet, and `make fleet`, stand on: their users, keys, network and reboots."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from tests.fleet import nodes
from tests.fleet.nodes import Fleet, FleetError, Node

FLEET = Fleet(REPOSITORY / ".lab" / "fleet-test", "gwtest0", "10.213.78")


@pytest.fixture(scope="module")
def two() -> Iterator[list[Node]]:
    if reason := nodes.reason_to_skip() or FLEET.refusal():
        pytest.skip(reason)
    with nodes.running(FLEET, ["node-1", "node-2"]) as fleet:
        yield fleet


def test_each_node_is_a_machine_of_its_own(two: list[Node]) -> None:
    assert [node.run("hostname") for node in two] == ["node-1", "node-2"]
    assert [node.address for node in two] == ["10.213.78.11", "10.213.78.12"]
    assert [node.run("ps -p 1 -o comm=") for node in two] == ["systemd", "systemd"]
    for path in ("/etc/machine-id", "/etc/ssh/ssh_host_*.pub", "/proc/sys/kernel/random/boot_id"):
        assert len({node.run(f"cat {path}") for node in two}) == 2, path
    one, other = two
    one.run("touch /opt/mine")
    assert other.run("ls /opt") == "", "what one writes, the other does not see"
    main_pid = other.run("systemctl show ssh --value -p MainPID")
    one.run("systemctl restart ssh")
    assert other.run("systemctl show ssh --value -p MainPID") == main_pid, "each systemd has processes of its own"


def test_a_host_key_that_is_not_the_nodes_is_refused(two: list[Node], tmp_path: Path) -> None:
    one, other = two
    known = tmp_path / "known_hosts"
    known.write_text(f"{one.address} {other.host_key.read_text()}")
    options = ["-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={known}", "-i", str(FLEET.key)]
    command = ["ssh", *options, f"root@{one.address}", "true"]
    refused = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert refused.returncode == 255 and "HOST IDENTIFICATION HAS CHANGED" in refused.stderr, refused.stderr


def test_one_user_may_use_sudo_and_one_may_not(two: list[Node]) -> None:
    for node in two:
        assert [node.run("whoami", user) for user in ("root", "admin", "plain")] == ["root", "admin", "plain"]
        assert node.run("sudo -n whoami", "admin") == "root"
        with pytest.raises(FleetError, match="a password is required"):
            node.run("sudo -n whoami", "plain")


def test_a_node_reaches_the_package_index(two: list[Node]) -> None:
    for node in two:
        node.run("python3 -m venv ~/venv && ~/venv/bin/pip download --no-deps --dest ~/wheels iniconfig", "plain")
        assert node.run("ls ~/wheels", "plain").endswith(".whl")


def test_a_rebooted_node_comes_back_as_it_was(two: list[Node]) -> None:
    node, other = two
    boot = node.run("touch /opt/kept /run/lost; cat /proc/sys/kernel/random/boot_id")
    node.reboot()
    assert node.run("cat /proc/sys/kernel/random/boot_id") != boot
    node.run("test -e /opt/kept && ! test -e /run/lost")
    node.run(f"</dev/tcp/{other.address}/22")


def test_a_node_without_its_network_is_not_reached(two: list[Node]) -> None:
    node, other = two
    node.cut()
    assert node.ssh("true").returncode == 255 and other.run("hostname") == "node-2"
    node.mend()
    assert node.run("hostname") == "node-1"


@pytest.mark.parametrize("how", ["off", "killed"])
def test_a_node_that_is_down_is_started_again(two: list[Node], how: str) -> None:
    node = two[0]
    node.run(f"touch /opt/{how}")
    if how == "off":
        node.run("systemctl poweroff", check=False)
    elif pid := node.pid():
        os.kill(pid, signal.SIGKILL)
    assert nodes.within(30, lambda: node.pid() is None)
    said: list[str] = []
    FLEET.up(["node-1", "node-2"], said.append)
    first, second = sorted(said)
    assert first.startswith("node-1: 10.213.78.11, up after ") and second == "node-2: 10.213.78.12, up already"
    assert node.run(f"ls -d /opt/{how}"), "what it wrote is still there"


def test_a_bridge_of_another_fleet_is_left_alone(two: list[Node], tmp_path: Path) -> None:
    stranger = Fleet(tmp_path, FLEET.bridge, FLEET.subnet)
    with pytest.raises(FleetError, match=f"is the bridge of {FLEET.folder}"):
        stranger.up(["node-1"])
    stranger.down()
    assert two[0].run("hostname") == "node-1"
