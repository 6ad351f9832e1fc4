"""The difference between what a node should be and what it is: a list of changes. Pure; no pyinfra, no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from gpuwright.adopt import bridge, brought, content, moved, on_record, own_lock, problems, site_of, versions
from gpuwright.checks import Examination, stop_text
from gpuwright.hostdata import FolderModel, HubModel, TinyModel
from gpuwright.patches import Action, Decision, FileState, decide, patched_files
from gpuwright.preflight import before_install, examination, without
from gpuwright.spec import NodeFile, NodeSpec, digest, file_value, mode_text
from gpuwright.state import NodeState
from gpuwright.system import Declared, files, gaps, stale
from gpuwright.wheelhouse import MB, Gathered, Wheel, named_by, number_of, remedy
from gpuwright.yamlfile import shown

CANARY = "preflight | ask the canary"
PREFLIGHT = "preflight | check the node"
FOLDERS = "system | create the node's folders"
SETTINGS = "system | set what the host needs"
WHEELS = "runtime | bring wheels"
TOOLS = "runtime | install uv and supervisor"
VENV = "runtime | create the venv"
ADOPT = "runtime | adopt an interpreter"
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
    """One difference. A `blocked` one cannot be mended by deploying: it stops the host, and `what` says why. Of an
    `unknown` one it could not be observed whether it is one.

    One that `follows` is no difference yet: it will be one, once the changes before it are made. `keys` names what of
    NodeSpec.declared it is about, and `holds` what the node has of it in the same notation ("": nothing), where that
    can be told: by them gpuwright.drift tells who has moved, the node or the repository.
    """

    step: str
    what: str
    expected: str = ""
    found: str = ""
    blocked: bool = False
    unknown: bool = False
    follows: bool = False
    keys: tuple[str, ...] = ()
    holds: str | None = None

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
        ("runtime", _wheels), ("runtime", _tools), ("runtime", _venv), ("runtime", _adopt), ("runtime", _sync),
        ("runtime", _stub), ("runtime", _verify),
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
    if state.unreadable:
        yield unread(state)
    stopping = before_install(spec, examine_node(spec, state))
    if stopping:
        yield Change(PREFLIGHT, stop_text(stopping), blocked=True)
    lacking = lacking_wheels(spec, state) if "runtime" in spec.data.stages else ""
    if lacking:
        yield Change(PREFLIGHT, lacking, blocked=True)


def unread(state: NodeState) -> Change:
    """That this user may not read what a deploy has written, so that nothing else can be said of it."""
    what = f"{_few(state.unreadable)} cannot be read by uid {state.uid}"
    return Change(PREFLIGHT, f"{what}\n    -> run as its owner, or with _sudo", blocked=True, unknown=True)


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
        keys = tuple(f"folder {path}" for path in absent)
        what = f"{spec.paths.root} and {len(absent) - 1} folders in it"
        yield Change(FOLDERS, what, "there", "absent", keys=keys, holds="")
        return
    for path, mode in spec.paths.folders.items():
        seen = state.folders.get(path)
        found = f"mode {mode_text(seen.mode)}" if seen else "absent"
        if seen is None or seen.mode != mode:
            holds = mode_text(seen.mode) if seen else ""
            yield Change(FOLDERS, path, f"mode {mode_text(mode)}", found, keys=(f"folder {path}",), holds=holds)


def _settings(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    problem = settings_problem(spec, state)
    if problem:
        yield Change(SETTINGS, problem, blocked=True)
        return
    old = stale(spec.system, state.system_manifest or {})
    for gap in gaps(spec.system, state.readings, state.problems):
        if gap.blocked:
            remedy = f"make it so by hand, or take {gap.id} out of `system` in group_data"
            what = f"{gap.id}: {gap.what}: {gap.blocked}\n    -> {remedy}"
            keys = (f"setting {gap.id}",)
            yield Change(SETTINGS, what, blocked=True, unknown=gap.unknown, keys=keys)
        else:
            yield Change(SETTINGS, f"{gap.id}: {gap.what}", gap.expected, gap.found, keys=(f"setting {gap.id}",))
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
            what = f"{each.id}: on record, with what was there before"
            yield Change(SETTINGS, what, "yes", "no", keys=(f"setting {each.id}",))
    for name, entry in old.items():
        found = f"{entry.get('value') or 'set'} by us"
        yield Change(SETTINGS, f"{name}: {entry['target']}", "as it was before", found, keys=(f"setting {name}",))
    for path in stale_files(spec, state):
        found = "a file of settings that are no longer declared"
        yield Change(SETTINGS, path, "absent", found, keys=(f"file {path}",))


def settings_problem(spec: NodeSpec, state: NodeState) -> str | None:
    """What keeps this deploy from setting anything of the host, or None."""
    manifest = state.system_manifest
    if manifest is None:
        return (
            f"{spec.system_manifest} cannot be read, and it says what was there before us\n"
            "    -> restore it, or remove it: then what is set now counts as what was there"
        )
    if not spec.system and not manifest.get("settings") and not manifest.get("files"):
        return None
    if state.uid != 0 and not spec.data.settings_sudo:
        return (
            "settings of the host are set by root\n"
            "    -> set settings_sudo = True (sudo for these alone) or _sudo, or leave `system` empty in group_data"
        )
    folder = state.folders.get(spec.settings_folder)
    if folder and folder.uid != 0:
        return (
            f"{spec.settings_folder} belongs to uid {folder.uid}, and what lies there would be run by root at boot\n"
            f"    -> chown -R root {spec.settings_folder}"
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


def _needed(spec: NodeSpec, state: NodeState) -> list[tuple[Gathered, str]]:
    """The distributions that this deploy installs, each with what the wheelhouse has of its lock."""
    if not spec.data.wheelhouse or problems(spec, state):  # what cannot be adopted stops the host first
        return []
    tools = list(spec.tools_lock.versions) if list(_tools(spec, state, [])) else []
    anew: set[str] = set()
    if "patches" in spec.data.stages and state.venv:
        again = (Action.REPLACE, Action.REINSTALL)
        anew = {each.file.distribution for each in decide(spec, state) if each.action in again}
    whole = bool(list(_venv(spec, state, [])))
    coming = anew.union(to_install(spec, state))
    names = [name for name in own_lock(spec, state).versions if whole or name in coming]
    return [(spec.tools_wheels, name) for name in tools] + [(spec.stack_wheels, name) for name in names]


def needed_wheels(spec: NodeSpec, state: NodeState) -> list[Wheel]:
    """The wheels of what this deploy installs, as far as this machine has them."""
    return [found.wheels[name] for found, name in _needed(spec, state) if name in found.wheels]


def wheels_to_send(spec: NodeSpec, state: NodeState) -> list[Wheel]:
    """Those of them that the node does not have."""
    return [wheel for wheel in needed_wheels(spec, state) if state.wheels.get(wheel.file) != wheel.size]


def lacking_wheels(spec: NodeSpec, state: NodeState) -> str:
    """What is needed and not in this machine's wheelhouse, with the remedy; "" where nothing is."""
    here = [f"{name} {found.lacking[name]}" for found, name in _needed(spec, state) if name in found.lacking]
    if not here:
        return ""
    command = remedy(spec.stack, spec.data.python, spec.wheelhouse)
    return f"{shown(spec.wheelhouse)} on this machine lacks {number_of(here)}: {_few(here)}\n    -> {command}"


def stale_wheels(spec: NodeSpec, state: NodeState) -> list[str]:
    """What lies among the node's wheels and is none of its locks'; all of it where it is installed from an index."""
    locks = [spec.lock, spec.tools_lock] if spec.data.wheelhouse else []
    bare = {name: name.removeprefix("parts/").removesuffix(".part") for name in state.wheels}
    return [name for name in state.wheels if not named_by(bare[name], locks)]


def _wheels(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    lacking = lacking_wheels(spec, state)
    if lacking:
        yield Change(WHEELS, lacking, blocked=True, follows=True)  # what it is needed for is what differs
    sending, stale = wheels_to_send(spec, state), stale_wheels(spec, state)
    if sending:
        parts = [state.wheels.get(f"parts/{wheel.file}.part", 0) for wheel in sending]
        found = f"{sum(parts) / MB:.1f} MB of them" if any(parts) else "absent"
        tools = {wheel.file for wheel in spec.tools_wheels.wheels.values()}
        keys = [f"{'tool' if wheel.file in tools else 'distribution'} {wheel.distribution}" for wheel in sending]
        what = f"{number_of(sending)}, {sum(wheel.size for wheel in sending) / MB:.1f} MB"
        yield Change(WHEELS, what, f"in {spec.paths.wheels}", found, keys=tuple(keys))
    if stale:
        size = sum(state.wheels[name] for name in stale) / MB
        yield Change(WHEELS, f"{_few(stale)} ({size:.1f} MB)", "absent", "a wheel of no lock", keys=("wheels",))


def _tools(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    keys = tuple(f"tool {name}" for name in spec.tools_lock.versions)
    if state.tools is None:
        yield Change(TOOLS, spec.paths.tools, "uv and supervisor", "absent", keys=keys, holds="")
        return
    for (name, version), key in zip(spec.tools_lock.versions.items(), keys, strict=True):
        seen = state.tools.distributions.get(name)
        if seen is None or not same_version(seen, version):
            yield Change(TOOLS, name, version, seen or "absent", keys=(key,), holds=seen or "")
        elif name in state.tools.damaged:
            yield Change(TOOLS, name, f"{version}, whole", state.tools.damaged[name], keys=(key,))


def _venv(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    if state.venv is None:
        wanted = f"a venv of Python {spec.data.python}"
        yield Change(VENV, spec.paths.venv, wanted, "absent", keys=("venv",), holds="")
    elif (found := ".".join(state.venv.python.split(".")[:2])) != spec.data.python:
        wanted, seen = f"Python {spec.data.python}", f"Python {state.venv.python}"
        yield Change(VENV, spec.paths.venv, wanted, seen, keys=("venv",), holds=found)


@dataclass(frozen=True)
class Difference:
    """One distribution that is not as the lock says. `version`: what is installed of it ("": nothing)."""

    name: str
    expected: str
    found: str
    version: str


def _differences(spec: NodeSpec, state: NodeState) -> list[Difference]:
    """Every distribution that is missing, extra, of another version, or damaged."""
    seen = state.venv.distributions if state.venv else {}
    damaged = state.venv.damaged if state.venv else {}
    found, wanted = [], own_lock(spec, state).versions
    for name, version in wanted.items():
        if name not in seen:
            found.append(Difference(name, version, "absent", ""))
        elif not same_version(seen[name], version):
            found.append(Difference(name, version, seen[name], seen[name]))
        elif name in damaged:
            found.append(Difference(name, f"{version}, whole", damaged[name], seen[name]))
    found += [Difference(name, "absent", seen[name], seen[name]) for name in seen if name not in wanted]
    return found


def _adopt(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    adopt = spec.data.adopt
    if stopping := problems(spec, state):
        yield from (Change(ADOPT, problem, blocked=True) for problem in stopping)
        return
    for name, (was, found) in moved(spec, state).items():
        keys = (f"adopted {name}",)
        if adopt is not None and adopt.changes == "stop":
            yield Change(ADOPT, _moved(adopt.interpreter, name, was, found), blocked=True, keys=keys)
        else:
            yield Change(ADOPT, name, was, found, keys=keys)
    wanted = bridge(spec, state)
    path, keys = spec.paths.bridge(spec.data.python), ("adopt",)
    there, holds = state.files.get(path), (state.adopted_before or {}).get("interpreter", "")
    if wanted is None and there is not None:
        yield Change(ADOPT, path, "absent", "an interpreter that is no longer adopted", keys=keys, holds=holds)
    elif wanted is not None and (there is None or there.sha256 != wanted.sha256):
        found, follows = "another" if there else "absent", _has(before, VENV)
        yield Change(ADOPT, path, f"sha256 {wanted.sha256[:12]}", found, follows=follows, keys=keys, holds=holds)
    elif not on_record(spec, state) and not moved(spec, state):
        what = f"{len(brought(spec, state))} distributions of {adopt.interpreter if adopt else 'none'}"
        yield Change(ADOPT, what, "on record", "others" if state.adopted_before else "none", keys=keys, holds=holds)


def _moved(interpreter: str, name: str, was: str, found: str) -> str:
    return (
        f"{name} of {interpreter} is not what was adopted\n"
        f"    expected {was}\n"
        f"    found    {found}\n"
        "    -> have its keeper put it back\n"
        '    -> or accept what it is now, with "changes": "accept" in `adopt` of group_data'
    )


def _sync(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    if any(change.step == ADOPT and change.blocked for change in before):
        return
    lock = own_lock(spec, state)
    if _has(before, VENV):
        yield Change(SYNC, f"{len(lock.versions)} distributions to install from the lock", follows=True)
        return
    differences = _differences(spec, state)
    for each in differences:
        keys = (f"distribution {each.name}",)
        yield Change(SYNC, each.name, each.expected, each.found, keys=keys, holds=each.version)
    there, keys = state.files.get(spec.paths.lock_copy), (f"file {spec.paths.lock_copy}",)
    if not differences and (there is None or there.sha256 != lock.sha256):
        found, holds = (there.sha256[:12], there.sha256[:16]) if there else ("absent", "")
        yield Change(SYNC, "the lock on the node", lock.sha256[:12], found, keys=keys, holds=holds)


def to_install(spec: NodeSpec, state: NodeState) -> list[str]:
    """Every distribution of the lock that a sync installs."""
    wanted = own_lock(spec, state).versions
    return sorted(each.name for each in _differences(spec, state) if each.name in wanted)


def damaged_distributions(spec: NodeSpec, state: NodeState) -> list[str]:
    """The distributions that must be installed anew though their version is right."""
    wanted = own_lock(spec, state).versions
    return sorted(name for name in state.venv.damaged if name in wanted) if state.venv else []


def edited_distributions(spec: NodeSpec, state: NodeState) -> list[str]:
    """Those of them with a file of another content, so that what they were installed from may be another, too."""
    damaged = state.venv.damaged if state.venv else {}
    return [name for name in damaged_distributions(spec, state) if not damaged[name].startswith(("lacks ", "has no "))]


def _stub(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    source = spec.cuda_stub_source
    if source is None:
        return
    if state.files.get(spec.paths.cuda_stub) is None:
        yield Change(STUB, spec.paths.cuda_stub, "built", "absent", keys=(f"file {source.path}",))
    else:
        yield from _file_changes(STUB, [source], state)


def _verify(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    ids = ", ".join(proof["id"] for proof in spec.runtime_proofs)
    if _has(before, VENV, ADOPT, SYNC, STUB):
        yield Change(VERIFY, f"{ids}: the runtime changes", follows=True)
    elif _stamp(state, "runtime") != spec.runtime_stamp:
        holds = _stamp(state, "runtime")[:16]
        yield Change(VERIFY, ids, "verified for this lock", "not verified", keys=("proofs",), holds=holds)


def _stamp(state: NodeState, stage: str) -> str:
    """What a stage was last proved for; "" where it was not."""
    return str((state.stamps.get(stage) or {}).get("value") or "")


def _apply(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    if _has(before, VENV):
        for file in patched_files(spec, {}):
            if file.chain:
                found = "pristine, once it is installed"
                yield Change(APPLY, f"{file.path} by {file.names}", "applied", found, follows=True)
        return
    syncing = _has(before, SYNC)
    touched = {difference.name for difference in _differences(spec, state)} if syncing else set()
    for each in decide(spec, state):
        file = each.file
        seen, keys = state.patched.get(file.path), (f"patched {file.path}",)
        holds = seen.sha256[:16] if seen and each.state is not FileState.PRISTINE else ""  # as patches are declared
        wanted, goal = (f"by {file.names}", "applied") if file.chain else ("without patches", "pristine")
        fixed = ", ".join(patch.id for patch in spec.uncovered if patch.file == file.path)
        if fixed and not file.chain:
            wanted, goal = f"without {fixed}", "as upstream has it"
        if each.file.distribution in touched:
            if fixed and file.path in state.manifest:
                said = "patched; its distribution is installed first"
                yield Change(APPLY, f"{file.path} {wanted}", goal, said, follows=True)
            elif file.chain:
                done, so = each.action is Action.NOTHING, "its distribution is installed first"
                said = so if done else f"{each.state.value}; {so}"
                yield Change(APPLY, f"{file.path} {wanted}", goal, said, follows=done, keys=keys, holds=holds)
        elif each.action is Action.STOP:
            yield Change(APPLY, _refusal(spec, state, each), blocked=True, keys=keys, holds=holds)
        elif each.action is not Action.NOTHING:
            said = f"{each.state.value}; {each.action.value}"
            yield Change(APPLY, f"{file.path} {wanted}", goal, said, keys=keys, holds=holds)


def stopped_files(spec: NodeSpec, state: NodeState) -> list[Decision]:
    """The foreign files that stop the host."""
    return [d for d in decide(spec, state) if d.action is Action.STOP and d.state is FileState.FOREIGN]


def _refusal(spec: NodeSpec, state: NodeState, each: Decision) -> str:
    file = each.file
    seen = state.patched.get(file.path)
    site = site_of(spec, state, file.distribution)
    if file.distribution in brought(spec, state) and each.state is not FileState.WRONG_VERSION:
        return (
            f"{site}/{file.path} is {each.state.value}, in an interpreter that is adopted and never installed into\n"
            f"    -> have its keeper put back the file of {file.distribution}, or leave out `patch_in_place`"
        )
    if each.state is FileState.WRONG_VERSION:
        version = versions(spec, state).get(file.distribution)
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
        yield Change(PROBE, f"{ids}: patched files change", follows=True)
    elif _has(before, ADOPT):
        yield Change(PROBE, f"{ids}: what is adopted changes", follows=True)
    elif _stamp(state, "patches") != spec.patches_stamp:
        holds = _stamp(state, "patches")[:16]
        yield Change(PROBE, ids, "probed for this patch set", "not probed", keys=("probes",), holds=holds)


def _model(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    for change in _model_changes(spec, state):
        yield replace(change, keys=("model",))


def _model_changes(spec: NodeSpec, state: NodeState) -> Iterable[Change]:
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
    if not spec.config_proofs:
        return
    if _has(before, MODEL, ADOPT):
        changes = "the model" if _has(before, MODEL) else "what is adopted"
        yield Change(CONFIG, f"{config}: {changes} changes", follows=True)
    elif _stamp(state, "config") != config_stamp(spec, state):
        wanted, to_come = "read by this transformers", _has(before, VENV, SYNC)
        yield Change(CONFIG, config, wanted, "not read yet", follows=to_come, keys=("config",))


def config_stamp(spec: NodeSpec, state: NodeState) -> str:
    """What a config that could be read is recorded under."""
    seen = state.model.config_sha256 if state.model else None
    return digest([spec.lock.sha256, spec.data.python, spec.config_proofs, seen])


def _launchers(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    yield from _file_changes(LAUNCHERS, spec.scripts, state)
    for change in _file_changes(LAUNCHERS, spec.secret_files, state):
        yield replace(change, expected="the secrets of this machine, mode 0600", found="absent or others")
    for path in stale_scripts(spec, state):
        yield Change(LAUNCHERS, path, "absent", "a file of no tier of this ladder", keys=(f"file {path}",))


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
    for path in state.server.dropins:
        problem = f"{path} changes the unit, and is not of gpuwright"
        yield Change(CONFIGURE, f"{problem}\n    -> systemctl revert {state.server.unit}", blocked=True)
    yield from _file_changes(CONFIGURE, manager_files(spec, state), state)


def _file_changes(step: str, files: Iterable[NodeFile], state: NodeState) -> Iterable[Change]:
    for file in files:
        seen, keys = state.files.get(file.path), (f"file {file.path}",)
        if seen is None:
            yield Change(step, file.path, f"sha256 {file.sha256[:12]}", "absent", keys=keys, holds="")
            continue
        holds = file_value(seen.sha256, seen.mode)
        if seen.sha256 != file.sha256:
            wanted, found = f"sha256 {file.sha256[:12]}", seen.sha256[:12]
            yield Change(step, file.path, wanted, found, keys=keys, holds=holds)
        elif seen.mode != file.mode:
            wanted, found = (f"mode {mode_text(mode)}" for mode in (file.mode, seen.mode))
            yield Change(step, file.path, wanted, found, keys=keys, holds=holds)


INSTALLED, TIMES = "installed files", "times of the installed files"  # two of what a server runs on


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
        INSTALLED: _installed(spec, state),
        TIMES: state.venv.installed.times if state.venv else "absent",
    }


def _installed(spec: NodeSpec, state: NodeState) -> str:
    own = state.venv.installed.content if state.venv else "absent"
    in_place = [f"{path} {seen.sha256}" for path, seen in state.patched.items() if seen] if spec.data.adopt else []
    return digest([own, *content(spec, state), *in_place]) if spec.data.adopt else own


def server_actions(spec: NodeSpec, state: NodeState) -> list[str]:
    """What files/node/server.py must do on a node in `state`, in order; nothing where the active tier serves.

    A server that its supervisor has started again by itself, from the same things, is taken over and awaited.
    """
    server = state.server
    record = server.record or {}
    if not spec.data.serve:
        stopped = ["stop", "shut_down"] if server.pid or server.orphans or server.enabled else []
        return [*stopped, *(["retire"] if stale_managers(spec, state) else [])]
    kept = _keeper(server.manager, server.unit) == keeper(spec, state) and server.pid is not None
    if not kept or _changed_since(spec, state) or server.orphans or server.differs:
        return ["stop", "start", "wait"]
    stale = ["retire"] if stale_managers(spec, state) else []
    if server.enabled is False or server.stale:
        stale.append("enable")
    if server.pid != record.get("pid"):
        return [*stale, "adopt", "wait"]
    if not record.get("ready_at"):
        return [*stale, "wait"]
    return stale if server.health == 200 else ["stop", "start", "wait"]


def _server(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    causes = {
        "runtime": (VENV, ADOPT, SYNC, STUB, VERIFY),
        "patches": (APPLY, PROBE),
        "model": (MODEL,),
        "launch script": (LAUNCHERS,),
        "secrets": (LAUNCHERS,),
        "supervisor's configuration": (CONFIGURE,),
    }
    pending = [name for name, steps in causes.items() if _has(before, *steps)] if spec.data.serve else []
    pending = [name for name in pending if not _as_started(spec, state, name)]
    run_from = {
        "launch script": {spec.active_script.path},
        "secrets": {spec.paths.secrets_file, spec.paths.secrets_env},
        "supervisor's configuration": {file.path for file in manager_files(spec, state)},
    }
    for name in run_from.keys() & set(pending):
        if not any(change.step in causes[name] and change.what in run_from[name] for change in before):
            pending.remove(name)  # other files of that step change
    for what in stale_managers(spec, state):
        found = f"left of another supervisor than {keeper(spec, state)}"
        yield Change(SERVER, what, "absent", found, keys=_kept_by(spec, state))
    for orphan in state.server.orphans:
        yield Change(SERVER, f"process {orphan.pid} ({orphan.command})", "ended", "left of an earlier server")
    yield from _serving(spec, state, pending) if spec.data.serve else _idle(spec, state)
    if "start" in server_actions(spec, state) or pending:
        to_come = [change.what.partition(":")[0] for change in before if change.step == SETTINGS and not change.blocked]
        stopping = without(examine_node(spec, state), to_come)
        if stopping:
            yield Change(SERVER, f"not started:\n{stop_text(stopping)}", blocked=True, follows=True)
        elif isinstance(spec.data.model, HubModel) and not _has(before, MODEL):
            unfetched = list(_hub_model(spec, state, spec.data.model))
            if unfetched:
                what = f"not started: the model is not whole: {unfetched[0]}\n    -> run the model stage too"
                yield Change(SERVER, what, blocked=True, follows=True)


def _kept_by(spec: NodeSpec, state: NodeState) -> tuple[str]:
    """What of NodeSpec.declared says who keeps the server: the unit's name where only that is another."""
    return ("unit",) if state.server.manager == manager(spec, state) else ("supervisor",)


def _as_started(spec: NodeSpec, state: NodeState, name: str) -> bool:
    """Whether the server was started from the very content that is declared of a file, whatever lies there now."""
    declared = {"launch script": spec.active_script, "supervisor's configuration": manager_files(spec, state)[0]}
    then = (state.server.record or {}).get("runs_on") or {}
    return name in declared and then.get(name) == declared[name].sha256


def _changed_since(spec: NodeSpec, state: NodeState) -> list[str]:
    """What of runs_on is another than what the server was started on. A file that was only edited under it is not: the
    step that the file belongs to puts it back. When installed files were written counts for a server that was started
    by another than a deploy: it may have loaded what nobody sees any more. A record without these two is of an older
    gpuwright, and no reason to restart.
    """
    record, now = state.server.record or {}, runs_on(spec, state)
    then, own = record.get("runs_on") or {}, state.server.pid == record.get("pid")
    known = [name for name in now if name in then or name not in (INSTALLED, TIMES)]
    changed = [name for name in known if now[name] != then.get(name) and not _as_started(spec, state, name)]
    return [name for name in changed if name != TIMES or not (own or INSTALLED in changed)]


def _idle(spec: NodeSpec, state: NodeState) -> Iterable[Change]:
    """What keeps a node that is not to serve from being idle."""
    server, record = state.server, state.server.record or {}
    if server.pid is not None:
        found = f"tier {record.get('tier')}, pid {server.pid}"
        yield Change(SERVER, "the server", "none: serve is False", found, keys=("serve",))
    elif server.enabled:
        yield Change(SERVER, f"unit {server.unit}", "not started at boot", "enabled", keys=("serve",))


def _serving(spec: NodeSpec, state: NodeState, pending: list[str]) -> Iterable[Change]:
    """What keeps the active tier from serving as declared. `pending`: what of it this deploy changes."""
    server, tier = state.server, spec.tier.name
    record = server.record or {}
    changed = [name for name in _changed_since(spec, state) if name not in pending]
    if server.pid is None:
        again = f" after {server.restarts} restarts" if server.restarts else ""
        status = f"not running ({server.status}{again})" if server.status else "not running"
        yield Change(SERVER, f"tier {tier}", "serving", status, keys=("serve",))
        return
    if (found := _keeper(server.manager, server.unit)) != (kept := keeper(spec, state)):
        yield Change(SERVER, f"tier {tier}", f"kept by {kept}", f"kept by {found}", keys=_kept_by(spec, state))
        return
    if pending or changed:
        said = ", ".join(dict.fromkeys([*pending, *changed]))
        if INSTALLED in changed and state.venv:
            said = said.replace(INSTALLED, f"{INSTALLED} ({state.venv.installed.newest} was written last)")
        of = "" if pending else " what changed since it was started"
        what = f"restart tier {tier}, because of{of}: {said}"
        yield Change(SERVER, what, follows=not changed, keys=_moved_by(spec, state, changed))
    differs = server.differs and not {"launch script", "secrets"} & {*pending, *changed}  # it would follow from these
    if differs:
        found = "; ".join(server.differs[:4]) + (f" and {len(server.differs) - 4} more" if server.differs[4:] else "")
        yield Change(SERVER, f"tier {tier}, pid {server.pid}", "what its launch script starts", found)
    restarted = pending or changed or differs  # after which none of the following is so
    if not restarted and server.pid != record.get("pid"):
        again = f"pid {server.pid}, started again by {server.manager} after a crash or a reboot"
        yield Change(SERVER, f"take over tier {tier}", f"pid {record.get('pid')}, as started", again)
    elif not restarted and not record.get("ready_at"):
        yield Change(SERVER, f"await tier {tier}", "ready", f"pid {server.pid} is still loading")
    elif not restarted and server.health != 200:
        yield Change(SERVER, f"tier {tier}", "/health answers 200", f"{server.health or 'no answer'}")
    if server.enabled is False:
        yield Change(SERVER, f"unit {server.unit}", "started at boot", "not enabled")
    if server.stale:
        yield Change(SERVER, f"unit {server.unit}", "read from its file", "written since systemd read it")


def _moved_by(spec: NodeSpec, state: NodeState, changed: list[str]) -> tuple[str, ...]:
    """What of NodeSpec.declared stands for each reason to restart a server."""
    other = (state.server.record or {}).get("tier") != spec.tier.name
    keys = {
        "runtime": ["proofs"],
        "patches": ["probes"],
        "launch script": ["tier" if other else f"file {spec.active_script.path}"],
        "supervisor's configuration": ["tier" if other else f"file {manager_files(spec, state)[0].path}"],
        "secrets": [f"file {file.path}" for file in spec.secret_files],
        "model": ["model"],
        INSTALLED: [] if {"runtime", "patches"} & set(changed) else [INSTALLED],  # a new runtime writes files
        TIMES: [TIMES],
    }
    return tuple(key for name in changed for key in keys[name])


def restarts(spec: NodeSpec, state: NodeState | None) -> bool:
    """Whether a deploy starts this host's server anew: the other hosts of its cluster then must, too."""
    return state is not None and "start" in server_actions(spec, state)


def unused_caches(spec: NodeSpec, state: NodeState) -> list[str]:
    """The JIT caches of other runtime digests."""
    return [name for name in state.caches if name != spec.runtime_digest[:16]]


def _prune(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    for name in unused_caches(spec, state):
        found = "the cache of a runtime no longer declared"
        yield Change(PRUNE, f"{spec.paths.cache}/{name}", "absent", found, keys=("cache",), holds=name)


def _record(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    found, to_come = str((state.state or {}).get("spec_digest") or ""), _has(before, *{c.step for c in before})
    if found != spec.spec_digest:
        wanted, said = spec.spec_digest[:12], found[:12] or "none"
        yield Change(RECORD, "spec", wanted, said, follows=to_come, keys=("spec",), holds=found[:16])
        return
    then, now = (flat(each, spec.data.stages) for each in (state.deployed or {}, spec.declared(manager(spec, state))))
    moved = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
    if moved:
        what = f"what is declared: {_few(moved)}"
        yield Change(RECORD, what, "on record", "another" if then else "none", follows=to_come, keys=tuple(moved))


def flat(declared: Mapping[str, Mapping[str, str]], stages: Iterable[str]) -> dict[str, str]:
    """What some stages declare (NodeSpec.declared), in one mapping."""
    return {key: value for stage in stages for key, value in declared.get(stage, {}).items()}


def _smoke(spec: NodeSpec, state: NodeState, before: list[Change]) -> Iterable[Change]:
    levels = ", ".join(str(level) for level in spec.profile.levels)
    if spec.data.smoke == "never" or spec.rank or not spec.data.serve:  # of a cluster, rank 0 answers for all
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
