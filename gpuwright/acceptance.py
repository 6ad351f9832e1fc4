"""Which benchmark run may be called a result: the rules of catalog/acceptance.yaml over the facts of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from gpuwright import expressions
from gpuwright.errors import InputError
from gpuwright.fields import Slug
from gpuwright.node_module import node_module
from gpuwright.yamlfile import Loc, Origin, Row

Scope = Literal["repeat", "level", "run"]


class AcceptanceRule(Row):
    """What must hold of every repeat, of a level, or of the run. `require` is a Jinja expression over the facts of
    that scope, `found` the message when it does not hold. After a broken `decisive` one no other is judged. A `timing`
    rule the discarded repeat may break.
    """

    id: Slug
    of: Scope
    decisive: bool = False
    timing: bool = False
    require: str
    found: str
    source: str


class Probe(Row):
    """The prompts that are asked greedily before and after the load, for so many tokens each."""

    tokens: int = Field(ge=8, le=512)
    prompts: list[str] = Field(min_length=3)


class Comparison(Row):
    """How two runs are compared: the confidence of each ratio's interval, and the least mean share of an answer's
    tokens that must agree with the reference's from its beginning.
    """

    confidence: float = Field(gt=0.5, lt=1)
    same_answers: float = Field(ge=0, le=1)
    why: str


class Acceptance(Row):
    """catalog/acceptance.yaml."""

    rules: list[AcceptanceRule] = Field(min_length=1)
    probe: Probe
    comparison: Comparison


# The facts of each scope, by the names that a rule may use.
FACTS: dict[Scope, tuple[str, ...]] = {
    "repeat": (
        "timed_out", "seconds", "exit_code", "client_cpu_s", "flushed", "queued", "prompts", "concurrency", "input_len",
        "output_len", "min_duration_s", "lines", "problem", "told_concurrency", "told_input_len", "told_output_len",
        "requests", "completed", "failed", "first_failure", "empty_texts", "unstreamed", "min_ttft_ms", "impossible",
        "overlong", "latency_p50_s", "duration_s", "mean_concurrency", "generated", "listed", "retokenised",
        "output_lens", "input_lens", "filler", "first_filler", "error_texts", "first_error_text", "distinct_texts",
        "untrue", "figures",
    ),
    "level": ("concurrency", "kept", "accepted", "warm_up"),
    "run": (
        "unanswered", "filler_answers", "changed_answers", "answers_kept", "disagreeing", "processes_before",
        "processes_after", "server_version", "engine_version", "xids", "max_total_num_tokens", "gpus_stated",
        "gpus_seen",
    ),
}  # fmt: skip


def acceptance_errors(acceptance: Acceptance, origin: Origin) -> list[InputError]:
    """What is wrong with the rules themselves: an id used twice, a bad expression, a fact that there is not."""
    errors, seen = [], set()
    for index, rule in enumerate(acceptance.rules):
        loc: Loc = ("rules", index)
        if rule.id in seen:
            errors.append(origin.error((*loc, "id"), f'"{rule.id}" is used twice'))
        seen.add(rule.id)
        errors += expressions.problems(origin, (*loc, "require"), rule.require, FACTS[rule.of])[0]
        errors += expressions.problems(origin, (*loc, "found"), rule.found, FACTS[rule.of], message=True)[0]
    return errors


def broken(rules: Iterable[AcceptanceRule], scope: Scope, facts: Mapping[str, Any]) -> list[str]:
    """Each rule of a scope that the facts break, as "id: what was found"; one that cannot be judged is broken."""
    found = []
    for rule in rules:
        if rule.of != scope:
            continue
        verdict = expressions.holds(rule.require, facts)
        if not verdict:
            message = expressions.filled(rule.found, facts)
            found.append(f"{rule.id}: {message if verdict is False else f'cannot be judged ({rule.require})'}")
            if rule.decisive:
                break
    return found


def judge_file(
    rules: Iterable[AcceptanceRule], text: str, asked: Mapping[str, Any], min_duration_s: float
) -> list[str]:
    """The rules that a file of bench_serving breaks. `asked`: prompts, concurrency, input_len, output_len as far as
    they are known; what is not is taken from the file.
    """
    facts = node_module("raw_facts").raw_facts(text)
    told = {name: facts.get(f"told_{name}") for name in ("concurrency", "input_len", "output_len")}
    told["prompts"] = facts.get("requests")
    known = {name: value for name, value in asked.items() if value is not None}
    run = {"timed_out": False, "exit_code": None, "seconds": None, "min_duration_s": min_duration_s}
    server = {"client_cpu_s": None, "flushed": True, "queued": False}
    return broken(rules, "repeat", {**facts, **run, **server, **told, **known})
