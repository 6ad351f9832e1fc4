"""The rules of catalog/rules.yaml: what must hold between a tier's arguments, environment, model and GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import nodes
from pydantic import Field

from gpuwright import expressions
from gpuwright.errors import InputError, nearest
from gpuwright.fields import RequirementText, Slug, requirement_covers
from gpuwright.flags import Flag
from gpuwright.ladder import Ladder, Tier
from gpuwright.yamlfile import Loc, Origin, Row


class Rule(Row):
    """Where `when` is true, `require` must be true too; else `message` says why not and what to write instead.

    Both are Jinja expressions over `args` (dashes as underscores), `env`, `tp`, `nodes`, `model_type`,
    `compute_capability` (text, or none) and `device`; `is matching("…")` tests a whole text by a regular expression.
    `engine` says which versions of the engine the rule was read from.
    """

    id: Slug
    engine: RequirementText
    when: str = "true"
    require: str
    message: str
    source: str


class Rules(Row):
    """catalog/rules.yaml."""

    rules: list[Rule] = Field(min_length=1)


NAMES = ("args", "env", "tp", "nodes", "model_type", "compute_capability", "device")


def rule_errors(
    rules: Iterable[Rule], origin: Origin, engines: Mapping[str, str], flags: Mapping[str, Mapping[str, Flag]]
) -> list[InputError]:
    """What is wrong with the rules themselves: a bad expression, or an argument that no such engine has.

    `engines`: "sglang==0.5.9" by stack; `flags`: the engine's flags by stack.
    """
    errors, seen = [], set()
    for index, rule in enumerate(rules):
        loc: Loc = ("rules", index)
        if rule.id in seen:
            errors.append(origin.error((*loc, "id"), f'"{rule.id}" is used twice'))
        seen.add(rule.id)
        covered = [stack for stack, pin in engines.items() if requirement_covers(rule.engine, pin)]
        known = {flag.replace("-", "_") for stack in covered for flag in flags[stack]}
        for key in ("when", "require"):
            found, tree = expressions.problems(origin, (*loc, key), getattr(rule, key), NAMES)
            errors += found
            for node in tree.find_all(nodes.Getattr) if tree else ():
                of = node.node
                if isinstance(of, nodes.Name) and of.name == "args" and known and node.attr not in known:
                    problem = f"{rule.engine} has no argument {node.attr.replace('_', '-')}"
                    errors.append(origin.error((*loc, key), problem, nearest(node.attr, known)))
    return errors


def broken(rules: Iterable[Rule], ladder: Ladder, tier: Tier, engine: str) -> list[Rule]:
    """The rules that a tier breaks and does not waive. `engine`: "sglang==0.5.9".

    A rule that cannot be judged (it counts with an argument that is not set, or divides by zero) counts as broken.
    """
    args = {name.replace("-", "_"): value for name, value in ladder.merged_args(tier).items()}
    context: dict[str, Any] = {
        "args": args,
        "env": ladder.merged_env(tier),
        "tp": ladder.tp,
        "nodes": ladder.nodes,
        "model_type": ladder.model_type,
        "compute_capability": ladder.compute_capability,
        "device": "cpu" if args.get("device") == "cpu" else "cuda",
    }
    waived = {**ladder.waive, **tier.waive}

    def kept(rule: Rule) -> bool:
        concerns = expressions.holds(rule.when, context)
        return concerns is False or bool(concerns and expressions.holds(rule.require, context))

    return [
        rule for rule in rules if rule.id not in waived and requirement_covers(rule.engine, engine) and not kept(rule)
    ]


def _written(rule: Rule, at: Loc, origin: Origin) -> Loc:
    """Where the tier at `at` writes the first value that the rule asks for; the tier itself where it inherits them."""
    for kind, name in re.findall(r"\b(args|env)\.(\w+)", f"{rule.require} {rule.when}"):
        loc: Loc = (*at, kind, name.replace("_", "-") if kind == "args" else name)
        if loc in origin.lines:
            return loc
    return at


def broken_rules(ladders: Mapping[str, Ladder], origin: Origin, rules: list[Rule], engine: str) -> list[InputError]:
    """Every rule that a tier breaks, and every waiver of a rule that is not there. `engine`: "sglang==0.5.9"."""
    errors, ids = [], {rule.id for rule in rules}
    for name, ladder in ladders.items():
        loc: Loc = ("ladders", name)
        said: set[tuple[str, Loc]] = set()  # what the ladder's own arguments break is said once, at its first tier
        base = Tier(name="ladder", rank="", about="")
        common = {rule.id for rule in broken(rules, ladder, base, engine)}
        waived: list[tuple[Loc, str]] = [((*loc, "waive", rule), rule) for rule in ladder.waive]
        for index, tier in enumerate(ladder.tiers):
            at: Loc = (*loc, "tiers", index)
            waived += [((*at, "waive", rule), rule) for rule in tier.waive]
            for rule in broken(rules, ladder, tier, engine):
                where = _written(rule, at, origin)
                place = (rule.id, loc if rule.id in common and where == at else where)
                if place not in said:
                    said.add(place)
                    hint = f"source: {rule.source}\n    to break it knowingly: waive: {{{rule.id}: the reason}}"
                    problem = f"{tier.name} breaks the rule {rule.id}: {rule.message}"
                    errors.append(origin.error(where, problem, hint))
        for written, rule_id in waived:
            if rule_id not in ids:
                errors.append(origin.error(written, f'there is no rule "{rule_id}"', nearest(rule_id, ids)))
    return errors
