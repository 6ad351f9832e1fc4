"""The difference between what a node should be and what it is: a list of changes. Pure; no pyinfra, no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from gpuwright.checks import Examination, stop_text
from gpuwright.hostdata import FolderModel, HubModel, TinyModel
from gpuwright.patches import Action, Decision, FileState, decide, patched_files
from gpuwright.preflight import before_install, examination, without
from gpuwright.spec import NodeFile, NodeSpec, digest
from gpuwright.state import NodeState
from gpuwright.system import Declared, files, gaps, stale

CANARY = "preflight | ask the canary"
PREFLIGHT = "preflight | check the node"
FOLDERS = "system | create the node's folders"
SETTINGS = "system | set what the host needs"
TOOLS = "runtime | install uv and supervisor"
VENV = "runtime | create the venv"
SYNC = "runtime | sync venv to lock"
STUB = "runtime | build the libcuda stand-in"
VERIFY = "runtime | verify what must be true"
APPLY = "patches | apply the series"
PROBE = "patches | probe behaviour"
MODEL = "model | make, fetch or check the model"
CONFIG = "model | read its config with the pinned transformers"
LAUNCHERS = "launchers | write launch scripts"
CONFIGURE = "service | configure supervisor"
SERVER = "service | run the active tier"
PRUNE = "service | prune unused JIT caches"
RECORD = "service | record the deployed state"
SMOKE = "smoke | benchmark the active tier"
GATE = "smoke | hold it against another tier"


@dataclass(frozen=True)
class Change:
    """One difference. A `blocked` one cannot be mended by deploying: it stops the host, and `what` says why."""

    step: str
    what: str
    expected: str = ""
    found: str = ""
    blocked: bool = False

    def __str__(self) -> str:
        if not self.expected:
            return self.what
        return f"{self.what}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Plan:
    """Every change of one host, in the order of the steps."""

    changes: tuple[Change, ...]

    def of(self, step: str) -> list[Change]:
        """The changes of one step."""
        return [change for change in self.changes if change.step == step]


def plan(spec: NodeSpec, state: NodeState) -> Plan:
    """Every change of the spec's stages.

    A step sees the changes of the steps before it, so that one plan made up front (`--dry`) names what will follow from
    what; when a deploy runs, each step is planned anew on a fresh observation.
    """
    steps: list[tuple[str, Callable[[NodeSpec, NodeState, list[Change]], Iterable[Change]]]] = [
        ("preflight", _preflight), ("system", _folders), ("system", _settings),
        ("runtime", _tools), ("runtime", _venv), ("runtime", _sync), ("runtime", _stub), ("runtime", _verify),
        ("patches", _apply), ("patches", _probe), ("model", _model), ("model", _config), ("launchers", _launchers),
        ("service", _configure), ("service", _server), ("service", _prune), ("service", _record), ("smoke", _smoke),
    ]  # fmt: skip
    changes: list[Change] = []
    for stage, step in steps:
        if stage in spec.data.stages:
            changes += list(step(spec, state, changes))
    return Plan(tuple(changes))


def _has(changes: list[Change], *steps: str) -> bool:
    return any(change.step in steps and not change.blocked for change in changes)


def _preflight(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    stopping = before_install(spec, examine_node(spec, state))
    if stopping:
        yield Change(PREFLIGHT, stop_text(stopping), blocked=True)


def examine_node(spec: NodeSpec, state: NodeState) -> Examination:
    """The doctor's word on a node."""
    return examination(
        spec,
        state,
        installed=not _differences(spec, state),
        manager=manager(spec, state),
        model_problem=None if isinstance(spec.data.model, TinyModel) else folder_problem(spec, state),
    )


def _folders(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    absent = [path for path in spec.paths.folders if state.folders.get(path) is None]
    if spec.paths.root in absent:
        yield Change(FOLDERS, f"{spec.paths.root} and {len(absent) - 1} folders in it", "there", "absent")
        return
    for path, mode in spec.paths.folders.items():
        seen = state.folders.get(path)
        if seen is None:
            yield Change(FOLDERS, path, f"mode {mode:04o}", "absent")
        elif seen.mode != mode:
            yield Change(FOLDERS, path, f"mode {mode:04o}", f"mode {seen.mode:04o}")


def _settings(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    problem = settings_problem(spec, state)
    if problem:
        yield Change(SETTINGS, problem, blocked=True)
        return
    old = stale(spec.system, state.system_manifest or {})
    for gap in gaps(spec.system, state.readings, state.problems):
        if gap.blocked:
            remedy = f"make it so by hand, or take {gap.id} out of `system` in group_data"
            yield Change(SETTINGS, f"{gap.id}: {gap.what}: {gap.blocked}\n    -> {remedy}", blocked=True)
        else:
            yield Change(SETTINGS, f"{gap.id}: {gap.what}", gap.expected, gap.found)
    for path, owner in foreign_files(spec, state).items():
        whose = f"of gpuwright's root {owner}" if owner else "not of gpuwright"
        yield Change(SETTINGS, f"{path} is {whose}\n    -> move it away, or set another `unit`", blocked=True)
    yield from _file_changes(SETTINGS, system_files(spec, state), state)
    unit = state.readings.get("services", {}).get(spec.settings_unit)
    if unit and unit["load"] == "loaded" and unit["enabled"] != "enabled":
        yield Change(SETTINGS, spec.settings_unit, "enabled", str(unit["enabled"]))
    kept = (state.system_manifest or {}).get("settings", {})
    for each in spec.system:
        if each.id not in kept and each.id not in old:
            yield Change(SETTINGS, f"{each.id}: on record, with what was there before", "yes", "no")
    for name, entry in old.items():
        yield Change(SETTINGS, f"{name}: {entry['target']}", "as it was before", f"{entry.get('value') or 'set'} by us")
    for path in stale_files(spec, state):
        yield Change(SETTINGS, path, "absent", "a file of settings that are no longer declared")


def settings_problem(spec: NodeSpec, state: NodeState) -> str | None:
    """What keeps this deploy from setting anything of the host, or None."""
    manifest = state.system_manifest
    if manifest is None:
        return (
            f"{spec.paths.system_manifest} cannot be read, and it says what was there before us\n"
            "    -> restore it, or remove it: then what is set now counts as what was there"
        )
    if not spec.system and not manifest.get("settings") and not manifest.get("files"):
        return None
    if state.uid != 0:
        return "settings of the host are set by root\n    -> run with _sudo, or leave `system` empty in group_data"
    folder = state.folders.get(spec.paths.run)
    if folder and folder.uid != 0:
        return (
            f"{spec.paths.run} belongs to uid {folder.uid}, and what lies there would be run by root at boot\n"
            f"    -> chown -R root {spec.paths.root}"
        )
    return None


def settings_to_make(spec: NodeSpec, state: NodeState) -> tuple[Declared, ...]:
    """The declared settings that this deploy can make: all but those that are blocked."""
    blocked = {gap.id for gap in gaps(spec.system, state.readings, state.problems) if gap.blocked}
    return tuple(each for each in spec.system if each.id not in blocked)


def foreign_files(spec: NodeSpec, state: NodeState) -> dict[str, str]:
    """Files where ours should be, with the root that wrote them ("": none of gpuwright's)."""
    owners = {file.path: state.system_owners.get(file.path) for file in spec.system_files}
    return {path: owner for path, owner in owners.items() if owner is not None and owner != spec.paths.root}


def system_files(spec: NodeSpec, state: NodeState) -> list[NodeFile]:
    """What keeps the settings that can be made over a reboot; without systemd nothing would run the unit."""
    found = files(settings_to_make(spec, state), spec.paths.root, spec.data.unit)
    foreign = foreign_files(spec, state)
    return [
        NodeFile(path, text, mode)
        for path, (text, mode) in found.items()
        if (state.systemd or not path.startswith("/etc/systemd/")) and path not in foreign
    ]


def stale_files(spec: NodeSpec, state: NodeState) -> list[str]:
    """Files of settings that an earlier deploy wrote and that are no longer declared."""
    declared = {file.path for file in spec.system_files}
    return [path for path in (state.system_manifest or {}).get("files", []) if path not in declared]


def _tools(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    if state.tools is None:
        yield Change(TOOLS, spec.paths.tools, "uv and supervisor", "absent")
        return
    for name, version in spec.tools_lock.versions.items():
        seen = state.tools.distributions.get(name)
        if seen is None or not same_version(seen, version):
            yield Change(TOOLS, name, version, seen or "absent")
        elif name in state.tools.damaged:
            yield Change(TOOLS, name, f"{version}, whole", state.tools.damaged[name])


def _venv(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    if state.venv is None:
        yield Change(VENV, spec.paths.venv, f"a venv of Python {spec.data.python}", "absent")
    elif ".".join(state.venv.python.split(".")[:2]) != spec.data.python:
        yield Change(VENV, spec.paths.venv, f"Python {spec.data.python}", f"Python {state.venv.python}")


@dataclass(frozen=True)
class Difference:
    """One distribution that is not as the lock says."""

    name: str
    expected: str
    found: str


def _differences(spec: NodeSpec, state: NodeState) -> list[Difference]:
    """Every distribution that is missing, extra, of another version, or damaged."""
    seen = state.venv.distributions if state.venv else {}
    damaged = state.venv.damaged if state.venv else {}
    found = []
    for name, version in spec.lock.versions.items():
        if name not in seen:
            found.append(Difference(name, version, "absent"))
        elif not same_version(seen[name], version):
            found.append(Difference(name, version, seen[name]))
        elif name in damaged:
            found.append(Difference(name, f"{version}, whole", damaged[name]))
    found += [Difference(name, "absent", seen[name]) for name in seen if name not in spec.lock.versions]
    return found


def _sync(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    if _has(before, VENV):
        yield Change(SYNC, f"{len(spec.lock.versions)} distributions to install from the lock")
        return
    differences = _differences(spec, state)
    shown = 8
    for difference in differences[:shown]:
        yield Change(SYNC, difference.name, difference.expected, difference.found)
    if len(differences) > shown:
        yield Change(SYNC, f"and {len(differences) - shown} more distributions")
    lock = state.files.get(spec.paths.lock_copy)
    if not differences and (lock is None or lock.sha256 != spec.lock.sha256):
        yield Change(SYNC, "the lock on the node", spec.lock.sha256[:12], lock.sha256[:12] if lock else "absent")


def damaged_distributions(spec: NodeSpec, state: NodeState) -> list[str]:
    """The distributions that must be installed anew though their version is right."""
    return sorted(name for name in state.venv.damaged if name in spec.lock.versions) if state.venv else []


def _stub(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    source = spec.cuda_stub_source
    if source is None:
        return
    if state.files.get(spec.paths.cuda_stub) is None:
        yield Change(STUB, spec.paths.cuda_stub, "built", "absent")
    else:
        yield from _file_changes(STUB, [source], state)


def _verify(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    ids = ", ".join(proof["id"] for proof in spec.runtime_proofs)
    if _has(before, VENV, SYNC, STUB):
        yield Change(VERIFY, f"{ids}: the runtime changes")
    elif (state.stamps.get("runtime") or {}).get("value") != spec.runtime_stamp:
        yield Change(VERIFY, ids, "verified for this lock", "not verified")


def _apply(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    if _has(before, VENV):
        for file in patched_files(spec, {}):
            if file.chain:
                yield Change(APPLY, f"{file.path} by {file.names}", "applied", "pristine, once it is installed")
        return
    syncing = _has(before, SYNC)
    touched = {difference.name for difference in _differences(spec, state)} if syncing else set()
    for each in decide(spec, state):
        file, found = each.file, each.state
        if each.file.distribution in touched:
            if file.chain:
                yield Change(APPLY, f"{file.path} by {file.names}", "applied", "its distribution is installed first")
        elif each.action is Action.STOP:
            yield Change(APPLY, _refusal(spec, state, each), blocked=True)
        elif each.action is not Action.NOTHING:
            wanted = f"by {file.names}" if file.chain else "without patches"
            yield Change(
                APPLY,
                f"{file.path} {wanted}",
                "applied" if file.chain else "pristine",
                f"{found.value}; {each.action.value}",
            )


def stopped_files(spec: NodeSpec, state: NodeState) -> list[Decision]:
    """The foreign files that stop the host."""
    return [d for d in decide(spec, state) if d.action is Action.STOP and d.state is FileState.FOREIGN]


def _refusal(spec: NodeSpec, state: NodeState, each: Decision) -> str:
    file = each.file
    seen = state.patched.get(file.path)
    site = state.venv.site if state.venv else spec.paths.venv
    if each.state is FileState.WRONG_VERSION:
        version = state.venv.distributions.get(file.distribution) if state.venv else None
        return (
            f"{site}/{file.path} is of {file.distribution} {version}, and {file.names} is made for "
            f"{' and '.join(sorted({patch.versions for patch in file.chain}))}\n"
            "    -> run the runtime stage too: it brings the pinned version back"
        )
    return (
        f"{site}/{file.path} is foreign and was left as it is; a copy is kept in {spec.paths.foreign}\n"
        f"    expected sha256 {file.target} ({'patched' if file.chain else 'pristine'})\n"
        f"    found    sha256 {seen.sha256 if seen else 'none'}\n"
        f"    -> if the edit is wanted, make it a patch: python -m gpuwright patches new --help\n"
        f"    -> if not: --data patches_foreign=replace installs {file.distribution} anew and patches it"
    )


def _probe(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    ids = ", ".join(
        [patch.id for patch in (*spec.patches, *spec.uncovered)] + [setting.id for setting in spec.settings]
    )
    if not spec.patch_proofs:
        return
    if _has(before, VENV, APPLY):
        yield Change(PROBE, f"{ids}: patched files change")
    elif (state.stamps.get("patches") or {}).get("value") != spec.patches_stamp:
        yield Change(PROBE, ids, "probed for this patch set", "not probed")


def _model(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    path, seen = spec.model_path, state.model
    if isinstance(spec.data.model, HubModel):
        yield from _hub_model(spec, state, spec.data.model)
        return
    if isinstance(spec.data.model, FolderModel):
        problem = folder_problem(spec, state)
        if problem:
            yield Change(MODEL, problem, blocked=True)
        return
    if seen is None:
        yield Change(MODEL, path, "the tiny model", "absent")
        return
    manifest = seen.manifest or {}
    if manifest.get("model") != spec.tiny_model:
        yield Change(MODEL, path, f"made from {spec.tiny_model}", f"made from {manifest.get('model')}")
        return
    for name, sha256 in manifest["files"].items():
        file = seen.files.get(name)
        if file is None or file.sha256 != sha256:
            yield Change(MODEL, f"{path}/{name}", sha256[:12], (file.sha256 or "")[:12] if file else "absent")


def _hub_model(spec: NodeSpec, state: NodeState, model: HubModel) -> Iterable[Change]:
    kept, seen = state.model_manifest or {}, state.model
    files = seen.files if seen else {}
    if (kept.get("repo"), kept.get("revision")) != (model.repo, model.revision):
        found = f"{kept.get('repo')} at {str(kept.get('revision'))[:12]}" if kept.get("repo") else "none"
        yield Change(MODEL, spec.model_path, f"{model.repo} at {model.revision[:12]}", found)
        return
    if not kept.get("complete"):
        yield Change(MODEL, spec.model_path, "every file fetched and verified", "a fetch that was cut off")
        return
    for name, entry in kept["files"].items():
        file = files.get(name)
        if file is None:
            yield Change(MODEL, f"{spec.model_path}/{name}", f"{entry['size']} bytes", "absent")
        elif [file.size, file.mtime_ns, file.inode] != [entry[key] for key in ("size", "mtime_ns", "inode")]:
            yield Change(MODEL, f"{spec.model_path}/{name}", "as it was verified", "written since")
    if seen is not None:
        problem = folder_problem(spec, state)
        if problem and set(kept["files"]) <= set(files):
            yield Change(MODEL, problem, blocked=True)


def folder_problem(spec: NodeSpec, state: NodeState) -> str | None:
    """What keeps a model folder from being served, or None."""
    path, seen = spec.model_path, state.model
    remedy = "\n    -> put the whole model there, or set `model` in group_data"
    if seen is None:
        return f"the model folder {path} does not exist{remedy}"
    if seen.model_type is None:
        return f"{path}/config.json is absent or names no model_type{remedy}"
    if seen.model_type != spec.ladder.model_type:
        other = f"ladder {spec.data.ladder} is for {spec.ladder.model_type}"
        return f"{path}/config.json is of a {seen.model_type}, and {other}{remedy}, or another `ladder`"
    weights = [name for name in seen.files if name.endswith(".safetensors")]
    if "model.safetensors.index.json" in seen.files and not seen.shards:
        return f"{path}/model.safetensors.index.json cannot be read, or names no shard{remedy}"
    if seen.shards is None and not weights:
        return f"{path} holds neither model.safetensors.index.json nor any .safetensors{remedy}"
    wanted = _whole_set(weights) if seen.shards is None else seen.shards
    missing = [name for name in wanted if name not in seen.files or not seen.files[name].size]
    if missing:
        return f"{path} lacks {len(missing)} of {len(wanted)} shards: {_few(missing)}{remedy}"
    cut = [f"{name} {seen.cut[name]}" for name in wanted if name in seen.cut]
    if cut:
        return f"{path} holds {len(cut)} of {len(wanted)} shards cut off: {_few(cut)}{remedy}"
    if seen.unfinished:
        finish = "finish that download, or delete what is left of it"
        return f"{path} holds a download that was cut off: {_few(seen.unfinished)}\n    -> {finish}"
    tensor = spec.tier.needs.model_tensor
    if tensor and not seen.tensors.get(tensor):
        return (
            f"tier {spec.tier.name} needs a checkpoint with {tensor}*, which {path}/model.safetensors.index.json does "
            f"not list{remedy}, or another `tier`"
        )
    return None


def _whole_set(weights: list[str]) -> list[str]:
    """The shards that a folder without an index must hold: those that are there, and the missing ones of "1 of 2"."""
    found = set(weights)
    for name in weights:
        part = re.fullmatch(r"(.*-)(\d+)-of-(\d+)(\.safetensors)", name)
        if part and int(part[3]) <= 10_000:
            width = len(part[2])
            found |= {f"{part[1]}{n:0{width}}-of-{part[3]}{part[4]}" for n in range(1, int(part[3]) + 1)}
    return sorted(found)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _config(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    config = f"{spec.model_path}/config.json"
    if _has(before, MODEL):
        yield Change(CONFIG, f"{config}: the model changes")
    elif (state.stamps.get("config") or {}).get("value") != config_stamp(spec, state):
        yield Change(CONFIG, config, "read by this transformers", "not read yet")


def config_stamp(spec: NodeSpec, state: NodeState) -> str:
    """What a config that could be read is recorded under."""
    seen = state.model.config_sha256 if state.model else None
    return digest([spec.lock.sha256, spec.data.python, spec.config_proofs, seen])


def _launchers(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    yield from _file_changes(LAUNCHERS, spec.scripts, state)
    for change in _file_changes(LAUNCHERS, spec.secret_files, state):
        yield Change(LAUNCHERS, change.what, "the secrets of this machine, mode 0600", "absent or others")
    for path in stale_scripts(spec, state):
        yield Change(LAUNCHERS, path, "absent", "a file of no tier of this ladder")


def stale_scripts(spec: NodeSpec, state: NodeState) -> list[str]:
    """Launch scripts on the node that no tier of the ladder has, and secrets that are no longer declared."""
    declared = {file.path for file in (*spec.scripts, *spec.secret_files)}
    paths = [f"{spec.paths.launch}/{name}" for name in state.launch_scripts]
    paths += [path for path in (spec.paths.secrets_file, spec.paths.secrets_env) if state.files.get(path)]
    return [path for path in paths if path not in declared]


def manager(spec: NodeSpec, state: NodeState) -> str:
    """Who keeps the server on this node: `systemd` where PID 1 is systemd and we may ask it, else `supervisor`."""
    if spec.data.supervisor != "auto":
        return spec.data.supervisor
    return "systemd" if state.systemd and state.uid == 0 else "supervisor"


def keeper(spec: NodeSpec, state: NodeState) -> str:
    """The same with the unit's name: `supervisor`, or `unit sglang-server`."""
    return _keeper(manager(spec, state), spec.data.unit)


def _keeper(manager: str | None, unit: str | None) -> str:
    return f"unit {unit}" if manager == "systemd" else str(manager)


def manager_files(spec: NodeSpec, state: NodeState) -> tuple[NodeFile, ...]:
    """What the node's supervisor is configured by."""
    return spec.manager_files(manager(spec, state))


def stale_managers(spec: NodeSpec, state: NodeState) -> list[str]:
    """What of another supervisor than the node's is left, by its configuration: it would start a server of its own."""
    kept = manager(spec, state)
    stale = [f"unit {unit}" for unit in state.server.units if kept != "systemd" or unit != spec.data.unit]
    if kept == "systemd" and state.files.get(spec.paths.supervisor_conf):
        stale.append(spec.paths.supervisor_conf)
    return stale


def _configure(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    if manager(spec, state) == "systemd":
        for path, owner in (("systemd's", state.unit_owner), ("logrotate's", state.logrotate_owner)):
            if owner not in (None, spec.paths.root):
                whose = f"of gpuwright's root {owner}" if owner else "not of gpuwright"
                problem = f"{path} {spec.data.unit} is {whose}\n    -> set another `unit` in group_data"
                yield Change(CONFIGURE, problem, blocked=True)
                return
    yield from _file_changes(CONFIGURE, manager_files(spec, state), state)


def _file_changes(step: str, files: Iterable[NodeFile], state: NodeState) -> Iterable[Change]:
    for file in files:
        seen = state.files.get(file.path)
        if seen is None:
            yield Change(step, file.path, f"sha256 {file.sha256[:12]}", "absent")
        elif seen.sha256 != file.sha256:
            yield Change(step, file.path, f"sha256 {file.sha256[:12]}", seen.sha256[:12])
        elif seen.mode != file.mode:
            yield Change(step, file.path, f"mode {file.mode:04o}", f"mode {seen.mode:04o}")


def runs_on(spec: NodeSpec, state: NodeState) -> dict[str, str]:
    """What the server depends on, as found on the node now: the server is restarted when one of these differs from
    what it was started on. Each value identifies an event (verified when, probed when) or a content.
    """

    def stamp(name: str) -> str:
        found = state.stamps.get(name) or {}
        return f"{found.get('value', '')}@{found.get('at', '')}"

    def content(*paths: str) -> str:
        seen = [state.files.get(path) for path in paths]
        return ",".join(file.sha256 if file else "absent" for file in seen)

    unit = manager_files(spec, state)[0]
    fetched = (state.model_manifest or {}).get("files", {}) if isinstance(spec.data.model, HubModel) else {}
    model = {
        name: [file.size, file.sha256 or fetched.get(name, {}).get("sha256") or fetched.get(name, {}).get("blob")]
        for name, file in (state.model.files if state.model else {}).items()
    }
    if state.model and isinstance(spec.data.model, FolderModel):  # nobody hashes it: told by size and time of writing
        model |= {name: [file.size, file.mtime_ns] for name, file in state.model.files.items()}
    return {
        "runtime": stamp("runtime"),
        "patches": stamp("patches") if spec.patch_proofs else f"none@{spec.patch_set_digest}",
        "launch script": content(spec.active_script.path),
        "supervisor's configuration": content(unit.path),
        "secrets": digest(content(spec.paths.secrets_file, spec.paths.secrets_env)),
        "model": digest(model),
    }


def server_actions(spec: NodeSpec, state: NodeState) -> list[str]:
    """What files/node/server.py must do on a node in `state`, in order; nothing where the active tier serves.

    A server that its supervisor has started again by itself, from the same things, is taken over and awaited.
    """
    server = state.server
    record = server.record or {}
    kept = _keeper(server.manager, server.unit) == keeper(spec, state) and server.pid is not None
    if not kept or record.get("runs_on") != runs_on(spec, state) or server.orphans:
        return ["stop", "start", "wait"]
    stale = ["retire"] if stale_managers(spec, state) else []
    if server.pid != record.get("pid"):
        return [*stale, "adopt", "wait"]
    if not record.get("ready_at"):
        return [*stale, "wait"]
    return stale if server.health == 200 else ["stop", "start", "wait"]


def _server(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    server, tier = state.server, spec.tier.name
    record = server.record or {}
    causes = {
        "runtime": (VENV, SYNC, STUB, VERIFY),
        "patches": (APPLY, PROBE),
        "model": (MODEL,),
        "launch script": (LAUNCHERS,),
        "supervisor's configuration": (CONFIGURE,),
    }
    pending = [name for name, steps in causes.items() if _has(before, *steps)]
    run_from = {file.path for file in (spec.active_script, *spec.secret_files, *manager_files(spec, state))}
    for name, step in (("launch script", LAUNCHERS), ("supervisor's configuration", CONFIGURE)):
        if name in pending and not any(c.step == step and c.what in run_from for c in before):
            pending.remove(name)  # other files of that step change
    if "start" in server_actions(spec, state) or pending:
        to_come = [change.what.partition(":")[0] for change in before if change.step == SETTINGS and not change.blocked]
        stopping = without(examine_node(spec, state), to_come)
        if stopping:
            yield Change(SERVER, f"not started:\n{stop_text(stopping)}", blocked=True)
            return
        if isinstance(spec.data.model, HubModel) and not _has(before, MODEL):
            unfetched = list(_hub_model(spec, state, spec.data.model))
            if unfetched:
                what = f"not started: the model is not whole: {unfetched[0]}\n    -> run the model stage too"
                yield Change(SERVER, what, blocked=True)
                return
    for what in stale_managers(spec, state):
        yield Change(SERVER, what, "absent", f"left of another supervisor than {keeper(spec, state)}")
    for orphan in server.orphans:
        yield Change(SERVER, f"process {orphan.pid} ({orphan.command})", "ended", "left of an earlier server")
    if server.pid is None:
        again = f" after {server.restarts} restarts" if server.restarts else ""
        status = f"not running ({server.status}{again})" if server.status else "not running"
        yield Change(SERVER, f"tier {tier}", "serving", status)
    elif (found := _keeper(server.manager, server.unit)) != (kept := keeper(spec, state)):
        yield Change(SERVER, f"tier {tier}", f"kept by {kept}", f"kept by {found}")
    elif pending:
        yield Change(SERVER, f"restart tier {tier}, because of: {', '.join(pending)}")
    elif record.get("runs_on") != (wanted := runs_on(spec, state)):
        then = record.get("runs_on") or {}
        changed = ", ".join(name for name in wanted if wanted[name] != then.get(name))
        yield Change(SERVER, f"restart tier {tier}, because of what changed since it was started: {changed}")
    elif server.pid != record.get("pid"):
        again = f"pid {server.pid}, started again by {server.manager} after a crash or a reboot"
        yield Change(SERVER, f"take over tier {tier}", f"pid {record.get('pid')}, as started", again)
    elif not record.get("ready_at"):
        yield Change(SERVER, f"await tier {tier}", "ready", f"pid {server.pid} is still loading")
    elif server.health != 200:
        yield Change(SERVER, f"tier {tier}", "/health answers 200", f"{server.health or 'no answer'}")


def restarts(spec: NodeSpec, state: NodeState | None) -> bool:
    """Whether a deploy starts this host's server anew: the other hosts of its cluster then must, too."""
    return state is not None and bool({"stop", "start"} & set(server_actions(spec, state)))


def unused_caches(spec: NodeSpec, state: NodeState) -> list[str]:
    """The JIT caches of other runtime digests."""
    return [name for name in state.caches if name != spec.runtime_digest[:16]]


def _prune(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    for name in unused_caches(spec, state):
        yield Change(PRUNE, f"{spec.paths.cache}/{name}", "absent", "the cache of a runtime no longer declared")


def _record(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    found = (state.state or {}).get("spec_digest")
    if found != spec.spec_digest:
        yield Change(RECORD, "spec", spec.spec_digest[:12], str(found)[:12] if found else "none")


def _smoke(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    levels = ", ".join(str(level) for level in spec.profile.levels)
    if spec.data.smoke == "never" or spec.rank:  # of a cluster, rank 0 answers for all
        return
    deployed = (state.state or {}).get("spec_digest") == spec.spec_digest and not server_actions(spec, state)
    if not deployed and not _has(before, SERVER, RECORD):
        what = f"the server that runs is not tier {spec.tier.name} as it is declared, so it is not measured"
        yield Change(SMOKE, f"{what}\n    -> run the other stages too: leave out --data stages=…", blocked=True)
        return
    digests = (spec.spec_digest, spec.benchmark_digest)
    accepted = [r for r in state.results if (r.spec_digest, r.benchmark_digest) == digests and r.verdict == "accepted"]
    what = f"tier {spec.tier.name} by profile {spec.data.profile}, concurrency {levels}"
    if spec.data.smoke == "always":
        yield Change(SMOKE, f"{what}: asked for by smoke=always")
    elif not accepted:
        yield Change(SMOKE, what, f"an accepted result for spec {spec.spec_digest[:12]}", "none")


def same_version(one: str, other: str) -> bool:
    """Whether two version texts mean the same version (1.0 and 1.0.0 do)."""
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other
