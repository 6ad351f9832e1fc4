"""Readings of the machine: real formats parsed right, and anything else turned into a reason, never into an exception."""

from __future__ import annotations

import json
import os
import random
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpuwright import checks
from gpuwright.hostdata import Sources
from gpuwright.node import NODE_SCRIPTS
from gpuwright.plan import examine_node
from gpuwright.spec import NodeSpec, build_spec
from gpuwright.state import read_observation
from tests.machines import (
    DRIVER,
    H200,
    HANGS,
    MACHINES,
    P2P,
    QUERY,
    SLOTS,
    TOPO,
    XML,
    Recorded,
    blackwell,
    machine,
    readings,
)
from tests.make import GIB, catalogue, empty_state, gpu_spec, group_data

GPU = gpu_spec()


def text(name: str) -> str:
    return (H200 / name).read_text()


def read(name: str, source: Recorded, **asked: Any) -> Any:
    made = machine.reading(machine.READINGS[name], source, GPU.asked | {"sites": []} | asked)
    assert made["problem"] is None, made
    return made["value"]


def problem(name: str, source: Recorded) -> str:
    made = machine.reading(machine.READINGS[name], source, GPU.asked | {"sites": []})
    assert made["value"] is None, made
    return str(made["problem"])


# --- recorded on a real machine with two H200 -----------------------------------------------------------------------


def test_nvidia_smi_xml_of_a_real_machine() -> None:
    found = machine.parse_gpu_health(text("nvidia-smi-q-x.xml"))
    assert [gpu["slot"] for gpu in found["gpus"]] == ["0000:00:06.0", "0000:00:07.0"]
    assert found["gpus"][0] == {
        "slot": "0000:00:06.0", "bar1_mib": 262144, "memory_used_mib": 0, "utilization": 0, "temperature_c": 35,
        "slowdowns": [], "ecc_uncorrectable": 0, "remap_pending": "No", "remap_failure": "No", "recovery": "None",
        "virtualization": "Pass-Through", "fabric": "Completed", "processes": [],
    }  # fmt: skip


def test_topology_of_a_real_machine() -> None:
    """Its heading is underlined by escape codes, and its rows end in tabs."""
    assert machine.parse_matrix(text("nvidia-smi-topo-m.txt"), machine.LINKS) == {"0-1": "NV18"}
    assert machine.parse_matrix(text("nvidia-smi-topo-p2p-r.txt"), re.compile("[A-Z]+")) == {"0-1": "OK"}


def test_driver_libraries_and_log_of_a_real_machine() -> None:
    source = Recorded(
        {"/proc/driver/nvidia/version": text("proc-driver-nvidia-version.txt")},
        {"ldconfig -p": text("ldconfig-p.txt"), "dmesg": text("dmesg.txt")},
        {"/lib/libcuda.so.1": "/lib/libcuda.so.580.159.04"},
    )
    assert read("driver", source) == {"version": "580.159.04", "open": True}
    assert [row["version"] for row in read("libraries", source)["libcuda.so.1"]] == [None, "580.159.04"]
    assert not any(read("kernel_log", source).values()), "BAR lines of a healthy boot are no trouble"


def test_the_toolkit_of_a_real_machine() -> None:
    nvcc = "/usr/local/cuda-13.0/bin/nvcc"
    tools = {f"{nvcc} --version": text("nvcc-version.txt"), f"{nvcc} --list-gpu-arch": text("nvcc-list-gpu-arch.txt")}
    found = read("toolkit", Recorded({nvcc: ""}, tools, {}), cuda_home="/usr/local/cuda-13.0")
    assert found["release"] == "13.0" and {"90", "120", "121"} <= set(found["architectures"])


def h200(gpus: int, **data: Any) -> NodeSpec:
    values = group_data("all", "h200") | {"model": {"kind": "tiny"}} | data  # the group's own was not made by then
    values["gpu"] = values["gpu"] | {"count": gpus}
    return build_spec("@local", values, catalogue(), Sources((), []))


@pytest.mark.parametrize(("folder", "count"), [("h200-x1", 1), ("h200-x2", 2)])
def test_the_doctor_on_a_real_machine(folder: str, count: int) -> None:
    """The observation of a real H200 node passes for a group that declares it, and is no Blackwell node."""
    state = read_observation((H200.parent / folder / "observation.json").read_text())
    own = examine_node(h200(count), state)
    assert own.passes, checks.lines(own)
    assert {f.check.id for f in own.findings if f.status == "failed"} <= {
        "container", "hypervisor", "memory-to-compile", "uvm-hmm",
    }  # fmt: skip
    must = {
        f.check.id: f.found
        for f in examine_node(GPU, state).findings
        if f.status == "failed" and f.check.severity == "must"
    }
    assert must["gpu-name"] == "NVIDIA H200" and must["gpu-compute-capability"] == "9.0"
    assert must["gpu-count"].startswith(str(count)) and "gpu-memory" not in must, "it has more than enough"
    assert examine_node(h200(count + 1), state).passes is False


def test_a_nvidia_smi_that_hangs_on_a_real_machine() -> None:
    """Observed with a nvidia-smi that sleeps in front of the real one: what it tells is unknown, all else is known."""
    state = read_observation((H200.parent / "h200-hung" / "observation.json").read_text())
    found = examine_node(h200(1), state)
    unknown = {f.check.id: f.found for f in found.findings if f.status == "unknown"}
    assert {"gpu-count", "gpu-ecc-errors", "gpu-mig"} <= set(unknown) and not found.passes
    assert unknown["gpu-count"].endswith("did not answer within 20 s")
    known = {f.check.id for f in found.findings if f.status == "ok"}
    assert {"driver-loaded", "driver-library-match", "xid-fatal", "memory", "free-disk"} <= known


# --- written after real formats -------------------------------------------------------------------------------------


def test_eight_blackwell_cards() -> None:
    found = read("gpus", blackwell())
    assert [gpu["slot"] for gpu in found] == SLOTS
    assert found[7] == {
        "index": 7, "slot": "0000:e1:00.0", "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "compute_capability": "12.0", "memory_mib": 97887, "vbios": "98.02.81.00.07", "mig": "Disabled",
        "persistence": "Enabled", "compute_mode": "Default", "pcie_gen": 5, "pcie_width": 16,
        "power_limit_w": 600, "power_min_w": 300, "power_max_w": 600, "memory_clock_mhz": 14001, "ecc": "Enabled",
    }  # fmt: skip
    health = read("gpu_health", blackwell())["gpus"]
    assert [gpu["slot"] for gpu in health] == SLOTS and {gpu["bar1_mib"] for gpu in health} == {131072}
    links = read("topology", blackwell())
    assert len(links) == 28 and links["0-3"] == "NODE" and links["3-4"] == "SYS"
    cards = read("pci", blackwell())
    assert cards[0] == {
        "slot": "0000:01:00.0",
        "device": "0x2bb5",
        "answers": True,
        "driver": "nvidia",
        "iommu": "identity",
    }
    assert [card["slot"] for card in read("pci", MACHINES["fallen"]()) if not card["answers"]] == ["0000:c1:00.0"]


def test_values_that_a_card_does_not_have_are_none() -> None:
    node = blackwell()
    node.tools[QUERY] = node.tools[QUERY].replace("600.00, 300.00, 600.00", "[N/A], [Not Supported], N/A", 1)
    first = read("gpus", node)[0]
    assert (first["power_limit_w"], first["power_min_w"], first["power_max_w"]) == (None, None, None)


@pytest.mark.parametrize("said", ["[Unknown Error]", "[GPU requires reset]", "ERR!"])
def test_what_a_sick_card_says_in_place_of_a_value_does_not_pass_for_none(said: str) -> None:
    node = blackwell()
    node.tools[QUERY] = node.tools[QUERY].replace("14001", said, 1)
    assert problem("gpus", node) == f"nvidia-smi says '{said}' of clocks.max.mem of 0000:01:00.0"
    for tag in ("dram_uncorrectable", "remapped_row_failure"):
        node.tools[XML] = re.sub(f"<{tag}>[^<]*<", f"<{tag}>{said}<", blackwell().tools[XML], count=1)
        assert f"nvidia-smi says '{said}' of " in problem("gpu_health", node) and tag in problem("gpu_health", node)


def test_a_card_without_a_handle_is_left_out_and_the_others_are_read() -> None:
    rows = read("gpus", MACHINES["fallen"]())
    assert [row["slot"] for row in rows] == [slot for slot in SLOTS if slot != "0000:c1:00.0"]


def test_a_fabric_that_failed_is_not_completed() -> None:
    xml = text("nvidia-smi-q-x.xml").replace("<status>Success</status>", "<status>Failure</status>", 1)
    assert machine.parse_gpu_health(xml)["gpus"][0]["fabric"] == "Completed, Failure"


def test_the_processes_of_a_gpu_are_read() -> None:
    row = "<processes><process_info><pid>4711</pid><type>C</type><process_name>sglang::scheduler</process_name>"
    row += "<used_memory>80123 MiB</used_memory></process_info></processes>"
    xml = re.sub(r"<processes>\s*</processes>", row, text("nvidia-smi-q-x.xml"), count=1)
    assert machine.parse_gpu_health(xml)["gpus"][0]["processes"] == [
        {"pid": 4711, "name": "sglang::scheduler", "memory_mib": 80123}
    ]


@pytest.mark.parametrize(("said", "code"), [
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9),
    ("No devices were found\n", 6),
    ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.158\n", 18),
    ("Unable to determine the device handle for GPU0000:08:00.0: Unknown Error\n", 255),
])  # fmt: skip
def test_what_nvidia_smi_says_when_it_fails_is_the_reason(said: str, code: int) -> None:
    node = blackwell()
    node.tools |= {QUERY: (code, said, ""), XML: (code, "", said)}
    assert problem("gpus", node) == f"nvidia-smi --query-gpu --format: {' '.join(said.split())}"
    assert said.split("\n")[0] in problem("gpu_health", node)
    node.tools |= {QUERY: said, XML: said}
    assert said.split()[0] in problem("gpus", node), "the same with exit code 0"


KERNEL = {
    "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.": {"xid": 79, "slot": "0000:01:00.0"},
    "[8.1] NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.": {"xid": 79, "slot": "0000:05:00.0"},
    "NVRM: Xid (PCI:0000:01:00): 62, 3239edf9 0000c3d8 00000000": {"xid": 62, "slot": "0000:01:00.0"},
    "NVRM: Xid (0000:03:00): 14, Channel 00000001": {"xid": 14, "slot": "0000:03:00.0"},
    "NVRM: Xid (PCI:000f:01:00): 169, fd8cd000 94000000": {"xid": 169, "slot": "000f:01:00.0"},
    "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7, name=python3, Contained": {"xid": 94, "slot": "0000:01:00.0"},
    "kernel: NVRM: Xid (PCI:0000:01:00): 119, pid=6211, name=nvidia-smi, Timeout after 45s of waiting for RPC": {"xid": 119, "slot": "0000:01:00.0"},
}  # fmt: skip


@pytest.mark.parametrize("line", KERNEL)
def test_xid_lines(line: str) -> None:
    (row,) = machine.parse_kernel_log(f"noise\n{line}\nnoise")["xids"]
    assert {key: row[key] for key in ("xid", "slot")} == KERNEL[line]


@pytest.mark.parametrize(("lines", "key", "count"), [
    ("NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", "fallen", 1),
    ("NVRM: GPU 0000:05:00.0: RmInitAdapter failed! (0x22:0x56:884)", "init_failed", 1),
    ("NVRM: installed in this system requires use of the NVIDIA open kernel modules.", "init_failed", 1),
    ("pci 0000:01:00.0: BAR 1 [mem size 0x400000000 64bit pref]: can't assign; no space", "no_space", 1),
    ("pci 0000:01:00.0: BAR 1: no space for [mem size 0x400000000 64bit pref]", "no_space", 1),
    ("NVRM: The NVIDIA GPU 0000:18:00.0\nNVRM: (PCI ID: 10de:2901) installed in this system has\nNVRM: fallen off the bus and is not responding to commands.", "fallen", 1),
    ("pci 0000:00:1c.0: BAR 13: no space for [io  size 0x1000]", "no_space", 0),
    ("pci 0000:00:1c.0: BAR 1: no space for [io  size 0x1000]", "no_space", 0),
    ("pci 0000:01:00.0: BAR 7: no space for [mem size 0x40000]", "no_space", 0),
    ("pci 0000:01:00.0: VF BAR 0 [mem size 0x40000]: can't assign; no space", "no_space", 0),
    ("pci 0000:01:00.0: BAR 1 [mem size 0x4]: failed to assign\npci 0000:01:00.0: BAR 1 [mem 0x1-0x2]: assigned", "no_space", 0),
    ("pcieport 0000:40:01.0: AER: Multiple Uncorrected (Non-Fatal) error received", "pcie_errors", 1),
    ("nvme 0000:34:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Data Link Layer", "pcie_errors", 1),
    ("pcieport 0000:00:1c.0: PCIe Bus Error: severity=Corrected, type=Physical Layer", "pcie_errors", 0),
    ("Out of memory: Killed process 4711 (cicc) total-vm:1kB", "out_of_memory", 1),
])  # fmt: skip
def test_kernel_log_lines(lines: str, key: str, count: int) -> None:
    assert len(machine.parse_kernel_log(lines)[key]) == count


def test_a_refused_dmesg_falls_back_to_the_journal() -> None:
    node = blackwell()
    node.tools["dmesg"] = (1, "", "dmesg: read kernel buffer failed: Operation not permitted\n")
    node.tools["journalctl -k*"] = (
        "[0.0] host kernel: Linux version 6.8.0\n[1.0] host kernel: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"
    )
    assert read("kernel_log", node)["fallen"] == ["0000:01:00.0"]
    for nothing in ("", "Hint: You are currently not seeing messages from other users and the system.\n"):
        node.tools["journalctl -k*"] = nothing
        assert "Operation not permitted; journalctl does not reach back to the boot" in problem("kernel_log", node)


def test_a_kernel_log_that_has_lost_its_beginning_does_not_pass_for_a_clean_one() -> None:
    node = blackwell()
    node.tools["dmesg"] = "[99999.0] audit: backlog limit exceeded\n" * 1000
    assert problem("kernel_log", node) == "dmesg does not reach back to the boot; journalctl is not installed"
    node.tools["dmesg"] = ""
    assert "dmesg does not reach back" in problem("kernel_log", node)
    many = "NVRM: Xid (PCI:0000:01:00): 45, pid=1\n" * 300
    rows = machine.parse_kernel_log("NVRM: Xid (PCI:0000:01:00): 119, x\n" + many)["xids"]
    assert [(row["xid"], row["count"]) for row in rows] == [(119, 1), (45, 300)], "none is lost behind many others"


def test_bridges_that_redirect_and_devices_that_are_dead() -> None:
    node = blackwell()
    assert read("lspci", node) == {"redirecting": []}
    node.tools["lspci -D -vv"] = node.tools["lspci -D -vv"].replace(
        "ACSCtl:\tSrcValid- TransBlk- ReqRedir-", "ACSCtl:\tSrcValid+ TransBlk- ReqRedir+"
    )
    assert read("lspci", node)["redirecting"] == ["0000:00:01.1"]
    node.tools["lspci -D -vv"] = node.tools["lspci -D -vv"].replace(
        "SrcValid+ TransBlk- ReqRedir+", "SrcValid+ TransBlk- ReqRedir-"
    )
    assert read("lspci", node)["redirecting"] == [], "to check a source sends nothing another way"
    assert read("lspci", MACHINES["fallen"]()) == {"redirecting": []}, "a dead device is no bridge"
    node.tools["lspci -D -vv"] = "0000:00:01.1 PCI bridge: X (rev b0)\n\tCapabilities: <access denied>\n"
    assert problem("lspci", node) == "lspci -vv: only root may read the capabilities"


def test_the_flavour_of_the_module_and_its_license() -> None:
    old = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  520.56.06  Thu Oct  6 21:38:55 UTC 2022\n"
    assert read("driver", Recorded({"/proc/driver/nvidia/version": old}, {}, {})) == {
        "version": "520.56.06",
        "open": False,
    }
    assert read("driver", Recorded({}, {}, {})) == {"version": None, "open": None}, "absent is not unknown"
    assert read("module_on_disk", blackwell()) == {"version": DRIVER, "license": "Dual MIT/GPL"}


def test_limits_of_control_groups_are_the_tightest_on_the_way() -> None:
    files = {
        "/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/memory.max": f"{64 * GIB}\n", "/sys/fs/cgroup/a/memory.max": "max\n",
        "/sys/fs/cgroup/a/b/memory.max": f"{96 * GIB}\n", "/sys/fs/cgroup/a/cpu.max": "800000 100000\n",
    }  # fmt: skip
    assert read("cgroup", Recorded(files, {}, {})) == {"memory": 64 * GIB, "cpus": 8.0}
    assert read("cgroup", Recorded({}, {}, {})) == {"memory": None, "cpus": None}
    old = {
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }  # fmt: skip
    assert read("cgroup", Recorded(old, {}, {})) == {"memory": 4 * GIB, "cpus": 2.0}
    free = {
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    }
    assert read("cgroup", Recorded(free, {}, {})) == {"memory": None, "cpus": None}


def test_mounts_are_the_deepest_above_a_path() -> None:
    node = blackwell()
    node.files["/proc/self/mountinfo"] += "40 29 0:60 / /opt/gpu\\040x rw,noexec - nfs4 server:/x rw\n"
    found = read("mounts", node, mounts={"a": "/opt/gpu x/root", "b": "/opt/gpu", "c": "/models/GLM-5-NVFP4"})
    assert (found["a"]["kind"], found["a"]["options"]) == ("nfs4", ["rw", "noexec", "rw"])
    assert (found["b"]["at"], found["c"]["at"]) == ("/", "/models")


def test_a_disk_that_the_kernel_made_read_only_and_one_mount_over_another() -> None:
    node = blackwell()
    node.files["/proc/self/mountinfo"] = (
        "29 1 259:2 / / rw,relatime - ext4 /dev/md0 ro,errors=remount-ro\n30 29 0:9 / /m rw - autofs a rw\n31 30 0:8 / /m rw - nfs4 b rw\n"
    )
    found = read("mounts", node, mounts={"a": "/opt", "b": "/m/x"})
    assert "ro" in found["a"]["options"] and found["b"]["kind"] == "nfs4"


def test_packages_of_both_managers() -> None:
    node = blackwell()
    node.tools["apt-cache -o*"] = (
        "cuda-toolkit-13-0:\n  Installed: (none)\n  Candidate: 13.0.2-1\n  Version table:\nnone-such:\n  Installed: (none)\n  Candidate: (none)\n"
    )
    found = read("packages", node, packages_maybe=["cuda-toolkit-13-0", "none-such", "gcc"])
    assert found["manager"] == "apt" and found["available"] == ["cuda-toolkit-13-0"]
    assert found["installed"]["nvidia-driver-580-server-open"] == {"version": DRIVER, "held": True}
    rpm = Recorded({}, {"rpm -qa*": "gcc\t14.2.1-1.el10\n", "dnf --quiet*": "cuda-toolkit-12-8\n", "dnf": ""}, {})
    assert read("packages", rpm, packages=["gcc"], packages_maybe=["cuda-toolkit-12-8", "gcc"]) == {
        "manager": "dnf", "installed": {"gcc": {"version": "14.2.1-1.el10", "held": None}}, "available": ["cuda-toolkit-12-8"],
    }  # fmt: skip
    assert read("packages", Recorded({}, {}, {}))["manager"] is None
    rpm.tools["dnf --quiet*"] = (1, "", "Error: Cache-only enabled but no cache for 'baseos'\n")
    assert read("packages", rpm, packages=["gcc"], packages_maybe=["cuda-toolkit-12-8"])["available"] == []
    node.tools["dpkg-query -W*"] = (2, "", "dpkg-query: error: parsing file '/var/lib/dpkg/status'\n")
    assert "error: parsing file" in problem("packages", node)
    foreign = "libnvidia-gl:amd64\t1\thi \nlibnvidia-gl:i386\t1\tii \nlibold\t1\trc \n"
    node.tools["dpkg-query -W*"] = foreign
    assert read("packages", node)["installed"] == {
        "libnvidia-gl": {"version": "1", "held": True}, "libnvidia-gl:i386": {"version": "1", "held": False},
    }  # fmt: skip


def test_unattended_upgrades_and_what_they_leave_out() -> None:
    node = blackwell()
    assert read("updates", node) == {"automatic": True, "blacklist": []}, "what is commented out does not count"
    node.files["/etc/apt/apt.conf.d/51own"] = 'Unattended-Upgrade::Package-Blacklist { "nvidia-"; "libnvidia-"; };\n'
    assert read("updates", node)["blacklist"] == ["nvidia-", "libnvidia-"]
    node.files["/etc/apt/apt.conf.d/52own"] = 'Unattended-Upgrade::Package-Blacklist:: "cuda";\n'
    assert read("updates", node)["blacklist"] == ["nvidia-", "libnvidia-", "cuda"]


# --- anything else ----------------------------------------------------------------------------------------------------


def garbled(said: str, seed: int) -> list[str]:
    """Truncated, empty, in another language, megabytes, shuffled, binary."""
    dice = random.Random(seed)
    cut = [said[: dice.randrange(len(said) + 1)] for _ in range(6)]
    holes = ["".join(ch for ch in said if dice.random() > 0.02) for _ in range(4)]
    lines = said.splitlines(True)
    dice.shuffle(lines)
    words = said.replace("Not Active", "Nicht aktiv").replace("Enabled", "Aktiviert").replace(".", ",")
    return [
        "",
        "\n",
        *cut,
        *holes,
        "".join(lines),
        words,
        said * (1 + (2 << 20) // max(1, len(said))),
        "\x00\xff" * 999,
        "{}",
        "N/A",
    ]


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_no_output_of_any_tool_or_file_raises(name: str) -> None:
    """Each tool and each file of each machine, garbled: every reading still answers, and so does the doctor."""
    for number, key in enumerate(sorted([*MACHINES[name]().tools, *MACHINES[name]().files])):
        original = MACHINES[name]()
        said = original.tools.get(key, original.files.get(key))
        said = said if isinstance(said, str) else "".join(said[1:])
        for each in garbled(said, number)[number % 2 :: 2] if name == "blackwell" else garbled(said, number)[::8]:
            node = MACHINES[name]()
            if len(each) > 100_000 and key not in (QUERY, XML, "dmesg", "/proc/cpuinfo"):
                each = each[:100_000]
            (node.tools if key in node.tools else node.files)[key] = each
            made = readings(node, GPU)
            assert not any(row.value is not None and row.problem is not None for row in made.values())
            found = examine_node(GPU, empty_state(GPU, machine_readings=made))
            assert len(found.findings) == len(catalogue().checks.checks)
            assert bool(checks.stop_text(found.stopping)) is not found.passes


@pytest.mark.parametrize("tool", sorted(blackwell().tools))
def test_a_tool_that_says_nothing_makes_no_check_hold(tool: str) -> None:
    """Whatever was judged by its words is unknown, failed or not applicable: silence is never "ok"."""
    node = blackwell()
    before = {
        f.check.id: f.status for f in examine_node(GPU, empty_state(GPU, machine_readings=readings(node, GPU))).findings
    }
    node.tools[tool] = ""
    made = readings(node, GPU)
    silent = {name for name, row in made.items() if row.problem is not None}
    harmless = {"apt-cache -o*", "apt-get", "systemctl show*", "dpkg-query -W*"}  # nothing installed is an answer, too
    after = {f.check.id: f.status for f in examine_node(GPU, empty_state(GPU, machine_readings=made)).findings}
    assert silent or tool in harmless or "failed" in {after[name] for name in after if before[name] == "ok"}, tool
    needing = {check.id for check in catalogue().checks.checks if silent & set(used(check))}
    assert all(after[name] != "ok" or before[name] != "ok" for name in needing if name != "gpu-lost")


def used(check: checks.Check) -> list[str]:
    names = checks.expressions.names_of(check.require)
    return [each for name in names for each in (checks.DERIVED[name][0] if name in checks.DERIVED else (name,))]


def test_a_hung_tool_is_cut_off_with_its_children_and_said(tmp_path: Path) -> None:
    """The real runner on a real process that ignores SIGTERM and has a child of its own."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ntrap '' TERM\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    node = machine.Node()
    os.environ["PATH"], before = f"{tmp_path}:{os.environ['PATH']}", os.environ["PATH"]
    try:
        began = time.monotonic()
        with pytest.raises(machine.Unobserved, match="nvidia-smi -q -x did not answer within 1 s"):
            node.run(["nvidia-smi", "-q", "-x"], 1)
        assert time.monotonic() - began < 5
    finally:
        os.environ["PATH"] = before
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_observation_ends_though_a_reading_never_comes_back(tmp_path: Path) -> None:
    """As where the driver keeps a process in the kernel: the answer comes, and nothing holds the session open."""
    code = (NODE_SCRIPTS / "machine.py").read_text() + (
        "\nREADINGS = {'memory': memory, 'stuck': lambda source, asked: time.sleep(60)}\nSMI_TIMEOUT_S = TOOL_TIMEOUT_S = 0.5\n"
        "asked = {'readings': ['memory', 'stuck']}\n"
        "print(json.dumps(finish_readings(begin_readings(asked), asked)))\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert time.monotonic() - began < 10
    answer = json.loads(done.stdout)
    assert answer["memory"]["value"]["total"] > 0 and "did not come back" in answer["stuck"]["problem"]


def test_files_of_the_kernel_are_read_whole() -> None:
    node = machine.Node()
    assert int(node.read("/proc/sys/fs/nr_open")) > 0
    assert node.read("/proc/meminfo").startswith("MemTotal")


@pytest.mark.parametrize("refused", ["/proc/cmdline", "/proc/driver/nvidia/version", "/etc/os-release"])
def test_a_refused_file_is_a_reason(refused: str) -> None:
    from tests.machines import REFUSED

    node = blackwell()
    node.files[refused] = REFUSED
    name = {"/proc/cmdline": "cmdline", "/proc/driver/nvidia/version": "driver", "/etc/os-release": "system"}[refused]
    assert problem(name, node) == f"{refused} cannot be read: Permission denied"


def test_hung_tools_are_reasons() -> None:
    node = blackwell()
    node.tools |= {TOPO: HANGS, P2P: HANGS}
    assert problem("topology", node) == "nvidia-smi topo -m did not answer within 20 s"


def test_a_library_that_is_none_holds_no_kernels(tmp_path: Path) -> None:
    for name, data in (("a.so", b"not an ELF"), ("b.so", b"\x7fELF" + b"\x01" * 60)):
        (tmp_path / name).write_bytes(data)
    assert machine.architectures(str(tmp_path / "a.so")) == []
    made = machine.reading(machine.READINGS["kernels"], machine.Node(), {"kernels": ["*.so"], "sites": [str(tmp_path)]})
    assert made["value"] is None and "b.so cannot be read" in made["problem"]
