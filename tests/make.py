"""Specs and states for tests: a lab node, a GPU node, and the state in which nothing is left to do."""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import cache
from typing import Any

from gpuwright import REPOSITORY
from gpuwright.catalogue import Catalogue, load_catalogue
from gpuwright.hostdata import Sources
from gpuwright.node_module import node_module
from gpuwright.plan import config_stamp, runs_on
from gpuwright.record import Record, make_record
from gpuwright.smoke import Level, levels
from gpuwright.spec import Member, NodeSpec, build_spec
from gpuwright.state import (
    NodeState,
    Reading,
    SeenFile,
    SeenFolder,
    SeenInstalled,
    SeenInterpreter,
    SeenModel,
    SeenModelFile,
    SeenResult,
    SeenServer,
    SeenTools,
    SeenVenv,
)
from tests.machines import blackwell, readings

ROOT = "/opt/gpuwright"
GIB = 1024**3


@cache
def catalogue() -> Catalogue:
    return load_catalogue()


def group_data(*names: str) -> dict[str, Any]:
    """The merged data of groups, as pyinfra would merge it."""
    merged: dict[str, Any] = {}
    for name in names:
        values = runpy.run_path(str(REPOSITORY / "group_data" / f"{name}.py"))
        imported = {"os", "sys", "Path", "make_transport"}
        merged |= {k: v for k, v in values.items() if not k.startswith(("_", "ssh_")) and k not in imported}
    return merged


def lab_spec(**data: Any) -> NodeSpec:
    fixed = {"root": ROOT, "python": "3.12", "interpreter": None}
    return build_spec("@local", group_data("all", "lab") | fixed | data, catalogue(), Sources((), []))


def gpu_spec(members: tuple[Member, ...] = (), **data: Any) -> NodeSpec:
    return build_spec("gpu-01", group_data("all", "gpu") | data, catalogue(), Sources((), []), members)


STOPPED = SeenServer(
    manager=None,
    unit=None,
    status=None,
    pid=None,
    restarts=None,
    record=None,
    processes=[],
    family=[],
    orphans=[],
    units=[],
    enabled=None,
    dropins=[],
    stale=False,
    differs=[],
    health=None,
)


def seen_file(size: int, sha256: str | None = None) -> SeenModelFile:
    return SeenModelFile(size=size, mtime_ns=1, inode=1, sha256=sha256)


COVERING = {name: [80, 90, 120] for name in catalogue().stacks["sglang-0.5.9-cu128"].toolchain.kernels}


def seen(state: NodeState, reading: str, value: Any = None, problem: str | None = None) -> NodeState:
    """The state with another value of one reading, or with the reason why it could not be made."""
    changed = {reading: Reading(value=None if problem else value, problem=problem, seconds=0.1)}
    return state.model_copy(update={"machine_readings": state.machine_readings | changed})


def empty_state(spec: NodeSpec, **changed: Any) -> NodeState:
    """A fresh host that has what the stack needs and nothing of ours."""
    fields: dict[str, Any] = {
        "version": 6,
        "python": "3.12.3",
        "uid": 0,
        "machine": "x86_64",
        "machine_readings": readings(blackwell(), spec),
        "system_manifest": {"settings": {}, "files": []},
        "system_owners": {},
        "model_manifest": None,
        "root_writable": True,
        "unreadable": [],
        "ensurepip": True,
        "commands": {name: f"/usr/bin/{name}" for name in ("bash", "c++", "cc", "flock", "logrotate", "openssl", "sh")},
        "interpreter": SeenInterpreter(path="/usr/bin/python3.12", version="3.12.3"),
        "folders": dict.fromkeys(spec.paths.folders),
        "files": {},
        "launch_scripts": [],
        "tools": None,
        "venv": None,
        "adopted": None,
        "adopted_before": None,
        "stamps": {"runtime": None, "patches": None, "config": None},
        "model": None,
        "port": None,
        "server": STOPPED,
        "systemd": False,
        "unit_owner": None,
        "logrotate_owner": None,
        "caches": [],
        "state": None,
        "deployed": None,
        "results": [],
        "patched": {},
        "manifest": {},
        "originals": [],
    }
    return NodeState(**(fields | changed))


def settled_state(spec: NodeSpec, **changed: Any) -> NodeState:
    """The state in which a deploy has nothing to do."""
    files = [
        *spec.scripts,
        *spec.system_files,
        spec.supervisor_conf,
        *([spec.cuda_stub_source] if spec.cuda_stub_source else []),
    ]
    lies = {file.path: SeenFile(sha256=file.sha256, size=len(file.text), mode=file.mode) for file in files}
    lies[spec.paths.lock_copy] = SeenFile(sha256=spec.lock.sha256, size=1, mode=0o644)
    lies[spec.paths.cuda_stub] = SeenFile(sha256="0" * 64, size=1, mode=0o755)
    final = {patch.file: SeenFile(sha256=patch.post_sha256, size=1, mode=0o644) for patch in spec.patches}
    if spec.tiny_model:
        names = {"model.safetensors": "a" * 64}
        model = SeenModel(
            files={name: seen_file(1, sha256) for name, sha256 in names.items()},
            cut={},
            unfinished=[],
            shards=None,
            model_type="gpt2",
            config_sha256="c" * 64,
            manifest={"model": spec.tiny_model, "files": names},
            tensors={},
        )
    else:
        shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        model = SeenModel(
            files={name: seen_file(5) for name in shards},
            cut={},
            unfinished=[],
            shards=shards,
            model_type="glm_moe_dsa",
            config_sha256="c" * 64,
            manifest=None,
            tensors={spec.tier.needs.model_tensor: True} if spec.tier.needs.model_tensor else {},
        )
    settings = {e.id: {"kind": e.kind, "target": e.target, "before": None, "value": e.value} for e in spec.system}
    state = empty_state(
        spec,
        system_manifest={"settings": settings, "files": [file.path for file in spec.system_files]},
        folders={path: SeenFolder(mode=mode, uid=0) for path, mode in spec.paths.folders.items()},
        files=lies,
        launch_scripts=[spec.script_name(tier) for tier in spec.ladder.tiers],
        tools=SeenTools(distributions=dict(spec.tools_lock.versions), damaged={}),
        venv=SeenVenv(
            python=f"{spec.data.python}.3",
            site=f"{spec.paths.venv}/lib/python{spec.data.python}/site-packages",
            distributions=dict(spec.lock.versions),
            damaged={},
            installed=SeenInstalled(content="c" * 64, times="t" * 64, newest="torch/__init__.py"),
        ),
        stamps={
            "runtime": {"value": spec.runtime_stamp, "at": "then"},
            "patches": {"value": spec.patches_stamp, "at": "then"},
        },
        model=model,
        caches=[spec.runtime_digest[:16]],
        state={"spec_digest": spec.spec_digest},
        deployed=spec.declared("systemd" if spec.data.supervisor == "systemd" else "supervisor"),
        results=[
            SeenResult(
                file="r.json", spec_digest=spec.spec_digest, benchmark_digest=spec.benchmark_digest, verdict="accepted"
            )
        ],
        patched=final,
        manifest={
            p.file: {"pristine": p.pre_sha256, "post": p.post_sha256, "distribution": p.distribution}
            for p in spec.patches
        },
        originals=[patch.pre_sha256 for patch in spec.patches],
    )
    if spec.data.device == "cuda":
        state = seen(state, "kernels", COVERING)
    read = {"config": {"value": config_stamp(spec, state), "at": "then"}}
    state = state.model_copy(update={"stamps": state.stamps | read})
    record = {"pid": 100, "pgid": 100, "runs_on": runs_on(spec, state), "ready_at": "then"}
    server = STOPPED.model_copy(
        update={"manager": "supervisor", "status": "RUNNING", "pid": 100, "record": record, "processes": [100, 101],
                "health": 200}
    )  # fmt: skip
    return state.model_copy(update={"server": server} | changed)


RAW_FACTS = node_module("raw_facts").raw_facts((REPOSITORY / "tests" / "unit" / "raw" / "honest-c4.jsonl").read_text())
PROFILE = {"levels": [2, 8], "input_len": 64, "output_len": 32, "prompts_per_concurrency": 8, "min_duration_s": 0.1}


def bench_spec(host: str = "@local", **data: Any) -> NodeSpec:
    """A lab node with a small benchmark of two levels."""
    return replace(lab_spec(**{"profiles": {"smoke": PROFILE}, **data}), host=host)


def repeat(level: Level, number: int, tok_s: float, **facts: Any) -> dict[str, Any]:
    """A repeat as files/node/bench.py reports it: the recorded honest one, at another level and throughput."""
    asked = {"concurrency": level.concurrency, "input_len": level.input_len, "output_len": level.output_len}
    honest = {
        **RAW_FACTS,
        **{f"told_{name}": value for name, value in asked.items()},
        "requests": level.prompts,
        "completed": level.prompts,
        "mean_concurrency": 0.99 * level.concurrency,
        "output_lens": [level.output_len] * 2,
        "input_lens": [level.input_len] * 2,
        "figures": {**RAW_FACTS["figures"], "output_tok_s": tok_s},
    }
    return {
        "number": number, "seed": 1 + number, "discarded": number == 0, "exit_code": 0, "timed_out": False,
        "flushed": True, "client_cpu_s": 0.1, "seconds": 2.0, "raw": f"/r/c{level.concurrency}-r{number}.jsonl",
        "sha256": "0" * 64, "facts": honest | facts,
    }  # fmt: skip


def summary(spec: NodeSpec, tok_s: dict[int, list[float]] | None = None, **changed: Any) -> dict[str, Any]:
    """What files/node/bench.py leaves of an honest run; `tok_s`: the kept repeats' throughput by concurrency."""
    tok_s = tok_s or {2: [200.0, 202.0, 201.0], 8: [800.0, 810.0, 790.0]}
    prompts = spec.acceptance.probe.prompts
    answers = [{"text": f"answer {n}", "tokens": list(range(n, n + 32))} for n in range(len(prompts))]
    after = {"answers": answers, "other_ways": {"completions": {"text": "answer 0"}}}
    before = after | {"again": answers, "asked_otherwise": 0}
    return {
        "started_at": "2026-11-30T10:00:00Z", "seconds": 30.0, "load_seconds": 25.0,
        "levels": [
            {
                "concurrency": level.concurrency,
                "repeats": [repeat(level, n, one) for n, one in enumerate([1.0, *tok_s[level.concurrency]])],
            }
            for level in levels(spec.profile)
        ],
        "before": before, "after": after, "ended_early": None, "processes_before": [1, 2],
        "processes_after": [1, 2], "xids": [],
        "unobserved": [], "gpus": [], "driver": None, "model": {"path": "/m", "digest": "a" * 64},
        "max_total_num_tokens": 20000, "max_running_requests": 4096, "server_version": "0.5.9",
        "host": {"name": "lab", "cpu": "EPYC", "cpus": 2, "memory_gib": 24, "kernel": "6.1"},
    } | changed  # fmt: skip


def record(spec: NodeSpec, tok_s: dict[int, list[float]] | None = None, run: str = "run-1", **changed: Any) -> Record:
    """The record of an honest run."""
    return make_record(spec, summary(spec, tok_s, **changed), run, "abc", spec.lock.versions)
