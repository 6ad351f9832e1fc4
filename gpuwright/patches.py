"""Patch states: what a file's hash says about the series, and the one thing to do in each state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpuwright.adopt import brought, versions
from gpuwright.catalogue import PATCHES, Patch
from gpuwright.node_module import node_module
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState, SeenFile


class FileState(Enum):
    """What a file of the venv is, by its sha256 and its distribution's version."""

    PRISTINE = "pristine"
    APPLIED = "applied"
    PARTIAL = "partly applied"
    SUPERSEDED = "superseded"  # an earlier or another post-image of ours
    FOREIGN = "foreign"
    ABSENT = "absent"
    WRONG_VERSION = "of a version the patch is not made for"
    FIXED = "of a version that upstream is to have fixed"


class Action(Enum):
    """What is done about a file."""

    NOTHING = "nothing"
    APPLY = "apply the patches from where it stands"
    REDO = "apply the patches to the kept original"
    RESTORE = "put the kept original back"
    FORGET = "forget what it carried"
    REINSTALL = "install its distribution anew, then apply the patches"
    REPLACE = "keep a copy, install its distribution anew, then apply the patches"
    STOP = "stop the host and leave it as it is"


@dataclass(frozen=True)
class PatchedFile:
    """A file that carries, or once carried, patches of ours.

    `chain` holds the patches it should carry, each one's post-image being the next one's pre-image; none means that it
    should be pristine. `known` holds every content of ours it may be found with.
    """

    path: str
    distribution: str
    pristine: str
    chain: tuple[Patch, ...]
    known: frozenset[str]

    @property
    def target(self) -> str:
        """The sha256 the file should have."""
        return self.chain[-1].post_sha256 if self.chain else self.pristine

    @property
    def names(self) -> str:
        """The ids of the chain."""
        return ", ".join(patch.id for patch in self.chain)

    def state(self, seen: SeenFile | None, version: str | None) -> FileState:
        """The state of the file, given its content and its distribution's installed version."""
        if seen is None:
            return FileState.ABSENT
        if self.chain and seen.sha256 == self.target:
            return FileState.APPLIED
        if seen.sha256 == self.pristine:
            return FileState.PRISTINE
        if any(seen.sha256 == patch.pre_sha256 for patch in self.chain):
            return FileState.PARTIAL
        if seen.sha256 in self.known:
            return FileState.SUPERSEDED
        if version is not None and self.chain and not all(patch.covers(version) for patch in self.chain):
            return FileState.WRONG_VERSION
        return FileState.FOREIGN

    def action(self, found: FileState, *, original_kept: bool, replace: bool) -> Action:
        """The one action for a state. `original_kept`: the pristine content lies on the node, by its hash."""
        if found is FileState.FOREIGN:
            return Action.REPLACE if replace else Action.STOP
        if found is FileState.WRONG_VERSION:
            return Action.STOP
        if found is FileState.FIXED:
            return Action.FORGET
        if self.chain:
            redo = Action.REDO if original_kept else Action.REINSTALL
            return {
                FileState.APPLIED: Action.NOTHING,
                FileState.PRISTINE: Action.APPLY,
                FileState.PARTIAL: Action.APPLY,
                FileState.SUPERSEDED: redo,
                FileState.ABSENT: Action.REINSTALL,
            }[found]
        if found is FileState.SUPERSEDED:
            return Action.RESTORE if original_kept else Action.REINSTALL
        return Action.NOTHING  # pristine, as it should be; or absent, with its distribution

    def request(self, action: Action) -> dict[str, Any]:
        """This file's part of the request to files/node/patch_files.py."""
        steps = [
            {"id": patch.id, "pre": patch.pre_sha256, "post": patch.post_sha256, "diff": read_diff(patch)}
            for patch in self.chain
        ]
        return {
            "path": self.path,
            "distribution": self.distribution,
            "pristine": self.pristine,
            "known": sorted(self.known),
            "forget": action is Action.FORGET,
            "steps": steps,
        }


def read_diff(patch: Patch) -> str:
    """The text of a patch's diff."""
    return (PATCHES / patch.diff).read_text(encoding="utf-8")


def patched_files(spec: NodeSpec, manifest: dict[str, dict[str, str]]) -> list[PatchedFile]:
    """Every file that the series touches or that the node's manifest says we have touched, in the series' order."""
    chains: dict[str, list[Patch]] = {}
    for patch in spec.patches:
        chains.setdefault(patch.file, []).append(patch)
    paths = list(dict.fromkeys([*chains, *(patch.file for patch in spec.series), *manifest]))
    files = []
    for path in paths:
        chain = tuple(chains.get(path, ()))
        ours = [patch for patch in spec.series if patch.file == path]
        # What the stack's version of it is: the manifest may still tell of the version before.
        fitting = chain or tuple(patch for patch in ours if patch.covers(spec.lock.versions.get(patch.distribution)))
        before = manifest.get(path, {})
        pristine = fitting[0].pre_sha256 if fitting else before.get("pristine") or ours[0].pre_sha256
        distribution = fitting[0].distribution if fitting else before.get("distribution") or ours[0].distribution
        known = {sha for patch in ours for sha in (patch.post_sha256, *patch.superseded)} | {before.get("post", "")}
        files.append(PatchedFile(path, distribution, pristine, chain, frozenset(known - {"", pristine})))
    return files


@dataclass(frozen=True)
class Decision:
    """A file, the state it was found in, and what follows."""

    file: PatchedFile
    state: FileState
    action: Action


def _made_for(spec: NodeSpec, path: str, version: str) -> bool:
    """Whether an entry of the series, of any status, is made for this version of a file; True for a removed entry."""
    entries = [patch for patch in spec.series if patch.file == path]
    return not entries or any(patch.covers(version) for patch in entries)


def decide(spec: NodeSpec, state: NodeState) -> list[Decision]:
    """What is to be done about each file of the series and the manifest, on a node with a venv."""
    others, found_versions = brought(spec, state), versions(spec, state)
    decisions = []
    for file in patched_files(spec, state.manifest):
        if file.distribution not in found_versions and not file.chain:
            continue  # its distribution is gone, and nothing is wanted of it
        version = found_versions.get(file.distribution)
        found = file.state(state.patched.get(file.path), version)
        if found is FileState.FOREIGN and not file.chain and version and not _made_for(spec, file.path, version):
            if file.path not in state.manifest:
                continue  # of a version that no entry is made for: nothing is wanted of it, and its hash is not ours
            found = FileState.FIXED  # and the manifest still tells of the version before
        replace = spec.data.patches_foreign == "replace"
        action = file.action(found, original_kept=file.pristine in state.originals, replace=replace)
        if action in (Action.REINSTALL, Action.REPLACE) and file.distribution in others:
            action = Action.STOP  # an adopted interpreter is never installed into
        decisions.append(Decision(file, found, action))
    return decisions


def exact_applier() -> Callable[[bytes, bytes], bytes]:
    """`apply_diff` of files/node/unidiff.py: the very code that runs on a node."""
    applier: Callable[[bytes, bytes], bytes] = node_module("unidiff").apply_diff
    return applier
