"""The drift check as a command: pyinfra's inventories and connections, and a verdict for every host come what may."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from io import TextIOWrapper
from pathlib import Path

import gevent
from gevent.lock import BoundedSemaphore
from pyinfra import logger, state  # type: ignore[attr-defined]
from pyinfra.api.config import Config
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.state import State
from pyinfra.context import ctx_config, ctx_host, ctx_inventory, ctx_state
from pyinfra_cli.exceptions import CliError
from pyinfra_cli.inventory import make_inventory
from pyinfra_cli.util import parse_cli_arg

from gpuwright import drift
from gpuwright.cli import Parser
from gpuwright.drift import Report, Verdict
from gpuwright.errors import GpuwrightError, nearest
from gpuwright.spec import NodeSpec
from operations.drift import check_host, failed, now
from operations.passwords import ask_nobody
from operations.stage import desired_states


def main(arguments: list[str]) -> int:
    """Check the hosts and write what was asked for. Returns 0 clean, 2 drift, or 1: an error, as is wrong usage."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # cron's encoding may be ASCII, and a node says anything
    _quiet(options.verbose)
    ask_nobody()
    begin, at = time.monotonic(), now()
    try:
        hosts = _hosts(options)
    except (GpuwrightError, PyinfraError, CliError) as error:
        print(f"check.py: error: {getattr(error, 'message', error)}", file=sys.stderr)
        return 1
    verdicts = _checked(hosts, options)
    seconds = round(time.monotonic() - begin, 3)
    report = Report(at=at, inventory=options.inventory, seconds=seconds, hosts=verdicts)
    if options.quiet:
        for each in (each for each in verdicts if each.status == "error"):
            print(f"{each.host}: {drift.lines(each)[0]}", file=sys.stderr)
    else:
        print(_text(report, options), file=sys.stderr if str(options.json) == "-" else sys.stdout)
    return report.exit_code if _write(report, options) else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="check.py",
        description="Say where nodes have left their declared state. Nothing is written on them, not even for a while.",
        epilog="Exit code 0: every host is as declared; 2: one has drifted; 1: one could not be judged, no host "
        "matched, or the input is bad. docs/drift.md has a systemd timer and a cron line.",
    )
    parser.add_argument("inventory", metavar="INVENTORY", help="such as inventory/gpu.py")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="HOSTS",
        help="a group, a host or a pattern, or several with commas; one that matches nothing is an error",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON; - for stdout")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write a test case for each host and stage")
    parser.add_argument(
        "--prom", type=Path, metavar="FILE", help="write metrics for node_exporter's textfile collector"
    )
    parser.add_argument("--diff", action="store_true", help="show what was changed in our own text files")
    parser.add_argument(
        "--data", action="append", default=[], metavar="KEY=VALUE",
        help="as pyinfra's: wins over group_data, such as integrity=deep or stages=patches,service",
    )  # fmt: skip
    parser.add_argument("--parallel", type=int, metavar="N", help="hosts at once (default: 20 for each core)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors alone")
    parser.add_argument("-v", "--verbose", action="store_true", help="print pyinfra's own messages, too")
    return parser


def _quiet(verbose: bool) -> None:
    logger.addHandler(logging.StreamHandler(sys.stderr) if verbose else logging.NullHandler())
    logger.setLevel(logging.INFO if verbose else logging.CRITICAL)
    logger.propagate = False
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    logging.getLogger("paramiko").propagate = False


def _hosts(options: argparse.Namespace) -> list[Host]:
    """The hosts of the inventory that the options name. Raises GpuwrightError when a pattern names none."""
    if not Path(options.inventory).is_file():
        raise GpuwrightError(f"there is no inventory {options.inventory}: it is a file such as inventory/gpu.py")
    data = {}
    for each in options.data:
        key, equals, value = each.partition("=")
        if not equals:
            raise GpuwrightError(f"--data {each}: expected KEY=VALUE")
        data[key] = parse_cli_arg(value)
    found, config = State(check_for_changes=False), Config()  # type: ignore[no-untyped-call]
    found.cwd = str(Path.cwd())
    config.PARALLEL = options.parallel
    ctx_state.set(found)  # type: ignore[no-untyped-call]
    ctx_config.set(config)  # type: ignore[no-untyped-call]
    inventory = make_inventory(options.inventory, cwd=found.cwd, override_data=data)
    ctx_inventory.set(inventory)  # type: ignore[no-untyped-call]
    hosts = _matching(inventory, [part for each in options.limit for part in each.split(",") if part])
    if not hosts:
        raise GpuwrightError(f"{options.inventory} names no host")
    found.init(inventory, config, initial_limit=hosts)
    return hosts


def _matching(inventory: Inventory, patterns: Iterable[str]) -> list[Host]:
    everyone = sorted(inventory, key=lambda host: host.name)
    chosen: set[str] = set()
    patterns = list(patterns)
    for pattern in patterns:
        names = {
            host.name for host in everyone if pattern in ("all", host.name, *host.groups) or fnmatch(host.name, pattern)
        }
        if not names:
            there = nearest(pattern, {*inventory.groups, "all", *(host.name for host in everyone)})
            raise GpuwrightError(f'--limit "{pattern}" matches no host of this inventory; {there}')
        chosen |= names
    return [host for host in everyone if not patterns or host.name in chosen]


def _checked(hosts: list[Host], options: argparse.Namespace) -> list[Verdict]:
    """A verdict for each host: each connects, answers and is judged on its own, so that none waits for another."""
    try:
        specs = desired_states(hosts, serving=False, secrets=True)
    except GpuwrightError as error:
        text = f"bad input, and no host was touched:\n{error}"
        print(f"check.py: error: {text}", file=sys.stderr)
        return [failed(host.name, text) for host in hosts]
    turns = BoundedSemaphore(state.config.PARALLEL)  # a pool would have those that wait for a turn started by its own
    waiting = {gevent.spawn(_check, host, specs[host.name], options.diff, turns): host for host in hosts}
    verdicts = {host.name: failed(host.name, "the check was interrupted before it answered") for host in hosts}
    # In a greenlet of its own: what a handler of Python's raises may end up in any host's, or in none.
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, gevent.killall, list(waiting), block=False)
    for done in gevent.iwait(list(waiting)):
        host = waiting[done]
        if not isinstance(done.value, gevent.GreenletExit):
            verdicts[host.name] = done.value or failed(host.name, f"{type(done.exception).__name__}: {done.exception}")
    return [verdicts[host.name] for host in hosts]


def _check(host: Host, spec: NodeSpec, diffs: bool, turns: BoundedSemaphore) -> Verdict:
    with turns, ctx_host.use(host):
        begin = time.monotonic()
        try:
            host.connect(show_errors=False, raise_exceptions=True)
        except ConnectError as error:
            return failed(host.name, f"it could not be reached: {error}")
        except Exception as error:  # whatever a key file, a proxy command or a resolver comes up with
            return failed(host.name, f"it could not be reached: {type(error).__name__}: {error}")
        try:
            verdict = check_host(host, spec, diffs=diffs)
        finally:
            host.disconnect()
        return verdict.model_copy(update={"seconds": round(time.monotonic() - begin, 3)})


def _text(report: Report, options: argparse.Namespace) -> str:
    width = max(len(each.host) for each in report.hosts)
    rows = []
    for each in report.hosts:
        first, *rest = drift.lines(each)
        took = f"  ({each.seconds:.1f} s)" if each.seconds is not None else ""
        rows.append(f"{each.host:<{width}}  {first}{took}")
        rows += [f"{'':<{width}}{row}" for row in rest]
    counts = {
        status: [each.host for each in report.hosts if each.status == status] for status in ("clean", "drift", "error")
    }
    said = ", ".join(f"{len(names)} {status}" for status, names in counts.items() if names)
    rows.append(f"{len(report.hosts)} host{'s' if report.hosts[1:] else ''}: {said}; {report.seconds:.1f} s")
    if counts["drift"]:
        words = [word for name in counts["drift"] for word in ("--limit", name)]
        words += [word for each in options.data for word in ("--data", each)]
        rows.append(f"to bring them back: pyinfra {shlex.join([options.inventory, 'deploy.py', '-y', *words])}")
    return "\n".join(rows)


def _write(report: Report, options: argparse.Namespace) -> bool:
    """Write what was asked for; whether all of it could be written."""
    reports: dict[Path, Callable[[Report], str]] = {}
    if options.json and str(options.json) != "-":
        reports[options.json] = drift.as_json
    if options.junit or options.prom:
        from gpuwright import drift_reports  # only here: what a check without them needs not load

        reports |= {options.junit: drift_reports.junit} if options.junit else {}
        reports |= {options.prom: drift_reports.prometheus} if options.prom else {}
    if str(options.json) == "-":
        print(drift.as_json(report), end="")
    written = True
    for path, form in reports.items():
        try:
            _replace(path, form(report))
        except OSError as error:
            print(f"check.py: error: {path} could not be written: {error.strerror}", file=sys.stderr)
            written = False
    return written


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader never sees half a report. A device or a pipe is written to."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.chmod(0o644)  # node_exporter, and who reads a report, is another user
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
