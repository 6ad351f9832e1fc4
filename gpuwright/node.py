"""Commands for a node, as the core builds them: a command line, and what goes in over stdin."""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gpuwright import REPOSITORY
from gpuwright.adopt import bridge, moved, own_lock, record, site_of
from gpuwright.hostdata import HubModel
from gpuwright.patches import Action, Decision, decide
from gpuwright.plan import (
    config_stamp,
    damaged_distributions,
    edited_distributions,
    manager,
    manager_files,
    settings_to_make,
    stale_files,
    stale_wheels,
    system_files,
    to_install,
    wheels_to_send,
)
from gpuwright.smoke import levels, seeds
from gpuwright.spec import NodeFile, NodeSpec
from gpuwright.state import NodeState, SeenInterpreter
from gpuwright.system import Hold, Packages, package_names, stale
from gpuwright.wheelhouse import Wheel

NODE_SCRIPTS = REPOSITORY / "files" / "node"
PARTS = {
    "observe": ("machine.py", "wheels.py"),
    "keep_builds": ("wheels.py",),
    "patch_files": ("unidiff.py",),
    "keep_foreign": ("unidiff.py",),
    "bench": ("raw_facts.py",),
    "take_wheels": ("wheel_files.py",),
    "pull_wheels": ("wheel_files.py",),
}
LOCK_WAIT_S = 900
LOCKED = 75


@dataclass(frozen=True)
class NodeCommand:
    """A shell command; `stdin` is its input; a `streamed` one shows its output while it runs."""

    line: str
    stdin: str = ""
    streamed: bool = False


def script(name: str, request: dict[str, Any]) -> str:
    """The text of a node script with its request set in front, for `python3 -IBu -`."""
    files = ("common.py", *PARTS.get(name, ()), f"{name}.py")
    parts = [(NODE_SCRIPTS / file).read_text(encoding="utf-8") for file in files]
    head = f"import json\nREQUEST = json.loads({json.dumps(json.dumps(request))})\n"
    return "\n".join([head, *parts])


def locked(spec: NodeSpec, line: str) -> str:
    """`line` under the node's lock, so that two deploys never change a node at the same moment.

    `--close`: what the command leaves running (supervisord) must not inherit the lock.
    """
    flock = f"flock --close --wait {LOCK_WAIT_S} --conflict-exit-code {LOCKED} {shlex.quote(spec.paths.mutex)} {line}"
    message = f"another deploy has held {spec.paths.mutex} for {LOCK_WAIT_S} s: wait for it, or see `fuser -v` on it"
    return f"{flock}; rc=$?; if [ $rc -eq {LOCKED} ]; then echo {shlex.quote(message)}; fi; exit $rc"


def run_script(
    name: str, request: dict[str, Any], *, spec: NodeSpec | None = None, streamed: bool = False, python: str = ""
) -> NodeCommand:
    """Run a node script; under the node's lock where `spec` is given. `python`: another command than the system's."""
    python = python or PYTHON
    line = f"{python} 2>&1" if streamed else python
    return NodeCommand(locked(spec, line) if spec else line, script(name, request), streamed)


NO_PYTHON = "there is no python3 on this host, by which everything is observed and done: install it (3.9 or later)"
_WITH_PYTHON = f"command -v python3 >/dev/null 2>&1 || {{ echo '{NO_PYTHON}' >&2; exit 1; }};"
PYTHON = "python3 -IBu -"  # -B: not even compiled modules of the standard library are left behind


def observe(spec: NodeSpec, *, remember: bool = True) -> NodeCommand:
    """One reading of everything the plan needs. Without `remember` nothing is written on the node, not even what a deep
    reading would keep for the next.
    """
    files: list[NodeFile] = [*spec.scripts, *spec.service_files]
    if spec.cuda_stub_source:
        files.append(spec.cuda_stub_source)
    paths = [file.path for file in files] + [spec.paths.lock_copy, spec.paths.cuda_stub]
    paths += [
        spec.paths.bridge(spec.data.python),
        spec.paths.secrets_file,
        spec.paths.secrets_env,
        *(file.path for file in spec.system_files),
    ]
    request = {
        "root": spec.paths.root,
        "venv": spec.paths.venv,
        "tools": spec.paths.tools,
        "address": spec.address,
        "port": spec.data.port,
        "unit": spec.data.unit,
        "python": spec.data.python,
        "interpreter": spec.interpreter,
        "adopt": spec.data.adopt
        and {
            "interpreter": spec.data.adopt.interpreter,
            "patch_in_place": spec.data.adopt.patch_in_place,
            "distributions": sorted(spec.lock.versions),
        },
        "commands": ["bash", "c++", "cc", "flock", "logrotate", "openssl", "sh"],
        "folders": [*spec.paths.folders, spec.settings_folder],
        "system_manifest": spec.system_manifest,
        "files": paths,
        "model": {
            "path": spec.model_path,
            "hash": spec.tiny_model is not None,
            "manifest": spec.paths.model_manifest,
            "tensors": [spec.tier.needs.model_tensor] if spec.tier.needs.model_tensor else [],
        },
        "patched": sorted(
            # A file that no entry is made for in this version is held against its RECORD, as every other one.
            {patch.file for patch in spec.series if patch.covers(spec.lock.versions.get(patch.distribution))}
        ),
        "manifest": spec.paths.manifest,
        "originals": spec.paths.originals,
        "wheels": spec.paths.wheels,
        "deep": spec.data.integrity == "deep",
        "remember": remember,
        "run": {
            "module": "sglang.launch_server",
            "argv": [word for line in spec.arguments(spec.tier) for word in shlex.split(line)],
            "env": spec.environment(spec.tier),
            "names": ["GPUWRIGHT_SCRIPT", "GPUWRIGHT_SUPERVISED", *spec.data.secrets],
        },
        "machine": spec.asked,
        "system_files": [f.path for f in spec.system_files if not f.path.startswith(spec.settings_folder + "/")],
    }
    command = run_script("observe", request)
    return NodeCommand(f"{_WITH_PYTHON} {command.line}", command.stdin)


def make_folders(spec: NodeSpec) -> list[NodeCommand]:
    """Every folder, with its mode, and the file of the node's lock: that one belongs to whom the root belongs to."""
    lines = [f"install -d -m {mode:04o} {shlex.quote(path)}" for path, mode in spec.paths.folders.items()]
    lines.append(f"touch {shlex.quote(spec.paths.mutex)}")
    return [NodeCommand(" && ".join(lines))]


def set_host(spec: NodeSpec, state: NodeState) -> list[NodeCommand]:
    """Make the host's settings as declared, and put back what nobody declares any more."""
    packages = state.readings.get("packages", {"manager": None, "installed": {}, "available": []})
    rows = []
    for each in settings_to_make(spec, state):
        row: dict[str, Any] = {"id": each.id, "kind": each.kind, "target": each.target, "value": each.value}
        if isinstance(each.row, Packages):
            known = [*packages["installed"], *packages["available"]]
            names = package_names(each.row, packages)
            row["manager"] = packages["manager"]
            row["names"] = [name for name in names if not each.row.where_available or name in known]
        if isinstance(each.row, Hold):
            row |= {"prefixes": each.row.prefixes, "but_not": each.row.but_not}
        rows.append(row)
    request = {
        "root": spec.paths.root,
        "manifest": spec.system_manifest,
        "apply": rows,
        "revert": stale(spec.system, state.system_manifest or {}),
        "files": [{"path": f.path, "text": f.text, "mode": f.mode} for f in system_files(spec, state)],
        "remove": stale_files(spec, state),
        "unit": spec.settings_unit if state.systemd else None,
    }
    return [run_script("settings", request, spec=spec, streamed=True)]


def write_files(
    spec: NodeSpec, files: list[NodeFile], remove: list[str] | None = None, only_where: dict[str, str] | None = None
) -> NodeCommand:
    """Put files in place atomically, and remove others; nothing of it unless the files of `only_where` have these
    sha256.
    """
    rows = [{"path": file.path, "text": file.text, "mode": file.mode} for file in files]
    request = {"files": rows, "remove": remove or [], **({"only_where": only_where} if only_where else {})}
    return run_script("write_files", request, spec=spec)


def prepare_wheels(spec: NodeSpec, state: NodeState, copy_from: str | None) -> NodeCommand:
    """Make room for the wheels that are to come, remove those of no lock, and answer what is there in part. Where the
    node is this machine, copy them, too.
    """
    request = {"stale": stale_wheels(spec, state), "copy_from": copy_from, "last": True}
    return _take_wheels(spec, "prepare", wheels_to_send(spec, state), **request)


def settle_wheels(spec: NodeSpec, wheels: Iterable[Wheel], *, last: bool) -> NodeCommand:
    """Give wheels that have come their names, by their hashes; answer what is wrong with the others. `last`: no others
    are to come.
    """
    return _take_wheels(spec, "settle", wheels, last=last)


def _check_wheels(spec: NodeSpec, names: Iterable[str], *, tools: bool = False) -> list[NodeCommand]:
    """Nothing is installed from a wheel that is not the lock's: what is wrong is named, removed, and sent anew by the
    next deploy. Nothing to check on a node that is installed from an index.
    """
    if not spec.data.wheelhouse:
        return []
    there = (spec.tools_wheels if tools else spec.stack_wheels).wheels
    return [_take_wheels(spec, "check", [there[name] for name in names if name in there])]


def _take_wheels(spec: NodeSpec, action: str, wheels: Iterable[Wheel], **more: Any) -> NodeCommand:
    request = {"folder": spec.paths.wheels, "action": action, "wheels": _rows(wheels), **more}
    return run_script("take_wheels", request, spec=spec)


def _rows(wheels: Iterable[Wheel]) -> list[dict[str, Any]]:
    return [{"file": wheel.file, "size": wheel.size, "sha256": wheel.sha256} for wheel in wheels]


def pull_wheels(spec: NodeSpec, wheels: Iterable[Wheel], server: Mapping[str, Any], *, last: bool) -> NodeCommand:
    """Fetch wheels from another node (`server`: address, port, token), and answer which have come."""
    where = {name: server[name] for name in ("address", "port", "token")}
    return run_script("pull_wheels", {"folder": spec.paths.wheels, "wheels": _rows(wheels), "last": last, **where})


def serve_wheels(spec: NodeSpec, address: str, token: str) -> NodeCommand:
    """Have the node hand out its wheels at `address` to who knows the token, for a while; answers port and process."""
    request = {"folder": spec.paths.wheels, "address": address, "token": token, "idle_s": 7200, "limit_s": 86400}
    return run_script("serve_wheels", {"action": "start", **request})


def stop_serving_wheels(server: dict[str, Any]) -> NodeCommand:
    """End what `serve_wheels` has answered."""
    return run_script("serve_wheels", {"action": "stop", **server})


def install_tools(spec: NodeSpec) -> list[NodeCommand]:
    """gpuwright's own venv on the node, from a lock with hashes."""
    tools, lock = shlex.quote(spec.paths.tools), shlex.quote(spec.paths.tools_lock_copy)
    options = "--quiet --disable-pip-version-check --no-input --require-hashes"
    if spec.data.wheelhouse:  # --isolated: pip.conf and PIP_* may name an index, and more folders
        options += f" --isolated --no-index --find-links {shlex.quote(spec.paths.wheels)}"
    pip = f"{_env(spec, _index(spec, 'PIP_INDEX_URL'))} {tools}/bin/python -m pip install {options} -r {lock}"
    login = {"PIP_INDEX_URL": _with_login(spec.data.index, *spec.index_login)} if spec.index_login else {}
    return [
        write_files(spec, [NodeFile(spec.paths.tools_lock_copy, spec.tools_lock.text)]),
        *_check_wheels(spec, spec.tools_lock.versions, tools=True),
        *_ask_index(spec, spec.tools_lock.versions),
        _installing(spec, "sh -c", f"python3 -B -m venv --clear {tools} && {pip} 2>&1", login),
    ]


def _ask_index(spec: NodeSpec, names: Iterable[str]) -> list[NodeCommand]:
    """Whether the declared index lets us in, asked for the first of these distributions."""
    if not spec.data.index:
        return []
    request = {"index": spec.data.index, "name": next(iter(names)), "login": spec.index_login}
    return [run_script("ask_index", request, streamed=True, python=f"{_env(spec, {})} {PYTHON}")]


def _index(spec: NodeSpec, name: str) -> dict[str, str]:
    """The declared index as a variable; not where it would bring a login with it, which no command line may hold."""
    return {name: spec.data.index} if spec.data.index and not spec.index_login else {}


def _with_login(index: str | None, user: str, password: str) -> str:
    scheme, _, rest = (index or "").partition("://")
    return f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{rest}"


def _installing(spec: NodeSpec, shell: str, line: str, login: dict[str, str]) -> NodeCommand:
    """`line` under the node's lock, with the variables of `login`: they come over stdin, so that their values are in
    the environment of what is run and nowhere else.
    """
    names = "".join(f"IFS= read -r {name} && export {name} && " for name in login)
    hint = "check `index` and `index_credentials` in group_data" if login else "check `index` in group_data"
    failed = f" || {{ echo {shlex.quote(f'installing from {spec.data.index} failed: {hint}')}; exit 1; }}"
    whole = f"{names}{{ {line}; }}{failed}" if spec.data.index else line
    stdin = "".join(f"{value}\n" for value in login.values())
    return NodeCommand(locked(spec, f"{shell} {shlex.quote(whole)}"), stdin, True)


def _uv(spec: NodeSpec, *arguments: str) -> str:
    downloads = "automatic" if spec.data.python_download else "never"
    environment = {"UV_PYTHON_DOWNLOADS": downloads, "UV_NO_PROGRESS": "1", **_index(spec, "UV_DEFAULT_INDEX")}
    if spec.index_login:
        environment["UV_DEFAULT_INDEX"] = f"{INDEX}={spec.data.index}"
    only = ["--offline", "--no-config"] if spec.data.wheelhouse else []  # uv.toml may name an index, and more folders
    return f"{_env(spec, environment)} " + shlex.join([f"{spec.paths.tools}/bin/uv", *only, *arguments])


INDEX = "gpuwright"  # by this name uv looks for the login of the declared index


def _env(spec: NodeSpec, fixed: dict[str, str]) -> str:
    return shlex.join(["env", *(f"{name}={value}" for name, value in (fixed | spec.data.installer_env).items())])


def create_venv(spec: NodeSpec, interpreter: SeenInterpreter | None) -> list[NodeCommand]:
    """An empty venv of the declared Python: of `interpreter`, or of one that uv downloads."""
    python = interpreter.path if interpreter else spec.data.python
    line = _uv(spec, "venv", "--clear", "--python", python, spec.paths.venv)
    return [NodeCommand(locked(spec, f"{line} 2>&1"), "", True)]


def adopt(spec: NodeSpec, state: NodeState) -> list[NodeCommand]:
    """Have the venv see the interpreter that is adopted, and record what of it; or no longer. What was proved goes, and
    what was compiled: an accepted change has no digest of its own.
    """
    wanted = [file for file in (bridge(spec, state), record(spec, state)) if file]
    there = {spec.paths.bridge(spec.data.python), spec.paths.adopted} - {file.path for file in wanted}
    stamps = [f"{spec.paths.run}/{stage}.json" for stage in ("runtime", "patches", "config")]
    clear = prune_caches(spec, [spec.runtime_digest[:16]]) if moved(spec, state) else []
    return [write_files(spec, [], stamps), *clear, write_files(spec, wanted, sorted(there))]


def sync_venv(spec: NodeSpec, state: NodeState) -> list[NodeCommand]:
    """Sync the venv to the lock, hashes required: missing distributions come, others go, damaged ones come anew."""
    reinstall, edited = damaged_distributions(spec, state), edited_distributions(spec, state)
    # Nothing that was proved of the venv is proved of what it becomes; so the stamp goes first.
    stamp = f"{spec.paths.run}/runtime.json"
    lock = write_files(spec, [NodeFile(spec.paths.lock_copy, own_lock(spec, state).text)], [stamp])
    clean = [_forget(spec, edited)] if edited else []
    anew = to_install(spec, state)
    before = [*_check_wheels(spec, anew), *_ask_index(spec, anew), *clean] if anew else []
    return [lock, *before, _sync(spec, reinstall), _keep_builds(spec, anew)]


def _forget(spec: NodeSpec, names: list[str]) -> NodeCommand:
    """Have uv fetch these anew: an installed file that was edited in place is a hard link of the one in uv's cache, and
    would come back as it is.
    """
    return NodeCommand(locked(spec, f"{_uv(spec, 'cache', 'clean', '--quiet', *names)} 2>&1"), "", True)


def _keep_builds(spec: NodeSpec, anew: list[str]) -> NodeCommand:
    """Remember what was installed anew."""
    return run_script("keep_builds", {"venv": spec.paths.venv, "path": spec.paths.builds, "anew": anew}, spec=spec)


def _sync(spec: NodeSpec, reinstall: list[str]) -> NodeCommand:
    again = [part for name in reinstall for part in ("--reinstall-package", name)]
    source = ["--no-index", "--find-links", spec.paths.wheels] if spec.data.wheelhouse else []
    sync = _uv(
        spec, "pip", "sync", "--python", spec.python, "--require-hashes", "--only-binary", ":all:",
        "--allow-empty-requirements", *source, *again,
        spec.paths.lock_copy,
    )  # fmt: skip
    names = [f"UV_INDEX_{INDEX.upper()}_{part}" for part in ("USERNAME", "PASSWORD")]
    login = dict(zip(names, spec.index_login or (), strict=False))
    # uv's line for each distribution repeats the plan; its downloads and its errors are what to look at.
    return _installing(spec, "bash -o pipefail -c", f"{sync} 2>&1 | {{ grep -v '^ [+-] ' || true; }}", login)


def build_cuda_stub(spec: NodeSpec) -> list[NodeCommand]:
    """Compile the libcuda stand-in; its source is put in place last, as the sign that it was built from it."""
    assert spec.cuda_stub_source is not None
    lib = shlex.quote(spec.paths.cuda_stub)
    build = f"cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o {lib}.new -x c - && mv {lib}.new {lib}"
    return [
        NodeCommand(locked(spec, f"sh -c {shlex.quote(build)}"), spec.cuda_stub_source.text),
        write_files(spec, [spec.cuda_stub_source]),
    ]


def verify_runtime(spec: NodeSpec) -> list[NodeCommand]:
    """What must be true of the stack, run in the venv."""
    return _prove(spec, "runtime", spec.runtime_proofs, spec.runtime_stamp)


def read_config(spec: NodeSpec, state: NodeState) -> list[NodeCommand]:
    """Read the model's config with the venv's transformers."""
    return _prove(spec, "config", spec.config_proofs, config_stamp(spec, state))


def probe_patches(spec: NodeSpec) -> list[NodeCommand]:
    """What the series promises, run in the venv."""
    return _prove(spec, "patches", spec.patch_proofs, spec.patches_stamp)


def _prove(spec: NodeSpec, stage: str, proofs: list[dict[str, Any]], value: str) -> list[NodeCommand]:
    request = {
        "python": [spec.python, *spec.python_options],
        "env": spec.proof_env,
        "proofs": proofs,
        "stamp": f"{spec.paths.run}/{stage}.json",
        "value": value,
    }
    return [run_script("prove", request, spec=spec, streamed=True)]


def apply_patches(spec: NodeSpec, state: NodeState) -> list[NodeCommand]:
    """Bring every file of the series to its target: keep copies, install distributions anew, patch, put back."""
    decisions = decide(spec, state)
    replaced = [each for each in decisions if each.action is Action.REPLACE]
    anew = sorted({each.file.distribution for each in decisions if each.action in (Action.REPLACE, Action.REINSTALL)})
    commands = [keep_foreign(spec, state, replaced)] if replaced else []
    if replaced:
        commands.append(_forget(spec, sorted({each.file.distribution for each in replaced})))
    if anew:
        commands += [*_check_wheels(spec, anew), _sync(spec, anew), _keep_builds(spec, anew)]
    affected = [
        each
        for each in decisions
        if each.action is not Action.NOTHING or (each.file.chain and each.file.distribution in anew)
    ]
    request = {
        **_patch_request(spec, state, affected),
        "manifest": spec.paths.manifest,
        "stamp": f"{spec.paths.run}/patches.json",
    }
    return [*commands, run_script("patch_files", request, spec=spec, streamed=True)]


def keep_foreign(spec: NodeSpec, state: NodeState, decisions: list[Decision]) -> NodeCommand:
    """Keep a copy of foreign files and show what was changed in them."""
    request = {**_patch_request(spec, state, decisions), "foreign": spec.paths.foreign}
    return run_script("keep_foreign", request, spec=spec, streamed=True)


def _patch_request(spec: NodeSpec, state: NodeState, decisions: list[Decision]) -> dict[str, Any]:
    return {
        "originals": spec.paths.originals,
        "files": [
            {"site": site_of(spec, state, each.file.distribution), **each.file.request(each.action)}
            for each in decisions
        ],
    }


def provide_model(spec: NodeSpec) -> list[NodeCommand]:
    """Make the lab's model, or fetch the hub's. A fetch may take hours, so it does not hold the node's lock: it has one
    of its own in the model's folder.
    """
    model = spec.data.model
    if isinstance(model, HubModel):
        request = {
            "path": model.path,
            "repo": model.repo,
            "revision": model.revision,
            "endpoint": model.endpoint,
            "token": spec.model_token,
            "system_certs": spec.data.installer_env.get("UV_SYSTEM_CERTS", "") not in ("", "0", "false"),
            "manifest": spec.paths.model_manifest,
        }
        given = spec.data.installer_env.items()
        proxies = {k: v for k, v in given if k.lower().endswith("_proxy") or k.startswith("SSL_CERT_")}
        fixed = {"PATH": "/usr/bin:/bin", "HOME": spec.paths.run, "LANG": "C.UTF-8"}
        environment = [f"{name}={value}" for name, value in (fixed | proxies).items()]
        python = shlex.join(["env", "-i", *environment, spec.python, *spec.python_options, "-I", "-u", "-"])
        return [run_script("fetch_model", request, streamed=True, python=python)]
    return [run_script("tiny_model", {"path": spec.model_path, "model": spec.tiny_model}, spec=spec)]


ANY_SERVER = "*"


def run_server(
    spec: NodeSpec,
    actions: list[str],
    runs_on: dict[str, str],
    manager: str,
    attempt: str = "",
    saw: str | None = ANY_SERVER,
) -> NodeCommand:
    """Stop, start or await the server, or go back to the one before it.

    `attempt` names the failure it may leave. `saw` is when the server that was observed was started (None: there was
    none): where it is another by now, nothing is done to it.
    """
    shown = spec.ladder.shown_by(spec.tier)
    request = {
        "root": spec.paths.root,
        "actions": actions,
        "attempt": attempt,
        "manager": manager,
        "unit": spec.data.unit,
        "address": spec.address,
        "port": spec.data.port,
        "script": spec.active_script.path,
        "log": spec.log,
        "tier": spec.tier.name,
        "runs_on": runs_on,
        "conf": spec.paths.supervisor_conf,
        "files": [
            spec.active_script.path,
            *(file.path for file in spec.manager_files(manager)),
            spec.paths.secrets_file,
            spec.paths.secrets_env,
        ],
        "deadline_s": spec.deadline_s(spec.tier),
        "seen": [] if spec.rank else shown.seen,  # SGLang logs most of them on its first rank alone
        "never": shown.never,
        "saw": saw,
        "phases": [[phase.pattern, phase.words] for phase in spec.signatures.phases],
    }
    return run_script("server", request, spec=spec, streamed=True)


def read_failure(spec: NodeSpec) -> NodeCommand:
    """Fetch what `run_server` left of a start that failed: what was said of it, and its part of the log."""
    return run_script("failure", {"root": spec.paths.root, "most_bytes": 4 << 20})


def prune_caches(spec: NodeSpec, names: list[str]) -> list[NodeCommand]:
    """Remove JIT caches of runtime digests that are no longer declared."""
    folders = " ".join(shlex.quote(f"{spec.paths.cache}/{name}") for name in names)
    return [NodeCommand(locked(spec, f"rm -rf -- {folders}"))]


def record_state(spec: NodeSpec, found: NodeState, revision: str, at: str) -> list[NodeCommand]:
    """Write state.json: what was deployed, when, from which revision of this repository; before it, what each stage of
    this run declared, thing by thing, which root alone may read. Not where another deploy has come in between: what is
    on record is what is there.
    """
    declared = spec.declared(manager(spec, found))
    deployed = {**(found.deployed or {}), **{s: d for s, d in declared.items() if s in spec.data.stages}}
    state = {"spec_digest": spec.spec_digest, "runtime_digest": spec.runtime_digest, "tier": spec.tier.name}
    text = json.dumps({**state, "patch_set_digest": spec.patch_set_digest, "revision": revision, "at": at}, indent=1)
    kept = NodeFile(spec.paths.deployed, json.dumps(deployed, indent=1, sort_keys=True) + "\n", 0o600)
    files = [kept, NodeFile(f"{spec.paths.root}/state.json", text + "\n")]
    return [write_files(spec, files, only_where=_deployed_files(spec, found))]


def _deployed_files(spec: NodeSpec, state: NodeState) -> dict[str, str]:
    """The sha256 of what the stages of this run have put in place, by path."""
    found: dict[str, str] = {}
    if "runtime" in spec.stages:
        found[spec.paths.lock_copy] = own_lock(spec, state).sha256
    if "patches" in spec.stages and state.venv:
        patched = [each.file for each in decide(spec, state) if each.file.chain]
        found |= {f"{site_of(spec, state, file.distribution)}/{file.path}": file.target for file in patched}
    if "launchers" in spec.stages:
        found |= {file.path: file.sha256 for file in (*spec.scripts, *spec.secret_files)}
    return found | {file.path: file.sha256 for file in manager_files(spec, state)}


def benchmark(spec: NodeSpec, run_id: str, runs_on: dict[str, str]) -> NodeCommand:
    """Measure the running server; raw files and a summary stay on the node under results/raw/<run_id>.

    `runs_on`: what the observed server was started on (plan.runs_on); another is not measured.
    """
    request = {
        "tier": spec.tier.name,
        "runs_on": runs_on,
        "gpus": spec.gpus_here,
        "device": spec.data.device,
        "address": spec.address,
        "port": spec.data.port,
        "model": spec.model_path,
        "root": spec.paths.root,
        "run_id": run_id,
        "timeout_s": spec.profile.timeout_s,
        "probe": spec.acceptance.probe.model_dump(),
        "levels": [
            {
                "concurrency": level.concurrency,
                "about": level.about,
                "prompts": level.prompts,
                "sockets": max(level.concurrency, level.warmups),
                "repeats": [
                    {
                        "number": number,
                        "seed": seed,
                        "discarded": number == 0,
                        "argv": level.argv(spec.address, spec.data.port, spec.model_path, seed),
                    }
                    for number, seed in enumerate(seeds(spec.profile, level))
                ],
            }
            for level in levels(spec.profile)
        ],
    }
    environment = [f"{name}={value}" for name, value in spec.environment(spec.tier).items()]
    python = shlex.join(["env", "-i", *environment, spec.python, *spec.python_options, "-I", "-u", "-"])
    return run_script("bench", request, spec=spec, streamed=True, python=python)


def read_files(paths: list[str]) -> NodeCommand:
    """Fetch text files, as one JSON: {path: text}."""
    return run_script("read_files", {"paths": paths})


def result_paths(spec: NodeSpec, names: Iterable[str]) -> list[str]:
    """Where records lie on the node, by their files' names."""
    return [f"{spec.paths.results}/{posixpath.basename(name)}" for name in names]


def summary_path(spec: NodeSpec, run_id: str) -> str:
    """Where `benchmark` left its summary."""
    return f"{spec.paths.results}/raw/{run_id}/summary.json"
