"""What a rollout from a wheelhouse takes of this machine's line: bytes sent for 1, 2 and 4 nodes, with and without
peers.

usage, as root: .venv/bin/python benchmarks/wheels.py [--repeats N]
Container nodes (tests/fleet) of stack sources-only without a way out of their network, which have nothing yet, and
`deploy.py` with stages system and runtime. Bytes are those that this machine sent into the nodes' bridge, by the
interface's own counter: all of SSH and TCP is in it, and what nodes send each other is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from gpuwright.wheelhouse import gather  # noqa: E402
from tests.fleet import nodes  # noqa: E402
from tests.fleet.conftest import Control, by_name  # noqa: E402
from tests.fleet.nodes import Fleet, Node  # noqa: E402
from tests.make import catalogue  # noqa: E402

FLEET = Fleet(REPOSITORY / ".lab" / "bench-wheels", "gwbench1", "10.213.82")
COUNTS = (1, 2, 4)


def sent() -> int:
    return int(Path(f"/sys/class/net/{FLEET.bridge}/statistics/tx_bytes").read_text())


def measure(fleet: list[Node], wheelhouse: Path, folder: Path, *, peers: bool) -> tuple[int, float]:
    """Bytes and seconds of a first deploy."""
    for node in fleet:
        node.run("rm -rf /opt/gpuwright ~/.cache/uv")
    control = Control(folder, by_name(fleet, wheelhouse=str(wheelhouse), wheels_from_peers=peers))
    before, begun = sent(), time.monotonic()
    run = control.deploy("--data", "stages=system,runtime", timeout=600)
    assert run.code == 0, run.said
    return sent() - before, time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    if reason := nodes.reason_to_skip() or FLEET.refusal():
        print(f"wheels.py: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheelhouse = folder / "wheelhouse"
        print(gather(catalogue().stacks["sources-only"], "3.11", wheelhouse, prune=False))
        with nodes.running(FLEET, [f"node-{number}" for number in range(1, max(COUNTS) + 1)]) as fleet:
            for node in fleet:
                node.run("ip route del default")
            for peers in (True, False):
                for count in COUNTS:
                    runs = [measure(fleet[:count], wheelhouse, folder, peers=peers) for _ in range(repeats)]
                    megabytes, seconds = ([each[i] for each in runs] for i in (0, 1))
                    row = {
                        "nodes": count, "peers": peers, "mb": [round(each / 1e6, 2) for each in megabytes],
                        "seconds": [round(each, 1) for each in seconds],
                        "median_mb": round(statistics.median(megabytes) / 1e6, 1),
                        "median_s": round(statistics.median(seconds), 1),
                    }  # fmt: skip
                    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
