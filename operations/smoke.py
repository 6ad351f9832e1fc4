"""The smoke benchmark, judged and compared; the only stage that may load the node."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from pyinfra import host as current  # type: ignore[attr-defined]
from pyinfra import logger
from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State

from gpuwright import compare, gates, node
from gpuwright.adopt import versions
from gpuwright.errors import GpuwrightError
from gpuwright.plan import GATE, SMOKE
from gpuwright.preflight import shell_failure
from gpuwright.record import RESULTS, dump, folder_name, make_record, read_records, table
from gpuwright.spec import NodeFile, NodeSpec
from gpuwright.state import NodeState, last_line
from gpuwright.yamlfile import shown
from operations.stage import Commands, converge, observed, revision, run


@operation()
def benchmark(spec: NodeSpec) -> Commands:
    """Benchmark the active tier, once for each spec and profile. Reads the observation; may run files/node/bench.py."""
    yield from converge(
        spec,
        SMOKE,
        "rank 0 answers for the cluster"
        if spec.rank
        else "left out by smoke=never"
        if spec.data.smoke == "never"
        else f"this spec has an accepted result of what profile {spec.data.profile} asks",
        lambda state, changes: [FunctionCommand(measure, (spec, state), {})],
    )


@operation()
def gate(spec: NodeSpec) -> Commands:
    """Hold the active tier's result against the tier that `gate` names. Reads the observation and results/; may fetch
    records from the node. Fails the host where a level is slower beyond noise, or nothing can be compared.
    """
    if spec.data.gate == "off" or spec.rank:
        current.noop("no gate is asked for" if spec.data.gate == "off" else "rank 0 answers for the cluster")
        return
    found = observed(spec)
    here = {path.name for path in (RESULTS / folder_name(spec.host)).glob("*.json")}
    absent = [each.file for each in found.results if each.file not in here] if found else []
    if absent:
        yield FunctionCommand(fetch, (spec, absent), {})
    verdict = gates.tier_gate(spec, read_records(RESULTS, spec.host)[0])
    for line in verdict.text.splitlines():
        current.log(line, logger.info)
    if verdict.passed:
        current.noop(f"not slower than tier {spec.data.gate}")
    else:
        yield StringCommand(shell_failure(f"{GATE}: {verdict.why}"))


def measure(state: State, host: Host, spec: NodeSpec, observed: NodeState) -> bool:
    """Run, judge, record on both sides, print the tables. False when the result is rejected."""
    run_id = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{spec.tier.name}-{spec.spec_digest[:8]}"
    started_on = (observed.server.record or {}).get("runs_on", {})
    if not run(host, node.benchmark(spec, run_id, started_on), print_output=True)[0]:
        return False
    path = node.summary_path(spec, run_id)
    fetched, text = run(host, node.read_files([path]))
    if not fetched:
        _say(host, f"the run's summary could not be read from {spec.paths.results}/raw/{run_id}: deploy again")
        return False
    summary = json.loads(json.loads(last_line(text))[path])
    packages = versions(spec, observed)
    record = make_record(spec, summary, run_id, revision(), packages)
    kept, _ = run(host, node.write_files(spec, [NodeFile(f"{spec.paths.results}/{run_id}.json", dump(record))]))
    if not kept:
        _say(
            host,
            f"the record could not be written to {spec.paths.results}, so it is not kept here either: deploy again",
        )
        return False
    append(record.path, dump(record))
    _say(host, table(record))
    _say(host, f"  record: {shown(record.path)}")
    if spec.tier != spec.reference and spec.data.gate != spec.reference.name:  # which is said by the gate
        reference = compare.reference_for(record, read_records(RESULTS, spec.host)[0], spec.reference.name)
        if reference:
            _say(host, compare.report(compare.compare(reference, record, spec.acceptance.comparison)))
        else:
            _say(host, f"  no run of tier {spec.reference.name} is on record to compare with")
    return record.verdict == "accepted"


def fetch(state: State, host: Host, spec: NodeSpec, names: Iterable[str]) -> bool:
    """Bring records that lie on the node alone to this machine."""
    succeeded, text = run(host, node.read_files(node.result_paths(spec, names)))
    if not succeeded:
        return False
    for path, content in json.loads(last_line(text)).items():
        append(RESULTS / folder_name(host.name) / Path(path).name, content)
    return True


def append(path: Path, text: str) -> None:
    """Add a record: whole, or not at all, and never in the place of another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.new")
    beside.write_text(text, encoding="utf-8")
    try:
        os.link(beside, path)  # which, unlike a rename, replaces nothing
    except FileExistsError:
        if path.read_text(encoding="utf-8") != text:
            raise GpuwrightError(f"{path} is there, and holds another record: records are never replaced") from None
    finally:
        beside.unlink()


def _say(host: Host, text: str) -> None:
    for line in text.splitlines():
        host.log(line, logger.info)
