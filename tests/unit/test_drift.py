"""What a drift check says: the plan of a deploy as findings, who has moved, and the reports for automation."""

from __future__ import annotations

import json
import xml.etree.ElementTree as tree
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuwright import drift
from gpuwright import plan as p
from gpuwright.drift import CONVERGE, Finding, Report, Verdict, findings, judge, kind
from gpuwright.drift_reports import junit, prometheus
from gpuwright.plan import Change, plan
from gpuwright.spec import NodeFile, NodeSpec
from gpuwright.state import NodeState, SeenFile, SeenFolder
from tests.make import STOPPED, empty_state, gpu_spec, lab_spec, seen, settled_state

LAB = lab_spec(system={"shared-memory": 1})
SETTLED = settled_state(LAB)
SCRIPT = LAB.active_script


def file(state: NodeState, path: str, sha256: str | None, mode: int = 0o644) -> NodeState:
    changed = SeenFile(sha256=sha256, size=1, mode=mode) if sha256 else None
    return state.model_copy(update={"files": state.files | {path: changed}})


def venv(state: NodeState, **changed: Any) -> NodeState:
    assert state.venv is not None
    return state.model_copy(update={"venv": state.venv.model_copy(update=changed)})


def server(state: NodeState, **changed: Any) -> NodeState:
    return state.model_copy(update={"server": state.server.model_copy(update=changed)})


def installed(state: NodeState, **changed: str) -> NodeState:
    assert state.venv is not None
    return venv(state, installed=state.venv.installed.model_copy(update=changed))


def without(state: NodeState, name: str) -> NodeState:
    assert state.venv is not None
    return venv(state, distributions={k: v for k, v in state.venv.distributions.items() if k != name})


def patched(state: NodeState, sha256: str | None) -> NodeState:
    seen = SeenFile(sha256=sha256, size=1, mode=0o644) if sha256 else None
    return state.model_copy(update={"patched": state.patched | {LAB.patches[0].file: seen}})


def test_a_settled_node_is_clean() -> None:
    for spec in (LAB, gpu_spec(), lab_spec(smoke="always"), lab_spec(profile="full")):
        verdict = judge(spec, settled_state(spec))
        assert (verdict.status, verdict.findings) == ("clean", [])
        assert verdict.stages == list(CONVERGE), "the benchmark is no part of it"
        assert drift.lines(verdict) == ["clean: preflight, system, runtime, patches, model, launchers, service"]


MOVED: dict[str, tuple[str, Callable[[NodeState], NodeState], str]] = {
    "folder's mode": (
        "system",
        lambda s: s.model_copy(update={"folders": s.folders | {LAB.paths.run: SeenFolder(mode=0o755, uid=0)}}),
        "/opt/gpuwright/run: expected mode 0700, found mode 0755",
    ),
    "setting": (
        "system",
        lambda s: seen(s, "mounts", s.readings["mounts"] | {"shm": s.readings["mounts"]["shm"] | {"size": 1 << 20}}),
        "shared-memory: /dev/shm: expected 1 GiB",
    ),
    "distribution absent": ("runtime", lambda s: without(s, "numpy"), "numpy: expected"),
    "distribution added": (
        "runtime", lambda s: venv(s, distributions=s.venv.distributions | {"vllm": "1.0"}),  # type: ignore[union-attr]
        "vllm: expected absent, found 1.0",
    ),
    "distribution damaged": (
        "runtime", lambda s: venv(s, damaged={"sglang": "lacks sglang/x.py"}), "0.5.9, whole, found lacks sglang/x.py"
    ),
    "tool": ("runtime", lambda s: s.model_copy(update={"tools": None}), "tools: expected uv and supervisor"),
    "proof": ("runtime", lambda s: s.model_copy(update={"stamps": s.stamps | {"runtime": None}}), "found not verified"),
    "patch gone": ("patches", lambda s: patched(s, LAB.patches[0].pre_sha256), "expected applied, found pristine"),
    "patched file edited": ("patches", lambda s: patched(s, "f" * 64), "is foreign and was left as it is"),
    "model file": (
        "model",
        lambda s: s.model_copy(update={"model": s.model.model_copy(update={"files": {}})}),  # type: ignore[union-attr]
        "model.safetensors: expected aaaaaaaaaaaa, found absent",
    ),
    "launch script": ("launchers", lambda s: file(s, SCRIPT.path, "e" * 64, 0o755), "found eeeeeeeeeeee"),
    "launch script's mode": ("launchers", lambda s: file(s, SCRIPT.path, SCRIPT.sha256), "mode 0755, found mode 0644"),
    "script of nobody": (
        "launchers", lambda s: s.model_copy(update={"launch_scripts": [*s.launch_scripts, "mine.sh"]}), "mine.sh"
    ),
    "configuration": ("service", lambda s: file(s, LAB.paths.supervisor_conf, "e" * 64, 0o600), "supervisord.conf"),
    "server gone": ("service", lambda s: s.model_copy(update={"server": STOPPED}), "expected serving, found not run"),
    "server of other arguments": (
        "service", lambda s: server(s, differs=["--port is 1, not 31000"]), "found --port is 1, not 31000"
    ),
    "other files than it was started on": (
        "service", lambda s: installed(s, content="x", times="x"),
        "since it was started: installed files (torch/__init__.py was written last)",
    ),
    "started by another": ("service", lambda s: server(s, pid=7), "pid 7, started again by supervisor"),
    "server that does not answer": ("service", lambda s: server(s, health=503), "/health answers 200, found 503"),
    "not started at boot": ("service", lambda s: server(s, enabled=False), "started at boot, found not enabled"),
    "unit changed on the side": ("service", lambda s: server(s, dropins=["/etc/x.conf"]), "/etc/x.conf changes the"),
    "unit not read anew": ("service", lambda s: server(s, stale=True), "found written since systemd read it"),
    "old cache": ("service", lambda s: s.model_copy(update={"caches": [*s.caches, "0ld"]}), "cache/0ld"),
    "record": ("service", lambda s: s.model_copy(update={"state": None}), "spec: expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVED)
def test_what_was_changed_on_the_node_is_found_where_it_is_and_is_corrective(case: str) -> None:
    stage, change, said = MOVED[case]
    verdict = judge(LAB, change(SETTLED))
    assert verdict.status == "drift"
    first = verdict.findings[0]
    assert (first.stage, first.kind) == (stage, "corrective") and said in str(first), [str(f) for f in verdict.findings]
    assert first.mend and "the repository" not in first.mend
    own = [each for each in verdict.findings if each.stage == stage]
    assert len(verdict.findings) == len(own), "one cause, and nothing that would only follow from mending it"


def test_a_deploy_does_nothing_exactly_where_the_check_is_clean() -> None:
    for _, change, _ in MOVED.values():
        for spec, state in ((LAB, SETTLED), (LAB, change(SETTLED))):
            converge = [c for c in plan(spec, state).changes if c.step not in (p.SMOKE, p.GATE)]
            assert bool(converge) == bool(findings(spec, state))


def test_a_must_that_fails_is_drift_with_its_own_remedy() -> None:
    spec = gpu_spec()
    state = settled_state(spec)
    lost = seen(state, "gpus", state.readings["gpus"][:-1])
    verdict = judge(spec, lost)
    found = {each.what: each for each in verdict.of("preflight")}
    assert verdict.status == "drift" and found["gpu-count"].kind == "corrective"
    assert (found["gpu-count"].expected[:1], found["gpu-count"].found[:1]) == ("8", "7") and found["gpu-count"].mend


def test_what_could_not_be_observed_is_an_error_and_never_clean() -> None:
    spec = gpu_spec()
    verdict = judge(spec, seen(settled_state(spec), "gpus", problem="nvidia-smi did not answer within 20 s"))
    assert verdict.status == "error" and verdict.error.endswith("things could not be observed")
    assert {each.kind for each in verdict.findings} == {"unknown"}
    hidden = judge(LAB, SETTLED.model_copy(update={"unreadable": [LAB.paths.run], "uid": 1000}))
    (unread,) = hidden.findings  # nothing else: what cannot be read looks absent
    assert unread.kind == "unknown" and hidden.stages == []
    assert hidden.status == "error" and str(unread) == "/opt/gpuwright/run cannot be read by uid 1000"
    assert unread.mend == "run as its owner, or with _sudo"
    setting = judge(LAB, seen(SETTLED, "mounts", problem="it hangs"))
    assert setting.status == "error" and "unknown" in {each.kind for each in setting.findings}


# --- who has moved ------------------------------------------------------------------


def test_what_the_repository_has_changed_since_the_last_deploy_is_intentional() -> None:
    other = lab_spec(system={"shared-memory": 1}, tier="no-radix")
    verdict = judge(other, SETTLED)
    assert verdict.status == "drift" and {each.kind for each in verdict.findings} == {"intentional"}
    assert all("the repository has moved: a deploy" in each.mend for each in verdict.findings)
    assert [each.step for each in verdict.findings] == [p.CONFIGURE, p.SERVER], "its script is there already"
    assert "launch script" in str(verdict.findings[-1])


def test_both_have_moved_then_the_node_is_named() -> None:
    other = lab_spec(system={"shared-memory": 1}, port=31999)
    scripts = [each for each in findings(other, SETTLED) if each.step == p.LAUNCHERS]
    assert {each.kind for each in scripts} == {"intentional"}
    edited = file(SETTLED, SCRIPT.path, "e" * 64, 0o755)
    kinds = {each.what: each.kind for each in findings(other, edited) if each.step == p.LAUNCHERS}
    assert kinds.pop(SCRIPT.path) == "corrective" and set(kinds.values()) == {"intentional"}


def test_a_setting_that_was_taken_out_or_put_in_is_intentional() -> None:
    fewer = lab_spec()
    out = findings(fewer, SETTLED)
    assert out and {each.kind for each in out} == {"intentional"}
    before = settled_state(fewer)
    new = findings(LAB, before)
    assert new and {each.kind for each in new} == {"intentional"}


def test_another_lock_is_intentional_wherever_it_shows() -> None:
    lock = replace(LAB.lock, sha256="9" * 64, versions=LAB.lock.versions | {"transformers": "5.3.0"})
    found = findings(replace(LAB, lock=lock), SETTLED)
    assert {each.kind for each in found} == {"intentional"}
    assert "transformers: expected 5.3.0, found 5.2.0" in [str(each) for each in found]
    assert {each.step for each in found} == {p.SYNC, p.LAUNCHERS, p.PROBE, p.PRUNE}, "the rest follows from these"


def test_patches_that_are_no_longer_wanted_are_intentional() -> None:
    none = lab_spec(system={"shared-memory": 1}, patches="none")
    found = [each for each in findings(none, SETTLED) if each.stage == "patches"]
    assert found and {each.kind for each in found} == {"intentional"}


def test_nothing_was_ever_deployed_is_intentional() -> None:
    found = findings(LAB, empty_state(LAB))
    assert {each.stage for each in found} >= {"system", "runtime", "model", "launchers", "service"}
    assert {each.kind for each in found} == {"intentional"}


@pytest.mark.parametrize(("keys", "holds", "then", "expected"), [
    ((), None, {}, "corrective"),
    (("a",), None, {"a": "1"}, "corrective"),
    (("a",), None, {"a": "0"}, "intentional"),
    (("a",), "0", {"a": "0"}, "intentional"),
    (("a",), "9", {"a": "0"}, "corrective"),
    (("a",), "", {}, "intentional"),
    (("a",), "", None, "intentional"),
    (("a", "b"), None, {"a": "0", "b": "2"}, "corrective"),
    (("a", "b"), None, {"a": "0", "b": "0"}, "intentional"),
])  # fmt: skip
def test_kind(keys: tuple[str, ...], holds: str | None, then: dict[str, str] | None, expected: str) -> None:
    change = Change(p.LAUNCHERS, "x", keys=keys, holds=holds)
    assert kind(change, then, {"a": "1", "b": "2"}) == expected


KEYS = st.lists(st.sampled_from("abc"), max_size=3, unique=True).map(tuple)
VALUES = st.dictionaries(st.sampled_from("abc"), st.sampled_from("012"))


@given(KEYS, st.none() | st.sampled_from(["", "0", "1"]), VALUES)
def test_while_the_repository_stands_still_nothing_is_intentional(
    keys: tuple[str, ...], holds: str | None, declared: dict[str, str]
) -> None:
    assert kind(Change(p.SYNC, "x", keys=keys, holds=holds), declared, declared) == "corrective"


def test_every_key_of_a_change_is_one_that_is_declared() -> None:
    """Else a rename would turn every finding of that step into a corrective one."""
    moves = [change(SETTLED) for _, change, _ in MOVED.values()]
    declared = {key for stage in LAB.declared("supervisor").values() for key in stage}
    keys = {key for state in [*moves, empty_state(LAB)] for c in plan(LAB, state).changes for key in c.keys}
    strangers = {f"file {LAB.paths.launch}/mine.sh", "distribution vllm", p.INSTALLED}
    assert keys - declared == strangers and len(keys) > 30


# --- diffs ----------------------------------------------------------------------------


def test_a_diff_shows_what_was_changed_and_no_secret() -> None:
    edited = file(SETTLED, SCRIPT.path, "e" * 64, 0o755)
    verdict, files = judge(LAB, edited), drift.own_files(LAB, edited)
    assert files == [SCRIPT]
    text = (
        SCRIPT.text.replace("--port 31000", "--port 32000") + "export HF_TOKEN=hf_abcdef\n--api-key sk-123\n# xyzzy\n"
    )
    shown = drift.with_diffs(verdict, files, {SCRIPT.path: text}, ["xyzzy"]).findings[0].diff
    assert "--- as declared" in shown and "-  --port 31000 \\" in shown and "+  --port 32000 \\" in shown
    assert "HF_TOKEN=***" in shown and "--api-key ***" in shown
    assert not any(secret in shown for secret in ("hf_abcdef", "sk-123", "xyzzy"))


@pytest.mark.parametrize("line", [
    "export HF_TOKEN=S3CRET", "api_key: S3CRET", '"api-key": "S3CRET"', "--admin-api-key S3CRET", "--api-key=S3CRET",
    "AWS_SECRET_ACCESS_KEY=S3CRET", "Authorization: Bearer S3CRET", "PASSWORD='a S3CRET with words'",
    "https_proxy=http://user:S3CRET@proxy", "PASSPHRASE=S3CRET", "export SGLANG_KEY=S3CRET",
])  # fmt: skip
def test_what_looks_like_a_secret_is_left_out(line: str) -> None:
    assert "S3CRET" not in drift.diff(NodeFile("/x", "a\n"), f"a\n{line}\n")


def test_what_is_no_secret_is_shown_and_of_two_secrets_the_longer_goes_first() -> None:
    shown = drift.diff(NodeFile("/x", "a\n"), "a\n  --max-total-tokens 10000\n# abcdef\n", ["abc", "abcdef"])
    assert "+  --max-total-tokens 10000" in shown and "+# ***" in shown and "def" not in shown


def test_files_of_secrets_are_never_read_for_a_diff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "s")
    spec = lab_spec(secrets={"api-key": "env:KEY", "HF_TOKEN": "env:KEY"})
    state = settled_state(spec)
    for each in [*spec.secret_files, *spec.scripts]:
        state = file(state, each.path, "e" * 64)
    names = {each.path for each in drift.own_files(spec, state)}
    assert len(spec.secret_files) == 2 and names == {each.path for each in spec.scripts}
    found = [each for each in findings(spec, state) if each.what in {f.path for f in spec.secret_files}]
    assert [each.found for each in found] == ["absent or others"] * 2


# --- reports --------------------------------------------------------------------------


def report_of(*verdicts: Verdict) -> Report:
    return Report(at="2026-11-30T10:00:00Z", inventory="inventory/gpu.py", seconds=2.5, hosts=list(verdicts))


CLEAN = judge(LAB, SETTLED).model_copy(update={"host": "one", "seconds": 1.0})
DRIFTED = judge(LAB, MOVED["launch script"][1](MOVED["patch gone"][1](SETTLED))).model_copy(update={"host": "two"})
LOST = Verdict(host="three", status="error", error="it could not be reached: \x1b[31mno\x00 <route> & more")
UNKNOWN = judge(LAB, seen(SETTLED, "mounts", problem="it hangs")).model_copy(update={"host": "four"})


@pytest.mark.parametrize(("hosts", "code"), [
    ([CLEAN], 0), ([CLEAN, DRIFTED], 2), ([CLEAN, DRIFTED, LOST], 1), ([CLEAN, LOST], 1), ([UNKNOWN], 1), ([], 1),
])  # fmt: skip
def test_the_exit_code(hosts: list[Verdict], code: int) -> None:
    assert report_of(*hosts).exit_code == code


def test_junit_has_a_case_for_each_host_and_stage() -> None:
    root = tree.fromstring(junit(report_of(CLEAN, DRIFTED, LOST, UNKNOWN)))
    suites = {suite.get("name"): suite for suite in root}
    assert {name: len(list(suite)) for name, suite in suites.items()} == dict.fromkeys(
        ("one", "two", "three", "four"), 7
    )
    counts = {name: [int(s.get(k, "")) for k in ("failures", "errors", "skipped")] for name, s in suites.items()}
    assert counts["one"] == [0, 0, 0] and counts["two"] == [2, 0, 0] and counts["three"] == [0, 7, 0]
    assert counts["four"][1] > 0
    (failure,) = [case.find("failure") for case in suites["two"] if case.get("name") == "launchers"]
    assert failure is not None and "-> a deploy writes it anew" in str(failure.text)
    error = next(iter(suites["three"])).find("error")
    assert error is not None and "<route> & more" in str(error.get("message"))
    part = judge(lab_spec(stages=["patches"]), settled_state(lab_spec()))
    cases = {c.get("name"): c.find("skipped") is not None for c in next(iter(tree.fromstring(junit(report_of(part)))))}
    assert not cases.pop("patches") and all(cases.values())


def test_prometheus_reads_the_metrics() -> None:
    text = prometheus(report_of(CLEAN, DRIFTED, LOST))
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["gpuwright_drift_findings", "corrective", "launchers", "two"] == 1
    assert samples["gpuwright_drift_findings", "corrective", "launchers", "one"] == 0
    drifted = [samples["gpuwright_drift_drifted", host] for host in ("one", "two", "three")]
    errors = [samples["gpuwright_drift_check_error", host] for host in ("one", "two", "three")]
    assert drifted == [0, 1, 0] and errors == [0, 0, 1]
    assert samples["gpuwright_drift_check_timestamp_seconds",] == 1796032800


def test_json_is_what_its_schema_says() -> None:
    text = drift.as_json(report_of(CLEAN, DRIFTED, LOST))
    answer = json.loads(text)
    jsonschema.validate(answer, json.loads(drift.SCHEMA.read_text()))
    assert drift.SCHEMA.read_text() == drift.schema(), "run python -m gpuwright schema"
    assert [host["status"] for host in answer["hosts"]] == ["clean", "drift", "error"]
    assert answer["hosts"][1]["findings"][0]["kind"] == "corrective"
    assert Report.model_validate_json(text) == report_of(CLEAN, DRIFTED, LOST)


def test_a_person_reads_what_was_found_and_what_to_do() -> None:
    lines = drift.lines(DRIFTED)
    assert lines[0] == "drift: 2 corrective"
    assert any(line.startswith("  corrective  launchers ") for line in lines)
    assert any("-> a deploy writes it anew; what should stay goes into catalog/tiers/" in line for line in lines)
    assert drift.lines(LOST)[0].startswith("error: it could not be reached")


def test_what_the_node_says_of_its_last_deploy() -> None:
    state = SETTLED.model_copy(
        update={"state": {"spec_digest": LAB.spec_digest, "revision": "abc", "tier": "baseline"}}
    )
    deployed = judge(LAB, state).deployed
    assert deployed is not None and (deployed.revision, deployed.tier, deployed.at) == ("abc", "baseline", None)


# --- nodes that do not serve ----------------------------------------------------------


def idle(spec: NodeSpec, **changed: Any) -> NodeState:
    return settled_state(spec, server=STOPPED.model_copy(update=changed))


def test_a_node_that_is_not_to_serve_is_clean_without_a_server() -> None:
    spec = lab_spec(serve=False)
    assert findings(spec, idle(spec)) == [] and p.server_actions(spec, idle(spec)) == []
    assert plan(spec, idle(spec)).of(p.SMOKE) == []
    running = settled_state(spec)
    (found,) = findings(spec, running)
    assert str(found) == "the server: expected none: serve is False, found tier None, pid 100"
    assert p.server_actions(spec, running) == ["stop", "shut_down"]
    (boot,) = findings(spec, idle(spec, manager="systemd", unit="sglang-server", enabled=True))
    assert "not started at boot, found enabled" in str(boot)


def test_to_stop_serving_is_the_repository_s_move() -> None:
    idle_spec = lab_spec(system={"shared-memory": 1}, serve=False)
    (found,) = findings(idle_spec, SETTLED)
    assert found.kind == "intentional"


def finding_of(state: NodeState) -> Finding:
    return findings(LAB, state)[0]


def test_a_lost_enablement_is_mended_without_a_restart() -> None:
    for state in (server(SETTLED, enabled=False), server(SETTLED, stale=True)):
        assert p.server_actions(LAB, state) == ["enable"]
    assert p.server_actions(LAB, server(SETTLED, differs=["--x is not in it"])) == ["stop", "start", "wait"]


def test_a_spec_is_held_against_the_stages_that_a_deploy_had() -> None:
    """A deploy of some stages records those alone."""
    spec = replace(LAB, data=LAB.data.model_copy(update={"stages": ["launchers", "service"]}))
    then = {stage: dict(values) for stage, values in LAB.declared("supervisor").items()}
    then["runtime"]["venv"] = "3.10"
    state = SETTLED.model_copy(update={"deployed": then})
    assert plan(spec, state).of(p.RECORD) == []
    (change,) = plan(LAB, state).of(p.RECORD)
    assert change.keys == ("venv",)


def test_files_that_were_only_written_again_do_not_restart_the_server_that_was_started_before() -> None:
    written = installed(SETTLED, times="x")
    assert findings(LAB, written) == [] and p.server_actions(LAB, written) == []
    again = server(written, pid=7)
    assert p.server_actions(LAB, again) == ["stop", "start", "wait"], "who knows what it has loaded"
    (found,) = findings(LAB, again)
    assert found.kind == "corrective" and str(found).endswith("since it was started: times of the installed files")
    assert p.server_actions(LAB, server(SETTLED, pid=7)) == ["adopt", "wait"]


def test_a_check_that_could_read_nothing_is_an_error_whatever_it_was_asked() -> None:
    spec = lab_spec(stages=["patches", "service"])
    verdict = judge(spec, settled_state(spec, unreadable=[spec.paths.run], uid=1000))
    assert (verdict.status, verdict.stages) == ("error", []) and len(verdict.findings) == 1


def test_an_added_patch_is_intentional_and_a_lost_one_is_not() -> None:
    before = settled_state(lab_spec(system={"shared-memory": 1}, patches="none"))
    pristine = {patch.file: SeenFile(sha256=patch.pre_sha256, size=1, mode=0o644) for patch in LAB.patches}
    before = before.model_copy(update={"patched": pristine, "manifest": {}})
    assert {each.kind for each in findings(LAB, before) if each.stage == "patches"} == {"intentional"}
    assert findings(LAB, patched(SETTLED, LAB.patches[0].pre_sha256))[0].kind == "corrective"


def test_another_unit_or_supervisor_is_the_repository_s_move() -> None:
    spec = gpu_spec(unit="other")
    then = gpu_spec()
    state = settled_state(then, systemd=True, deployed=then.declared("systemd"))
    files = state.files | {f.path: SeenFile(sha256=f.sha256, size=1, mode=f.mode) for f in then.systemd_files}
    state = state.model_copy(
        update={"files": files | {then.paths.supervisor_conf: None}, "unit_owner": then.paths.root}
    )
    state = server(state, manager="systemd", unit="sglang-server", units=["sglang-server"], enabled=True)
    then_record = state.server.record or {}
    state = server(state, record=then_record | {"runs_on": p.runs_on(then, state)})
    assert findings(then, state) == []
    assert {each.kind for each in findings(spec, state.model_copy(update={"unit_owner": None}))} == {"intentional"}
    supervised = findings(gpu_spec(supervisor="supervisor"), state)
    assert supervised and {each.kind for each in supervised} == {"intentional"}


def test_a_record_of_an_older_gpuwright_is_no_reason_to_restart() -> None:
    record = SETTLED.server.record or {}
    old = {name: value for name, value in record["runs_on"].items() if name not in (p.INSTALLED, p.TIMES)}
    assert p.server_actions(LAB, server(SETTLED, record=record | {"runs_on": old})) == []


def test_a_stage_that_was_never_recorded_has_not_moved_by_itself() -> None:
    state = SETTLED.model_copy(update={"deployed": {"service": LAB.declared("supervisor")["service"]}})
    lock = replace(LAB.lock, sha256="9" * 64, versions=LAB.lock.versions | {"transformers": "5.3.0"})
    found = [each for each in findings(replace(LAB, lock=lock), state) if each.stage == "runtime"]
    assert found and {each.kind for each in found} == {"intentional"}


def test_a_node_that_does_not_serve_is_rid_of_another_supervisor_s_unit_and_starts_no_peer() -> None:
    spec = lab_spec(serve=False)
    left = idle(spec, units=["other"])
    assert p.server_actions(spec, left) == ["retire"] and not p.restarts(spec, left)
    assert p.server_actions(spec, settled_state(spec)) == ["stop", "shut_down"]
    assert not p.restarts(spec, settled_state(spec))


def test_what_moves_a_terminal_is_shown_and_not_done() -> None:
    odd = SETTLED.model_copy(update={"launch_scripts": [*SETTLED.launch_scripts, "\x1b[2Jé.sh"]})
    text = "\n".join(drift.lines(judge(LAB, odd)))
    assert "\x1b" not in text and "\\x1b[2Jé.sh" in text
