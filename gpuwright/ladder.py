"""The ladders of catalog/tiers/: their models, how a tier that extends others becomes whole, what is wrong."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from gpuwright.errors import InputError, nearest
from gpuwright.fields import DistributionName, EnvName, RegexText, Slug
from gpuwright.flags import ArgValue, Flag, problem_with
from gpuwright.yamlfile import Loc, Origin, Row


class TookEffect(Row):
    """Log lines (regular expressions) that show a tier is really on, and lines that show it is not."""

    seen: list[RegexText] = []
    never: list[RegexText] = []


class Needs(Row):
    """What a tier cannot do without.

    `world_sizes`: the numbers of GPUs it works on (none: any). `model_tensor`: the start of a tensor's name that the
    model's index must list, for a tier that needs a checkpoint of its own kind.
    """

    patches: list[Slug] = []
    world_sizes: list[Annotated[int, Field(ge=1)]] = []
    model_tensor: str = ""


class Evidence(Row):
    """What was seen of a tier, when, and on what: it says nothing of other versions or of other patches.

    `patch_set` is the digest that the launch script of that day shows (or `none`); `result` a record or a page.
    """

    seen: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    what: str
    versions: dict[DistributionName, str] = Field(min_length=1)
    patch_set: Annotated[str, Field(pattern=r"^(none|[0-9a-f]{16,64})$")]
    result: str = ""


NO_PATCHES = hashlib.sha256(b"[]").hexdigest()
Status = Literal["open", "works", "blocked", "rejected"]


class Tier(Row):
    """One rung of a ladder: the change against the ladder's base, and what is known about it.

    `extends` names tiers of the same ladder whose change it contains; after loading, every tier is resolved: its
    fields hold what it inherits too. `waive` names rules of catalog/rules.yaml it may break, each with a reason.
    """

    name: Slug
    rank: str
    about: str
    extends: list[Slug] = []
    args: dict[str, ArgValue] = {}
    env: dict[EnvName, str] = {}
    without: list[str] = []
    needs: Needs = Needs()
    took_effect: TookEffect = TookEffect()
    ready_timeout_s: int | None = Field(default=None, ge=10)
    waive: dict[Slug, str] = {}
    status: Status = "open"
    evidence: list[Evidence] = []
    note: str = ""


class Ladder(Row):
    """A ranked list of tiers for one model on one kind of node, over common arguments and environment.

    `tp` is the tensor-parallel size over all `nodes`. `model_type` is the one of the model's config.json;
    `compute_capability` that of the GPUs ("12.0"), none where there are none.
    """

    about: str
    tp: int = Field(ge=1)
    nodes: int = Field(default=1, ge=1)
    model_type: str
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d$")] | None = None
    args: dict[str, ArgValue] = {}
    env: dict[EnvName, str] = {}
    took_effect: TookEffect = TookEffect()
    waive: dict[Slug, str] = {}
    tiers: list[Tier] = Field(min_length=1)

    def merged_args(self, tier: Tier) -> dict[str, ArgValue]:
        """The ladder's arguments with a tier's change."""
        return {name: value for name, value in self.args.items() if name not in tier.without} | tier.args

    def merged_env(self, tier: Tier) -> dict[str, str]:
        """The ladder's environment with a tier's change."""
        return {name: value for name, value in self.env.items() if name not in tier.without} | tier.env

    def shown_by(self, tier: Tier) -> TookEffect:
        """The log lines that show that a tier, with the ladder's own arguments, is really on."""
        own, common = tier.took_effect, self.took_effect
        return TookEffect(seen=_once((*common.seen, *own.seen)), never=_once((*common.never, *own.never)))


class Tiers(Row):
    """catalog/tiers/<stack>.yaml: the ladders of one stack."""

    ladders: dict[Slug, Ladder]


@dataclass(frozen=True)
class Standing:
    """What is known of a tier on given versions and patches. A status that was found on others counts as open."""

    status: Status
    why: str = ""


def standing(tier: Tier, versions: Mapping[str, str], patch_set: str) -> Standing:
    """Whether a tier's evidence was found on these versions and this patch-set digest (sha256 in hex)."""
    if tier.status == "open":
        return Standing("open", tier.note)
    stale = []
    for evidence in reversed(tier.evidence):
        differs = [
            f"{name} {version} (now {versions.get(name, 'absent')})"
            for name, version in evidence.versions.items()
            if versions.get(name) != version
        ]
        if not patch_set.startswith(NO_PATCHES if evidence.patch_set == "none" else evidence.patch_set):
            differs.append(f"patch set {evidence.patch_set[:16]} (now {patch_set[:16]})")
        if not differs:
            return Standing(tier.status, f"{evidence.what} ({evidence.seen})")
        stale.append(f"{evidence.what} ({evidence.seen}) on {', '.join(differs)}")
    return Standing("open", f"{tier.status} no more, because it was found on others: {stale[0]}")


def resolve(written: Tiers, origin: Origin) -> tuple[dict[str, Ladder], list[InputError]]:
    """Every ladder with its tiers made whole: what a tier extends comes first, in the order named, its own last."""
    ladders, errors = {}, []
    for name, ladder in written.ladders.items():
        by_name: dict[str, Tier] = {}
        places = {tier.name: ("ladders", name, "tiers", index) for index, tier in enumerate(ladder.tiers)}
        tiers = []
        for tier in ladder.tiers:
            whole = tier
            for position, other in enumerate(tier.extends):
                at: Loc = (*places[tier.name], "extends", position)
                if other not in by_name:  # only what stands above can be extended, so there is no circle
                    problem = f'there is no tier "{other}" above {tier.name} in this ladder'
                    errors.append(origin.error(at, problem, nearest(other, by_name) if by_name else ""))
            parents = [by_name[other] for other in tier.extends if other in by_name]
            there = {*ladder.args, *ladder.env, *(name for parent in parents for name in (*parent.args, *parent.env))}
            for position, left in enumerate(tier.without):
                if left not in there:
                    problem = f'"{left}" is neither an argument nor a variable of the ladder, or of what it extends'
                    at = (*places[tier.name], "without", position)
                    errors.append(origin.error(at, problem, nearest(left, there)))
            if parents:
                whole, clashes = _inherit(tier, parents)
                errors += [origin.error((*places[tier.name], "extends"), clash) for clash in clashes]
            by_name[tier.name] = whole
            tiers.append(whole)
        ladders[name] = ladder.model_copy(update={"tiers": tiers})
    return ladders, errors


def _inherit(tier: Tier, parents: list[Tier]) -> tuple[Tier, list[str]]:
    args: dict[str, ArgValue] = {}
    env: dict[str, str] = {}
    clashes = []
    for parent in parents:
        for mine, theirs, own in ((args, parent.args, tier.args), (env, parent.env, tier.env)):
            for name, value in theirs.items():
                if name in mine and mine[name] != value and name not in own:
                    clashes.append(f"{name} is {mine[name]} in one and {value} in {parent.name}: set it in {tier.name}")
            mine.update(theirs)  # type: ignore[arg-type]
    settled = {*tier.args, *tier.env, *tier.without}
    for parent in parents:
        dropped = [name for name in parent.without if name in (args | env) and name not in settled]
        clashes += [
            f"{name} is left out by {parent.name} and set by another: settle it in {tier.name}" for name in dropped
        ]
    without = _once(name for each in (*parents, tier) for name in each.without if name not in tier.args)
    needs = [each.needs for each in (*parents, tier)]
    sizes = [set(need.world_sizes) for need in needs if need.world_sizes]
    if sizes and not set.intersection(*sizes):
        clashes.append(f"no number of GPUs suits all of {', '.join(parent.name for parent in parents)}")
    tensors = _once(need.model_tensor for need in needs if need.model_tensor)
    if len(tensors) > 1 and not tier.needs.model_tensor:
        clashes.append(f"they need different checkpoints ({', '.join(tensors)}): set it in {tier.name}")
    blocked = [parent for parent in parents if parent.status == "blocked"]
    if tier.status == "open" and blocked:  # what a part of it fails on, it fails on
        tier = tier.model_copy(
            update={"status": "blocked", "evidence": [each for parent in blocked for each in parent.evidence]}
        )
    update = {
        "args": {name: value for name, value in args.items() if name not in tier.without} | tier.args,
        "env": {name: value for name, value in env.items() if name not in tier.without} | tier.env,
        "without": without,
        "needs": Needs(
            patches=_once(patch for need in needs for patch in need.patches),
            world_sizes=sorted(set.intersection(*sizes)) if sizes else [],
            model_tensor=tensors[-1] if tensors else "",
        ),
        "took_effect": TookEffect(
            seen=_once(text for each in (*parents, tier) for text in each.took_effect.seen),
            never=_once(text for each in (*parents, tier) for text in each.took_effect.never),
        ),
        "ready_timeout_s": tier.ready_timeout_s or max((p.ready_timeout_s or 0 for p in parents), default=0) or None,
        "waive": {rule: why for each in (*parents, tier) for rule, why in each.waive.items()},
    }
    return tier.model_copy(update=update), clashes


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


# What gpuwright renders itself, and where its user says it instead.
RESERVED_ARGS = {
    "model-path": "`model` in group_data",
    "model": "`model` in group_data",
    "host": "`bind` in group_data",
    "port": "`port` in group_data",
    "tp-size": "`tp` in the ladder",
    "tensor-parallel-size": "`tp` in the ladder",
    "nnodes": "`nodes` in the ladder",
    "node-rank": "`cluster` in group_data",
    "dist-init-addr": "`cluster` in group_data",
    "nccl-init-addr": "`cluster` in group_data",
    "api-key": "`secrets` in group_data (an argument is seen in every process list)",
    "admin-api-key": "`secrets` in group_data (an argument is seen in every process list)",
    "config": "the arguments themselves in the ladder",
}
RESERVED_ENV = {
    "PATH": "`cuda_home` in group_data",
    "CUDA_HOME": "`cuda_home` in group_data",
    "LD_LIBRARY_PATH": "`device` in group_data",
    "HOME": "`root` in group_data",
    "FLASHINFER_WORKSPACE_BASE": "`root` in group_data",
    "TRITON_CACHE_DIR": "`root` in group_data",
    "TORCHINDUCTOR_CACHE_DIR": "`root` in group_data",
    "XDG_CACHE_HOME": "`root` in group_data",
    "HF_HOME": "`root` in group_data",
}
SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_KEY|ACCESS_KEY)$")
# They change what flashinfer 0.6.3 compiles (jit/core.py, jit/cpp_ext.py). Kernels are cached by the ladder's, so a
# tier cannot have its own.
COMPILER_FLAGS = (
    "FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_CFLAGS", "FLASHINFER_EXTRA_LDFLAGS", "FLASHINFER_CUDA_ARCH_LIST",
    "FLASHINFER_NVCC", "FLASHINFER_JIT_DEBUG", "FLASHINFER_JIT_LINEINFO", "CC", "CXX",
)  # fmt: skip


def ladder_errors(
    ladders: Mapping[str, Ladder], origin: Origin, flags: Mapping[str, Flag], patches: set[str]
) -> list[InputError]:
    """What is wrong with a stack's ladders, by each value itself: names, flags, choices, patches, evidence."""
    errors = []
    for name, ladder in ladders.items():
        loc: Loc = ("ladders", name)
        if ladder.tp % ladder.nodes:
            problem = f"{ladder.tp} GPUs cannot be shared equally by {ladder.nodes} nodes"
            errors.append(origin.error((*loc, "tp"), problem))
        errors += _arg_errors(origin, (*loc, "args"), flags, ladder.args)
        errors += _env_errors(origin, (*loc, "env"), ladder.env)
        names: set[str] = set()
        for index, tier in enumerate(ladder.tiers):
            at: Loc = (*loc, "tiers", index)
            if tier.name in names:
                errors.append(origin.error((*at, "name"), f'"{tier.name}" is used twice in this ladder'))
            names.add(tier.name)
            errors += _tier_errors(origin, at, ladder, tier, flags, patches)
    return errors


def _tier_errors(
    origin: Origin, at: Loc, ladder: Ladder, tier: Tier, flags: Mapping[str, Flag], patches: set[str]
) -> list[InputError]:
    errors = _arg_errors(origin, (*at, "args"), flags, tier.args)
    errors += _env_errors(origin, (*at, "env"), tier.env)
    for name in tier.env:
        if name in COMPILER_FLAGS:
            hint = "set it in the ladder's env, or make a ladder of its own: kernels are cached by the ladder's flags"
            errors.append(origin.error((*at, "env", name), "changes what is compiled, so a tier cannot set it", hint))
    for position, patch in enumerate(tier.needs.patches):
        if patch not in patches:
            problem = f'there is no patch "{patch}" in the series'
            errors.append(origin.error((*at, "needs", "patches", position), problem, nearest(patch, patches)))
    if tier.needs.world_sizes and ladder.tp not in tier.needs.world_sizes:
        sizes = " or ".join(map(str, tier.needs.world_sizes))
        errors.append(origin.error((*at, "needs", "world_sizes"), f"needs {sizes} GPUs; the ladder has {ladder.tp}"))
    if tier.status != "open" and not tier.evidence:
        problem = f"{tier.status} needs `evidence`: what was seen, when, and on which versions and patches"
        errors.append(origin.error((*at, "status"), problem))
    return errors


def _arg_errors(origin: Origin, loc: Loc, flags: Mapping[str, Flag], args: Mapping[str, ArgValue]) -> list[InputError]:
    errors = []
    for name, value in args.items():
        if name in RESERVED_ARGS:
            errors.append(
                origin.error((*loc, name), "is rendered by gpuwright itself", f"set {RESERVED_ARGS[name]} instead")
            )
        elif found := problem_with(flags, name, value):
            errors.append(origin.error((*loc, name), *found))
    return errors


def _env_errors(origin: Origin, loc: Loc, env: Mapping[str, str]) -> list[InputError]:
    errors = []
    for name in env:
        if name in RESERVED_ENV:
            errors.append(
                origin.error((*loc, name), "is rendered by gpuwright itself", f"set {RESERVED_ENV[name]} instead")
            )
        elif SECRET.search(name.upper()):
            hint = "set `secrets` in group_data instead: scripts and records can be read by everyone"
            errors.append(origin.error((*loc, name), "has the name of a secret", hint))
    return errors
