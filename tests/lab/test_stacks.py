"""The lab moves to another stack and back: whole runtimes, a server that serves, nothing but deploys."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuwright import plan as p
from gpuwright.spec import NodeSpec
from gpuwright.tiers import spec_of
from tests.lab.conftest import Lab, children, ok, sha256
from tests.lab.test_server_drift import check, tree
from tests.lab.test_smoke import SMALL, records
from tests.make import catalogue

OLD, NEW = (spec_of(catalogue(), "lab", None, [], 0, stack) for stack in ("sglang-0.5.9-cu128", "sglang-0.5.12-cu130"))
TO_NEW = ("--data", f"stack={NEW.stack.name}")
FIXED = [patch for patch in NEW.uncovered if patch.distribution == "flashinfer-python"]
MOVED = [p.SYNC, p.VERIFY, p.APPLY, p.PROBE, p.CONFIG, p.LAUNCHERS, p.SERVER, p.PRUNE, p.RECORD]


@pytest.fixture(scope="module")
def node(lab: Lab) -> Lab:
    """The lab on the old stack, measured."""
    ok(lab.deploy(*SMALL))
    return lab


def files(node: Lab) -> dict[str, str]:
    """sha256 of the launch scripts, and of every file that a patch of either stack touches."""
    touched = {patch.file for patch in (*OLD.series, *NEW.series)}
    paths = [*(node.root / "launch").iterdir(), *(node.site / file for file in touched)]
    return {str(path.relative_to(node.root)): sha256(path) for path in paths if path.exists()}


def caches(node: Lab) -> set[str]:
    return {path.name for path in (node.root / "cache").iterdir()}


def accepted(node: Lab, spec: NodeSpec) -> list[dict[str, Any]]:
    """The accepted benchmark records of this stack."""
    return [each for each in records(node) if each["verdict"] == "accepted" and each["stack"] == spec.stack.name]


def serves(node: Lab, spec: NodeSpec) -> None:
    """The node is what this stack says, on disk and in the server's own memory."""
    uv = node.root / "tools" / "bin" / "uv"
    listed = subprocess.run(
        [uv, "pip", "list", "--format=json", "--python", node.venv / "bin" / "python"], capture_output=True, check=True
    ).stdout
    assert {each["name"]: each["version"] for each in json.loads(listed)} == spec.lock.versions
    assert set(json.loads((node.root / "patches" / "applied.json").read_text())) == {each.file for each in spec.patches}
    address = f"http://127.0.0.1:{node.port}"
    assert requests.get(f"{address}/server_info", timeout=30).json()["version"] == spec.lock.versions["sglang"]
    asked = {"input_ids": [[5, 6, 7]], "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    assert requests.post(f"{address}/generate", json=asked, timeout=60).json()[0]["meta_info"]["completion_tokens"] == 4
    assert all(sha256(node.site / patch.file) == patch.post_sha256 for patch in spec.patches)
    loaded = [Path(f"/proc/{pid}/maps").read_text() for pid in (node.pid(), *children(node.pid()))]
    assert any(f"{node.site}/torch/lib/libtorch_cpu.so" in maps for maps in loaded)
    assert not any("(deleted)" in line and str(node.venv) in line for maps in loaded for line in maps.splitlines())


def test_a_whole_stack_replaces_another_under_a_server_and_the_first_comes_back(node: Lab) -> None:
    assert FIXED
    serves(node, OLD)
    first, old_caches = files(node), caches(node)
    assert len(old_caches) == 1 and accepted(node, OLD) and not accepted(node, NEW)

    before, pid = tree(node.root), node.pid()
    code, verdict = check(node, *TO_NEW)
    assert code == 2 and {each.kind for each in verdict.findings} == {"intentional"}, verdict
    assert tree(node.root) == before and node.pid() == pid, "a check changes nothing"

    there = ok(node.deploy(*SMALL, *TO_NEW))
    assert there.changed == [*MOVED, p.SMOKE], "the old runtime's benchmark says nothing about this one"
    for patch in FIXED:
        assert f"{patch.id} is fixed upstream: holds" in there.said
        assert f"{patch.file} without {patch.id}" in there.said, "and its file is the new version's own"
    serves(node, NEW)
    (measured,) = accepted(node, NEW)
    assert measured["packages"]["torch"] == NEW.lock.versions["torch"]
    assert len(caches(node)) == 1 and not caches(node) & old_caches, "no kernel of the old runtime is met again"
    assert files(node).keys() >= {name for name in first if name.startswith("launch/")}
    assert ok(node.deploy(*SMALL, *TO_NEW)).changed == []
    assert check(node, *TO_NEW)[0] == 0

    back = ok(node.deploy(*SMALL))
    assert back.changed == MOVED, "of this runtime there is an accepted result"
    serves(node, OLD)
    assert files(node) == first, "scripts and patched files are the same to the byte"
    assert caches(node) == old_caches
    assert ok(node.deploy(*SMALL)).changed == []
    assert check(node)[0] == 0
