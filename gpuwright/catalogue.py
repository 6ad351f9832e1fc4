"""What a person edits: stacks, tiers and the patch series, as validated models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import Field, model_validator

from gpuwright import REPOSITORY
from gpuwright.acceptance import Acceptance, acceptance_errors
from gpuwright.checks import Checks, check_errors
from gpuwright.diagnose import Signatures, signature_errors
from gpuwright.errors import InputError, InputErrors, Place, nearest
from gpuwright.fields import DistributionName, EnvName, RequirementText, Sha256, Slug, SpecifierText
from gpuwright.flags import Flag, load_flags
from gpuwright.ladder import Ladder, Tiers, ladder_errors, resolve
from gpuwright.lockfile import lock_path, read_lock
from gpuwright.rules import Rule, Rules, broken_rules, rule_errors
from gpuwright.system import AnyRow, SystemRows, row_errors
from gpuwright.yamlfile import Loc, Origin, Row, load_yaml, shown

CATALOG = REPOSITORY / "catalog"
PATCHES = REPOSITORY / "files" / "patches"
FLAGS = REPOSITORY / "files" / "flags"


class Override(Row):
    """A requirement that replaces what a distribution pins, with the reason."""

    requirement: RequirementText
    why: str
    source: str


class LeftOut(Row):
    """A distribution that the requirements bring and this stack does without, with the reason."""

    distribution: DistributionName
    why: str


class Truth(Row):
    """Something that must be true of the installed stack: Python code whose last printed line must equal `expect`."""

    id: Slug
    code: str
    expect: str
    why: str


class Toolchain(Row):
    """What a stack needs of the machine: the CUDA release of its toolkit, the least driver from which compute
    capability on, the newest gcc that nvcc takes, the least glibc, and the libraries below site-packages whose kernels
    must cover the GPUs.
    """

    cuda: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    driver: dict[Annotated[str, Field(pattern=r"^\d+\.\d$")], str]
    gcc: int
    glibc: str
    kernels: list[str]

    def driver_for(self, compute_capability: str) -> str | None:
        """The least driver for GPUs of a compute capability ("12.0"); None for one that is older than all of them."""
        known = sorted(self.driver, key=Version)
        fitting = [each for each in known if Version(each) <= Version(compute_capability)]
        return self.driver[fitting[-1]] if fitting else None


class Stack(Row):
    """A set of distributions that work together: what goes in, and what must be true afterwards.

    `sources_only`: the requirements come without what they need themselves. Nothing of it can be imported, so nothing
    is proved by running it, and nothing is served.
    """

    name: Slug
    about: str
    engine: str
    engine_version: str
    pythons: list[Annotated[str, Field(pattern=r"^3\.\d+$")]] = Field(min_length=1)
    platform: str
    published_before: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    requirements: list[RequirementText] = Field(min_length=1)
    overrides: list[Override] = []
    leaves_out: list[LeftOut] = []
    must_be_true: list[Truth] = []
    sources_only: bool = False
    toolchain: Toolchain

    @property
    def engine_pin(self) -> str:
        """`sglang==0.5.9`."""
        return f"{self.engine}=={self.engine_version}"

    @model_validator(mode="after")
    def _nothing_runs(self) -> Stack:
        if self.sources_only and (self.must_be_true or self.overrides):
            raise ValueError("has sources alone: nothing can be proved by running it, and nothing needs an override")
        return self


class Assumption(Row):
    """Something a patch relies on, in words, and the code that ends with exit code 0 in the venv while it holds."""

    text: str
    code: str


class Patch(Row):
    """One entry of the series: a unified diff on one file of one distribution, by content hash.

    What is one change to its reader has one `id`, and an entry for each range of versions whose file differs.
    `active` ones are applied. A `rejected` one is kept with its evidence, so that nobody tries it again. A `retired`
    one is applied nowhere any more; its post-image is still known as ours, so that it can be taken back.
    `fixed_probe`: the probe that shows on other versions that upstream has fixed it, where `probe` itself cannot.
    """

    id: Slug
    status: Literal["active", "rejected", "retired"]
    distribution: DistributionName
    versions: SpecifierText
    file: str
    diff: str
    pre_sha256: Sha256
    post_sha256: Sha256
    superseded: list[Sha256] = []
    probe: str
    fixed_probe: str = ""
    why: str
    assumptions: list[Assumption] = []
    evidence: str = ""
    upstream: str
    forwarded: bool
    remove_when: str

    def covers(self, version: str | None) -> bool:
        """Whether the patch is made for this version of its distribution; None: it is not there."""
        return version is not None and SpecifierSet(self.versions).contains(version, prereleases=True)


class Setting(Row):
    """A change of behaviour that needs no patch: one variable of the ladders that name it, with its proof, on the
    stacks that pin its distribution at one of these versions.
    """

    id: Slug
    distribution: DistributionName
    versions: SpecifierText
    name: EnvName
    value: str
    ladders: list[str] = Field(min_length=1)
    probe: str
    why: str
    upstream: str
    remove_when: str

    def covers(self, version: str | None) -> bool:
        """Whether it is needed beside this version of its distribution; None: beside none of it."""
        return version is not None and SpecifierSet(self.versions).contains(version, prereleases=True)


class Series(Row):
    """files/patches/series.yaml: the patches in the order they are applied, and the settings beside them."""

    patches: list[Patch]
    settings: list[Setting] = []


@dataclass(frozen=True)
class Catalogue:
    """Everything under catalog/ and files/patches/, read and cross-checked. `ladders`: by stack, then by name."""

    stacks: dict[str, Stack]
    ladders: dict[str, dict[str, Ladder]]
    patches: tuple[Patch, ...]
    flags: dict[str, dict[str, Flag]]
    rules: tuple[Rule, ...]
    signatures: Signatures
    acceptance: Acceptance
    checks: Checks
    system: dict[str, AnyRow]
    settings: tuple[Setting, ...] = ()

    def patches_for(self, versions: Mapping[str, str]) -> tuple[Patch, ...]:
        """The active patches that are made for the pinned versions, in order."""
        return tuple(patch for patch in self._active(versions) if patch.covers(versions[patch.distribution]))

    def uncovered_for(self, versions: Mapping[str, str]) -> tuple[Patch, ...]:
        """The active patches of distributions pinned at a version that no entry of the same id is made for: to be fixed
        upstream. One entry for each id.
        """
        made = {patch.id for patch in self.patches_for(versions)}
        return tuple({patch.id: patch for patch in self._active(versions) if patch.id not in made}.values())

    def _active(self, versions: Mapping[str, str]) -> list[Patch]:
        return [patch for patch in self.patches if patch.status == "active" and patch.distribution in versions]


def flags_path(stack: Stack) -> Path:
    """Where the generated flags file of a stack's engine lies."""
    return FLAGS / f"{stack.engine}-{stack.engine_version}.json"


def load_catalogue(catalog: Path = CATALOG, patches: Path = PATCHES) -> Catalogue:
    """Read and cross-check the whole catalogue. Raises InputErrors with every problem found."""
    stacks: dict[str, Stack] = {}
    for path in sorted((catalog / "stacks").glob("*.yaml")):
        stack, origin = load_yaml(path, Stack)
        if stack.name != path.stem:
            raise InputErrors([origin.error(("name",), f'is "{stack.name}", but the file is named {path.name}')])
        stacks[stack.name] = stack
    series, in_series = load_yaml(patches / "series.yaml", Series)
    rules, in_rules = load_yaml(catalog / "rules.yaml", Rules)
    signatures, in_signatures = load_yaml(catalog / "signatures.yaml", Signatures)
    acceptance, in_acceptance = load_yaml(catalog / "acceptance.yaml", Acceptance)
    checks, in_checks = load_yaml(catalog / "checks.yaml", Checks)
    system, in_system = load_yaml(catalog / "system.yaml", SystemRows)
    flags = {name: load_flags(flags_path(stack)) for name, stack in stacks.items()}
    engines = {name: stack.engine_pin for name, stack in stacks.items()}
    patch_ids = {patch.id for patch in series.patches}
    errors = rule_errors(rules.rules, in_rules, engines, flags)
    ladders: dict[str, dict[str, Ladder]] = {}
    places: dict[str, Origin] = {}
    for name in stacks:
        written, places[name] = load_yaml(catalog / "tiers" / f"{name}.yaml", Tiers)
        ladders[name], wrong = resolve(written, places[name])
        errors += [*wrong, *ladder_errors(ladders[name], places[name], flags[name], patch_ids)]
    for path in sorted((catalog / "tiers").glob("*.yaml")):
        if path.stem not in stacks:
            errors.append(
                InputError(
                    Place(shown(path)), "file", f'there is no stack "{path.stem}"', hint=nearest(path.stem, stacks)
                )
            )
    if not errors:  # a rule is judged over arguments that are right by themselves
        for name in stacks:
            errors += broken_rules(ladders[name], places[name], rules.rules, engines[name])
    errors += _series_errors(series, in_series, stacks, ladders)
    settings = {setting.id for setting in series.settings}
    errors += acceptance_errors(acceptance, in_acceptance)
    errors += row_errors(system, in_system)
    errors += check_errors(checks, in_checks, [row.id for row in system.settings])
    errors += signature_errors(signatures, in_signatures, patch_ids, settings, {rule.id for rule in rules.rules})
    if errors:
        raise InputErrors(errors)
    return Catalogue(
        stacks,
        ladders,
        tuple(series.patches),
        flags,
        tuple(rules.rules),
        signatures,
        acceptance,
        checks,
        {row.id: row for row in system.settings},
        tuple(series.settings),
    )


def _series_errors(
    series: Series, origin: Origin, stacks: Mapping[str, Stack], ladders: Mapping[str, Mapping[str, Ladder]]
) -> list[InputError]:
    errors = []
    folder = origin.path.parent
    for index, patch in enumerate(series.patches):
        loc: Loc = ("patches", index)
        for key in ("diff", "probe", *(["fixed_probe"] if patch.fixed_probe else [])):
            if not (folder / getattr(patch, key)).is_file():
                errors.append(origin.error((*loc, key), f"{getattr(patch, key)} is not in {shown(folder)}"))
        if patch.status == "rejected" and not patch.evidence:
            errors.append(origin.error((*loc, "evidence"), "is missing: a rejected patch is kept for its evidence"))
    pins = {(stack.name, python): _pins(stack, python) for stack in stacks.values() for python in stack.pythons}
    said: set[tuple[int, str]] = set()  # a stack's locks for several Pythons mostly agree
    for (stack, _), versions in pins.items():
        for at, problem in _chain_errors(series.patches, versions):
            if (at[0], problem) not in said:
                said.add((at[0], problem))
                errors.append(origin.error(("patches", *at), f"{problem} (stack {stack})"))
    for index, setting in enumerate(series.settings):
        errors += _setting_errors(setting, origin, index, pins, ladders)
    return errors


def _pins(stack: Stack, python: str) -> dict[str, str]:
    return read_lock(lock_path(stack, python)).versions


def _chain_errors(patches: list[Patch], versions: Mapping[str, str]) -> list[tuple[tuple[int, str], str]]:
    """What is wrong with the series on these versions, each with its entry's index and key: two entries of one id that
    both apply, or an active one that does not begin where the one before it on the same file ends.
    """
    errors, heads, ids = [], dict[str, Patch](), set[str]()
    for index, patch in enumerate(patches):
        version = versions.get(patch.distribution)
        if not patch.covers(version):
            continue
        if patch.id in ids:
            errors.append(((index, "id"), f'"{patch.id}" is used twice for {patch.distribution} {version}'))
        ids.add(patch.id)
        if patch.status != "active":
            continue
        before = heads.get(patch.file)
        if before and patch.pre_sha256 != before.post_sha256:
            problem = f"is not the post-image of {before.id}, the patch before it on {patch.file}"
            errors.append(((index, "pre_sha256"), problem))
        heads[patch.file] = patch
    return errors


def _setting_errors(
    setting: Setting,
    origin: Origin,
    index: int,
    pins: Mapping[tuple[str, str], Mapping[str, str]],
    ladders: Mapping[str, Mapping[str, Ladder]],
) -> list[InputError]:
    at: Loc = ("settings", index)
    errors, folder = [], origin.path.parent
    if not (folder / setting.probe).is_file():
        errors.append(origin.error((*at, "probe"), f"{setting.probe} is not in {shown(folder)}"))
    names = {name for of_stack in ladders.values() for name in of_stack}
    for name in setting.ladders:
        if name not in names:
            errors.append(origin.error((*at, "ladders"), f'there is no ladder "{name}"', nearest(name, names)))
    needing = {stack for (stack, _), versions in pins.items() if setting.covers(versions.get(setting.distribution))}
    for stack, name in product(sorted(needing), setting.ladders):
        ladder = ladders[stack].get(name)
        if ladder is None:
            continue
        if ladder.env.get(setting.name) != setting.value:
            problem = f"ladder {name} of stack {stack} does not set {setting.name}={setting.value} in its env"
            errors.append(origin.error((*at, "value"), problem))
        for tier in ladder.tiers:
            if setting.name in (*tier.env, *tier.without):
                problem = f"tier {tier.name} of ladder {name} of stack {stack} changes it, which no proof would see"
                errors.append(origin.error((*at, "name"), problem, "leave it to the ladder's env"))
    return errors
