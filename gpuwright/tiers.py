"""`python -m gpuwright tiers`: the ladders as a person reads them, what changes between two tiers, and their files."""

from __future__ import annotations

import runpy
import textwrap
from collections.abc import Mapping
from typing import Any

from gpuwright import REPOSITORY
from gpuwright.catalogue import Catalogue
from gpuwright.errors import GpuwrightError, nearest
from gpuwright.hostdata import HostData, Sources
from gpuwright.ladder import Ladder, Standing, Tier, standing
from gpuwright.lockfile import lock_path, read_lock
from gpuwright.spec import Member, NodeSpec, build_spec, patch_set_digest

GROUPS = REPOSITORY / "group_data"


def group_values(group: str) -> dict[str, Any]:
    """What group_data/all.py and group_data/<group>.py say together, the latter winning, as pyinfra merges them."""
    names = [path.stem for path in GROUPS.glob("*.py")]
    if group not in names:
        raise GpuwrightError(f"there is no group_data/{group}.py; {nearest(group, names)}")
    values: dict[str, Any] = {}
    for name in ("all", group):
        values |= runpy.run_path(str(GROUPS / f"{name}.py"))
    return {name: value for name, value in values.items() if name in HostData.model_fields}


def spec_of(catalogue: Catalogue, group: str, tier: str | None, members: list[str], rank: int) -> NodeSpec:
    """The desired state of a host of `group`, with no node. `members`: the addresses of its cluster, by rank."""
    values = group_values(group) | {"allow_blocked": True} | ({"tier": tier} if tier else {})
    if "ladder" not in values:
        raise GpuwrightError(f"group {group} names no ladder: choose one whose group_data does, such as gpu or lab")
    ladder = catalogue.ladders.get(values["ladder"])
    names = [each.name for each in ladder.tiers] if ladder else []
    if tier and ladder and tier not in names:
        raise GpuwrightError(f'ladder {values["ladder"]} of group {group} has no tier "{tier}"; {nearest(tier, names)}')
    if "cluster" not in values and members:
        values["cluster"] = {"group": group}
    if members and not 0 <= rank < len(members):
        raise GpuwrightError(f"--rank {rank}: the ranks of {len(members)} members are 0 to {len(members) - 1}")
    host = members[rank] if members else group
    files = [GROUPS / f"{group}.py", GROUPS / "all.py"]
    return build_spec(host, values, catalogue, Sources((), files), tuple(Member(m, m) for m in members))


def standing_of(catalogue: Catalogue, ladder: Ladder, tier: Tier) -> Standing:
    """What is known of a tier on the stack's newest Python and the whole series."""
    stack = catalogue.stacks[ladder.stack]
    versions = read_lock(lock_path(stack, stack.pythons[-1])).versions
    return standing(tier, versions, patch_set_digest(catalogue.patches_for(versions)))


def listing(catalogue: Catalogue, only: str | None = None) -> str:
    """Every ladder (or the one named), a row a tier, and under it what is known of it."""
    if only is not None and only not in catalogue.ladders:
        raise GpuwrightError(f'there is no ladder "{only}"; {nearest(only, catalogue.ladders)}')
    lines: list[str] = []
    for name, ladder in catalogue.ladders.items():
        if only not in (None, name):
            continue
        nodes = f", {ladder.nodes} nodes" if ladder.nodes > 1 else ""
        lines += [f"{name}: {ladder.about} (stack {ladder.stack}, tp {ladder.tp}{nodes})"]
        found = [(tier, standing_of(catalogue, ladder, tier)) for tier in ladder.tiers]
        width = max(len(tier.name) for tier in ladder.tiers)
        for tier, known in found:
            lines.append(f"  {tier.rank:<4} {tier.name:<{width}}  {known.status:<8}  {tier.about}")
            change = [*_changes(tier), *(f"without {each}" for each in tier.without)]
            under = [", ".join(change)] if change else []
            under += [f"needs {_needs(tier)}"] if _needs(tier) else []
            under += [known.why] if known.why else []
            under += [tier.note] if tier.note and tier.note != known.why else []
            indent = " " * (7 + width + 12)
            filler = textwrap.TextWrapper(120, initial_indent=indent, subsequent_indent=indent + "  ")
            filler.break_on_hyphens = False
            lines += [filler.fill(text) for text in under]
        lines.append("")
    return "\n".join(lines).rstrip()


def _changes(tier: Tier) -> list[str]:
    args = [f"--{name}" if value is True else f"--{name} {_shown(value)}" for name, value in tier.args.items()]
    return args + [f"{name}={value}" for name, value in tier.env.items()]


def _needs(tier: Tier) -> str:
    needs = [f"patch {patch}" for patch in tier.needs.patches]
    if tier.needs.world_sizes:
        needs.append(" or ".join(map(str, tier.needs.world_sizes)) + " GPUs")
    if tier.needs.model_tensor:
        needs.append(f"a checkpoint with {tier.needs.model_tensor}*")
    return ", ".join(needs)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def difference(ladder: Ladder, one: Tier, other: Tier, deadline: int) -> str:
    """What changes from one tier to another, a line each: `+` comes, `-` goes, `~` differs."""
    lines: list[str] = []

    def compare(prefix: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for name in [*before, *(name for name in after if name not in before)]:
            old, new = before.get(name), after.get(name)
            if old == new:
                continue
            if name not in after:
                lines.append(f"- {prefix}{name}" + ("" if old is True else f" {_shown(old)}"))
            elif name not in before:
                lines.append(f"+ {prefix}{name}" + ("" if new is True else f" {_shown(new)}"))
            else:
                lines.append(f"~ {prefix}{name} {_shown(old)} -> {_shown(new)}")

    compare("--", ladder.merged_args(one), ladder.merged_args(other))
    compare("env ", ladder.merged_env(one), ladder.merged_env(other))
    for label, pick in (
        ("needs patch ", lambda tier: tier.needs.patches),
        ("must be logged: ", lambda tier: ladder.shown_by(tier).seen),
        ("must not be logged: ", lambda tier: ladder.shown_by(tier).never),
        ("breaks the rule, knowingly: ", lambda tier: list(tier.waive)),
    ):
        compare(label, dict.fromkeys(pick(one), True), dict.fromkeys(pick(other), True))
    tensors = [{f"{t.needs.model_tensor}*": True} if t.needs.model_tensor else {} for t in (one, other)]
    compare("needs a checkpoint with ", *tensors)
    before, after = one.ready_timeout_s or deadline, other.ready_timeout_s or deadline
    compare("ready within ", {"s": before}, {"s": after})
    return "\n".join([f"{one.name} -> {other.name}:", *(lines or ["no difference"])])
