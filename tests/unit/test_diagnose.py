"""catalog/signatures.yaml: every signature on a log excerpt of its own, and what is said of logs it does not know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from gpuwright.diagnose import Signature, diagnose, report
from tests.make import catalogue

CRASHES = Path(__file__).parent / "crashes"
SIGNATURES = catalogue().signatures
ROWS = {row.id: row for row in SIGNATURES.signatures}


def test_there_is_an_excerpt_for_every_signature_and_no_other() -> None:
    assert {path.stem for path in CRASHES.glob("*.log")} == set(ROWS)
    assert len([row for row in ROWS.values() if row.kind == "cause"]) >= 40


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.id)
def test_an_excerpt_is_diagnosed_as_its_own(row: Signature) -> None:
    found = diagnose((CRASHES / f"{row.id}.log").read_text(), SIGNATURES)
    assert found.cause is not None and found.cause.signature.id == row.id
    assert found.verdict == {"cause": "known", "wrapper": "unknown", "echo": "unknown", "notice": "none"}[row.kind]
    assert row.cause and row.remedy and row.source


LOAD_ERROR = """\
[2026-11-30 05:00:01 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/gpuwright/venv/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py", line 3170, in run_scheduler
    import sgl_kernel
ImportError:
[sgl_kernel] CRITICAL: Could not load any common_ops library!

Error details from previous import attempts:
- ImportError: libnuma.so.1: cannot open shared object file: No such file or directory
[2026-11-30 05:00:02] Received sigquit from a child process. It usually means the child failed.
"""


def test_the_deepest_cause_wins_over_what_wraps_it() -> None:
    found = diagnose(LOAD_ERROR, SIGNATURES)
    assert found.cause is not None and found.cause.signature.id == "libnuma-missing"
    assert {match.signature.id for match in found.others} >= {"common-ops-not-loaded", "received-sigquit"}
    said = report(found, "/logs/x.log")
    assert said.startswith("cause: ") and "Install libnuma1" in said and said.endswith("the whole log: /logs/x.log")


UNKNOWN = """\
[2026-11-30 05:00:00 TP0] Load weight begin. avail mem=93.10 GB
[2026-11-30 05:00:01 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/sglang/srt/a.py", line 10, in one
    two()
  File "/venv/lib/python3.12/site-packages/sglang/srt/a.py", line 20, in two
    raise WeightMismatch("tensor x is 3, not 4")
my.own.WeightMismatch: tensor x is 3, not 4

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/sglang/srt/a.py", line 12, in one
    raise RuntimeError("could not load")
RuntimeError: could not load

[2026-11-30 05:00:02] Received sigquit from a child process. It usually means the child failed.
Traceback (most recent call last):
  File "/venv/lib/python3.12/multiprocessing/connection.py", line 399, in _recv
    raise EOFError
EOFError
"""


def test_an_unknown_crash_shows_its_innermost_exception_and_its_last_lines() -> None:
    found = diagnose(UNKNOWN, SIGNATURES)
    assert (found.verdict, found.exception) == ("unknown", "my.own.WeightMismatch: tensor x is 3, not 4")
    said = report(found, "/logs/x.log")
    assert "innermost exception: my.own.WeightMismatch" in said and "the last 17 lines:" in said
    long = "\n".join(f"line {number}" for number in range(100)) + "\n" + UNKNOWN
    assert len(diagnose(long, SIGNATURES).tail) == 30


BROKEN = """\
[2026-11-30 05:00:01 TP3] Scheduler hit an exception: Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/sglang/srt/a.py", line 10, in one
    raise Broken("tensor x")
my.Broken: tensor x

"""
OUT_OF_MEMORY = BROKEN.replace(
    "my.Broken: tensor x", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
)
DECODE = "[2026-11-30 05:01:00 TP0] Decode batch, #running-req: 4, #token: 100, token usage: 0.01, cuda graph: True\n"
FIRED_UP = "[2026-11-30 05:00:00] The server is fired up and ready to roll!\n"


@pytest.mark.parametrize(
    "after",
    [
        "[rank0]:[E1130 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(x)\n",
        "[2026-11-30 05:00:03] Rank 5 scheduler is dead. Please check if there are relevant logs.\n"
        "[2026-11-30 05:00:03] Exit code: -9\n",
        "[2026-11-30 05:00:03] ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000)\n",
    ],
)
def test_what_follows_an_unknown_exception_is_not_its_cause(after: str) -> None:
    found = diagnose(BROKEN + after, SIGNATURES)
    assert (found.verdict, found.exception) == ("unknown", "my.Broken: tensor x")
    assert "also seen: " in report(found, "x.log") and "my.Broken: tensor x" in report(found, "x.log")


def test_a_cause_above_an_unknown_exception_is_its_cause() -> None:
    warning = "host:1:1 [0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)\n"
    found = diagnose(warning + BROKEN, SIGNATURES)
    assert found.verdict == "known" and "innermost exception: my.Broken: tensor x" in report(found, "x.log")


@pytest.mark.parametrize(
    "harmless",
    [
        "[2026-11-30 05:00:00 TP0] Detected errors during sampling! NaN in the logits.\n",
        "[2026-11-30 05:00:00 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)\n",
        "UserWarning: CUDA initialization: Found no NVIDIA driver on your system. Please check that you have\n",
        "[2026-11-30 05:00:00] 401 Client Error: Unauthorized for url: http://127.0.0.1:30000/generate\n",
        "OSError: [Errno 24] Too many open files\n" + DECODE,
        BROKEN.replace("Scheduler hit an exception: ", "a request failed: ") + DECODE,
    ],
)
def test_what_a_server_lives_through_is_no_crash_and_no_cause_of_a_later_one(harmless: str) -> None:
    assert diagnose(FIRED_UP + harmless, SIGNATURES).verdict == "none"
    found = diagnose(FIRED_UP + harmless + OUT_OF_MEMORY, SIGNATURES)
    assert found.cause is not None and found.cause.signature.id == "out-of-memory-at-load"


def test_of_a_log_that_is_not_ours_the_last_start_that_crashed_is_looked_at() -> None:
    begin = "[2026-11-30 05:00:00] server_args=ServerArgs(model_path='x')\n"
    found = diagnose(begin + OUT_OF_MEMORY + begin + BROKEN, SIGNATURES)
    assert (found.verdict, found.exception, found.earlier) == ("unknown", "my.Broken: tensor x", False)
    found = diagnose(begin + OUT_OF_MEMORY + begin + FIRED_UP, SIGNATURES)
    assert found.verdict == "known" and found.earlier
    assert report(found, "x.log").startswith("the last start in this log shows no crash; of the last one that does:")


def start(tier: str) -> str:
    return f"[gpuwright] 2026-11-30T05:00:00Z tier {tier} starts\n"


def test_of_several_starts_the_last_that_crashed_is_looked_at() -> None:
    healthy = "[2026-11-30 05:00:00] The server is fired up and ready to roll!\n"
    found = diagnose(start("one") + LOAD_ERROR + start("one") + UNKNOWN, SIGNATURES)
    assert (found.verdict, found.exception) == ("unknown", "my.own.WeightMismatch: tensor x is 3, not 4")
    found = diagnose(start("one") + UNKNOWN + start("two") + LOAD_ERROR + start("two") + healthy, SIGNATURES)
    assert found.cause is not None and found.cause.signature.id == "libnuma-missing"
    assert found.cause.number == 1 + len(UNKNOWN.splitlines()) + 1 + 8, "lines are counted in the whole log"


def test_what_the_engine_ignores_is_no_cause() -> None:
    line = (
        "[2026-11-30 05:00:00] Ignore import error when loading sglang.srt.models.x: libcuda.so.1: cannot open shared"
    )
    assert diagnose(line + " object file", SIGNATURES).verdict == "none"


def test_a_log_without_a_crash_is_called_so() -> None:
    assert diagnose("[2026-11-30 05:00:00] The server is fired up and ready to roll!\n", SIGNATURES).verdict == "none"
    assert diagnose("", SIGNATURES).verdict == "none"


def test_what_is_known_of_one_engine_is_not_told_of_another() -> None:
    log = (CRASHES / "dynamo-posix-stat.log").read_text()
    for engine, verdict in (("sglang==0.5.9", "known"), ("sglang==0.5.12.post1", "unknown")):
        assert diagnose(log, SIGNATURES.of(engine)).verdict == verdict
    assert len(SIGNATURES.of("sglang==0.5.9").signatures) == len(ROWS)
    line = "[2026-11-30 04:32:32 TP0] Disable piecewise CUDA graph because --disable-piecewise-cuda-graph is set\n"
    assert diagnose(line + FIRED_UP, SIGNATURES).cause is None, "of 0.5.12: as it was asked for"


def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuwright", "diagnose", *arguments],
        cwd=REPOSITORY, input=stdin, capture_output=True, text=True,
    )  # fmt: skip


def test_the_command_diagnoses_any_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOAD_ERROR)
    known, unknown = command(str(path)), command("-", stdin=UNKNOWN)
    assert (known.returncode, unknown.returncode) == (0, 2)
    assert "[libnuma-missing]" in known.stdout and "my.own.WeightMismatch" in unknown.stdout
    answer = json.loads(command(str(path), "--json").stdout)
    assert answer["verdict"] == "known" and answer["cause"]["id"] == "libnuma-missing" and answer["log"] == str(path)
    path.write_text((CRASHES / "dynamo-posix-stat.log").read_text())
    of = [command(str(path), "--stack", name).returncode for name in ("sglang-0.5.9-cu128", "sglang-0.5.12-cu130", "x")]
    assert of == [0, 2, 1]
    absent = command(str(tmp_path / "absent.log"))
    assert absent.returncode == 1 and "cannot be read: No such file or directory" in absent.stderr
