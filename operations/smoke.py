"""The smoke benchmark, judged; the only stage that may load the node."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path

from pyinfra import logger
from pyinfra.api.command import FunctionCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State

from gpuwright import REPOSITORY, node
from gpuwright.plan import SMOKE
from gpuwright.results import dump, make_record, table
from gpuwright.spec import NodeFile, NodeSpec
from operations.stage import Commands, converge, revision, run

RESULTS = REPOSITORY / "results"


@operation()
def benchmark(spec: NodeSpec) -> Commands:
    """Benchmark the active tier, once for each spec. Reads the observation; may run files/node/bench.py."""
    yield from converge(
        spec,
        SMOKE,
        "rank 0 answers for the cluster"
        if spec.rank
        else "left out by smoke=never"
        if spec.data.smoke == "never"
        else "this spec has an accepted result",
        lambda state, changes: [FunctionCommand(measure, (spec,), {})],
    )


def measure(state: State, host: Host, spec: NodeSpec) -> bool:
    """Run, judge, record on both sides, print the table. False when the result is rejected."""
    run_id = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{spec.tier.name}-{spec.spec_digest[:8]}"
    if not run(host, node.benchmark(spec, run_id), print_output=True)[0]:
        return False
    fetched, text = run(host, node.read_summary(spec, run_id))
    if not fetched:
        return False
    record = make_record(spec, json.loads(text), run_id, revision())
    name = f"{run_id}.json"
    kept, _ = run(host, node.write_files(spec, [NodeFile(f"{spec.paths.results}/{name}", dump(record))]))
    if not kept:
        return False
    local = RESULTS / spec.host.lstrip("@") / name
    _write_local(local, dump(record))
    for line in table(record).splitlines():
        host.log(line, logger.info)
    host.log(f"  record: {local.relative_to(REPOSITORY)}", logger.info)
    return bool(record["verdict"] == "accepted")


def _write_local(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
