"""`python -m gpuwright tiers`: the ladders as a person reads them, what changes between tiers and stacks, the files."""

from __future__ import annotations

import runpy
import textwrap
from collections.abc import Callable, Mapping
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


def spec_of(
    catalogue: Catalogue, group: str, tier: str | None, members: list[str], rank: int, stack: str | None = None
) -> NodeSpec:
    """The desired state of a host of `group`, with no node. `members`: the addresses of its cluster, by rank; `stack`:
    another than the group's.
    """
    given = {name: value for name, value in (("tier", tier), ("stack", stack)) if value}
    values = group_values(group) | {"allow_blocked": True} | given
    if "ladder" not in values:
        raise GpuwrightError(f"group {group} names no ladder: choose one whose group_data does, such as gpu or lab")
    ladder = catalogue.ladders.get(values["stack"], {}).get(values["ladder"])
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


def standing_of(catalogue: Catalogue, stack: str, tier: Tier) -> Standing:
    """What is known of a tier of a stack, on its newest Python and the whole series."""
    return standing(tier, *_judged_by(catalogue, stack))


def _judged_by(catalogue: Catalogue, stack: str) -> tuple[dict[str, str], str]:
    versions = read_lock(lock_path(catalogue.stacks[stack], catalogue.stacks[stack].pythons[-1])).versions
    return versions, patch_set_digest(catalogue.patches_for(versions))


def _known(catalogue: Catalogue, stack: str, ladder: str) -> list[tuple[Tier, Standing]]:
    """A ladder's tiers and what is known of each: where nothing is, what a namesake elsewhere left is worth here."""
    judged_by = _judged_by(catalogue, stack)
    others = [
        (other, namesake)
        for other, ladders in catalogue.ladders.items()
        for namesake in (ladders[ladder].tiers if other != stack and ladder in ladders else ())
        if namesake.evidence
    ]
    found = []
    for tier in catalogue.ladders[stack][ladder].tiers:
        known = standing(tier, *judged_by)
        left = [(other, standing(each, *judged_by)) for other, each in others if each.name == tier.name]
        stale = [f"on {other} {each.why}" for other, each in left if each.status == "open"]
        found.append((tier, Standing(known.status, stale[0]) if stale and not tier.evidence else known))
    return found


def listing(catalogue: Catalogue, only: str | None = None, stack: str | None = None) -> str:
    """Every ladder (or those of that name, or of that stack), a row a tier, and under it what is known of it."""
    if stack is not None and stack not in catalogue.stacks:
        raise GpuwrightError(f'there is no stack "{stack}"; {nearest(stack, catalogue.stacks)}')
    asked = {name: each for name, each in catalogue.ladders.items() if stack in (None, name)}
    names = {ladder for ladders in asked.values() for ladder in ladders}
    if only is not None and only not in names:
        raise GpuwrightError(f'there is no ladder "{only}"; {nearest(only, names)}')
    lines: list[str] = []
    for of, name, ladder in ((of, name, ladder) for of, each in asked.items() for name, ladder in each.items()):
        if only not in (None, name):
            continue
        nodes = f", {ladder.nodes} nodes" if ladder.nodes > 1 else ""
        lines += [f"{name}: {ladder.about} (stack {of}, tp {ladder.tp}{nodes})"]
        found = _known(catalogue, of, name)
        width = max(len(tier.name) for tier in ladder.tiers)
        for tier, known in found:
            lines.append(f"  {tier.rank:<4} {tier.name:<{width}}  {known.status:<8}  {tier.about}")
            change = [*_changes(tier), *(f"without {each}" for each in tier.without)]
            under = [", ".join(change)] if change else []
            under += [f"needs {_needs(tier)}"] if _needs(tier) else []
            under += [known.why] if known.why else []
            under += [tier.note] if tier.note and tier.note != known.why else []
            indent = " " * (7 + width + 12)
            lines += [_filler(indent).fill(text) for text in under]
        lines.append("")
    return "\n".join(lines).rstrip()


def _filler(indent: str) -> textwrap.TextWrapper:
    return textwrap.TextWrapper(120, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


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
    lines = _differing((ladder, one), (ladder, other), deadline)
    return "\n".join([f"{one.name} -> {other.name}:", *(lines or ["no difference"])])


def between_stacks(catalogue: Catalogue, one: str, other: str, only: str | None = None) -> str:
    """What a host that moves from one stack to another and keeps its ladder and tier gets: the ladders that both have
    (or the one named), first what changes in all tiers, then what changes in each; and what one of them lacks.
    """
    for name in (one, other):
        if name not in catalogue.stacks:
            raise GpuwrightError(f'there is no stack "{name}"; {nearest(name, catalogue.stacks)}')
    before, after = catalogue.ladders[one], catalogue.ladders[other]
    if only is not None and only not in before | after:
        raise GpuwrightError(f'neither stack has a ladder "{only}"; {nearest(only, before | after)}')
    lines = [f"{one} -> {other}"]
    for name in before:
        if name in after and only in (None, name):
            lines += ["", f"{name}:", *(f"  {line}" for line in _ladder_difference(catalogue, (one, other), name))]
    for stack, mine, theirs in ((one, before, after), (other, after, before)):
        lacking = [name for name in mine if name not in theirs and only in (None, name)]
        lines += ["", f"only in {stack}: {', '.join(lacking)}"] if lacking else []
    return "\n".join(lines)


def _ladder_difference(catalogue: Catalogue, stacks: tuple[str, str], name: str) -> list[str]:
    ladders = [catalogue.ladders[stack][name] for stack in stacks]
    tiers = [{tier.name: (tier, known) for tier, known in _known(catalogue, stack, name)} for stack in stacks]
    base = Tier(name="ladder", rank="", about="")
    common = _differing((ladders[0], base), (ladders[1], base), 0)
    lines = ["every tier:", *(f"  {line}" for line in common)] if common else []
    for tier, (first, was) in tiers[0].items():
        if tier not in tiers[1]:
            lines.append(f"- {tier}")
            continue
        second, becomes = tiers[1][tier]
        found = _differing((ladders[0], first), (ladders[1], second), 0)
        own = [line for line in found if line not in common] + [f"not {line}" for line in common if line not in found]
        if was.status != becomes.status:
            own.append(f"~ {was.status} -> {becomes.status}")
        lines += [f"{tier}:", *(f"  {line}" for line in own)] if own else []
        lines += [_filler("  ").fill(becomes.why)] if own and becomes.why else []
    lines += [f"+ {tier}" for tier in tiers[1] if tier not in tiers[0]]
    return lines or ["no difference"]


def _differing(before_all: tuple[Ladder, Tier], after_all: tuple[Ladder, Tier], deadline: int) -> list[str]:
    (before_ladder, one), (after_ladder, other) = before_all, after_all
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

    compare("--", before_ladder.merged_args(one), after_ladder.merged_args(other))
    compare("env ", before_ladder.merged_env(one), after_ladder.merged_env(other))
    for label, pick in _LISTED:
        compare(label, *(dict.fromkeys(pick(*each), True) for each in (before_all, after_all)))
    tensors = [{f"{t.needs.model_tensor}*": True} if t.needs.model_tensor else {} for t in (one, other)]
    compare("needs a checkpoint with ", *tensors)
    fields = ("tp", "nodes", "model_type", "compute_capability")
    compare("", *({name: getattr(each, name) for name in fields} for each in (before_ladder, after_ladder)))
    before, after = one.ready_timeout_s or deadline, other.ready_timeout_s or deadline
    compare("ready within ", {"s": before}, {"s": after})
    return lines


_LISTED: tuple[tuple[str, Callable[[Ladder, Tier], list[str]]], ...] = (
    ("needs patch ", lambda ladder, tier: tier.needs.patches),
    ("must be logged: ", lambda ladder, tier: ladder.shown_by(tier).seen),
    ("must not be logged: ", lambda ladder, tier: ladder.shown_by(tier).never),
    ("breaks the rule, knowingly: ", lambda ladder, tier: [*ladder.waive, *tier.waive]),
)
