"""Every operation: the exact commands where something is to do, and none where nothing is."""

from __future__ import annotations

import ast
import json
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from pyinfra.api.command import FunctionCommand

from gpuwright import REPOSITORY, node
from gpuwright import plan as p
from gpuwright.hostdata import Sources
from gpuwright.node import NodeCommand
from gpuwright.plan import runs_on
from gpuwright.record import Record, dump, folder_name
from gpuwright.spec import Member, NodeFile, NodeSpec, build_spec
from gpuwright.state import SeenFile, SeenPort
from operations import launchers, model, patches, preflight, runtime, service, smoke, system
from operations.limit import require_match
from tests.make import (
    ROOT,
    bench_spec,
    catalogue,
    empty_state,
    gpu_spec,
    group_data,
    lab_spec,
    record,
    seen,
    settled_state,
)
from tests.operations.conftest import Collect

LAB = lab_spec()
EMPTY = empty_state(LAB)
SETTLED = settled_state(LAB)
LOCK = f"flock --close --wait 900 --conflict-exit-code 75 {ROOT}/.lock "
CONFLICT = (
    f"; rc=$?; if [ $rc -eq 75 ]; then echo 'another deploy has held {ROOT}/.lock for 900 s: wait for it, or see "
    "`fuser -v` on it'; fi; exit $rc"
)
UV = f"env UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1 UV_SYSTEM_CERTS=1 {ROOT}/tools/bin/uv"

OPERATIONS = {
    p.CANARY: preflight.ask_canary,
    p.PREFLIGHT: preflight.check_node,
    p.FOLDERS: system.create_folders,
    p.SETTINGS: system.set_host,
    p.WHEELS: runtime.bring_wheels,
    p.TOOLS: runtime.install_tools,
    p.VENV: runtime.create_venv,
    p.ADOPT: runtime.adopt,
    p.SYNC: runtime.sync_venv,
    p.STUB: runtime.build_cuda_stub,
    p.VERIFY: runtime.verify,
    p.APPLY: patches.apply_series,
    p.PROBE: patches.probe,
    p.MODEL: model.provide_model,
    p.CONFIG: model.read_config,
    p.LAUNCHERS: launchers.write_scripts,
    p.CONFIGURE: service.configure,
    p.SERVER: service.run_tier,
    p.PRUNE: service.prune_caches,
    p.RECORD: service.record,
    p.SMOKE: smoke.benchmark,
    p.GATE: smoke.gate,
}


def test_deploy_runs_every_step_of_the_plan_in_order_under_its_own_name() -> None:
    tree = ast.parse((REPOSITORY / "deploy.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    calls.sort(key=lambda call: call.lineno)
    named = [
        (keyword.value.value, call.func.attr, call.func.value.id)  # type: ignore[attr-defined]
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "name"
    ]
    assert [name for name, _, _ in named] == list(OPERATIONS)
    for name, function, module in named:
        assert OPERATIONS[name].__name__ == function  # type: ignore[attr-defined]
        assert name.split(" | ")[0] == module


@pytest.mark.parametrize("step", OPERATIONS)
def test_nothing_to_do(step: str, collect: Collect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="pyinfra")
    assert collect(OPERATIONS[step], LAB, SETTLED) == []
    assert re.search(r"noop: \w+", caplog.text), "a settled step says so in words"


def request_of(command: object, name: str) -> dict[str, Any]:
    """The request of a node script, after checking that it is that script, run as node scripts are."""
    assert isinstance(command, NodeCommand)
    found = re.match(r'import json\nREQUEST = json\.loads\((".*")\)\n\n', command.stdin)
    assert found and command.stdin == node.script(name, json.loads(json.loads(found.group(1))))
    assert command.line in (
        LOCK + node.PYTHON + CONFLICT,
        LOCK + node.PYTHON + " 2>&1" + CONFLICT,
    )
    request: dict[str, Any] = json.loads(json.loads(found.group(1)))
    return request


def test_create_folders(collect: Collect) -> None:
    names = ["", "/launch", "/patches", "/patches/originals", "/patches/foreign", "/cache", "/logs", "/results", "/lib"]
    lines = [f"install -d -m 0755 {ROOT}{name}" for name in names] + [
        f"install -d -m 0700 {ROOT}/run",
        f"touch {ROOT}/.lock",
    ]
    assert collect(system.create_folders, LAB, EMPTY) == [NodeCommand(" && ".join(lines))]


def test_install_tools(collect: Collect) -> None:
    write, install = collect(runtime.install_tools, LAB, EMPTY)
    lock = {"path": f"{ROOT}/run/tools.lock.txt", "text": LAB.tools_lock.text, "mode": 0o644}
    assert request_of(write, "write_files") == {"files": [lock], "remove": []}
    pip = (
        f"env UV_SYSTEM_CERTS=1 {ROOT}/tools/bin/python -m pip install --quiet --disable-pip-version-check "
        f"--no-input --require-hashes -r {ROOT}/run/tools.lock.txt 2>&1"
    )
    line = f"{LOCK}sh -c 'python3 -B -m venv --clear {ROOT}/tools && {pip}'{CONFLICT}"
    assert install == NodeCommand(line, streamed=True)


def test_create_venv(collect: Collect) -> None:
    line = f"{LOCK}{UV} venv --clear --python /usr/bin/python3.12 {ROOT}/venv 2>&1{CONFLICT}"
    assert collect(runtime.create_venv, LAB, EMPTY) == [NodeCommand(line, streamed=True)]


def test_create_venv_of_a_python_that_uv_downloads(collect: Collect) -> None:
    spec = lab_spec(python_download=True)
    (command,) = collect(runtime.create_venv, spec, empty_state(spec, interpreter=None))
    assert isinstance(command, NodeCommand)
    assert "UV_PYTHON_DOWNLOADS=automatic" in command.line and "--python 3.12 " in command.line


def test_sync_venv_reinstalls_what_is_damaged(collect: Collect) -> None:
    assert SETTLED.venv is not None
    damaged = SETTLED.venv.model_copy(update={"damaged": {"torch": "lacks x", "einops": "lacks y"}})
    write, sync, keep = collect(runtime.sync_venv, LAB, SETTLED.model_copy(update={"venv": damaged}))
    lock = {"path": f"{ROOT}/run/runtime.lock.txt", "text": LAB.lock.text, "mode": 0o644}
    assert request_of(write, "write_files") == {"files": [lock], "remove": [f"{ROOT}/run/runtime.json"]}
    uv = (
        f"{UV} pip sync --python {ROOT}/venv/bin/python --require-hashes --only-binary :all: "
        "--allow-empty-requirements --reinstall-package einops --reinstall-package torch "
        f"{ROOT}/run/runtime.lock.txt 2>&1"
    )
    pipeline = f"{uv} | {{ grep -v '\"'\"'^ [+-] '\"'\"' || true; }}"
    assert sync == NodeCommand(f"{LOCK}bash -o pipefail -c '{pipeline}'{CONFLICT}", streamed=True)
    builds = {"venv": f"{ROOT}/venv", "path": f"{ROOT}/run/builds.json", "anew": ["einops", "torch"]}
    assert request_of(keep, "keep_builds") == builds


def test_what_was_edited_is_fetched_anew_and_not_from_the_cache_that_may_share_the_edit(collect: Collect) -> None:
    assert SETTLED.venv is not None
    damaged = {
        "torch": "torch/a.py has another content than recorded",
        "numpy": "has no INSTALLER: …",
        "einops": "lacks x",
    }
    venv = SETTLED.venv.model_copy(update={"damaged": damaged})
    _, forget, sync, _ = collect(runtime.sync_venv, LAB, SETTLED.model_copy(update={"venv": venv}))
    assert forget == NodeCommand(f"{LOCK}{UV} cache clean --quiet torch 2>&1{CONFLICT}", streamed=True)
    assert isinstance(sync, NodeCommand) and "--reinstall-package numpy" in sync.line


def test_build_cuda_stub(collect: Collect) -> None:
    build, write = collect(runtime.build_cuda_stub, LAB, EMPTY)
    lib = f"{ROOT}/lib/libcuda.so.1"
    line = f"cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o {lib}.new -x c - && mv {lib}.new {lib}"
    assert isinstance(build, NodeCommand)
    assert build.line == f"{LOCK}sh -c '{line}'{CONFLICT}" and "cuMemUnmap" in build.stdin
    assert request_of(write, "write_files")["files"][0]["path"] == f"{ROOT}/lib/libcuda_stub.c"


def test_verify(collect: Collect) -> None:
    (command,) = collect(runtime.verify, LAB, EMPTY)
    request = request_of(command, "prove")
    assert request["stamp"] == f"{ROOT}/run/runtime.json" and request["value"] == LAB.runtime_stamp
    assert {proof["id"]: proof["expect"] for proof in request["proofs"]} == {
        "torch-cuda": "12.8",
        "glm-5-config": "True",
        "engine-arguments": None,
    }
    assert request["env"] == {"LD_LIBRARY_PATH": f"{ROOT}/lib"}


PATCH = LAB.patches[0]


def with_patched(sha256: str | None) -> Any:
    seen = SeenFile(sha256=sha256, size=1, mode=0o644) if sha256 else None
    return SETTLED.model_copy(update={"patched": SETTLED.patched | {PATCH.file: seen}})


def test_apply_series(collect: Collect) -> None:
    (command,) = collect(patches.apply_series, LAB, with_patched(PATCH.pre_sha256))
    request = request_of(command, "patch_files")
    assert request["originals"] == f"{ROOT}/patches/originals" and request["stamp"] == f"{ROOT}/run/patches.json"
    assert request["manifest"] == f"{ROOT}/patches/applied.json"
    (file,) = request["files"]
    (step,) = file["steps"]
    assert file["site"] == f"{ROOT}/venv/lib/python3.12/site-packages"
    assert (file["path"], step["pre"], step["post"]) == (PATCH.file, PATCH.pre_sha256, PATCH.post_sha256)


def test_apply_series_brings_a_missing_file_back_with_its_distribution(collect: Collect) -> None:
    sync, builds, patch = collect(patches.apply_series, LAB, with_patched(None))
    assert request_of(builds, "keep_builds")["anew"] == ["flashinfer-python"]
    assert isinstance(sync, NodeCommand) and "--reinstall-package flashinfer-python" in sync.line
    files = request_of(patch, "patch_files")["files"]
    paths = [patch.file for patch in LAB.patches if patch.distribution == PATCH.distribution]
    assert [file["path"] for file in files] == paths, "all patches of the distribution"


def test_apply_series_replaces_a_foreign_file_only_when_asked_to(collect: Collect) -> None:
    keep, forget, sync, _, patch = collect(
        patches.apply_series, lab_spec(patches_foreign="replace"), with_patched("c" * 64)
    )
    assert request_of(keep, "keep_foreign")["foreign"] == f"{ROOT}/patches/foreign"
    assert isinstance(forget, NodeCommand) and "uv cache clean --quiet flashinfer-python 2>&1" in forget.line
    assert isinstance(sync, NodeCommand) and "--reinstall-package flashinfer-python" in sync.line
    assert request_of(patch, "patch_files")["files"][0]["path"] == PATCH.file


def test_apply_series_puts_originals_back_without_patches(collect: Collect) -> None:
    (command,) = collect(patches.apply_series, lab_spec(patches="none"), SETTLED)
    assert [file["steps"] for file in request_of(command, "patch_files")["files"]] == [[]] * len(LAB.patches)


def test_probe(collect: Collect) -> None:
    (command,) = collect(patches.probe, LAB, EMPTY)
    request = request_of(command, "prove")
    assert request["stamp"] == f"{ROOT}/run/patches.json" and request["value"] == LAB.patches_stamp
    assert [proof["id"] for proof in request["proofs"]][: len(LAB.patches)] == [patch.id for patch in LAB.patches]


def test_provide_the_tiny_model(collect: Collect) -> None:
    (command,) = collect(model.provide_model, LAB, EMPTY)
    request = request_of(command, "tiny_model")
    assert request == {"path": f"{ROOT}/model", "model": LAB.tiny_model}


def test_fetch_a_model_of_the_hub(collect: Collect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWRIGHT_TEST_TOKEN", "hf_secret")
    wanted = {
        "kind": "hub",
        "path": "/models/m",
        "repo": "org/m",
        "revision": "a" * 40,
        "token": "env:GPUWRIGHT_TEST_TOKEN",
    }
    spec = lab_spec(model=wanted, installer_env={"HTTPS_PROXY": "http://proxy:3128", "UV_SYSTEM_CERTS": "1"})
    (command,) = collect(model.provide_model, spec, empty_state(spec))
    assert isinstance(command, NodeCommand) and command.streamed
    assert command.line == (
        f"env -i PATH=/usr/bin:/bin HOME={ROOT}/run LANG=C.UTF-8 HTTPS_PROXY=http://proxy:3128 "
        f"{ROOT}/venv/bin/python -I -u - 2>&1"
    )
    request = json.loads(json.loads(command.stdin.partition("REQUEST = json.loads(")[2].partition(")\n")[0]))
    assert command.stdin == node.script("fetch_model", request)
    assert request == {
        "path": "/models/m", "repo": "org/m", "revision": "a" * 40, "endpoint": None, "token": "hf_secret",
        "system_certs": True, "manifest": f"{ROOT}/run/model.json",
    }  # fmt: skip
    other = lab_spec(model=wanted | {"token": None})
    assert spec.spec_digest == other.spec_digest, "who asks for a model does not change what is served"


def test_read_the_config(collect: Collect) -> None:
    (command,) = collect(model.read_config, LAB, EMPTY)
    request = request_of(command, "prove")
    assert request["stamp"] == f"{ROOT}/run/config.json" and request["proofs"][0]["expect"] == "gpt2"
    assert "'trust_remote_code': False" in request["proofs"][0]["code"]
    assert "'trust_remote_code': True" in gpu_spec().config_proofs[0]["code"], "as the ladder has the server do"


def test_what_waits_for_a_reboot_is_said_at_each_deploy(collect: Collect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pyinfra")
    spec = gpu_spec(system={"uvm-no-hmm": True})
    state = seen(settled_state(spec), "module_options", {"nvidia_uvm.uvm_disable_hmm": "N"})
    assert collect(system.set_host, spec, state) == []
    assert "not done yet: uvm-no-hmm: nvidia_uvm.uvm_disable_hmm is N, and Y after a reboot" in caplog.text


def test_what_should_be_better_is_counted_and_stops_nothing(collect: Collect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pyinfra")
    spec = gpu_spec()
    state = seen(settled_state(spec), "p2p", {"0-1": "CNS"})
    assert collect(preflight.check_node, spec, state) == []
    assert "1 things should be better (p2p): doctor.py says how" in caplog.text


def test_write_scripts_writes_what_differs_and_removes_what_no_tier_has(collect: Collect) -> None:
    first = LAB.scripts[0]
    seen = SETTLED.files | {first.path: SeenFile(sha256="0" * 64, size=1, mode=0o755)}
    state = SETTLED.model_copy(update={"files": seen, "launch_scripts": [*SETTLED.launch_scripts, "run_tp1_old.sh"]})
    (command,) = collect(launchers.write_scripts, LAB, state)
    rows = [{"path": first.path, "text": first.text, "mode": 0o755}]
    assert request_of(command, "write_files") == {"files": rows, "remove": [f"{ROOT}/launch/run_tp1_old.sh"]}


def test_configure(collect: Collect) -> None:
    (command,) = collect(service.configure, LAB, EMPTY)
    conf = LAB.supervisor_conf
    rows = [{"path": conf.path, "text": conf.text, "mode": 0o600}]
    assert request_of(command, "write_files") == {"files": rows, "remove": []}


def test_configure_under_systemd_replaces_supervisor(collect: Collect) -> None:
    spec = lab_spec(supervisor="systemd")
    (command,) = collect(service.configure, spec, SETTLED)
    request = request_of(command, "write_files")
    assert [row["path"] for row in request["files"]] == [file.path for file in spec.systemd_files]
    assert request["remove"] == [], "what is left of supervisor goes when its server has been stopped"


@pytest.mark.parametrize("owner", ["", "/srv/other"])
def test_a_unit_of_someone_else_is_never_overwritten(owner: str, collect: Collect) -> None:
    spec = lab_spec(supervisor="systemd", stages=["service"])
    (command,) = collect(service.configure, spec, SETTLED.model_copy(update={"unit_owner": owner}))
    assert isinstance(command, NodeCommand) and command.line.endswith("exit 1")


def test_run_tier(collect: Collect) -> None:
    (command,) = collect(service.run_tier, LAB, EMPTY)
    assert isinstance(command, FunctionCommand) and command.function is service.serve
    assert command.args == (LAB, ["stop", "start", "wait"], runs_on(LAB, EMPTY), "supervisor", None)
    request = request_of(node.run_server(*command.args[:4]), "server")
    assert request["actions"] == ["stop", "start", "wait"] and request["runs_on"] == runs_on(LAB, EMPTY)
    assert request["log"] == f"{ROOT}/logs/sglang-server-baseline.log"
    assert request["seen"] == ["Using KV cache dtype: torch.bfloat16"] and request["deadline_s"] == 300
    secret = [f"{ROOT}/run/secrets.yaml", f"{ROOT}/run/secrets.env"]
    assert request["files"] == [LAB.active_script.path, LAB.supervisor_conf.path, *secret]


PAIR = (Member("gpu-01", "10.0.0.1"), Member("gpu-02", "10.0.0.2"))


def rank(number: int) -> NodeSpec:
    data = group_data("all", "gpu") | {"ladder": "glm5-nvfp4-2x8", "cluster": {"group": "pair"}}
    return build_spec(PAIR[number].name, data, catalogue(), Sources((), []), PAIR)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The state that each other host of the run answers with."""
    states: dict[str, Any] = {}
    monkeypatch.setattr(service, "specs", lambda: [rank(number) for number in (0, 1) if PAIR[number].name in states])
    monkeypatch.setattr(service, "observe_peer", lambda spec: states[spec.host])
    yield states


def test_a_host_whose_cluster_cannot_be_reached_is_not_started(collect: Collect, peers: dict[str, Any]) -> None:
    (command,) = collect(service.run_tier, rank(0), settled_state(rank(0)))
    assert isinstance(command, NodeCommand) and command.line.endswith("exit 1")
    assert "gpu-02 of this cluster cannot be reached: not started" in command.line


def test_a_cluster_restarts_together(collect: Collect, peers: dict[str, Any]) -> None:
    settled = [settled_state(rank(number)) for number in (0, 1)]
    peers["gpu-02"] = settled[1]
    assert collect(service.run_tier, rank(0), settled[0]) == []
    peers["gpu-02"] = empty_state(rank(1))
    (command,) = collect(service.run_tier, rank(0), settled[0])
    assert isinstance(command, FunctionCommand) and command.args[1] == ["stop", "start", "wait"]


def test_prune_caches(collect: Collect) -> None:
    state = SETTLED.model_copy(update={"caches": [*SETTLED.caches, "old", "a b"]})
    line = f"{LOCK}rm -rf -- {ROOT}/cache/old '{ROOT}/cache/a b'{CONFLICT}"
    assert collect(service.prune_caches, LAB, state) == [NodeCommand(line)]


def test_record(collect: Collect) -> None:
    (command,) = collect(service.record, LAB, EMPTY)
    request = request_of(command, "write_files")
    ours = {file.path: file.sha256 for file in (*LAB.scripts, *LAB.manager_files("supervisor"))}
    assert request["only_where"] == ours | {LAB.paths.lock_copy: LAB.lock.sha256}, "no other deploy came in between"
    kept, row = request["files"]
    assert (kept["path"], kept["mode"]) == (f"{ROOT}/run/deployed.json", 0o600), "first: state.json says it is done"
    assert json.loads(kept["text"]) == LAB.declared("supervisor")
    state = json.loads(row["text"])
    assert row["path"] == f"{ROOT}/state.json" and state["spec_digest"] == LAB.spec_digest
    assert re.fullmatch(r"[0-9a-f]{40}\+?|unknown", state["revision"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", state["at"])


def test_benchmark(collect: Collect) -> None:
    (command,) = collect(smoke.benchmark, LAB, EMPTY)
    assert isinstance(command, FunctionCommand) and command.function is smoke.measure
    bench = node.benchmark(LAB, "run-1", {"runtime": "x"})
    environment = [f"{name}={value}" for name, value in LAB.environment(LAB.tier).items()]
    python = shlex.join(["env", "-i", *environment, f"{ROOT}/venv/bin/python", "-I", "-u", "-"])
    assert bench.line == f"{LOCK}{python} 2>&1{CONFLICT}", "in the venv's Python, and no other benchmark beside it"
    request = request_of(replace(bench, line=LOCK + node.PYTHON + CONFLICT), "bench")
    assert [level["concurrency"] for level in request["levels"]] == [1, 4, 10]
    seeds = [(run["number"], run["seed"], run["discarded"]) for run in request["levels"][0]["repeats"]]
    assert seeds == [(0, 5, True), (1, 6, False), (2, 7, False), (3, 8, False)]
    assert (request["tier"], request["runs_on"], request["gpus"]) == ("baseline", {"runtime": "x"}, 0)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty results/ of the control machine."""
    for module in (preflight, smoke):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def keep(folder: Path, *records: Record) -> None:
    for each in records:
        smoke.append(folder / folder_name(each.inventory_host) / f"{each.run}.json", dump(each))


def test_a_host_outside_the_canaries_gets_nothing_that_no_canary_has_passed(
    collect: Collect, results: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pyinfra")
    spec = bench_spec()
    (command,) = collect(preflight.ask_canary, spec, empty_state(spec))
    assert isinstance(command, NodeCommand) and command.line.endswith("exit 1")
    assert "no canary host (gpu-01) has a passing result for spec" in caplog.text
    keep(results, record(bench_spec("gpu-01"), run="r-canary"))
    assert collect(preflight.ask_canary, spec, empty_state(spec)) == []


def test_the_canary_gate_can_be_left_out_and_says_so(
    collect: Collect, results: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pyinfra")
    spec = bench_spec(canary_gate="off")
    assert collect(preflight.ask_canary, spec, empty_state(spec)) == []
    assert "the canary gate is off: no canary host (gpu-01) has a passing result for spec" in caplog.text


def test_a_host_that_has_the_spec_already_is_not_asked_about(collect: Collect, results: Path) -> None:
    spec = bench_spec()
    assert collect(preflight.ask_canary, spec, empty_state(spec, state={"spec_digest": spec.spec_digest})) == []


def test_a_slower_tier_fails_the_host_each_time_it_is_asked(
    collect: Collect, results: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pyinfra")
    spec = bench_spec(tier="no-radix", gate="baseline")
    state = settled_state(spec, results=[])
    keep(results, record(bench_spec(), run="r-base"), record(spec, run="r-1"))
    assert collect(smoke.gate, spec, state) == []
    slow = {2: [100.0, 101.0, 102.0], 8: [400.0, 405.0, 402.0]}
    keep(results, record(spec, slow, run="r-2", started_at="2026-12-01T00:00:00Z"))
    for _ in range(2):
        (command,) = collect(smoke.gate, spec, state)
        assert isinstance(command, NodeCommand) and "is slower than baseline at concurrency 2, 8" in command.line
    assert "verdict: slower" in caplog.text


def test_the_gate_fetches_what_lies_on_the_node_alone(collect: Collect, results: Path) -> None:
    spec = bench_spec(tier="no-radix", gate="baseline")
    fetch, refusal = collect(smoke.gate, spec, settled_state(spec))
    assert isinstance(fetch, FunctionCommand) and (fetch.function, fetch.args) == (smoke.fetch, (spec, ["r.json"]))
    assert isinstance(refusal, NodeCommand) and "has no accepted result by profile smoke to compare" in refusal.line


@pytest.mark.parametrize(
    ("operation", "spec", "state", "text"),
    [
        (preflight.check_node, LAB, empty_state(LAB, port=SeenPort(pid=9, command="nginx")), "held by pid 9 (nginx)"),
        (
            model.provide_model,
            gpu_spec(),
            empty_state(gpu_spec()),
            "the model folder /models/GLM-5-NVFP4 does not exist",
        ),
    ],
)
def test_what_cannot_be_mended_stops_the_host_with_one_failing_command(
    operation: object, spec: Any, state: Any, text: str, collect: Collect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pyinfra")
    (command,) = collect(operation, spec, state)
    assert isinstance(command, NodeCommand) and command.line.endswith("exit 1")
    assert text in caplog.text


def test_a_foreign_file_is_kept_and_shown_before_the_host_is_stopped(
    collect: Collect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pyinfra")
    keep, stop = collect(patches.apply_series, LAB, with_patched("c" * 64))
    assert request_of(keep, "keep_foreign")["files"][0]["path"] == PATCH.file
    assert isinstance(stop, NodeCommand) and stop.line.endswith("exit 1")
    assert "is foreign and was left as it is" in caplog.text


def test_the_stop_deploy_ends_server_and_supervisor(collect: Collect) -> None:
    (command,) = collect(service.stop, LAB, SETTLED)
    assert request_of(command, "server")["actions"] == ["stop", "shut_down"]


class Node:
    """A host whose commands answer from a list; what was run and what was told is kept."""

    current_op_global_arguments: dict[str, Any] = {}

    def __init__(self, *answers: tuple[bool, str]) -> None:
        self.answers, self.ran, self.told = list(answers), [], []  # type: ignore[var-annotated]

    def run_shell_command(self, command: Any, **arguments: Any) -> tuple[bool, Any]:
        self.ran.append(json.loads(json.loads(arguments["_stdin"].splitlines()[1][len("REQUEST = json.loads(") : -1])))
        succeeded, stdout = self.answers.pop(0)
        stdout = stdout.replace("ATTEMPT", self.ran[0]["attempt"])
        return succeeded, type("Output", (), {"stdout": "a login shell that greets\n" + stdout})

    def log(self, text: str, how: Any) -> None:
        self.told.append(text)


def served(*answers: tuple[bool, str]) -> tuple[bool, Node]:
    host = Node(*answers)
    arguments: Any = (None, host, LAB, ["stop", "start", "wait"], {"runtime": "now"}, "supervisor", "then")
    return service.serve(*arguments), host


def test_a_tier_that_comes_up_is_one_command() -> None:
    came_up, host = served((True, ""))
    assert came_up and len(host.ran) == 1 and host.told == []


def test_a_tier_that_does_not_come_up_is_diagnosed_and_the_one_before_it_started_again() -> None:
    log = "- ImportError: libnuma.so.1: cannot open shared object file: No such file or directory\n"
    why = {"attempt": "ATTEMPT", "tier": "baseline", "why": "it ended", "log": "/logs/x.log"}
    failure = {"failure": why, "text": log}
    came_up, host = served((False, ""), (True, json.dumps(failure)), (True, ""))
    assert not came_up
    assert [request.get("actions") for request in host.ran] == [["stop", "start", "wait"], None, ["roll_back"]]
    assert "libnuma-missing" in host.told[0] and "/logs/x.log" in host.told[-1]


@pytest.mark.parametrize("left", [None, {"attempt": "of another deploy", "tier": "x", "why": "y", "log": "z"}])
def test_a_failure_before_any_start_is_not_diagnosed(left: Any) -> None:
    came_up, host = served((False, ""), (True, json.dumps({"failure": left, "text": ""})))
    assert not came_up and len(host.ran) == 2 and host.told == []


def test_a_quiet_command_has_no_stdin_argument() -> None:
    from operations.stage import to_pyinfra

    assert to_pyinfra(NodeCommand("true")).connector_arguments == {}
    assert node.write_files(LAB, [NodeFile("/x", "y")]).stdin


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inventory/gpu.py", "deploy.py", "--dry", "--limit", "canry"), 'did you mean "canary"?'),
        (("inventory/gpu.py", "deploy.py", "-y", "--limit", "gpu-0[3-9]*"), "matches no host of this inventory"),
        (("inventory/lab.py", "deploy.py", "--dry", "--data", "tier=basline"), 'did you mean "baseline"?'),
        (("inventory/lab.py", "deploy.py", "--dry", "--data", "port=none"), "--data: port: should be a whole number"),
    ],
)
def test_the_command_line_refuses_bad_input(arguments: tuple[str, ...], said: str) -> None:
    pyinfra = Path(sys.executable).with_name("pyinfra")
    done = subprocess.run(
        [pyinfra, *arguments], cwd=REPOSITORY, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1 and said in done.stderr
    assert "Starting operation" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("limit", ["canary", "gpu", "all", "gpu-01.*"])
def test_a_limit_that_matches_is_let_through(limit: str) -> None:
    context = click.Context(click.Command("pyinfra"))
    context.params["limit"] = (limit,)
    with context:
        require_match(gpu=["gpu-01.example", ("gpu-02.example", {})], canary=["gpu-01.example"])
