"""The doctor's visit: every check of every host, before anything is done to any."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyinfra import host, logger  # type: ignore[attr-defined]

from gpuwright import checks
from gpuwright.plan import examine_node
from gpuwright.record import folder_name
from operations.stage import desired_state, observed
from operations.visit import visit

_answers: list[dict[str, Any]] = []


def visit_host() -> None:
    """Examine this host. When all have been, the run ends: exit code 0 where each passes, 2 where a `must` does not
    hold or cannot be observed, 1 where a host could not be asked. Nothing is changed on any.
    """
    visit(_examine, _print_json)


def _print_json(unreached: list[str]) -> None:
    if "--json" in sys.argv:  # pyinfra's own option; click's context does not reach into a host's greenlet
        answers = sorted(_answers, key=lambda answer: str(answer["host"]))
        print(json.dumps({"version": 1, "hosts": answers, "unreached": unreached}, indent=1))


def _examine() -> int:
    spec = desired_state(serving=False, secrets=False)
    found = observed(spec, remember=False)
    if found is None:
        return 1
    result = examine_node(spec, found)
    _answers.append(checks.as_json(host.name, result, found.problems))
    for line in checks.lines(result):
        host.log(f"  {line}", logger.info)
    host.log(f"  {'passes' if result.passes else 'does not pass'}: {result.summary}", logger.info)
    if spec.data.save_observation:
        folder = Path(spec.data.save_observation)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{folder_name(host.name)}.json"
        path.touch(mode=0o600)  # digests of secrets are among it
        path.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
        host.log(f"  wrote {path}: python -m gpuwright doctor {path} --group …", logger.info)
    return 0 if result.passes else 2
