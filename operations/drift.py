"""The drift check's visit: a deploy's plan of every host, and nothing of it carried out."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timezone

from pyinfra import host as current  # type: ignore[attr-defined]
from pyinfra import logger, state  # type: ignore[attr-defined]
from pyinfra.api.host import Host

from gpuwright import drift, node
from gpuwright.drift import Report, Verdict
from gpuwright.errors import GpuwrightError
from gpuwright.spec import NodeSpec
from gpuwright.state import last_line, parse_observation
from operations.stage import ask, desired_state
from operations.visit import visit

CODES = {"clean": 0, "drift": 2, "error": 1}

_verdicts: list[Verdict] = []


def visit_host() -> None:
    """Check this host. When all have been, the run ends with the exit code of gpuwright.drift.Report."""
    visit(_check, _print_json)


def _check() -> int:
    verdict = check_host(current, desired_state(serving=False), diffs=bool(state.config.DIFF))
    _verdicts.append(verdict)
    for line in drift.lines(verdict):
        current.log(f"  {line}", logger.info)
    return CODES[verdict.status]


def _print_json(unreached: list[str]) -> None:
    if "--json" in sys.argv:
        lost = [Verdict(host=name, status="error", error="it could not be reached") for name in unreached]
        hosts = sorted([*_verdicts, *lost], key=lambda each: each.host)
        seconds = max((each.seconds or 0.0 for each in hosts), default=0.0)
        inventory = next((each for each in sys.argv[1:] if each.endswith(".py") and "inventory" in each), "")
        print(drift.as_json(Report(at=BEGAN, inventory=inventory, seconds=seconds, hosts=hosts)), end="")


def now() -> str:
    """UTC time, as ISO 8601."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


BEGAN = now()


def check_host(host: Host, spec: NodeSpec, *, diffs: bool) -> Verdict:
    """The verdict on a connected host, whatever it answers. One command; with `diffs` a second one, where text files of
    ours differ.
    """
    begin = time.monotonic()
    try:
        verdict = _judged(host, spec, diffs)
    except Exception as error:  # one host's trouble is its own verdict, and not the end of the others'
        verdict = failed(spec.host, _reason(error, spec))
    return verdict.model_copy(update={"seconds": round(time.monotonic() - begin, 3)})


def failed(name: str, why: str) -> Verdict:
    """The verdict on a host that could not be judged."""
    return Verdict(host=name, status="error", error=why)


def _judged(host: Host, spec: NodeSpec, diffs: bool) -> Verdict:
    patience = spec.data.observe_timeout_s
    succeeded, output = ask(host, node.observe(spec, remember=False), timeout=patience)
    if not succeeded:
        return failed(spec.host, _refusal(output.stderr or output.stdout))
    found = parse_observation(output.stdout)
    verdict = drift.judge(spec, found)
    files = drift.own_files(spec, found) if diffs else []
    if not files:
        return verdict
    try:
        succeeded, output = ask(host, node.read_files([file.path for file in files]), timeout=patience)
        texts = json.loads(last_line(output.stdout)) if succeeded else {}
    except Exception:  # what is known of the host is known without the texts, too
        return verdict
    secrets = [*spec.secret_values, *([spec.model_token] if spec.model_token else [])]
    return drift.with_diffs(verdict, files, texts, secrets)


def _reason(error: Exception, spec: NodeSpec) -> str:
    if isinstance(error, TimeoutError):
        patience = spec.data.observe_timeout_s
        return f"it did not answer within {patience} s -> see what hangs there, or set `observe_timeout_s`"
    if isinstance(error, PermissionError):  # of operations.passwords
        return _refusal(str(error))
    if isinstance(error, GpuwrightError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# What a host says instead of an answer, and what to do about it.
REFUSALS = {
    "password is required": "allow it without a password in sudoers, or check as another user",
    "not in the sudoers": "allow it in sudoers, or check as another user",
    "may not run sudo": "allow it in sudoers, or check as another user",
    "not allowed to execute": "allow it in sudoers, or check as another user",
    "sudo: command not found": "install sudo, or check as root",
    "sudo: not found": "install sudo, or check as root",
}


def _refusal(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for text, remedy in REFUSALS.items():
        for line in lines:
            if text in line:
                return f"sudo is refused: {line} -> {remedy}"
    return f"it could not be observed: {lines[-1]}" if lines else "it could not be observed: the command ended at once"
