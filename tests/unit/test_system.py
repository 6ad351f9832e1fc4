"""Settings of the host: what differs, what keeps them, what is put back, and what nobody may declare."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuwright import plan as p
from gpuwright import system
from gpuwright.errors import InputErrors
from gpuwright.node import NodeCommand, script, set_host
from gpuwright.plan import plan
from gpuwright.spec import NodeSpec
from gpuwright.state import NodeState, SeenFolder
from gpuwright.system import Declared, SystemRows, declared, files, gaps, kept_in, row_errors, stale, waiting
from gpuwright.yamlfile import Origin
from tests.machines import GIB, SLOTS, Recorded, blackwell, machine, readings
from tests.make import ROOT, catalogue, empty_state, gpu_spec, lab_spec, seen, settled_state

ROWS = catalogue().system
GOVERNOR = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
THP = "/sys/kernel/mm/transparent_hugepage/enabled"


def of(**wanted: Any) -> tuple[Declared, ...]:
    return declared(ROWS, {name.replace("_", "-"): value for name, value in wanted.items()})


GOOD: dict[str, Any] = {
    "packages": {"manager": "apt", "installed": {n: {"version": "1", "held": False} for n in ("libnuma1", "numactl")}, "available": []},
    "sysctls": {"kernel.numa_balancing": "0"},
    "kernel_files": {GOVERNOR: {"performance": 8}},
    "mounts": {"shm": {"size": 64 * GIB}},
    "limits": {"nofile": [1024, 1048576], "memlock": [None, None], "nr_open": 1048576},
    "services": {"nvidia-persistenced.service": {"load": "loaded", "active": "active", "enabled": "enabled"}},
    "gpus": [{"slot": s, "power_min_w": 300, "power_max_w": 600, "power_limit_w": 450} for s in SLOTS],
    "module_options": {"nvidia_uvm.uvm_disable_hmm": "Y"},
}  # fmt: skip
EVERY = of(numa=True, numa_balancing=True, governor=True, shared_memory=True, persistence=True, power_limit=450,
           open_files=True, uvm_no_hmm=True)  # fmt: skip


def said(settings: tuple[Declared, ...], problems: dict[str, str] | None = None, **changed: Any) -> list[str]:
    found = {name: value for name, value in (GOOD | changed).items() if name not in (problems or {})}
    return [
        f"{g.what}: {g.expected}, {g.found}{' BLOCKED ' + g.blocked if g.blocked else ''}"
        for g in gaps(settings, found, problems or {})
    ]


def test_what_is_as_declared_is_no_gap() -> None:
    assert said(EVERY) == [] and waiting(EVERY, GOOD) == []


@pytest.mark.parametrize(("settings", "changed", "expected"), [
    (of(numa=True), {"packages": {"manager": "apt", "installed": {}, "available": []}},
     ["package libnuma1: installed, absent", "package numactl: installed, absent"]),
    (of(numa=True), {"packages": {"manager": "dnf", "installed": {}, "available": []}},
     ["package numactl-libs: installed, absent", "package numactl: installed, absent"]),
    (of(numa=True), {"packages": {"manager": None, "installed": {}, "available": []}},
     ["packages: libnuma1, numactl, none BLOCKED the node has neither apt nor dnf"]),
    (of(cuda_toolkit=True), {"packages": {"manager": "apt", "installed": {}, "available": []}}, []),
    (of(cuda_toolkit=True), {"packages": {"manager": "apt", "installed": {}, "available": ["cuda-toolkit-12-8"]}},
     ["package cuda-toolkit-12-8: installed, absent"]),
    (of(numa_balancing=True), {"sysctls": {"kernel.numa_balancing": "1"}}, ["kernel.numa_balancing: 0, 1"]),
    (of(numa_balancing=True), {"sysctls": {"kernel.numa_balancing": None}},
     ["kernel.numa_balancing: 0, none BLOCKED this kernel has no such setting"]),
    (of(governor=True), {"kernel_files": {GOVERNOR: {"performance": 6, "powersave": 2}}}, [f"{GOVERNOR}: performance, powersave in 2 of 8"]),
    (of(governor=True), {"kernel_files": {GOVERNOR: {}}}, []),
    (of(shared_memory=96), {}, ["/dev/shm: 96 GiB, 64 GiB"]),
    (of(shared_memory=32), {}, []),
    (of(open_files=2000000), {}, ["open files: 2000000, 1048576 at most BLOCKED fs.nr_open is 1048576, and a login whose limit is above it is refused"]),
    (of(persistence=True), {"services": {"nvidia-persistenced.service": {"load": "loaded", "active": "inactive", "enabled": "disabled"}}},
     ["nvidia-persistenced.service: enabled, active, disabled, inactive"]),
    (of(persistence=True), {"services": {}},
     ["nvidia-persistenced.service: enabled, active, none BLOCKED the node has no unit nvidia-persistenced.service"]),
    (of(power_limit=450), {"gpus": [GOOD["gpus"][0] | {"power_limit_w": 600}]}, ["power of 0000:01:00.0: 450 W, 600 W"]),
    (of(power_limit=700), {"gpus": GOOD["gpus"][:1]}, ["power of 0000:01:00.0: 700 W, 450 W BLOCKED it takes 300 to 600 W"]),
    (of(power_limit=450), {"gpus": [GOOD["gpus"][0] | {"power_min_w": None}]},
     ["power of 0000:01:00.0: 450 W, unknown BLOCKED this GPU tells no power limits"]),
    (of(hold_driver=True), {"packages": {"manager": "apt", "installed": {"nvidia-driver-580": {"version": "1", "held": False}, "gcc": {"version": "1", "held": False}}, "available": []}},
     ["package nvidia-driver-580: held, not held"]),
    (of(hold_driver=True), {"packages": {"manager": "dnf", "installed": {}, "available": []}},
     ["holds: apt, dnf BLOCKED only apt can hold packages back"]),
])  # fmt: skip
def test_what_is_not_as_declared(settings: tuple[Declared, ...], changed: dict[str, Any], expected: list[str]) -> None:
    assert said(settings, **changed) == expected


def test_what_could_not_be_observed_is_not_taken_for_set() -> None:
    assert said(of(power_limit=450), {"gpus": "nvidia-smi is not installed"}) == [
        "power_limit: 450, unknown BLOCKED nvidia-smi is not installed"
    ]
    for name, (reading, _) in system.KINDS.items():
        rows = tuple(e for e in (*EVERY, *of(hold_driver=True)) if e.kind == name)
        lines = said(rows, {reading: "refused"})
        assert lines and all(line.endswith("BLOCKED refused") for line in lines), name


def test_a_module_option_waits_for_a_reboot_and_is_not_called_done() -> None:
    loaded = {"module_options": {"nvidia_uvm.uvm_disable_hmm": "N"}}
    assert said(of(uvm_no_hmm=True), **loaded) == [], "a deploy can do no more"
    assert waiting(of(uvm_no_hmm=True), loaded) == ["uvm-no-hmm: nvidia_uvm.uvm_disable_hmm is N, and Y after a reboot"]
    assert waiting(of(uvm_no_hmm=True), {"module_options": {"nvidia_uvm.uvm_disable_hmm": None}}) == []


def test_what_else_is_not_done_yet_is_said() -> None:
    session = {"limits": {"nofile": [1024, 4096], "memlock": [8388608, 8388608], "nr_open": 1048576}}
    assert waiting(of(open_files=True, locked_memory=True), session) == [
        "open-files: this session's nofile is 4096, and 1048576 in a new login (what supervisor runs: after its restart)",
        "locked-memory: this session's memlock is 8388608, and unlimited in a new login (what supervisor runs: after its restart)",
    ]
    nowhere = {"packages": {"manager": "apt", "installed": {}, "available": []}}
    assert waiting(of(cuda_toolkit=True), nowhere) == [
        "cuda-toolkit: no repository that the node knows has cuda-toolkit-12-8"
    ]


def test_values_cannot_run_code_at_boot() -> None:
    text = files(of(governor="x; rm -rf /"), "/opt/my root", "u")
    assert (
        "do if [ -e \"$file\" ]; then echo 'x; rm -rf /' >"
        in text["/var/lib/gpuwright/opt/my root/boot_settings.sh"][0]
    )
    assert (
        'ExecStart=/bin/sh "/var/lib/gpuwright/opt/my root/boot_settings.sh"'
        in text["/etc/systemd/system/u-settings.service"][0]
    )


def test_the_files_that_keep_them_over_a_reboot() -> None:
    found = files(EVERY, "/opt/gpuwright", "sglang")
    texts = {path: text for path, (text, _) in found.items()}
    assert all(
        "# Written by gpuwright for /opt/gpuwright: " in text.splitlines()[path.endswith(".sh")]
        for path, text in texts.items()
    )
    assert texts["/etc/sysctl.d/90-sglang.conf"].splitlines()[1:] == ["kernel.numa_balancing = 0"]
    assert texts["/etc/modprobe.d/90-sglang.conf"].splitlines()[1:] == ["options nvidia_uvm uvm_disable_hmm=1"]
    assert texts["/etc/security/limits.d/90-sglang.conf"].splitlines()[1:] == [
        "* - nofile 1048576",
        "root - nofile 1048576",
    ]
    assert texts["/var/lib/gpuwright/opt/gpuwright/boot_settings.sh"].splitlines()[2:] == [
        f'for file in {GOVERNOR}; do if [ -e "$file" ]; then echo performance > "$file"; fi; done',
        "mount -o remount,size=64G /dev/shm", "nvidia-smi --power-limit=450",
    ]  # fmt: skip
    unit = texts["/etc/systemd/system/sglang-settings.service"]
    assert "After=nvidia-persistenced.service\nBefore=sglang.service\n" in unit
    assert files(of(numa=True, persistence=True), ROOT, "sglang") == {}, "what lasts by itself needs no file"


def test_the_boot_script_is_good_shell(tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "boot.sh"
    path.write_text(files(EVERY, ROOT, "u")[f"{kept_in(ROOT)}/boot_settings.sh"][0])
    assert subprocess.run(["sh", "-n", path]).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", "-s", "sh", path], capture_output=True, text=True).stdout == ""


def test_what_is_no_longer_declared_is_put_back() -> None:
    manifest = {"settings": {e.id: {"kind": e.kind, "target": e.target, "before": "x"} for e in EVERY}}
    assert stale(EVERY, manifest) == {}
    assert set(stale(of(numa=True), manifest)) == {e.id for e in EVERY} - {"numa"}
    manifest["settings"]["numa-balancing"]["target"] = "sysctl:kernel.other"
    assert set(stale(EVERY, manifest)) == {"numa-balancing"}, "its row sets something else by now"


# --- in the plan ----------------------------------------------------------------------------------------------------


def request_of(command: NodeCommand) -> Any:
    return json.loads(json.loads(command.stdin.split("REQUEST = json.loads(", 1)[1].split("\n", 1)[0][:-1]))


def changes(spec: NodeSpec, state: NodeState) -> list[str]:
    return [str(change) for change in plan(spec, state).of(p.SETTINGS)]


def test_a_settled_node_has_nothing_to_set_and_a_lab_declares_nothing() -> None:
    spec = gpu_spec()
    assert changes(spec, settled_state(spec)) == [] and changes(lab_spec(), empty_state(lab_spec())) == []


def test_one_that_cannot_be_made_does_not_keep_the_others_from_being_made() -> None:
    spec = gpu_spec(system={"persistence": True, "numa-balancing": True})
    state = seen(empty_state(spec, machine_readings=readings(blackwell(), spec)), "services", {})
    assert [change.blocked for change in plan(spec, state).of(p.SETTINGS)].count(True) == 1
    (command,) = set_host(spec, state)
    assert [row["id"] for row in request_of(command)["apply"]] == ["numa-balancing"]
    blocked = gpu_spec(system={"open-files": 2000000, "swappiness": True})
    made = empty_state(blocked, machine_readings=readings(blackwell(), blocked))
    assert [file["path"] for file in request_of(set_host(blocked, made)[0])["files"]] == [
        "/etc/sysctl.d/90-sglang-server.conf"
    ]


@pytest.mark.parametrize(("changed", "said"), [
    ({"system_manifest": None}, "system.json cannot be read, and it says what was there before us"),
    ({"folders": {kept_in(ROOT): SeenFolder(mode=0o755, uid=1000)}}, "belongs to uid 1000, and what lies there would be run by root"),
    ({"system_owners": {"/etc/sysctl.d/90-sglang-server.conf": ""}}, "/etc/sysctl.d/90-sglang-server.conf is not of gpuwright"),
    ({"system_owners": {"/etc/sysctl.d/90-sglang-server.conf": "/srv/other"}}, "is of gpuwright's root /srv/other"),
])  # fmt: skip
def test_what_would_do_harm_stops_the_host(changed: dict[str, Any], said: str) -> None:
    spec = gpu_spec(system={"swappiness": True})
    found = plan(spec, settled_state(spec, **changed)).of(p.SETTINGS)
    assert any(change.blocked and said in str(change) for change in found), found


def test_a_disabled_boot_unit_is_found() -> None:
    spec = gpu_spec(system={"shared-memory": 64})
    state = settled_state(spec, systemd=True)
    units = state.readings["services"] | {
        spec.settings_unit: {"load": "loaded", "active": "inactive", "enabled": "disabled"}
    }
    assert changes(spec, seen(state, "services", units)) == [
        "sglang-server-settings.service: expected enabled, found disabled"
    ]
    assert (
        spec.settings_unit in spec.asked["services"]
        and gpu_spec(system={}).settings_unit not in gpu_spec(system={}).asked["services"]
    )


def test_power_and_clocks_are_part_of_what_a_benchmark_is_of() -> None:
    plain = gpu_spec(system={})
    assert plain.spec_digest == gpu_spec(system={"numa": True}).spec_digest
    digests = {
        gpu_spec(system=system).spec_digest
        for system in ({}, {"power-limit": 450}, {"power-limit": 300}, {"governor": True})
    }
    assert len(digests) == 4


def test_a_fresh_node_is_set() -> None:
    spec = gpu_spec(system={"numa-balancing": True, "power-limit": 450})
    state = empty_state(spec, machine_readings=readings(blackwell(), spec))
    state = seen(state, "sysctls", {"kernel.numa_balancing": "1"})
    found = changes(spec, state)
    assert found[0] == "numa-balancing: kernel.numa_balancing: expected 0, found 1"
    assert sum("power of 0000:" in line for line in found) == 8
    assert any("/etc/sysctl.d/90-sglang-server.conf: expected sha256" in line for line in found)
    assert not any("/etc/systemd/" in line for line in found), "this state has no systemd"
    assert found[-2:] == [
        f"{name}: on record, with what was there before: expected yes, found no"
        for name in ("numa-balancing", "power-limit")
    ]


def test_settings_need_root_and_one_that_cannot_be_made_stops_the_host() -> None:
    spec = gpu_spec()
    (change,) = plan(spec, settled_state(spec, uid=1000)).of(p.SETTINGS)
    assert change.blocked and "settings_sudo = True" in str(change)
    asked = gpu_spec(settings_sudo=True)
    assert not plan(asked, settled_state(asked, uid=1000)).of(p.SETTINGS)
    gone = seen(settled_state(spec), "services", {})
    (change,) = plan(spec, gone).of(p.SETTINGS)
    assert change.blocked and "take persistence out of `system` in group_data" in str(change)


def test_what_an_earlier_deploy_set_is_put_back_and_its_files_go() -> None:
    before = gpu_spec(system={"swappiness": True})
    state = settled_state(before)
    spec = gpu_spec(system={})
    assert changes(spec, state) == [
        "swappiness: sysctl:vm.swappiness: expected as it was before, found 1 by us",
        "/etc/sysctl.d/90-sglang-server.conf: expected absent, found a file of settings that are no longer declared",
    ]


def test_the_request_of_the_node_script() -> None:
    spec = gpu_spec(system={"numa": True, "swappiness": 10, "hold-driver": True, "cuda-toolkit": True})
    made = empty_state(spec, machine_readings=readings(blackwell(), spec), systemd=True)
    (command,) = set_host(spec, made)
    request = request_of(command)
    assert request["manifest"] == f"{kept_in(ROOT)}/system.json" and request["unit"] == "sglang-server-settings.service"
    rows = {row["id"]: row for row in request["apply"]}
    assert rows["swappiness"] == {"id": "swappiness", "kind": "sysctl", "target": "sysctl:vm.swappiness", "value": "10"}
    assert rows["numa"]["manager"] == "apt" and rows["numa"]["names"] == ["libnuma1", "numactl"]
    assert rows["cuda-toolkit"]["names"] == ["cuda-toolkit-12-8"] and rows["hold-driver"]["prefixes"][0] == "nvidia-"
    assert [file["path"] for file in request["files"]] == ["/etc/sysctl.d/90-sglang-server.conf"]
    assert command.streamed and "flock" in command.line


# --- what nobody may declare ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "said"), [
    ({"system": {"governer": True}}, 'system: there is no setting "governer"\n    did you mean "governor"?'),
    ({"system": {"power-limit": True}}, "power-limit: needs a value of your own"),
    ({"system": {"power-limit": "a lot"}}, "power-limit: should be a whole number above 0; found 'a lot'"),
    ({"system": {"numa-balancing": False}}, "is False: what is not wanted is left out"),
    ({"system": {"open-files": "unlimited"}}, "open-files: should be a whole number; found 'unlimited'"),
    ({"system": {"uvm-no-hmm": 0}}, "uvm-no-hmm: a row of kind module_option has no value: set it to True; found 0"),
    ({"model": {"kind": "hub", "path": "/m", "repo": "../b", "revision": "a" * 40}}, "model.repo: String should match"),
    ({"model": {"kind": "hub", "path": "/m", "repo": "a/b", "revision": "a" * 40, "endpoint": "https://u:hf_abc@h"}}, "holds credentials"),
    ({"system": {"numa": 3}}, "numa: a row of kind packages has no value: set it to True; found 3"),
    ({"system": {"swappiness": "1\n2"}}, "swappiness: should be a text of one line"),
    ({"gpu": None}, "gpu: is missing"),
    ({"gpu": {"count": 8, "name": "x", "compute_capability": "9.0", "memory_gib": 80}}, "compute_capability is 9.0, and ladder glm5-nvfp4 is for 12.0"),
    ({"gpu": {"count": 4, "name": "x", "compute_capability": "12.0", "memory_gib": 80}}, "count is 4, and ladder glm5-nvfp4 needs 8 on each host"),
    ({"gpu": {"count": 8, "name": "x", "compute_capability": "12.0", "memory_gib": 80, "slots": ["c1:00.0"]}}, "gpu.slots[0]: String should match"),
    ({"gpu": {"count": 8, "name": "x", "compute_capability": "12.0", "memory_gib": 80, "slots": SLOTS[:7]}}, "gpu: slots names 7, and count is 8"),
    ({"ignored_checks": {"gpu-mgi": "we know that"}}, 'there is no check "gpu-mgi"\n    did you mean "gpu-mig"?'),
    ({"ignored_checks": {"gpu-mig": " "}}, "is not a reason"),
    ({"unit": "sglang-settings"}, "ends in -settings"),
    ({"model": {"kind": "hub", "path": "/m", "repo": "a/b", "revision": "main"}}, "is not a commit, which has 40 hex digits"),
    ({"model": {"kind": "hub", "path": "/m", "repo": "a/b", "revision": "a" * 40, "token": "hf_abc"}}, "is not env:NAME or file:PATH"),
])  # fmt: skip
def test_bad_declarations_are_refused_by_name(data: dict[str, Any], said: str) -> None:
    with pytest.raises(InputErrors) as raised:
        gpu_spec(**data)
    assert said in str(raised.value)
    assert "hf_abc" not in str(raised.value), "it may be the secret itself"


def test_rows_of_the_catalogue_are_checked() -> None:
    twice = SystemRows(settings=[ROWS["numa"], ROWS["numa"], ROWS["persistence"].model_copy(update={"value": 3})])
    said = [str(error) for error in row_errors(twice, Origin(Path("system.yaml"), {}))]
    assert any('"numa" is used twice' in each for each in said) and any(
        "kind service has no value" in each for each in said
    )


# --- the node script, where it needs no root of its own ----------------------------------------------------------------


SMI = """#!/bin/sh
# Stands for nvidia-smi: it keeps each card's limit in a file.
case "$*" in
  --query-gpu=pci.bus_id*) for slot in 01 21; do echo "00000000:$slot:00.0, $(cat {at}/$slot)"; done ;;
  --power-limit=*) for slot in 01 21; do echo "${{1#--power-limit=}}.00" > {at}/$slot; done ;;
  --id=*) slot=$(echo "$1" | cut -d: -f2); echo "${{2#--power-limit=}}" > {at}/$slot ;;
esac
"""


def settings(folder: Path, **request: Any) -> subprocess.CompletedProcess[str]:
    fixed = {
        "root": str(folder),
        "manifest": str(folder / "system.json"),
        "apply": [],
        "revert": {},
        "files": [],
        "remove": [],
        "unit": None,
    }
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, "-I", "-u", "-"], input=script("settings", fixed | request), capture_output=True, text=True,
        env=os.environ | path, timeout=60,
    )  # fmt: skip


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    for slot, watts in (("01", "600.00"), ("21", "575.00")):
        (tmp_path / slot).write_text(watts)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI.format(at=tmp_path))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return tmp_path


POWER = {"id": "power-limit", "kind": "power_limit", "target": "power_limit", "value": "450"}


def test_a_power_limit_is_set_and_each_card_gets_its_own_back(cards: Path) -> None:
    """No machine of ours lets the limit be changed, so a stand-in keeps it; its options are nvidia-smi's."""
    assert settings(cards, apply=[POWER]).returncode == 0
    assert [(cards / slot).read_text().strip() for slot in ("01", "21")] == ["450.00", "450.00"]
    again = settings(cards, apply=[POWER | {"value": "400"}])
    assert again.stdout == "power-limit: 400\n"
    kept = json.loads((cards / "system.json").read_text())["settings"]
    assert kept["power-limit"]["before"] == {"00000000:01:00.0": "600.00", "00000000:21:00.0": "575.00"}
    assert settings(cards, revert=kept).stdout == "power-limit: as it was before\n"
    assert [(cards / slot).read_text().strip() for slot in ("01", "21")] == ["600.00", "575.00"]
    assert json.loads((cards / "system.json").read_text())["settings"] == {}


def test_what_was_there_is_on_record_before_anything_is_changed(cards: Path) -> None:
    """A tool that fails in the middle, as a run that is killed there, leaves what can be put back."""
    tool = cards / "nvidia-smi"
    tool.write_text(tool.read_text().replace("--power-limit=*)", "--power-limit=*) echo no permission; exit 4;"))
    done = settings(cards, apply=[POWER])
    assert done.returncode == 1 and "power-limit: nvidia-smi --power-limit=450: no permission" in done.stdout
    assert (
        json.loads((cards / "system.json").read_text())["settings"]["power-limit"]["before"]["00000000:01:00.0"]
        == "600.00"
    )


def test_one_that_fails_does_not_keep_the_others_from_being_set(cards: Path) -> None:
    bad = {"id": "x", "kind": "sysctl", "target": "sysctl:kernel.no_such_thing", "value": "1"}
    file = {"path": str(cards / "sysctl.d" / "90.conf"), "text": "a\n", "mode": 0o644}
    done = settings(cards, apply=[bad, POWER], files=[file])
    assert done.returncode == 1 and "x: [Errno 2]" in done.stdout and "power-limit: 450" in done.stdout
    assert (cards / "01").read_text().strip() == "450.00" and Path(file["path"]).read_text() == "a\n"
    kept = json.loads((cards / "system.json").read_text())
    assert set(kept["settings"]) == {"power-limit"} and kept["files"] == [file["path"]]
    gone = settings(cards, remove=[file["path"]])
    assert gone.returncode == 0 and not Path(file["path"]).exists()
    assert json.loads((cards / "system.json").read_text())["files"] == []


def test_a_card_that_is_gone_does_not_keep_the_others_from_getting_theirs_back(cards: Path) -> None:
    assert settings(cards, apply=[POWER]).returncode == 0
    kept = json.loads((cards / "system.json").read_text())["settings"]
    kept["power-limit"]["before"] = {"00000000:11:00.0": "600.00", **kept["power-limit"]["before"]}
    done = settings(cards, revert=kept)
    assert done.returncode == 0 and "the GPU in 00000000:11:00.0 is no more: nothing to put back" in done.stdout
    assert [(cards / slot).read_text().strip() for slot in ("01", "21")] == ["600.00", "575.00"]


def test_values_of_kernel_files_are_set_and_each_gets_its_own_back(tmp_path: Path) -> None:
    """On files of our own, with the kernel's form of a choice; no machine of ours has a governor."""
    for number, text in enumerate(("powersave", "[always] defer+madvise never", "performance")):
        (tmp_path / f"cpu{number}").write_text(text + "\n")
    row = {"id": "g", "kind": "kernel_file", "target": f"kernel_file:{tmp_path}/cpu*", "value": "performance"}
    assert settings(tmp_path, apply=[row]).stdout == "g: performance\n"
    assert {path.read_text() for path in tmp_path.glob("cpu*")} == {"performance"}
    kept = json.loads((tmp_path / "system.json").read_text())["settings"]
    assert list(kept["g"]["before"].values()) == ["powersave", "always", "performance"]
    (tmp_path / "cpu1").unlink()
    assert settings(tmp_path, revert=kept).returncode == 0
    assert [(tmp_path / f"cpu{n}").read_text() for n in (0, 2)] == ["powersave", "performance"]


def test_a_kernel_file_offers_words_with_signs() -> None:
    assert machine.chosen(Recorded({"/sys/x": "always [defer+madvise] never\n"}, {}, {}), "/sys/x") == "defer+madvise"


def test_what_was_there_before_is_not_lost_where_a_row_sets_something_else_by_now(tmp_path: Path) -> None:
    """Its old target cannot be put back: then the new one is not made, for the record would take ours for theirs."""
    (tmp_path / "new").write_text("theirs\n")
    old = {"kind": "sysctl", "target": "sysctl:vm/swappiness/x", "before": "60", "value": "1"}
    (tmp_path / "system.json").write_text(json.dumps({"settings": {"g": old}, "files": []}))
    row = {"id": "g", "kind": "kernel_file", "target": f"kernel_file:{tmp_path}/new", "value": "ours"}
    broken = old | {"kind": "power_limit"}
    done = settings(tmp_path, revert={"g": broken}, apply=[row])
    assert done.returncode == 1 and (tmp_path / "new").read_text() == "theirs\n"
    assert json.loads((tmp_path / "system.json").read_text())["settings"]["g"] == old


def test_a_damaged_record_of_one_setting_does_not_end_the_others(cards: Path) -> None:
    done = settings(cards, revert={"x": {"kind": "power_limit", "target": "power_limit"}}, apply=[POWER])
    assert done.returncode == 1 and "x: 'before'" in done.stdout and (cards / "01").read_text().strip() == "450.00"


def test_a_file_that_is_somebody_else_s_by_now_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name, first in (("ours", f"# Written by gpuwright for {tmp_path / 'elsewhere'}: x"), ("theirs", "# by hand")):
        (tmp_path / name).write_text(first + "\n")
    done = settings(tmp_path / "elsewhere", remove=[str(tmp_path / "ours"), str(tmp_path / "theirs")])
    assert "theirs is not ours any more: left as it is" in done.stdout and done.returncode == 0
    assert not (tmp_path / "ours").exists() and (tmp_path / "theirs").exists()


def test_a_run_that_is_killed_leaves_a_record_of_what_was_there(cards: Path) -> None:
    """SIGKILL while the tool is at work: the next run puts back, or goes on."""
    import time

    tool = cards / "nvidia-smi"
    whole = tool.read_text()
    tool.write_text(
        whole.replace(
            "--power-limit=*)", f"--power-limit=*) echo 450.00 > {cards}/01; touch {cards}/begun; exec sleep 30;"
        )
    )
    fixed = {
        "root": str(cards),
        "manifest": str(cards / "system.json"),
        "revert": {},
        "files": [],
        "remove": [],
        "unit": None,
    }
    env = os.environ | {"PATH": f"{cards}:{os.environ['PATH']}"}
    running = subprocess.Popen(
        [sys.executable, "-I", "-u", "-"], stdin=subprocess.PIPE, env=env, text=True, start_new_session=True
    )
    assert running.stdin
    running.stdin.write(script("settings", fixed | {"apply": [POWER]}))
    running.stdin.close()
    deadline = time.monotonic() + 30
    while not (cards / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    tool.write_text(whole)
    kept = json.loads((cards / "system.json").read_text())["settings"]
    assert settings(cards, apply=[POWER]).returncode == 0 and (cards / "21").read_text().strip() == "450.00"
    assert settings(cards, revert=kept).returncode == 0
    assert [(cards / slot).read_text().strip() for slot in ("01", "21")] == ["600.00", "575.00"]


def test_what_an_older_gpuwright_kept_in_a_root_is_taken_over(tmp_path: Path) -> None:
    old, boot, new = (tmp_path / name for name in ("run/system.json", "run/boot_settings.sh", "kept/system.json"))
    old.parent.mkdir()
    boot.write_text("#!/bin/sh\n")
    entry = {"kind": "sysctl", "target": "sysctl:vm.swappiness", "before": "60", "value": "10"}
    old.write_text(json.dumps({"settings": {"swappiness": entry}, "files": [str(boot)]}))
    done = settings(tmp_path, manifest=str(new), remove=[str(boot)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(new.read_text()) == {"settings": {"swappiness": entry}, "files": []}
    assert not old.exists() and not boot.exists()
