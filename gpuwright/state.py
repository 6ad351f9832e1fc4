"""What was observed of a node: the one JSON of files/node/observe.py, as frozen models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gpuwright.errors import GpuwrightError


class Seen(BaseModel):
    """Base of the observation's models."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SeenFolder(Seen):
    """A folder: permission bits and owner."""

    mode: int
    uid: int


class SeenFile(Seen):
    """A regular file: sha256 in hex, size in bytes, permission bits."""

    sha256: str
    size: int
    mode: int


class SeenInterpreter(Seen):
    """A Python that was run, and the version it gave ("3.12.3")."""

    path: str
    version: str


class SeenTools(Seen):
    """gpuwright's own venv on the node."""

    distributions: dict[str, str]
    damaged: dict[str, str]


class SeenInstalled(Seen):
    """The installed files: digests over the content of each and over their times of writing; the path of the newest."""

    content: str
    times: str
    newest: str | None


class SeenVenv(Seen):
    """The venv: Python version, site-packages, version by canonical name, and what is damaged with the reason."""

    python: str
    site: str
    distributions: dict[str, str]
    damaged: dict[str, str]
    installed: SeenInstalled


class SeenAdoptedDistribution(Seen):
    """A distribution of an adopted interpreter: its version, the folder it lies in, a digest over its files' content
    (as SeenInstalled has it), the path of the file that was written last, and the
    folders that its own .pth files name.
    """

    version: str
    site: str
    content: str
    newest: str | None
    folders: list[str] = []


class SeenAdopted(Seen):
    """An interpreter that someone else keeps: its version, its folders of distributions in the order in which they win,
    and what it has of the lock, by canonical name.
    """

    python: str
    sites: list[str]
    distributions: dict[str, SeenAdoptedDistribution]


class SeenModelFile(Seen):
    """A file of the model folder: bytes, when it was written (ns), its inode, and the sha256 where it was asked for."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str | None


class SeenModel(Seen):
    """The model folder: its files, the shards its index names, the config's model_type and sha256, a tiny model's
    manifest.

    `cut`: shards whose size is not the one that their own header says, with both. `unfinished`: downloads that were cut
    off. `tensors`: for each start of a tensor's name that was asked for, whether the index names one.
    """

    files: dict[str, SeenModelFile]
    cut: dict[str, str]
    unfinished: list[str]
    shards: list[str] | None
    model_type: str | None
    config_sha256: str | None
    manifest: dict[str, Any] | None
    tensors: dict[str, bool]


class SeenPort(Seen):
    """Who listens on the server's port."""

    pid: int | None
    command: str


class SeenProcess(Seen):
    """A process, with what it calls itself."""

    pid: int
    command: str


class SeenServer(Seen):
    """The server as its supervisor, its record and its port show it. `health` is an HTTP status.

    `manager`: who keeps it (supervisor, or systemd in `unit`), `status` in that one's words. `orphans`: processes of an
    earlier server of ours that nobody keeps any more. `units`: the systemd units that deploys of this root wrote, by
    name. `family`: every live process of it, also of one that its supervisor has started again by itself. `enabled`:
    whether it starts at boot (None under supervisor); `dropins`: files that change its unit; `stale`: whether its file
    was written since systemd read it. `differs`: in what the process is not what the launch script starts.
    """

    manager: str | None
    unit: str | None
    status: str | None
    pid: int | None
    restarts: int | None
    record: dict[str, Any] | None
    processes: list[int]
    family: list[int]
    orphans: list[SeenProcess]
    units: list[str]
    enabled: bool | None
    dropins: list[str]
    stale: bool
    differs: list[str]
    health: int | None


class SeenResult(Seen):
    """A benchmark record that lies on the node. `benchmark_digest`: none in records of older versions."""

    file: str
    spec_digest: str
    benchmark_digest: str | None
    verdict: str


class Reading(Seen):
    """One reading of the machine (files/node/machine.py): its value, or why it could not be made, and its time in s."""

    value: Any
    problem: str | None
    seconds: float | None


class NodeState(Seen):
    """Everything one observation says. `deployed`: what the last deploy of each stage declared. `adopted_before`: what
    the last deploy found an adopted interpreter to be. `unreadable`: paths that are there and that this user may not
    read: what is said of them is not known. `wheels`: bytes by name of what lies in the folder of wheels,
    `parts/NAME.part` of what is there in part.
    """

    version: Literal[6]
    python: str
    uid: int
    machine: str
    machine_readings: dict[str, Reading]
    system_manifest: dict[str, Any] | None
    system_owners: dict[str, str | None]
    model_manifest: dict[str, Any] | None
    root_writable: bool
    unreadable: list[str]
    ensurepip: bool
    commands: dict[str, str | None]
    interpreter: SeenInterpreter | None
    folders: dict[str, SeenFolder | None]
    files: dict[str, SeenFile | None]
    launch_scripts: list[str]
    tools: SeenTools | None
    venv: SeenVenv | None
    adopted: SeenAdopted | None
    adopted_before: dict[str, Any] | None
    stamps: dict[str, dict[str, Any] | None]
    model: SeenModel | None
    port: SeenPort | None
    server: SeenServer
    systemd: bool
    unit_owner: str | None
    logrotate_owner: str | None
    caches: list[str]
    state: dict[str, Any] | None
    deployed: dict[str, dict[str, str]] | None
    results: list[SeenResult]
    patched: dict[str, SeenFile | None]
    manifest: dict[str, dict[str, str]]
    originals: list[str]
    wheels: dict[str, int] = {}

    @property
    def readings(self) -> dict[str, Any]:
        """The values of the readings that could be made."""
        return {name: each.value for name, each in self.machine_readings.items() if each.problem is None}

    @property
    def problems(self) -> dict[str, str]:
        """Why the others could not."""
        return {name: each.problem for name, each in self.machine_readings.items() if each.problem is not None}


def last_line(text: str) -> str:
    """The answer of a node script: the last line that may be JSON, since a login shell may print before and after it;
    where there is none, the last line.
    """
    lines = text.strip().split("\n")
    return next((line for line in reversed(lines) if line.startswith("{") and line.endswith("}")), lines[-1])


def parse_observation(text: str) -> NodeState:
    """The state that an observation's answer holds.

    Raises GpuwrightError with the offending text.
    """
    return read_observation(last_line(text))


def read_observation(text: str) -> NodeState:
    """The state that a whole text holds, such as a saved observation. Raises GpuwrightError with the offending text."""
    try:
        return NodeState.model_validate_json(text)
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(str(part) for part in detail["loc"]) or "the answer"
        raise GpuwrightError(
            f"the observation is not usable: {where}: {detail['msg']}; it said: {text[:300]!r}"
        ) from None
