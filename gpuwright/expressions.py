"""Conditions and messages as data: Jinja expressions over named facts, in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import SandboxedEnvironment
from packaging.version import InvalidVersion, Version

from gpuwright.errors import InputError, nearest
from gpuwright.yamlfile import Loc, Origin


@cache
def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment()
    environment.tests["matching"] = lambda value, pattern: re.fullmatch(pattern, str(value)) is not None
    environment.tests["at_least"] = _at_least
    return environment


def _at_least(found: Any, wanted: str) -> bool:
    """Whether a version is `wanted` or later. Raises TypeError for what is no version: then it cannot be judged."""
    try:
        return Version(str(found)) >= Version(wanted)
    except InvalidVersion:
        raise TypeError(f"{found!r} is not a version") from None


@cache
def _strict() -> jinja2.Environment:
    return _environment().overlay(undefined=jinja2.StrictUndefined)


@cache
def _compiled(expression: str, strict: bool) -> Callable[..., Any]:
    environment = _strict() if strict else _environment()
    return environment.compile_expression(expression, undefined_to_none=not strict)


@cache
def _message(text: str) -> jinja2.Template:
    return _strict().from_string(text)


def holds(expression: str, facts: Mapping[str, Any], *, strict: bool = False) -> bool | None:
    """Whether an expression is true of the facts; None when it cannot be judged: it counts with what is not there.

    `strict`: to compare what is not there is to count with it, too; only `is defined` may ask for it.
    """
    try:
        return bool(_compiled(expression, strict)(**facts))
    except (jinja2.UndefinedError, TypeError, ArithmeticError, ValueError):
        return None


def filled(message: str, facts: Mapping[str, Any]) -> str:
    """A message with the facts in it; itself as it is written where one is not there."""
    if "{" not in message:
        return message.removesuffix("\n")  # as Jinja has it, which need not be asked for plain text
    try:
        return _message(message).render(**facts)
    except (jinja2.UndefinedError, TypeError, ArithmeticError, ValueError):
        return message


@cache
def _tree(text: str, message: bool) -> nodes.Template:
    return _environment().parse(text if message else "{{ " + text + " }}")


@cache
def names_of(text: str, *, message: bool = False) -> frozenset[str]:
    """The facts that an expression, or a `message` with expressions in it, names."""
    if message and "{" not in text:
        return frozenset()
    tree = _tree(text, message)
    if "{%" in text:  # which may bind names of its own
        return frozenset(meta.find_undeclared_variables(tree))
    return frozenset({each.name for each in tree.find_all(nodes.Name)} - {*_environment().globals})


def fields_of(text: str, name: str, *, message: bool = False) -> set[str]:
    """The fields of a fact that it names: {"gpu"} of "want.gpu.count == 8" and "want"."""
    if message and "{" not in text:
        return set()
    found = _tree(text, message).find_all(nodes.Getattr)
    return {each.attr for each in found if isinstance(each.node, nodes.Name) and each.node.name == name}


def problems(
    origin: Origin, loc: Loc, text: str, names: Collection[str], *, message: bool = False, strict: bool = False
) -> tuple[list[InputError], jinja2.nodes.Template | None]:
    """What is wrong with an expression (or a `message` with expressions in it), and its syntax tree if it has one.

    `strict`: as it will be judged by `holds`, so that it is compiled once.
    """
    if message and "{" not in text:
        return [], None
    try:
        tree = _tree(text, message)
        if not message:
            _compiled(text, strict)
    except jinja2.TemplateSyntaxError as error:
        return [origin.error(loc, f"is not an expression: {error.message}")], None
    unknown = sorted(names_of(text, message=message) - set(names))
    return [origin.error(loc, f'there is no "{name}"', nearest(name, names)) for name in unknown], tree
