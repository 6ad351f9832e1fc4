"""catalog/rules.yaml: for every rule a tier that keeps it and one that breaks it, judged as a deploy judges them."""

from __future__ import annotations

from typing import Any

import pytest

from gpuwright.catalogue import CATALOG
from gpuwright.fields import requirement_covers
from gpuwright.ladder import Ladder, Tier
from gpuwright.rules import Rules, broken, rule_errors
from gpuwright.yamlfile import load_yaml
from tests.make import catalogue

ENGINE, NEW_ENGINE = "sglang==0.5.9", "sglang==0.5.12.post1"
STACKS = {ENGINE: "sglang-0.5.9-cu128", NEW_ENGINE: "sglang-0.5.12-cu130"}
RULES = {rule.id: rule for rule in catalogue().rules}
GPU = catalogue().ladders[STACKS[ENGINE]]["glm5-nvfp4"]
PIECEWISE = {"enable-piecewise-cuda-graph": True, "piecewise-cuda-graph-max-tokens": 8192}
NEXTN = {
    "speculative-algorithm": "NEXTN", "speculative-num-steps": 3, "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}  # fmt: skip
V2 = {"SGLANG_ENABLE_SPEC_V2": "True"}
MSCCLPP = {"enable-mscclpp": True}
DP = {"enable-dp-attention": True, "dp-size": 8}

A2A = {"moe-a2a-backend": "deepep"}
PP = {"pp-size": 2, "disable-overlap-schedule": True}
DEFAULT = {"without": ["disable-piecewise-cuda-graph"]}  # of 0.5.12: on
ENFORCED = {"enforce-piecewise-cuda-graph": True}

# id: (what keeps the rule, what breaks it); each as changes of the GPU ladder's own: args, env, without, or the ladder.
# `on` names another ladder. Judged on every stack whose engine the rule is for.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kv-cache-dtype": ({"args": {"kv-cache-dtype": "bfloat16"}}, {"without": ["kv-cache-dtype"]}),
    "attention-backend-sm120": ({"args": {"attention-backend": "triton"}}, {"args": {"attention-backend": "nsa"}}),
    "moe-backend-sm120": (
        {"args": {"moe-runner-backend": "cutlass"}}, {"args": {"moe-runner-backend": "flashinfer_trtllm"}},
    ),
    "fp4-gemm-backend-sm120": (
        {"args": {"fp4-gemm-backend": "flashinfer_cudnn"}}, {"args": {"fp4-gemm-backend": "flashinfer_trtllm"}},
    ),
    "deepgemm-off": ({}, {"without": ["SGLANG_ENABLE_JIT_DEEPGEMM"]}),
    "deepgemm-name": ({}, {"env": {"SGLANG_ENABLE_DEEP_GEMM": "0"}}),
    "page-size": ({"args": DP}, {"args": {"chunked-prefill-size": 8100}}),
    "ep-size": ({"args": {"ep-size": 8}}, {"args": {"ep-size": 4}}),
    "ep-size-a2a": (
        {"args": {"moe-a2a-backend": "deepep", "ep-size": 8}}, {"args": {"moe-a2a-backend": "deepep", "ep-size": 1}},
    ),
    "moe-quantization": ({"args": {"quantization": "modelopt_fp8"}}, {"args": {"quantization": "fp8"}}),
    "custom-all-reduce": ({}, {"without": ["disable-custom-all-reduce"]}),
    "cuda-graph-max-bs": ({"args": {"cuda-graph-max-bs": 32}}, {"args": {"cuda-graph-max-bs": 512}}),
    "mem-fraction": ({"args": {"mem-fraction-static": 0.9}}, {"args": {"mem-fraction-static": 0.98}}),
    "watchdog-timeout": ({"args": {"watchdog-timeout": 3600}}, {"args": {"watchdog-timeout": 300}}),
    "piecewise-exclusive": ({"args": PIECEWISE}, {"args": PIECEWISE | {"enable-torch-compile": True}}),
    "piecewise-max-tokens": (
        {"args": PIECEWISE}, {"args": PIECEWISE | {"piecewise-cuda-graph-max-tokens": 2048}},
    ),
    "piecewise-needs-the-switch": ({"args": PIECEWISE}, {"args": {"piecewise-cuda-graph-max-tokens": 8192}}),
    "piecewise-left-off": ({"args": ENFORCED} | DEFAULT, DEFAULT),
    "piecewise-one-way": ({}, {"args": ENFORCED}),
    "mscclpp-world-size": ({"args": MSCCLPP}, {"args": MSCCLPP, "ladder": {"tp": 4}}),
    "mscclpp-max-bytes": (
        {"args": MSCCLPP, "env": {"SGLANG_MSCCLPP_MAX_BYTES": "2MB"}},
        {"args": MSCCLPP, "env": {"SGLANG_MSCCLPP_MAX_BYTES": "1.5MB"}},
    ),
    "mscclpp-needs-the-switch": (
        {"args": MSCCLPP, "env": {"SGLANG_MSCCLPP_MAX_BYTES": "1MB"}}, {"env": {"SGLANG_MSCCLPP_MAX_BYTES": "1MB"}},
    ),
    "expandable-segments": (
        {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        {"args": MSCCLPP, "env": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}},
    ),
    "speculative-v2": ({"args": NEXTN, "env": V2}, {"args": NEXTN}),
    "speculative-topk": ({"args": NEXTN, "env": V2}, {"args": NEXTN | {"speculative-eagle-topk": 2}, "env": V2}),
    "speculative-topk-overlap": ({"args": NEXTN}, {"args": NEXTN | {"speculative-eagle-topk": 2}}),
    "draft-tokens": (
        {"args": NEXTN, "env": V2}, {"args": NEXTN | {"speculative-num-draft-tokens": 3}, "env": V2},
    ),
    "dp-divides-tp": ({"args": DP}, {"args": DP | {"dp-size": 1}}),
    "dp-over-nodes": ({"args": DP, "ladder": {"nodes": 2}}, {"args": {"dp-size": 2}, "ladder": {"nodes": 2}}),
    "pp-exclusive": ({"args": PP}, {"args": {"pp-size": 2}}),
    "pp-no-speculation": ({"args": {"pp-size": 2}}, {"args": PP | NEXTN}),
    "hierarchical-cache": (
        {"args": {"enable-hierarchical-cache": True}},
        {"args": {"enable-hierarchical-cache": True, "disable-radix-cache": True}},
    ),
    "nccl-p2p-level": ({"env": {"NCCL_P2P_LEVEL": "PHB"}}, {"env": {"NCCL_P2P_LEVEL": "5"}}),
    "nccl-ib-single-node": ({"ladder": {"nodes": 2}, "without": ["NCCL_IB_DISABLE"]}, {"without": ["NCCL_IB_DISABLE"]}),
    "overridden-env": ({}, {"env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}),
    "overridden-nccl-env": (
        {"env": {"NCCL_NVLS_ENABLE": "1"}}, {"args": {"enable-symm-mem": True}, "env": {"NCCL_NVLS_ENABLE": "1"}},
    ),
    "cpu-attention-backend": ({"on": "lab-cpu"}, {"on": "lab-cpu", "args": {"attention-backend": "flashinfer"}}),
}  # fmt: skip


# More of the same: what each keeps or breaks, clause by clause.
KEPT = [
    ("page-size", {"args": {"chunked-prefill-size": -1}}),
    ("cuda-graph-max-bs", {"args": {"cuda-graph-bs": [1, 256]}, "without": ["cuda-graph-max-bs"]}),
    ("cuda-graph-max-bs", {"args": {"disable-cuda-graph": True}, "without": ["cuda-graph-max-bs"]}),
    ("piecewise-exclusive", {"args": PIECEWISE | NEXTN, "env": V2}),
    ("piecewise-max-tokens", {"args": PIECEWISE | DP | {"piecewise-cuda-graph-max-tokens": 1024}}),
    ("mscclpp-max-bytes", {"args": MSCCLPP, "env": {"SGLANG_MSCCLPP_MAX_BYTES": "1024kb"}}),
    ("speculative-topk", {"args": {"speculative-algorithm": "NGRAM"}, "env": V2}),
    ("piecewise-left-off", {"on": "h200-llama"} | DEFAULT),
    ("piecewise-left-off", {"on": "h200-llama", "args": {"enable-torch-compile": True}}),
    ("piecewise-max-tokens", {"args": ENFORCED | {"piecewise-cuda-graph-max-tokens": 8192}} | DEFAULT),
    ("speculative-topk-overlap", {"args": NEXTN | {"speculative-eagle-topk": 2, "disable-overlap-schedule": True}}),
]
BROKEN = [
    *(
        ("piecewise-left-off", {"on": "h200-llama", "args": args} | DEFAULT)
        for args in (
            {"enable-torch-compile": True},
            {"enable-dp-attention": True, "dp-size": 2},
            {"pp-size": 2},
            A2A,
            {"enable-hierarchical-cache": True},
            {"enable-symm-mem": True},
            {"enable-eplb": True},
            {"enable-lora": True},
            {"enable-deterministic-inference": True},
            {"cpu-offload-gb": 4},
            {"lora-paths": ["x"]},
            {"moe-runner-backend": "flashinfer_trtllm"},
        )
    ),
    ("piecewise-left-off", {"on": "lab-cpu"} | DEFAULT),
    ("piecewise-one-way", {"args": {"piecewise-cuda-graph-max-tokens": 8192}}),
    ("piecewise-max-tokens", {"args": ENFORCED} | DEFAULT),
    ("speculative-topk-overlap", {"args": NEXTN, "env": {"SGLANG_ENABLE_SPEC_V2": "False"}}),
    ("fp4-gemm-backend-sm120", {"args": {"fp4-gemm-backend": "flashinfer_cutedsl"}}),
    ("attention-backend-sm120", {"args": {"decode-attention-backend": "trtllm_mla"}}),
    ("attention-backend-sm120", {"args": {"nsa-prefill-backend": "flashmla_sparse"}}),
    ("cuda-graph-max-bs", {"args": {"cuda-graph-bs": [1, 512]}}),
    ("ep-size-a2a", {"args": {"moe-a2a-backend": "mori", "ep-size": 1}}),
    ("mscclpp-max-bytes", {"args": MSCCLPP, "env": {"SGLANG_MSCCLPP_MAX_BYTES": "1048576"}}),
    ("piecewise-exclusive", {"args": PIECEWISE | A2A}),
    ("piecewise-exclusive", {"args": PIECEWISE | PP}),
    ("piecewise-max-tokens", {"args": {"enable-piecewise-cuda-graph": True}}),
    ("pp-exclusive", {"args": PP | NEXTN, "env": V2}),
    ("overridden-env", {"env": {"SGLANG_RUN_ID": "x"}}),
    ("dp-divides-tp", {"args": {"enable-dp-attention": True}}),
    ("dp-divides-tp", {"args": {"enable-dp-attention": True, "dp-size": 3}}),
    ("dp-divides-tp", {"args": {"enable-dp-attention": True, "dp-size": 0}}),
    ("expandable-segments", {"args": MSCCLPP, "env": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}),
    ("page-size", {"args": DP | {"chunked-prefill-size": 576}}),
    ("page-size", {"without": ["chunked-prefill-size"]}),
]


def judged(rule: str, change: dict[str, Any]) -> list[bool]:
    """Whether a tier with this change breaks the rule, on each stack that it is for."""
    fields = {key: change[key] for key in ("args", "env", "without") if key in change}
    tier = Tier(name="x", rank="0", about="x", **fields)
    answers = []
    for engine, stack in STACKS.items():
        if requirement_covers(RULES[rule].engine, engine):
            name = change.get("on", "glm5-nvfp4")
            of = (
                {**catalogue().ladders[f"{stack}-triton"], **catalogue().ladders[stack]} if engine == NEW_ENGINE else {}
            )
            ladder: Ladder = (of or catalogue().ladders[stack])[name]
            ladder = ladder.model_copy(update=change.get("ladder", {}))
            answers.append(bool(broken([RULES[rule]], ladder, tier, engine)))
    return answers


def test_every_rule_has_its_cases() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_is_kept_and_broken(rule: str) -> None:
    keeps, breaks = CASES[rule]
    assert set(judged(rule, keeps)) == {False}
    assert set(judged(rule, breaks)) == {True}


@pytest.mark.parametrize(("rule", "change"), KEPT, ids=lambda value: value if isinstance(value, str) else "")
def test_each_clause_lets_through_what_the_engine_takes(rule: str, change: dict[str, Any]) -> None:
    assert set(judged(rule, change)) == {False}


@pytest.mark.parametrize(("rule", "change"), BROKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_each_clause_of_a_rule_can_break_it(rule: str, change: dict[str, Any]) -> None:
    assert set(judged(rule, change)) == {True}


def test_a_rule_that_cannot_be_judged_counts_as_broken() -> None:
    rule = RULES["ep-size"].model_copy(update={"when": "true", "require": "args.ep_size / args.dp_size == 1"})
    tier = Tier(name="x", rank="0", about="x")
    assert broken([rule], GPU, tier, ENGINE) == [rule]
    zero = Tier(name="x", rank="0", about="x", args={"ep-size": 1, "dp-size": 0})
    assert broken([rule], GPU, zero, ENGINE) == [rule]


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_a_rule_says_what_to_do_and_where_it_is_from(rule: Any) -> None:
    assert rule.message and ("sglang 0.5." in rule.source or "https://" in rule.source or "measured" in rule.source)


LADDERS = [(stack, name) for stack, ladders in catalogue().ladders.items() for name in ladders]


@pytest.mark.parametrize(("stack", "name"), LADDERS)
def test_every_tier_of_the_catalogue_keeps_every_rule(stack: str, name: str) -> None:
    engine, ladder = catalogue().stacks[stack].engine_pin, catalogue().ladders[stack][name]
    assert [
        (tier.name, [rule.id for rule in broken(catalogue().rules, ladder, tier, engine)]) for tier in ladder.tiers
    ] == [(tier.name, []) for tier in ladder.tiers]


def test_a_rule_of_another_engine_is_not_asked() -> None:
    tier = Tier(name="x", rank="0", about="x", without=["kv-cache-dtype"])
    assert [rule.id for rule in broken(RULES.values(), GPU, tier, "sglang==0.5.13")] == []


def test_a_waived_rule_may_be_broken() -> None:
    tier = Tier(name="x", rank="0", about="x", args={"ep-size": 4}, waive={"ep-size": "to see what it says"})
    assert broken(RULES.values(), GPU, tier, ENGINE) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("args.ep_size in [1, tp]", "args.ep_size in [1, tp", "require: is not an expression: "),
        ("args.ep_size in [1, tp]", "args.ep_sise in [1, tp]", "sglang>=0.5.9,<0.5.13 has no argument ep-sise"),
        ("args.ep_size in [1, tp]", "arg.ep_size in [1, tp]", 'there is no "arg"\n    did you mean "args"?'),
        ("id: page-size", "id: kv-cache-dtype", '"kv-cache-dtype" is used twice'),
    ],
)
def test_a_bad_rule_is_named(tmp_path: Any, old: str, new: str, said: str) -> None:
    path = tmp_path / "rules.yaml"
    text = (CATALOG / "rules.yaml").read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    rules, origin = load_yaml(path, Rules)
    flags = catalogue().flags
    errors = rule_errors(rules.rules, origin, dict.fromkeys(flags, ENGINE), flags)
    assert any(said in str(error) for error in errors), errors
