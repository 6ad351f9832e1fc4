"""The patch series from its author's side: check it against the pinned wheels, make a patch, print a waiver."""

from __future__ import annotations

import difflib
import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.utils import canonicalize_name

from gpuwright.catalogue import PATCHES, Catalogue, Patch, Stack, load_catalogue
from gpuwright.errors import GpuwrightError, nearest
from gpuwright.lockfile import Lock, lock_path, read_lock
from gpuwright.patches import exact_applier, read_diff
from gpuwright.yamlfile import shown


def sha256(data: bytes) -> str:
    """sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


class Wheels:
    """Files of pinned wheels, fetched through uv (and its cache) with the lock's hashes required."""

    def __init__(self, uv: Path, catalogue: Catalogue, folder: Path) -> None:
        self.uv, self.catalogue, self.folder = uv, catalogue, folder

    def pinned(self, distribution: str) -> dict[str, str]:
        """{stack: version} of a distribution in every stack's lock for its newest Python."""
        found = {}
        for stack in self.catalogue.stacks.values():
            version = _newest_lock(stack).versions.get(canonicalize_name(distribution))
            if version:
                found[stack.name] = version
        return found

    def read(self, distribution: str, version: str, file: str) -> bytes:
        """The pristine bytes of a file. Raises GpuwrightError when the wheel cannot be had or lacks the file."""
        target = self.folder / f"{distribution}-{version}"
        if not target.exists():
            entry = self._lock_entry(distribution, version)
            wanted = self.folder / "wanted.txt"
            wanted.write_text(entry, encoding="utf-8")
            command = [
                str(self.uv), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:",
                "--target", str(target), "-r", str(wanted),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise GpuwrightError(f"{distribution}=={version} cannot be had:\n{done.stderr.strip()}")
        try:
            return (target / file).read_bytes()
        except FileNotFoundError:
            raise GpuwrightError(f"{distribution} {version} has no file {file}") from None

    def _lock_entry(self, distribution: str, version: str) -> str:
        name = canonicalize_name(distribution)
        for stack in self.catalogue.stacks.values():
            lock = _newest_lock(stack)
            if lock.versions.get(name) == version:
                found = re.search(rf"^{re.escape(name)}==.*?(?=^\S|\Z)", lock.text, re.M | re.S)
                if found:
                    return found.group(0)
        raise GpuwrightError(f"no stack pins {distribution}=={version}")


def _newest_lock(stack: Stack) -> Lock:
    return read_lock(lock_path(stack, stack.pythons[-1]))


@dataclass(frozen=True)
class Checked:
    """One patch and what is known of it: where it applies, and whether its diff still makes its post-image.

    `problem` is set when the pinned wheel's real content contradicts the series.
    """

    patch: Patch
    stacks: dict[str, str]
    tiers: list[str]
    wheel: str
    problem: bool


def check(catalogue: Catalogue, wheels: Wheels, *, offline: bool) -> list[Checked]:
    """Every patch of the series, its diff recomputed over the pinned wheel unless `offline`."""
    found = []
    for patch in catalogue.patches:
        versions = wheels.pinned(patch.distribution)
        stacks = {
            stack: f"pinned {version}: {_said_of(patch, catalogue, stack, version)}"
            for stack, version in versions.items()
        }
        covered = {stack: version for stack, version in versions.items() if patch.covers(version)}
        tiers = [
            f"{name}/{tier.name}"
            for stack in covered
            for name, ladder in catalogue.ladders[stack].items()
            for tier in ladder.tiers
            if patch.id in tier.needs.patches
        ]
        if offline:
            wheel, problem = "not checked (--offline)", False
        elif not covered:
            wheel, problem = "no stack pins a version it is made for", False
        else:  # one range may cover several pinned versions, as long as the file is the same in all
            answers = [_recompute(patch, catalogue, wheels, version) for version in dict.fromkeys(covered.values())]
            wheel, problem = next((answer for answer in answers if answer[1]), answers[0])
        found.append(Checked(patch, stacks, tiers, wheel, problem))
    return found


def _said_of(patch: Patch, catalogue: Catalogue, stack: str, version: str) -> str:
    if patch.status != "active":
        return "not applied"
    if patch.covers(version):
        return "applied"
    versions = _newest_lock(catalogue.stacks[stack]).versions
    other = next((each for each in catalogue.patches_for(versions) if each.id == patch.id), None)
    return f"its entry for {other.versions} is applied" if other else "to be fixed upstream"


def _recompute(patch: Patch, catalogue: Catalogue, wheels: Wheels, version: str) -> tuple[str, bool]:
    """Take the wheel's file through the active patches before this one, then through this one."""
    content = wheels.read(patch.distribution, version, patch.file)
    try:
        for each in catalogue.patches:
            if each is patch:
                break
            before = each.status == "active" and each.file == patch.file and each.covers(version)
            if before and sha256(content) != patch.pre_sha256:
                content = exact_applier()(content, read_diff(each).encode())
        if sha256(content) != patch.pre_sha256:
            return f"pre-image is {sha256(content)}, not {patch.pre_sha256}", True
        result = sha256(exact_applier()(content, read_diff(patch).encode()))
    except ValueError as error:
        return f"the diff does not apply: {error}", True
    if result != patch.post_sha256:
        return f"post-image is {result}, not {patch.post_sha256}", True
    return f"checked: {patch.pre_sha256[:12]} becomes {patch.post_sha256[:12]}, as recorded", False


def listing(rows: list[Checked]) -> str:
    """The series as text, a block a patch."""
    blocks = []
    for row in rows:
        patch = row.patch
        lines = [
            f"{patch.id}  ({patch.status})",
            f"    on      {patch.distribution} {patch.versions}, {patch.file}",
            *(
                f"    stack   {', '.join(stack for stack in row.stacks if row.stacks[stack] == said)}, {said}"
                for said in dict.fromkeys(row.stacks.values())
            ),
            f"    tiers   {', '.join(row.tiers) or 'none names it'}",
            f"    wheel   {'PROBLEM: ' if row.problem else ''}{row.wheel}",
            f"    remove  when {patch.remove_when}"
            if patch.status == "active"
            else f"    why     {patch.evidence or patch.remove_when}",
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def find(catalogue: Catalogue, name: str) -> list[Patch]:
    """The entries of that id. Raises GpuwrightError with the nearest name."""
    found = [patch for patch in catalogue.patches if patch.id == name]
    if not found:
        names = {patch.id for patch in catalogue.patches}
        raise GpuwrightError(f'there is no patch "{name}" in the series; {nearest(name, names)}')
    return found


def waiver(patch: Patch) -> str:
    """The record a benchmark authority asks for before it accepts a patch: what, why, upstream, plan for removal."""
    assumptions = "".join(f"- {assumption.text}\n" for assumption in patch.assumptions) or "- none\n"
    forwarded = (
        "sent to upstream by us" if patch.forwarded else "not sent by us; this is the upstream change it stands for"
    )
    evidence = f"\n## Evidence\n{patch.evidence}\n" if patch.evidence else ""
    return f"""# Engine patch {patch.id} ({patch.status})

## What
{patch.distribution} {patch.versions}, file `{patch.file}`.
Pre-image sha256 `{patch.pre_sha256}`, post-image sha256 `{patch.post_sha256}`.

```diff
{read_diff(patch).rstrip()}
```

## Why
{patch.why}

## Assumptions, each checked on the node
{assumptions}
## Upstream
{patch.upstream} ({forwarded})

## Plan for removal
When {patch.remove_when}.

## How it is verified
By content hash before and after, and by running `files/patches/{patch.probe}` in the venv after every change.
{evidence}"""


@dataclass(frozen=True)
class NewPatch:
    """What the author of a patch says of it."""

    id: str
    distribution: str
    file: str
    edited: Path
    why: str
    upstream: str
    remove_when: str
    stack: str | None = None


def make(new: NewPatch, catalogue: Catalogue, wheels: Wheels, folder: Path = PATCHES) -> list[Path]:
    """Write the diff, a probe to be filled in, and the entry in series.yaml. Returns the files written.

    The base is the pinned wheel's file with the active patches on it applied, so that patches on one file chain. An id
    may be used again for a version that none of its entries is made for, and shares their probe. Raises GpuwrightError
    when the id is taken, nothing was edited, or the result would not read back.
    """
    version = _version_for(new, wheels)
    same = [patch for patch in catalogue.patches if patch.id == new.id]
    if any(patch.covers(version) for patch in same):
        raise GpuwrightError(f'"{new.id}" is taken: choose another --id')
    base = wheels.read(new.distribution, version, new.file)
    for patch in catalogue.patches:
        if patch.status == "active" and patch.file == new.file and patch.covers(version):
            base = exact_applier()(base, read_diff(patch).encode())
    edited = new.edited.read_bytes()
    diff = unified(base, edited, new.file)
    if not diff:
        raise GpuwrightError(f"{new.edited} does not differ from {new.file} of {new.distribution} {version} as patched")
    if exact_applier()(base, diff.encode()) != edited:
        raise GpuwrightError(f"{new.edited}: its diff does not read back; is it text with Unix line ends?")
    entry = {
        "id": new.id,
        "status": "active",
        "distribution": new.distribution,
        "versions": f"=={version}",
        "file": new.file,
        "diff": f"{new.id}-{version}.diff" if same else f"{new.id}.diff",
        "pre_sha256": sha256(base),
        "post_sha256": sha256(edited),
        "probe": same[0].probe if same else f"{new.id}.probe.py",
        "why": new.why,
        "upstream": new.upstream,
        "forwarded": False,
        "remove_when": new.remove_when,
    }
    series = folder / "series.yaml"
    before = series.read_text(encoding="utf-8")
    texts = {folder / str(entry["diff"]): diff}
    if not same:
        texts[folder / str(entry["probe"])] = PROBE.format(id=new.id)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    series.write_text(_with_entry(before, entry), encoding="utf-8")
    try:
        load_catalogue(patches=folder)
    except GpuwrightError:
        series.write_text(before, encoding="utf-8")
        for path in texts:
            path.unlink()
        raise
    return [*texts, series]


def _version_for(new: NewPatch, wheels: Wheels) -> str:
    pinned = wheels.pinned(new.distribution)
    if not pinned:
        raise GpuwrightError(f"no stack pins {new.distribution}")
    if new.stack is not None and new.stack not in pinned:
        raise GpuwrightError(f'no stack "{new.stack}" pins {new.distribution}; {nearest(new.stack, pinned)}')
    versions = {pinned[new.stack]} if new.stack else set(pinned.values())
    if len(versions) > 1:
        told = ", ".join(f"{version} by {stack}" for stack, version in pinned.items())
        raise GpuwrightError(f"{new.distribution} is pinned at {told}: say for which, with --stack")
    return versions.pop()


PROBE = '''"""Passes when {id} does what it is for; run in the venv, it must fail on the file without the patch."""

raise SystemExit("write this probe: show the behaviour that the patch changes")
'''


def _with_entry(text: str, entry: dict[str, object]) -> str:
    """series.yaml with an entry at the end of its patches; comments and everything else stay as they are."""
    rows = yaml.safe_dump([entry], sort_keys=False, width=116, allow_unicode=True).splitlines()
    block = "\n" + "".join(f"  {row}\n" for row in rows)
    node = yaml.compose(text)
    assert isinstance(node, yaml.MappingNode)
    starts = [key.start_mark.line for key, _ in node.value if key.value != "patches"]
    lines = text.splitlines(keepends=True)
    end = min(starts, default=len(lines))
    while end > 0 and (lines[end - 1].startswith("#") or not lines[end - 1].strip()):
        end -= 1
    return "".join(lines[:end]) + block + "".join(lines[end:])


def unified(old: bytes, new: bytes, file: str) -> str:
    """A unified diff as `diff -u` writes it; empty when nothing differs."""
    rows = difflib.unified_diff(_lines(old), _lines(new), f"a/{file}", f"b/{file}")
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


def _lines(data: bytes) -> list[str]:
    parts = data.decode("utf-8").split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def written_where(paths: list[Path], new: NewPatch) -> str:
    """What the author does next."""
    return (
        "\n".join(f"wrote {shown(path)}" for path in paths)
        + "\nnext: write the probe, add `assumptions` where the patch relies on something, name the patch in the\n"
        f"`needs` of the tiers that need {new.id}, then `python -m gpuwright patches` and `make lab`"
    )
