"""The locks agree with the stacks, and carry hashes."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpuwright.catalogue import Stack
from gpuwright.errors import GpuwrightError
from gpuwright.lockfile import LOCKS, TOOLS_LOCK, inputs_digest, lock_path, read_lock
from tests.make import catalogue

CASES = [(stack, python) for stack in catalogue().stacks.values() for python in stack.pythons]


@pytest.mark.parametrize(("stack", "python"), CASES, ids=[f"{s.name}-{p}" for s, p in CASES])
def test_a_lock_is_compiled_from_its_stack_as_it_is_now(stack: Stack, python: str) -> None:
    lock = read_lock(lock_path(stack, python))
    assert lock.inputs == inputs_digest(stack, python), "stack and lock disagree: run `make lock`"
    for text in (*stack.requirements, *(override.requirement for override in stack.overrides)):
        requirement = Requirement(text)
        pinned = lock.versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{text}, but the lock has {pinned}: run `make lock`"
    assert lock.versions[stack.engine] == stack.engine_version


@pytest.mark.parametrize("path", [*(lock_path(*case) for case in CASES), TOOLS_LOCK], ids=lambda path: path.stem)
def test_every_pin_has_a_hash(path: object) -> None:
    lock = read_lock(path)  # type: ignore[arg-type]
    entries = re.split(r"^(?=[A-Za-z0-9])", lock.text, flags=re.M)[1:]
    assert len(entries) == len(lock.versions) > 1
    assert all("--hash=sha256:" in entry for entry in entries)


def test_no_lock_is_left_over() -> None:
    assert {path.name for path in LOCKS.iterdir()} == {TOOLS_LOCK.name, *(lock_path(*case).name for case in CASES)}


def test_a_change_of_the_stack_is_noticed() -> None:
    stack, python = CASES[0]
    changed = stack.model_copy(update={"requirements": ["sglang==0.5.10"]})
    assert inputs_digest(changed, python) != inputs_digest(stack, python) != inputs_digest(stack, "3.13")


def test_a_missing_lock_says_what_to_run() -> None:
    with pytest.raises(GpuwrightError, match="does not exist: run `make lock`"):
        read_lock(LOCKS / "no-such.txt")
