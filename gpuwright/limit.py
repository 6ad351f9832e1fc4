"""`--limit` that matches no host, made an error: pyinfra itself runs on zero hosts and exits 0."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import click

from gpuwright.errors import GpuwrightError, nearest


def require_match(**groups: list[str | tuple[str, dict[str, Any]]]) -> None:
    """End the run, before any host is connected to, when a `--limit` pattern names no host and no group.

    Called at the end of an inventory file; sees the options of the pyinfra command that reads it. Elsewhere (the file
    imported by a test or a script) there are none, and it does nothing.
    """
    context = click.get_current_context(silent=True)
    hosts = {entry if isinstance(entry, str) else entry[0] for group in groups.values() for entry in group}
    for pattern in (context.params.get("limit") or ()) if context else ():
        if pattern not in (*groups, "all") and not any(fnmatch(name, pattern) for name in hosts):
            raise click.ClickException(unmatched(pattern, [*groups, "all", *hosts]))


def unmatched(pattern: str, names: list[str]) -> str:
    """What is said of a pattern that matches nothing."""
    return f'--limit "{pattern}" matches no host of this inventory; {nearest(pattern, names)}'


class NoHost(GpuwrightError):
    """No host is left to run on."""
