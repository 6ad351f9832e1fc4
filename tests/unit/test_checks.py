"""The doctor: every check holds on a good node, fails for its own cause, and is unknown where nothing can be seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpuwright import checks as c
from gpuwright import plan as p
from gpuwright.checks import Examination, Facts, Finding, check_errors, examine, lines
from gpuwright.plan import examine_node, plan
from gpuwright.preflight import facts, shell_failure
from gpuwright.spec import Member, NodeSpec
from gpuwright.state import NodeState, SeenPort
from gpuwright.yamlfile import Origin
from tests.machines import GIB, MACHINES, SLOTS, blackwell, machine, readings
from tests.make import COVERING, ROOT, STOPPED, catalogue, empty_state, gpu_spec, lab_spec, seen, settled_state

GPU = gpu_spec()
LAB = lab_spec()
ROWS = {check.id: check for check in catalogue().checks.checks}
GOVERNOR = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"


def good(spec: NodeSpec = GPU, **changed: Any) -> NodeState:
    """A Blackwell node that has all it needs, systemd among it, and nothing of ours."""
    return empty_state(spec, **({"systemd": True, "model": settled_state(spec).model} | changed))


def finding(name: str, state: NodeState, spec: NodeSpec = GPU) -> Finding:
    return next(each for each in examine_node(spec, state).findings if each.check.id == name)


Edit = Callable[[NodeState], NodeState]


def reading(name: str, edit: Callable[[Any], Any]) -> Edit:
    """A reading with another value: what `edit` makes of a copy, or does to it."""

    def apply(state: NodeState) -> NodeState:
        value = json.loads(json.dumps(state.readings[name]))
        made = edit(value)
        return seen(state, name, value if made is None else made)

    return apply


def field(**changed: Any) -> Edit:
    return lambda state: state.model_copy(update=changed)


def without(command: str) -> Edit:
    return lambda state: state.model_copy(update={"commands": state.commands | {command: None}})


def gpu(key: str, value: Any, number: int = 3) -> Edit:
    return reading("gpus", lambda rows: rows[number].update({key: value}))


def health(key: str, value: Any, number: int = 3) -> Edit:
    return reading("gpu_health", lambda log: log["gpus"][number].update({key: value}))


def log(key: str, value: Any) -> Edit:
    return reading("kernel_log", lambda found: found[key].append(value))


def mount(key: str, value: Any, path: str = "root") -> Edit:
    return reading("mounts", lambda rows: rows[path].update({key: value}))


def option(name: str, value: Any) -> Edit:
    return reading("module_options", lambda rows: rows.update({name: value}))


XID = {"slot": SLOTS[6], "xid": 79, "text": "GPU has fallen off the bus.", "count": 1}
STRANGER = {"pid": 4711, "name": "python3", "memory_mib": 80000}
# What breaks each check, and a word that what is said of it must hold.
BROKEN: dict[str, tuple[Edit, str]] = {
    "driver-loaded": (reading("driver", lambda d: d.update(version=None, open=None)), "none is"),
    "driver-open": (reading("driver", lambda d: d.update(open=False)), "proprietary module 580.126.09"),
    "driver-version": (reading("driver", lambda d: d.update(version="570.25.9")), "570.25.9"),
    "driver-library-match": (reading("libraries", lambda d: d["libcuda.so.1"][0].update(version="580.178.04")), "libcuda 580.178.04"),
    "driver-next-boot": (reading("module_on_disk", lambda d: d.update(version="590.44.01")), "590.44.01"),
    "driver-module-license": (reading("module_on_disk", lambda d: d.update(license="NVIDIA")), "NVIDIA"),
    "nouveau": (reading("modules", lambda d: [*d, "nouveau"]), "it is"),
    "device-nodes": (reading("devices", lambda d: d["nodes"].remove("nvidia7")), "7"),
    "uvm-device": (reading("devices", lambda d: d["nodes"].remove("nvidia-uvm")), "neither"),
    "driver-held": (reading("packages", lambda d: d["installed"]["nvidia-driver-580-server-open"].update(held=False)), "1 are not: nvidia-driver"),
    "uvm-hmm": (option("nvidia_uvm.uvm_disable_hmm", "N"), "N"),
    "reboot-required": (reading("system", lambda d: d.update(reboot_required=True)), "/run/reboot-required"),
    "libcuda-of-the-driver": (reading("libraries", lambda d: d["libcuda.so.1"].append({"path": "/usr/local/cuda/compat/libcuda.so.1", "version": "570.124.06"})), "/usr/local/cuda/compat"),
    "xid-fatal": (log("xids", XID), "Xid 79 of 0000:c1:00.0"),
    "xid-other": (log("xids", XID | {"xid": 31}), "Xid 31"),
    "xid-unlisted": (log("xids", XID | {"xid": 171}), "Xid 171"),
    "gpu-initialised": (log("init_failed", "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:884)"), "RmInitAdapter"),
    "bar-space": (log("no_space", {"slot": SLOTS[0], "text": "pci 0000:01:00.0: BAR 1: can't assign; no space"}), "BAR 1"),
    "pcie-errors": (log("pcie_errors", "pcieport 0000:40:01.0: AER: Multiple Uncorrected (Non-Fatal) error received"), "1, the last: pcieport"),
    "gpu-count": (reading("gpus", lambda rows: rows[:6] + rows[7:]), "7; missing: 0000:c1:00.0"),
    "gpu-lost": (reading("gpus", lambda rows: rows[:6] + rows[7:]), "0000:c1:00.0"),
    "gpu-answers": (reading("pci", lambda rows: rows[6].update(answers=False)), "0000:c1:00.0 reads as ones"),
    "gpu-name": (reading("gpus", lambda rows: [row | {"name": "NVIDIA H200"} for row in rows]), "NVIDIA H200"),
    "gpu-compute-capability": (gpu("compute_capability", "9.0"), "12.0, 9.0"),
    "gpu-memory": (gpu("memory_mib", 49140), "48.0 GiB"),
    "gpu-alike": (gpu("memory_clock_mhz", 12001), "14001, 12001 MHz"),
    "gpu-mig": (gpu("mig", "Enabled"), "on for 0000:61:00.0"),
    "gpu-compute-mode": (gpu("compute_mode", "Exclusive_Process"), "Exclusive_Process"),
    "gpu-persistence": (gpu("persistence", "Disabled"), "off for 1 GPUs"),
    "gpu-power-alike": (gpu("power_limit_w", 450), "600, 450 W"),
    "gpu-slowdown": (health("slowdowns", ["hw_thermal_slowdown"]), "0000:61:00.0: hw_thermal_slowdown at 35 C"),
    "gpu-ecc-errors": (health("ecc_uncorrectable", 2), "0000:61:00.0: 2"),
    "gpu-ecc-alike": (gpu("ecc", "Disabled"), "Enabled, Disabled"),
    "gpu-remap-pending": (health("remap_pending", "Yes"), "pending on 0000:61:00.0"),
    "gpu-remap-failure": (health("remap_failure", "Yes"), "failed on 0000:61:00.0"),
    "gpu-recovery": (health("recovery", "Drain and Reset"), "0000:61:00.0: Drain and Reset"),
    "gpu-strangers": (health("processes", [STRANGER]), "0000:61:00.0: pid 4711 (python3), 80000 MiB"),
    "gpu-wedged": (lambda state: health("memory_used_mib", 624)(health("utilization", 100)(state)), "0000:61:00.0: 100 % busy, 624 MiB"),
    "pcie-width": (gpu("pcie_width", 8), "0000:61:00.0: x8"),
    "pcie-generation": (gpu("pcie_gen", 4), "0000:61:00.0: 4"),
    "bar1-size": (health("bar1_mib", 256), "256 MiB"),
    "gpu-virtual": (health("virtualization", "VGPU"), "VGPU"),
    "fabric": (health("fabric", "In Progress"), "In Progress; nvidia-fabricmanager is inactive"),
    "machine": (field(machine="aarch64"), "aarch64"),
    "glibc": (reading("system", lambda d: d.update(libc="2.27")), "2.27"),
    "python3": (field(python="3.8.10"), "3.8.10"),
    "python3-venv": (field(ensurepip=False), "it lacks ensurepip"),
    "interpreter": (field(interpreter=None), "none that runs"),
    "cc": (without("cc"), "none on PATH"),
    "cxx": (without("c++"), "none on PATH"),
    "gcc-not-too-new": (reading("compilers", lambda d: d.update({"gcc": "15.1.0"})), "15.1.0"),
    "openssl": (without("openssl"), "none"),
    "bash": (without("bash"), "none"),
    "flock": (without("flock"), "none"),
    "nvcc": (reading("toolkit", lambda d: d.update(release=None)), "none"),
    "nvcc-release": (reading("toolkit", lambda d: d.update(release="13.0")), "13.0"),
    "nvcc-architecture": (reading("toolkit", lambda d: d["architectures"].remove("120")), "101 and older"),
    "cuda-headers": (reading("toolkit", lambda d: d["missing"].append("curand.h")), "no curand.h"),
    "python-headers": (reading("python_headers", lambda d: d.update(present=False)), "none"),
    "libnuma": (reading("libraries", lambda d: d.update({"libnuma.so.1": []})), "none in the loader's path"),
    "kernels-cover": (reading("kernels", lambda d: d.update({"torch/lib/libtorch_cuda.so": [90, 100]})), "none in torch/lib/libtorch_cuda.so"),
    "p2p": (reading("p2p", lambda d: d.update({"0-1": "CNS"})), "1 of 28 pairs say CNS"),
    "acs": (reading("lspci", lambda d: d.update(redirecting=["0000:00:01.1"])), "1 bridges: 0000:00:01.1"),
    "iommu": (reading("pci", lambda rows: rows[0].update(iommu="DMA-FQ")), "DMA-FQ"),
    "aspm": (lambda state: reading("cmdline", lambda d: [])(option("pcie_aspm.policy", "[default] performance")(state)), "[default]"),
    "infiniband": (reading("infiniband", lambda d: ["mlx5_0"]), "mlx5_0"),
    "shm-size": (mount("size", 64 << 20, "shm"), "64 MiB"),
    "shm-free": (mount("free", 1 << 20, "shm"), "1 of "),
    "memory": (reading("memory", lambda d: d.update(total=5905580032)), "5.5 GiB"),
    "memory-of-the-container": (reading("cgroup", lambda d: d.update(memory=32 * GIB)), "32.0 GiB"),
    "memory-to-compile": (reading("memory", lambda d: d.update(available=64 * GIB)), "64 GiB"),
    "out-of-memory": (log("out_of_memory", "Out of memory: Killed process 12 (cicc)"), "Killed process 12"),
    "cpu-quota": (reading("cgroup", lambda d: d.update(cpus=4.0)), "4.0"),
    "open-files": (reading("limits", lambda d: d.update(nofile=[1024, 1024])), "1024"),
    "locked-memory": (lambda state: reading("limits", lambda d: d.update(memlock=[8388608, 8388608]))(seen(state, "infiniband", ["mlx5_0"])), "8192 KiB"),
    "numa-balancing": (reading("sysctls", lambda d: d.update({"kernel.numa_balancing": "1"})), "1"),
    "swappiness": (lambda state: reading("sysctls", lambda d: d.update({"vm.swappiness": "60"}))(reading("memory", lambda d: d.update(swap=GIB))(state)), "60"),
    "governor": (reading("kernel_files", lambda d: d.update({GOVERNOR: {"performance": 3, "powersave": 1}})), "performance on 3; powersave on 1"),
    "numa-nodes-allowed": (reading("cpu", lambda d: d.update(nodes_allowed=[0])), "0"),
    "hypervisor": (reading("cpu", lambda d: d.update(hypervisor=True)), "a virtual machine"),
    "root-writable": (field(root_writable=False), "permission denied"),
    "root-short": (field(), "101"),
    "free-disk": (mount("free", 15 * GIB - 1), "15.0 GiB"),
    "free-inodes": (mount("free_inodes", 99999), "99999"),
    "disk-executable": (mount("options", ["rw", "noexec"]), "/ is"),
    "disk-not-read-only": (mount("options", ["ro"]), "/ is mounted read-only"),
    "disk-local": (mount("kind", "nfs4"), "nfs4"),
    "model-whole": (field(model=None), "does not exist"),
    "model-disk-local": (mount("kind", "nfs4", "model"), "nfs4"),
    "port": (field(port=SeenPort(pid=7, command="nginx")), "held by pid 7 (nginx)"),
    "rank-port": (reading("ports", lambda d: [20000]), "something listens on it"),
    "systemd": (field(systemd=False), "something else is"),
    "root-user": (field(uid=1000), "uid 1000"),
    "logrotate": (without("logrotate"), "none"),
    "unit-is-ours": (field(unit_owner="/srv/other"), "of gpuwright's root /srv/other"),
    "container": (reading("system", lambda d: d.update(container="docker")), "docker"),
    "ld-preload": (reading("environment", lambda d: d["preload"].append("/usr/lib/libvgpu.so")), "libvgpu.so"),
    "session-environment": (reading("environment", lambda d: d["session"].update(CUDA_VISIBLE_DEVICES="0")), "CUDA_VISIBLE_DEVICES"),
    "gpu-power-range": (gpu("power_max_w", 400), "300 to 600 W"),
    "topology": (reading("topology", lambda d: d.update({"0-1": "SYS"})), "17 of 28 pairs are SYS"),
}  # fmt: skip

# Of some checks it takes another spec for them to apply, or to fail.
MEMBERS = (Member("gpu-01", "10.0.0.1"), Member("gpu-02", "10.0.0.2"))
PLAIN = replace(GPU, ladder=GPU.ladder.model_copy(update={"env": {}}))
SPECS: dict[str, NodeSpec] = {
    "gpu-power-range": gpu_spec(system={"power-limit": 450}),
    "open-files": gpu_spec(supervisor="supervisor"),
    "locked-memory": gpu_spec(supervisor="supervisor"),
    "systemd": gpu_spec(supervisor="systemd"),
    "infiniband": PLAIN,
    "memory-of-the-container": gpu_spec(supervisor="supervisor"),
    "cpu-quota": gpu_spec(supervisor="supervisor"),
    "topology": PLAIN,
    "rank-port": gpu_spec(MEMBERS, ladder="glm5-nvfp4-2x8", cluster={"group": "gpu"}),
}
SWAPPING = reading("memory", lambda d: d.update(swap=GIB))
# What a node must be for a check to apply at all, beside what `good` is.
SEEN_FIRST: dict[str, Edit] = {
    "memory-of-the-container": reading("cgroup", lambda d: d.update(memory=256 * GIB)),
    "cpu-quota": reading("cgroup", lambda d: d.update(cpus=64.0)),
    "swappiness": SWAPPING,
    "kernels-cover": lambda state: installed(state),
    "infiniband": lambda state: state,
}
HOLDS_WITH: dict[str, NodeSpec] = {"infiniband": GPU, "topology": GPU}


def installed(state: NodeState) -> NodeState:
    """With the stack in the venv, and its libraries."""
    return seen(state, "kernels", COVERING).model_copy(update={"venv": settled_state(GPU).venv})


def prepared(name: str, spec: NodeSpec) -> NodeState:
    return SEEN_FIRST.get(name, lambda state: state)(good(spec))


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_check_holds_on_a_good_node(name: str) -> None:
    spec = HOLDS_WITH.get(name, SPECS.get(name, GPU))
    state = prepared(name, spec)
    if name in ("infiniband", "locked-memory"):
        state = seen(state, "infiniband", ["mlx5_0"])
    if name == "topology":
        state = reading("topology", lambda d: d.update({"0-1": "SYS"}))(state)
    found = finding(name, state, spec)
    assert found.status == "ok", found
    assert found.expected and "{{" not in found.expected


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_check_fails_for_its_own_cause(name: str) -> None:
    spec = SPECS.get(name, GPU)
    if name == "root-short":
        spec = gpu_spec(root="/" + "x" * 80)
    edit, said = BROKEN[name]
    found = finding(name, edit(prepared(name, spec)), spec)
    assert found.status == "failed", found
    assert said in found.found and "{{" not in found.expected + found.found + found.remedy and found.remedy


def read_by(check: c.Check) -> list[str]:
    """The readings that a check's condition looks at."""
    names = c.expressions.names_of(check.require) | c.expressions.names_of(check.applies)
    used = [each for name in names for each in (c.DERIVED[name][0] if name in c.DERIVED else (name,))]
    return sorted(set(used) - {"node", "want"})


PAIRS = [(check.id, name) for check in ROWS.values() for name in read_by(check)]


@pytest.mark.parametrize(("name", "lost"), PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_a_check_that_cannot_be_observed_is_unknown_with_the_reason(name: str, lost: str) -> None:
    """With a reading lost, no check may still hold that needs it; a `must` then counts as failed."""
    spec = SPECS.get(name, GPU)
    edit, _ = BROKEN[name]
    broken = edit(prepared(name, spec))
    found = finding(name, seen(broken, lost, problem="it did not answer within 20 s"), spec)
    assert found.status == "unknown" or (found.status == "failed" and lost not in read_by_require(name)), found
    if found.status == "unknown":
        assert "it did not answer within 20 s" in found.found
        assert found.remedy == catalogue().checks.readings[lost].unknown and lost in found.unread
        assert found.counts is (found.check.severity == "must")
    half = broken.model_copy(
        update={"machine_readings": {k: v for k, v in broken.machine_readings.items() if k != lost}}
    )
    assert finding(name, half, spec).status == found.status, "a reading that is not in the answer at all"


def read_by_require(name: str) -> list[str]:
    return read_by(ROWS[name].model_copy(update={"applies": "true"}))


# --- what stands on the node itself is always observed; so these checks have no unknown case -----------------------


def test_checks_without_an_unknown_case_are_of_what_the_observation_itself_tells() -> None:
    """They look at `node` and `want` alone: who runs the script, what it found on PATH, the port, the model folder."""
    assert {check.id for check in ROWS.values() if not read_by(check)} == {
        "bash", "cc", "cxx", "flock", "interpreter", "logrotate", "machine", "model-whole", "openssl", "port", "python3",
        "python3-venv", "root-short", "root-user", "root-writable", "systemd", "unit-is-ours",
    }  # fmt: skip


# --- machines -------------------------------------------------------------------------------------------------------


def examined(name: str, **changed: Any) -> Examination:
    state = good(machine_readings=readings(MACHINES[name](), GPU), **changed)
    return examine_node(GPU, state)


def speaking(found: Examination, severity: str = "must") -> dict[str, str]:
    return {each.check.id: each.status for each in found.findings if each.counts and each.check.severity == severity}


def test_a_good_blackwell_node_passes_whole() -> None:
    found = examined("blackwell")
    assert found.passes and lines(found) == []
    assert {each.status for each in found.findings} == {"ok", "not applicable"}


def test_a_card_that_fell_off_is_named_by_its_slot() -> None:
    found = examined("fallen")
    assert speaking(found) == dict.fromkeys(("xid-fatal", "gpu-count", "gpu-lost", "gpu-answers"), "failed")
    count = next(each for each in found.findings if each.check.id == "gpu-count")
    assert (count.expected, count.found) == ("8 GPUs", "7; missing: 0000:c1:00.0")


def test_a_card_that_is_away_since_the_start_is_named_where_slots_are_declared() -> None:
    """Nothing on the bus and nothing in the log tells of it: only the declaration can."""
    spec = gpu_spec(gpu={**GPU.data.gpu.model_dump(), "slots": SLOTS})  # type: ignore[union-attr]
    seven = readings(blackwell(7), spec)
    found = finding("gpu-lost", good(spec, machine_readings=seven), spec)
    assert (found.status, found.found) == ("failed", "0000:e1:00.0")
    assert finding("gpu-lost", good(machine_readings=seven)).status == "ok"
    assert finding("gpu-count", good(machine_readings=seven)).found == "7"


def test_mig_is_named_and_its_own_blanks_make_nothing_unknown() -> None:
    found = examined("mig")
    assert speaking(found) == {"gpu-mig": "failed"} and speaking(found, "should") == {}


def test_mismatched_libraries_leave_nothing_of_the_gpus_known() -> None:
    found = examined("mismatched")
    must = speaking(found)
    assert must.pop("driver-library-match") == "failed"
    assert must and set(must.values()) == {"unknown"} and "gpu-count" in must
    text = "\n".join(lines(found))
    assert text.count("Failed to initialize NVML") == 4, "one block for each tool, not for each check"
    assert text.index("driver-library-match") < text.index("unknown"), "the cause first"


def test_a_container_without_systemd() -> None:
    found = examined("container", systemd=False)
    assert speaking(found) == {
        "shm-size": "failed", "xid-fatal": "unknown", "gpu-initialised": "unknown", "bar-space": "unknown",
    }  # fmt: skip
    assert "dmesg: read kernel buffer failed: Operation not permitted; journalctl is not installed" in "\n".join(
        lines(found)
    )
    assert speaking(found, "should") == {"ld-preload": "failed"}


def test_a_laptop_is_no_node() -> None:
    found = examined("laptop")
    must = speaking(found)
    assert {
        "driver-loaded": "failed",
        "nvcc": "failed",
        "memory": "failed",
        "gpu-count": "unknown",
    }.items() <= must.items()
    assert "nvidia-smi is not installed" in "\n".join(lines(found))


def test_a_hung_nvidia_smi_is_a_finding_and_the_rest_is_judged() -> None:
    from tests.machines import HANGS, QUERY, XML

    node = blackwell()
    node.tools |= {QUERY: HANGS, XML: HANGS}
    found = examine_node(GPU, good(machine_readings=readings(node, GPU)))
    must = speaking(found)
    assert must["gpu-count"] == must["gpu-ecc-errors"] == "unknown" and "driver-open" not in must
    assert "nvidia-smi -q -x did not answer within 20 s" in "\n".join(lines(found))


def test_a_plain_machine_passes_as_the_lab() -> None:
    state = empty_state(LAB, machine_readings=readings(MACHINES["laptop"](), LAB))
    found = examine_node(LAB, state)
    assert found.passes and not any(each.unread for each in found.findings), "no GPU tool is asked for"
    assert "gpus" not in state.readings


# --- the doctor's own words -----------------------------------------------------------------------------------------


def test_the_worst_is_said_first_with_meaning_and_remedy() -> None:
    state = good(uid=1000)
    for name in ("gpu-mig", "swappiness", "governor"):
        state = BROKEN[name][0](state)
    text = lines(examine_node(GPU, state))
    order = [line.split()[2].rstrip(":") for line in text if not line.startswith(" ")]
    assert order == ["gpu-mig", "root-user", "governor", "swappiness"]
    at = text.index(next(line for line in text if "gpu-mig" in line))
    assert text[at] == "must   failed   gpu-mig: expected MIG is off; found on for 0000:61:00.0"
    assert text[at + 1].startswith(" " * 16 + "A GPU that is divided into MIG instances")
    assert any(line.startswith(" " * 16 + "-> `nvidia-smi -i SLOT -mig 0`") for line in text[at:])


def test_the_summary_counts() -> None:
    found = examine_node(GPU, BROKEN["gpu-mig"][0](good()))
    assert found.summary == f"1 must failed, {len(ROWS) - 10} ok, 9 not applicable"


def test_an_ignored_check_keeps_its_reason_and_stops_nothing() -> None:
    spec = gpu_spec(ignored_checks={"gpu-mig": "we divide card 3 on purpose"})
    state = BROKEN["gpu-mig"][0](good(spec))
    found = examine_node(spec, state)
    assert found.passes and plan(spec, state).of(p.PREFLIGHT) == []
    assert lines(found) == ["must   ignored  gpu-mig: we divide card 3 on purpose"]


def test_json_says_the_same() -> None:
    state = seen(BROKEN["gpu-mig"][0](good()), "lspci", problem="lspci is not installed")
    answer = json.loads(json.dumps(c.as_json("gpu-01", examine_node(GPU, state), state.problems)))
    assert answer["passes"] is False and answer["host"] == "gpu-01"
    assert answer["unobserved"] == {"lspci": "lspci is not installed"}
    assert [each["id"] for each in answer["findings"] if each["status"] == "failed"] == ["gpu-mig"]
    assert {each["id"] for each in answer["findings"]} == set(ROWS)


@pytest.mark.parametrize(("found", "capability", "runs"), [
    ([80, 90, 120], "12.0", True), ([80, 90, 100], "12.0", False), ([80], "8.6", True), ([89], "8.6", False),
    ([120], "12.1", True), ([], "9.0", False), ([75], "7.5", True),
])  # fmt: skip
def test_kernels_run_within_their_major_version_and_not_above(found: list[int], capability: str, runs: bool) -> None:
    assert c.covers(found, capability) is runs


def test_an_absent_library_is_not_covered() -> None:
    state = installed(good())
    state = reading("kernels", lambda d: d.pop("torch/lib/libtorch_cuda.so") and None)(state)
    assert finding("kernels-cover", state).found == "none in torch/lib/libtorch_cuda.so (absent)"


@pytest.mark.parametrize(("text", "fatal"), [
    ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", True),
    ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", False),
])  # fmt: skip
def test_xid_154_is_judged_by_its_own_words(text: str, fatal: bool) -> None:
    state = log("xids", XID | {"xid": 154, "text": text})(good())
    assert (finding("xid-fatal", state).status == "failed") is fatal


def test_our_own_server_is_no_stranger_and_may_hold_the_port() -> None:
    server = STOPPED.model_copy(update={"status": "RUNNING", "pid": 4711, "processes": [4711, 4712], "health": 200})
    state = health("processes", [STRANGER])(good(server=server, port=SeenPort(pid=4712, command="sglang")))
    assert finding("gpu-strangers", state).status == finding("port", state).status == "ok"
    assert finding("gpu-wedged", BROKEN["gpu-wedged"][0](state)).status == "not applicable"
    assert finding("port", good(port=SeenPort(pid=None, command="a process of another user"))).status == "failed"


def test_children_of_a_server_that_was_started_again_by_itself_are_ours() -> None:
    """After a reboot or a crash the record is another's; its schedulers are the server's all the same."""
    server = STOPPED.model_copy(update={"pid": 900, "family": [900, 4711]})
    assert finding("gpu-strangers", health("processes", [STRANGER])(good(server=server))).status == "ok"


def test_a_display_server_s_few_mib_stop_nothing() -> None:
    small = {"pid": 5, "name": "/usr/lib/xorg/Xorg", "memory_mib": 4}
    assert finding("gpu-strangers", health("processes", [small])(good())).status == "ok"
    unknown = small | {"memory_mib": None}
    assert finding("gpu-strangers", health("processes", [unknown])(good())).status == "failed"


def test_a_busy_gpu_whose_memory_is_scrubbed_is_not_wedged() -> None:
    assert finding("gpu-wedged", health("utilization", 99)(good())).status == "ok"
    assert finding("gpu-wedged", health("memory_used_mib", 80000)(good())).status == "failed"


DISPLAY = {
    "index": 8,
    "slot": "0000:f1:00.0",
    "name": "NVIDIA T400 4GB",
    "compute_capability": "7.5",
    "memory_mib": 4096,
}


def test_a_display_card_beside_them_is_none_of_the_gpus() -> None:
    state = reading("gpus", lambda rows: rows.append(rows[0] | DISPLAY))(good())
    state = reading("pci", lambda rows: rows.append(rows[0] | {"slot": "0000:f1:00.0", "device": "0x1fb2"}))(state)
    assert examine_node(GPU, state).passes
    fewer = reading("gpus", lambda rows: [row for row in rows if row["slot"] != SLOTS[2]])(state)
    assert finding("gpu-count", fewer).found == "7; missing: 0000:41:00.0; other cards: NVIDIA T400 4GB"


def test_a_card_that_is_given_to_a_virtual_machine_is_not_lost() -> None:
    state = BROKEN["gpu-lost"][0](good())
    given = reading("pci", lambda rows: rows[6].update(driver="vfio-pci"))(state)
    assert finding("gpu-lost", given).status == "ok" and finding("gpu-count", given).found == "7"


def test_an_xid_counts_no_more_once_the_gpu_needs_no_recovery() -> None:
    rows = [XID | {"xid": 119}, XID | {"xid": 154, "text": "GPU recovery action changed from 0x1 (X) to 0x0 (None)"}]
    cleared = reading("kernel_log", lambda found: found.update(xids=rows))(good())
    assert finding("xid-fatal", cleared).status == finding("xid-other", cleared).status == "ok"
    later = reading("kernel_log", lambda found: found.update(xids=[*rows, XID | {"xid": 119}]))(good())
    assert finding("xid-fatal", later).status == "failed"
    elsewhere = reading("kernel_log", lambda found: found.update(xids=[XID | {"slot": SLOTS[0]}, *rows]))(good())
    assert finding("xid-fatal", elsewhere).found.startswith("1, the last: Xid 79 of 0000:01:00.0")


def test_the_second_node_of_a_cluster_is_not_told_to_switch_its_network_off() -> None:
    members = (Member("gpu-02", "10.0.0.2"), Member("gpu-01", "10.0.0.1"))
    second = gpu_spec(members, ladder="glm5-nvfp4-2x8", cluster={"group": "gpu"})
    assert second.rank == 1
    assert finding("infiniband", seen(good(second), "infiniband", ["mlx5_0"]), second).status == "not applicable"


def test_an_older_driver_does_for_an_older_gpu() -> None:
    hopper = catalogue().stacks["sglang-0.5.9-cu128"].toolchain
    assert (hopper.driver_for("9.0"), hopper.driver_for("12.0"), hopper.driver_for("10.3"), hopper.driver_for("3.5")) == (
        "525.60.13", "570.26", "570.26", None,
    )  # fmt: skip


@pytest.mark.parametrize(("blacklist", "held"), [
    (["nvidia-", "libnvidia-"], True), (["libnvidia-", "cuda"], False), (["*nvidia*"], False), (["libstdc++6", "(nvidia|libnvidia)"], True),
])  # fmt: skip
def test_what_unattended_upgrades_leave_out(blacklist: list[str], held: bool) -> None:
    """The list holds whatever someone wrote there, a broken regular expression too."""
    state = BROKEN["driver-held"][0](good())
    state = reading("updates", lambda d: d.update(blacklist=blacklist))(state)
    assert (finding("driver-held", state).status == "ok") is held


def test_the_container_toolkit_is_no_part_of_the_driver() -> None:
    loose = {"version": "1", "held": False}
    state = reading(
        "packages", lambda d: d["installed"].update({"nvidia-container-toolkit": loose, "libnvidia-container1": loose})
    )(good())
    assert finding("driver-held", state).status == "ok"


def test_acs_alone_is_unknown_to_a_user_who_is_not_root() -> None:
    node = blackwell()
    node.tools["lspci -D -vv"] = "0000:00:01.1 PCI bridge: X (rev b0)\n\tCapabilities: <access denied>\n"
    found = examine_node(GPU, good(machine_readings=readings(node, GPU)))
    assert {each.check.id for each in found.findings if each.status == "unknown"} == {"acs"} and found.passes


MENDED = sorted({check.mended_by for check in ROWS.values() if check.mended_by})


@pytest.mark.parametrize("setting", MENDED)
def test_only_what_a_setting_mends_is_let_through(setting: str) -> None:
    """With the setting declared, its `must` checks do not stop preflight when they fail; all the others do."""
    spec = gpu_spec(system={setting: 450 if setting == "power-limit" else True})
    for check in ROWS.values():
        if check.severity == "must" and check.id in BROKEN and check.id not in SPECS and check.id != "root-short":
            state = BROKEN[check.id][0](prepared(check.id, spec))
            if finding(check.id, state, spec).status == "failed":
                stopped = "".join(str(change) for change in plan(spec, state).of(p.PREFLIGHT))
                assert (f"{check.id}: expected" in stopped) is (check.mended_by != setting), (setting, check.id)


def test_an_installed_stack_needs_no_second_15_gib() -> None:
    state = settled_state(LAB)
    little = mount("free", 2 * GIB)
    assert plan(LAB, little(state)).changes == ()
    assert finding("free-disk", little(state), LAB).expected == f"1 GiB free at {ROOT}"
    assert finding("free-disk", mount("free", GIB // 2)(state), LAB).status == "failed"


# --- in a deploy ----------------------------------------------------------------------------------------------------


def test_a_must_stops_the_host_before_anything_is_changed() -> None:
    (change,) = plan(GPU, BROKEN["gpu-mig"][0](good())).of(p.PREFLIGHT)
    assert change.blocked
    assert str(change) == "gpu-mig: expected MIG is off; found on for 0000:61:00.0\n    -> " + ROWS["gpu-mig"].remedy


def test_an_unknown_must_stops_it_too_and_says_the_reason_once() -> None:
    state = seen(good(), "kernel_log", problem="dmesg is refused")
    (change,) = plan(GPU, state).of(p.PREFLIGHT)
    text = str(change)
    assert change.blocked and text.count("dmesg is refused") == 1 and "xid-fatal, gpu-initialised, bar-space" in text


def test_what_a_declared_setting_mends_does_not_stop_the_host_before_it_is_mended() -> None:
    state = BROKEN["nvcc"][0](without("cc")(good()))
    assert plan(GPU, state).of(p.PREFLIGHT) == []
    bare = gpu_spec(system={})
    (change,) = plan(bare, state).of(p.PREFLIGHT)
    assert "cc: expected" in str(change) and "nvcc: expected" in str(change)
    late = gpu_spec(stages=["preflight", "runtime"])
    assert len(plan(late, state).of(p.PREFLIGHT)) == 1, "the system stage is not in this run"


def test_a_setting_that_never_settles_excuses_no_other_must_before_a_start() -> None:
    spec = gpu_spec(stages=["system", "service"])
    state = settled_state(spec, server=STOPPED)
    state = reading("sysctls", lambda d: d.update({"kernel.numa_balancing": "1"}))(BROKEN["gpu-mig"][0](state))
    missing, change = plan(spec, state).of(p.SERVER)
    assert str(missing) == "tier baseline: expected serving, found not running"
    assert change.blocked and "gpu-mig: expected MIG is off" in str(change) and "numa-balancing" not in str(change)


def test_the_server_is_not_started_while_a_must_fails() -> None:
    """What the system stage could not mend (a toolkit that no repository has) is seen before a launch."""
    state = BROKEN["nvcc"][0](settled_state(GPU, server=STOPPED, systemd=True))
    spec = gpu_spec(stages=["service"])
    *_, change = plan(spec, state).of(p.SERVER)
    assert change.blocked and "not started" in str(change) and "nvcc: expected" in str(change)
    assert not plan(GPU, settled_state(GPU, systemd=False)).of(p.SERVER)


def test_kernels_are_checked_before_a_launch() -> None:
    spec = gpu_spec(stages=["service"])
    state = seen(settled_state(GPU, server=STOPPED), "kernels", COVERING | {"torch/lib/libtorch_cuda.so": [90]})
    _, change = plan(spec, state).of(p.SERVER)
    assert change.blocked and "kernels-cover: expected kernels for compute capability 12.0" in str(change)


def test_a_downloadable_python_is_no_problem() -> None:
    spec = gpu_spec(python_download=True)
    assert finding("interpreter", good(spec, interpreter=None), spec).status == "ok"


def test_the_failing_command_prints_its_text_whatever_is_in_it() -> None:
    import subprocess

    text = 'it\'s 100% "broken" $HOME `ls`\nsecond line'
    done = subprocess.run(["sh", "-c", shell_failure(text)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, text + "\n")


# --- the rows themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "said"), [
    ({"require": "gpuss | length"}, 'there is no "gpuss"; did you mean "gpus"?'),
    ({"require": "want.cound == 1"}, 'there is no "want.cound"'),
    ({"found": "{{ node.pyton }}"}, 'there is no "node.pyton"'),
    ({"require": "gpus | length =="}, "is not an expression"),
    ({"mended_by": "governer"}, 'there is no "governer" in catalog/system.yaml'),
    ({"id": "gpu-mig"}, '"gpu-mig" is used twice'),
])  # fmt: skip
def test_a_row_that_cannot_work_is_an_error_of_the_catalogue(change: dict[str, Any], said: str) -> None:
    from pathlib import Path

    rows = catalogue().checks
    bad = rows.checks[0].model_copy(update={"id": "new"} | change)
    errors = check_errors(
        rows.model_copy(update={"checks": [*rows.checks, bad]}), Origin(Path("c.yaml"), {}), catalogue().system
    )
    assert any(said in str(error).replace("\n    ", "; ") for error in errors), errors


def test_readings_are_those_of_the_node_script() -> None:
    rows = catalogue().checks
    assert set(rows.readings) == set(machine.READINGS)
    some = rows.model_copy(update={"readings": {k: v for k, v in rows.readings.items() if k != "pci"}})
    from pathlib import Path

    assert any(
        'there is no reading "pci"' in str(e) for e in check_errors(some, Origin(Path("c"), {}), catalogue().system)
    )


def test_a_malformed_reading_makes_a_check_unknown_and_never_raises() -> None:
    """Whatever stands in an observation file, `python -m gpuwright doctor` must end in a verdict."""
    values: list[Any] = [None, 1, "x", [], {}, [1], {"gpus": 3}, [{"slot": 1}], {"x": None}, True]
    for name in catalogue().checks.readings:
        for value in values:
            found = examine_node(GPU, seen(good(), name, value))
            assert len(found.findings) == len(ROWS)
            assert lines(found, everything=True)


def test_facts_name_what_the_rows_may_use() -> None:
    made: Facts = facts(GPU, good(), installed=False, manager="systemd")
    assert set(made.node) == set(c.NODE) and set(c.WANT) <= set(made.want)
    assert examine(catalogue().checks, made, {}).passes


def test_every_check_is_tested() -> None:
    assert sorted(BROKEN) == sorted(ROWS) and len(ROWS) >= 60


# --- python -m gpuwright doctor ---------------------------------------------------------------------------------------


def test_the_command_line_judges_a_saved_observation(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from gpuwright.__main__ import main

    saved = tmp_path / "gpu-01.json"
    saved.write_text(good().model_dump_json())
    assert main(["doctor", str(saved)]) == 0
    assert capsys.readouterr().out == f"{saved}: passes: {len(ROWS) - 9} ok, 9 not applicable\n"
    saved.write_text(BROKEN["gpu-mig"][0](good()).model_dump_json())
    assert main(["doctor", str(saved), "--group", "gpu"]) == 2
    said = capsys.readouterr().out
    assert said.startswith("must   failed   gpu-mig: ") and f"{saved}: does not pass: 1 must failed" in said
    assert main(["doctor", str(saved), "--all"]) == 2
    assert len([line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]) == len(ROWS) + 1
    assert main(["doctor", str(saved), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["passes"] is False and answer["host"] == "gpu-01"


def test_the_command_line_says_what_it_cannot_read(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from gpuwright.__main__ import main

    saved = tmp_path / "x.json"
    assert main(["doctor", str(saved)]) == 1 and "cannot be read: No such file" in capsys.readouterr().err
    saved.write_text('{"version": 1}')
    assert main(["doctor", str(saved)]) == 1 and "the observation is not usable" in capsys.readouterr().err
    saved.write_text(good().model_dump_json())
    assert main(["doctor", str(saved), "--group", "gpus"]) == 1
    assert 'did you mean "gpu"?' in capsys.readouterr().err


def test_an_observation_of_another_group_is_unknown_where_it_looked_at_less() -> None:
    """The lab's observation asks no GPU tool: judged as a GPU node it must not pass for want of findings."""
    state = empty_state(LAB, machine_readings=readings(MACHINES["laptop"](), LAB))
    found = examine_node(GPU, state)
    assert not found.passes
    text = "\n".join(lines(found))
    assert text.count(c.NOT_ASKED) == 1, "said once, for all of them"
    assert "run doctor.py with the group that it shall be judged by" in text
