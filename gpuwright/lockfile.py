"""Lock files: what a stack resolves to, with hashes, one file per stack and Python version."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from gpuwright import REPOSITORY
from gpuwright.errors import GpuwrightError
from gpuwright.yamlfile import shown

if TYPE_CHECKING:
    from gpuwright.catalogue import Stack

LOCKS = REPOSITORY / "files" / "locks"
TOOLS_LOCK = LOCKS / "tools.txt"
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.M)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_INPUTS = re.compile(r"^# stack-inputs: sha256:([0-9a-f]{64})$", re.M)


@dataclass(frozen=True)
class Lock:
    """A lock file's text, its sha256, and the version it pins for each distribution (canonical names), with the sha256
    of every file that may be installed for it.
    """

    text: str
    sha256: str
    versions: dict[str, str]
    hashes: dict[str, frozenset[str]]
    inputs: str

    def without(self, names: Collection[str]) -> Lock:
        """The lock less some distributions (canonical names)."""
        if not names:
            return self
        parts = re.split(r"^(?=[A-Za-z0-9])", self.text, flags=re.M)  # what goes before the first pin, then each pin
        kept = [part for part in parts if not (pin := _PIN.match(part)) or canonicalize_name(pin[1]) not in names]
        text = "".join(kept)
        versions = {name: version for name, version in self.versions.items() if name not in names}
        hashes = {name: found for name, found in self.hashes.items() if name not in names}
        return Lock(text, hashlib.sha256(text.encode()).hexdigest(), versions, hashes, self.inputs)


def lock_path(stack: Stack, python: str) -> Path:
    """Where the lock of a stack for a Python version ("3.12") lies."""
    return LOCKS / f"{stack.name}-py{python.replace('.', '')}.txt"


def read_lock(path: Path) -> Lock:
    """Read a lock file. Raises GpuwrightError if it is missing or pins nothing."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise GpuwrightError(f"{shown(path)} does not exist: run `make lock`") from None
    pins = list(_PIN.finditer(text))
    if not pins:
        raise GpuwrightError(f"{shown(path)} pins no distribution: run `make lock`")
    ends = [pin.start() for pin in pins[1:]] + [len(text)]
    versions: dict[str, str] = {canonicalize_name(pin[1]): pin[2] for pin in pins}
    hashes: dict[str, frozenset[str]] = {
        canonicalize_name(pin[1]): frozenset(_HASH.findall(text, pin.end(), end))
        for pin, end in zip(pins, ends, strict=True)
    }
    found = _INPUTS.search(text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return Lock(text, sha256, versions, hashes, found.group(1) if found else "")


def inputs_digest(stack: Stack, python: str) -> str:
    """sha256 over all that decides a lock: requirements, overrides, platform, Python and the index's cut-off time."""
    inputs = {
        "requirements": stack.requirements,
        "overrides": [override.requirement for override in stack.overrides],
        "platform": stack.platform,
        "published_before": stack.published_before,
        "python": python,
        **({"sources_only": True} if stack.sources_only else {}),
        **({"leaves_out": sorted(left.distribution for left in stack.leaves_out)} if stack.leaves_out else {}),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def compile_lock(uv: Path, stack: Stack, python: str, workdir: Path) -> str:
    """Resolve a stack with `uv pip compile` and return the lock file's text. Needs the package index.

    `published_before` makes it repeatable: what was published later does not exist for the resolver.
    Raises GpuwrightError with uv's own words when there is no solution.
    """
    requirements, overrides = workdir / "requirements.in", workdir / "overrides.txt"
    requirements.write_text("\n".join(stack.requirements) + "\n", encoding="utf-8")
    overrides.write_text("\n".join(o.requirement for o in stack.overrides) + "\n", encoding="utf-8")
    command = [
        str(uv), "pip", "compile", "--quiet", str(requirements), "--override", str(overrides),
        "--python-version", python, "--python-platform", stack.platform, "--exclude-newer", stack.published_before,
        "--generate-hashes", "--only-binary", ":all:", "--no-header", "--no-annotate", "--no-python-downloads",
        *(["--no-deps"] if stack.sources_only else []),
        *(part for left in stack.leaves_out for part in ("--no-emit-package", left.distribution)),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise GpuwrightError(f"{stack.name} for Python {python} cannot be resolved:\n{done.stderr.strip()}")
    return (
        f"# {stack.name} for Python {python} on {stack.platform}; compiled by `make lock`, not edited by hand.\n"
        f"# stack-inputs: sha256:{inputs_digest(stack, python)}\n{done.stdout}"
    )
