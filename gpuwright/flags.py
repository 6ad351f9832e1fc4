"""The engine's own argument definitions, read from its source without importing it, and checks against them."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuwright.errors import nearest

ArgValue = bool | int | float | str | list[Any]


@dataclass(frozen=True)
class Flag:
    """One `parser.add_argument(...)`: `type` is str, int, float or json; a switch takes no value."""

    name: str
    type: str = "str"
    switch: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()


def read_flags(source: str) -> dict[str, Flag]:
    """Every `--flag` that `source` (the text of sglang/srt/server_args.py) defines, by each of its names.

    Choices written as a module constant are followed; ones computed any other way are left open. Only
    `add_argument` calls are looked at, so what the parser accepts by abbreviation is not listed.
    """
    tree = ast.parse(source)
    constants: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                constants[statement.targets[0].id] = ast.literal_eval(statement.value)
            except ValueError:
                continue
    flags: dict[str, Flag] = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            for flag in _flags_of(call, constants):
                flags[flag.name] = flag
    return dict(sorted(flags.items()))


def _flags_of(call: ast.Call, constants: dict[str, Any]) -> list[Flag]:
    names = [a.value for a in call.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")]
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    action = ast.unparse(keywords["action"]).strip("'\"") if "action" in keywords else "store"
    kind = ast.unparse(keywords["type"]) if "type" in keywords else "str"
    kind = {"json.loads": "json", "json_list_type": "json"}.get(kind, kind)
    choices = keywords.get("choices")
    allowed: Any = ()
    if isinstance(choices, ast.Name):
        allowed = constants.get(choices.id, ())
    elif choices is not None:
        try:
            allowed = ast.literal_eval(choices)
        except ValueError:
            allowed = ()
    return [
        Flag(
            name=str(name).removeprefix("--"),
            type=kind if kind in ("str", "int", "float", "json") else "str",
            switch=action in ("store_true", "store_false"),
            many="nargs" in keywords or action in ("append", "LoRAPathAction"),
            choices=tuple(
                str(choice) for choice in (sorted(allowed) if isinstance(allowed, set) else allowed) if choice
            ),
        )
        for name in names
    ]


def dump_flags(engine: str, version: str, flags: dict[str, Flag]) -> str:
    """The generated file's text: one flag a line, so that a new version's diff can be read."""
    rows = ",\n".join(f"  {json.dumps(asdict(flag))}" for flag in flags.values())
    return f'{{"engine": "{engine}", "version": "{version}", "flags": [\n{rows}\n]}}\n'


def load_flags(path: Path) -> dict[str, Flag]:
    """Read a file that dump_flags wrote."""
    rows = json.loads(path.read_text(encoding="utf-8"))["flags"]
    return {row["name"]: Flag(**{**row, "choices": tuple(row["choices"])}) for row in rows}


def problem_with(flags: dict[str, Flag], name: str, value: ArgValue) -> tuple[str, str] | None:
    """What is wrong with `--name value` as written in YAML, as (problem, hint), or None when it is right."""
    flag = flags.get(name)
    if flag is None:
        return "the pinned engine has no such flag", nearest(name, flags)
    if flag.switch:
        if value is not True:
            return f"is a switch: write `{name}: true`, or leave it out; found {value!r}", ""
        return None
    if isinstance(value, list) != flag.many:
        wanted = "a list" if flag.many else f"one value ({_word(flag.type)})"
        return f"expects {wanted}; found {value!r}", ""
    for item in value if isinstance(value, list) else [value]:
        if not _fits(flag.type, item):
            hint = "quote it, if the text is meant" if flag.type == "str" and not isinstance(item, bool) else ""
            return f"expects {_word(flag.type)}; found {item!r}", hint
        if flag.choices and str(item) not in flag.choices:
            return f"{item!r} is not a choice of the pinned engine", nearest(str(item), flag.choices)
    return None


def _word(kind: str) -> str:
    return {"int": "a whole number", "float": "a number", "json": "a JSON text", "str": "text"}[kind]


def _fits(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    types: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "json": (str,), "str": (str,)}
    return isinstance(value, types[kind])
