"""Why a server ended: the deepest known cause in its log by catalog/signatures.yaml, else its innermost exception."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from gpuwright.errors import InputError, nearest
from gpuwright.fields import RegexText, RequirementText, Slug, requirement_covers
from gpuwright.yamlfile import Loc, Origin, Row

TAIL = 30


class Signature(Row):
    """A message that is known, by a regular expression that is searched in each line of a log.

    A `cause` names what is wrong. A `wrapper` is what causes hide behind, an `echo` one process telling of another's
    end; a `notice` is telling, not fatal.
    `prevented_by`: what of gpuwright keeps it from happening, as `patch:<id>`, `setting:<id>`, `rule:<id>`,
    `preflight`, `lock`, `launcher`, `model` or `integrity`. `engine`: where it is for some versions alone.
    """

    id: Slug
    engine: RequirementText | None = None
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

    def of(self, engine: str) -> Signatures:
        """What is for this engine ("sglang==0.5.9")."""
        fitting = [each for each in self.signatures if each.engine is None or requirement_covers(each.engine, engine)]
        return self.model_copy(update={"signatures": fitting})


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
class Raised:
    """An exception: the first of its chain ("Type: message"), the 1-based lines of the whole chain, and whether SGLang
    itself calls it the end of a process.
    """

    message: str
    begin: int
    end: int
    fatal: bool


@dataclass(frozen=True)
class Diagnosis:
    """What a log says of its last start that crashed, or of its last.

    `verdict`: `known`; `unknown` (it crashed, and no signature says why); `none` (no sign of a crash). `cause` is the
    answer of a known one, else the most telling line; `others` were matched too. `exception` is the innermost one.
    `earlier`: it is not the last start in the log that is spoken of.
    """

    verdict: Literal["known", "unknown", "none"]
    cause: Match | None
    others: tuple[Match, ...]
    exception: str
    tail: tuple[str, ...]
    earlier: bool = False


# What a launch script of ours says in the log before it starts the engine; of other logs, what the engine says first.
START = re.compile(r"^\[gpuwright\] \S+ tier \S+ starts$")
ENGINE_START = re.compile(r"\bserver_args=ServerArgs\(")
# A server that logs this after an error has lived through it.
ALIVE = re.compile(r"The server is fired up|\] (Decode|Prefill) batch[,. ]")
RANKS = {"cause": 0, "wrapper": 1, "echo": 2, "notice": 3}


def diagnose(log: str, signatures: Signatures) -> Diagnosis:
    """The deepest cause a log names, of its last start that shows a crash.

    What is matched first in time lies deepest: an exception chain prints its origin first, and what one process ends
    with, the others report after it. Wrappers and notices never win over a cause; nor does what a server lived
    through, nor what was only logged after an exception that no signature knows had ended a process.
    """
    lines = log.splitlines()
    marks = [number for number, line in enumerate(lines) if START.match(line)]
    marks = marks or [number for number, line in enumerate(lines) if ENGINE_START.search(line)]
    starts = [0, *(mark for mark in marks if mark)]
    last = _diagnose(lines, starts[-1], signatures)
    if last.verdict != "none":
        return last
    for begin, end in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        earlier = _diagnose(lines[:end], begin, signatures)
        if earlier.verdict != "none":
            return replace(earlier, earlier=True)
    return last


def _diagnose(lines: list[str], begin: int, signatures: Signatures) -> Diagnosis:
    ignored = _any(signatures.ignore)
    matches = sorted(_matches(lines, begin, signatures, ignored), key=lambda m: (RANKS[m.signature.kind], m.number))
    chains = [chain for chain in raised(lines) if chain.begin > begin and not ignored(chain.message)]
    alive = max((number for number, line in enumerate(lines[begin:], begin + 1) if ALIVE.search(line)), default=begin)
    tail = tuple(line[:300] for line in lines[begin:] if line.strip())[-TAIL:]

    def answer(verdict: Literal["known", "unknown", "none"], cause: Match | None, exception: str = "") -> Diagnosis:
        return Diagnosis(verdict, cause, tuple(m for m in matches if m is not cause), exception, tail)

    ends = [m for m in matches if m.signature.kind != "notice" and m.number > alive]
    chains = [chain for chain in chains if chain.end > alive]
    if not ends and not chains:
        return answer("none", matches[0] if matches else None)
    fatal = next((chain for chain in chains if chain.fatal), None)
    exception = fatal or (chains[-1] if chains else None)
    causes = [m for m in ends if m.signature.kind == "cause"]
    if fatal and causes and causes[0].number > fatal.end:
        causes = []  # what followed an exception that ended a process is not its cause
    if not causes and not exception:
        causes = [m for m in matches if m.signature.kind == "cause"]  # what it lived through for a moment
    message = exception.message if exception else ""
    if causes:
        return answer("known", causes[0], message)
    return answer("unknown", next((m for m in ends if m.signature.kind != "cause"), None), message)


def _matches(lines: list[str], begin: int, signatures: Signatures, ignored: Callable[[str], bool]) -> Iterable[Match]:
    """Each signature's first line, and its first one after every sign of life."""
    patterns = [(each, re.compile(each.pattern)) for each in signatures.signatures]
    found: dict[str, Match] = {}
    for number, line in enumerate(lines[begin:], begin + 1):
        if not line.strip() or ignored(line):
            continue
        if ALIVE.search(line):
            yield from found.values()
            found = {}
        for signature, pattern in patterns:
            if signature.id not in found and pattern.search(line):
                found[signature.id] = Match(signature, number, line.strip()[:400])
    yield from found.values()


def _any(patterns: Iterable[str]) -> Callable[[str], bool]:
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda line: any(pattern.search(line) for pattern in compiled)


_TRACEBACK = re.compile(r"^(?P<prefix>.*?)Traceback \(most recent call last\):")
_ENDS = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


def raised(lines: list[str]) -> list[Raised]:
    """Every exception whose traceback a log prints, a chain of them as one: by its first, which is the innermost."""
    chains: list[Raised] = []
    index, chained = 0, False
    while index < len(lines):
        start = _TRACEBACK.match(lines[index])
        if not start:
            chained = chained or any(text in lines[index] for text in _CHAINED)
            index += 1
            continue
        begin, fatal = index + 1, "hit an exception" in start["prefix"]
        message, index = _message(lines, index + 1)
        if message and chained and chains:
            chains[-1] = replace(chains[-1], end=index, fatal=chains[-1].fatal or fatal)
        elif message:
            chains.append(Raised(message, begin, index, fatal))
        chained = False
    return chains


_RECORD = re.compile(r"^\[(\d{4}-|rank|gpuwright)")


def _message(lines: list[str], index: int) -> tuple[str, int]:
    """The `Type: message` line that ends the traceback whose frames begin at `index`, and the index after the message,
    which can have many lines.
    """
    while index < len(lines) and (not lines[index] or lines[index][0].isspace()):
        index += 1
    if index == len(lines) or not _ENDS.match(lines[index]):  # the traceback was cut off by another record
        return "", index
    message = lines[index].strip()[:400]
    index += 1
    while index < len(lines):
        line = lines[index]
        if _RECORD.match(line) or _TRACEBACK.match(line) or any(text in line for text in _CHAINED):
            break
        index += 1
    return message, index


def report(found: Diagnosis, log: str) -> str:
    """A diagnosis as text. `log` is where the whole log is."""
    lines = ["the last start in this log shows no crash; of the last one that does:"] if found.earlier else []
    if found.verdict == "known":
        assert found.cause is not None
        signature = found.cause.signature
        lines += [
            f"cause: {signature.cause}  [{signature.id}]",
            f"  seen in line {found.cause.number}: {found.cause.line}",
            f"  -> {signature.remedy}",
            f"  source: {signature.source}",
        ]
        if signature.prevented_by:
            lines.append(f"  gpuwright keeps it from happening by: {', '.join(signature.prevented_by)}")
        if found.exception and found.exception not in found.cause.line:
            lines.append(f"  innermost exception: {found.exception}")
    elif found.verdict == "unknown":
        lines.append("cause: not known to catalog/signatures.yaml")
        if found.cause:
            lines.append(f"  line {found.cause.number} only tells of it: {found.cause.line}")
        lines.append(f"  innermost exception: {found.exception or 'none was logged'}")
    else:
        lines.append("no sign of a crash")
        if found.cause:
            lines.append(f"  but line {found.cause.number}: {found.cause.line}")
            lines.append(f"  {found.cause.signature.cause} -> {found.cause.signature.remedy}")
    also = dict.fromkeys(match.signature.id for match in found.others if match.signature.kind == "cause")
    if also and found.verdict != "none":
        lines.append(f"  also seen: {', '.join(also)}")
    if found.verdict == "unknown":
        lines += [f"  the last {len(found.tail)} lines:", *(f"    {line}" for line in found.tail)]
    return "\n".join([*lines, f"  the whole log: {log}"])


def as_json(found: Diagnosis, log: str) -> dict[str, Any]:
    """A diagnosis as JSON, for `--json`."""

    def match(one: Match) -> dict[str, Any]:
        return {**one.signature.model_dump(exclude={"pattern", "engine"}), "number": one.number, "line": one.line}

    return {
        "verdict": found.verdict,
        "earlier": found.earlier,
        "cause": match(found.cause) if found.cause else None,
        "others": [match(one) for one in found.others],
        "innermost_exception": found.exception,
        "tail": list(found.tail),
        "log": log,
    }
