"""The wheels of a lock in a folder of this machine: gathered once, for nodes that are installed without an index."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from gpuwright import REPOSITORY
from gpuwright.catalogue import Stack
from gpuwright.errors import GpuwrightError
from gpuwright.lockfile import TOOLS_LOCK, Lock, lock_path, read_lock
from gpuwright.yamlfile import shown

WHEELHOUSE = REPOSITORY / "wheelhouse"
KNOWN = "hashes.json"  # in the folder: each wheel's sha256, with the size and time of writing for which it was read
LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # PEP 600's names of older platforms
FETCHING = ".fetching-"
MB = 1_000_000


@dataclass(frozen=True)
class Wheel:
    """A wheel of a lock: whose it is (canonical name), its file's name, size in bytes, sha256 in hex."""

    distribution: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Gathered:
    """What a folder has of a lock: the wheel of each distribution, and of the others why there is none."""

    folder: Path
    wheels: Mapping[str, Wheel]
    lacking: Mapping[str, str]


def platform_tags(platform: str) -> list[str]:
    """The platform tags of wheels that a stack's platform runs, best first: "x86_64-manylinux_2_28" also runs those of
    every older glibc. Raises GpuwrightError for another kind of platform.
    """
    found = re.fullmatch(r"(\w+)-manylinux_2_(\d+)", platform)
    if found is None:
        raise GpuwrightError(f'platform "{platform}" of a stack is not ARCH-manylinux_2_MINOR')
    arch, tags = found[1], []
    for minor in range(int(found[2]), 4, -1):
        tags.append(f"manylinux_2_{minor}_{arch}")
        if minor in LEGACY:
            tags.append(f"{LEGACY[minor]}_{arch}")
    return [*tags, f"linux_{arch}"]


def supported_tags(stack: Stack, python: str) -> dict[Tag, int]:
    """The tags of wheels for a stack on a Python ("3.12"), with their ranks: 0 is the best."""
    version, platforms = tuple(map(int, python.split("."))), platform_tags(stack.platform)
    name = f"cp{python.replace('.', '')}"
    tags = [*cpython_tags(version, [name], platforms), *compatible_tags(version, name, platforms)]
    return {tag: rank for rank, tag in enumerate(tags)}


def named_by(file: str, locks: Iterable[Lock]) -> bool:
    """Whether a file has the name of a wheel of one of these locks, for whatever platform."""
    try:
        name, version, _, _ = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return False
    return any(name in lock.versions and _same(lock.versions[name], version) for lock in locks)


def _same(text: str, version: Version) -> bool:
    try:
        return Version(text) == version
    except InvalidVersion:
        return False


def read_wheelhouse(folder: Path, lock: Lock, stack: Stack, python: str) -> Gathered:
    """What a folder has of a lock. A wheel counts if it has the lock's name, version and one of its hashes."""
    ranks, known = supported_tags(stack, python), _known(folder)
    best: dict[str, tuple[int, Wheel]] = {}
    lacking = dict.fromkeys(lock.versions, "is not there")
    for path in sorted(folder.glob("*.whl")):
        try:
            name, version, _, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        fits = [ranks[tag] for tag in tags if tag in ranks]
        if name not in lock.versions or not fits or not _same(lock.versions[name], version):
            continue
        sha256 = known.get(path.name) or _sha256_as_written(path, *(_written(path) or ()))
        wheel = Wheel(str(name), path.name, path.stat().st_size, sha256)
        if wheel.sha256 not in lock.hashes[name]:
            lacking[name] = f"has another content than the lock names ({path.name}: sha256 {wheel.sha256[:12]})"
        elif name not in best or min(fits) < best[name][0]:
            best[name] = (min(fits), wheel)
    wheels = {name: wheel for name, (_, wheel) in best.items()}
    return Gathered(folder, wheels, {name: why for name, why in lacking.items() if name not in wheels})


def _known(folder: Path) -> dict[str, str]:
    """The sha256 of the files that are as they were when `gather` hashed them: reading 5 GB takes seconds."""
    try:
        rows = json.loads((folder / KNOWN).read_text(encoding="utf-8"))
        return {file: row["sha256"] for file, row in rows.items() if row["written"] == _written(folder / file)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _written(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _remember(folder: Path) -> None:
    known = _known(folder)
    files = sorted(folder.glob("*.whl"))
    rows = {
        path.name: {"sha256": known.get(path.name) or file_sha256(path), "written": _written(path)} for path in files
    }
    (folder / KNOWN).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


@cache
def _sha256_as_written(path: Path, *written: int) -> str:
    """Of a wheel that `gather` has not seen: once a run, and not for each of its hosts."""
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def number_of(wheels: Sized) -> str:
    """`1 wheel`, `2 wheels`."""
    return f"{len(wheels)} wheel{'' if len(wheels) == 1 else 's'}"


def remedy(stack: Stack, python: str, folder: Path) -> str:
    """The command that fills a folder."""
    to = "" if folder == WHEELHOUSE else f" TO={folder}"
    return f"make wheelhouse STACK={stack.name} PYTHON={python}{to}"


def brought_by(listed: Path, lock: Lock, patched: Collection[str]) -> set[str]:
    """What of a lock an interpreter that is to be adopted has in the lock's version, by its own `pip list --format
    json`; not what carries patches. Raises GpuwrightError where the file is none.
    """
    try:
        rows = {str(canonicalize_name(row["name"])): row["version"] for row in json.loads(listed.read_text("utf-8"))}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise GpuwrightError(f"{shown(listed)} does not hold what `pip list --format json` prints: {error}") from None
    public = {name: version.partition("+")[0] for name, version in rows.items()}
    return {
        name
        for name, version in lock.versions.items()
        if name in public and name not in patched and public[name] == version.partition("+")[0]
    }


def gather(stack: Stack, python: str, folder: Path, *, prune: bool, left_out: Collection[str] = ()) -> str:
    """Have every wheel of a stack's lock, less `left_out`, and of the tools' in `folder`; says what was done. What is
    there already is not asked for. `prune` removes wheels of no lock, which are named otherwise.

    Raises GpuwrightError where one cannot be had.
    """
    if python not in stack.pythons:
        raise GpuwrightError(f"{stack.name} is locked for Python {', '.join(stack.pythons)}, not {python}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in folder.glob(f"{FETCHING}*"):  # of a run that was killed
            shutil.rmtree(path)
        return _gather(stack, python, folder, prune=prune, left_out=left_out)


def _gather(stack: Stack, python: str, folder: Path, *, prune: bool, left_out: Collection[str]) -> str:
    locks = [read_lock(lock_path(stack, python)).without(left_out), read_lock(TOOLS_LOCK)]
    fetched = 0
    for lock in locks:
        lacking = read_wheelhouse(folder, lock, stack, python).lacking
        if lacking:
            print(f"{len(lacking)} of {len(lock.versions)} wheels to fetch: {', '.join(lacking)}", flush=True)
            fetched += _fetch(lock, sorted(lacking), stack, python, folder)
    _remember(folder)
    wheels = {wheel.file: wheel for lock in locks for wheel in _whole(folder, lock, stack, python).values()}
    every = [read_lock(path) for path in sorted(TOOLS_LOCK.parent.glob("*.txt"))]
    foreign = [path for path in sorted(folder.glob("*.whl")) if not named_by(path.name, every)]
    if prune:
        for path in foreign:
            path.unlink()
        _remember(folder)
    size = sum(wheel.size for wheel in wheels.values()) / MB
    said = (
        f"{shown(folder)}: {len(wheels)} wheels of {stack.name} for Python {python} and of the tools, {size:.1f} MB; "
    )
    said += f"{fetched} fetched" if fetched else "nothing to fetch"
    if foreign:
        names = ", ".join(path.name for path in foreign)
        said += f"\n{'removed, of' if prune else 'of'} no lock{'' if prune else ' (--prune removes them)'}: {names}"
    return said


def _whole(folder: Path, lock: Lock, stack: Stack, python: str) -> Mapping[str, Wheel]:
    found = read_wheelhouse(folder, lock, stack, python)
    if found.lacking:
        said = "\n".join(f"  {name}=={lock.versions[name]} {why}" for name, why in found.lacking.items())
        raise GpuwrightError(f"{shown(folder)} is not whole after fetching:\n{said}")
    return found.wheels


def _fetch(lock: Lock, names: list[str], stack: Stack, python: str, folder: Path) -> int:
    """Fetch the wheels of these distributions by pip, hashes required. It shows its progress itself."""
    text = lock.without(lock.versions.keys() - set(names)).text
    with tempfile.TemporaryDirectory(dir=folder, prefix=FETCHING) as temporary:
        wanted = Path(temporary) / "wanted.txt"
        wanted.write_text(text, encoding="utf-8")
        command = [
            sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps",
            "--require-hashes", "--only-binary", ":all:", "--python-version", python, "--implementation", "cp",
            *(part for tag in platform_tags(stack.platform) for part in ("--platform", tag)),
            "--dest", temporary, "--requirement", str(wanted),
        ]  # fmt: skip
        # In a folder beside the others, as /tmp may be small: pip has all of them there before it saves the first.
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": temporary})
        if done.returncode:
            said = done.stderr[max(0, done.stderr.find("ERROR")) :].strip()
            raise GpuwrightError(f"{stack.name} for Python {python}: not every wheel can be had:\n{said}")
        files = sorted(Path(temporary).glob("*.whl"))
        for path in files:
            path.replace(folder / path.name)
    return len(files)
