"""An adopted interpreter: what it brings, what the venv holds itself, what stops a deploy, who has moved."""

from __future__ import annotations

from typing import Any

import pytest

from gpuwright import adopt, drift
from gpuwright import plan as p
from gpuwright.errors import InputErrors
from gpuwright.ladder import Evidence
from gpuwright.lockfile import read_lock
from gpuwright.node import adopt as adopt_commands
from gpuwright.node import apply_patches, sync_venv, verify_runtime
from gpuwright.patches import Action, decide
from gpuwright.plan import plan, runs_on, server_actions
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState, SeenAdopted, SeenAdoptedDistribution, SeenFile
from tests.make import ROOT, empty_state, gpu_spec, lab_spec, settled_state
from tests.unit.test_system import request_of

PYTHON = "/opt/vendor/bin/python"
SITE = "/opt/vendor/lib/python3.12/site-packages"
OTHERS = "/usr/local/lib/python3.12/dist-packages"


def spec_of(**given: Any) -> NodeSpec:
    return lab_spec(adopt={"interpreter": PYTHON} | given)


def has(**versions: str) -> SeenAdopted:
    """An interpreter with these distributions (dashes as underscores)."""
    rows = {
        name.replace("_", "-"): SeenAdoptedDistribution(
            version=v, site=SITE, content=f"{name} {v}", newest=f"{name}.py"
        )
        for name, v in versions.items()
    }
    return SeenAdopted(python="3.12.3", sites=[SITE, OTHERS], distributions=rows)


def settled(spec: NodeSpec, seen: SeenAdopted, **changed: Any) -> NodeState:
    """The state in which nothing is left to do, the interpreter being as it was adopted."""
    state = settled_state(spec).model_copy(update={"adopted": seen})
    kept = adopt.record(spec, state)
    bridge, lock = adopt.bridge(spec, state), adopt.own_lock(spec, state)
    assert kept and bridge and state.venv
    lies = {bridge.path: bridge.sha256, spec.paths.lock_copy: lock.sha256}
    update: dict[str, Any] = {
        "adopted_before": {
            "interpreter": PYTHON,
            "python": seen.python,
            "distributions": {n: [s.version, s.content] for n, s in adopt.brought(spec, state).items()},
        },
        "venv": state.venv.model_copy(update={"distributions": dict(lock.versions)}),
        "files": state.files | {path: SeenFile(sha256=sha, size=1, mode=0o644) for path, sha in lies.items()},
    }
    state = state.model_copy(update=update)
    record = (state.server.record or {}) | {"runs_on": runs_on(spec, state)}
    server = state.server.model_copy(update={"record": record})
    return state.model_copy(update={"server": server} | changed)


TORCH = "2.9.1"
STAMPS = [f"{ROOT}/run/{stage}.json" for stage in ("runtime", "patches", "config")]


def test_it_brings_what_it_has_in_the_locks_version() -> None:
    spec = spec_of()
    pinned = spec.lock.versions
    seen = has(torch=f"{TORCH}+cu128", numpy=pinned["numpy"], einops="0.1", not_of_the_lock="1.0")
    found = adopt.brought(spec, empty_state(spec, adopted=seen))
    assert pinned["torch"] == TORCH and set(found) == {"torch", "numpy"}
    assert adopt.brought(lab_spec(), empty_state(lab_spec(), adopted=seen)) == {}


def test_other_versions_will_do_where_they_are_declared_to() -> None:
    seen = has(torch="2.11.0a0+vendor25.10", einops="0.9")
    spec = spec_of(versions={"torch": ">=2.9,<2.12", "einops": "==0.8.*"})
    assert set(adopt.brought(spec, empty_state(spec, adopted=seen))) == {"torch"}


def test_what_carries_a_patch_comes_into_the_venv_unless_it_is_patched_in_place() -> None:
    seen = has(sglang="0.5.9", flashinfer_python="0.6.3", torch=TORCH)
    for given, names in (({}, {"torch"}), ({"patch_in_place": True}, {"torch", "sglang", "flashinfer-python"})):
        spec = spec_of(**given)
        assert set(adopt.brought(spec, empty_state(spec, adopted=seen))) == names
    plain = lab_spec(adopt={"interpreter": PYTHON}, patches="none")
    assert "sglang" in adopt.brought(plain, empty_state(plain, adopted=seen))


def test_the_venvs_own_lock_is_the_lock_without_what_is_brought(tmp_path: Any) -> None:
    spec = spec_of()
    lock = adopt.own_lock(spec, empty_state(spec, adopted=has(torch=TORCH, numpy=spec.lock.versions["numpy"])))
    (tmp_path / "lock.txt").write_text(lock.text)
    read = read_lock(tmp_path / "lock.txt")
    assert (
        read.versions == lock.versions == {n: v for n, v in spec.lock.versions.items() if n not in ("torch", "numpy")}
    )
    assert read.sha256 == lock.sha256 and read.inputs == spec.lock.inputs
    assert lock.text.count("--hash") < spec.lock.text.count("--hash") and "\ntorch==" not in lock.text
    assert spec.lock.without([]) is spec.lock and spec.lock.without(spec.lock.versions).versions == {}


def test_a_fresh_node() -> None:
    spec = spec_of()
    state = empty_state(spec, adopted=has(torch=TORCH))
    found = plan(spec, state)
    assert found.of(p.VENV) and all(change.follows for change in (*found.of(p.ADOPT), *found.of(p.SYNC)))
    assert f"{len(spec.lock.versions) - 1} distributions to install" in str(found.of(p.SYNC)[0])
    assert spec.interpreter == PYTHON and PYTHON in spec.asked["pythons"]


def test_nothing_is_left_to_do() -> None:
    spec = spec_of()
    state = settled(spec, has(torch=TORCH, numpy=spec.lock.versions["numpy"]))
    assert plan(spec, state).changes == () and drift.findings(spec, state) == []


@pytest.mark.parametrize(("seen", "given", "said"), [
    (None, {}, f"{PYTHON} cannot be run"),
    (has(torch=TORCH).model_copy(update={"python": "3.10.4"}), {}, f"{PYTHON} is Python 3.10.4, not 3.12"),
    (has(torch="2.8.0"), {"versions": {"torch": "==2.9.*"}}, f"{PYTHON} has torch 2.8.0"),
    (has(numpy="2.0"), {"versions": {"torch": "==2.9.*"}}, f"{PYTHON} lacks torch"),
])  # fmt: skip
def test_what_is_not_as_declared_stops_the_host_before_anything_is_installed(
    seen: SeenAdopted | None, given: dict[str, Any], said: str
) -> None:
    spec = spec_of(**given)
    found = plan(spec, empty_state(spec, adopted=seen))
    (change,) = found.of(p.ADOPT)
    assert change.blocked and said in str(change) and "\n    -> " in str(change)
    assert found.of(p.SYNC) == []


def test_what_was_changed_since_it_was_adopted_stops_the_host_until_it_is_accepted() -> None:
    spec, pinned = spec_of(), lab_spec().lock.versions
    state = settled(spec, has(torch=TORCH, numpy=pinned["numpy"]))
    edited = has(torch=TORCH, numpy=pinned["numpy"])
    rows = edited.distributions | {"torch": edited.distributions["torch"].model_copy(update={"content": "other"})}
    state = state.model_copy(update={"adopted": edited.model_copy(update={"distributions": rows})})
    (change,) = plan(spec, state).of(p.ADOPT)
    assert change.blocked and f"torch of {PYTHON} is not what was adopted" in str(change)
    finding = next(each for each in drift.findings(spec, state) if each.step == p.ADOPT)
    assert finding.expected == f"{TORCH}, as it was adopted" and "torch.py was written last" in finding.found
    assert finding.kind == "corrective" and "have its keeper put it back" in finding.mend
    willing = spec_of(changes="accept")
    found = plan(willing, state)
    assert [str(change) for change in found.of(p.ADOPT)] == [
        f"torch: expected {TORCH}, as it was adopted, found {TORCH}, other files (torch.py was written last)"
    ]
    assert all(found.of(step)[0].follows for step in (p.VERIFY, p.PROBE, p.CONFIG))
    assert "start" in server_actions(willing, state)
    _, clear, _ = adopt_commands(willing, state)
    assert clear.line.partition(" rm -rf -- ")[2].startswith(spec.cache), "what was compiled against another torch"
    assert willing.spec_digest == spec.spec_digest, "whether changes are accepted changes nothing of what is served"


def test_what_it_no_longer_brings_comes_into_the_venv() -> None:
    spec, pinned = spec_of(), lab_spec().lock.versions
    state = settled(spec, has(torch=TORCH, numpy=pinned["numpy"]))
    state = state.model_copy(update={"adopted": has(torch=TORCH, numpy="99.0")})
    found = plan(spec, state)
    assert [str(change) for change in found.of(p.SYNC)] == [f"numpy: expected {pinned['numpy']}, found absent"]
    assert [str(c) for c in found.of(p.ADOPT)] == [f"1 distributions of {PYTHON}: expected on record, found others"]


def test_it_is_let_go() -> None:
    adopting = spec_of()
    state, spec = settled(adopting, has(torch=TORCH)), lab_spec()
    found = plan(spec, state.model_copy(update={"adopted": None}))
    (change,) = found.of(p.ADOPT)
    assert str(change).startswith(f"{spec.paths.bridge('3.12')}: expected absent")
    assert [str(change) for change in found.of(p.SYNC)] == [f"torch: expected {TORCH}, found absent"]
    stamps, bridge = map(request_of, adopt_commands(spec, state))
    assert stamps == {"files": [], "remove": STAMPS}
    assert bridge == {"files": [], "remove": sorted([spec.paths.bridge("3.12"), spec.paths.adopted])}
    assert drift.kind(change, {"adopt": PYTHON}, {}) == "intentional"


def test_the_commands() -> None:
    spec = spec_of()
    state = empty_state(spec, adopted=has(torch=TORCH))
    stamps, request = map(request_of, adopt_commands(spec, state))
    assert stamps == {"files": [], "remove": STAMPS}, "before anything else: a deploy that is killed proves it again"
    bridge, kept = (file["text"] for file in request["files"])
    assert bridge.splitlines()[1:] == [SITE, OTHERS], "folders, and no code"
    assert f'"torch": [\n   "{TORCH}",' in kept and request["remove"] == []
    lock = request_of(sync_venv(spec, state)[0])["files"][0]["text"]
    assert lock == adopt.own_lock(spec, state).text


def test_its_folders_get_no_compiled_modules_and_its_programs_are_found() -> None:
    spec, own = spec_of(), lab_spec()
    env = spec.environment(spec.tier)
    assert env["PATH"].split(":")[:2] == [f"{spec.paths.venv}/bin", "/opt/vendor/bin"]
    assert env["PYTHONPYCACHEPREFIX"] == f"{spec.cache}/pycache"
    (proofs,) = verify_runtime(spec)
    assert request_of(proofs)["python"] == [spec.python, "-X", f"pycache_prefix={spec.cache}/pycache"]
    assert "PYTHONPYCACHEPREFIX" not in own.environment(own.tier) and own.python_options == []


def test_patches_go_in_place_where_the_group_says_so_and_nothing_is_ever_installed_there() -> None:
    spec = spec_of(patch_in_place=True)
    seen = has(torch=TORCH, sglang="0.5.9", flashinfer_python="0.6.3")
    patch = spec.patches[0]
    pristine = SeenFile(sha256=patch.pre_sha256, size=1, mode=0o644)
    state = settled(spec, seen)
    found = state.model_copy(update={"patched": state.patched | {patch.file: pristine}, "manifest": {}})
    (commands,) = [request_of(each) for each in apply_patches(spec, found)]
    (item,) = commands["files"]
    assert (item["site"], item["path"]) == (SITE, patch.file)
    for there in (None, SeenFile(sha256="f" * 64, size=1, mode=0o644)):
        odd = state.model_copy(update={"patched": state.patched | {patch.file: there}})
        decision = next(each for each in decide(spec, odd) if each.file.path == patch.file)
        assert decision.action is Action.STOP
        (change,) = plan(spec, odd).of(p.APPLY)
        assert change.blocked and "adopted and never installed into" in str(change)
    before = runs_on(spec, state)[p.INSTALLED]
    assert runs_on(spec, found)[p.INSTALLED] != before, "a patch in place is a file that the server runs from"


@pytest.mark.parametrize(("given", "said"), [
    ({"interpreter": "/usr/bin/python3.12"}, "names the interpreter, as `interpreter` or `python_download` does"),
    ({"python_download": True}, "names the interpreter"),
    ({"adopt": {"interpreter": PYTHON, "versions": {"jax": ">=2"}}}, '"jax" is not a distribution of stack'),
    ({"adopt": {"interpreter": PYTHON, "versions": {"sglang": "==0.5.9"}}}, "sglang carries patches, so it comes into"),
    ({"adopt": {"interpreter": "python3"}}, "interpreter"),
    ({"adopt": {"interpreter": PYTHON, "versions": {"torch": "2.9"}}}, "torch"),
])  # fmt: skip
def test_bad_input(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputErrors) as error:
        lab_spec(**{"adopt": {"interpreter": PYTHON}} | given)
    assert said in str(error.value)


def test_another_interpreter_is_another_runtime() -> None:
    digests = {lab_spec().runtime_digest, spec_of().runtime_digest, spec_of(versions={"torch": ">=2"}).runtime_digest}
    assert len(digests) == 3


def test_what_was_seen_on_the_locks_versions_says_nothing_of_others() -> None:
    blocked = {"tier": "piecewise", "allow_blocked": True}
    known, other = (
        gpu_spec(adopt={"interpreter": PYTHON, "versions": v, "patch_in_place": True}, **blocked)
        for v in ({}, {"sglang": ">=0.5"})
    )
    digest = known.patch_set_digest
    seen = Evidence(seen="2026-11-30", what="it served", versions={"sglang": "0.5.9"}, patch_set=digest)
    tier = known.tier.model_copy(update={"status": "works", "evidence": [seen]})
    assert (known.standing(tier).status, other.standing(tier).status) == ("works", "open")
    assert "sglang 0.5.9 (now >=0.5, adopted)" in other.standing(tier).why


def test_another_interpreter_is_the_groups_own_change() -> None:
    state, other = settled(spec_of(), has(torch=TORCH)), "/opt/other/bin/python"
    spec = lab_spec(adopt={"interpreter": other})
    state = state.model_copy(update={"adopted": has(torch=TORCH).model_copy(update={"sites": ["/opt/other/site"]})})
    (change,) = plan(spec, state).of(p.ADOPT)
    assert not change.blocked and drift.kind(change, {"adopt": PYTHON}, {"adopt": other}) == "intentional"


def test_folders_that_its_distributions_name_are_seen_too() -> None:
    seen = has(torch=TORCH)
    rows = {"torch": seen.distributions["torch"].model_copy(update={"folders": [f"{SITE}/torch/more"]})}
    bridge = adopt.bridge(spec_of(), empty_state(spec_of(), adopted=seen.model_copy(update={"distributions": rows})))
    assert bridge and bridge.text.splitlines()[1:] == [SITE, OTHERS, f"{SITE}/torch/more"]


def test_no_wheels_are_asked_for_where_it_cannot_be_adopted() -> None:
    spec = lab_spec(adopt={"interpreter": PYTHON}, wheelhouse="nowhere")
    found = plan(spec, empty_state(spec, adopted=None))
    assert found.of(p.WHEELS) == [] and "cannot be run" in str(found.of(p.ADOPT)[0])


@pytest.mark.parametrize("root", ["/var/lib/gpuwright", "/var/lib/gpuwright/one", "/var/lib"])
def test_a_root_may_not_hold_what_root_keeps_of_hosts(root: str) -> None:
    with pytest.raises(InputErrors, match="where root keeps the settings of hosts"):
        lab_spec(root=root)
