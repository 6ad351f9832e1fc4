"""The system stage: settings of the host as rows of catalog/system.yaml, what of them differs, and what is put back."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from gpuwright.errors import InputError
from gpuwright.fields import Slug
from gpuwright.yamlfile import Origin, Row

Value = str | int
SHM = "/dev/shm"  # noqa: S108


class SystemRow(Row):
    """What every row has. `value`: what a group gets that sets it to True; one without needs the group's own."""

    id: Slug
    about: str
    why: str
    source: str
    value: Value | None = None


class Packages(SystemRow):
    """Packages that are installed. Of a row `where_available`, only those that the node's repositories have."""

    kind: Literal["packages"]
    apt: list[str]
    dnf: list[str]
    where_available: bool = False


class Sysctl(SystemRow):
    """A kernel parameter."""

    kind: Literal["sysctl"]
    name: str


class KernelFile(SystemRow):
    """A value in each file of /sys that the pattern matches; nothing to do where none does."""

    kind: Literal["kernel_file"]
    path: Annotated[str, Field(pattern=r"^/sys/")]


class ModuleOption(SystemRow):
    """An option of a kernel module, which counts from the module's next load: in practice a reboot. `shown`: how
    /sys/module shows it.
    """

    kind: Literal["module_option"]
    name: Annotated[str, Field(pattern=r"^\w+\.\w+$")]
    shown: str


class Limit(SystemRow):
    """A limit of login sessions, and so of what supervisor starts; a systemd unit sets its own."""

    kind: Literal["limit"]
    name: Literal["nofile", "memlock"]


class SharedMemory(SystemRow):
    """The least size of /dev/shm, in GiB."""

    kind: Literal["shared_memory"]


class Service(SystemRow):
    """A systemd unit that is enabled and runs."""

    kind: Literal["service"]
    unit: Annotated[str, Field(pattern=r"^[\w.@-]+\.service$")]


class PowerLimit(SystemRow):
    """What each GPU may draw, in W, within its own range."""

    kind: Literal["power_limit"]


class Hold(SystemRow):
    """Installed packages whose names begin so are held back from upgrades (apt's hold), but for some words in them."""

    kind: Literal["hold"]
    prefixes: list[str] = Field(min_length=1)
    but_not: list[str] = []

    def holds(self, package: str) -> bool:
        """Whether a package is one of these."""
        return package.startswith(tuple(self.prefixes)) and not any(word in package for word in self.but_not)


AnyRow = Annotated[
    Packages | Sysctl | KernelFile | ModuleOption | Limit | SharedMemory | Service | PowerLimit | Hold,
    Field(discriminator="kind"),
]
VALUELESS = ("packages", "service", "hold", "module_option")
NUMBERS = ("shared_memory", "power_limit")
COUNTED = ("power_limit", "kernel_file", "sysctl")  # what a server's speed depends on


class SystemRows(Row):
    """catalog/system.yaml."""

    settings: list[AnyRow]


def row_errors(rows: SystemRows, origin: Origin) -> list[InputError]:
    """What is wrong with the rows beyond their types: an id used twice, a value where none can be."""
    errors, seen = [], set()
    for index, row in enumerate(rows.settings):
        if row.id in seen:
            errors.append(origin.error(("settings", index, "id"), f'"{row.id}" is used twice'))
        seen.add(row.id)
        fixed = row.kind == "module_option"  # its own value is the only one
        problem = value_problem(row, row.value) if row.value is not None and not fixed else None
        if problem:
            errors.append(origin.error(("settings", index, "value"), problem))
    return errors


def value_problem(row: Any, value: Any) -> str | None:
    """Why a row cannot have a value, or None."""
    if row.kind in VALUELESS:
        return f"a row of kind {row.kind} has no value: set it to True"
    if row.kind in NUMBERS and (not isinstance(value, int) or value <= 0):
        return "should be a whole number above 0"
    if isinstance(value, str) and (not value or not value.isprintable()):
        return "should be a text of one line"
    if row.kind == "limit" and not str(value).isdigit() and (row.name, value) != ("memlock", "unlimited"):
        return "should be a whole number" + (", or unlimited" if row.name == "memlock" else "")
    return None


@dataclass(frozen=True)
class Declared:
    """A row that a group declares, with its value as text (shared memory in GiB, power in W)."""

    row: Any
    value: str

    @property
    def id(self) -> str:
        """The row's id."""
        return str(self.row.id)

    @property
    def kind(self) -> str:
        """The row's kind."""
        return str(self.row.kind)

    @property
    def target(self) -> str:
        """What it sets: what is put back is that of the same target."""
        row = self.row
        named = {"sysctl": "name", "module_option": "name", "limit": "name", "kernel_file": "path", "service": "unit"}
        return f"{row.kind}:{getattr(row, named[row.kind])}" if row.kind in named else str(row.kind)


def declared(rows: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[Declared, ...]:
    """The rows that a group declares, in the catalogue's order."""
    found = []
    for name, row in rows.items():
        if name in wanted:
            value = row.value if wanted[name] is True else wanted[name]
            found.append(Declared(row, "" if value is None else " ".join(str(value).split())))
    return tuple(found)


HEADER = "# Written by gpuwright for {root}: the next deploy undoes an edit. Change `system` in group_data instead.\n"


def kept_in(root: str) -> str:
    """Root's folder of what a deploy of `root` has set on the host, and of what sets it again at boot: outside of it,
    as it may belong to a user, or be removed.
    """
    return f"/var/lib/gpuwright{root}"


def files(settings: Iterable[Declared], root: str, unit: str) -> dict[str, tuple[str, int]]:
    """{path: (text, mode)} of the files that keep the settings over a reboot."""
    head = HEADER.format(root=root)
    by_kind: dict[str, list[Declared]] = {}
    for each in settings:
        by_kind.setdefault(each.kind, []).append(each)
    found: dict[str, tuple[str, int]] = {}

    def put(path: str, lines: list[str], mode: int = 0o644) -> None:
        if lines:
            found[path] = (head + "".join(f"{line}\n" for line in lines), mode)

    put(f"/etc/sysctl.d/90-{unit}.conf", [f"{e.row.name} = {e.value}" for e in by_kind.get("sysctl", [])])
    options = [(*e.row.name.partition(".")[::2], e.value) for e in by_kind.get("module_option", [])]
    put(f"/etc/modprobe.d/90-{unit}.conf", [f"options {module} {name}={value}" for module, name, value in options])
    limits = [f"{who} - {e.row.name} {e.value}" for e in by_kind.get("limit", []) for who in ("*", "root")]
    put(f"/etc/security/limits.d/90-{unit}.conf", limits)
    boot = [*map(_boot_file, by_kind.get("kernel_file", []))]
    boot += [f"mount -o remount,size={e.value}G /dev/shm" for e in by_kind.get("shared_memory", [])]
    boot += [f"nvidia-smi --power-limit={e.value}" for e in by_kind.get("power_limit", [])]
    if boot:
        script = f"{kept_in(root)}/boot_settings.sh"
        found[script] = ("#!/bin/sh\n" + head + "".join(f"{line}\n" for line in boot), 0o755)
        service = [
            "[Unit]", f"Description=Settings of the host for {unit}", "After=nvidia-persistenced.service",
            f"Before={unit}.service", "", "[Service]", "Type=oneshot", f'ExecStart=/bin/sh "{script}"',
            "RemainAfterExit=yes", "", "[Install]", "WantedBy=multi-user.target",
        ]  # fmt: skip
        put(f"/etc/systemd/system/{settings_unit(unit)}", service)
    return found


def settings_unit(unit: str) -> str:
    """The systemd unit that sets at boot what no file of the system can."""
    return f"{unit}-settings.service"


def _boot_file(each: Declared) -> str:
    return f'for file in {each.row.path}; do if [ -e "$file" ]; then echo {shlex.quote(each.value)} > "$file"; fi; done'


@dataclass(frozen=True)
class Gap:
    """A declared setting that is not as declared: what, expected, found. `blocked`: why it cannot be made so, or, where
    it is `unknown`, why that cannot be said.
    """

    id: str
    what: str
    expected: str
    found: str
    blocked: str = ""
    unknown: bool = False


Seen = Any
Gaps = Iterator[Gap]


def _packages(each: Declared, seen: Seen) -> Gaps:
    if seen["manager"] is None:
        yield Gap(each.id, "packages", ", ".join(each.row.apt), "none", "the node has neither apt nor dnf")
    for name in package_names(each.row, seen):
        if name not in seen["installed"] and (not each.row.where_available or name in seen["available"]):
            yield Gap(each.id, f"package {name}", "installed", "absent")


def _sysctl(each: Declared, seen: Seen) -> Gaps:
    name, now = each.row.name, seen.get(each.row.name)
    if now is None:
        yield Gap(each.id, name, each.value, "none", "this kernel has no such setting")
    elif now != each.value:
        yield Gap(each.id, name, each.value, now)


def _kernel_file(each: Declared, seen: Seen) -> Gaps:
    counts = seen.get(each.row.path, {})
    for now, count in sorted(counts.items(), key=str):
        if now != each.value:
            yield Gap(each.id, each.row.path, each.value, f"{now} in {count} of {sum(counts.values())}")


def _shared_memory(each: Declared, seen: Seen) -> Gaps:
    size = seen["shm"]["size"]
    if size < int(each.value) << 30:
        yield Gap(each.id, SHM, f"{each.value} GiB", f"{size / (1 << 30):g} GiB")


def _service(each: Declared, seen: Seen) -> Gaps:
    unit = seen.get(each.row.unit)
    if unit is None or unit["load"] != "loaded":
        yield Gap(each.id, each.row.unit, "enabled, active", "none", f"the node has no unit {each.row.unit}")
    elif unit["active"] != "active" or unit["enabled"] not in ("enabled", "static", "generated", "indirect"):
        yield Gap(each.id, each.row.unit, "enabled, active", f"{unit['enabled']}, {unit['active']}")


def _power_limit(each: Declared, seen: Seen) -> Gaps:
    for gpu in seen:
        low, high, now = gpu["power_min_w"], gpu["power_max_w"], gpu["power_limit_w"]
        what, wanted = f"power of {gpu['slot']}", f"{each.value} W"
        if None in (low, high, now):
            yield Gap(each.id, what, wanted, "unknown", "this GPU tells no power limits")
        elif not low <= int(each.value) <= high:
            yield Gap(each.id, what, wanted, f"{now:g} W", f"it takes {low:g} to {high:g} W")
        elif now != int(each.value):
            yield Gap(each.id, what, wanted, f"{now:g} W")


def _hold(each: Declared, seen: Seen) -> Gaps:
    if seen["manager"] != "apt":
        yield Gap(each.id, "holds", "apt", str(seen["manager"]), "only apt can hold packages back")
    for name, package in sorted(seen["installed"].items()):
        if each.row.holds(name) and not package["held"]:
            yield Gap(each.id, f"package {name}", "held", "not held")


def _limit(each: Declared, seen: Seen) -> Gaps:
    """A limit is a file alone; but one above what the kernel allows would lock every login out."""
    most = seen["nr_open"]
    if each.row.name == "nofile" and most is not None and int(each.value) > most:
        why = f"fs.nr_open is {most}, and a login whose limit is above it is refused"
        yield Gap(each.id, "open files", each.value, f"{most} at most", why)


# Of each kind that can be looked at: which reading, and what of it differs. The others are files alone.
KINDS: dict[str, tuple[str, Callable[[Declared, Seen], Gaps]]] = {
    "packages": ("packages", _packages),
    "sysctl": ("sysctls", _sysctl),
    "kernel_file": ("kernel_files", _kernel_file),
    "shared_memory": ("mounts", _shared_memory),
    "service": ("services", _service),
    "power_limit": ("gpus", _power_limit),
    "hold": ("packages", _hold),
    "limit": ("limits", _limit),
}


def gaps(settings: Iterable[Declared], readings: Mapping[str, Any], problems: Mapping[str, str]) -> list[Gap]:
    """Every declared setting that is not so now. What waits for a reboot is no gap: see waiting()."""
    found: list[Gap] = []
    for each in settings:
        if each.kind not in KINDS:
            continue
        reading, look = KINDS[each.kind]
        if reading in readings:
            found += look(each, readings[reading])
        else:
            why = problems.get(reading, "it was not observed")
            found.append(Gap(each.id, each.target, each.value or "so", "unknown", why, unknown=True))
    return found


def package_names(row: Packages, seen: Mapping[str, Any]) -> list[str]:
    """The names of a row's packages for the node's package manager."""
    return {"apt": row.apt, "dnf": row.dnf}.get(seen["manager"], [])


def waiting(settings: Iterable[Declared], readings: Mapping[str, Any]) -> list[str]:
    """What a deploy cannot do now and that is not called done: module options that wait for a reboot, limits that wait
    for a new login, packages that no repository of the node has.
    """
    loaded, limits = readings.get("module_options") or {}, readings.get("limits") or {}
    packages = readings.get("packages")
    found = []
    for each in settings:
        row = each.row
        if row.kind == "module_option" and loaded.get(row.name) not in (None, row.shown):
            found.append(f"{each.id}: {row.name} is {loaded[row.name]}, and {row.shown} after a reboot")
        elif row.kind == "limit" and row.name in limits:
            hard = limits[row.name][1]
            if hard is not None and (each.value == "unlimited" or hard < int(each.value)):
                now = f"this session's {row.name} is {hard}"
                found.append(
                    f"{each.id}: {now}, and {each.value} in a new login (what supervisor runs: after its restart)"
                )
        elif row.kind == "packages" and row.where_available and packages and packages["manager"]:
            names = package_names(row, packages)
            absent = [name for name in names if name not in packages["installed"] and name not in packages["available"]]
            if absent:
                found.append(f"{each.id}: no repository that the node knows has {', '.join(absent)}")
    return found


def stale(settings: Iterable[Declared], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier deploy set and nobody declares any more, by id, with what it was before."""
    kept = {each.id: each.target for each in settings}
    seen: Mapping[str, Any] = manifest.get("settings", {})
    return {name: entry for name, entry in seen.items() if kept.get(name) != entry.get("target")}
