"""Ladders: what a tier inherits, what its evidence is worth, and the commands that show them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from gpuwright import REPOSITORY, tiers
from gpuwright.errors import GpuwrightError, InputErrors
from gpuwright.hostdata import Sources
from gpuwright.ladder import NO_PATCHES, Evidence, Ladder, Tier, resolve, standing
from gpuwright.ladder import Tiers as TiersFile
from gpuwright.plan import MODEL, SMOKE, plan
from gpuwright.spec import Member, build_spec, digest
from gpuwright.yamlfile import Origin
from tests.make import catalogue, gpu_spec, group_data, lab_spec, settled_state

STACK = "sglang-0.5.9-cu128"
GPU = catalogue().ladders[STACK]["glm5-nvfp4"]


def ladder(*rows: dict[str, Any], **fields: Any) -> tuple[Ladder, list[str]]:
    """A ladder of these tiers, resolved, and what was wrong with it."""
    rungs = [{"rank": "0", "about": "x", **row} for row in rows]
    data = {"about": "x", "tp": 1, "model_type": "m", "tiers": rungs, **fields}
    ladders, errors = resolve(TiersFile.model_validate({"ladders": {"l": data}}), Origin(REPOSITORY / "x", {}))
    return ladders["l"], [str(error) for error in errors]


def test_a_tier_inherits_what_it_extends_and_wins_over_it() -> None:
    one = {
        "name": "one", "args": {"a": 1, "b": 1}, "env": {"E": "1"}, "without": ["c"], "waive": {"r": "why"},
        "needs": {"patches": ["p"], "world_sizes": [4, 8]}, "took_effect": {"seen": ["s1"]}, "ready_timeout_s": 60,
    }  # fmt: skip
    two = {"name": "two", "args": {"a": 1}, "needs": {"patches": ["p", "q"], "world_sizes": [8, 16]}}
    both = {"name": "both", "extends": ["one", "two"], "args": {"b": 2}, "took_effect": {"seen": ["s2"]}}
    found, errors = ladder(one, two, both, args={"c": 0})
    tier = found.tiers[-1]
    assert errors == []
    assert tier.args == {"a": 1, "b": 2} and tier.env == {"E": "1"} and tier.without == ["c"]
    assert tier.needs.patches == ["p", "q"] and tier.needs.world_sizes == [8]
    assert tier.took_effect.seen == ["s1", "s2"] and tier.ready_timeout_s == 60 and tier.waive == {"r": "why"}


def test_a_tier_can_leave_out_what_it_inherits() -> None:
    found, _ = ladder(
        {"name": "one", "args": {"a": 1}, "env": {"E": "1"}},
        {"name": "two", "extends": ["one"], "without": ["a", "E", "b"]},
        args={"b": 0}, env={"F": "0"},
    )  # fmt: skip
    assert found.merged_args(found.tiers[1]) == {} and found.merged_env(found.tiers[1]) == {"F": "0"}
    _, errors = ladder({"name": "one", "without": ["a"]}, args={"b": 1})
    assert len(errors) == 1 and '"a" is neither an argument nor a variable of the ladder' in errors[0]


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ({"args": {"a": 1}}, {"without": ["a"]}, "a is left out by two and set by another"),
        ({"needs": {"world_sizes": [4]}}, {"needs": {"world_sizes": [8]}}, "no number of GPUs suits all of one, two"),
        ({"needs": {"model_tensor": "a."}}, {"needs": {"model_tensor": "b."}}, "need different checkpoints (a., b.)"),
    ],
)
def test_parents_that_cannot_go_together_are_named(one: dict[str, Any], two: dict[str, Any], said: str) -> None:
    rows = [{"name": "one"} | one, {"name": "two"} | two, {"name": "x", "extends": ["one", "two"]}]
    _, errors = ladder(*rows, args={"a": 0})
    assert len(errors) == 1 and said in errors[0]


def test_what_a_part_fails_on_the_whole_fails_on() -> None:
    seen = [{"seen": "2026-02-12", "what": "it crashed", "versions": {"sglang": "0.5.9"}, "patch_set": "none"}]
    rows = [{"name": "one", "status": "blocked", "evidence": seen}, {"name": "two"}]
    found, _ = ladder(*rows, {"name": "x", "extends": ["one", "two"]})
    assert found.tiers[2].status == "blocked" and found.tiers[2].evidence == found.tiers[0].evidence
    own = [{**seen[0], "what": "it works", "patch_set": "f" * 16}]
    found, _ = ladder(*rows, {"name": "x", "extends": ["one"], "status": "works", "evidence": own})
    assert found.tiers[2].status == "works" and found.tiers[2].evidence[0].what == "it works"


def test_two_that_disagree_must_be_settled() -> None:
    rows = [
        {"name": "one", "args": {"a": 1}},
        {"name": "two", "args": {"a": 2}},
        {"name": "x", "extends": ["one", "two"]},
    ]
    _, errors = ladder(*rows)
    assert len(errors) == 1 and "a is 1 in one and 2 in two: set it in x" in errors[0]
    assert ladder(*rows[:2], rows[2] | {"args": {"a": 3}})[1] == []


def test_only_what_stands_above_can_be_extended() -> None:
    _, errors = ladder({"name": "one", "extends": ["two"]}, {"name": "two", "extends": ["two"]})
    assert len(errors) == 2 and 'there is no tier "two" above one' in errors[0]


def test_piecewise_ep8_is_piecewise_and_ep8() -> None:
    by_name = {tier.name: tier for tier in GPU.tiers}
    both, parts = by_name["piecewise-ep8"], (by_name["piecewise"], by_name["ep8"])
    assert both.args == parts[0].args | parts[1].args and both.needs.patches == parts[0].needs.patches
    assert set(both.took_effect.seen) == {text for part in parts for text in part.took_effect.seen}


# --- evidence

VERSIONS = {"sglang": "0.5.9", "flashinfer-python": "0.6.3"}
PATCHES = digest([["file", "post"]])


def tier(status: Any, *evidence: tuple[dict[str, str], str]) -> Tier:
    rows = [Evidence(seen="2026-02-12", what="it crashed", versions=v, patch_set=p) for v, p in evidence]
    return Tier(name="x", rank="0", about="x", status=status, evidence=rows, note="a note")


@pytest.mark.parametrize("status", ["works", "blocked", "rejected"])
def test_evidence_holds_on_what_it_was_found_on(status: str) -> None:
    found = standing(tier(status, (VERSIONS, PATCHES[:16])), VERSIONS, PATCHES)
    assert (found.status, found.why) == (status, "it crashed (2026-02-12)")
    assert standing(tier(status, (VERSIONS, "none")), VERSIONS, digest([])).status == status
    assert digest([]) == NO_PATCHES


@pytest.mark.parametrize(
    ("versions", "patches", "said"),
    [
        (VERSIONS | {"sglang": "0.5.10"}, PATCHES, "sglang 0.5.9 (now 0.5.10)"),
        ({"sglang": "0.5.9"}, PATCHES, "flashinfer-python 0.6.3 (now absent)"),
        (VERSIONS, digest([]), f"patch set {PATCHES[:16]} (now {NO_PATCHES[:16]})"),
    ],
)
def test_evidence_goes_stale_by_itself(versions: dict[str, str], patches: str, said: str) -> None:
    found = standing(tier("blocked", (VERSIONS, PATCHES[:16])), versions, patches)
    assert found.status == "open" and found.why.startswith("blocked no more") and said in found.why


def test_one_piece_of_evidence_that_holds_is_enough() -> None:
    both = tier("blocked", (VERSIONS, "none"), (VERSIONS, PATCHES[:16]))
    assert standing(both, VERSIONS, PATCHES).status == "blocked" == standing(both, VERSIONS, NO_PATCHES).status
    assert standing(both, VERSIONS, "f" * 64).status == "open"


def test_an_open_tier_needs_none() -> None:
    assert standing(tier("open"), VERSIONS, PATCHES) == standing(tier("open"), {}, "")


def piecewise_blocked_now() -> Any:
    """The catalogue, as if piecewise had been seen to crash on the very versions and patches of today."""
    evidence = Evidence(
        seen="2026-11-30", what="it crashed", versions={"sglang": "0.5.9"}, patch_set=gpu_spec().patch_set_digest
    )
    rungs = [
        each.model_copy(update={"evidence": [evidence]}) if each.name == "piecewise" else each for each in GPU.tiers
    ]
    ladders = catalogue().ladders[STACK] | {"glm5-nvfp4": GPU.model_copy(update={"tiers": rungs})}
    return replace(catalogue(), ladders=catalogue().ladders | {STACK: ladders})


def test_a_blocked_tier_is_not_started_unless_asked_for() -> None:
    blocked = piecewise_blocked_now()
    data = group_data("all", "gpu") | {"tier": "piecewise"}
    with pytest.raises(InputErrors, match=r"tier piecewise is blocked: it crashed \(2026-11-30\)") as caught:
        build_spec("gpu-01", data, blocked, Sources((), []))
    assert "--data allow_blocked=true" in str(caught.value)
    assert build_spec("gpu-01", data | {"allow_blocked": True}, blocked, Sources((), [])).tier.name == "piecewise"
    assert build_spec("gpu-01", data | {"stages": ["launchers"]}, blocked, Sources((), [])), "it is not started then"


def test_the_old_crashes_of_piecewise_do_not_hold_on_the_series_of_today() -> None:
    spec = gpu_spec(tier="piecewise")
    assert spec.tier.status == "blocked" and spec.standing(spec.tier).status == "open"
    assert "patch set 44fbee48fdf48ea7" in spec.standing(spec.tier).why
    first = digest([[patch.file, patch.post_sha256] for patch in spec.patches[:1]])
    assert standing(spec.tier, spec.lock.versions, first).status == "blocked"


# --- what a tier needs of the model


def test_a_tier_that_needs_another_checkpoint_stops_the_host() -> None:
    spec = gpu_spec(tier="mtp")
    state = settled_state(spec)
    assert plan(spec, state).of(MODEL) == []
    assert state.model is not None
    lacking = state.model_copy(
        update={"model": state.model.model_copy(update={"tensors": {"model.layers.78.": False}})}
    )
    (change,) = plan(spec, lacking).of(MODEL)
    assert change.blocked and "tier mtp needs a checkpoint with model.layers.78.*" in change.what


def test_a_model_of_another_kind_stops_the_host() -> None:
    spec = gpu_spec()
    state = settled_state(spec)
    assert state.model is not None
    other = state.model_copy(update={"model": state.model.model_copy(update={"model_type": "llama"})})
    (change,) = plan(spec, other).of(MODEL)
    assert change.blocked and "is of a llama, and ladder glm5-nvfp4 is for glm_moe_dsa" in change.what


# --- clusters

PAIR = (Member("gpu-01", "10.0.0.1"), Member("gpu-02", "10.0.0.2"))
CLUSTER = {"ladder": "glm5-nvfp4-2x8", "cluster": {"group": "pair", "port": 21000}}


@pytest.mark.parametrize(
    ("data", "members", "said"),
    [
        ({"ladder": "glm5-nvfp4-2x8"}, (), "is served by 2 hosts together"),
        (CLUSTER, PAIR[:1], 'group "pair" has 1 hosts (gpu-01); the ladder has 2'),
        (CLUSTER, (), 'group "pair" has 0 hosts (none); the ladder has 2'),
        (CLUSTER, (Member("a", "a"), Member("b", "b")), 'group "pair" does not hold gpu-01 itself'),
        ({"cluster": {"group": "pair"}}, PAIR, "has 2 hosts (gpu-01, gpu-02); the ladder has 1"),
    ],
)
def test_a_cluster_must_fit_its_ladder(data: dict[str, Any], members: tuple[Member, ...], said: str) -> None:
    with pytest.raises(InputErrors) as caught:
        build_spec("gpu-01", group_data("all", "gpu") | data, catalogue(), Sources((), []), members)
    assert said in str(caught.value)


def test_the_rank_is_the_place_in_the_group() -> None:
    specs = [build_spec(m.name, group_data("all", "gpu") | CLUSTER, catalogue(), Sources((), []), PAIR) for m in PAIR]
    assert [spec.rank for spec in specs] == [0, 1] and gpu_spec().rank is None
    for spec in specs:
        assert "--dist-init-addr 10.0.0.1:21000" in spec.arguments(spec.tier)


def test_a_cluster_is_measured_by_its_first_rank() -> None:
    specs = [build_spec(m.name, group_data("all", "gpu") | CLUSTER, catalogue(), Sources((), []), PAIR) for m in PAIR]
    planned = [bool(plan(spec, settled_state(spec, results=[])).of(SMOKE)) for spec in specs]
    assert planned == [True, False]


# --- the commands


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuwright", "tiers", *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )


def test_the_ladder_is_printed_with_what_is_known() -> None:
    said = command("--ladder", "glm5-nvfp4")
    assert said.returncode == 0 and "lab-cpu" not in said.stdout
    assert "1.1  piecewise      open      piecewise CUDA graphs for prefill" in said.stdout
    assert "blocked no more, because it was found on others" in said.stdout
    wrong = command("--ladder", "glm5")
    assert wrong.returncode == 1 and 'there is no ladder "glm5"' in wrong.stderr


def test_a_difference_is_a_line_for_each_change() -> None:
    said = command("diff", "baseline", "piecewise").stdout.splitlines()
    assert said[0] == "baseline -> piecewise:" and "~ --mem-fraction-static 0.85 -> 0.8" in said
    assert "+ --enable-piecewise-cuda-graph" in said
    assert "+ must not be logged: Disable piecewise CUDA graph because" in said
    assert command("diff", "mtp", "mtp").stdout == "mtp -> mtp:\nno difference\n"
    assert "- env SGLANG_ENABLE_SPEC_V2 True" in command("diff", "mtp", "baseline").stdout


OLD, NEW = "sglang-0.5.9-cu128", "sglang-0.5.12-cu130"


def test_stacks_differ_by_what_a_host_that_moves_would_get() -> None:
    said = command("diff", "--stacks", OLD, NEW, "glm5-nvfp4")
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[:3] == [f"{OLD} -> {NEW}", "", "glm5-nvfp4:"] and "h200-llama" not in said.stdout
    common = lines[lines.index("  every tier:") + 1 : lines.index("  piecewise:")]
    assert "    + --disable-piecewise-cuda-graph" in common
    assert "    - env FLASHINFER_EXTRA_CUDAFLAGS -DCUTLASS_ENABLE_GDC_FOR_SM100=1" in common
    own = lines[lines.index("  piecewise:") + 1 : lines.index("  piecewise-ep8:")]
    assert "    - --enable-piecewise-cuda-graph" in own and "    + --enforce-piecewise-cuda-graph" in own
    assert "    - needs patch flashinfer-fp4-quantize-opaque-op" in own
    assert "    not + --disable-piecewise-cuda-graph" in own, "what is true of the others alone"
    assert any("on sglang-0.5.9-cu128 blocked no more" in line for line in own)
    assert "  ep8:" not in lines, "a tier that differs by nothing of its own is not listed"
    assert max(map(len, lines)) <= 120


TRITON = f"{NEW}-triton"


def test_stacks_are_compared_ladder_by_ladder() -> None:
    there, back = (command("diff", "--stacks", *stacks).stdout for stacks in ((OLD, NEW), (NEW, OLD)))
    one, other = (command("diff", "--stacks", *stacks).stdout for stacks in ((NEW, TRITON), (TRITON, NEW)))
    assert f"only in {TRITON}: h200-llama, h200-llama-tp2" in one and f"only in {NEW}: glm5-nvfp4" in other
    assert "only in" not in there + back
    assert "\nmtp" not in there and "  mtp:\n    - env SGLANG_ENABLE_SPEC_V2 True" in there
    same = command("diff", "--stacks", OLD, OLD, "lab-cpu").stdout
    assert same == f"{OLD} -> {OLD}\n\nlab-cpu:\n  no difference\n"


def test_stacks_with_other_tiers_and_another_standing() -> None:
    evidence = Evidence(seen="2026-12-01", what="it was fast", versions={"sglang": "0.5.12.post1"}, patch_set="none")
    ladder = catalogue().ladders[NEW]["lab-cpu"]
    first, *rest = ladder.tiers[:-1]
    works = first.model_copy(update={"status": "works", "evidence": [evidence], "env": {"A": "1"}})
    tiers_of = [works, *rest, first.model_copy(update={"name": "extra"})]
    ladders = {"lab-cpu": ladder.model_copy(update={"tp": 2, "tiers": tiers_of})}
    changed = replace(catalogue(), ladders=catalogue().ladders | {NEW: ladders})
    lines = tiers.between_stacks(changed, OLD, NEW, "lab-cpu").splitlines()
    assert "    ~ tp 1 -> 2" in lines and "  - one-at-a-time" in lines and "  + extra" in lines
    assert lines[lines.index("  baseline:") + 1] == "    + env A 1"
    assert "works no more" in "".join(lines), "the evidence was found without patches, and the series has some"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("diff", "--stacks", OLD, "sglang-0.5.12"), 'there is no stack "sglang-0.5.12"; did you mean'),
        (
            ("diff", "--stacks", OLD, NEW, "glm5-nvfp"),
            'neither stack has a ladder "glm5-nvfp"; did you mean "glm5-nvfp4"',
        ),
        (("diff", "--stacks", OLD, NEW, "glm5-nvfp4", "lab-cpu"), "--stacks compares one ladder, or all"),
        (("diff", "baseline"), "name two tiers, or two stacks with --stacks; found baseline"),
        (("diff",), "name two tiers, or two stacks with --stacks; found none"),
        (("--stack", "sglang"), 'there is no stack "sglang"'),
        (("--stack", OLD, "--ladder", "h200-llama"), 'there is no ladder "h200-llama"'),
    ],
)
def test_what_cannot_be_compared_or_listed(arguments: tuple[str, ...], said: str) -> None:
    wrong = command(*arguments)
    assert wrong.returncode == 1 and said in wrong.stderr


def test_a_ladder_is_listed_for_every_stack_that_has_it() -> None:
    said = command("--ladder", "glm5-nvfp4").stdout
    assert f"(stack {OLD}, tp 8)" in said and f"(stack {NEW}, tp 8)" in said
    new = command("--ladder", "glm5-nvfp4", "--stack", NEW).stdout
    assert f"stack {OLD}, tp" not in new and "on sglang-0.5.9-cu128 blocked no more" in new.replace("\n", "")


def test_a_tier_is_rendered_for_another_stack_by_its_name_alone() -> None:
    text = command("render", "piecewise", "--group", "gpu", "--stack", NEW).stdout
    assert text == gpu_spec(tier="piecewise", stack=NEW).active_script.text
    assert "--enforce-piecewise-cuda-graph" in text and "--enable-piecewise-cuda-graph" not in text
    assert "- --disable-piecewise-cuda-graph" in command("diff", "baseline", "piecewise", "--stack", NEW).stdout


def test_a_script_is_rendered_with_no_node_as_a_node_would_get_it() -> None:
    spec = gpu_spec(tier="piecewise-ep8")
    assert command("render", "piecewise-ep8", "--group", "gpu").stdout == spec.active_script.text
    unit = command("render", "baseline", "--group", "lab", "--unit").stdout
    assert unit.startswith("# Written by gpuwright for ") and "KillMode=control-group" in unit
    wrong = command("render", "piecwise")
    assert wrong.returncode == 1 and 'did you mean "piecewise"?' in wrong.stderr


def test_a_cluster_is_rendered_by_its_members() -> None:
    spec = tiers.spec_of(catalogue(), "lab", None, [], 0)
    assert spec.data.ladder == lab_spec().data.ladder and spec.rank is None
    with pytest.raises(GpuwrightError, match="the ranks of 2 members are 0 to 1"):
        tiers.spec_of(catalogue(), "gpu", "baseline", ["a", "b"], 2)
    with pytest.raises(GpuwrightError, match="group canary names no ladder"):
        tiers.spec_of(catalogue(), "canary", "baseline", [], 0)
