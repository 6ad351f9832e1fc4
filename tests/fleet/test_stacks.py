"""A node that moves from one stack to another and back, by nothing but deploys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from gpuwright.catalogue import Patch
from gpuwright.spec import NodeSpec
from gpuwright.tiers import spec_of
from tests.fleet.conftest import Control, by_name, sessions
from tests.fleet.nodes import Node
from tests.lab.conftest import Run, ok, sha256
from tests.make import catalogue

OLD, NEW = (spec_of(catalogue(), "fleet", None, [], 0, stack) for stack in ("sources-only", "sources-only-0.5.12"))
TO_NEW = ("--data", f"stack={NEW.stack.name}")
ROOT = "opt/gpuwright"
SITE = f"{ROOT}/venv/lib/python{OLD.data.python}/site-packages"
PATCHED = sorted({patch.file for patch in OLD.series})
FIXED = [patch for patch in NEW.uncovered if patch.distribution == "flashinfer-python"]
MOVED = [p.SYNC, p.VERIFY, p.APPLY, p.LAUNCHERS, p.PRUNE, p.RECORD]


@pytest.fixture
def node(three: list[Node]) -> Node:
    return three[0]


@pytest.fixture
def control(node: Node, tmp_path: Path) -> Control:
    found = Control(tmp_path, by_name([node]))
    ok(found.deploy())
    return found


def files(node: Node) -> dict[str, str]:
    """sha256 of the launch scripts, and of every file that the series touches in some version."""
    paths = [*(node.tree / ROOT / "launch").iterdir(), *(node.tree / SITE / name for name in PATCHED)]
    return {str(path.relative_to(node.tree)): sha256(path) for path in paths if path.exists()}


def versions(node: Node) -> dict[str, str]:
    listed = node.run(f"/{ROOT}/tools/bin/uv pip list --format=json --python /{ROOT}/venv/bin/python")
    return {each["name"]: each["version"] for each in json.loads(listed)}


def manifest(node: Node) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((node.tree / ROOT / "patches/applied.json").read_text())
    return found


def kernels_of(node: Node, spec: NodeSpec) -> Path:
    """The folder of a runtime's compiled kernels, as if a server had filled it."""
    folder = node.tree / spec.cache.lstrip("/")
    (folder / "flashinfer").mkdir(parents=True)
    return folder


def as_declared(node: Node, spec: NodeSpec) -> None:
    """The node is what this stack says: its versions, its patches and no other, its scripts."""
    assert versions(node) == spec.lock.versions
    found = files(node)
    for patch in spec.patches:
        assert found[f"{SITE}/{patch.file}"] == patch.post_sha256
    assert set(manifest(node)) == {patch.file for patch in spec.patches}
    for script in spec.scripts:
        assert found[script.path.lstrip("/")] == script.sha256


def said_of(run: Run, patch: Patch) -> list[str]:
    return [line.strip() for line in run.said.splitlines() if f"{patch.file} without {patch.id}" in line]


def test_a_node_moves_to_another_stack_and_back(control: Control, node: Node) -> None:
    first, kernels = files(node), kernels_of(node, OLD)
    as_declared(node, OLD)
    assert FIXED and OLD.cache != NEW.cache
    pristine = {patch.file: patch.pre_sha256 for patch in OLD.patches}

    drift = control.check(*TO_NEW)
    assert drift.code == 2 and {each.kind for each in drift.findings(node.name)} == {"intentional"}, drift.out
    assert files(node) == first, "a check changes nothing"

    there = ok(control.deploy(*TO_NEW))
    assert there.changed == MOVED
    as_declared(node, NEW)
    for patch in FIXED:  # what upstream has fixed is left as upstream has it, and said to be
        assert files(node)[f"{SITE}/{patch.file}"] not in (patch.post_sha256, patch.pre_sha256)
        assert any("forget what it carried" in line for line in said_of(there, patch)), there.said
    second = files(node)
    assert all(first[name] != second[name] for name in first), "no script and no file is as it was"
    assert not kernels.exists() and control.check(*TO_NEW).code == 0
    before = sessions(node)
    assert ok(control.deploy(*TO_NEW)).changed == []
    assert sessions(node) - before <= 1 + 8
    assert set(pristine.values()) <= {path.name for path in (node.tree / ROOT / "patches/originals").iterdir()}

    genuine = files(node)
    node.run(f"sed -i '1i # edited' /{SITE}/{FIXED[0].file}")
    named = control.check(*TO_NEW)
    assert named.code == 2 and FIXED[0].file in named.out, "it is no blind spot in this version"
    assert p.SYNC in ok(control.deploy(*TO_NEW)).changed and files(node) == genuine

    kernels = kernels_of(node, NEW)
    assert control.check().statuses == {node.name: "drift"}
    back = ok(control.deploy())
    assert back.changed == MOVED
    as_declared(node, OLD)
    assert files(node) == first, "scripts and patched files are the same to the byte"
    assert not kernels.exists() and control.check().code == 0
    assert ok(control.deploy()).changed == []


def test_without_patches_each_version_has_its_own_files(control: Control, node: Node) -> None:
    """A patched file whose distribution is upgraded while patches are given up: pristine is the new version's."""
    none = ("--data", "patches=none")
    ok(control.deploy(*TO_NEW, *none))
    for patch in NEW.patches:
        assert files(node)[f"{SITE}/{patch.file}"] == patch.pre_sha256
    assert control.check(*TO_NEW, *none).code == 0
    assert ok(control.deploy(*TO_NEW)).changed[0] == p.APPLY
    as_declared(node, NEW)
    ok(control.deploy(*none))
    for patch in OLD.patches:
        assert files(node)[f"{SITE}/{patch.file}"] == patch.pre_sha256
    ok(control.deploy())
    as_declared(node, OLD)


def test_what_is_known_of_a_tier_is_said_to_be_of_another_stack() -> None:
    def listed(stack: str) -> str:
        command = [sys.executable, "-m", "gpuwright", "tiers", "--ladder", "glm5-nvfp4", "--stack", stack]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    assert "on sglang-0.5.9-cu128 blocked no more, because it was found on others" in listed("sglang-0.5.12-cu130")
