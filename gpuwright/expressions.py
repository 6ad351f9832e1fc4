"""Conditions and messages as data: Jinja expressions over named facts, in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

from gpuwright.errors import InputError, nearest
from gpuwright.yamlfile import Loc, Origin


@cache
def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment()
    environment.tests["matching"] = lambda value, pattern: re.fullmatch(pattern, str(value)) is not None
    return environment


@cache
def _strict() -> jinja2.Environment:
    return _environment().overlay(undefined=jinja2.StrictUndefined)


@cache
def _compiled(expression: str) -> Callable[..., Any]:
    return _environment().compile_expression(expression)


def holds(expression: str, facts: Mapping[str, Any]) -> bool | None:
    """Whether an expression is true of the facts; None when it cannot be judged: it counts with what is not there."""
    try:
        return bool(_compiled(expression)(**facts))
    except (jinja2.UndefinedError, TypeError, ArithmeticError):
        return None


def filled(message: str, facts: Mapping[str, Any]) -> str:
    """A message with the facts in it; itself as it is written where one is not there."""
    try:
        return _strict().from_string(message).render(**facts)
    except (jinja2.UndefinedError, TypeError, ArithmeticError, ValueError):
        return message


def problems(
    origin: Origin, loc: Loc, text: str, names: Collection[str], *, message: bool = False
) -> tuple[list[InputError], jinja2.nodes.Template | None]:
    """What is wrong with an expression (or a `message` with expressions in it), and its syntax tree if it has one."""
    try:
        tree = _environment().parse(text if message else "{{ " + text + " }}")
        if not message:
            _compiled(text)
    except jinja2.TemplateSyntaxError as error:
        return [origin.error(loc, f"is not an expression: {error.message}")], None
    unknown = sorted({node.name for node in tree.find_all(nodes.Name)} - set(names))
    return [origin.error(loc, f'there is no "{name}"', nearest(name, names)) for name in unknown], tree
