"""The series itself: its states, and what its diff says without a venv."""

from __future__ import annotations

import re

import pytest

from gpuwright.catalogue import PATCHES
from gpuwright.patches import FileState, PatchedFile, patched_files
from gpuwright.state import SeenFile
from tests.make import catalogue

FIRST = catalogue().patches[0]
SECOND = FIRST.model_copy(update={"id": "second", "pre_sha256": FIRST.post_sha256, "post_sha256": "2" * 64})


@pytest.mark.parametrize(
    ("sha256", "one", "both"),
    [
        (FIRST.pre_sha256, FileState.PRISTINE, FileState.PRISTINE),
        (FIRST.post_sha256, FileState.APPLIED, FileState.PARTIAL),
        ("2" * 64, FileState.FOREIGN, FileState.APPLIED),
        ("9" * 64, FileState.FOREIGN, FileState.FOREIGN),
        (None, FileState.ABSENT, FileState.ABSENT),
    ],
)
def test_a_files_hash_says_its_state(sha256: str | None, one: FileState, both: FileState) -> None:
    seen = SeenFile(sha256=sha256, size=1, mode=0o644) if sha256 else None
    assert PatchedFile("f", (FIRST,)).state(seen) is one
    assert PatchedFile("f", (FIRST, SECOND)).state(seen) is both


def test_patches_on_one_file_are_chained_in_order() -> None:
    other = FIRST.model_copy(update={"id": "other", "file": "elsewhere.py"})
    files = patched_files((FIRST, other, SECOND))
    assert [(file.path, [patch.id for patch in file.chain]) for file in files] == [
        (FIRST.file, [FIRST.id, "second"]),
        ("elsewhere.py", ["other"]),
    ]


def test_the_patch_says_what_the_case_it_was_built_from_asked_for() -> None:
    diff = (PATCHES / FIRST.diff).read_text()
    added = [line[1:] for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    text = "\n".join(added)
    assert "if torch.version.cuda is not None:\n        return Version(torch.version.cuda)" in text
    assert re.search(r"# gpuwright: .*Dynamo", text, re.S), "the patched file itself must say why"
    assert "@functools.cache" in diff and "-@functools.cache" not in diff, "the cache decorator stays"
