"""The engine's own argument definitions, read from its source without importing it, and checks against them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuwright import REPOSITORY
from gpuwright.errors import nearest
from gpuwright.node_module import node_module

READER = REPOSITORY / "files" / "node" / "engine_flags.py"

ArgValue = bool | int | float | str | list[Any]


@dataclass(frozen=True)
class Flag:
    """One `parser.add_argument(...)`: `type` is str, int, float or json; a switch takes no value.

    `same_as`: the name to use, where this is another name of the same.
    """

    name: str
    type: str = "str"
    switch: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()
    same_as: str = ""
    deprecated: bool = False


def read_flags(package: Path) -> dict[str, Flag]:
    """Every `--flag` of the engine in the folder `package` (…/site-packages/sglang), by each of its names."""
    return {name: _flag(row) for name, row in node_module("engine_flags").engine_flags(str(package)).items()}


def _flag(row: dict[str, Any]) -> Flag:
    return Flag(**{**row, "choices": tuple(row["choices"])})


def installed_proof(engine: str, flags: Mapping[str, Flag], recorded: str) -> str:
    """Code that ends with exit code 0 in a venv whose engine defines exactly `flags`; `recorded` names their file."""
    rows = json.dumps({name: vars(flag) for name, flag in flags.items()})  # asdict would copy: 10 ms a host
    return f"""{READER.read_text(encoding="utf-8")}
import importlib.util, json, sys
source = importlib.util.find_spec({engine!r}).submodule_search_locations[0]
found, recorded = engine_flags(source), json.loads({rows!r})
differ = sorted(name for name in found.keys() | recorded.keys() if found.get(name) != recorded.get(name))
if differ:
    sys.exit("%s defines other arguments than {recorded}: --%s\\n    -> make flags, if the installed engine is the "
             "right one; the tiers were checked against that file" % (source, ", --".join(differ[:8])))
"""


def dump_flags(engine: str, version: str, flags: dict[str, Flag]) -> str:
    """The generated file's text: one flag a line, so that a new version's diff can be read."""
    rows = ",\n".join(f"  {json.dumps(asdict(flag))}" for flag in flags.values())
    return f'{{"engine": "{engine}", "version": "{version}", "flags": [\n{rows}\n]}}\n'


def load_flags(path: Path) -> dict[str, Flag]:
    """Read a file that dump_flags wrote."""
    rows = json.loads(path.read_text(encoding="utf-8"))["flags"]
    return {row["name"]: _flag(row) for row in rows}


def problem_with(flags: Mapping[str, Flag], name: str, value: ArgValue) -> tuple[str, str] | None:
    """What is wrong with `--name value` as written in YAML, as (problem, hint), or None when it is right."""
    flag = flags.get(name)
    if flag is None:
        return "the pinned engine has no such flag", nearest(name, flags)
    if flag.same_as:
        return "is another name", f"write {flag.same_as}: rules and tiers know an argument by one name"
    if flag.deprecated:
        return "is deprecated in the pinned engine, and changes nothing", ""
    if flag.switch:
        if value is not True:
            return f"is a switch: write `{name}: true`, or leave it out; found {value!r}", ""
        return None
    if isinstance(value, list) != flag.many:
        wanted = "a list" if flag.many else f"one value ({_word(flag.type)})"
        return f"expects {wanted}; found {value!r}", ""
    if value == []:
        return "expects at least one value", "leave it out instead"
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
