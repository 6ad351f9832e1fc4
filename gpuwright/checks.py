"""The doctor: whether a node can do the job, by the rows of catalog/checks.yaml over one observation. Pure."""

from __future__ import annotations

import fnmatch
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from pydantic import Field

from gpuwright import expressions
from gpuwright.errors import InputError, nearest
from gpuwright.fields import Slug
from gpuwright.node_module import node_module
from gpuwright.yamlfile import Loc, Origin, Row

Severity = Literal["must", "should", "note"]
Status = Literal["ok", "failed", "unknown", "ignored", "not applicable"]
SEVERITIES: tuple[Severity, ...] = ("must", "should", "note")
GROUPS = {
    "driver": "driver and kernel module",
    "gpus": "GPUs and PCIe",
    "toolchain": "toolchain",
    "communication": "communication",
    "host": "host limits and memory",
    "disk": "disk and model",
    "processes": "ports and processes",
    "environment": "environment",
}


class Check(Row):
    """One thing that a node needs. `applies`, `require`: Jinja expressions over readings, derived facts, `node` and
    `want`; `expected`, `found`, `remedy`: messages with such expressions in them.

    A `must` that does not hold, or cannot be observed, stops a deploy before anything is changed. One that a declared
    row of catalog/system.yaml mends (`mended_by`) stops it only before the server is started.
    """

    id: Slug
    group: Literal[tuple(GROUPS)]  # type: ignore[valid-type]
    severity: Severity
    means: str
    applies: str = "true"
    require: str
    expected: str
    found: str
    remedy: str
    mended_by: str = ""
    source: str


class HowRead(Row):
    """How a reading is made, and what to do where it could not be."""

    how: str
    unknown: str


class Checks(Row):
    """catalog/checks.yaml: how each reading is made, what is looked at, and the checks. `cuda_only`: readings that are
    not made on a node without a GPU.
    """

    readings: dict[str, HowRead]
    sysctls: list[str]
    module_options: list[str]
    kernel_files: list[str]
    services: list[str]
    cuda_only: list[str]
    fatal_xids: dict[int, str]
    benign_xids: list[int]
    checks: list[Check] = Field(min_length=1)


# What `node` and `want` hold: gpuwright.preflight.facts makes them.
NODE = (
    "python", "uid", "machine", "ensurepip", "tools", "installed", "commands", "interpreter", "root_writable",
    "systemd", "port", "port_is_ours", "unit_owners", "model_problem", "serving",
)  # fmt: skip
WANT = (
    "device", "gpu", "gpus", "root", "python", "interpreter", "python_download", "socket", "manager", "unit", "port",
    "dist_port", "nodes", "min_memory_gib", "free_disk_gib", "cuda", "cuda_home", "driver", "gcc", "glibc", "model",
    "model_path", "kernels", "env", "open_files", "power_limit_w", "system", "settings_sudo",
)  # fmt: skip


NOT_ASKED = "the observation does not hold it: it was made for another group, or by another version of gpuwright"


class Facts:
    """What the expressions may name: each reading's value, what is derived from them, `node` and `want`."""

    def __init__(
        self,
        checks: Checks,
        readings: Mapping[str, Any],
        problems: Mapping[str, str],
        node: Mapping[str, Any],
        want: Mapping[str, Any],
    ) -> None:
        self.checks, self.readings, self.problems = checks, readings, problems
        self.node, self.want = node, want

    def missing(self, names: Iterable[str]) -> dict[str, str]:
        """Why readings behind `names` could not be made."""
        wanted = [reading for name in names for reading in (DERIVED[name][0] if name in DERIVED else (name,))]
        absent = [name for name in wanted if name not in self.readings and name not in ("node", "want")]
        return {name: self.problems.get(name, NOT_ASKED) for name in absent}

    def remedies(self, unread: Iterable[str]) -> list[str]:
        """What to do where readings could not be made, each once."""
        again = "run doctor.py with the group that it shall be judged by"
        return list(dict.fromkeys(self.checks.readings[n].unknown if n in self.problems else again for n in unread))

    def named(self, names: Iterable[str]) -> dict[str, Any]:
        """The values of those names whose readings are all there. A malformed reading may raise whatever it will."""
        found: dict[str, Any] = {}
        for name in names:
            if name in ("node", "want"):
                found[name] = self.node if name == "node" else self.want
            elif name in DERIVED:
                needed, derive = DERIVED[name]
                if all(each in self.readings for each in needed):
                    found[name] = derive(self.readings, self.want)
            elif name in self.readings:
                found[name] = self.readings[name]
        return found


Readings = Mapping[str, Any]


def _cards(readings: Readings, want: Readings) -> list[Any]:
    """The GPUs that are meant: those in declared slots, else those of the declared name, else all. A display card
    beside them is none of them.
    """
    slots, name = want["gpu"]["slots"], want["gpu"]["name"]
    found = [gpu for gpu in readings["gpus"] if (gpu["slot"] in slots if slots else gpu["name"] == name)]
    return found or list(readings["gpus"])


def _other_cards(readings: Readings, want: Readings) -> list[Any]:
    meant = _cards(readings, want)
    return [gpu for gpu in readings["gpus"] if gpu not in meant]


def _lost_gpus(readings: Readings, want: Readings) -> list[str]:
    """Slots that should hold a GPU and that the driver lists none for: declared ones, cards of the same kind on the
    bus, those whose card the kernel log says has fallen off.
    """
    listed = {gpu["slot"] for gpu in readings["gpus"]}
    meant = {gpu["slot"] for gpu in _cards(readings, want)}
    kinds = {card["device"] for card in readings["pci"] if card["slot"] in meant}
    bus = [card["slot"] for card in readings["pci"] if card["device"] in kinds and card["driver"] != "vfio-pci"]
    fallen = readings["kernel_log"]["fallen"] if "kernel_log" in readings else []
    return [slot for slot in dict.fromkeys([*want["gpu"]["slots"], *bus, *fallen]) if slot and slot not in listed]


def _health(readings: Readings, want: Readings) -> list[Any]:
    """The health of the GPUs that are meant; of all where it is not known which those are."""
    rows: list[Any] = readings["gpu_health"]["gpus"]
    meant = {gpu["slot"] for gpu in _cards(readings, want)} if readings.get("gpus") else None
    return [row for row in rows if meant is None or row["slot"] in meant]


def _uncovered(readings: Readings, want: Readings) -> list[str]:
    """The libraries asked for that hold no kernel for the declared GPUs, and patterns that match none."""
    libraries = readings["kernels"]
    capability = want["gpu"]["compute_capability"]
    uncovered = [name for name, found in libraries.items() if not covers(found, capability)]
    absent = [each for each in want["kernels"] if not any(fnmatch.fnmatchcase(name, each) for name in libraries)]
    return uncovered + [f"{each} (absent)" for each in absent]


def covers(architectures: Iterable[int], capability: str) -> bool:
    """Whether kernels compiled for these SM versions (90, 120) run on a GPU: of its major version, and not above it.

    Source: CUDA C++ Programming Guide, binary compatibility.
    """
    major, minor = (int(part) for part in capability.split("."))
    return any(each // 10 == major and each % 10 <= minor for each in architectures)


def _xids(readings: Readings, want: Readings, kind: str) -> list[Any]:
    """Xids after which a GPU must be reset (`fatal`), of applications (`benign`), or `unlisted`. Those that a GPU
    logged before it said that it needs no recovery any more (154, "(None)") count no more.
    """
    rows: list[Any] = []
    for row in readings["kernel_log"]["xids"]:
        if row["xid"] == 154 and row["text"].endswith("(None)"):
            rows = [each for each in rows if each["slot"] != row["slot"]]
        else:
            rows.append(row)
    fatal = [row for row in rows if row["xid"] in want["fatal_xids"] or row["xid"] == 154]
    benign = [row for row in rows if row["xid"] in want["benign_xids"]]
    if kind == "unlisted":
        return [row for row in rows if row not in fatal and row not in benign]
    return fatal if kind == "fatal" else benign


def _without_space(readings: Readings, want: Readings) -> list[Any]:
    slots = {card["slot"] for card in readings["pci"]}
    return [row for row in readings["kernel_log"]["no_space"] if row["slot"] in slots]


UNBALANCED_MIB = 1024  # SGLang refuses from a tenth of the free memory on; a display server's few MiB do no harm


def _strangers(readings: Readings, want: Readings) -> list[Any]:
    """Processes with memory on the GPUs that are not of our server."""
    return [
        {"slot": gpu["slot"], **process}
        for gpu in _health(readings, want)
        for process in gpu["processes"]
        if process["pid"] not in want["ours"]
        and (process["memory_mib"] is None or process["memory_mib"] >= UNBALANCED_MIB)
    ]


def _wedged(readings: Readings, want: Readings) -> list[Any]:
    """GPUs on which a kernel hangs: busy and holding memory, or holding much. High use alone is seen while the driver
    scrubs the memory of a GPU that it has just woken.
    """

    def hangs(gpu: Any) -> bool:
        busy, held = gpu["utilization"] or 0, gpu["memory_used_mib"] or 0
        return (busy >= 90 and held >= 256) or held >= 2048

    return [gpu for gpu in _health(readings, want) if hangs(gpu)]


def _not_held(readings: Readings, want: Readings) -> list[str]:
    """Installed packages of the driver that nothing keeps from being upgraded."""
    kept = [str(each) for each in readings["updates"]["blacklist"]]

    def left_out(name: str) -> bool:
        for each in kept:
            try:
                if re.match(each, name):
                    return True
            except re.error:
                continue  # unattended-upgrades cannot match anything by it either
        return False

    installed = readings["packages"]["installed"]
    return [name for name, row in installed.items() if is_driver(name) and not row["held"] and not left_out(name)]


def is_driver(package: str) -> bool:
    """Whether a package is of NVIDIA's driver; the container toolkit is not."""
    return package.startswith(("nvidia-", "libnvidia-", "cuda-drivers")) and "container" not in package


DERIVED: dict[str, tuple[tuple[str, ...], Callable[[Readings, Readings], Any]]] = {
    "cards": (("gpus",), _cards),
    "other_cards": (("gpus",), _other_cards),
    "lost_gpus": (("gpus", "pci"), _lost_gpus),
    "health": (("gpu_health",), _health),
    "uncovered_kernels": (("kernels",), _uncovered),
    "fatal_xids": (("kernel_log",), partial(_xids, kind="fatal")),
    "other_xids": (("kernel_log",), partial(_xids, kind="benign")),
    "unlisted_xids": (("kernel_log",), partial(_xids, kind="unlisted")),
    "cards_without_space": (("kernel_log", "pci"), _without_space),
    "strangers": (("gpu_health",), _strangers),
    "wedged": (("gpu_health",), _wedged),
    "driver_packages_not_held": (("packages", "updates"), _not_held),
}


def check_errors(checks: Checks, origin: Origin, system: Iterable[str]) -> list[InputError]:
    """What is wrong with the rows: an id twice, a bad expression, a name that there is not, a reading that is none."""
    errors: list[InputError] = []
    known = set(node_module("machine").READINGS)
    for name in checks.readings.keys() ^ known:
        errors.append(origin.error(("readings", name), f'there is no reading "{name}"', nearest(name, known)))
    for name in set(checks.cuda_only) - known:
        errors.append(origin.error(("cuda_only",), f'there is no reading "{name}"', nearest(name, known)))
    names = {*known, *DERIVED, "node", "want"}
    seen = set()
    for index, check in enumerate(checks.checks):
        loc: Loc = ("checks", index)
        if check.id in seen:
            errors.append(origin.error((*loc, "id"), f'"{check.id}" is used twice'))
        seen.add(check.id)
        if check.mended_by and check.mended_by not in set(system):
            problem = f'there is no "{check.mended_by}" in catalog/system.yaml'
            errors.append(origin.error((*loc, "mended_by"), problem, nearest(check.mended_by, system)))
        for key in ("applies", "require", "expected", "found", "remedy"):
            message = key not in ("applies", "require")
            text = getattr(check, key)
            found = expressions.problems(origin, (*loc, key), text, names, message=message, strict=True)[0]
            errors += found
            for owner, fields in (("want", WANT), ("node", NODE)) if not found else ():
                for field in expressions.fields_of(text, owner, message=message) - set(fields):
                    problem = f'there is no "{owner}.{field}"'
                    errors.append(origin.error((*loc, key), problem, nearest(field, fields)))
    return errors


@dataclass(frozen=True)
class Finding:
    """What one check says of one node. `found`: what was there instead, or why it is unknown, or ignored. `unread`: the
    readings that an unknown one lacks.
    """

    check: Check
    status: Status
    expected: str = ""
    found: str = ""
    remedy: str = ""
    unread: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it speaks against the node: failed, or a `must` that could not be observed."""
        return self.status == "failed" or (self.status == "unknown" and self.check.severity == "must")


@dataclass(frozen=True)
class Examination:
    """Every finding of one node, the worst first."""

    findings: tuple[Finding, ...]

    @cached_property
    def stopping(self) -> list[Finding]:
        """Those that stop a deploy."""
        return [each for each in self.findings if each.check.severity == "must" and each.counts]

    @property
    def passes(self) -> bool:
        """Whether nothing stops a deploy."""
        return not self.stopping

    @cached_property
    def summary(self) -> str:
        """How many there are of each, in one line."""
        counts = Counter((each.status, each.check.severity) for each in self.findings)
        parts = [
            f"{counts[status, severity]} {severity} {status}"
            for status in ("failed", "unknown")
            for severity in SEVERITIES
            if counts[status, severity]
        ]
        rest = Counter(each.status for each in self.findings)
        parts += [f"{rest[status]} {status}" for status in ("ignored", "ok", "not applicable") if rest[status]]
        return ", ".join(parts)


def examine(checks: Checks, facts: Facts, ignored: Mapping[str, str]) -> Examination:
    """Judge every check over the facts. `ignored`: the reason by check id. A check that cannot be judged is unknown."""
    findings = [_judge(check, facts, ignored.get(check.id)) for check in checks.checks]
    order: list[Status] = ["failed", "unknown", "ignored", "ok", "not applicable"]
    findings.sort(key=lambda each: (not each.counts, SEVERITIES.index(each.check.severity), order.index(each.status)))
    return Examination(tuple(findings))


def _judge(check: Check, facts: Facts, reason: str | None) -> Finding:
    applies = _holds(check.applies, facts)
    if applies is False:
        return Finding(check, "not applicable")
    if reason is not None:
        return Finding(check, "ignored", found=reason)
    verdict = _holds(check.require, facts) if applies is True else applies
    expected, found, remedy = (_filled(text, facts) for text in (check.expected, check.found, check.remedy))
    if verdict is True:
        return Finding(check, "ok", expected)
    if verdict is False:
        return Finding(check, "failed", expected, found, remedy)
    unread = tuple(facts.missing(expressions.names_of(check.applies) | expressions.names_of(check.require)))
    return Finding(check, "unknown", expected, str(verdict), "; ".join(facts.remedies(unread)) or remedy, unread)


def _holds(expression: str, facts: Facts) -> bool | str:
    """Whether an expression holds; why it cannot be said, where it cannot. What was not observed does not matter where
    the expression does not come to look at it: "want.device == 'cuda' and …" is false without a single reading.
    """
    names = expressions.names_of(expression)
    try:
        verdict = expressions.holds(expression, facts.named(names), strict=True)
    except Exception as error:  # what a node answers must not take the run down
        return f"the reading is not as expected ({type(error).__name__}: {error})"
    if verdict is None:
        return "; ".join(dict.fromkeys(facts.missing(names).values())) or f"nothing was read for: {expression}"
    return verdict


def _filled(message: str, facts: Facts) -> str:
    try:
        return expressions.filled(message, facts.named(expressions.names_of(message, message=True))).strip(" ;")
    except Exception:
        return message


def lines(examination: Examination, *, everything: bool = False) -> list[str]:
    """The findings as a person reads them: the worst first, under each what it means and what to do. Checks that cannot
    be judged for one reason stand together. `everything`: also those that hold.
    """
    shown = [each for each in examination.findings if everything or each.status in ("failed", "unknown", "ignored")]
    return [line for those in _grouped(shown) for line in _block(those)]


def _grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    groups: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        groups.setdefault((each.status, each.found if each.status == "unknown" else each.check.id), []).append(each)
    return list(groups.values())


def _block(those: list[Finding]) -> list[str]:
    first, status, found = those[0], those[0].status, those[0].found
    head = f"{first.check.severity:<7}{status if status != 'not applicable' else '-':<9}"
    if status == "failed":
        return [
            f"{head}{first.check.id}: expected {first.expected}; found {first.found}",
            *_wrapped(first.check.means),
            *_wrapped(first.remedy, "-> "),
        ]
    if status == "unknown":
        by_severity = {each: [f.check.id for f in those if f.check.severity == each] for each in SEVERITIES}
        said = "; ".join(f"{severity} {', '.join(ids)}" for severity, ids in by_severity.items() if ids)
        return [f"{head}{found}", *_wrapped(f"cannot be judged: {said}"), *_wrapped(first.remedy, "-> ")]
    return [f"{head}{first.check.id}: {found if status == 'ignored' else first.expected}"]


def _wrapped(text: str, mark: str = "") -> list[str]:
    indent = " " * 16
    return textwrap.wrap(
        text, 116, initial_indent=indent + mark, subsequent_indent=indent + " " * len(mark),
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip


def stop_text(findings: Iterable[Finding]) -> str:
    """What stops a deploy, one remedy under each; checks that cannot be judged for one reason together."""
    found = []
    for those in _grouped(findings):
        first, ids = those[0], ", ".join(each.check.id for each in those)
        failed = f"{ids}: expected {first.expected}; found {first.found}"
        found.append(failed if first.status == "failed" else f"{ids}: cannot be judged: {first.found}")
        found.append(f"    -> {first.remedy}")
    return "\n".join(found)


def as_json(host: str, examination: Examination, problems: Mapping[str, str]) -> dict[str, Any]:
    """The examination as JSON: {"host", "passes", "summary", "findings", "unobserved"}."""
    return {
        "host": host,
        "passes": examination.passes,
        "summary": examination.summary,
        "findings": [
            {
                "id": each.check.id, "group": GROUPS[each.check.group], "severity": each.check.severity,
                "status": each.status, "expected": each.expected, "found": each.found, "means": each.check.means,
                "remedy": each.remedy, "source": each.check.source,
            }
            for each in examination.findings
        ],
        "unobserved": dict(problems),
    }  # fmt: skip
