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


class SeenVenv(Seen):
    """The venv: Python version, site-packages, version by canonical name, and what is damaged with the reason."""

    python: str
    site: str
    distributions: dict[str, str]
    damaged: dict[str, str]


class SeenModelFile(Seen):
    """A file of the model folder: bytes, and the sha256 where it was asked for."""

    size: int
    sha256: str | None


class SeenModel(Seen):
    """The model folder: its files, the shards its index names, the config's model_type, a tiny model's manifest.

    `tensors`: for each start of a tensor's name that was asked for, whether the index names one.
    """

    files: dict[str, SeenModelFile]
    shards: list[str] | None
    model_type: str | None
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
    name.
    """

    manager: str | None
    unit: str | None
    status: str | None
    pid: int | None
    restarts: int | None
    record: dict[str, Any] | None
    processes: list[int]
    orphans: list[SeenProcess]
    units: list[str]
    health: int | None


class SeenResult(Seen):
    """A benchmark record that lies on the node. `benchmark_digest`: none in records of older versions."""

    file: str
    spec_digest: str
    benchmark_digest: str | None
    verdict: str


class NodeState(Seen):
    """Everything one observation says."""

    version: Literal[3]
    python: str
    uid: int
    machine: str
    memory_bytes: int
    disk_free_bytes: int
    root_writable: bool
    ensurepip: bool
    commands: dict[str, str | None]
    interpreter: SeenInterpreter | None
    folders: dict[str, SeenFolder | None]
    files: dict[str, SeenFile | None]
    launch_scripts: list[str]
    tools: SeenTools | None
    venv: SeenVenv | None
    stamps: dict[str, dict[str, Any] | None]
    model: SeenModel | None
    port: SeenPort | None
    server: SeenServer
    systemd: bool
    unit_owner: str | None
    logrotate_owner: str | None
    caches: list[str]
    state: dict[str, Any] | None
    results: list[SeenResult]
    patched: dict[str, SeenFile | None]
    manifest: dict[str, dict[str, str]]
    originals: list[str]


def last_line(text: str) -> str:
    """The last line that a node script printed: a login shell may print before it."""
    return text.strip().rpartition("\n")[2]


def parse_observation(text: str) -> NodeState:
    """The state an observation's last line holds (a login shell may print before it).

    Raises GpuwrightError with the offending text.
    """
    last = last_line(text)
    try:
        return NodeState.model_validate_json(last)
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(str(part) for part in detail["loc"]) or "the answer"
        raise GpuwrightError(
            f"the observation is not usable: {where}: {detail['msg']}; it said: {last[:300]!r}"
        ) from None
