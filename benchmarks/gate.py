"""How often the gate cries wolf, whether it notices a slow tier, and what is lost around bench_serving: in the lab.

usage: .venv/bin/python benchmarks/gate.py [RUNS, default 10]   (after `make lab`; about a minute a run)
Measures tier baseline RUNS + 1 times, with the server started anew before every second run; compares each run with the
one before it (A/A: nothing was changed) and with the first; then measures the tier that is slow on purpose three times
against each of them. Last, one run by profile full. Records go to results/, as those of any deploy.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from gpuwright.catalogue import load_catalogue  # noqa: E402
from gpuwright.compare import Compared, compare  # noqa: E402
from gpuwright.record import RESULTS, Record, read_records  # noqa: E402

PYINFRA = Path(sys.executable).with_name("pyinfra")
RULES = load_catalogue().acceptance.comparison


def pyinfra(deploy: str, *arguments: str) -> None:
    """Run a deploy of the lab; its end is judged by the record it leaves."""
    command = [PYINFRA, "inventory/lab.py", deploy, "-y", *arguments]
    subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measured(*data: str, restart: bool = False) -> Record:
    """One more run."""
    if restart:
        pyinfra("stop.py")
    options = [part for value in ("smoke=always", *data) for part in ("--data", value)]
    before, begin = {record.run for record in read_records(RESULTS)[0]}, time.monotonic()
    pyinfra("deploy.py", *options)
    wall = time.monotonic() - begin
    new = [record for record in read_records(RESULTS)[0] if record.run not in before]
    if not new:
        sys.exit("the deploy left no record: run `make lab`, and see what it says")
    record = new[0]
    figures = {level.concurrency: round(level.median.output_tok_s) for level in record.levels if level.median}
    spent = (
        f"{record.load_seconds:.0f} s in bench_serving, {record.seconds:.0f} on the node, {wall:.0f} the whole deploy"
    )
    print(f"{record.run}: {record.verdict}, {figures}; {spent}", flush=True)
    return record


def told(title: str, found: list[Compared]) -> None:
    """How a set of comparisons ended, over runs and over levels."""
    levels = [level.verdict for each in found for level in each.levels]
    runs = [each.verdict for each in found]
    counted = [", ".join(f"{of.count(word)} {word}" for word in sorted(set(of))) for of in (runs, levels)]
    visible = statistics.median(each.visible for each in found)
    print(f"{title}: {len(runs)} comparisons: {counted[0]}; {len(levels)} levels: {counted[1]}", flush=True)
    print(f"  the least slowdown that shows at every level: {visible:.0%} (median)", flush=True)


def main() -> None:
    """Measure and print."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    same = [measured("tier=baseline", restart=number % 2 == 1) for number in range(runs + 1)]
    slow = [measured("tier=one-at-a-time") for _ in range(3)]
    told("A/A, each against the one before", [compare(a, b, RULES) for a, b in itertools.pairwise(same)])
    told("A/A, each against the first", [compare(same[0], b, RULES) for b in same[1:]])
    told("slow on purpose, each against each", [compare(a, b, RULES) for a in same for b in slow])
    full = measured("tier=baseline", "profile=full")
    outside = 1 - full.load_seconds / full.seconds
    print(f"profile full: {outside:.1%} of the run's {full.seconds:.0f} s were outside bench_serving")
    rejected = [record.run for record in (*same, *slow, full) if record.verdict == "rejected"]
    print(f"rejected: {len(rejected)} of {len(same) + len(slow) + 1} runs {' '.join(rejected)}")


if __name__ == "__main__":
    main()
