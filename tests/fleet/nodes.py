"""A fleet of Debian nodes on this machine, each a booted container with an address, a host key and users of its own.

All lie over one base tree (tests/debian.py), each writes to an overlay of its own. They hang on a bridge, and reach the
package index through it as this machine does. `python -m tests.fleet.nodes up 3`, `list`, `down`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuwright import REPOSITORY
from tests import debian

TOOLS = {"ip": "iproute2", "nft": "nftables", "ssh-keygen": "openssh-client"}
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
FORWARD, FORWARD_BEFORE = Path("/proc/sys/net/ipv4/ip_forward"), Path("/run/gpuwright-ip-forward")
TABLES = "gpuwright_"  # what the nftables tables of all fleets on this machine begin with

NETWORK = """\
[Match]
Name=host0
[Network]
Address={address}/24
Gateway={gateway}
LinkLocalAddressing=no
"""
# The second chain tells remote ends what fits the way out, where its MTU is less than the bridge's. The table is named,
# deleted and made, so that there may be one already.
NAT = """\
table ip {table}
delete table ip {table}
table ip {table} {{
  chain postrouting {{
    type nat hook postrouting priority srcnat
    ip saddr {subnet}.0/24 oifname != "{bridge}" masquerade
  }}
  chain forward {{
    type filter hook forward priority mangle
    ip saddr {subnet}.0/24 tcp flags syn tcp option maxseg size set rt mtu
  }}
}}
"""
USERS = """\
useradd --create-home --shell /bin/bash --groups sudo admin
useradd --create-home --shell /bin/bash plain
echo 'admin ALL=(ALL:ALL) NOPASSWD: ALL' >/etc/sudoers.d/admin
chmod 440 /etc/sudoers.d/admin
systemctl --quiet enable systemd-networkd
"""
# In a network namespace that goes with it: the bridge, a container's link and the table.
TRIAL = """\
ip link add gwtrial0 type bridge
ip link add gwtrial1 type veth peer name gwtrial2
nft -f -
mount -t overlay overlay -o lowerdir={base},upperdir={folder}/upper,workdir={folder}/work {folder}/tree
"""


class FleetError(RuntimeError):
    """What is wrong with the fleet, in words."""


def call(*command: str | Path, given: str = "") -> str:
    """A command's output. Raises FleetError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, input=given)
    if done.returncode != 0:
        raise FleetError(f"{shlex.join(map(str, command))}: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout.strip()


def within(seconds: float, true: Callable[[], bool]) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def started(pid: int) -> str:
    """When this process was, in ticks since this machine's boot; "" if it does not run, or has ended as a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else fields[18]


def reason_to_skip() -> str | None:
    """Why this machine cannot have a fleet, or None."""
    return debian.reason_to_skip(**TOOLS)


@dataclass(frozen=True)
class Node:
    """One node of a fleet."""

    name: str
    address: str
    fleet: Fleet

    @property
    def folder(self) -> Path:
        return self.fleet.folder / self.name

    @property
    def tree(self) -> Path:
        """Its root, as this machine sees it."""
        return self.folder / "tree"

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    @property
    def host_key(self) -> Path:
        """The public one. It is there once the node is prepared."""
        return self.folder / "host_key.pub"

    @property
    def machine(self) -> str:
        """Its name among this machine's containers, short enough to be a part of its link's."""
        return f"{self.fleet.bridge}-{self.address.rpartition('.')[2]}"

    @property
    def port(self) -> str:
        """This machine's end of its link, named by nspawn."""
        return f"vb-{self.machine}"

    def run(self, line: str, user: str = "root", *, check: bool = True) -> str:
        """A command's output, over ssh. Raises FleetError if it fails, unless `check` is off."""
        done = self.ssh(line, user)
        if check and done.returncode != 0:
            raise FleetError(f"{self.name}: {line}: {(done.stdout + done.stderr).strip()}")
        return done.stdout.strip()

    def ssh(self, line: str, user: str = "root") -> subprocess.CompletedProcess[str]:
        """A finished command; exit code 255 where the node was not reached."""
        options = ["BatchMode=yes", "ConnectTimeout=5", "ServerAliveInterval=5", "IdentitiesOnly=yes"]
        options += [f"UserKnownHostsFile={self.fleet.known_hosts}", "StrictHostKeyChecking=yes"]
        return subprocess.run(
            ["ssh", *(part for option in options for part in ("-o", option)), "-i", self.fleet.key,
             f"{user}@{self.address}", line],
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def data(self, user: str = "root") -> dict[str, Any]:
        """How pyinfra reaches it."""
        return {
            "ssh_hostname": self.address, "ssh_user": user, "ssh_key": str(self.fleet.key), "ssh_allow_agent": False,
            "ssh_known_hosts_file": str(self.fleet.known_hosts), "ssh_look_for_keys": False,
        }  # fmt: skip

    def reboot(self) -> None:
        """Reboot it, and wait until it is up: its nspawn ends, and leaves it to whoever runs it to start it again."""
        self.run("systemctl reboot", check=False)
        if not within(60, lambda: self.pid() is None):
            raise FleetError(f"{self.name} does not go down")
        self.start()
        self.wait_for_boot()

    def cut(self) -> None:
        """Pull its network cable."""
        call("ip", "link", "set", self.port, "down")

    def mend(self) -> None:
        """Put the cable back."""
        call("ip", "link", "set", self.port, "up")

    def pid(self) -> int | None:
        """Its nspawn's, if that runs: the leader of a process group of its own."""
        path = self.folder / "pid"
        pid, start = path.read_text().split(" ", 1) if path.exists() else ("", "")
        return int(pid) if start and started(int(pid)) == start else None

    def prepare(self) -> None:
        """A tree of its own over the base tree, with its own name, address, host key and users."""
        self.discard()
        for name in ("upper", "work", "tree"):
            (self.folder / name).mkdir(parents=True)
        self.mount()
        etc = self.tree / "etc"
        (etc / "hostname").write_text(f"{self.name}\n")
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        (etc / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
        network = NETWORK.format(address=self.address, gateway=self.fleet.gateway)
        (etc / "systemd" / "network" / "10-fleet.network").write_text(network)
        if BUNDLE.exists():  # with what this machine trusts beyond Debian's own list
            shutil.copyfile(BUNDLE, self.tree / BUNDLE.relative_to("/"))
        call("chroot", self.tree, "sh", "-ec", USERS)
        shutil.copyfile(self.fleet.key.with_suffix(".pub"), etc / "ssh" / "fleet_keys")
        keys = "AuthorizedKeysFile .ssh/authorized_keys /etc/ssh/fleet_keys\n"
        (etc / "ssh" / "sshd_config.d" / "fleet.conf").write_text(keys)
        for key in (etc / "ssh").glob("ssh_host_*"):
            key.unlink()
        key = etc / "ssh" / "ssh_host_ed25519_key"
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", key)
        shutil.copyfile(key.with_suffix(".pub"), self.host_key)

    def mount(self) -> None:
        """Lay its tree over the base tree, if it does not lie there."""
        if not self.tree.is_mount():
            layers = f"lowerdir={debian.BASE},upperdir={self.folder}/upper,workdir={self.folder}/work"
            call("mount", "-t", "overlay", "gpuwright", "-o", layers, self.tree)

    def start(self) -> None:
        """Boot it. It outlives whoever starts it."""
        self.kill()
        self.mount()
        # By this machine's resolver, not a stub on its loopback, which the node does not share.
        names = "replace-uplink" if Path("/run/systemd/resolve/resolv.conf").exists() else "replace-host"
        nspawn = [
            "systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", f"--directory={self.tree}",
            f"--machine={self.machine}", f"--hostname={self.name}", f"--network-bridge={self.fleet.bridge}",
            f"--resolv-conf={names}", "--kill-signal=SIGRTMIN+3",
        ]  # fmt: skip
        # nspawn boots it in a group "payload" of the control group that it is in itself: in one that nodes share, the
        # systemd of each would take the others' processes for its own.
        for group in self.control_groups():
            group.mkdir(exist_ok=True)
        enter = "".join(f"echo $$ >{shlex.quote(f'{group}/cgroup.procs')}; " for group in self.control_groups())
        detached = ["setsid", "sh", "-c", f"{enter}exec {shlex.join(nspawn)}"]
        redirected = f"</dev/null >{shlex.quote(str(self.console))} 2>&1"
        pid = int(call("sh", "-c", f"cd /; {shlex.join(detached)} {redirected} & echo $!"))
        (self.folder / "pid").write_text(f"{pid} {started(pid)}")

    def control_groups(self) -> list[Path]:
        """Its own, in those of the machine's hierarchies that systemd uses."""
        top = Path("/sys/fs/cgroup")
        tops = [folder for folder in (top, top / "systemd", top / "unified") if (folder / "cgroup.procs").exists()]
        return [folder / self.machine for folder in tops]

    def wait_for_boot(self) -> None:
        """Wait until it has started what it starts."""
        if not within(90, lambda: self.pid() is None or self.booted()):
            raise FleetError(f"{self.name} does not come up: {self.last_lines()}")
        if self.pid() is None:
            raise FleetError(f"{self.name} ended: {self.last_lines()}")

    def booted(self) -> bool:
        """Whether it answers, and runs what it is to run."""
        try:
            socket.create_connection((self.address, 22), timeout=0.5).close()  # ssh would wait 3 s for an address
        except OSError:
            return False
        return self.run("systemctl is-system-running --wait", check=False) in ("running", "degraded")

    def last_lines(self) -> str:
        return self.console.read_text(errors="replace").strip()[-2000:] if self.console.exists() else ""

    def power_off(self) -> None:
        """Tell it to."""
        if pid := self.pid():
            os.kill(pid, signal.SIGTERM)  # nspawn passes it on to PID 1 as the signal for that

    def kill(self) -> None:
        """Kill what is left of it: a killed nspawn leaves its PID 1 running, and by that its end of the link."""
        if not within(10, lambda: not self.kill_once() and not Path(f"/sys/class/net/{self.port}").exists()):
            raise FleetError(f"{self.name} cannot be killed: {self.port} and its processes are still there")

    def kill_once(self) -> set[int]:
        """The processes in its control groups, sent SIGKILL."""
        lists = [path for group in self.control_groups() for path in group.rglob("cgroup.procs")]
        pids = {int(pid) for path in lists for pid in path.read_text().split()} - {0}  # 0: of another PID namespace
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    def discard(self) -> None:
        """Wait until it is off, kill it after 30 s, and delete what it wrote."""
        within(30, lambda: self.pid() is None)
        self.kill()
        if self.tree.is_mount():
            call("umount", self.tree)
        for group in self.control_groups():
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()
        if self.folder.exists():
            shutil.rmtree(self.folder)


@dataclass(frozen=True)
class Fleet:
    """The nodes under one folder, on one bridge. `subnet` is the first three numbers of their addresses."""

    folder: Path = REPOSITORY / ".lab" / "fleet"
    bridge: str = "gwfleet0"
    subnet: str = "10.213.77"

    @property
    def key(self) -> Path:
        """The private key that every user of every node accepts."""
        return self.folder / "key"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def gateway(self) -> str:
        return f"{self.subnet}.1"

    @property
    def table(self) -> str:
        return f"{TABLES}{self.bridge}"

    @property
    def nodes(self) -> list[Node]:
        """All there are, up or down; none where there is no fleet."""
        path = self.folder / "nodes.json"
        entries = json.loads(path.read_text()) if path.exists() else []
        return [Node(entry["name"], entry["address"], self) for entry in entries]

    def refusal(self) -> str | None:
        """What keeps this machine from having it (no bridge, no NAT, no overlay), or None."""
        if said := debian.refusal():
            return said
        folder = self.folder.with_name(f"{self.folder.name}-trial")
        for name in ("upper", "work", "tree"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        try:
            trial = TRIAL.format(base=debian.BASE, folder=folder)
            call("unshare", "--mount", "--net", "sh", "-ec", trial, given=self.nat())
        except FleetError as error:
            return f"this machine has no fleet: {error}"
        finally:
            shutil.rmtree(folder)
        return None

    def up(self, names: Iterable[str], say: Callable[[str], None] = lambda line: None) -> list[Node]:
        """Boot these nodes side by side: new ones, and those that are down. Raises FleetError.

        `say` hears of each node, from a thread of its own.
        """
        if not debian.is_made():
            say(f"making {debian.BASE}: about a minute, once")
        debian.base()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.connect()
        if not self.key.exists():
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpuwright-fleet", "-f", self.key)
            os.chown(self.key, REPOSITORY.stat().st_uid, -1)  # whose pyinfra it is for, where this is run by sudo
        names = list(names)
        nodes = self.nodes
        for name in names:
            if name not in {node.name for node in nodes}:
                nodes.append(Node(name, f"{self.subnet}.{11 + len(nodes)}", self))
        entries = [{"name": node.name, "address": node.address} for node in nodes]
        (self.folder / "nodes.json").write_text(json.dumps(entries, indent=2) + "\n")
        asked = [node for node in nodes if node.name in names]
        with ThreadPoolExecutor(max_workers=len(asked)) as pool:
            list(pool.map(Node.prepare, [node for node in asked if not node.host_key.exists()]))
            there = [node for node in nodes if node.host_key.exists()]
            self.known_hosts.write_text("".join(f"{node.address} {node.host_key.read_text()}" for node in there))
            list(pool.map(lambda node: self.boot(node, say), asked))
        return asked

    @staticmethod
    def boot(node: Node, say: Callable[[str], None]) -> None:
        """Start a node if it is down."""
        start = time.monotonic()
        if node.pid():
            say(f"{node.name}: {node.address}, up already")
            return
        node.start()
        node.wait_for_boot()
        say(f"{node.name}: {node.address}, up after {time.monotonic() - start:.1f} s")

    def down(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Power off every node and put back everything on this machine, whatever there is of it."""
        for node in self.nodes:
            node.power_off()
        for node in self.nodes:
            node.discard()
            say(f"{node.name}: off")
        if self.owner() == str(self.folder):
            call("nft", "-f", "-", given=f"table ip {self.table}\ndelete table ip {self.table}\n")
            if FORWARD_BEFORE.exists() and TABLES not in call("nft", "list", "tables"):  # the last fleet here
                FORWARD.write_text(FORWARD_BEFORE.read_text())
                FORWARD_BEFORE.unlink()
            call("ip", "link", "delete", self.bridge)  # at last: by it the rest is known to be this fleet's
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def nat(self) -> str:
        """The rules by which its nodes reach what this machine reaches."""
        return NAT.format(table=self.table, subnet=self.subnet, bridge=self.bridge)

    def owner(self) -> str | None:
        """The folder of the fleet whose bridge it is, "" where it is none's, or None: there is no such bridge."""
        path = Path(f"/sys/class/net/{self.bridge}/ifalias")
        return path.read_text().strip() if path.exists() else None

    def connect(self) -> None:
        """The bridge, and the way out of it. Raises FleetError if the bridge is another's."""
        owner = self.owner()
        if owner is None:
            call("ip", "link", "add", self.bridge, "type", "bridge")
            call("ip", "link", "set", self.bridge, "alias", str(self.folder))
        elif owner != str(self.folder):
            raise FleetError(f"{self.bridge} is the bridge of {owner or 'someone else'}: make fleet-down there first")
        call("ip", "address", "replace", f"{self.gateway}/24", "dev", self.bridge)
        call("ip", "link", "set", self.bridge, "up")
        call("nft", "-f", "-", given=self.nat())
        if not FORWARD_BEFORE.exists():
            FORWARD_BEFORE.write_text(FORWARD.read_text())
        FORWARD.write_text("1\n")


@contextlib.contextmanager
def running(fleet: Fleet, names: Iterable[str]) -> Iterator[list[Node]]:
    """These nodes while a test needs them; at the end nothing of them is left."""
    fleet.down()  # of a run that was killed
    try:
        yield fleet.up(names)
    finally:
        fleet.down()
    assert fleet.owner() is None and not fleet.folder.exists()


def main(arguments: list[str] | None = None) -> int:
    """`make fleet` and `make fleet-down`."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleet.nodes", description="A fleet on this machine.")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("up", help="boot it").add_argument("count", type=int, nargs="?", default=3)
    actions.add_parser("down", help="power it off and remove it")
    actions.add_parser("list", help="what there is")
    given = parser.parse_args(arguments)
    os.environ["PATH"] += ":/usr/sbin"  # which `su` leaves out
    fleet = Fleet()
    if given.action == "list":
        for node in fleet.nodes:
            print(f"{node.name}: {node.address}, {'up' if node.pid() else 'down'}")
        return 0
    try:
        if reason := reason_to_skip():
            raise FleetError(reason)
        if given.action == "down":
            fleet.down(print)
            return 0
        if not 1 <= given.count <= 200:
            raise FleetError(f"{given.count} nodes: 1 to 200 fit on the bridge")
        fleet.up([f"node-{number}" for number in range(1, given.count + 1)], lambda line: print(line, flush=True))
    except RuntimeError as error:
        print(f"make fleet{'-down' if given.action == 'down' else ''}: {error}", file=sys.stderr)
        return 1
    print("next: .venv/bin/pyinfra inventory/fleet.py deploy.py -y")
    return 0


if __name__ == "__main__":
    sys.exit(main())
