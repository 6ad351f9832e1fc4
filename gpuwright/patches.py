"""Patch states: what a file's hash says about the series."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpuwright.catalogue import PATCHES, Patch
from gpuwright.state import SeenFile


class FileState(Enum):
    """What a patched file's content is, by its hash."""

    PRISTINE = "pristine"
    APPLIED = "applied"
    PARTIAL = "partly applied"
    FOREIGN = "foreign"
    ABSENT = "absent"


@dataclass(frozen=True)
class PatchedFile:
    """A file of the venv and the chain of patches on it: each one's post-image is the next one's pre-image."""

    path: str
    chain: tuple[Patch, ...]

    def state(self, seen: SeenFile | None) -> FileState:
        """The state a file is in."""
        if seen is None:
            return FileState.ABSENT
        if seen.sha256 == self.chain[-1].post_sha256:
            return FileState.APPLIED
        if seen.sha256 == self.chain[0].pre_sha256:
            return FileState.PRISTINE
        if any(seen.sha256 == patch.pre_sha256 for patch in self.chain[1:]):
            return FileState.PARTIAL
        return FileState.FOREIGN

    def request(self) -> dict[str, Any]:
        """This file's part of the request to files/node/patch_files.py."""
        steps = [
            {
                "id": patch.id,
                "pre": patch.pre_sha256,
                "post": patch.post_sha256,
                "diff": (PATCHES / patch.diff).read_text(encoding="utf-8"),
            }
            for patch in self.chain
        ]
        return {"path": self.path, "steps": steps}


def patched_files(patches: tuple[Patch, ...]) -> list[PatchedFile]:
    """The files that a series touches, each with its own chain, in the series' order."""
    chains: dict[str, list[Patch]] = {}
    for patch in patches:
        chains.setdefault(patch.file, []).append(patch)
    return [PatchedFile(path, tuple(chain)) for path, chain in chains.items()]
