"""The plan: nothing on a settled node, everything on a fresh one, and each single difference with what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpuwright import plan as p
from gpuwright.hostdata import STAGES
from gpuwright.plan import plan, runs_on, server_actions
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState, SeenFile, SeenPort, SeenProcess, SeenVenv
from tests.make import ROOT, STOPPED, empty_state, gpu_spec, lab_spec, seen_file, settled_state

LAB = lab_spec()
GPU = gpu_spec()
SETTLED = settled_state(LAB)


def steps(spec: NodeSpec, state: NodeState) -> list[str]:
    """The steps that have a change, in order, once each."""
    return list(dict.fromkeys(change.step for change in plan(spec, state).changes))


@pytest.mark.parametrize("spec", [LAB, GPU], ids=["lab", "gpu"])
def test_a_settled_node_has_no_change(spec: NodeSpec) -> None:
    assert plan(spec, settled_state(spec)).changes == ()


def test_a_fresh_lab_node_has_every_step_but_preflight_and_pruning() -> None:
    assert steps(LAB, empty_state(LAB)) == [
        p.FOLDERS, p.TOOLS, p.VENV, p.SYNC, p.STUB, p.VERIFY, p.APPLY, p.PROBE, p.MODEL, p.CONFIG, p.LAUNCHERS,
        p.CONFIGURE, p.SERVER, p.RECORD, p.SMOKE,
    ]  # fmt: skip


def test_a_gpu_node_builds_no_libcuda_stand_in() -> None:
    assert p.STUB not in steps(GPU, empty_state(GPU))


def venv_of(state: NodeState) -> SeenVenv:
    assert state.venv is not None
    return state.venv


def with_distributions(**versions: str | None) -> NodeState:
    venv = venv_of(SETTLED)
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    merged = {k: v for k, v in (venv.distributions | named).items() if v is not None}
    return SETTLED.model_copy(update={"venv": venv.model_copy(update={"distributions": merged})})


def with_server(**fields: object) -> NodeState:
    return SETTLED.model_copy(update={"server": SETTLED.server.model_copy(update=fields)})


def with_file(path: str, **fields: object) -> NodeState:
    seen = SETTLED.files[path]
    assert seen is not None
    return SETTLED.model_copy(update={"files": SETTLED.files | {path: seen.model_copy(update=fields)}})


def with_record(**fields: object) -> NodeState:
    assert SETTLED.server.record is not None
    return with_server(record=SETTLED.server.record | fields)


ORPHAN = SeenProcess(pid=77, command="sglang::scheduler_TP0")
PATCHED = LAB.patches[0]
PRISTINE = SeenFile(sha256=PATCHED.pre_sha256, size=1, mode=0o644)
RUNTIME = [p.SYNC, p.VERIFY, p.SERVER]
SCRIPT = LAB.active_script.path
OTHER_SCRIPT = LAB.scripts[1].path
assert SETTLED.model is not None
EDITED_MODEL = SETTLED.model.model_copy(update={"files": {"model.safetensors": seen_file(1, "b" * 64)}})

DIFFERENCES: dict[str, tuple[NodeState, list[str]]] = {
    "a distribution is missing": (with_distributions(requests=None), RUNTIME),
    "a distribution is extra": (with_distributions(left_pad="1.0"), RUNTIME),
    "a distribution has another version": (with_distributions(requests="1.0"), RUNTIME),
    "a version is written another way": (with_distributions(einops="0.8.2.0"), []),
    "a distribution is damaged": (
        SETTLED.model_copy(update={"venv": venv_of(SETTLED).model_copy(update={"damaged": {"torch": "lacks x"}})}),
        RUNTIME,
    ),
    "the patched distribution has another version": (
        with_distributions(flashinfer_python="0.6.4").model_copy(
            update={"patched": SETTLED.patched | {PATCHED.file: SeenFile(sha256="f" * 64, size=1, mode=0o644)}}
        ),
        [p.SYNC, p.VERIFY, p.APPLY, p.PROBE, p.SERVER],
    ),
    "a patched file is pristine again": (
        SETTLED.model_copy(update={"patched": SETTLED.patched | {PATCHED.file: PRISTINE}}),
        [p.APPLY, p.PROBE, p.SERVER],
    ),
    "the runtime was never verified": (
        SETTLED.model_copy(update={"stamps": SETTLED.stamps | {"runtime": None}}),
        [p.VERIFY, p.SERVER],
    ),
    "the patches were probed for another set": (
        SETTLED.model_copy(update={"stamps": SETTLED.stamps | {"patches": {"value": "x", "at": "then"}}}),
        [p.PROBE, p.SERVER],
    ),
    "the patches were probed again since": (
        SETTLED.model_copy(update={"stamps": SETTLED.stamps | {"patches": {"value": LAB.patches_stamp, "at": "now"}}}),
        [p.SERVER],
    ),
    "a weight was edited": (SETTLED.model_copy(update={"model": EDITED_MODEL}), [p.MODEL, p.CONFIG, p.SERVER]),
    "the model's config was never read": (
        SETTLED.model_copy(update={"stamps": SETTLED.stamps | {"config": None}}),
        [p.CONFIG],
    ),
    "the active script was edited": (with_file(SCRIPT, sha256="0" * 64), [p.LAUNCHERS]),
    "another tier's script was edited": (with_file(OTHER_SCRIPT, sha256="0" * 64), [p.LAUNCHERS]),
    "a script lost its execute bit": (with_file(OTHER_SCRIPT, mode=0o644), [p.LAUNCHERS]),
    "a script of no tier lies there": (
        SETTLED.model_copy(update={"launch_scripts": [*SETTLED.launch_scripts, "run_tp1_old.sh"]}),
        [p.LAUNCHERS],
    ),
    "supervisor's configuration was edited": (
        with_file(LAB.supervisor_conf.path, sha256="0" * 64),
        [p.CONFIGURE],
    ),
    "the libcuda stand-in is gone": (
        SETTLED.model_copy(update={"files": SETTLED.files | {LAB.paths.cuda_stub: None}}),
        [p.STUB, p.VERIFY, p.SERVER],
    ),
    "the server is not running": (with_server(pid=None, status="EXITED", health=None), [p.SERVER]),
    "the server does not answer": (with_server(health=503), [p.SERVER]),
    "the server has no record": (with_server(record=None), [p.SERVER]),
    "supervisor has restarted the server by itself": (with_server(pid=200), [p.SERVER]),
    "a process of an earlier server is left": (with_server(orphans=[ORPHAN]), [p.SERVER]),
    "the server is kept by another supervisor": (with_server(manager="systemd"), [p.SERVER]),
    "the unit of another supervisor is left": (
        with_server(units=["sglang-server"]),
        [p.SERVER],
    ),
    "the server is still loading": (with_record(ready_at=None), [p.SERVER]),
    "the server was started on other content": (with_record(runs_on={"runtime": "x"}), [p.SERVER]),
    "the cache of an old runtime is there": (
        SETTLED.model_copy(update={"caches": [*SETTLED.caches, "0123456789abcdef"]}),
        [p.PRUNE],
    ),
    "another spec is on record": (SETTLED.model_copy(update={"state": {"spec_digest": "x"}}), [p.RECORD]),
    "there is no result": (SETTLED.model_copy(update={"results": []}), [p.SMOKE]),
    "the result was rejected": (
        SETTLED.model_copy(update={"results": [SETTLED.results[0].model_copy(update={"verdict": "rejected"})]}),
        [p.SMOKE],
    ),
    "the result is another spec's": (
        SETTLED.model_copy(update={"results": [SETTLED.results[0].model_copy(update={"spec_digest": "x"})]}),
        [p.SMOKE],
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_difference_changes_its_step_and_what_follows(name: str) -> None:
    state, expected = DIFFERENCES[name]
    assert steps(LAB, state) == expected


def test_what_the_server_must_do() -> None:
    assert server_actions(LAB, SETTLED) == []
    assert server_actions(LAB, with_record(ready_at=None)) == ["wait"]
    assert server_actions(LAB, with_record(runs_on={})) == ["stop", "start", "wait"]
    assert server_actions(LAB, with_server(health=None)) == ["stop", "start", "wait"]
    assert server_actions(LAB, with_server(pid=200)) == ["adopt", "wait"], "its supervisor has started it again"
    assert server_actions(LAB, with_server(pid=200, record=None)) == ["stop", "start", "wait"]
    assert server_actions(LAB, with_server(units=["old"])) == ["retire"]
    assert server_actions(LAB, with_server(units=["old"], pid=200)) == ["retire", "adopt", "wait"]
    assert server_actions(LAB, with_server(pid=None)) == ["stop", "start", "wait"]


def test_an_orphan_is_named() -> None:
    (change, *_) = plan(LAB, with_server(orphans=[ORPHAN])).of(p.SERVER)
    assert str(change) == "process 77 (sglang::scheduler_TP0): expected ended, found left of an earlier server"
    assert server_actions(LAB, with_server(orphans=[ORPHAN])) == ["stop", "start", "wait"]


def test_a_supervisor_that_gave_up_is_quoted() -> None:
    gone = with_server(pid=None, status="failed (start-limit-hit)", restarts=2, health=None)
    assert "not running (failed (start-limit-hit) after 2 restarts)" in str(plan(LAB, gone).of(p.SERVER)[0])


@pytest.mark.parametrize(
    ("said", "systemd", "uid", "expected"),
    [
        ("auto", True, 0, "systemd"),
        ("auto", True, 1000, "supervisor"),
        ("auto", False, 0, "supervisor"),
        ("systemd", False, 0, "systemd"),
        ("supervisor", True, 0, "supervisor"),
    ],
)
def test_systemd_keeps_the_server_where_it_is_there(said: str, systemd: bool, uid: int, expected: str) -> None:
    spec = lab_spec(supervisor=said)
    state = empty_state(spec, systemd=systemd, uid=uid)
    assert p.manager(spec, state) == expected
    paths = [change.what for change in plan(spec, state).of(p.CONFIGURE)]
    if expected == "systemd":
        assert paths == [file.path for file in spec.systemd_files]
        assert paths[:2] == ["/etc/systemd/system/sglang-server.service", "/etc/logrotate.d/sglang-server"]
    else:
        assert paths == [f"{spec.paths.run}/supervisord.conf"]


def test_a_node_under_systemd_settles() -> None:
    spec = lab_spec(supervisor="systemd")
    state = settled_state(spec)
    kept = state.server.model_copy(
        update={
            "manager": "systemd",
            "unit": "sglang-server",
            "status": "active",
            "record": {**(state.server.record or {})},
        }
    )
    files = {path: seen for path, seen in state.files.items() if path != spec.supervisor_conf.path}
    files |= {f.path: SeenFile(sha256=f.sha256, size=1, mode=f.mode) for f in spec.systemd_files}
    state = state.model_copy(update={"server": kept, "files": files, "systemd": True, "unit_owner": spec.paths.root})
    record = {**(kept.record or {}), "runs_on": runs_on(spec, state)}
    state = state.model_copy(update={"server": kept.model_copy(update={"record": record})})
    assert plan(spec, state).changes == () == tuple(server_actions(spec, state))
    other = lab_spec(supervisor="systemd", unit="other")
    files |= {f.path: SeenFile(sha256=f.sha256, size=1, mode=f.mode) for f in other.systemd_files}
    serving = state.server.model_copy(update={"units": ["other", "sglang-server"]})
    moved = state.model_copy(update={"files": files, "server": serving})
    assert server_actions(other, moved) == ["stop", "start", "wait"], "the old unit holds the server that serves"
    assert "expected kept by unit other, found kept by unit sglang-server" in str(plan(other, moved).of(p.SERVER)[-1])


def test_secrets_are_planned_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "one")
    spec = lab_spec(secrets={"api-key": "env:MY_KEY"})
    state = settled_state(spec)
    (change,) = plan(spec, state).of(p.LAUNCHERS)
    assert change.what == f"{ROOT}/run/secrets.yaml"
    assert spec.secret_files[0].sha256[:8] not in str(change) and "one" not in str(change).split()
    assert "restart tier baseline, because of: secrets" in str(plan(spec, state).of(p.SERVER)[0])
    left = settled_state(LAB)
    secret = SeenFile(sha256="a" * 64, size=1, mode=0o600)
    left = left.model_copy(update={"files": left.files | {f"{ROOT}/run/secrets.yaml": secret}})
    assert [change.what for change in plan(LAB, left).of(p.LAUNCHERS)] == [f"{ROOT}/run/secrets.yaml"]


def test_a_restart_says_what_changed() -> None:
    assert SETTLED.server.record is not None
    then = SETTLED.server.record["runs_on"]
    (change,) = plan(LAB, with_record(runs_on=then | {"patches": "before", "model": "before"})).of(p.SERVER)
    assert str(change).endswith("since it was started: patches, model")


def test_foreign_content_stops_the_host_and_is_never_planned_over() -> None:
    foreign = SeenFile(sha256="c" * 64, size=1, mode=0o644)
    found = plan(LAB, SETTLED.model_copy(update={"patched": SETTLED.patched | {PATCHED.file: foreign}}))
    (change,) = found.changes
    assert change.step == p.APPLY and change.blocked
    for part in ("c" * 64, PATCHED.post_sha256, "left as it is", "patches new --help", "patches_foreign=replace"):
        assert part in str(change)


def test_a_patched_file_that_is_missing_brings_its_distribution_back() -> None:
    state = SETTLED.model_copy(update={"patched": SETTLED.patched | {PATCHED.file: None}})
    assert steps(LAB, state) == [p.APPLY, p.PROBE, p.SERVER]
    assert "install its distribution anew" in str(plan(LAB, state).of(p.APPLY)[0])


@pytest.mark.parametrize("stage", STAGES)
def test_only_the_stages_asked_for_are_planned(stage: str) -> None:
    found = plan(lab_spec(stages=[stage]), empty_state(LAB, port=SeenPort(pid=1, command="other")))
    assert {change.step.split(" | ")[0] for change in found.changes} == {stage}


def test_smoke_can_be_repeated_and_left_out() -> None:
    always, never = lab_spec(smoke="always"), lab_spec(smoke="never")
    assert steps(always, settled_state(always)) == [p.SMOKE]
    assert p.SMOKE not in steps(never, empty_state(never))


def test_a_server_that_is_not_the_declared_one_is_not_measured() -> None:
    other = lab_spec(tier="no-radix", stages=["smoke"])
    (change,) = plan(other, settled_state(LAB)).changes
    assert change.blocked and "the server that runs is not tier no-radix as it is declared" in str(change)
    stopped = settled_state(LAB, server=STOPPED)
    assert plan(lab_spec(stages=["smoke"], smoke="always"), stopped).changes[0].blocked
    assert not plan(lab_spec(tier="no-radix"), settled_state(LAB)).of(p.SMOKE)[0].blocked, "it is started first"
    assert plan(lab_spec(stages=["smoke"]), settled_state(LAB)).changes == ()


def test_smoke_runs_once_for_each_spec_and_profile() -> None:
    full = lab_spec(profile="full")
    (change,) = plan(full, settled_state(LAB)).of(p.SMOKE)
    assert str(change).startswith(
        "tier baseline by profile full, concurrency 1, 4, 10, 32: expected an accepted result"
    )
    assert steps(full, settled_state(full)) == []
    (seen,) = settled_state(LAB).results
    for other in ({"verdict": "rejected"}, {"benchmark_digest": None}, {"spec_digest": "0" * 64}):
        assert steps(LAB, settled_state(LAB, results=[seen.model_copy(update=other)])) == [p.SMOKE]


def folder(edit: Callable[[dict[str, object]], None]) -> NodeState:
    state = settled_state(GPU)
    assert state.model is not None
    fields: dict[str, object] = state.model.model_dump()
    edit(fields)
    return state.model_copy(update={"model": type(state.model).model_validate(fields)})


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (settled_state(GPU, model=None), "does not exist"),
        (folder(lambda m: m.update(model_type=None)), "names no model_type"),
        (folder(lambda m: m.update(files={})), "lacks 2 of 2 shards"),
        (
            folder(lambda m: m.update(files={"model-00001-of-00002.safetensors": seen_file(0).model_dump()})),
            "lacks 2",
        ),
        (folder(lambda m: m.update(shards=None, files={})), "nor any .safetensors"),
        (
            folder(lambda m: m.update(cut={"model-00002-of-00002.safetensors": "has 5 bytes, and its header says 9"})),
            "holds 1 of 2 shards cut off: model-00002-of-00002.safetensors has 5 bytes, and its header says 9",
        ),
        (folder(lambda m: m.update(unfinished=["x.incomplete"])), "a download that was cut off: x.incomplete"),
    ],
)
def test_a_model_folder_that_is_not_whole_stops_the_host(state: NodeState, problem: str) -> None:
    (change,) = plan(GPU, state).of(p.MODEL)
    assert change.blocked and problem in str(change)
    assert "set `model` in group_data" in str(change) or "or delete what is left of it" in str(change)


# --- a model of the hub ------------------------------------------------------------

HUB = gpu_spec(model={"kind": "hub", "path": "/models/m", "repo": "org/m", "revision": "a" * 40})
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def fetched(spec: NodeSpec = HUB, **changed: object) -> NodeState:
    """A node whose model was fetched whole, with the server that runs on it."""
    rows = {name: {"size": 5, "mtime_ns": 1, "inode": 1, "sha256": name[6:11] * 12} for name in SHARDS}
    manifest = {"repo": "org/m", "revision": "a" * 40, "files": rows, "complete": True} | changed
    state = settled_state(spec, model_manifest=manifest)
    record = (state.server.record or {}) | {"runs_on": p.runs_on(spec, state)}
    return state.model_copy(update={"server": state.server.model_copy(update={"record": record})})


def test_a_fetched_model_is_settled() -> None:
    assert plan(HUB, fetched()).changes == ()


@pytest.mark.parametrize(("changed", "said"), [
    ({"revision": "b" * 40}, "/models/m: expected org/m at aaaaaaaaaaaa, found org/m at bbbbbbbbbbbb"),
    ({"complete": False}, "/models/m: expected every file fetched and verified, found a fetch that was cut off"),
    ({"files": {SHARDS[0]: {"size": 5, "mtime_ns": 2, "inode": 1}}}, "as it was verified, found written since"),
    ({"files": {"a/b.json": {"size": 7, "mtime_ns": 2, "inode": 1}}}, "m/a/b.json: expected 7 bytes, found absent"),
])  # fmt: skip
def test_a_model_that_is_not_as_fetched(changed: dict[str, object], said: str) -> None:
    (change,) = plan(HUB, fetched(**changed)).of(p.MODEL)
    assert said in str(change) and not change.blocked


def test_weights_of_one_length_but_another_commit_restart_the_server() -> None:
    """After the fetch the files have the sizes they had; what tells them apart is the hub's hash."""
    other = fetched()
    assert other.model_manifest is not None
    rows = {name: row | {"sha256": "f" * 64} for name, row in other.model_manifest["files"].items()}
    after = other.model_copy(update={"model_manifest": other.model_manifest | {"files": rows}})
    (change,) = plan(HUB, after).of(p.SERVER)
    assert "because of what changed since it was started: model" in str(change)
    assert p.server_actions(HUB, after) == ["stop", "start", "wait"]


def test_a_shard_that_someone_wrote_anew_restarts_a_server_on_a_folder() -> None:
    state = settled_state(GPU)
    assert state.model is not None and plan(GPU, state).changes == ()
    files = state.model.files | {SHARDS[0]: state.model.files[SHARDS[0]].model_copy(update={"mtime_ns": 2})}
    after = state.model_copy(update={"model": state.model.model_copy(update={"files": files})})
    assert [change.step for change in plan(GPU, after).changes] == [p.SERVER]


def test_no_server_is_started_on_half_a_model() -> None:
    spec = replace(HUB, data=HUB.data.model_copy(update={"stages": ["service"]}))
    state = fetched(complete=False).model_copy(update={"server": STOPPED})
    _, change = plan(spec, state).of(p.SERVER)
    assert change.blocked and "the model is not whole" in str(change) and "run the model stage too" in str(change)


@pytest.mark.parametrize(("files", "shards", "said"), [
    ([SHARDS[0]], None, "lacks 1 of 2 shards: model-00002-of-00002.safetensors"),
    ([*SHARDS, "model.safetensors.index.json"], None, "index.json cannot be read, or names no shard"),
    ([*SHARDS, "model.safetensors.index.json"], [], "index.json cannot be read, or names no shard"),
    (["model.safetensors"], None, ""),
    (SHARDS, None, ""),
    (["sub/x.safetensors"], ["sub/x.safetensors"], ""),
])  # fmt: skip
def test_what_a_whole_folder_is(files: list[str], shards: list[str] | None, said: str) -> None:
    state = folder(lambda m: m.update(files={name: seen_file(5).model_dump() for name in files}, shards=shards))
    found = p.folder_problem(GPU, state)
    assert (said in str(found)) if said else found is None
