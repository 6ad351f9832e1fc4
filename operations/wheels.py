"""Wheels on their way to nodes without an index: each leaves this machine once, and hosts hand it on to each other."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gevent
import paramiko
from gevent.lock import BoundedSemaphore
from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.connectors.local import LocalConnector

from gpuwright import node
from gpuwright.plan import wheels_to_send
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState, last_line
from gpuwright.wheelhouse import MB, Wheel, number_of
from operations.stage import address_of, ask, run, seen_already, specs

BATCH = 512 * MB  # what is verified, and then handed on, at a time
LINE_EVERY_S = 10
PULLS = 3  # from one host at once
POLL_S = 0.2
BROKEN = (OSError, EOFError, paramiko.SSHException)  # as a connection may end


class Rollout:
    """What the hosts of this run know of each other. Wheels are known by their sha256, hosts by their names.

    `holders`: who has a wheel, `claims`: who is being sent it from this machine, `servers`: who hands its wheels out
    (None: it cannot), `useless`: of which pairs (source, host) nothing more is expected.
    """

    def __init__(self) -> None:
        self.holders: dict[str, set[str]] = {}
        self.claims: dict[str, str] = {}
        self.servers: dict[str, dict[str, Any] | None] = {}
        self.pulls: dict[str, int] = {}
        self.useless: set[tuple[str, str]] = set()
        self.at_work = 0
        self.starting = BoundedSemaphore(1)


_rollout = Rollout()


def bring(state: State, host: Host, spec: NodeSpec, found: NodeState) -> bool:
    """Have the wheels that `found` lacks on this host, verified. False, with the reason said, where that fails."""
    wanted = {wheel.sha256: wheel for wheel in wheels_to_send(spec, found)}
    local = isinstance(host.connector, LocalConnector)
    sizes = _answer(host, node.prepare_wheels(spec, found, str(spec.wheelhouse) if local else None))
    if sizes is None or not _all_right(host, sizes["wrong"]):
        return False
    if local or not wanted:
        return True
    _note_holders()
    parts: dict[str, int] = sizes["parts"]
    with _at_work(state):
        while wanted:
            pulled = _from_peer(state, host, spec, wanted) if spec.data.wheels_from_peers else False
            if pulled:
                continue
            mine = _claim(host, spec, wanted)
            if not mine:
                gevent.sleep(POLL_S)  # all that is left is on its way to another host
                continue
            try:
                if not _send(host, spec, mine, parts, last=len(mine) == len(wanted)):
                    return False
            finally:
                _rollout.claims = {wheel: name for wheel, name in _rollout.claims.items() if name != host.name}
            _have(spec, mine, wanted)
    return True


@contextlib.contextmanager
def _at_work(state: State) -> Iterator[None]:
    """The last one who is at work here ends the servers."""
    _rollout.at_work += 1
    try:
        yield
    finally:
        _rollout.at_work -= 1
        if not _rollout.at_work:
            servers, _rollout.servers = _rollout.servers, {}
            for name, server in servers.items():
                if server:
                    with contextlib.suppress(Exception):  # one that cannot be reached now ends by itself
                        run(state.inventory.get_host(name), node.stop_serving_wheels(server))


def _answer(host: Host, command: node.NodeCommand) -> dict[str, Any] | None:
    """What a script answers; None, with what it said, where it failed."""
    try:
        succeeded, output = ask(host, command)
        if succeeded:
            answer: dict[str, Any] = json.loads(last_line(output.stdout))
            return answer
        said = output.stdout or output.stderr
    except (*BROKEN, ValueError) as error:
        said = str(error) or type(error).__name__
    for line in said.splitlines():
        host.log(f"    {line}", logger.error)
    return None


def _all_right(host: Host, wrong: dict[str, str]) -> bool:
    for file, problem in wrong.items():
        host.log(f"    {file} came wrong, and was not taken: {problem}", logger.error)
    if wrong:
        host.log("    -> deploy again; if it comes wrong again, run make wheelhouse anew", logger.error)
    return not wrong


def _note_holders() -> None:
    """What other hosts of the run had before: those that were deployed to earlier."""
    for peer in specs():
        seen = seen_already(peer.host)
        if seen is None or not seen.wheels or not peer.data.wheelhouse or not peer.data.wheels_from_peers:
            continue
        for gathered in (peer.stack_wheels, peer.tools_wheels):
            for wheel in gathered.wheels.values():
                if seen.wheels.get(wheel.file) == wheel.size:
                    _rollout.holders.setdefault(wheel.sha256, set()).add(peer.host)


def _have(spec: NodeSpec, wheels: Iterable[Wheel], wanted: dict[str, Wheel]) -> None:
    for wheel in wheels:
        wanted.pop(wheel.sha256, None)
        if spec.data.wheels_from_peers:
            _rollout.holders.setdefault(wheel.sha256, set()).add(spec.host)


def _batch(wheels: Iterable[Wheel]) -> list[Wheel]:
    """As many of them as make a batch, and at least one."""
    found: list[Wheel] = []
    for wheel in wheels:
        if found and sum(each.size for each in found) + wheel.size > BATCH:
            break
        found.append(wheel)
    return found


def _claim(host: Host, spec: NodeSpec, wanted: dict[str, Wheel]) -> list[Wheel]:
    """The next wheels that this host is sent from this machine; not those that another one will hand on."""
    alone = not spec.data.wheels_from_peers
    mine = _batch(wheel for wheel in wanted.values() if alone or wheel.sha256 not in _rollout.claims)
    for wheel in mine:
        _rollout.claims.setdefault(wheel.sha256, host.name)
    return mine


def _send(host: Host, spec: NodeSpec, wheels: list[Wheel], parts: dict[str, int], *, last: bool) -> bool:
    """Send wheels from this machine, each from where it was left, and have them verified."""
    client = getattr(host.connector, "client", None)
    if client is None:
        host.log("    wheels are sent over SSH, and this host is reached by another connector", logger.error)
        return False
    begun = told = time.monotonic()
    total, sent = sum(wheel.size - parts.get(wheel.file, 0) for wheel in wheels), 0
    try:
        sftp = client.open_sftp()
        try:
            for wheel in wheels:
                part = f"{spec.paths.wheels}/parts/{wheel.file}.part"
                for count in _upload(sftp, spec.wheelhouse / wheel.file, part):
                    sent += count
                    if time.monotonic() > told + LINE_EVERY_S:
                        told = time.monotonic()
                        host.log(f"    {sent / MB:.0f} of {total / MB:.0f} MB sent", logger.info)
        finally:
            sftp.close()
    except BROKEN as error:
        said = str(error) or type(error).__name__
        host.log(f"    sending wheels over SFTP failed, and the next deploy goes on from there: {said}", logger.error)
        return False
    answer = _answer(host, node.settle_wheels(spec, wheels, last=last))
    seconds = time.monotonic() - begun
    host.log(f"    {number_of(wheels)}, {sent / MB:.1f} MB from this machine in {seconds:.1f} s", logger.info)
    return answer is not None and _all_right(host, answer["wrong"])


def _upload(sftp: paramiko.SFTPClient, path: Path, part: str) -> Iterator[int]:
    """Write what `part` does not hold of a file yet; yields the bytes of each block.

    At its own place, not at the end: where two deploys send one wheel, both write the same.
    """
    with sftp.open(part, "ab"):
        pass
    with path.open("rb") as source, sftp.open(part, "r+b") as target:
        begin = target.stat().st_size or 0
        source.seek(begin)
        target.seek(begin)
        target.set_pipelined(True)
        for block in iter(lambda: source.read(1 << 18), b""):
            target.write(block)
            yield len(block)


def _from_peer(state: State, host: Host, spec: NodeSpec, wanted: dict[str, Wheel]) -> bool:
    """Fetch a batch of what is wanted from a host that has it; whether anything came of it, be it an insight."""
    offers: dict[str, list[Wheel]] = {}
    for wheel in wanted.values():
        for name in _rollout.holders.get(wheel.sha256, set()) - {host.name}:
            if (name, host.name) not in _rollout.useless and _rollout.servers.get(name, {}) is not None:
                offers.setdefault(name, []).append(wheel)
    if not offers:
        return False
    source = min(offers, key=lambda name: (_rollout.pulls.get(name, 0), -len(offers[name]), name))
    if _rollout.pulls.get(source, 0) >= PULLS:
        gevent.sleep(POLL_S)
        return True
    _rollout.pulls[source] = _rollout.pulls.get(source, 0) + 1
    try:
        wheels, begun = _batch(offers[source]), time.monotonic()
        server = _server_of(state, source)
        if server is None:
            return True
        last = len(wheels) == len(wanted)
        answer = _answer(host, node.pull_wheels(spec, wheels, server, last=last))
    finally:
        _rollout.pulls[source] -= 1
    answer = answer or {"came": [], "problem": "see above"}
    came = [wheel for wheel in wheels if wheel.file in answer["came"]]
    _have(spec, came, wanted)
    if came:
        size, seconds = sum(wheel.size for wheel in came) / MB, time.monotonic() - begun
        host.log(f"    {number_of(came)}, {size:.1f} MB from {source} in {seconds:.1f} s", logger.info)
    if answer["problem"]:
        _rollout.useless.add((source, host.name))
        host.log(f"    not from {source}, but from elsewhere: {answer['problem']}", logger.warning)
    return True


def _server_of(state: State, name: str) -> dict[str, Any] | None:
    """Where a host hands out its wheels, started when it is first asked for; None, said once, where it cannot."""
    with _rollout.starting:
        if name not in _rollout.servers:
            source, token = state.inventory.get_host(name), secrets.token_hex(24)
            spec, address = next(each for each in specs() if each.host == name), address_of(source)
            answer = _answer(source, node.serve_wheels(spec, address, token)) or {"problem": "see above"}
            if "problem" in answer:
                source.log(f"    hands no wheels to other hosts: {answer['problem']}", logger.warning)
            _rollout.servers[name] = None if "problem" in answer else answer | {"address": address, "token": token}
        return _rollout.servers[name]
