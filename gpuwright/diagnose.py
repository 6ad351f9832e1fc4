"""Why a server ended: the deepest known cause in its log by catalog/signatures.yaml, else its innermost exception."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from gpuwright.errors import InputError, nearest
from gpuwright.fields import RegexText, Slug
from gpuwright.yamlfile import Loc, Origin, Row

TAIL = 30


class Signature(Row):
    """A message that is known, by a regular expression that is searched in each line of a log.

    A `cause` names what is wrong. A `wrapper` is what causes hide behind, an `echo` one process telling of another's
    end; a `notice` is telling, not fatal.
    `prevented_by`: what of gpuwright keeps it from happening, as `patch:<id>`, `setting:<id>`, `rule:<id>`,
    `preflight`, `lock`, `launcher`, `model` or `integrity`.
    """

    id: Slug
    kind: Literal["cause", "wrapper", "echo", "notice"]
    pattern: RegexText
    cause: str
    remedy: str
    source: str
    prevented_by: list[str] = []


class Phase(Row):
    """A line that tells how far a start is, and that in words."""

    pattern: RegexText
    words: str


class Signatures(Row):
    """catalog/signatures.yaml. Lines that match one of `ignore` are never looked at."""

    phases: list[Phase] = []
    ignore: list[RegexText] = []
    signatures: list[Signature] = Field(min_length=1)


_PLAIN = ("preflight", "lock", "launcher", "model", "integrity")


def signature_errors(
    found: Signatures, origin: Origin, patches: set[str], settings: set[str], rules: set[str]
) -> list[InputError]:
    """What is wrong with the signatures: an id used twice, or a prevention that is not there."""
    errors, seen = [], set()
    known = {"patch": patches, "setting": settings, "rule": rules}
    for index, signature in enumerate(found.signatures):
        loc: Loc = ("signatures", index)
        if signature.id in seen:
            errors.append(origin.error((*loc, "id"), f'"{signature.id}" is used twice'))
        seen.add(signature.id)
        for position, text in enumerate(signature.prevented_by):
            kind, _, name = text.partition(":")
            at: Loc = (*loc, "prevented_by", position)
            if kind in known and name not in known[kind]:
                errors.append(origin.error(at, f'there is no {kind} "{name}"', nearest(name, known[kind])))
            elif kind not in known and text not in _PLAIN:
                errors.append(origin.error(at, f'"{text}" is nothing that prevents', nearest(text, (*known, *_PLAIN))))
    return errors


@dataclass(frozen=True)
class Match:
    """A signature in a log: the 1-based number of the line, and the line."""

    signature: Signature
    number: int
    line: str


@dataclass(frozen=True)
class Diagnosis:
    """What a log says. `cause` is the answer; `others` were matched too; `exception` is the innermost one."""

    cause: Match | None
    others: tuple[Match, ...]
    exception: str
    tail: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """`known`, `unknown` (it crashed, and no signature says why) or `none` (no sign of a crash)."""
        if self.cause and self.cause.signature.kind == "cause":
            return "known"
        crashed = self.exception or (self.cause and self.cause.signature.kind in ("wrapper", "echo"))
        return "unknown" if crashed else "none"


# What a launch script of ours says in the log before it starts the engine.
START = re.compile(r"^\[gpuwright\] \S+ tier \S+ starts$")


def diagnose(log: str, signatures: Signatures) -> Diagnosis:
    """The deepest cause a log names: of its last start that shows a crash, where launch scripts of ours began several.

    What is matched first in time lies deepest: an exception chain prints its origin first, and what one process ends
    with, the others report after it. Wrappers and notices never win over a cause.
    """
    lines = log.splitlines()
    starts = [0, *(number for number, line in enumerate(lines) if START.match(line))]
    last = _diagnose(lines, starts[-1], signatures)
    for begin, end in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        if last.verdict != "none":
            return last
        earlier = _diagnose(lines[:end], begin, signatures)
        last = earlier if earlier.verdict != "none" else last
    return last


def _diagnose(lines: list[str], begin: int, signatures: Signatures) -> Diagnosis:
    ignored = _any(signatures.ignore)
    patterns = [(each, re.compile(each.pattern)) for each in signatures.signatures]
    found: dict[str, Match] = {}
    for number, line in enumerate(lines[begin:], begin + 1):
        if not line.strip() or ignored(line):
            continue
        for signature, pattern in patterns:
            if signature.id not in found and pattern.search(line):
                found[signature.id] = Match(signature, number, line.strip()[:400])
    ranks = {"cause": 0, "wrapper": 1, "echo": 2, "notice": 3}
    ordered = sorted(found.values(), key=lambda match: (ranks[match.signature.kind], match.number))
    answer = ordered[0] if ordered else None
    return Diagnosis(answer, tuple(ordered[1:]), innermost(lines[begin:], ignored), tuple(_tail(lines[begin:])))


def _any(patterns: Iterable[str]) -> Callable[[str], bool]:
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda line: any(pattern.search(line) for pattern in compiled)


def _tail(lines: list[str]) -> list[str]:
    return [line[:300] for line in lines if line.strip()][-TAIL:]


_START = re.compile(r"^(?P<prefix>.*?)Traceback \(most recent call last\):")
_ENDS = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Unsupported|Interrupt|Exit|Warning|Full|Empty)?(: .*)?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


def innermost(lines: list[str], ignored: Callable[[str], bool] = lambda line: False) -> str:
    """The exception that a crash began with: the first of the chain in the traceback that SGLang calls fatal ("hit an
    exception"), else of the last chain; "" when there is none.
    """
    chains: list[tuple[bool, str]] = []
    index, chained = 0, False
    while index < len(lines):
        start = _START.match(lines[index])
        if not start:
            chained = chained or any(text in lines[index] for text in _CHAINED)
            index += 1
            continue
        fatal = "hit an exception" in start["prefix"]
        message, index = _message(lines, index + 1)
        if message and not ignored(message):
            if chained and chains:
                chains[-1] = (chains[-1][0] or fatal, chains[-1][1])  # the chain's first exception stays its answer
            else:
                chains.append((fatal, message))
        chained = False
    fatal_ones = [message for fatal, message in chains if fatal]
    return (fatal_ones or [message for _, message in chains[-1:]] or [""])[0]


def _message(lines: list[str], index: int) -> tuple[str, int]:
    """The `Type: message` line that ends the traceback whose frames begin at `index`, and the index after it."""
    while index < len(lines):
        line = lines[index]
        if line and not line[0].isspace() and not line.startswith(("Traceback", "[")):
            return (line.strip()[:400] if _ENDS.match(line) else ""), index + 1
        if line.startswith("["):
            return "", index
        index += 1
    return "", index


def report(found: Diagnosis, log: str, *, tail: bool = True) -> str:
    """A diagnosis as text. `log` is where the whole log is."""
    lines = []
    if found.verdict == "known":
        assert found.cause is not None
        signature = found.cause.signature
        lines = [
            f"cause: {signature.cause}  [{signature.id}]",
            f"  seen in line {found.cause.number}: {found.cause.line}",
            f"  -> {signature.remedy}",
            f"  source: {signature.source}",
        ]
        if signature.prevented_by:
            lines.append(f"  gpuwright keeps it from happening by: {', '.join(signature.prevented_by)}")
        also = [match.signature.id for match in found.others if match.signature.kind == "cause"]
        if also:
            lines.append(f"  seen after it: {', '.join(also)}")
    elif found.verdict == "unknown":
        lines = ["cause: not known to catalog/signatures.yaml"]
        if found.cause:
            lines.append(f"  line {found.cause.number} only wraps the cause: {found.cause.line}")
        lines.append(f"  innermost exception: {found.exception or 'none was logged'}")
    else:
        lines = ["no sign of a crash"]
        if found.cause:
            lines.append(f"  but line {found.cause.number}: {found.cause.line}")
            lines.append(f"  {found.cause.signature.cause} -> {found.cause.signature.remedy}")
    if found.verdict == "unknown" and tail:
        lines += [f"  the last {len(found.tail)} lines:", *(f"    {line}" for line in found.tail)]
    return "\n".join([*lines, f"  the whole log: {log}"])


def as_json(found: Diagnosis, log: str) -> dict[str, Any]:
    """A diagnosis as JSON, for `--json`."""

    def match(one: Match) -> dict[str, Any]:
        return {**one.signature.model_dump(exclude={"pattern"}), "number": one.number, "line": one.line}

    return {
        "verdict": found.verdict,
        "cause": match(found.cause) if found.cause else None,
        "others": [match(one) for one in found.others],
        "innermost_exception": found.exception,
        "tail": list(found.tail),
        "log": log,
    }
