"""What inventory and group_data may say of a host: one validated model, and where each value was written."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from gpuwright.errors import InputError, InputErrors, Place, nearest
from gpuwright.fields import DistributionName, EnvName, Slug, SpecifierText
from gpuwright.yamlfile import Loc, Row, describe, dotted, fields_at, shown

STAGES = ("preflight", "system", "runtime", "patches", "model", "launchers", "service", "smoke")


def _node_path(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("is not an absolute path")
    if any(ord(c) < 32 or c in "\"'`$%;:\\" for c in path):
        raise ValueError(
            "holds a quote, a control character or one of $ % ; : ` \\, which PATH or supervisor's file cannot carry"
        )
    return posixpath.normpath(path)


NodePath = Annotated[str, AfterValidator(_node_path)]
Port = Annotated[int, Field(ge=1, le=65535)]


def _secret_source(text: str) -> str:
    kind, _, rest = text.partition(":")
    if kind not in ("env", "file") or not rest:
        raise ValueError("is not env:NAME or file:PATH, of the machine that runs pyinfra")
    return text


def _commit(text: str) -> str:
    if len(text) != 40 or set(text) - set("0123456789abcdef"):
        raise ValueError("is not a commit, which has 40 hex digits: a branch or a tag moves under a node")
    return text


def _unit(name: str) -> str:
    if name.endswith("-settings"):
        raise ValueError("ends in -settings, which is the name of the unit that sets the host at boot")
    return name


def _set(value: bool | int | str) -> bool | int | str:
    if value is False:
        raise ValueError("is False: what is not wanted is left out, and then put back on the node")
    return value


def _endpoint(url: str) -> str:
    if "@" in url:
        raise ValueError("holds credentials, which messages would show: a token has a key of its own")
    return url.rstrip("/")


def _index(url: str) -> str:
    if "@" in url:
        raise ValueError(
            "holds credentials, which messages would show: they have a key of their own, index_credentials"
        )
    return url


def _reason(text: str) -> str:
    if len(text.strip()) < 5:
        raise ValueError("is not a reason")
    return text


SecretSource = Annotated[str, AfterValidator(_secret_source)]
Reason = Annotated[str, AfterValidator(_reason)]


class TinyModel(Row):
    """A random GPT-2 made in <root>/model from `seed`: hidden size, layers, heads, positions and weights' std."""

    kind: Literal["tiny"]
    seed: int = 20260212
    hidden: int = Field(default=128, ge=8)
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    positions: int = Field(default=4096, ge=64)
    std: float = 0.2


class FolderModel(Row):
    """A model folder that is there: its config, and every shard that its index names, are checked."""

    kind: Literal["folder"]
    path: NodePath


class HubModel(Row):
    """A model of the Hugging Face hub at one commit, kept in `path`: fetched by the venv's hub client and verified by
    the hub's hashes. `token`: where the machine that runs pyinfra has one. `endpoint`: of a mirror.
    """

    kind: Literal["hub"]
    path: NodePath
    repo: Annotated[str, Field(pattern=r"^\w[\w.-]*/\w[\w.-]*$")]
    revision: Annotated[str, AfterValidator(_commit)]
    token: SecretSource | None = None
    endpoint: Annotated[str, Field(pattern=r"^https?://"), AfterValidator(_endpoint)] | None = None


class Pcie(Row):
    """The link that each GPU must be able to have: generation, and width in lanes."""

    generation: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)


class ExpectedGpus(Row):
    """The GPUs that a node must have: how many, as nvidia-smi names them, with at least so much memory (GiB) each.

    `slots`: their PCI addresses (0000:c1:00.0), where a missing one shall be named even after a cold start without it.
    """

    count: int = Field(ge=1)
    name: str
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d$")]
    memory_gib: float = Field(gt=0)
    pcie: Pcie = Pcie()
    slots: list[Annotated[str, Field(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]] = []


class Adopted(Row):
    """An interpreter that someone else keeps, such as a vendor image's: nothing is ever installed into it.

    What it has of the lock, in the lock's version or in one that `versions` allows, is not installed again; everything
    else comes into the venv, which sees it. `versions` must be there. Distributions that carry a patch come into the
    venv, unless `patch_in_place`. `changes`: whether a deploy stops where the interpreter's distributions are others
    than at the last deploy, or accepts them.
    """

    interpreter: NodePath
    versions: dict[DistributionName, SpecifierText] = {}
    patch_in_place: bool = False
    changes: Literal["stop", "accept"] = "stop"


class Profile(Row):
    """A plan of load: levels of concurrency, each with fixed lengths in tokens, so many repeats after a discarded one.

    A repeat sends `prompts_per_concurrency` times the level, and at least `min_prompts`. One shorter than
    `min_duration_s` is rejected, one longer than `timeout_s` is stopped. `noise`: the least relative difference that is
    called one, on top of what the repeats themselves show.
    """

    levels: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    input_len: int = Field(ge=1)
    output_len: int = Field(ge=2)
    prompts_per_concurrency: int = Field(default=5, ge=2)
    min_prompts: int = Field(default=8, ge=1)
    warmup_per_concurrency: int = Field(default=1, ge=1)
    repeats: int = Field(default=3, ge=3)
    seed: int = 1
    min_duration_s: float = Field(default=1.0, gt=0)
    timeout_s: int = Field(default=3600, ge=10)
    noise: float = Field(default=0.03, ge=0, lt=1)


class Cluster(Row):
    """Several hosts that serve one model together: those of an inventory group, ranked in the order it lists them.

    `port`: where rank 0 listens for the others (torch.distributed); they reach it at its `cluster_address`.
    """

    group: str
    port: Port = 20000


INDEX_NAMES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")


def _installer_env(env: dict[str, str]) -> dict[str, str]:
    if env.get("UV_LINK_MODE") == "symlink":
        raise ValueError("UV_LINK_MODE=symlink would have every patch written into uv's cache: use hardlink or copy")
    for name, value in env.items():
        if name in INDEX_NAMES:
            raise ValueError(f"{name}: the index of uv and of pip is set by the key `index`")
        if re.search(r"://[^/\s]*@", value):
            raise ValueError(f"{name} holds credentials, which the node's process list would show")
    return env


SECRET_ARGS = ("api-key", "admin-api-key")
SecretName = Annotated[str, Field(pattern=r"^(api-key|admin-api-key|[A-Z_][A-Z0-9_]*)$")]


class HostData(Row):
    """Every value a group may set; group_data/all.py holds the defaults with a comment each."""

    root: NodePath
    ladder: str
    tier: str
    stack: str
    stages: list[Literal[STAGES]] = list(STAGES)  # type: ignore[valid-type]
    device: Literal["cpu", "cuda"]
    python: Annotated[str, Field(pattern=r"^3\.\d+$")]
    interpreter: NodePath | None = None
    adopt: Adopted | None = None
    python_download: bool = False
    index: Annotated[str, Field(pattern=r"^https?://\S+$"), AfterValidator(_index)] | None = None
    index_credentials: SecretSource | None = None
    wheelhouse: str | None = None
    wheels_from_peers: bool = True
    installer_env: Annotated[dict[EnvName, str], AfterValidator(_installer_env)] = {}
    cuda_home: NodePath | None = None
    model: Annotated[TinyModel | FolderModel | HubModel, Field(discriminator="kind")]
    gpu: ExpectedGpus | None = None
    system: dict[Slug, Annotated[bool | int | str, AfterValidator(_set)]] = {}
    settings_sudo: bool = False
    ignored_checks: dict[Slug, Reason] = {}
    save_observation: str | None = None
    bind: str = "127.0.0.1"
    port: Port
    supervisor: Literal["auto", "systemd", "supervisor"] = "auto"
    unit: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$"), AfterValidator(_unit)] = "sglang-server"
    cluster: Cluster | None = None
    cluster_address: str | None = None
    secrets: dict[SecretName, SecretSource] = {}
    allow_blocked: bool = False
    serve: bool = True
    observe_timeout_s: int = Field(default=600, ge=5)
    ready_timeout_s: int = Field(ge=10)
    min_memory_gib: float = Field(ge=0)
    min_free_disk_gib: float = Field(ge=0)
    integrity: Literal["text", "deep"] = "text"
    patches: Literal["series", "none"] = "series"
    patches_foreign: Literal["stop", "replace"] = "stop"
    smoke: Literal["once", "always", "never"] = "once"
    profile: str = "smoke"
    profiles: dict[Slug, Profile] = Field(min_length=1)
    gate: str = "off"
    canary_gate: Literal["on", "off"] = "on"


def read_host_data(data: Mapping[str, Any], sources: Sources) -> HostData:
    """Validate one host's merged data. Raises InputErrors naming file, line and key."""
    values = dict(data)
    if isinstance(values.get("stages"), str):  # --data stages=runtime,patches
        values["stages"] = [part.strip() for part in values["stages"].split(",") if part.strip()]
    if isinstance(values.get("python"), float):  # --data python=3.12 arrives as a number, and 3.10 as 3.1
        problem = f"arrives as the number {values['python']}"
        raise InputErrors(
            [InputError(sources.place("python"), "python", problem, hint="write --data 'python=\"3.12\"'")]
        )
    try:
        return HostData.model_validate(values)
    except ValidationError as error:
        raise InputErrors([_input_error(detail, sources) for detail in error.errors()]) from error


def _input_error(detail: Any, sources: Sources) -> InputError:
    loc: Loc = tuple(part for part in detail["loc"] if part not in ("tiny", "folder", "hub"))
    problem, hint = describe(detail)
    if (
        loc[0] in ("secrets", "index", "index_credentials", "installer_env")
        or "token" in loc
        or "endpoint" in loc
        or (loc[0] == "model" and isinstance(detail.get("input"), dict))
    ):
        problem = problem.partition("; found ")[0]  # it may be the secret itself, pasted here by mistake
    if detail["type"] == "extra_forbidden":
        hint = nearest(str(loc[-1]), fields_at(HostData, loc[:-1]))
    return InputError(sources.place(str(loc[0]), str(loc[-1])), dotted(loc), problem, hint=hint)


class Sources:
    """Where a host's data was written: `--data`, then files in the order in which pyinfra lets them win."""

    def __init__(self, override_keys: Iterable[str], files: Iterable[Path]) -> None:
        self.override_keys = set(override_keys)
        self.files = list(files)

    def place(self, key: str, inner: str | None = None) -> Place:
        """The place of top-level `key`; of `inner` inside it where that can be told."""
        if key in self.override_keys:
            return Place("--data")
        for path in self.files:
            found = _lines_of(path, key, inner)
            if found is not None:
                return Place(shown(path), found)
        return Place(shown(self.files[0]) if self.files else "the inventory")


def _lines_of(path: Path, key: str, inner: str | None) -> int | None:
    """The line in a Python file where `key` is assigned, or stands as a key of a dict."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    for node in ast.walk(tree):
        for line, value in _assignments(node, key):
            for part in ast.walk(value) if inner else ():
                if isinstance(part, ast.Dict):
                    found = next((k.lineno for k in part.keys if k is not None and _is_text(k, inner)), None)
                    if found is not None:
                        return found
            return line
    return None


def _assignments(node: ast.AST, key: str) -> list[tuple[int, ast.expr]]:
    """(line, value) where `node` itself assigns `key`, or is a dict with that key."""
    if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == key for t in node.targets):
        return [(node.lineno, node.value)]
    if isinstance(node, ast.Dict):
        return [(k.lineno, v) for k, v in zip(node.keys, node.values, strict=True) if k and _is_text(k, key)]
    return []


def _is_text(node: ast.expr | None, text: str | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == text
