"""YAML files read into pydantic models, with the line of every value kept for the error messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from gpuwright import REPOSITORY
from gpuwright.errors import InputError, InputErrors, Place, nearest

Loc = tuple[str | int, ...]
M = TypeVar("M", bound="Row")
FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, which not every wheel of PyYAML has


class Row(BaseModel):
    """Base of every catalogue model: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def shown(path: Path) -> str:
    """A path as a person in the checkout would type it."""
    try:
        return str(path.resolve().relative_to(REPOSITORY))
    except ValueError:
        return str(path)


@dataclass(frozen=True)
class Origin:
    """Where a model was read from: the file, and the 1-based line of each value by its location."""

    path: Path
    lines: dict[Loc, int]

    def error(self, loc: Loc, problem: str, hint: str = "") -> InputError:
        """An error about the value at `loc`, for checks that need more than one value or file."""
        return InputError(Place(shown(self.path), line_of(self.lines, loc)), dotted(loc), problem, hint=hint)


def load_yaml(path: Path, model: type[M]) -> tuple[M, Origin]:
    """Read `path` into `model`. Raises InputErrors naming file, line and key."""
    value, lines = read_yaml(path)
    try:
        return model.model_validate(value), Origin(path, lines)
    except ValidationError as error:
        raise InputErrors([_input_error(path, lines, model, detail) for detail in error.errors()]) from error


def read_yaml(path: Path) -> tuple[Any, dict[Loc, int]]:
    """The plain value of a YAML file and the line of each part. Raises InputErrors on bad syntax or a repeated key."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputErrors([InputError(Place(shown(path)), "file", f"cannot be read: {error.strerror}")]) from error
    try:
        try:
            return _read(path, text, FAST)
        except yaml.YAMLError:
            return _read(path, text, yaml.SafeLoader)  # which says more clearly what is wrong
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise InputErrors([InputError(Place(shown(path), line), "YAML", error.problem or str(error))]) from error


def _read(path: Path, text: str, kind: Any) -> tuple[Any, dict[Loc, int]]:
    loader, lines = kind(text), dict[Loc, int]()
    try:
        node = loader.get_single_node()
        if node is None:
            raise InputErrors([InputError(Place(shown(path)), "file", "is empty")])
        _walk(path, node, (), lines)
        return loader.construct_document(node), lines
    finally:
        loader.dispose()


def line_of(lines: dict[Loc, int], loc: Loc) -> int | None:
    """The line of `loc`, or of the nearest part around it that has one (a missing key has none of its own)."""
    for end in range(len(loc), -1, -1):
        if loc[:end] in lines:
            return lines[loc[:end]]
    return None


def dotted(loc: Loc) -> str:
    """`ladders.lab.tiers[2].args` for a location."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _walk(path: Path, node: yaml.Node, loc: Loc, lines: dict[Loc, int]) -> None:
    lines.setdefault(loc, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str | int] = set()
        for key, value in node.value:
            at: Loc = (*loc, str(key.value))
            if at[-1] in seen:
                place = Place(shown(path), key.start_mark.line + 1)
                raise InputErrors([InputError(place, dotted(at), "is written twice in one mapping")])
            seen.add(at[-1])
            lines[at] = key.start_mark.line + 1
            _walk(path, value, at, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(path, value, (*loc, index), lines)


def _input_error(path: Path, lines: dict[Loc, int], model: type[BaseModel], detail: Any) -> InputError:
    loc: Loc = detail["loc"]
    problem, hint = describe(detail)
    if detail["type"] == "extra_forbidden":
        hint = nearest(str(loc[-1]), fields_at(model, loc[:-1]))
    return InputError(Place(shown(path), line_of(lines, loc)), dotted(loc), problem, hint=hint)


def describe(detail: Any) -> tuple[str, str]:
    """A pydantic error's detail in the words of a person, and a hint."""
    found = repr(detail.get("input"))
    found = found if len(found) <= 60 else found[:57] + "..."
    kind = detail["type"]
    if kind == "extra_forbidden":
        return "there is no such key", ""
    if kind == "missing":
        return "is missing", ""
    text = _WORDS.get(kind, detail["msg"].removeprefix("Value error, ").replace("Input should be", "should be", 1))
    return f"{text}; found {found}", ""


_WORDS = {
    "int_type": "should be a whole number",
    "float_type": "should be a number",
    "string_type": "should be text (in quotes, where it looks like a number)",
    "bool_type": "should be true or false",
    "list_type": "should be a list",
    "dict_type": "should be a mapping",
}


def fields_at(model: type[BaseModel], loc: Loc) -> list[str]:
    """The field names of the model found at `loc` inside `model` (best effort, for a hint only)."""
    current: Any = model
    for part in loc:
        if isinstance(current, type) and issubclass(current, BaseModel) and part in current.model_fields:
            current = current.model_fields[str(part)].annotation
        else:
            arguments = getattr(current, "__args__", ())
            current = arguments[-1] if arguments else current
    for candidate in (current, *getattr(current, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return list(candidate.model_fields)
    return list(model.model_fields)
