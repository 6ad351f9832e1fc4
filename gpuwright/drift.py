"""Where a node has left its declared state: the plan of a deploy, read as findings and never carried out. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from gpuwright import REPOSITORY
from gpuwright.hostdata import STAGES
from gpuwright.plan import (
    ADOPT,
    APPLY,
    CONFIG,
    CONFIGURE,
    FOLDERS,
    LAUNCHERS,
    MODEL,
    PREFLIGHT,
    PROBE,
    PRUNE,
    RECORD,
    SERVER,
    SETTINGS,
    STUB,
    SYNC,
    TOOLS,
    VENV,
    VERIFY,
    WHEELS,
    Change,
    examine_node,
    flat,
    manager,
    manager_files,
    plan,
    unread,
)
from gpuwright.preflight import before_install
from gpuwright.spec import NodeFile, NodeSpec
from gpuwright.state import NodeState

SCHEMA = REPOSITORY / "docs" / "schema" / "drift-report-1.json"
CONVERGE = STAGES[:-1]  # all but smoke, which is the only one that may load a node
Kind = Literal["corrective", "intentional", "unknown"]
Status = Literal["clean", "drift", "error"]

# What a deploy does about a finding, where the finding does not say it itself.
MENDS = {
    FOLDERS: "a deploy makes it so",
    SETTINGS: "a deploy sets it; what should stay as it is goes into `system` of group_data",
    WHEELS: "a deploy brings what it installs, and removes what it does not need",
    TOOLS: "a deploy installs its tools anew",
    VENV: "a deploy makes the venv anew",
    ADOPT: "a deploy has the venv see it, and records it",
    SYNC: "a deploy syncs the venv to the lock; what should stay goes into catalog/stacks and `make lock`",
    STUB: "a deploy builds it",
    VERIFY: "a deploy proves it again",
    APPLY: "a deploy patches it",
    PROBE: "a deploy probes it again",
    MODEL: "a deploy makes or fetches it",
    CONFIG: "a deploy reads it again",
    LAUNCHERS: "a deploy writes it anew; what should stay goes into catalog/tiers/ or group_data",
    CONFIGURE: "a deploy writes it anew; what should stay goes into group_data or files/templates",
    SERVER: "a deploy sees to it",
    PRUNE: "a deploy removes it",
    RECORD: "a deploy records it",
}


class Result(BaseModel):
    """Base of what a drift check answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Finding(Result):
    """One thing that is not as declared.

    `corrective`: the node has moved; `intentional`: this repository has, since the node's last deploy; `unknown`: it
    could not be observed, so it is neither clean nor drift. `diff`: a unified diff from our file to the node's.
    """

    stage: str
    step: str
    what: str
    expected: str
    found: str
    kind: Kind
    mend: str
    diff: str = ""

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}" if self.expected else self.what


class Deployed(Result):
    """What the node's state.json says of its last deploy."""

    spec_digest: str | None = None
    revision: str | None = None
    tier: str | None = None
    at: str | None = None


class Verdict(Result):
    """What a check says of one host: clean, drift, or an error with its reason. Findings stand beside an error where a
    part could be observed. `seconds` from connecting to the verdict.
    """

    host: str
    status: Status
    stages: list[str] = []
    findings: list[Finding] = []
    error: str = ""
    spec_digest: str | None = None
    deployed: Deployed | None = None
    seconds: float | None = None

    def of(self, stage: str) -> list[Finding]:
        """The findings of one stage."""
        return [each for each in self.findings if each.stage == stage]


class Report(Result):
    """A whole check: `at` in UTC, the verdicts by host name."""

    version: Literal[1] = 1
    at: str
    inventory: str
    seconds: float
    hosts: list[Verdict]

    @property
    def exit_code(self) -> int:
        """1 where a host could not be judged or there is none, else 2 where one has drifted, else 0."""
        statuses = {each.status for each in self.hosts}
        return 1 if "error" in statuses or not statuses else 2 if "drift" in statuses else 0


def judge(spec: NodeSpec, state: NodeState) -> Verdict:
    """What is to be said of a host that could be observed."""
    stages = [stage for stage in CONVERGE if stage in spec.stages]
    found = findings(spec, state)
    if state.unreadable:  # what would be said of the rest is made up: what cannot be read looks absent
        found, stages = [_finding(unread(state), "unknown")], []
    unknown = [each for each in found if each.kind == "unknown"]
    status: Status = "error" if unknown else "drift" if found else "clean"
    record = state.state or {}
    then = {name: str(record[name]) for name in Deployed.model_fields if record.get(name) is not None}
    return Verdict(
        host=spec.host,
        status=status,
        stages=stages,
        findings=found,
        error=f"{len(unknown)} things could not be observed" if unknown else "",
        spec_digest=spec.spec_digest,
        deployed=Deployed(**then) if record else None,
    )


def findings(spec: NodeSpec, state: NodeState) -> list[Finding]:
    """Everything in which the node is not as declared: what a deploy would change or stop at, but for what would only
    follow from such a change, and for the benchmark.
    """
    found = list(_unfit(spec, state)) if "preflight" in spec.stages else []
    then = flat(state.deployed, CONVERGE) if state.deployed is not None else None
    now = flat(spec.declared(manager(spec, state)), CONVERGE)
    for change in plan(spec, state).changes:
        stage = change.step.partition(" | ")[0]
        if stage in CONVERGE and stage != "preflight" and not change.follows:  # preflight's are said one by one
            recorded = then is not None and stage in (state.deployed or {})
            found.append(_finding(change, kind(change, then if recorded else None, now)))
    return found


def _unfit(spec: NodeSpec, state: NodeState) -> Iterable[Finding]:
    """Every `must` of the doctor that keeps the node from being deployed to."""
    for each in before_install(spec, examine_node(spec, state)):
        yield Finding(
            stage="preflight",
            step=PREFLIGHT,
            what=each.check.id,
            expected=each.expected,
            found=each.found,
            kind="unknown" if each.status == "unknown" else "corrective",
            mend=each.remedy,
        )


def kind(change: Change, then: Mapping[str, str] | None, now: Mapping[str, str]) -> Kind:
    """Who has moved, by what was declared `then` (at the last deploy; None: there was none that recorded it) and `now`.

    It was the node, wherever the repository says what it said, and wherever the node has something else than was
    deployed.
    """
    if change.unknown:
        return "unknown"
    if then is None:
        return "intentional"
    moved = [key for key in change.keys if then.get(key, "") != now.get(key, "")]
    as_deployed = all(change.holds in (None, then.get(key, "")) for key in moved)
    return "intentional" if moved and len(moved) == len(change.keys) and as_deployed else "corrective"


def _finding(change: Change, kind: Kind) -> Finding:
    lines = [line.strip() for line in change.what.splitlines()]
    remedies = [line[3:] for line in lines if line.startswith("-> ")]
    told = {
        word: line[len(word) :].strip() for line in lines for word in ("expected", "found") if line.startswith(word)
    }
    rest = [line for line in lines[1:] if not line.startswith(("-> ", "expected", "found"))]
    mend = "; ".join(remedies) or MENDS[change.step]
    return Finding(
        stage=change.step.partition(" | ")[0],
        step=change.step,
        what=" ".join([lines[0], *rest]),
        expected=change.expected or told.get("expected", ""),
        found=change.found or told.get("found", ""),
        kind=kind,
        mend=f"the repository has moved: {mend}" if kind == "intentional" else mend,
    )


def own_files(spec: NodeSpec, state: NodeState) -> list[NodeFile]:
    """The text files of ours that differ on the node, whose content may be shown: no secrets among them."""
    ours = [*spec.scripts, *manager_files(spec, state), *spec.system_files]
    seen = {file.path: state.files.get(file.path) for file in ours}
    return [file for file in ours if (there := seen[file.path]) and there.sha256 != file.sha256]


def with_diffs(
    verdict: Verdict, files: Iterable[NodeFile], texts: Mapping[str, str], secrets: Iterable[str]
) -> Verdict:
    """The verdict with a diff at each finding whose file's text was read. `secrets`: values never to be shown."""
    diffs = {file.path: diff(file, texts[file.path], secrets) for file in files if file.path in texts}
    found = [each.model_copy(update={"diff": diffs.get(each.what, "")}) for each in verdict.findings]
    return verdict.model_copy(update={"findings": found})


# Someone may have written a key into a launch script by hand, and a diff ends in logs.
_NAMES = r"token(?!s)|secret|passw|passphrase|[_-]key\b|api_?key|credential|private"
_SECRET = re.compile(
    # To the line's end: a value may hold spaces.
    rf"(?i)((?:[\w.-]*(?:{_NAMES})[\w.-]*|bearer|basic)[\"']?(?:\s*[=:]\s*|\s+)).+"
)
_LOGIN = re.compile(r"://[^@/\s]+@")


def diff(file: NodeFile, text: str, secrets: Iterable[str] = ()) -> str:
    """What was changed in a file of ours, as a unified diff from ours to what is on the node; values of what looks like
    a secret are left out.
    """
    rows = difflib.unified_diff(
        file.text.splitlines(), text.splitlines(), "as declared", "on the node", n=1, lineterm=""
    )
    shown = []
    for row in rows:
        for secret in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another
            row = row.replace(secret, "***")
        shown.append(_LOGIN.sub("://***@", _SECRET.sub(r"\1***", row)))
    return "\n".join(shown)


def lines(verdict: Verdict) -> list[str]:
    """A verdict as a person reads it."""
    if verdict.status == "clean":
        return [f"clean: {', '.join(verdict.stages)}"]
    counts = {
        kind: sum(each.kind == kind for each in verdict.findings) for kind in ("corrective", "intentional", "unknown")
    }
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    text = [f"{verdict.status}: {'; '.join(filter(None, [verdict.error, said]))}"]
    for each in verdict.findings:
        text.append(f"  {each.kind:<11} {each.stage:<9} {each}")
        text.append(f"  {'':<11} {'':<9} -> {each.mend}")
        text += [f"  {'':<11} {'':<9}    {row}" for row in each.diff.splitlines()]
    return [_printable(row) for row in text]


def _printable(text: str) -> str:
    """Without what moves a terminal's cursor or colours it: a node's file names and answers may be anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def as_json(report: Report) -> str:
    """The report as JSON, in ASCII: it is also printed, in whatever encoding there is."""
    return json.dumps(report.model_dump(mode="json"), indent=1) + "\n"


def schema() -> str:
    """The JSON schema of a report, as docs/schema/ has it."""
    return json.dumps(Report.model_json_schema(mode="serialization"), indent=1) + "\n"
