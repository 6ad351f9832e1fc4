"""What must hold of a host before anything on it is changed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState

GIB = 1024**3
# With the stack installed, what is left to write is a model's caches, logs and results.
DISK_WHEN_INSTALLED_GIB = 1.0
SUN_PATH_MAX = 100  # of the kernel's 107; supervisord first binds a name that is longer by its process id


@dataclass(frozen=True)
class Problem:
    """Something that stops a host: what was expected and found, and what to do."""

    what: str
    expected: str
    found: str
    remedy: str


def problems(spec: NodeSpec, state: NodeState, *, installed: bool, manager: str) -> list[Problem]:
    """Every problem of a host. `installed`: the stack is already there, so disk for it is not asked again; `manager`:
    who is to keep the server.
    """
    data, found = spec.data, []

    def need(holds: bool, what: str, expected: str, seen: str, remedy: str) -> None:
        if not holds:
            found.append(Problem(what, expected, seen, remedy))

    version = tuple(int(part) for part in state.python.split(".")[:2])
    need(version >= (3, 9), "python3", "3.9 or later", state.python, "install a newer python3")
    need(state.machine == "x86_64", "machine", "x86_64", state.machine, "the stack's wheels are built for x86-64")
    need(
        state.ensurepip or state.tools is not None, "python3's venv", "ensurepip can be imported", "it cannot",
        "install python3-venv",
    )  # fmt: skip
    remedies = {
        "cc": "install a C compiler (gcc)",
        "c++": "install a C++ compiler (g++)",
        "openssl": "install openssl: torch's inductor hashes its headers with it",
        "flock": "install util-linux",
        "bash": "install bash",
    }
    for command, remedy in remedies.items():
        need(state.commands.get(command) is not None, command, "on PATH", "not found", remedy)
    need(
        state.interpreter is not None or data.python_download,
        f"Python {data.python} for the venv", data.interpreter or f"python{data.python} on PATH", "not found",
        f"install python{data.python}, or set `interpreter`, `python` or `python_download = True` in group_data",
    )  # fmt: skip
    need(
        state.root_writable, "root", f"{data.root} can be made by this user", "permission denied",
        "set `root` in group_data to a folder of this user, or run with _sudo",
    )  # fmt: skip
    need(
        len(spec.paths.socket) <= SUN_PATH_MAX, "root",
        f"a path that leaves {spec.paths.socket} within {SUN_PATH_MAX} characters", str(len(spec.paths.socket)),
        "set a shorter `root`: a unix socket's path is limited by the kernel",
    )  # fmt: skip
    disk = min(DISK_WHEN_INSTALLED_GIB, data.min_free_disk_gib) if installed else data.min_free_disk_gib
    need(
        state.disk_free_bytes >= disk * GIB, "free disk", f"{disk:g} GiB at {data.root}",
        f"{state.disk_free_bytes / GIB:.1f} GiB", "free some, or set `root` to a larger disk",
    )  # fmt: skip
    need(
        state.memory_bytes >= data.min_memory_gib * GIB, "memory", f"{data.min_memory_gib:g} GiB",
        f"{state.memory_bytes / GIB:.1f} GiB", "use a larger host, or set `min_memory_gib` if you know better",
    )  # fmt: skip
    if manager == "systemd":
        need(state.systemd, "systemd", "PID 1", "another", "set `supervisor` in group_data to auto or supervisor")
        need(state.uid == 0, "user", "root, to write a systemd unit", f"uid {state.uid}", "run with _sudo")
        need(
            state.commands.get("logrotate") is not None, "logrotate", "on PATH, for the server's logs", "not found",
            "install logrotate, or set `supervisor` in group_data to supervisor",
        )  # fmt: skip
        owners = [owner for owner in (state.unit_owner, state.logrotate_owner) if owner not in (None, data.root)]
        whose = f"of gpuwright's root {owners[0]}" if owners and owners[0] else "not of gpuwright"
        need(
            not owners, f"unit {data.unit}", f"none, or of {data.root}", f"one that is {whose}",
            "set another `unit` in group_data",
        )  # fmt: skip
    if state.port is not None:
        orphans = [orphan.pid for orphan in state.server.orphans]
        ours = state.port.pid is not None and state.port.pid in (*state.server.processes, *orphans, state.server.pid)
        need(
            ours, f"port {data.port}", "free, or held by our own server",
            f"held by pid {state.port.pid} ({state.port.command})", "end that process, or set another `port`",
        )  # fmt: skip
    return found


def report(found: list[Problem]) -> str:
    """The problems as text, one remedy under each."""
    return "\n".join(
        f"{problem.what}: expected {problem.expected}; found {problem.found}\n    -> {problem.remedy}"
        for problem in found
    )


def shell_failure(text: str) -> str:
    """A shell command that prints `text` and fails, which is how one host is stopped without stopping the others."""
    return f"printf '%s\\n' {shlex.quote(text)} >&2; exit 1"
