"""`--limit` that matches no host, made an error: pyinfra itself runs on zero hosts and exits 0."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import click

from gpuwright.errors import nearest
from operations.stop_run import StopRun

HostEntry = str | tuple[str, dict[str, Any]]


def require_match(**groups: list[HostEntry]) -> None:
    """End the run, before any host is connected to, when a `--limit` pattern names no host and no group.

    Called at the end of an inventory file, where the options of the pyinfra command that reads it are in reach. Where
    there is none (a test or a script imports the file) it does nothing. Raises StopRun.
    """
    context = click.get_current_context(silent=True)
    patterns: Iterable[str] = (context.params.get("limit") or ()) if context else ()
    hosts = {entry if isinstance(entry, str) else entry[0] for group in groups.values() for entry in group}
    for pattern in patterns:
        if pattern not in (*groups, "all", *hosts) and not any(fnmatch(name, pattern) for name in hosts):
            there = nearest(pattern, {*groups, "all", *hosts})
            raise StopRun(f'--limit "{pattern}" matches no host of this inventory; {there}')
