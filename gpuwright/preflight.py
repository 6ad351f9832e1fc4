"""What the doctor looks at, made of a spec and a state; and how one host is stopped."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from gpuwright.checks import NODE, WANT, Examination, Facts, Finding, examine
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState

# With the stack installed, what is left to write is a model's caches, logs and results.
DISK_WHEN_INSTALLED_GIB = 1.0
SOCKETS_BESIDES = 1024  # of the benchmark and the server, beside one for each concurrent request


def examination(
    spec: NodeSpec, state: NodeState, *, installed: bool, manager: str, model_problem: str | None
) -> Examination:
    """Every check of a host. `installed`: the stack is already there; `manager`: who is to keep the server;
    `model_problem`: what keeps its model folder from being served.
    """
    return examine(
        spec.checks,
        facts(spec, state, installed=installed, manager=manager, model_problem=model_problem),
        spec.data.ignored_checks,
    )


def facts(
    spec: NodeSpec, state: NodeState, *, installed: bool, manager: str, model_problem: str | None = None
) -> Facts:
    """What the checks' expressions may name."""
    data, server = spec.data, state.server
    orphans = [orphan.pid for orphan in server.orphans]
    ours = {*server.processes, *server.family, *orphans, *([server.pid] if server.pid is not None else [])}
    port = state.port
    power = next((each.value for each in spec.system if each.kind == "power_limit"), None)
    node = {
        "python": state.python,
        "uid": state.uid,
        "machine": state.machine,
        "ensurepip": state.ensurepip,
        "tools": state.tools is not None,
        "installed": installed,
        "commands": state.commands,
        "interpreter": state.interpreter and state.interpreter.path,
        "root_writable": state.root_writable,
        "systemd": state.systemd,
        "port": port and port.model_dump(),
        "port_is_ours": port is not None and port.pid is not None and port.pid in ours,
        "unit_owners": [state.unit_owner, state.logrotate_owner],
        "model_problem": model_problem,
        "serving": bool(ours),
    }
    free = min(DISK_WHEN_INSTALLED_GIB, data.min_free_disk_gib) if installed else data.min_free_disk_gib
    want: dict[str, Any] = {
        "device": data.device,
        "gpu": data.gpu and data.gpu.model_dump(),
        "gpus": spec.gpus_here,
        "root": data.root,
        "python": data.python,
        "interpreter": spec.interpreter or f"python{data.python} on PATH",
        "python_download": data.python_download,
        "socket": spec.paths.socket,
        "manager": manager,
        "unit": data.unit,
        "port": data.port,
        "nodes": spec.ladder.nodes,
        "dist_port": data.cluster.port if data.cluster and not spec.rank else None,
        "min_memory_gib": data.min_memory_gib,
        "free_disk_gib": free,
        "cuda": spec.stack.toolchain.cuda,
        "cuda_home": data.cuda_home,
        "driver": spec.stack.toolchain.driver_for(data.gpu.compute_capability) if data.gpu else None,
        "gcc": spec.stack.toolchain.gcc,
        "glibc": spec.stack.toolchain.glibc,
        "model": data.model.kind,
        "model_path": spec.model_path,
        "kernels": spec.stack.toolchain.kernels,
        "env": spec.environment(spec.tier),
        "open_files": max(spec.profile.levels) + SOCKETS_BESIDES,
        "power_limit_w": int(power) if power else None,
        "system": [each.id for each in spec.system],
        "settings_sudo": data.settings_sudo,
    }
    assert set(node) == set(NODE) and set(want) == set(WANT)
    xids = {"fatal_xids": spec.checks.fatal_xids, "benign_xids": spec.checks.benign_xids}
    hidden = {**xids, "ours": ours}  # for what is derived
    return Facts(spec.checks, state.readings, state.problems, node, want | hidden)


def before_install(spec: NodeSpec, found: Examination) -> list[Finding]:
    """What stops a deploy before anything is changed: what a declared setting of the host will mend does not."""
    return without(found, {each.id for each in spec.system} if "system" in spec.data.stages else set())


def without(found: Examination, pending: Iterable[str]) -> list[Finding]:
    """What stops a deploy, but for what these settings of the host are still to mend."""
    return [each for each in found.stopping if each.check.mended_by not in set(pending)]


def shell_failure(text: str) -> str:
    """A shell command that prints `text` and fails, which is how one host is stopped without stopping the others."""
    return f"printf '%s\\n' {shlex.quote(text)} >&2; exit 1"
