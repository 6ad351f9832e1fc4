"""The series: every state of a file has one action, and the entries say what they must."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from gpuwright import series
from gpuwright.catalogue import PATCHES, Patch, load_catalogue
from gpuwright.errors import GpuwrightError
from gpuwright.node import observe
from gpuwright.patches import Action, FileState, PatchedFile, decide, exact_applier, patched_files
from gpuwright.plan import APPLY, PROBE, plan
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState, SeenFile
from tests.make import catalogue, gpu_spec, lab_spec, settled_state

FIRST = catalogue().patches[0]
SECOND = FIRST.model_copy(update={"id": "second", "pre_sha256": FIRST.post_sha256, "post_sha256": "2" * 64})
OLD = "0" * 64
KNOWN = frozenset({FIRST.post_sha256, "2" * 64, OLD})
ONE = PatchedFile(FIRST.file, FIRST.distribution, FIRST.pre_sha256, (FIRST,), KNOWN)
BOTH = replace(ONE, chain=(FIRST, SECOND))
NONE = replace(ONE, chain=())


def seen(sha256: str | None) -> SeenFile | None:
    return SeenFile(sha256=sha256, size=1, mode=0o644) if sha256 else None


@pytest.mark.parametrize(
    ("sha256", "one", "both", "none"),
    [
        (FIRST.pre_sha256, FileState.PRISTINE, FileState.PRISTINE, FileState.PRISTINE),
        (FIRST.post_sha256, FileState.APPLIED, FileState.PARTIAL, FileState.SUPERSEDED),
        ("2" * 64, FileState.SUPERSEDED, FileState.APPLIED, FileState.SUPERSEDED),
        (OLD, FileState.SUPERSEDED, FileState.SUPERSEDED, FileState.SUPERSEDED),
        ("9" * 64, FileState.FOREIGN, FileState.FOREIGN, FileState.FOREIGN),
        (None, FileState.ABSENT, FileState.ABSENT, FileState.ABSENT),
    ],
)
def test_a_files_hash_says_its_state(sha256: str | None, one: FileState, both: FileState, none: FileState) -> None:
    assert [file.state(seen(sha256), "0.6.3") for file in (ONE, BOTH, NONE)] == [one, both, none]


def test_an_unknown_content_of_another_version_is_not_called_foreign() -> None:
    assert ONE.state(seen("9" * 64), "0.6.4") is FileState.WRONG_VERSION
    assert ONE.state(seen(FIRST.post_sha256), "0.6.4") is FileState.APPLIED, "the content decides, where it is known"


ACTIONS = {
    # state: (patched file with and without a kept original, file to be pristine with and without one)
    FileState.PRISTINE: (Action.APPLY, Action.APPLY, Action.NOTHING, Action.NOTHING),
    FileState.APPLIED: (Action.NOTHING, Action.NOTHING, Action.NOTHING, Action.NOTHING),
    FileState.PARTIAL: (Action.APPLY, Action.APPLY, Action.NOTHING, Action.NOTHING),
    FileState.SUPERSEDED: (Action.REDO, Action.REINSTALL, Action.RESTORE, Action.REINSTALL),
    FileState.ABSENT: (Action.REINSTALL, Action.REINSTALL, Action.NOTHING, Action.NOTHING),
    FileState.FOREIGN: (Action.STOP, Action.STOP, Action.STOP, Action.STOP),
    FileState.WRONG_VERSION: (Action.STOP, Action.STOP, Action.STOP, Action.STOP),
    FileState.FIXED: (Action.FORGET, Action.FORGET, Action.FORGET, Action.FORGET),
}


@pytest.mark.parametrize("found", FileState)
def test_every_state_has_one_action(found: FileState) -> None:
    cases = product((ONE, NONE), (True, False))
    assert tuple(file.action(found, original_kept=kept, replace=False) for file, kept in cases) == ACTIONS[found]
    replaced = ONE.action(found, original_kept=True, replace=True)
    assert replaced is (Action.REPLACE if found is FileState.FOREIGN else ACTIONS[found][0])


LAB = lab_spec()
SETTLED = settled_state(LAB)


def test_patches_on_one_file_are_chained_in_order() -> None:
    other = FIRST.model_copy(update={"id": "other", "file": "elsewhere.py"})
    spec = replace(LAB, patches=(FIRST, other, SECOND), series=(FIRST, other, SECOND))
    assert [(file.path, file.names) for file in patched_files(spec, {})] == [
        (FIRST.file, f"{FIRST.id}, second"),
        ("elsewhere.py", "other"),
    ]


def with_patched(path: str, sha256: str | None, **changed: object) -> NodeState:
    return SETTLED.model_copy(update={"patched": SETTLED.patched | {path: seen(sha256)}} | changed)


def steps(spec: NodeSpec, state: NodeState) -> list[str]:
    return [str(change) for change in plan(spec, state).of(APPLY)]


def test_a_removed_entry_is_taken_back_by_the_manifest_alone() -> None:
    """As if an entry had been deleted from series.yaml: the node's manifest still says which file, and what it was."""
    entry = {"gone.py": {"pristine": "a" * 64, "post": "b" * 64, "distribution": "sglang"}}
    state = with_patched("gone.py", "b" * 64, manifest=SETTLED.manifest | entry, originals=["a" * 64])
    assert steps(LAB, state) == [
        "gone.py without patches: expected pristine, found superseded; put the kept original back"
    ]
    assert steps(LAB, with_patched("gone.py", "a" * 64, manifest=SETTLED.manifest | entry)) == []


def test_without_patches_every_file_goes_back_and_nothing_is_probed() -> None:
    spec = lab_spec(patches="none")
    changes = steps(spec, SETTLED)
    assert len(changes) == len(LAB.patches) and all("put the kept original back" in change for change in changes)
    assert plan(spec, SETTLED).of(PROBE) == []
    assert spec.patch_set_digest != LAB.patch_set_digest and spec.cache != LAB.cache


OTHER = lab_spec(stack="sglang-0.5.12-cu130")  # the lab's stack moved on; sglang's patches have an entry for each


def moved(spec: NodeSpec, contents: dict[str, str], manifest: dict[str, dict[str, str]]) -> NodeState:
    """A node with this stack's versions, on which these files were found, and whose manifest is this."""
    settled = settled_state(spec)
    found = {path: seen(sha256) for path, sha256 in contents.items()}
    kept = [patch.pre_sha256 for patch in LAB.patches]
    return settled.model_copy(update={"patched": found, "manifest": manifest, "originals": kept})


def test_one_change_has_an_entry_for_each_version() -> None:
    there = {spec.stack.name: {patch.id: patch.versions for patch in spec.patches} for spec in (LAB, OTHER)}
    keys = {"sglang-keys-out-of-the-log", "sglang-keys-out-of-server-info"}
    assert keys <= set(there[LAB.stack.name]) and keys == set(there[OTHER.stack.name])
    assert all(there[LAB.stack.name][name] != there[OTHER.stack.name][name] for name in keys)
    fixed = ["flashinfer-cuda-version-from-torch", "flashinfer-fp4-quantize-opaque-op"]
    assert [patch.id for patch in OTHER.uncovered] == fixed and LAB.uncovered == ()
    proofs = {proof["id"]: proof["code"] for proof in OTHER.patch_proofs}
    assert set(proofs) == keys | {f"{name} is fixed upstream" for name in fixed}
    assert all("sglang.srt.layers.quantization" in proofs[f"{name} is fixed upstream"] for name in fixed)


def test_an_upgraded_node_gets_the_patches_of_its_version_and_forgets_the_others() -> None:
    new = {patch.file: patch.pre_sha256 for patch in OTHER.patches}
    state = moved(OTHER, new | {patch.file: "7" * 64 for patch in OTHER.uncovered}, SETTLED.manifest)
    assert steps(OTHER, state) == [
        f"{patch.file} by {patch.id}: expected applied, found pristine; apply the patches from where it stands"
        for patch in OTHER.patches
    ] + [
        f"{patch.file} without {patch.id}: expected as upstream has it, found of a version that upstream is to have "
        "fixed; forget what it carried"
        for patch in OTHER.uncovered
    ]
    assert steps(OTHER, settled_state(OTHER)) == []


def test_a_downgraded_node_gets_its_patches_again() -> None:
    old = {patch.file: patch.pre_sha256 for patch in LAB.patches}
    assert steps(LAB, moved(LAB, old, settled_state(OTHER).manifest)) == [
        f"{patch.file} by {patch.id}: expected applied, found pristine; apply the patches from where it stands"
        for patch in LAB.patches
    ]


def test_what_an_upgrade_will_change_is_said_before_it() -> None:
    """Of a node that still has the versions of before."""
    said = steps(OTHER, SETTLED)
    assert [line.partition(":")[0] for line in said] == [
        *(f"{patch.file} by {patch.id}" for patch in OTHER.patches),
        *(f"{patch.file} without {patch.id}" for patch in OTHER.uncovered),
    ]
    assert all(line.endswith("its distribution is installed first") for line in said)


@pytest.mark.parametrize("manifest", [{}, SETTLED.manifest], ids=["fresh", "upgraded"])
def test_without_patches_pristine_is_the_versions_own(manifest: dict[str, dict[str, str]]) -> None:
    spec = lab_spec(stack="sglang-0.5.12-cu130", patches="none")
    contents = {patch.file: patch.pre_sha256 for patch in OTHER.patches}
    contents |= {patch.file: "7" * 64 for patch in OTHER.uncovered}
    forgotten = sorted(patch.file for patch in OTHER.uncovered) if manifest else []
    assert sorted(line.split(" ")[0] for line in steps(spec, moved(spec, contents, manifest))) == forgotten
    patched = contents | {OTHER.patches[0].file: OTHER.patches[0].post_sha256}
    (change,) = steps(spec, moved(spec, patched, {}))
    assert change.endswith("found superseded; install its distribution anew, then apply the patches")


def test_a_file_of_a_version_that_no_entry_is_made_for_is_held_against_its_record() -> None:
    def looked_at(spec: NodeSpec) -> list[str]:
        request = re.search(r"^REQUEST = json.loads\((.*)\)$", observe(spec).stdin, re.M)
        assert request
        return list(json.loads(json.loads(request.group(1)))["patched"])

    assert looked_at(LAB) == sorted({patch.file for patch in LAB.series})
    assert looked_at(OTHER) == sorted(patch.file for patch in OTHER.patches)


def test_an_earlier_post_image_of_ours_is_redone_from_the_original() -> None:
    patch = FIRST.model_copy(update={"superseded": [OLD]})
    spec = replace(LAB, series=(patch, *LAB.series[1:]), patches=(patch, *LAB.patches[1:]))
    (change,) = steps(spec, with_patched(FIRST.file, OLD))
    assert change.endswith("found superseded; apply the patches to the kept original")


def test_a_version_that_upstream_has_fixed_is_proved_not_patched() -> None:
    newer = {**LAB.lock.versions, "flashinfer-python": "0.6.12"}
    fixed = [patch.id for patch in LAB.patches if patch.distribution == "flashinfer-python"]
    assert len(fixed) == 2 and not {patch.id for patch in catalogue().patches_for(newer)} & set(fixed)
    assert [patch.id for patch in catalogue().uncovered_for(newer)] == fixed
    spec = replace(LAB, patches=(), uncovered=catalogue().uncovered_for(newer))
    assert [proof["id"] for proof in spec.patch_proofs] == [f"{each} is fixed upstream" for each in fixed]


@pytest.mark.parametrize("replacing", ["stop", "replace"])
@pytest.mark.parametrize("manifest", [{}, SETTLED.manifest], ids=["fresh", "upgraded"])
def test_an_upgraded_distributions_own_file_is_not_foreign(manifest: dict[str, dict[str, str]], replacing: str) -> None:
    """0.6.12's genuine files have hashes the series does not know; no patch is wanted of them."""
    assert SETTLED.venv is not None
    versions = {**LAB.lock.versions, "flashinfer-python": "0.6.12"}
    spec = lab_spec(patches_foreign=replacing)
    lock = replace(spec.lock, versions=versions)
    spec = replace(
        spec, lock=lock, patches=catalogue().patches_for(versions), uncovered=catalogue().uncovered_for(versions)
    )
    venv = SETTLED.venv.model_copy(update={"distributions": versions})
    theirs = SETTLED.patched | {patch.file: seen("7" * 64) for patch in spec.uncovered}
    state = SETTLED.model_copy(update={"venv": venv, "patched": theirs, "manifest": manifest})
    assert all(line.endswith("forget what it carried") for line in steps(spec, state))
    assert len(steps(spec, state)) == (len(spec.uncovered) if manifest else 0)


def test_without_patches_an_edit_of_a_covered_version_still_stops() -> None:
    (change,) = steps(lab_spec(patches="none"), with_patched(FIRST.file, "9" * 64))[:1]
    assert "is foreign" in change


def test_a_patch_of_a_distribution_the_stack_has_not_is_left_out() -> None:
    versions = {name: version for name, version in LAB.lock.versions.items() if name != "flashinfer-python"}
    there = (*catalogue().patches_for(versions), *catalogue().uncovered_for(versions))
    assert there and all(patch.distribution != "flashinfer-python" for patch in there)


def test_settings_are_proved_on_the_ladders_that_have_them() -> None:
    assert "flashinfer-gdc" in [proof["id"] for proof in gpu_spec().patch_proofs]
    assert "flashinfer-gdc" not in [proof["id"] for proof in LAB.patch_proofs]
    assert gpu_spec().proof_env["FLASHINFER_EXTRA_CUDAFLAGS"] == "-DCUTLASS_ENABLE_GDC_FOR_SM100=1"


def test_assumptions_are_proved_beside_the_probes() -> None:
    ids = [proof["id"] for proof in LAB.patch_proofs]
    assert f"{FIRST.id}: torch is built with CUDA" in ids and len(ids) == len(set(ids))
    for patch in LAB.patches:
        for assumption in patch.assumptions:
            compile(assumption.code, "<assumption>", "exec")


def test_foreign_with_replace_is_planned_as_a_replacement() -> None:
    spec = lab_spec(patches_foreign="replace")
    (change,) = steps(spec, with_patched(FIRST.file, "9" * 64))
    assert change.endswith("found foreign; keep a copy, install its distribution anew, then apply the patches")


def test_nothing_is_decided_of_a_distribution_that_is_gone() -> None:
    entry = {"gone.py": {"pristine": "a" * 64, "post": "b" * 64, "distribution": "not-there"}}
    assert all(each.file.path != "gone.py" for each in decide(LAB, SETTLED.model_copy(update={"manifest": entry})))


@pytest.mark.parametrize("patch", catalogue().patches, ids=lambda patch: patch.id)
def test_an_entry_explains_itself(patch: Patch) -> None:
    assert patch.why and patch.remove_when and patch.upstream.startswith("https://")
    diff = (PATCHES / patch.diff).read_text()
    assert diff.startswith(f"--- a/{patch.file}\n+++ b/{patch.file}\n")


def test_the_first_patch_says_what_the_case_it_was_built_from_asked_for() -> None:
    diff = (PATCHES / FIRST.diff).read_text()
    added = "\n".join(line[1:] for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++"))
    assert "if torch.version.cuda is not None:\n        return Version(torch.version.cuda)" in added
    assert re.search(r"# gpuwright: .*Dynamo", added, re.S), "the patched file itself must say why"
    assert "@functools.cache" in diff and "-@functools.cache" not in diff, "the cache decorator stays"


def test_a_patch_is_made_again_for_another_version(tmp_path: Path) -> None:
    folder, wheel = tmp_path / "patches", tmp_path / "flashinfer-python-0.6.11.post1" / FIRST.file
    shutil.copytree(PATCHES, folder)
    wheel.parent.mkdir(parents=True)
    wheel.write_text("a = 1\nb = 2\n")
    edited = tmp_path / "edited.py"
    edited.write_text("a = 1\nb = 20\n")
    wheels = series.Wheels(Path("/nonexistent/uv"), catalogue(), tmp_path)
    new = series.NewPatch(
        FIRST.id, FIRST.distribution, FIRST.file, edited, "x", "https://example.org", "y", OTHER.stack.name
    )
    written = series.make(new, catalogue(), wheels, folder)
    assert [path.name for path in written] == [f"{FIRST.id}-0.6.11.post1.diff", "series.yaml"]
    again = load_catalogue(patches=folder)
    first, second = series.find(again, FIRST.id)
    assert (first, second.versions, second.probe) == (FIRST, "==0.6.11.post1", FIRST.probe)
    assert second in again.patches_for(OTHER.lock.versions) and first in again.patches_for(LAB.lock.versions)
    assert FIRST.id not in [patch.id for patch in again.uncovered_for(OTHER.lock.versions)]
    rows = {row.patch.versions: row for row in series.check(again, wheels, offline=True) if row.patch.id == FIRST.id}
    assert rows["==0.6.3"].stacks[OTHER.stack.name] == "pinned 0.6.11.post1: its entry for ==0.6.11.post1 is applied"
    assert "glm5-nvfp4/piecewise" in rows["==0.6.3"].tiers and rows["==0.6.11.post1"].tiers == []
    with pytest.raises(GpuwrightError, match=f'"{FIRST.id}" is taken'):
        series.make(replace(new, stack=LAB.stack.name), catalogue(), wheels, folder)
    with pytest.raises(GpuwrightError, match='no stack "sglang" pins flashinfer-python'):
        series.make(replace(new, stack="sglang"), catalogue(), wheels, folder)


def test_context_must_match_to_the_byte_and_at_its_line() -> None:
    apply = exact_applier()
    diff = b"--- a/x\n+++ b/x\n@@ -2,2 +2,2 @@\n b\n-c\n+C\n"
    assert apply(b"a\nb\nc\n", diff) == b"a\nb\nC\n"
    for source in (b"b\nc\n", b"a\na\nb\nc\n", b"a\nb \nc\n"):  # an offset, an offset, fuzz
        with pytest.raises(ValueError, match=r"line \d is not what the diff expects"):
            apply(source, diff)
