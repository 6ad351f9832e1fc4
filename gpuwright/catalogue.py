"""What a person edits: stacks, tiers and the patch series, as validated models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, Field

from gpuwright import REPOSITORY
from gpuwright.errors import InputError, InputErrors, Place, nearest
from gpuwright.flags import ArgValue, Flag, load_flags, problem_with
from gpuwright.hostdata import EnvName
from gpuwright.yamlfile import Loc, Row, dotted, line_of, load_yaml, shown

CATALOG = REPOSITORY / "catalog"
PATCHES = REPOSITORY / "files" / "patches"
FLAGS = REPOSITORY / "files" / "flags"


def _requirement(text: str) -> str:
    try:
        Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"is not a requirement ({error})") from None
    return text


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError("is not a version specifier, such as ==0.6.3") from None
    return text


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error})") from None
    return text


RequirementText = Annotated[str, AfterValidator(_requirement)]
SpecifierText = Annotated[str, AfterValidator(_specifier)]
RegexText = Annotated[str, AfterValidator(_regex)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]


class Override(Row):
    """A requirement that replaces what a distribution pins, with the reason."""

    requirement: RequirementText
    why: str
    source: str


class Truth(Row):
    """Something that must be true of the installed stack: Python code whose last printed line must equal `expect`."""

    id: Slug
    code: str
    expect: str
    why: str


class Stack(Row):
    """A set of distributions that work together: what goes in, and what must be true afterwards."""

    name: Slug
    about: str
    engine: str
    engine_version: str
    pythons: list[Annotated[str, Field(pattern=r"^3\.\d+$")]] = Field(min_length=1)
    platform: str
    published_before: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    requirements: list[RequirementText] = Field(min_length=1)
    overrides: list[Override] = []
    must_be_true: list[Truth] = []


class TookEffect(Row):
    """Log lines (regular expressions) that show a tier is really on, and lines that show it is not."""

    seen: list[RegexText] = []
    never: list[RegexText] = []


class Tier(Row):
    """One rung of a ladder: the change against the ladder's base, and what is known about it."""

    name: Slug
    rank: str
    about: str
    args: dict[str, ArgValue] = {}
    env: dict[EnvName, str] = {}
    without: list[str] = []
    patches: list[Slug] = []
    took_effect: TookEffect = TookEffect()
    status: Literal["open", "works", "blocked", "rejected"] = "open"
    evidence: str = ""


class Ladder(Row):
    """A ranked list of tiers for one model on one kind of node, over common arguments and environment."""

    about: str
    stack: str
    tp: int = Field(ge=1)
    args: dict[str, ArgValue] = {}
    env: dict[EnvName, str] = {}
    tiers: list[Tier] = Field(min_length=1)


class Tiers(Row):
    """catalog/tiers.yaml."""

    ladders: dict[Slug, Ladder]


class Assumption(Row):
    """Something a patch relies on, in words, and the code that ends with exit code 0 in the venv while it holds."""

    text: str
    code: str


class Patch(Row):
    """One entry of the series: a unified diff on one file of one distribution, by content hash.

    `active` ones are applied. A `rejected` one is kept with its evidence, so that nobody tries it again. A `retired`
    one is applied nowhere any more; its post-image is still known as ours, so that it can be taken back.
    """

    id: Slug
    status: Literal["active", "rejected", "retired"]
    distribution: str
    versions: SpecifierText
    file: str
    diff: str
    pre_sha256: Sha256
    post_sha256: Sha256
    superseded: list[Sha256] = []
    probe: str
    why: str
    assumptions: list[Assumption] = []
    evidence: str = ""
    upstream: str
    forwarded: bool
    remove_when: str

    def covers(self, version: str) -> bool:
        """Whether the patch is made for this version of its distribution."""
        return SpecifierSet(self.versions).contains(version, prereleases=True)


class Setting(Row):
    """A change of behaviour that needs no patch: one variable of the ladders that name it, with its proof."""

    id: Slug
    name: EnvName
    value: str
    ladders: list[str] = Field(min_length=1)
    probe: str
    why: str
    upstream: str
    remove_when: str


class Series(Row):
    """files/patches/series.yaml: the patches in the order they are applied, and the settings beside them."""

    patches: list[Patch]
    settings: list[Setting] = []


@dataclass(frozen=True)
class Catalogue:
    """Everything under catalog/ and files/patches/, read and cross-checked."""

    stacks: dict[str, Stack]
    ladders: dict[str, Ladder]
    patches: tuple[Patch, ...]
    flags: dict[str, dict[str, Flag]]

    settings: tuple[Setting, ...] = ()

    def patches_for(self, versions: Mapping[str, str]) -> tuple[Patch, ...]:
        """The active patches that are made for the pinned versions, in order."""
        return tuple(patch for patch in self._active(versions) if patch.covers(versions[patch.distribution]))

    def uncovered_for(self, versions: Mapping[str, str]) -> tuple[Patch, ...]:
        """The active patches of distributions pinned at a version they are not made for: to be fixed upstream."""
        return tuple(patch for patch in self._active(versions) if not patch.covers(versions[patch.distribution]))

    def _active(self, versions: Mapping[str, str]) -> list[Patch]:
        return [patch for patch in self.patches if patch.status == "active" and patch.distribution in versions]


def flags_path(stack: Stack) -> Path:
    """Where the generated flags file of a stack's engine lies."""
    return FLAGS / f"{stack.engine}-{stack.engine_version}.json"


def load_catalogue(catalog: Path = CATALOG, patches: Path = PATCHES) -> Catalogue:
    """Read and cross-check the whole catalogue. Raises InputErrors with every problem found."""
    stacks: dict[str, Stack] = {}
    for path in sorted((catalog / "stacks").glob("*.yaml")):
        stack, lines = load_yaml(path, Stack)
        if stack.name != path.stem:
            place = Place(shown(path), line_of(lines, ("name",)))
            raise InputErrors([InputError(place, "name", f'is "{stack.name}", but the file is named {path.name}')])
        stacks[stack.name] = stack
    series, series_lines = load_yaml(patches / "series.yaml", Series)
    tiers, tier_lines = load_yaml(catalog / "tiers.yaml", Tiers)
    flags = {name: load_flags(flags_path(stack)) for name, stack in stacks.items()}
    errors = [
        *_series_errors(patches / "series.yaml", series, series_lines, tiers),
        *_tier_errors(catalog / "tiers.yaml", tiers, tier_lines, stacks, flags, {p.id for p in series.patches}),
    ]
    if errors:
        raise InputErrors(errors)
    return Catalogue(stacks, dict(tiers.ladders), tuple(series.patches), flags, tuple(series.settings))


def _series_errors(path: Path, series: Series, lines: dict[Loc, int], tiers: Tiers) -> list[InputError]:
    errors, seen = [], set()
    heads: dict[str, Patch] = {}
    for index, patch in enumerate(series.patches):
        loc: Loc = ("patches", index)
        if patch.id in seen:
            errors.append(_error(path, lines, (*loc, "id"), f'"{patch.id}" is used twice'))
        seen.add(patch.id)
        for key in ("diff", "probe"):
            if not (path.parent / getattr(patch, key)).is_file():
                errors.append(_error(path, lines, (*loc, key), f"{getattr(patch, key)} is not in {shown(path.parent)}"))
        if patch.status == "rejected" and not patch.evidence:
            errors.append(
                _error(path, lines, (*loc, "evidence"), "is missing: a rejected patch is kept for its evidence")
            )
        before = heads.get(patch.file)
        if patch.status == "active" and before and patch.pre_sha256 != before.post_sha256:
            problem = f"is not the post-image of {before.id}, the patch before it on {patch.file}"
            errors.append(_error(path, lines, (*loc, "pre_sha256"), problem))
        if patch.status == "active":
            heads[patch.file] = patch
    for index, setting in enumerate(series.settings):
        at: Loc = ("settings", index)
        if not (path.parent / setting.probe).is_file():
            errors.append(_error(path, lines, (*at, "probe"), f"{setting.probe} is not in {shown(path.parent)}"))
        for ladder in setting.ladders:
            if ladder not in tiers.ladders:
                problem = f'there is no ladder "{ladder}"'
                errors.append(_error(path, lines, (*at, "ladders"), problem, nearest(ladder, tiers.ladders)))
            elif tiers.ladders[ladder].env.get(setting.name) != setting.value:
                problem = f"ladder {ladder} does not set {setting.name}={setting.value} in its env"
                errors.append(_error(path, lines, (*at, "value"), problem))
    return errors


def _tier_errors(
    path: Path,
    tiers: Tiers,
    lines: dict[Loc, int],
    stacks: dict[str, Stack],
    flags: dict[str, dict[str, Flag]],
    patches: set[str],
) -> list[InputError]:
    errors = []
    for ladder_name, ladder in tiers.ladders.items():
        loc: Loc = ("ladders", ladder_name)
        if ladder.stack not in stacks:
            problem = f'there is no stack "{ladder.stack}"'
            errors.append(_error(path, lines, (*loc, "stack"), problem, nearest(ladder.stack, stacks)))
            continue
        known = flags[ladder.stack]
        errors += _arg_errors(path, lines, (*loc, "args"), known, ladder.args)
        names: set[str] = set()
        for index, tier in enumerate(ladder.tiers):
            at: Loc = (*loc, "tiers", index)
            if tier.name in names:
                errors.append(_error(path, lines, (*at, "name"), f'"{tier.name}" is used twice in this ladder'))
            names.add(tier.name)
            errors += _arg_errors(path, lines, (*at, "args"), known, tier.args)
            for position, name in enumerate(tier.without):
                if name not in ladder.args:
                    problem = f'"{name}" is not an argument of the ladder'
                    errors.append(_error(path, lines, (*at, "without", position), problem, nearest(name, ladder.args)))
            for position, patch in enumerate(tier.patches):
                if patch not in patches:
                    problem = f'there is no patch "{patch}" in the series'
                    errors.append(_error(path, lines, (*at, "patches", position), problem, nearest(patch, patches)))
    return errors


# What gpuwright renders itself, by the key that sets it.
RESERVED_ARGS = {
    "model-path": "model",
    "model": "model",
    "host": "bind",
    "port": "port",
    "tp-size": "tp",
    "tensor-parallel-size": "tp",
}


def _arg_errors(
    path: Path, lines: dict[Loc, int], loc: Loc, flags: dict[str, Flag], args: dict[str, ArgValue]
) -> list[InputError]:
    errors = []
    for name, value in args.items():
        if name in RESERVED_ARGS:
            where = "the ladder" if RESERVED_ARGS[name] == "tp" else "group_data"
            hint = f"set `{RESERVED_ARGS[name]}` in {where} instead"
            errors.append(_error(path, lines, (*loc, name), "is rendered by gpuwright itself", hint))
        elif found := problem_with(flags, name, value):
            errors.append(_error(path, lines, (*loc, name), *found))
    return errors


def _error(path: Path, lines: dict[Loc, int], loc: Loc, problem: str, hint: str = "") -> InputError:
    return InputError(Place(shown(path), line_of(lines, loc)), dotted(loc), problem, hint=hint)
