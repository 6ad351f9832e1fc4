"""A visit to every host that changes nothing: the doctor's, and the drift check's."""

from __future__ import annotations

import sys
from collections.abc import Callable

from pyinfra import host, logger, state  # type: ignore[attr-defined]

from operations.passwords import ask_nobody

_codes: dict[str, int] = {}


def visit(examine: Callable[[], int], finish: Callable[[list[str]], None]) -> None:
    """Examine this host: 0 where it is well, 2 where it is not, 1 where that cannot be said. When every host has been,
    `finish` is told which could not be asked, and the run ends: exit code 1 where one could not be judged, else 2 where
    one is not well, else 0.
    """
    ask_nobody()
    try:
        _codes[host.name] = examine()
    finally:
        everyone = {each.name for each in state.inventory.iter_activated_hosts()}
        if everyone <= {*_codes, *(each.name for each in state.failed_hosts)}:
            unreached = [each.name for each in state.failed_hosts if each.name not in _codes]
            for name in unreached:
                logger.error(f"    {name} could not be examined")
            finish(unreached)
            sys.exit(1 if unreached or 1 in _codes.values() else max(_codes.values(), default=1))
