"""NodeSpec: what a node should be. Every derived value is computed here, once."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jinja2

from gpuwright import REPOSITORY
from gpuwright.acceptance import Acceptance
from gpuwright.catalogue import PATCHES, Catalogue, Patch, Setting, Stack, flags_path
from gpuwright.checks import Checks
from gpuwright.diagnose import Signatures
from gpuwright.errors import InputError, InputErrors, Place, nearest
from gpuwright.flags import Flag, installed_proof
from gpuwright.hostdata import (
    SECRET_ARGS,
    STAGES,
    Adopted,
    HostData,
    HubModel,
    Profile,
    Sources,
    TinyModel,
    read_host_data,
)
from gpuwright.ladder import COMPILER_FLAGS, Ladder, Standing, Tier, standing
from gpuwright.lockfile import TOOLS_LOCK, Lock, lock_path, read_lock
from gpuwright.smoke import levels
from gpuwright.system import COUNTED, SHM, VALUELESS, Declared, declared, files, kept_in, settings_unit, value_problem
from gpuwright.wheelhouse import Gathered, read_wheelhouse
from gpuwright.yamlfile import shown

# Without them the engine writes its API keys into its log, and tells them to whoever asks for its arguments.
KEYS_PATCHES = ("sglang-keys-out-of-the-log", "sglang-keys-out-of-server-info")


def digest(value: Any) -> str:
    """sha256 in hex over the canonical JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def patch_set_digest(patches: Iterable[Patch]) -> str:
    """sha256 in hex over the ordered post-images."""
    return digest([[patch.file, patch.post_sha256] for patch in patches])


@dataclass(frozen=True)
class Paths:
    """Where everything lies on a node, below its root."""

    root: str

    def __getattr__(self, name: str) -> str:
        folders = ("launch", "patches", "cache", "logs", "results", "run", "tools", "venv", "lib")
        if name not in folders:
            raise AttributeError(name)
        return f"{self.root}/{name}"

    @property
    def folders(self) -> dict[str, int]:
        """The folders the system stage makes, with their permission bits; tools and venv are made by their tools."""
        names = ("launch", "patches", "patches/originals", "patches/foreign", "cache", "logs", "results", "lib")
        return {self.root: 0o755, **{f"{self.root}/{name}": 0o755 for name in names}, self.run: 0o700}

    @property
    def originals(self) -> str:
        """The pristine content of every patched file, named by its sha256."""
        return f"{self.root}/patches/originals"

    @property
    def manifest(self) -> str:
        """Which files of the venv carry patches of ours, and their pristine sha256."""
        return f"{self.root}/patches/applied.json"

    @property
    def foreign(self) -> str:
        """Copies of files that were found to be neither pristine nor ours, named by their sha256."""
        return f"{self.root}/patches/foreign"

    @property
    def socket(self) -> str:
        """supervisord's unix socket."""
        return f"{self.run}/supervisor.sock"

    @property
    def supervisor_conf(self) -> str:
        """supervisord's configuration."""
        return f"{self.run}/supervisord.conf"

    @property
    def await_server(self) -> str:
        """What a systemd unit awaits the server by."""
        return f"{self.run}/await_server.py"

    @property
    def secrets_file(self) -> str:
        """Secret arguments, which the server reads with --config: JSON, which is YAML, so node scripts can read it."""
        return f"{self.run}/secrets.yaml"

    @property
    def secrets_env(self) -> str:
        """Secret variables, which the launch script reads."""
        return f"{self.run}/secrets.env"

    @property
    def deployed(self) -> str:
        """What the last deploy of each stage declared: it tells a node that moved from a repository that did."""
        return f"{self.run}/deployed.json"

    @property
    def model_manifest(self) -> str:
        """Which files of the hub's model were fetched, and what they were when they were verified."""
        return f"{self.run}/model.json"

    @property
    def adopted(self) -> str:
        """What of an adopted interpreter the venv sees, as the last deploy found it."""
        return f"{self.run}/adopted.json"

    def bridge(self, python: str) -> str:
        """What makes the venv, of a Python such as "3.12", see an adopted interpreter's distributions."""
        return f"{self.venv}/lib/python{python}/site-packages/gpuwright_adopted.pth"

    @property
    def builds(self) -> str:
        """Which build of each distribution was installed."""
        return f"{self.run}/builds.json"

    @property
    def lock_copy(self) -> str:
        """The lock the venv was last synced to."""
        return f"{self.run}/runtime.lock.txt"

    @property
    def tools_lock_copy(self) -> str:
        """The lock of gpuwright's own tools."""
        return f"{self.run}/tools.lock.txt"

    @property
    def wheels(self) -> str:
        """The wheels that a node without an index is installed from."""
        return f"{self.root}/wheels"

    @property
    def cuda_stub(self) -> str:
        """The libcuda stand-in of a node without a GPU."""
        return f"{self.lib}/libcuda.so.1"

    @property
    def cuda_stub_source(self) -> str:
        """Its source, kept beside it so that a change of the source is seen."""
        return f"{self.lib}/libcuda_stub.c"

    @property
    def mutex(self) -> str:
        """The file that whatever changes the node holds a lock on."""
        return f"{self.root}/.lock"


@dataclass(frozen=True)
class NodeFile:
    """A text file that must lie on the node: absolute path, content, permission bits."""

    path: str
    text: str
    mode: int = 0o644

    @cached_property
    def sha256(self) -> str:
        """sha256 of the content, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Member:
    """A host of a cluster: its inventory name, and the address at which the others reach it."""

    name: str
    address: str


@dataclass(frozen=True)
class NodeSpec:
    """What one host should be: validated data, the catalogue's part of it, and all that follows from them."""

    host: str
    data: HostData
    stack: Stack
    ladder: Ladder
    tier: Tier
    lock: Lock
    tools_lock: Lock
    patches: tuple[Patch, ...]
    flags: Mapping[str, Flag]
    signatures: Signatures
    acceptance: Acceptance
    checks: Checks
    system: tuple[Declared, ...] = ()
    uncovered: tuple[Patch, ...] = ()
    series: tuple[Patch, ...] = ()
    settings: tuple[Setting, ...] = ()
    members: tuple[Member, ...] = ()

    @cached_property
    def paths(self) -> Paths:
        """The node's paths."""
        return Paths(self.data.root)

    @property
    def stages(self) -> list[str]:
        """The stages of this run, in their order."""
        return [stage for stage in STAGES if stage in self.data.stages]

    @property
    def python(self) -> str:
        """The venv's interpreter."""
        return f"{self.paths.venv}/bin/python"

    @property
    def interpreter(self) -> str | None:
        """The interpreter that the venv is made of, where one is named."""
        return self.data.adopt.interpreter if self.data.adopt else self.data.interpreter

    @property
    def python_options(self) -> list[str]:
        """How the venv's interpreter is started: an adopted one's folders must get no compiled modules of ours."""
        return ["-X", f"pycache_prefix={self._pycache}"] if self.data.adopt else []

    @property
    def _pycache(self) -> str:
        return f"{self.cache}/pycache"

    @cached_property
    def patch_set_digest(self) -> str:
        """Over the ordered post-images."""
        return patch_set_digest(self.patches)

    @property
    def compiler_flags(self) -> dict[str, str]:
        """The ladder's environment that changes what flashinfer compiles."""
        return {name: self.ladder.env[name] for name in COMPILER_FLAGS if name in self.ladder.env}

    @cached_property
    def runtime_digest(self) -> str:
        """Over what compiled kernels depend on: lock, Python, patch set, compiler flags, the CUDA toolkit's place, and
        what is adopted.
        """
        inputs = [
            self.lock.sha256, self.data.python, self.patch_set_digest, self.compiler_flags, self.data.cuda_home,
        ]  # fmt: skip
        adopt = self.data.adopt
        return digest([*inputs, adopt.interpreter, adopt.versions] if adopt else inputs)

    @cached_property
    def spec_digest(self) -> str:
        """Over everything that the server is, the clocks and power it is given among it: a benchmark result belongs to
        exactly one of these. How it is measured has a digest of its own.
        """
        files = [[file.path, file.sha256, file.mode] for file in self.scripts]
        model = self._served_model
        host = [[each.id, each.value] for each in self.system if each.kind in COUNTED]
        parts = [self.runtime_digest, self.tools_lock.sha256, self.tier.name, files, model]
        return digest([*parts, host] if host else parts)

    @property
    def profile(self) -> Profile:
        """The load that the smoke stage runs."""
        return self.data.profiles[self.data.profile]

    @cached_property
    def benchmark_digest(self) -> str:
        """Over what is asked of the server, and what of it counts: the load, the probe, and the rules."""
        load = [level.argv("", 0, "", 0) for level in levels(self.profile)]
        rules = [[rule.id, rule.of, rule.require, rule.timing] for rule in self.acceptance.rules]
        probe = self.acceptance.probe.model_dump()
        return digest([self.profile.model_dump(exclude={"noise"}), load, probe, rules])

    @property
    def gpus_here(self) -> int:
        """How many GPUs of this host the server uses: the ladder's, shared by its nodes."""
        return self.ladder.tp // self.ladder.nodes if self.data.device == "cuda" else 0

    @property
    def reference(self) -> Tier:
        """The ladder's first tier, which the others are measured against."""
        return self.ladder.tiers[0]

    @cached_property
    def cache(self) -> str:
        """The JIT caches' folder: under the runtime digest, so a patch or a flag never meets a stale kernel."""
        return f"{self.paths.cache}/{self.runtime_digest[:16]}"

    @property
    def address(self) -> str:
        """Where the server is asked from the node itself: at `bind`, or on loopback when that means every address."""
        return "127.0.0.1" if self.data.bind == "0.0.0.0" else self.data.bind  # noqa: S104

    @property
    def model_path(self) -> str:
        """The model folder."""
        model = self.data.model
        return f"{self.paths.root}/model" if isinstance(model, TinyModel) else model.path

    def declared(self, kept_by: str) -> dict[str, dict[str, str]]:
        """What each stage brings about, by a name for each thing, on a node whose server `systemd` or `supervisor`
        keeps. A deploy records it; a drift check compares it with what it finds, to tell a node that has moved from a
        repository that has.
        """
        system = {f"folder {path}": mode_text(mode) for path, mode in self.paths.folders.items()}
        system |= {f"setting {each.id}": str(each.value) for each in self.system} | _file_keys(self.system_files)
        runtime = {"venv": self.data.python, f"file {self.paths.lock_copy}": self.lock.sha256[:16]}
        runtime |= {f"tool {name}": version for name, version in self.tools_lock.versions.items()}
        runtime |= {f"distribution {name}": version for name, version in self.lock.versions.items()}
        runtime |= {"adopt": self.data.adopt.interpreter} if self.data.adopt else {}
        runtime |= {"proofs": self.runtime_stamp[:16]}
        if self.data.wheelhouse:
            runtime |= {"wheels": digest([self.lock.sha256, self.tools_lock.sha256])[:16]}
        if self.cuda_stub_source:
            runtime |= _file_keys([self.cuda_stub_source])
        patches = {f"patched {patch.file}": patch.post_sha256[:16] for patch in self.patches}
        config = [self.lock.sha256, self.data.python, self.config_proofs]
        service = _file_keys(self.manager_files(kept_by)) | {"cache": self.runtime_digest[:16]}
        service |= {"supervisor": self.data.supervisor, "unit": self.data.unit, "serve": str(self.data.serve)}
        return {
            "system": system,
            "runtime": runtime,
            "patches": patches | {"probes": self.patches_stamp[:16]},
            "model": {"model": digest(self._served_model)[:16], "config": digest(config)[:16]},
            "launchers": _file_keys([*self.scripts, *self.secret_files]),
            "service": service | {"tier": self.tier.name, "spec": self.spec_digest[:16]},
        }

    @property
    def _served_model(self) -> dict[str, Any]:
        return self.data.model.model_dump(exclude={"token", "endpoint"})

    @property
    def model_env(self) -> dict[str, str]:
        """Environment that anything importing the engine needs on this node."""
        return {"LD_LIBRARY_PATH": self.paths.lib} if self.data.device == "cpu" else {}

    def environment(self, tier: Tier) -> dict[str, str]:
        """A tier's whole environment, in the order in which the launch script sets it."""
        path = [f"{self.paths.venv}/bin"]
        if self.data.adopt:  # what it brings has its programs there, such as ninja
            path.append(posixpath.dirname(self.data.adopt.interpreter))
        cuda: dict[str, str] = {}
        if self.data.cuda_home:
            path.append(f"{self.data.cuda_home}/bin")
            cuda["CUDA_HOME"] = self.data.cuda_home
        return {
            "PATH": ":".join([*path, "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]),
            **cuda,
            **self.model_env,
            **({"PYTHONPYCACHEPREFIX": self._pycache} if self.data.adopt else {}),
            "HOME": self.paths.run,
            "LANG": "C.UTF-8",
            "XDG_CACHE_HOME": f"{self.cache}/xdg",
            "HF_HOME": f"{self.cache}/huggingface",
            "FLASHINFER_WORKSPACE_BASE": f"{self.cache}/flashinfer",
            "TRITON_CACHE_DIR": f"{self.cache}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{self.cache}/inductor",
            "HF_HUB_OFFLINE": "1",
            "SPT_NOENV": "1",  # setproctitle, which SGLang names its processes with, else overwrites their environment
            **self.ladder.merged_env(tier),
        }

    def arguments(self, tier: Tier) -> list[str]:
        """A tier's arguments for sglang.launch_server, one `--flag value` a line, quoted for a shell."""
        fixed: dict[str, Any] = {
            "model-path": self.model_path,
            "host": self.data.bind,
            "port": self.data.port,
            "tp-size": self.ladder.tp,
        }
        if self.rank is not None and self.data.cluster is not None:
            fixed["nnodes"] = self.ladder.nodes
            fixed["node-rank"] = self.rank
            first = self.members[0].address
            fixed["dist-init-addr"] = f"{f'[{first}]' if ':' in first else first}:{self.data.cluster.port}"
        if any(name in SECRET_ARGS for name in self.data.secrets):
            fixed["config"] = self.paths.secrets_file
        lines = []
        for name, value in {**fixed, **self.ladder.merged_args(tier)}.items():
            values = [] if value is True else value if isinstance(value, list) else [value]
            lines.append(" ".join([f"--{name}", *(shlex.quote(str(v)) for v in values)]))
        return lines

    @property
    def rank(self) -> int | None:
        """This host's rank among the nodes that serve together, in the order of the inventory; None for one alone."""
        names = [member.name for member in self.members]
        return names.index(self.host) if names else None

    @cached_property
    def secret_files(self) -> tuple[NodeFile, ...]:
        """The node's files of secrets, 0600, with the values read now from this machine.

        Raises InputErrors where a value is not there.
        """
        found = dict(zip(self.data.secrets, self.secret_values, strict=True))
        args = {name: value for name, value in found.items() if name in SECRET_ARGS}
        env = {name: value for name, value in found.items() if name not in SECRET_ARGS}
        files = []
        if args:
            files.append(NodeFile(self.paths.secrets_file, json.dumps(args, sort_keys=True) + "\n", 0o600))
        if env:
            lines = [f"{name}={shlex.quote(value)}\n" for name, value in sorted(env.items())]
            files.append(NodeFile(self.paths.secrets_env, "".join(lines), 0o600))
        return tuple(files)

    @property
    def secret_values(self) -> list[str]:
        """The secrets themselves, as read from this machine: what must never be shown."""
        return [_secret(name, source) for name, source in self.data.secrets.items()]

    def deadline_s(self, tier: Tier) -> int:
        """How long a tier may take from its start until it answers, in s."""
        return tier.ready_timeout_s or self.data.ready_timeout_s

    def standing(self, tier: Tier) -> Standing:
        """What is known of a tier on this node's versions and patches. Which version an adopted interpreter has, where
        others than the lock's will do, is not known here: so nothing that was seen on the lock's speaks for it.
        """
        adopted = self.data.adopt.versions if self.data.adopt else {}
        others = {name: wanted for name, wanted in adopted.items() if wanted != f"=={self.lock.versions[name]}"}
        versions = self.lock.versions | {name: f"{wanted}, adopted" for name, wanted in others.items()}
        return standing(tier, versions, self.patch_set_digest)

    def script_name(self, tier: Tier) -> str:
        """`run_tp8_piecewise.sh`."""
        return f"run_tp{self.ladder.tp}_{tier.name.replace('-', '_')}.sh"

    def script_path(self, tier: Tier) -> str:
        """Where a tier's launch script lies on the node."""
        return f"{self.paths.launch}/{self.script_name(tier)}"

    @property
    def log(self) -> str:
        """The active tier's server log."""
        return f"{self.paths.logs}/sglang-server-{self.tier.name}.log"

    @cached_property
    def scripts(self) -> tuple[NodeFile, ...]:
        """One launch script for every tier of the ladder."""
        template = _templates().get_template("run_tier.sh.j2")
        secrets_env = self.paths.secrets_env if set(self.data.secrets) - set(SECRET_ARGS) else None
        return tuple(
            NodeFile(
                self.script_path(tier),
                template.render(
                    script=self.script_name(tier), tier=tier, ladder_name=self.data.ladder, stack=self.stack,
                    runtime_digest=self.runtime_digest[:16], patch_set_digest=self.patch_set_digest[:16],
                    env=self.environment(tier), python=self.python, arguments=self.arguments(tier),
                    rank=self.rank, nodes=self.ladder.nodes, secrets_env=secrets_env,
                ),
                0o755,
            )
            for tier in self.ladder.tiers
        )  # fmt: skip

    @cached_property
    def active_script(self) -> NodeFile:
        """The launch script the server runs."""
        return next(file for file in self.scripts if file.path == self.script_path(self.tier))

    @cached_property
    def supervisor_conf(self) -> NodeFile:
        """supervisord's configuration for the active tier."""
        return NodeFile(self.paths.supervisor_conf, self._rendered("supervisord.conf.j2"), 0o600)

    @cached_property
    def systemd_files(self) -> tuple[NodeFile, ...]:
        """The active tier's systemd unit, the rotation of its logs, and what the unit awaits the server by."""
        unit = self.data.unit
        return (
            NodeFile(f"/etc/systemd/system/{unit}.service", self._rendered("sglang-server.service.j2")),
            NodeFile(f"/etc/logrotate.d/{unit}", self._rendered("logrotate.j2")),
            NodeFile(self.paths.await_server, self._rendered("await_server.py.j2")),
        )

    def manager_files(self, manager: str) -> tuple[NodeFile, ...]:
        """What `systemd` or `supervisor` is configured by."""
        return self.systemd_files if manager == "systemd" else (self.supervisor_conf,)

    @property
    def service_files(self) -> tuple[NodeFile, ...]:
        """What either supervisor is configured by; which one a node has is seen on it."""
        return (self.supervisor_conf, *self.systemd_files)

    @cached_property
    def system_files(self) -> tuple[NodeFile, ...]:
        """What keeps the declared settings of the host over a reboot."""
        found = files(self.system, self.paths.root, self.data.unit)
        return tuple(NodeFile(path, text, mode) for path, (text, mode) in found.items())

    @property
    def _boot_units(self) -> list[str]:
        return [self.settings_unit] if any(f.path.endswith(self.settings_unit) for f in self.system_files) else []

    @property
    def settings_folder(self) -> str:
        """Root's own folder of the host's settings."""
        return kept_in(self.paths.root)

    @property
    def system_manifest(self) -> str:
        """Which settings of the host are ours, and what was there before."""
        return f"{self.settings_folder}/system.json"

    @property
    def settings_unit(self) -> str:
        """The systemd unit that sets at boot what no file can."""
        return settings_unit(self.data.unit)

    @cached_property
    def asked(self) -> dict[str, Any]:
        """What files/node/machine.py is asked: which readings, and of what."""
        rows = {kind: [each.row for each in self.system if each.kind == kind] for kind in {e.kind for e in self.system}}
        packages = [name for row in rows.get("packages", []) for name in (*row.apt, *row.dnf)]
        maybe = [n for row in rows.get("packages", []) if row.where_available for n in (*row.apt, *row.dnf)]
        cuda = self.data.device == "cuda"
        own = f"python{self.data.python}"
        return {
            "readings": [name for name in self.checks.readings if cuda or name not in self.checks.cuda_only],
            "sysctls": _once([*self.checks.sysctls, *(row.name for row in rows.get("sysctl", []))]),
            "module_options": _once([*self.checks.module_options, *(r.name for r in rows.get("module_option", []))]),
            "kernel_files": _once([*self.checks.kernel_files, *(row.path for row in rows.get("kernel_file", []))]),
            "services": _once(
                [*self.checks.services, *(row.unit for row in rows.get("service", [])), *self._boot_units]
            ),
            "packages": _once(packages),
            "packages_maybe": _once(maybe),
            "cuda_home": self.data.cuda_home,
            "pythons": [self.python, self.interpreter, own, f"/usr/bin/{own}"],
            "kernels": self.stack.toolchain.kernels if cuda else [],
            "mounts": {"root": self.paths.root, "shm": SHM, "model": self.model_path},
            "ports": [self.data.cluster.port] if self.data.cluster else [],
        }

    def _rendered(self, template: str) -> str:
        return _templates().get_template(template).render(
            paths=self.paths, tier=self.tier, script=self.script_path(self.tier), log=self.log,
            deadline_s=self.deadline_s(self.tier), path=self.environment(self.tier)["PATH"], python=self.python,
            await_server=self.paths.await_server, address=self.address, port=self.data.port,
        )  # fmt: skip

    @cached_property
    def cuda_stub_source(self) -> NodeFile | None:
        """The source of the libcuda stand-in, on a node without a GPU."""
        if self.data.device != "cpu":
            return None
        text = (REPOSITORY / "files" / "node" / "libcuda_stub.c").read_text(encoding="utf-8")
        return NodeFile(self.paths.cuda_stub_source, text)

    @property
    def runtime_proofs(self) -> list[dict[str, Any]]:
        """What must be true of the stack, as proofs for files/node/prove.py."""
        truths = [{"id": t.id, "code": t.code, "expect": t.expect} for t in self.stack.must_be_true]
        code = installed_proof(self.stack.engine, self.flags, shown(flags_path(self.stack)))
        return [*truths, _proof("engine-arguments", code)]  # which reads sources, and imports nothing

    @cached_property
    def patch_proofs(self) -> list[dict[str, Any]]:
        """What the series promises, as proofs for files/node/prove.py: each patch's probe and assumptions, the settings
        of this ladder, and the probes of patches that this stack's versions should no longer need.
        """
        if self.data.patches == "none" or self.stack.sources_only:
            return []
        proofs = [_proof(patch.id, _probe(patch.probe)) for patch in self.patches]
        for patch in self.patches:
            proofs += [_proof(f"{patch.id}: {assumed.text}", assumed.code) for assumed in patch.assumptions]
        proofs += [_proof(setting.id, _probe(setting.probe)) for setting in self.settings]
        return proofs + [
            _proof(f"{patch.id} is fixed upstream", _probe(patch.fixed_probe or patch.probe))
            for patch in self.uncovered
        ]

    @property
    def config_proofs(self) -> list[dict[str, Any]]:
        """That the venv's transformers reads the model's config, as a proof for files/node/prove.py. A config's own
        code is run only where the ladder has the server run it too. None of a stack that cannot be imported.
        """
        if self.stack.sources_only:
            return []
        how = {
            "trust_remote_code": bool(self.ladder.merged_args(self.tier).get("trust-remote-code")),
            "local_files_only": True,
        }
        code = (
            "from transformers import AutoConfig\n"
            f"print(AutoConfig.from_pretrained({self.model_path!r}, **{how!r}).model_type)\n"
        )
        return [{"id": "config.json", "code": code, "expect": self.ladder.model_type}]

    @cached_property
    def model_token(self) -> str | None:
        """The hub's token, read now from this machine. Raises InputErrors where it is not there."""
        model = self.data.model
        return _secret("model.token", model.token) if isinstance(model, HubModel) and model.token else None

    @cached_property
    def index_login(self) -> tuple[str, str] | None:
        """User and password for the index, read now from this machine. Raises InputErrors where they are not there."""
        source = self.data.index_credentials
        if source is None:
            return None
        user, colon, password = _secret("index_credentials", source).partition(":")
        if not (user and colon and password):
            raise InputErrors([InputError(Place("secrets"), "index_credentials", "does not hold USER:PASSWORD")])
        return user, password

    @cached_property
    def stack_wheels(self) -> Gathered:
        """What this machine's wheelhouse has of the stack's lock; read when it is first asked for."""
        return self._gathered(self.lock)

    @cached_property
    def tools_wheels(self) -> Gathered:
        """The same of the tools' lock."""
        return self._gathered(self.tools_lock)

    @property
    def wheelhouse(self) -> Path:
        """The folder of wheels on this machine."""
        return REPOSITORY / Path(self.data.wheelhouse or "").expanduser()

    def _gathered(self, lock: Lock) -> Gathered:
        return read_wheelhouse(self.wheelhouse, lock, self.stack, self.data.python)

    @property
    def proof_env(self) -> dict[str, str]:
        """Environment of proofs: what importing the engine needs, the toolkit, and the ladder's compiler flags."""
        home = {"CUDA_HOME": self.data.cuda_home} if self.data.cuda_home else {}
        return {**self.model_env, **home, **self.compiler_flags}

    @cached_property
    def runtime_stamp(self) -> str:
        """What a verified runtime is recorded under."""
        adopt = [self.data.adopt.interpreter] if self.data.adopt else []
        return digest([self.lock.sha256, self.data.python, self.data.device, self.runtime_proofs, *adopt])

    @cached_property
    def patches_stamp(self) -> str:
        """What a probed patch set is recorded under."""
        return digest([self.lock.sha256, self.data.python, self.patch_set_digest, self.patch_proofs])

    @cached_property
    def tiny_model(self) -> dict[str, Any] | None:
        """The generator's input for a tiny model, also the manifest it leaves; None for a model folder."""
        model = self.data.model
        return model.model_dump(exclude={"kind"}) if isinstance(model, TinyModel) else None


def build_spec(
    host: str, data: Mapping[str, Any], catalogue: Catalogue, sources: Sources, members: tuple[Member, ...] = ()
) -> NodeSpec:
    """The desired state of a host from its merged inventory data; `members`: the hosts of its cluster, by rank.

    Raises InputErrors (naming file, line and key) before anything is asked of the host.
    """
    values = read_host_data(data, sources)

    def wrong(key: str, problem: str, hint: str = "") -> InputErrors:
        return InputErrors([InputError(sources.place(key), key, problem, hint=hint)])

    def pick(key: str, name: str, among: Mapping[str, Any], without: str) -> Any:
        if name not in among:
            raise wrong(key, f'{without} "{name}"', nearest(name, among))
        return among[name]

    stack: Stack = pick("stack", values.stack, catalogue.stacks, "there is no stack")
    among = catalogue.ladders[stack.name]
    ladder: Ladder = pick("ladder", values.ladder, among, f"stack {stack.name} has no ladder")
    tiers = {tier.name: tier for tier in ladder.tiers}
    tier: Tier = pick("tier", values.tier, tiers, f"ladder {values.ladder} has no tier")
    pick("profile", values.profile, values.profiles, "there is no profile")
    if values.gate != "off":
        pick("gate", values.gate, {"off": None, **tiers}, f"ladder {values.ladder} has no tier")
        if values.smoke == "never" or "smoke" not in values.stages:
            raise wrong("gate", "a gate judges the benchmark, which this run leaves out", "leave out `gate`")
    if f"{kept_in('')}/".startswith(f"{values.root}/") or f"{values.root}/".startswith(f"{kept_in('')}/"):
        raise wrong("root", f"is where root keeps the settings of hosts ({kept_in('')}): set another")
    if values.adopt and (values.interpreter or values.python_download):
        raise wrong("adopt", "names the interpreter, as `interpreter` or `python_download` does: leave that out")
    if values.python not in stack.pythons:
        hint = f"{stack.name} is locked for Python " + ", ".join(stack.pythons)
        raise wrong("python", f'Python "{values.python}" has no lock', hint)
    if values.cluster is None and ladder.nodes > 1:
        hint = 'set `cluster = {"group": …}`: the inventory group of those hosts, in the order of their ranks'
        raise wrong("ladder", f"ladder {values.ladder} is served by {ladder.nodes} hosts together", hint)
    if values.cluster is not None and len(members) != ladder.nodes:
        names = ", ".join(member.name for member in members) or "none"
        problem = f'group "{values.cluster.group}" has {len(members)} hosts ({names}); the ladder has {ladder.nodes}'
        raise wrong("cluster", problem)
    if members and host not in {member.name for member in members}:
        raise wrong("cluster", f'group "{values.cluster.group if values.cluster else ""}" does not hold {host} itself')
    if stack.sources_only and values.serve:
        raise wrong("serve", f"stack {stack.name} has sources alone, which serve nothing", "set `serve = False`")
    _check_machine(values, ladder, catalogue, wrong)
    _check_index(values, wrong)
    lock = read_lock(lock_path(stack, values.python))
    wanted = values.patches == "series"
    patches = catalogue.patches_for(lock.versions) if wanted else ()
    uncovered = catalogue.uncovered_for(lock.versions) if wanted else ()
    if values.adopt:
        _check_adopt(values.adopt, stack.name, lock, {patch.distribution for patch in patches}, wrong)
    there = {patch.id for patch in (*patches, *uncovered)}
    lacking = [name for name in tier.needs.patches if name not in there]
    if lacking:
        problem = f"tier {tier.name} needs {', '.join(lacking)}, which this node does not get"
        hint = (
            "leave `patches` at series, and the patch active" if not wanted else "make the patch active in series.yaml"
        )
        raise InputErrors([InputError(sources.place("patches" if not wanted else "tier"), "tier", problem, hint=hint)])
    if set(values.secrets) & set(SECRET_ARGS) and not there.issuperset(KEYS_PATCHES):
        problem = f"API keys need the patches {' and '.join(KEYS_PATCHES)}: without them the engine tells its keys"
        raise wrong("secrets", problem)
    spec = NodeSpec(
        host=host,
        data=values,
        stack=stack,
        ladder=ladder,
        tier=tier,
        lock=lock,
        tools_lock=read_lock(TOOLS_LOCK),
        patches=patches,
        flags=catalogue.flags[stack.name],
        signatures=catalogue.signatures.of(stack.engine_pin),
        acceptance=catalogue.acceptance,
        checks=catalogue.checks,
        system=declared(catalogue.system, values.system),
        uncovered=uncovered,
        series=catalogue.patches,
        settings=tuple(
            setting
            for setting in catalogue.settings
            if values.ladder in setting.ladders and setting.covers(lock.versions.get(setting.distribution))
        ),
        members=members,
    )
    found = spec.standing(tier)
    if found.status == "blocked" and not values.allow_blocked and "service" in values.stages:
        hint = "to try it all the same: --data allow_blocked=true; to have it tried again, change what it failed on"
        raise wrong("tier", f"tier {tier.name} is blocked: {found.why}", hint)
    return spec


def _check_adopt(adopt: Adopted, stack: str, lock: Lock, patched: set[str], wrong: Callable[..., InputErrors]) -> None:
    """Raises InputErrors where `versions` names what cannot come from the interpreter."""
    for name in adopt.versions:
        if name not in lock.versions:
            raise wrong("adopt", f'versions: "{name}" is not a distribution of stack {stack}')
        if name in patched and not adopt.patch_in_place:
            problem = f"versions: {name} carries patches, so it comes into the venv"
            raise wrong("adopt", problem, "leave it out of `versions`, or set `patch_in_place`")


def _check_index(values: HostData, wrong: Callable[..., InputErrors]) -> None:
    """Raises InputErrors where what is installed would come from two places."""
    if values.index_credentials and not values.index:
        raise wrong("index_credentials", "are given, and no `index` to show them to")
    if values.wheelhouse and values.index:
        raise wrong("wheelhouse", "and `index` are both set: a node is installed from one of them")
    if values.wheelhouse and values.python_download:
        raise wrong("python_download", "asks the network, which a node with a `wheelhouse` does not")


def _check_machine(values: HostData, ladder: Ladder, catalogue: Catalogue, wrong: Callable[..., InputErrors]) -> None:
    """Raises InputErrors where the expected GPUs, the host's settings or the ignored checks cannot be meant so."""
    gpu, here = values.gpu, ladder.tp // ladder.nodes
    if values.device == "cuda":
        if gpu is None:
            raise wrong("gpu", "is missing", 'say what the node must have: {"count": 8, "name": …, …}')
        if gpu.compute_capability != ladder.compute_capability:
            problem = f"is {gpu.compute_capability}, and ladder {values.ladder} is for {ladder.compute_capability}"
            raise wrong("gpu", f"compute_capability {problem}")
        if gpu.count < here:
            raise wrong("gpu", f"count is {gpu.count}, and ladder {values.ladder} needs {here} on each host")
        if gpu.slots and (len(gpu.slots) != gpu.count or len(set(gpu.slots)) != gpu.count):
            raise wrong("gpu", f"slots names {len(set(gpu.slots))}, and count is {gpu.count}")
    for name, value in values.system.items():
        if name not in catalogue.system:
            raise wrong("system", f'there is no setting "{name}"', nearest(name, catalogue.system))
        row = catalogue.system[name]
        if value is not True:
            why = value_problem(row, value)
            if why:
                raise wrong("system", f"{name}: {why}; found {value!r}")
        elif row.value is None and row.kind not in VALUELESS:
            raise wrong("system", f'{name}: needs a value of your own, such as {{"{name}": 450}}')
    ids = {check.id for check in catalogue.checks.checks}
    for name in values.ignored_checks:
        if name not in ids:
            raise wrong("ignored_checks", f'there is no check "{name}"', nearest(name, ids))


def mode_text(mode: int) -> str:
    """Permission bits as people write them: 0755."""
    return f"{mode:04o}"


def file_value(sha256: str, mode: int) -> str:
    """A file's content and mode, as NodeSpec.declared has them."""
    return f"{sha256[:16]} {mode_text(mode)}"


def _file_keys(files: Iterable[NodeFile]) -> dict[str, str]:
    return {f"file {file.path}": file_value(file.sha256, file.mode) for file in files}


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _secret(name: str, source: str) -> str:
    kind, _, where = source.partition(":")
    place, key = Place("secrets"), name
    if kind == "env":
        value = os.environ.get(where, "")
        problem = f"the variable {where} is not set on this machine, or empty"
    else:
        path = Path(where).expanduser()
        try:
            value = path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InputErrors([InputError(place, key, f"{path} cannot be read: {error.strerror}")]) from None
        problem = f"{path} is empty"
    if not value or "\n" in value:
        raise InputErrors([InputError(place, key, "holds more than one line" if value else problem)])
    return value


def _probe(name: str) -> str:
    return (PATCHES / name).read_text(encoding="utf-8")


def _proof(name: str, code: str) -> dict[str, Any]:
    return {"id": name, "code": code, "expect": None}


@cache  # so that a template is compiled once, and not for every host
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(REPOSITORY / "files" / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 (shell and ini text, not HTML)
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    return environment
