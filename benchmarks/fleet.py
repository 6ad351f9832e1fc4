"""The drift check beside Ansible, mitogen and a bare ssh, on nodes of this machine, in turns.

usage, as root: .venv/bin/python benchmarks/fleet.py check|lab|scale|delay|install [--repeats N]
lab: the whole stack of `make lab` in .lab/node, over an sshd on loopback. check: one and ten container nodes. delay:
the same through relays of 0, 20 and 50 ms. scale: 1 to 200 addresses of one sshd on loopback. install: uv's sync of the
stack's lock beside pip's. All but the last deploy to what they measure, show that every contender calls it clean, sees
the same two hand edits and calls it clean again, write benchmarks/results/fleet-DATE.json, and remove what they set up.
Ansible comes into .lab/bench-venv.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import csv
import datetime
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from gpuwright.hostdata import Sources  # noqa: E402
from gpuwright.node import observe  # noqa: E402
from gpuwright.spec import NodeSpec, build_spec, mode_text  # noqa: E402
from tests import sshd  # noqa: E402
from tests.fleet.nodes import Fleet, call, within  # noqa: E402
from tests.make import catalogue, group_data  # noqa: E402

HERE = Path(__file__).resolve().parent
ANSIBLE = HERE / "ansible"
LAB = REPOSITORY / ".lab"
WORK = LAB / "bench"  # inventories, the rendered state, ssh's configurations
VENV = LAB / "bench-venv"
FLEET = Fleet(LAB / "bench-fleet", "gwbench0", "10.213.79")
TABLE = "gwbench"  # nftables: every address of loopback to the one sshd
PYTHON = Path(sys.executable)
WHOLE = "verify-whole.py"  # the script with all that is checked, and the one with what no module of Ansible says
REST = "verify-rest.py"


# What is checked


def recorded(site: Path) -> Iterator[tuple[str, str, int | None]]:
    """(path, sha256 in hex or "", size) of every row of every RECORD."""
    for path in sorted(site.glob("*.dist-info/RECORD")):
        with path.open(encoding="utf-8", newline="") as handle:
            for name, said, size in csv.reader(handle):
                digest = said.partition("sha256=")[2]
                binary = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4))
                yield name, binary.hex(), int(size) if size.isdigit() else None


def text_endings() -> tuple[str, ...]:
    """Which files observe.py hashes in every observation, from its own source."""
    tree = ast.parse((REPOSITORY / "files" / "node" / "observe.py").read_text(encoding="utf-8"))
    rows = [each.value for each in tree.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "TEXT"]
    return tuple(eval(compile(ast.Expression(rows[0]), "TEXT", "eval")))  # noqa: S307


@dataclass(frozen=True)
class State:
    """What a node should be, in the other contenders' terms. `seen` is where this machine sees the node's root."""

    spec: NodeSpec
    seen: Path

    def on_node(self, path: str) -> Path:
        return self.seen / path.lstrip("/")

    @property
    def site(self) -> str:
        return f"{self.spec.paths.venv}/lib/python{self.spec.data.python}/site-packages"

    def files(self) -> list[tuple[str, str, int]]:
        """(path, text, mode) of every text file of ours on the node."""
        spec = self.spec
        managed = spec.systemd_files if spec.data.supervisor == "auto" else (spec.supervisor_conf,)
        ours = [*spec.scripts, *managed, *spec.system_files]
        if spec.cuda_stub_source:
            ours.append(spec.cuda_stub_source)
        locks = [
            (spec.paths.lock_copy, spec.lock.text, 0o644),
            (spec.paths.tools_lock_copy, spec.tools_lock.text, 0o644),
        ]
        return [(each.path, each.text, each.mode) for each in ours] + locks

    def rest(self) -> dict[str, Any]:
        """What no module of Ansible's says: the installed files, the model, shared memory. The wheels' hashes are those
        of the RECORDs right after the deploy, the patched files' those of the series.
        """
        patched = {patch.file: patch.post_sha256 for patch in self.spec.patches}
        text, hashes, sizes = text_endings(), dict(patched), {}
        rows = list(recorded(self.on_node(self.site)))
        owners: dict[str, set[str]] = {}
        for name, digest, _ in rows:
            owners.setdefault(name, set()).add(digest)
        for name, digest, size in rows:
            if len(owners[name]) > 1:  # brought by two wheels with other contents each: either may lie there
                continue
            if digest and name.endswith(text) and name not in patched:
                hashes[name] = digest
            elif size is not None and name not in patched:
                sizes[name] = size
        tools = f"{self.spec.paths.tools}/lib/python{self.spec.data.python}/site-packages"
        for name, _, size in recorded(self.on_node(tools)):
            if size is not None:
                sizes[f"{tools}/{name}"] = size
        manifest = json.loads((self.on_node(self.spec.model_path) / "gpuwright-model.json").read_text())
        hashes |= {f"{self.spec.model_path}/{name}": digest for name, digest in manifest["files"].items()}
        shm = [int(each.value) for each in self.spec.system if each.id == "shared-memory"]
        return {"site": self.site, "hashes": hashes, "sizes": sizes, "modes": {}, "shm": (shm or [0])[0] << 30}

    def whole(self) -> dict[str, Any]:
        """All of it."""
        found, files = self.rest(), self.files()
        found["hashes"] |= {path: hashlib.sha256(text.encode()).hexdigest() for path, text, _ in files}
        folders = {path: mode_text(mode) for path, mode in self.spec.paths.folders.items()}
        found["modes"] = folders | {path: mode_text(mode) for path, _, mode in files}
        return found

    def render(self, folder: Path) -> None:
        """The playbook's variables and files, and both scripts."""
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "files").mkdir(parents=True)
        rows = []
        for number, (path, text, mode) in enumerate(self.files()):
            name = f"{number:02}-{Path(path).name}"
            (folder / "files" / name).write_text(text, encoding="utf-8")
            rows.append({"name": name, "path": path, "mode": mode_text(mode)})
        folders = [{"path": path, "mode": mode_text(mode)} for path, mode in self.spec.paths.folders.items()]
        variables = {"state": str(folder), "folders": folders, "files": rows}
        (folder / "vars.json").write_text(json.dumps(variables, indent=1) + "\n")
        script = (ANSIBLE / "verify_state.py").read_text(encoding="utf-8")
        for name, given in ((REST, self.rest()), (WHOLE, self.whole())):
            payload = base64.b64encode(zlib.compress(json.dumps(given).encode(), 9)).decode()
            (folder / name).write_text(f'{script}\n\nmain("{payload}")\n', encoding="utf-8")


# Whom it is checked on


@dataclass(frozen=True)
class Target:
    """A host: its name, and how it is reached."""

    name: str
    address: str
    port: int
    key: Path
    known_hosts: Path


@dataclass(frozen=True)
class Hosts:
    """Some hosts of one state, with pyinfra's inventory, Ansible's and ssh's configuration of them."""

    label: str
    targets: tuple[Target, ...]
    data: tuple[tuple[str, Any], ...] = ()
    group: str = "fleet"

    @property
    def folder(self) -> Path:
        return WORK / self.label

    @property
    def pyinfra(self) -> Path:
        return self.folder / "inventory" / "hosts.py"

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    def write(self) -> Hosts:
        self.pyinfra.parent.mkdir(parents=True, exist_ok=True)
        hosts, config = [], []
        for each in self.targets:
            reached = {
                "ssh_hostname": each.address, "ssh_port": each.port, "ssh_user": "root", "ssh_key": str(each.key),
                "ssh_allow_agent": False, "ssh_look_for_keys": False, "ssh_known_hosts_file": str(each.known_hosts),
            }  # fmt: skip
            hosts.append((each.name, reached | dict(self.data)))
            config.append(
                f"Host {each.name}\n HostName {each.address}\n Port {each.port}\n User root\n IdentityFile {each.key}\n"
                f" IdentitiesOnly yes\n UserKnownHostsFile {each.known_hosts}\n StrictHostKeyChecking yes\n"
                " BatchMode yes\n"
            )
        self.pyinfra.write_text(f"{self.group} = {hosts!r}\n")
        self.ssh_config.write_text("\n".join(config))
        (self.folder / "hosts.ini").write_text("[fleet]\n" + "".join(f"{each.name}\n" for each in self.targets))
        return self


# The contenders


@dataclass(frozen=True)
class Took:
    """One run: seconds of wall, CPU seconds of the process and all it waited for, its largest process's MiB."""

    wall: float
    cpu: float
    mib: float
    code: int
    output: str


def timed(command: Sequence[str | Path], env: dict[str, str] | None = None) -> Took:
    """Run a command to its end."""
    out = WORK / "output"
    # Python's compiled modules may lie where they do at a user's: check.py's else were compiled in every run.
    compiled = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
    }
    with out.open("w") as handle:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command], cwd=REPOSITORY, env=compiled | (env or {}), stdin=subprocess.DEVNULL,
            stdout=handle, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
    return Took(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, process.returncode, out.read_text())


@dataclass(frozen=True)
class Contender:
    """Somebody who checks hosts. `warm`: over ssh connections that are there already."""

    name: str
    command: Callable[[Hosts], Sequence[str | Path]]
    env: Callable[[Hosts], dict[str, str]] = lambda hosts: {}
    warm: bool = False

    def run(self, hosts: Hosts, *more: str) -> Took:
        """Check, once. Connections that it leaves behind are ended, unless they are meant to be there."""
        try:
            return timed([*self.command(hosts), *more], self.env(hosts))
        finally:
            if not self.warm:
                self.disconnect(hosts)

    def disconnect(self, hosts: Hosts) -> None:
        for each in sockets(hosts, self.name).glob("*"):
            subprocess.run(["ssh", "-o", f"ControlPath={each}", "-O", "exit", "x"], stderr=subprocess.DEVNULL)
            within(5, lambda each=each: not each.exists())  # type: ignore[misc]

    def verdict(self, hosts: Hosts, took: Took) -> str:
        """clean, drift or error, and of drift only where all hosts have one."""
        count = len(hosts.targets)
        if self.name.startswith(("ansible", "mitogen")):
            recap = re.findall(r"changed=(\d+) +unreachable=(\d+) +failed=(\d+)", took.output)
            if took.code != 0 or len(recap) != count or any(row[1:] != ("0", "0") for row in recap):
                return "error"
            changed = sum(row[0] != "0" for row in recap)
        elif self.name.startswith("ssh"):
            clean = len(re.findall(r"^\S+ clean$", took.output, re.M))
            changed = count - clean if took.code in (0, 123) else -1
        else:
            changed = len(re.findall(r"^\S+ +drift: ", took.output, re.M)) if took.code in (0, 2) else -1
        return {0: "clean", count: "drift"}.get(changed, "error")


def sockets(hosts: Hosts, name: str) -> Path:
    """The folder of a contender's ssh masters; a socket's path has at most 108 bytes."""
    folder = Path("/run/gpuwright-bench") / hosts.label / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def our_check(hosts: Hosts) -> list[str | Path]:
    return [PYTHON, "check.py", hosts.pyinfra]


def bare_ssh(hosts: Hosts, *, name: str = "", options: str = "") -> list[str | Path]:
    """One ssh a host, 40 at once as check.py on two cores: the script and all that it compares go in over stdin."""
    if name:
        options = f"-o ControlMaster=auto -o ControlPersist=300 -o ControlPath={sockets(hosts, name)}/%C"
    line = f"ssh -F {hosts.ssh_config} {options} {{}} python3 -IB - <{WORK}/state/{WHOLE}"
    names = " ".join(each.name for each in hosts.targets)
    return ["sh", "-c", f"printf '%s\\n' {names} | xargs -P {min(40, len(hosts.targets))} -I{{}} sh -c '{line}'"]


def playbook(hosts: Hosts, *more: str) -> list[str | Path]:
    return [
        VENV / "bin" / "ansible-playbook", "-i", hosts.folder / "hosts.ini", ANSIBLE / "site.yml", "--check",
        "--forks", str(len(hosts.targets)), "-e", f"@{WORK}/state/vars.json", *more,
    ]  # fmt: skip


WRITTEN = ("-e", f"verify={REST}")
AS_ONE = ("-e", f"verify={WHOLE}", "--tags", "verify")


def ansible_env(hosts: Hosts, *, name: str, mitogen: bool = False) -> dict[str, str]:
    found = {
        "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "LC_ALL": "C.UTF-8",
        "ANSIBLE_SSH_ARGS": f"-F {hosts.ssh_config} -o ControlMaster=auto -o ControlPersist=300s",
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(sockets(hosts, name)), "ANSIBLE_HOME": str(WORK / "ansible-home"),
    }  # fmt: skip
    if mitogen:
        (plugins,) = VENV.glob("lib/python3*/site-packages/ansible_mitogen/plugins/strategy")
        found |= {"ANSIBLE_STRATEGY": "mitogen_linear", "ANSIBLE_STRATEGY_PLUGINS": str(plugins)}
        found["ANSIBLE_SSH_ARGS"] = f"-F {hosts.ssh_config}"
    return found


def ansible(name: str, more: Sequence[str], *, mitogen: bool = False, warm: bool = False) -> Contender:
    env = functools.partial(ansible_env, name=name, mitogen=mitogen)
    return Contender(name, lambda hosts: playbook(hosts, *more), env, warm)


OURS, SSH = Contender("check.py", our_check), Contender("ssh", bare_ssh)
SSH_WARM = Contender("ssh-warm", functools.partial(bare_ssh, name="ssh-warm"), warm=True)
PLAYBOOK, MITOGEN = ansible("ansible", WRITTEN), ansible("mitogen", WRITTEN, mitogen=True)
PLAYBOOK_WARM = ansible("ansible-warm", WRITTEN, warm=True)
SCRIPT, MITOGEN_SCRIPT = ansible("ansible-script", AS_ONE), ansible("mitogen-script", AS_ONE, mitogen=True)
FOUR = (OURS, SSH, PLAYBOOK, MITOGEN)
ALL = (*FOUR, SSH_WARM, PLAYBOOK_WARM, SCRIPT, MITOGEN_SCRIPT)


def install_ansible() -> dict[str, str]:
    """Ansible and mitogen in a venv of their own: their versions."""
    wanted = (ANSIBLE / "requirements.txt").read_text()
    done = VENV / "requirements"
    if not done.exists() or done.read_text() != wanted:
        call("python3", "-m", "venv", "--clear", VENV)
        call(VENV / "bin" / "python", "-m", "pip", "install", "-q", "-r", ANSIBLE / "requirements.txt")
        done.write_text(wanted)
    return dict(line.split("==") for line in wanted.splitlines() if "==" in line)


# Measuring


def in_turns(contenders: Iterable[Contender], hosts: Hosts, repeats: int) -> dict[str, list[Took]]:
    """Each once, again and again; every run must find the hosts clean."""
    found: dict[str, list[Took]] = {each.name: [] for each in contenders}
    for each in contenders:
        if each.warm:
            each.run(hosts)  # which connects it
    for _ in range(repeats):
        for each in contenders:
            took = each.run(hosts)
            require(each, hosts, "clean", took)
            found[each.name].append(took)
    for each in contenders:
        each.disconnect(hosts)
    return found


def require(contender: Contender, hosts: Hosts, verdict: str, took: Took) -> None:
    """Raises SystemExit with the output where a contender says something else."""
    if (said := contender.verdict(hosts, took)) != verdict:
        sys.exit(f"{contender.name} on {hosts.label} says {said}, not {verdict}:\n{took.output[-3000:]}")


EDITS = """\
set -e
for f in {files}; do cp -p $f $f.bench-new; done
echo '# edited by hand' >>{script}.bench-new
printf X | dd of={installed}.bench-new bs=1 seek=10 conv=notrunc status=none
for f in {files}; do mv $f $f.bench-kept; mv $f.bench-new $f; done  # never written through: uv's cache is a hard link
"""
UNDO = "for f in {files}; do mv $f.bench-kept $f; done"


def prove(contenders: Iterable[Contender], hosts: Hosts, state: State, everywhere: Callable[[str], None]) -> None:
    """Every contender names both files that were edited by hand on every host, and says clean when they are put back.

    The installed file keeps its size, so that only its content tells.
    """
    script, installed = state.spec.scripts[-1].path, f"{state.site}/sglang/srt/layers/sampler.py"
    given = {"script": script, "installed": installed, "files": f"{script} {installed}"}
    require(OURS, hosts, "clean", OURS.run(hosts))
    everywhere(EDITS.format(**given))
    try:
        for each in contenders:
            took = each.run(hosts, *(["-v"] if each.name.startswith(("ansible", "mitogen")) else []))
            require(each, hosts, "drift", took)
            for path in (script, "sglang/srt/layers/sampler.py"):
                told = took.output.count(path)
                if told < len(hosts.targets):
                    sys.exit(f"{each.name} names {path} {told} times:\n{took.output[-3000:]}")
    finally:
        everywhere(UNDO.format(**given))
    for each in contenders:
        require(each, hosts, "clean", each.run(hosts))
        each.disconnect(hosts)
    print(
        f"{hosts.label}: {len(list(contenders))} contenders see two hand edits, and none when they are undone",
        flush=True,
    )


def summary(found: dict[str, list[Took]], hosts: Hosts) -> None:
    """Medians, spread and ratios to the first."""
    first = statistics.median(took.wall for took in next(iter(found.values())))
    print(f"\n{hosts.label}, {len(hosts.targets)} hosts: wall s, median (range), times check.py; CPU s; MiB")
    for name, runs in found.items():
        walls = [took.wall for took in runs]
        median, cpu = statistics.median(walls), statistics.median(took.cpu for took in runs)
        spread = f"({min(walls):.2f} to {max(walls):.2f})"
        print(
            f"  {name:<15} {median:7.2f} {spread:<16} {median / first:6.2f}x {cpu:7.2f} {max(t.mib for t in runs):5.0f}"
        )
    sys.stdout.flush()


def raw(found: dict[str, list[Took]]) -> dict[str, Any]:
    return {
        name: [{"wall_s": round(t.wall, 4), "cpu_s": round(t.cpu, 4), "mib": round(t.mib, 1)} for t in runs]
        for name, runs in found.items()
    }


def record(part: str, value: dict[str, Any]) -> None:
    """Put one part's figures into today's file of results."""
    path = HERE / "results" / f"fleet-{datetime.date.today().isoformat()}.json"
    path.parent.mkdir(exist_ok=True)
    there = json.loads(path.read_text()) if path.exists() else {}
    versions = dict(line.split("==") for line in (ANSIBLE / "requirements.txt").read_text().split())
    machine = {
        "cores": os.cpu_count(), "python": sys.version.split()[0], "kernel": os.uname().release,
        "load": [round(each, 2) for each in os.getloadavg()],
        "commit": call("git", "-C", REPOSITORY, "rev-parse", "HEAD"),
    }  # fmt: skip
    there[part] = there.get(part, {}) | {"machine": machine | versions | {"ssh": ssh_version()}} | value
    path.write_text(json.dumps(there, indent=1) + "\n")
    print(f"written: {path.relative_to(REPOSITORY)}", flush=True)


def ssh_version() -> str:
    return subprocess.run(["ssh", "-V"], capture_output=True, text=True).stderr.split(",")[0].strip()


# Container nodes


@contextlib.contextmanager
def nodes(count: int) -> Iterator[tuple[State, list[Target]]]:
    """Container nodes, deployed to and with every ssh session in their journal."""
    WORK.mkdir(parents=True, exist_ok=True)
    if reason := FLEET.refusal():
        sys.exit(reason)
    try:
        up = FLEET.up([f"bench-{number}" for number in range(1, count + 1)], lambda line: print(line, flush=True))
        verbose = "echo 'LogLevel VERBOSE' >/etc/ssh/sshd_config.d/bench.conf; systemctl reload ssh"
        for node in up:
            node.run(verbose)
        targets = [Target(node.name, node.address, 22, FLEET.key, FLEET.known_hosts) for node in up]
        hosts = Hosts("deploy", tuple(targets)).write()
        deploy(hosts)
        spec = build_spec(up[0].name, group_data("all", "fleet"), catalogue(), Sources((), []))
        state = State(spec, up[0].tree)
        state.render(WORK / "state")
        yield state, targets
    finally:
        FLEET.down()
        shutil.rmtree("/run/gpuwright-bench", ignore_errors=True)


def deploy(hosts: Hosts) -> None:
    command = [PYTHON.with_name("pyinfra"), hosts.pyinfra, "deploy.py", "-y", "--data", "canary_gate=off"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"the deploy failed:\n{done.stderr[-3000:]}")


def on_nodes(hosts: Hosts) -> Callable[[str], None]:
    """Run a line on each of these hosts' nodes."""
    chosen = [node for node in FLEET.nodes if node.name in {each.name for each in hosts.targets}]
    return lambda line: [node.run(line) for node in chosen] and None


def sessions(contender: Contender, hosts: Hosts) -> dict[str, float]:
    """SSH connections and sessions (commands and subsystems) per host of one check, by the nodes' own sshd."""

    def seen() -> tuple[int, int]:
        logs = [node.run("journalctl --sync; journalctl -u ssh -o cat") for node in FLEET.nodes if node.name in names]
        text = "\n".join(logs)
        return text.count("Accepted publickey"), text.count("Starting session: ")

    names = {each.name for each in hosts.targets}
    idle, before = seen(), seen()
    contender.run(hosts)
    after = seen()  # reading the log is seen in it, too: as often as between the first two readings
    count = len(names)
    connections, started = ((after[i] - before[i] - (before[i] - idle[i])) / count for i in (0, 1))
    return {"connections": connections, "sessions": started}


def check(repeats: int, counts: Sequence[int]) -> None:
    """One and ten nodes."""
    install_ansible()
    with nodes(max(counts)) as (state, targets):
        found: dict[str, Any] = {"payload_bytes": (WORK / "state" / WHOLE).stat().st_size}
        found["hashed_files"] = len(state.whole()["hashes"])
        for count in counts:
            hosts = Hosts(f"check-{count}", tuple(targets[:count])).write()
            contenders = ALL if count == 1 else (*FOUR, SCRIPT, MITOGEN_SCRIPT)
            prove(contenders, hosts, state, on_nodes(hosts))
            runs = in_turns(contenders, hosts, repeats)
            summary(runs, hosts)
            found[str(count)] = raw(runs)
            if count == 1:
                for each in ALL:
                    each.run(hosts)  # connects who is to be warm
                found["ssh_per_host"] = {each.name: sessions(each, hosts) for each in ALL}
                for each in ALL:
                    each.disconnect(hosts)
                print(json.dumps(found["ssh_per_host"], indent=1), flush=True)
        record("check", found)


# A round-trip time


@contextlib.contextmanager
def late(targets: Iterable[Target], rtt_ms: int) -> Iterator[list[Target]]:
    """The same hosts through a relay, by other names."""
    targets = list(targets)
    ports = free_ports(len(targets) + 1)
    echo = subprocess.Popen([PYTHON, "-c", ECHO, str(ports[-1] + 1)])
    pairs = [f"{port}={each.address}:{each.port}" for port, each in zip(ports, targets, strict=False)]
    pairs.append(f"{ports[-1]}=127.0.0.1:{ports[-1] + 1}")
    relay = subprocess.Popen([PYTHON, HERE / "relay.py", str(rtt_ms), *pairs], stdout=subprocess.PIPE, text=True)
    try:
        assert relay.stdout and relay.stdout.readline() == "ready\n"
        measured = round_trip(ports[-1])
        print(f"relay of {rtt_ms} ms: an echo takes {measured * 1000:.1f} ms", flush=True)
        if not rtt_ms <= measured * 1000 <= rtt_ms * 1.05 + 2:
            sys.exit("the relay is not what it should be")
        known = WORK / f"known_hosts-{rtt_ms}"
        keys = {node.address: node.host_key.read_text() for node in FLEET.nodes}
        rows = [f"[127.0.0.1]:{p} {keys[t.address]}" for p, t in zip(ports, targets, strict=False)]
        known.write_text("".join(rows))
        yield [replace(t, address="127.0.0.1", port=p, known_hosts=known) for p, t in zip(ports, targets, strict=False)]
    finally:
        for process in (relay, echo):
            process.terminate()
            process.wait()


ECHO = """\
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    peer = server.accept()[0]
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := peer.recv(100):
        peer.sendall(data)
"""


def round_trip(port: int) -> float:
    """Seconds, median of 20, that a byte needs to an echo and back."""
    within(5, lambda: subprocess.run(["sh", "-c", f"ss -ltn | grep -q :{port + 1}"]).returncode == 0)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(21):
            begin = time.perf_counter()
            peer.sendall(b"x")
            peer.recv(1)
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])  # the first one waits for the handshake


def free_ports(count: int) -> list[int]:
    """Ports in a row that nobody listens on, and one more behind them."""
    for first in range(23000, 30000, 100):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count + 1):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return list(range(first, first + count))
    sys.exit("no free ports")


def delay(repeats: int, counts: Sequence[int]) -> None:
    """One and ten nodes, 0, 20 and 50 ms away."""
    install_ansible()
    with nodes(max(counts)) as (state, targets):
        found: dict[str, Any] = {}
        for rtt in (0, 20, 50):
            with late(targets, rtt) as away:
                for count in counts:
                    hosts = Hosts(f"delay-{rtt}-{count}", tuple(away[:count])).write()
                    if rtt == 0:
                        prove(FOUR, hosts, state, on_nodes(hosts))
                    runs = in_turns(FOUR, hosts, repeats)
                    summary(runs, hosts)
                    found[f"{rtt} ms, {count}"] = raw(runs)
        record("delay", found)


# The whole stack


def lab(repeats: int, counts: Sequence[int]) -> None:
    """The lab's 10 GB of installed files, 45,000 of them hashed, on one host. Its server is ended by this."""
    install_ansible()
    root = LAB / "node"
    if not root.exists():
        sys.exit("there is no .lab/node: run `make lab` first")
    data = {"root": str(root), "serve": False}
    with many(WORK / "lab-sshd", ["127.0.0.2"]) as server:
        hosts = Hosts("lab", targets_of(server, ["127.0.0.2"]), tuple(data.items()), "lab").write()
        deploy(hosts)
        spec = build_spec("127.0.0.2", group_data("all", "lab") | data, catalogue(), Sources((), []))
        state = State(spec, Path("/"))
        state.render(WORK / "state")
        prove(FOUR, hosts, state, lambda line: call("sh", "-c", line) and None)
        runs = in_turns(FOUR, hosts, repeats)
        summary(runs, hosts)
        record("lab", {"hashed_files": len(state.whole()["hashes"]), "1": raw(runs)})


# Many addresses of one sshd

REDIRECT = """\
table ip {table} {{
  chain out {{
    type nat hook output priority -100
    ip daddr 127.0.0.0/8 tcp dport {port} dnat to 127.0.0.1
  }}
}}
"""


def addresses(count: int) -> list[str]:
    return [f"127.0.{1 + number // 250}.{1 + number % 250}" for number in range(count)]


@contextlib.contextmanager
def many(folder: Path, names: list[str], *options: str) -> Iterator[sshd.Sshd]:
    """One sshd that answers on every of these addresses of loopback."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    table = f"{TABLE}_{folder.name}"
    with sshd.running(folder, ["127.0.0.1", *names], "MaxStartups 1000", *options) as server:
        call("nft", "-f", "-", given=REDIRECT.format(table=table, port=server.port))
        try:
            yield server
        finally:
            call("nft", "delete", "table", "ip", table)


def children(pid: int) -> str:
    return subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout


def children_cpu(pid: int) -> float:
    """CPU seconds of the ended children of a process, and of theirs."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def scale(repeats: int, counts: Sequence[int]) -> None:
    """1 to 200 addresses: by observing, and by an answer that costs nothing, which leaves what the control side takes.

    One deploy's root on this machine; none of its settings is touched, and nothing of it is served.
    """
    install_ansible()
    names, root = addresses(max(counts)), WORK / "scale-root"
    data = {"root": str(root), "port": 31997, "system": {}, "supervisor": "supervisor"}
    shutil.rmtree(root, ignore_errors=True)
    with many(WORK / "scale-sshd", names) as server, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        spec = build_spec(names[0], group_data("all", "fleet") | data, catalogue(), Sources((), []))
        deploy(Hosts("scale-deploy", targets_of(server, names[:1]), tuple(data.items())).write())
        state = State(spec, Path("/"))
        state.render(WORK / "state")
        seen = observe(spec, remember=False)
        answer = WORK / "observation.json"
        answer.write_text(call("sh", "-c", seen.line, given=seen.stdin))
        replay = f"ForceCommand cat >/dev/null; cat {answer}"
        free = stack.enter_context(many(WORK / "replay-sshd", names, replay))
        found: dict[str, Any] = {}
        for count in counts:
            hosts = Hosts(f"scale-{count}", targets_of(server, names[:count]), tuple(data.items())).write()
            freed = Hosts(f"replay-{count}", targets_of(free, names[:count]), tuple(data.items())).write()
            if count == 1:
                prove((OURS, SSH), hosts, state, lambda line: call("sh", "-c", line) and None)
            rows: dict[str, list[dict[str, float]]] = {}
            for number in range(1 + (repeats if count < 200 else max(1, repeats // 2))):
                for label, contender, target, node in (
                    ("check.py", OURS, hosts, server), ("ssh", SSH, hosts, server),
                    ("check.py, free answer", OURS, freed, free),
                ):  # fmt: skip
                    before = children_cpu(node.pid)
                    took = contender.run(target)
                    require(contender, target, "clean", took)
                    within(5, lambda pid=node.pid: not children(pid))  # type: ignore[misc]
                    row = {
                        "wall_s": took.wall, "control_cpu_s": took.cpu, "control_mib": took.mib,
                        "node_cpu_s": children_cpu(node.pid) - before,
                    }  # fmt: skip
                    if number:
                        rows.setdefault(label, []).append({key: round(value, 3) for key, value in row.items()})
            found[str(count)] = rows
            for label, runs in rows.items():
                row = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
                told = ", ".join(f"{key} {value:.2f}" for key, value in row.items())
                print(f"{count:>4} {label:<22} {told}", flush=True)
        record("scale", found)


def targets_of(server: sshd.Sshd, names: Iterable[str]) -> tuple[Target, ...]:
    key, known = server.folder / "user", server.known_hosts
    return tuple(Target(name, name, server.port, key, known) for name in names)


def installers(venv: Path, caches: Path, lock: Path) -> dict[str, tuple[list[str | Path], dict[str, str]]]:
    """How the product installs a lock, and how pip does: with its own compiling of every module, and without."""
    uv = [
        PYTHON.with_name("uv"), "pip", "sync", "--python", venv / "bin" / "python", "--require-hashes", "--only-binary",
        ":all:", lock,
    ]  # fmt: skip
    pip = [
        venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--only-binary",
        ":all:", "-r", lock,
    ]  # fmt: skip
    ours = {
        "UV_CACHE_DIR": f"{caches}/uv",
        "UV_SYSTEM_CERTS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
    }
    theirs = {"PIP_CACHE_DIR": f"{caches}/pip"}
    return {"uv": (uv, ours), "pip": (pip, theirs), "pip-no-compile": ([*pip, "--no-compile"], theirs)}


def install(repeats: int, counts: Sequence[int]) -> None:
    """The stack's lock, by uv as a deploy does it and by pip: once with empty caches, then with what that filled."""
    WORK.mkdir(parents=True, exist_ok=True)
    lock = REPOSITORY / "files" / "locks" / "sglang-0.5.9-cu128-py311.txt"
    venv, caches = WORK / "install-venv", WORK / "install-caches"
    shutil.rmtree(caches, ignore_errors=True)
    ways = installers(venv, caches, lock)
    wanted = len(re.findall(r"^\S+==", lock.read_text(), re.M))
    found: dict[str, Any] = {"distributions": wanted, "cold": {}, "warm": {}}
    try:
        turns = [("cold", name) for name in ("uv", "pip")]
        turns += [("warm", name) for _ in range(repeats) for name in ways]
        for kind, name in turns:
            shutil.rmtree(venv, ignore_errors=True)
            call("python3.11", "-m", "venv", venv)
            pip = call(venv / "bin" / "python", "-m", "pip", "install", "-q", "--upgrade", "pip") and ""
            command, env = ways[name]
            took = timed(command, env)
            there = len(list((venv / "lib" / "python3.11" / "site-packages").glob("*.dist-info")))
            if took.code or there < wanted:
                sys.exit(f"{name} {kind} has installed {there} of {wanted}{pip}:\n{took.output[-2000:]}")
            found[kind].setdefault(name, []).append({"wall_s": round(took.wall, 1), "cpu_s": round(took.cpu, 1)})
            print(f"{kind} {name}: {took.wall:.1f} s, {took.cpu:.1f} of CPU", flush=True)
        record("install", found)
    finally:
        shutil.rmtree(venv, ignore_errors=True)
        shutil.rmtree(caches, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"check": check, "lab": lab, "scale": scale, "delay": delay, "install": install}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each contender, in turns")
    parser.add_argument("--hosts", type=int, nargs="+", metavar="N", help="how many (1 10; of scale 1 10 50 200)")
    options = parser.parse_args()
    counts = options.hosts or ([1, 10, 50, 200] if options.part == "scale" else [1, 10])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("ended"))  # what was set up is removed on the way out
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two at once the second would take the first one's nodes away
        parts[options.part](options.repeats, counts)


if __name__ == "__main__":
    main()
