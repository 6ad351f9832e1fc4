"""An interpreter that someone else keeps: what of the lock it brings, what the venv must hold, what has moved."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from gpuwright.lockfile import Lock
from gpuwright.spec import NodeFile, NodeSpec
from gpuwright.state import NodeState, SeenAdoptedDistribution


def brought(spec: NodeSpec, state: NodeState) -> dict[str, SeenAdoptedDistribution]:
    """What the venv need not hold: distributions of the lock that the adopted interpreter has in the lock's version, or
    in one that `versions` allows; but for those that carry a patch, unless it goes in where they lie.
    """
    adopt = spec.data.adopt
    if adopt is None or state.adopted is None:
        return {}
    patched = set() if adopt.patch_in_place else {patch.distribution for patch in spec.patches}
    return {
        name: seen
        for name, seen in state.adopted.distributions.items()
        if name in spec.lock.versions and name not in patched and _will_do(spec, name, seen.version)
    }


def own_lock(spec: NodeSpec, state: NodeState) -> Lock:
    """What the venv itself must hold: the lock, less what an adopted interpreter brings."""
    return spec.lock.without(brought(spec, state))


def versions(spec: NodeSpec, state: NodeState) -> dict[str, str]:
    """The version of each distribution that the server imports, by canonical name."""
    others = {name: seen.version for name, seen in brought(spec, state).items()}
    return others | (state.venv.distributions if state.venv else {})


def _will_do(spec: NodeSpec, name: str, version: str) -> bool:
    wanted = _wanted(spec, name)
    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _wanted(spec: NodeSpec, name: str) -> str:
    """What is declared, or the lock's version without a local part ("+cu130"): a specifier without one allows any."""
    assert spec.data.adopt is not None
    return spec.data.adopt.versions.get(name) or f"=={spec.lock.versions[name].partition('+')[0]}"


def problems(spec: NodeSpec, state: NodeState) -> list[str]:
    """What keeps the interpreter from being adopted, each with a remedy."""
    adopt, seen = spec.data.adopt, state.adopted
    if adopt is None:
        return []
    if seen is None:
        return [f"{adopt.interpreter} cannot be run\n    -> name one that is there as `adopt` in group_data"]
    if ".".join(seen.python.split(".")[:2]) != spec.data.python:
        remedy = f'python = "{".".join(seen.python.split(".")[:2])}", or adopt another'
        return [f"{adopt.interpreter} is Python {seen.python}, not {spec.data.python}\n    -> {remedy}"]
    found = []
    for name, specifier in adopt.versions.items():
        there = seen.distributions.get(name)
        if there is None or not _will_do(spec, name, there.version):
            has = f"has {name} {there.version}" if there else f"lacks {name}"
            remedy = f"have it installed there, or change `adopt.versions` in group_data (now {specifier})"
            found.append(f"{adopt.interpreter} {has}\n    -> {remedy}")
    return found


def moved(spec: NodeSpec, state: NodeState) -> dict[str, tuple[str, str]]:
    """{name: (as it was adopted, as it is found)} of what the interpreter brings, and what of it was changed since."""
    before = state.adopted_before or {}
    if spec.data.adopt is None or before.get("interpreter") != spec.data.adopt.interpreter:
        return {}  # it is the group that names another
    kept, now, found = before.get("distributions"), brought(spec, state), {}
    for name, row in kept.items() if isinstance(kept, dict) else ():
        if name in now and row != [now[name].version, now[name].content]:
            was, seen = f"{row[0]}, as it was adopted", now[name]
            newest = f" ({seen.newest} was written last)" if seen.newest else ""
            found[name] = (was, f"{seen.version}, other files{newest}" if row[0] == seen.version else seen.version)
    return found


def bridge(spec: NodeSpec, state: NodeState) -> NodeFile | None:
    """What makes the venv see the interpreter's distributions, after its own: a .pth file, which Python's site module
    reads at start (https://docs.python.org/3/library/site.html). Folders alone, also those that .pth files of what is
    brought name: these are not run themselves, since they may hold any code. (One that was seen writes a proxy's
    certificate into certifi, which is ours.)
    """
    if spec.data.adopt is None or state.adopted is None:
        return None
    lines = [f"# Written by gpuwright, so that what {spec.data.adopt.interpreter} has is seen here."]
    lines += state.adopted.sites
    lines += sorted(folder for seen in brought(spec, state).values() for folder in seen.folders)
    return NodeFile(spec.paths.bridge(spec.data.python), "".join(f"{line}\n" for line in lines))


def record(spec: NodeSpec, state: NodeState) -> NodeFile | None:
    """What is kept on the node of what was adopted: {"interpreter", "python", "distributions": {name: [version, digest
    over its files]}}.
    """
    if spec.data.adopt is None or state.adopted is None:
        return None
    rows = {name: [seen.version, seen.content] for name, seen in sorted(brought(spec, state).items())}
    kept = {"interpreter": spec.data.adopt.interpreter, "python": state.adopted.python, "distributions": rows}
    return NodeFile(spec.paths.adopted, json.dumps(kept, indent=1, sort_keys=True) + "\n")


def on_record(spec: NodeSpec, state: NodeState) -> bool:
    """Whether what is adopted is what the node's record says."""
    wanted = record(spec, state)
    found: dict[str, Any] | None = state.adopted_before
    return found == (json.loads(wanted.text) if wanted else None)


def site_of(spec: NodeSpec, state: NodeState, distribution: str) -> str:
    """The folder in which a distribution lies, or will."""
    other = brought(spec, state).get(distribution)
    return other.site if other else state.venv.site if state.venv else spec.paths.venv


def content(spec: NodeSpec, state: NodeState) -> Iterable[str]:
    """What of the interpreter the server loads: a line for each distribution that it brings."""
    return [f"{name} {seen.content}" for name, seen in sorted(brought(spec, state).items())]
