"""The border to pyinfra, in one place: desired states, the kept observation, and how a core command is run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyinfra import host, logger, state  # type: ignore[attr-defined]
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.command import FunctionCommand, PyinfraCommand, StringCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.connectors.ssh import connector_data_meta
from pyinfra.connectors.util import CommandOutput

from facts.observation import Observation
from gpuwright import REPOSITORY
from gpuwright.catalogue import load_catalogue
from gpuwright.errors import GpuwrightError, InputError, InputErrors
from gpuwright.hostdata import Sources
from gpuwright.node import NodeCommand, observe
from gpuwright.plan import Change, Plan, plan
from gpuwright.preflight import shell_failure
from gpuwright.spec import Member, NodeSpec, build_spec
from gpuwright.state import NodeState
from operations.passwords import ask_nobody
from operations.stop_run import StopRun

if sys.stdin is None or not sys.stdin.isatty():
    ask_nobody()

_specs: dict[str, NodeSpec] = {}
_observations: dict[str, tuple[bool, NodeState]] = {}
_plans: dict[str, tuple[NodeSpec, NodeState, Plan]] = {}


def desired_state(*, serving: bool = True, secrets: bool = True) -> NodeSpec:
    """This host's NodeSpec. The first call reads the catalogue and validates every host of the run.

    Raises StopRun naming file, line and key, before a command was sent to any host.
    """
    if not _specs:
        try:
            desired_states(state.inventory.get_active_hosts(), serving=serving, secrets=secrets)
        except GpuwrightError as error:
            raise StopRun(f"bad input, and no host was touched:\n{error}") from None
    return _specs[host.name]


def desired_states(hosts: Iterable[Host], *, serving: bool, secrets: bool) -> dict[str, NodeSpec]:
    """The NodeSpecs of these hosts, which are those of the run; with `secrets`, also their secrets on this machine are
    read, and where they are to be `serving`, each must come with the whole of its cluster.

    Raises GpuwrightError with every problem that was found.
    """
    catalogue = load_catalogue()
    errors: list[InputError] = []
    specs: dict[str, NodeSpec] = {}
    for each in hosts:
        try:
            spec = build_spec(each.name, _own_data(each), catalogue, _sources(each), _members(each))
            specs[each.name] = spec
            _ = (spec.secret_files, spec.model_token, spec.index_login) if secrets else None
            if serving and "service" in spec.stages:
                _require_whole_cluster(spec)
        except InputErrors as error:
            errors += error.errors
    if errors:
        raise InputErrors(list({str(error): error for error in errors}.values()))
    _specs.update(specs)
    return specs


def specs() -> list[NodeSpec]:
    """The NodeSpec of every host of the run that could be reached."""
    return list(_specs.values())


def _members(each: Host) -> tuple[Member, ...]:
    """The hosts of a host's cluster, ranked in the order in which the inventory lists their group."""
    cluster = _own_data(each).get("cluster")
    if not isinstance(cluster, dict) or "group" not in cluster:
        return ()
    hosts = state.inventory.get_group(cluster["group"]) if cluster["group"] in state.inventory.groups else []
    return tuple(Member(host.name, address_of(host)) for host in hosts)


def _require_whole_cluster(spec: NodeSpec) -> None:
    """Raises GpuwrightError where --limit would start only some hosts of a cluster: each waits for the others."""
    outside = [m.name for m in spec.members if not state.is_host_in_limit(state.inventory.get_host(m.name))]
    if outside and spec.data.cluster is not None:
        raise GpuwrightError(
            f"{spec.host} serves together with {', '.join(outside)}, which --limit leaves out: name the whole group "
            f'"{spec.data.cluster.group}", or leave out the service stage (--data stages=preflight,system,runtime,…)'
        )


def address_of(each: Host) -> str:
    """Where other hosts reach this one."""
    data = each.data.dict()  # type: ignore[no-untyped-call]
    fallback = "127.0.0.1" if each.name.startswith("@local") else each.name
    return str(data.get("cluster_address") or data.get("ssh_hostname") or fallback)


def _own_data(each: Host) -> dict[str, Any]:
    """A host's data without what belongs to pyinfra and its connectors."""
    data: dict[str, Any] = each.data.dict()  # type: ignore[no-untyped-call]
    return {k: v for k, v in data.items() if k not in connector_data_meta and not k.startswith("_")}


def _sources(each: Host) -> Sources:
    """Where a host's data may come from, in the order in which pyinfra lets it win: inventory, last group first."""
    inventory = [Path(argument) for argument in sys.argv[1:] if argument.endswith(".py") and "inventory" in argument]
    groups = [REPOSITORY / "group_data" / f"{name}.py" for name in (*reversed(each.groups), "all")]
    files = [path for path in (*inventory, *groups) if path.is_file()]
    override: Mapping[str, Any] = state.inventory.get_override_data()  # type: ignore[no-untyped-call]
    return Sources(override or {}, files)


def observed(spec: NodeSpec, *, remember: bool = True) -> NodeState | None:
    """The node's state: read once for all stages, and again after a command of ours has run or execution begins.
    Without `remember`, and in a dry run, it leaves nothing on the node, not even of a deep reading.

    None when the host did not answer, in which case pyinfra has marked it as failed.
    """
    kept = _observations.get(host.name)
    if kept is None or kept[0] != state.is_executing:
        command = observe(spec, remember=remember and state.is_executing)
        patience = spec.data.observe_timeout_s
        try:
            found = host.get_fact(
                Observation, line=command.line, _stdin=command.stdin, _timeout=patience, _sudo=_sudo(host)
            )
        except PyinfraError:  # no host remains, which pyinfra says itself once this operation has failed
            if not state.is_executing:
                raise
            return None
        if found is None:
            return None
        kept = _observations[host.name] = (state.is_executing, found)
    return kept[1]


def _sudo(host: Host) -> bool:
    """Whether the host's data asks for sudo: an operation that has it for its own commands is observed without."""
    return bool(pop_global_arguments(state, host, {})[0]["_sudo"])


def _planned(spec: NodeSpec, found: NodeState) -> Plan:
    """The plan of one observation, made once: each of a deploy's operations asks for its own step of it."""
    kept = _plans.get(host.name)
    if kept is None or kept[0] is not spec or kept[1] is not found:
        kept = _plans[host.name] = (spec, found, plan(spec, found))
    return kept[2]


def observe_peer(spec: NodeSpec) -> NodeState | None:
    """The state of another host of the run, read now; None when it does not answer."""
    command, patience = observe(spec, remember=state.is_executing), spec.data.observe_timeout_s
    peer = state.inventory.get_host(spec.host)
    try:
        found: NodeState | None = peer.get_fact(Observation, line=command.line, _stdin=command.stdin, _timeout=patience)
    except Exception:
        return None  # whatever keeps a peer from answering fails the peer itself, in its own turn
    return found


def seen_already(name: str) -> NodeState | None:
    """What is known of another host without asking it: its last observation, where nothing was done since."""
    kept = _observations.get(name)
    return kept[1] if kept and kept[0] == state.is_executing else None


SHOWN = 8  # changes of one step: a first installation has 175

Commands = Generator[PyinfraCommand, None, None]
Build = Callable[[NodeState, list[Change]], Sequence[NodeCommand | PyinfraCommand]]


def converge(
    spec: NodeSpec,
    step: str,
    settled: str,
    build: Build,
    refuse: Callable[[NodeState], Sequence[NodeCommand]] = lambda state: (),
    also: Sequence[Change] = (),
    in_part: bool = False,
) -> Commands:
    """The body of every operation: plan, say what differs, yield the commands that `build` makes of it.

    `settled` is the step's state in words, for the case that nothing is to do. A blocked change stops this host,
    after the commands of `refuse` have kept and shown what stopped it. `also`: changes that other hosts ask for. With
    `in_part` the changes that are not blocked are made first.
    """
    found = observed(spec)
    if found is None:
        yield StringCommand(shell_failure("the host could not be observed: see the message above"))
        return
    changes = [*_planned(spec, found).of(step), *also]
    if not changes:
        host.noop(settled)
        return
    blocked = [change for change in changes if change.blocked]
    shown = changes if len(changes) <= SHOWN + 1 else changes[:SHOWN]
    for change in shown:
        for number, line in enumerate(str(change).splitlines()):
            host.log(f"    {'! ' if change.blocked else '~ '}{line}" if not number else f"      {line}", logger.info)
    if shown is not changes:
        host.log(f"    ~ and {len(changes) - SHOWN} more", logger.info)
    possible = [change for change in changes if not change.blocked] if in_part or not blocked else []
    if blocked and not possible:
        yield from map(to_pyinfra, refuse(found))
        yield StringCommand(shell_failure(f"{step}: stopped; nothing of this step was changed"))
        return
    try:
        for command in build(found, possible):
            yield command if isinstance(command, PyinfraCommand) else to_pyinfra(command)
        if blocked:
            yield StringCommand(shell_failure(f"{step}: stopped; the rest of this step was done"))
    finally:
        if state.is_executing:
            _observations.pop(host.name, None)


def to_pyinfra(command: NodeCommand) -> PyinfraCommand:
    """A core command as pyinfra's: with stdin, and shown line by line while it runs where it is a long one."""
    if command.streamed:
        return FunctionCommand(stream, (command,), {})
    return StringCommand(command.line, **({"_stdin": command.stdin} if command.stdin else {}))  # type: ignore[arg-type]


def stream(state: State, host: Host, command: NodeCommand) -> bool:
    """Run a command and print its output as it comes; pyinfra's own commands hide theirs until they fail."""
    return run(host, command, print_output=True)[0]


def run(host: Host, command: NodeCommand, *, print_output: bool = False) -> tuple[bool, str]:
    """Run a core command now, with the operation's own sudo and environment: (succeeded, its stdout)."""
    succeeded, output = ask(host, command, print_output=print_output)
    return succeeded, output.stdout


def ask(
    host: Host, command: NodeCommand, *, print_output: bool = False, timeout: int | None = None
) -> tuple[bool, CommandOutput]:
    """Run a core command now: (succeeded, what it said). Outside of an operation, sudo and the like are the host's.

    Raises TimeoutError after `timeout` s; the command itself may run on.
    """
    given: Any = host.current_op_global_arguments
    if given is None:
        given = pop_global_arguments(state, host, {})[0]
    arguments = {key: given[key] for key in CONNECTOR_ARGUMENT_KEYS if key in given}
    if command.stdin:
        arguments["_stdin"] = command.stdin
    if timeout:
        arguments["_timeout"] = timeout
    return host.run_shell_command(StringCommand(command.line), print_output=print_output, **arguments)


def revision() -> str:
    """This repository's commit, with `+` when the checkout holds uncommitted changes; "unknown" outside git."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        commit, dirty = (
            subprocess.run(c, cwd=REPOSITORY, capture_output=True, text=True, check=True) for c in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "")
