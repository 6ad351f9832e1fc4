"""Errors a person can act on: what was found, what was expected, where, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class GpuwrightError(Exception):
    """Anything that stops gpuwright for a reason its user can mend."""


@dataclass(frozen=True)
class Place:
    """Where a value was written: a file (or `--data`), and its 1-based line where there is one."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class InputError(GpuwrightError):
    """A value in the catalogue, the inventory or the data that cannot be right.

    Raised before any host is touched. The message names file, line and key.
    """

    def __init__(self, place: Place, key: str, problem: str, *, hint: str = "") -> None:
        self.place, self.key, self.problem, self.hint = place, key, problem, hint
        super().__init__(f"{place}: {key}: {problem}" + (f"\n    {hint}" if hint else ""))


class InputErrors(GpuwrightError):
    """Every InputError found in one reading, so that they can be mended in one go."""

    def __init__(self, errors: list[InputError]) -> None:
        self.errors = errors
        super().__init__("\n".join(str(error) for error in errors))


def nearest(name: str, names: Iterable[str]) -> str:
    """`did you mean "x"?` for the nearest of `names`, else the list of what there is."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    close.sort(key=lambda other: sorted(other) != sorted(name))  # letters swapped ("prot") are the likeliest slip
    return f'did you mean "{close[0]}"?' if close else "there is: " + ", ".join(names)
