"""Machines for tests: recorded and written tool output, read by the very code that reads a node (files/node/machine.py).

`h200` is recorded on a real machine with two H200 (serial numbers removed). There was no Blackwell machine, so `blackwell`
is written after the formats of real tools: the H200's own output with a Blackwell card's values, and the lines that others
have published (docs/doctor.md names them).
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

from gpuwright.node_module import node_module
from gpuwright.spec import NodeSpec
from gpuwright.state import Reading

H200 = Path(__file__).parent / "unit" / "machines" / "h200-x2"
machine: Any = node_module("machine")
SLOTS = [f"0000:{bus}:00.0" for bus in ("01", "21", "41", "61", "81", "a1", "c1", "e1")]
NAME = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
DRIVER = "580.126.09"
GIB = 1024**3
SMI = "nvidia-smi"
QUERY = f"{SMI} --query-gpu={','.join(machine.GPU_FIELDS)} --format=csv,noheader,nounits"
XML, TOPO, P2P = f"{SMI} -q -x", f"{SMI} topo -m", f"{SMI} topo -p2p r"
HANGS, REFUSED = "hangs", "refused"


class Recorded:
    """A source of readings as files/node/machine.py's Node is, of texts by path and of tool output by command line.

    A tool's output is a text, or (exit code, stdout, stderr), or HANGS; a file may be REFUSED. `sizes`: of file systems.
    """

    def __init__(self, files: dict[str, str], tools: dict[str, Any], links: dict[str, str], **more: Any) -> None:
        self.files, self.tools, self.links = files, tools, links
        self.paths: set[str] = set(more.get("paths", ()))
        self.sizes: dict[str, dict[str, Any]] = more.get("sizes", {})
        self.limits: dict[str, list[int | None]] = more.get("limits", {})
        self.env: dict[str, str] = more.get("env", {})

    def read(self, path: str) -> str:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        if self.files[path] == REFUSED:
            raise PermissionError(13, "Permission denied", path)
        return self.files[path]

    def exists(self, path: str) -> bool:
        return path in self.paths or any(each == path or each.startswith(path + "/") for each in self.files)

    def glob(self, pattern: str) -> list[str]:
        depth = pattern.count("/")
        every = {
            "/".join(each.split("/")[: depth + 1]) for each in (*self.files, *self.paths) if each.count("/") >= depth
        }
        return sorted(each for each in every if fnmatch.fnmatchcase(each, pattern))

    def real(self, path: str) -> str:
        return self.links.get(path, path)

    def which(self, name: str) -> str | None:
        there = any(line.split(" ")[0] == name for line in self.tools)
        return (name if name.startswith("/") else f"/usr/bin/{name}") if there else None

    def run(self, argv: list[str], timeout_s: float = 0) -> tuple[int, str, str]:
        line = " ".join(argv)
        if self.which(argv[0]) is None:
            raise machine.Unobserved(f"{argv[0]} is not installed")
        key = next(
            (each for each in self.tools if line == each or (each.endswith("*") and line.startswith(each[:-1]))), None
        )
        said = self.tools[key] if key else (1, "", f"nothing is recorded for {line}")
        if said == HANGS:
            raise machine.Unobserved(f"{line} did not answer within {timeout_s:g} s")
        return (0, said, "") if isinstance(said, str) else said

    def space(self, path: str) -> dict[str, Any]:
        return self.sizes.get(path, {"size": 4000 * GIB, "free": 3000 * GIB, "free_inodes": 10**8})

    def limit(self, name: str) -> list[int | None]:
        return self.limits.get(name, [None, None])

    def environ(self) -> dict[str, str]:
        return self.env

    def kernel(self) -> str:
        return "6.8.0-90-generic"

    def libc(self) -> str:
        return "glibc 2.39"


def readings(source: Recorded, spec: NodeSpec) -> dict[str, Reading]:
    """What an observation of such a machine holds."""
    asked = spec.asked | {"sites": [f"{spec.paths.venv}/lib/python{spec.data.python}/site-packages"]}
    return {name: Reading(**machine.reading(machine.READINGS[name], source, asked)) for name in asked["readings"]}


def _gpu_xml(slot: str, number: int, name: str, memory_mib: int, bar1_mib: int) -> str:
    block = (H200 / "nvidia-smi-q-x.xml").read_text().partition("\t<gpu id=")[2].partition("\t</gpu>")[0]
    address = "0000" + slot.upper()
    for old, new in (
        ("00000000:00:06.0", address), ("NVIDIA H200", name), ("Hopper", "Blackwell"), ("143771 MiB", f"{memory_mib} MiB"),
        ("143156 MiB", f"{memory_mib - 616} MiB"), ("262144 MiB", f"{bar1_mib} MiB"), ("262143 MiB", f"{bar1_mib - 1} MiB"),
        ("<state>Completed</state>", "<state>N/A</state>"), ("Pass-Through", "None"), ("700.00 W", "600.00 W"),
        ("200.00 W", "300.00 W"), ("<minor_number>0", f"<minor_number>{number}"), ("580.159.04", DRIVER),
    ):  # fmt: skip
        assert old in block, old
        block = block.replace(old, new)
    return f"\t<gpu id={block}\t</gpu>\n\n"


def _xml(gpus: str, count: int) -> str:
    head = (H200 / "nvidia-smi-q-x.xml").read_text().partition("\t<gpu id=")[0]
    head = head.replace("580.159.04", DRIVER).replace("<attached_gpus>2", f"<attached_gpus>{count}")
    return f"{head}{gpus}</nvidia_smi_log>\n"


def _csv(number: int, slot: str) -> str:
    bus = "0000" + slot.upper()
    fixed = "12.0, 97887, 98.02.81.00.07, Disabled, Enabled, Default, 5, 16, 600.00, 300.00, 600.00, 14001, Enabled"
    return f"{number}, {NAME}, {bus}, {fixed}\n"


def _matrix(count: int, cell: Any, tail: str) -> str:
    rows = ["\t" + "\t".join(f"\x1b[4mGPU{n}" if n == 0 else f"GPU{n}" for n in range(count)) + tail + "\x1b[0m"]
    for row in range(count):
        cells = [" X " if row == column else cell(row, column) for column in range(count)]
        rows.append(f"GPU{row}\t" + "\t".join(cells) + ("\t0-95\t0\t\tN/A" if tail else "\t"))
    legend = (H200 / "nvidia-smi-topo-m.txt").read_text().partition("\n\n")[2]
    return "\n".join(rows) + "\n\n" + legend


BRIDGE = """\
{slot} PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0) (prog-if 00 [Normal decode])
	Control: I/O+ Mem+ BusMaster+ SpecCycle- MemWINV- VGASnoop- ParErr+ Stepping- SERR+ FastB2B- DisINTx+
	Capabilities: [148 v1] Access Control Services
		ACSCap:	SrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl+ DirectTrans+
		ACSCtl:	SrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-
	Kernel driver in use: pcieport
"""
CARD = """\
{slot} 3D controller: NVIDIA Corporation GB202GL [RTX PRO 6000 Blackwell Server Edition] (rev a1)
	Subsystem: NVIDIA Corporation Device 204e
	Region 1: Memory at 3c000000000 (64-bit, prefetchable) [size=128G]
		LnkSta:	Speed 2.5GT/s (downgraded), Width x16
	Kernel driver in use: nvidia
"""
MODINFO = f"""\
filename:       /lib/modules/6.8.0-90-generic/updates/dkms/nvidia.ko.zst
alias:          char-major-195-*
version:        {DRIVER}
supported:      external
license:        Dual MIT/GPL
firmware:       nvidia/{DRIVER}/gsp_ga10x.bin
parm:           NvSwitchRegDwords:NvSwitch regkey (charp)
"""
LDCONFIG = """\
312 libs found in cache `/etc/ld.so.cache'
	libz.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libz.so.1
	libnvidia-ml.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-ml.so.1
	libnvidia-ml.so.1 (libc6) => /lib/i386-linux-gnu/libnvidia-ml.so.1
	libnuma.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnuma.so.1
	libcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1
"""
DMESG = f"""\
[    0.000000] Linux version 6.8.0-90-generic (buildd@lcy02-amd64-033) (x86_64-linux-gnu-gcc-13 (Ubuntu 13.3.0))
[    1.201230] pci 0000:01:00.0: VF BAR 0 [mem size 0x00040000 64bit pref]: can't assign; no space
[    1.201233] pci 0000:21:00.0: BAR 1 [mem size 0x2000000000 64bit pref]: can't assign; no space
[    1.201299] pci 0000:21:00.0: BAR 1 [mem 0x3c000000000-0x3dfffffffff 64bit pref]: assigned
[    9.635428] nvidia: loading out-of-tree module taints kernel.
[    9.935435] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build  (dvs-builder@U22)
"""
CPUINFO = "processor\t: {n}\nmodel name\t: AMD EPYC 9575F 64-Core Processor\nflags\t\t: fpu sse avx avx2 avx512f\n\n"


def nodes(count: int) -> dict[str, str]:
    """Files of /sys for so many cards."""
    found = {}
    for slot in SLOTS[:count]:
        folder = f"/sys/bus/pci/devices/{slot}"
        found |= {
            f"{folder}/vendor": "0x10de\n", f"{folder}/class": "0x030200\n", f"{folder}/device": "0x2bb5\n",
            f"{folder}/config": "\ufffd\x10\ufffd+", f"{folder}/iommu_group/type": "identity\n",
            f"{folder}/driver": "",
        }  # fmt: skip
    return found


def blackwell(count: int = 8) -> Recorded:
    """A healthy node of RTX PRO 6000 Blackwell cards, as group gpu declares it, with nothing of ours installed."""
    packages = {"gcc": "4:13.2.0", "g++": "4:13.2.0", "make": "4.3", "ninja-build": "1.11", "patch": "2.7",
                "python3-venv": "3.12.3", "python3-dev": "3.12.3", "libnuma1": "2.0.18", "numactl": "2.0.18",
                "pciutils": "3.10", "kmod": "31", "openssl": "3.0", "logrotate": "3.21", "cuda-toolkit-12-8": "12.8.1"}  # fmt: skip
    dpkg = "".join(f"{name}\t{version}\tii \n" for name, version in packages.items())
    dpkg += f"nvidia-driver-580-server-open\t{DRIVER}\thi \nlibnvidia-compute-580-server\t{DRIVER}\thi \n"
    governors = {f"/sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor": "performance\n" for n in range(4)}
    units = {"nvidia-persistenced.service": ("loaded", "active", "enabled"),
             "nvidia-fabricmanager.service": ("not-found", "inactive", "")}  # fmt: skip
    shown = "\n\n".join(f"Id={u}\nLoadState={a}\nActiveState={b}\nUnitFileState={c}" for u, (a, b, c) in units.items())
    files = {
        **nodes(count), **governors,
        "/proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build"
        "  (dvs-builder@U22)\nGCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n",
        "/proc/modules": "nvidia_uvm 2068480 0 - Live 0x0 (O)\nnvidia 14376960 9 nvidia_uvm, Live 0x0 (O)\n",
        "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "Y\n",
        "/sys/module/pcie_aspm/parameters/policy": "default [performance] powersave powersupersave\n",
        "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/md0 ro iommu=pt pcie_aspm=off pcie_port_pm=off\n",
        "/sys/class/iommu/ivhd0/devices": "",
        "/proc/meminfo": f"MemTotal:  {1536 * GIB // 1024} kB\nMemFree: 5 kB\nMemAvailable:  {1500 * GIB // 1024} kB\n"
        "SwapTotal: 0 kB\n",
        "/proc/cpuinfo": "".join(CPUINFO.format(n=n) for n in range(128)),
        "/proc/self/status": "Name:\tpython3\nMems_allowed_list:\t0-1\n",
        "/proc/self/cgroup": "0::/user.slice/user-0.slice/session-3.scope\n",
        "/sys/fs/cgroup/user.slice/memory.max": "max\n", "/sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
        "/sys/devices/system/node/has_memory": "0-1\n",
        "/proc/sys/kernel/numa_balancing": "0\n", "/proc/sys/vm/swappiness": "1\n", "/proc/sys/fs/nr_open": "1048576\n",
        "/proc/self/mountinfo": "29 1 259:2 / / rw,relatime shared:1 - ext4 /dev/md0 rw\n"
        "30 29 0:26 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw\n"
        "31 29 9:1 / /models rw,noatime shared:5 - xfs /dev/md1 rw\n",
        "/etc/os-release": 'ID=ubuntu\nVERSION_ID="24.04"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
        "/etc/environment": 'PATH="/usr/local/sbin:/usr/local/bin:/usr/bin"\n',
        "/etc/apt/apt.conf.d/20auto-upgrades": 'APT::Periodic::Unattended-Upgrade "1";\n',
        "/etc/apt/apt.conf.d/50unattended-upgrades": 'Unattended-Upgrade::Package-Blacklist {\n//  "nvidia-";\n};\n',
        "/run/systemd/system/x": "", "/proc/net/tcp": "  sl  local_address\n   0: 0100007F:0016 00000000:0000 0A\n",
        "/usr/local/cuda-12.8/bin/nvcc": "", "/usr/include/python3.12/Python.h": "",
    }  # fmt: skip
    devices = [f"/dev/nvidia{n}" for n in range(count)] + ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    headers = [f"/usr/local/cuda-12.8/include/{name}" for name in machine.HEADERS]
    nvcc = "/usr/local/cuda-12.8/bin/nvcc"
    archs = "compute_50 compute_75 compute_80 compute_86 compute_89 compute_90 compute_100 compute_101 compute_120"
    tools: dict[str, Any] = {
        QUERY: "".join(_csv(n, slot) for n, slot in enumerate(SLOTS[:count])),
        XML: _xml("".join(_gpu_xml(slot, n, NAME, 97887, 131072) for n, slot in enumerate(SLOTS[:count])), count),
        TOPO: _matrix(count, lambda a, b: "NODE" if a // 4 == b // 4 else "SYS", "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"),
        P2P: _matrix(count, lambda a, b: "OK", ""),
        "modinfo nvidia": MODINFO, "ldconfig -p": LDCONFIG, "dmesg": DMESG,
        "lspci -D -vv": "\n".join([BRIDGE.format(slot="0000:00:01.1"), *(CARD.format(slot=s) for s in SLOTS[:count])]),
        f"{nvcc} --version": "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.8, V12.8.93\n",
        f"{nvcc} --list-gpu-arch": "\n".join(archs.split()) + "\n",
        "gcc -dumpfullversion -dumpversion": "13.3.0\n", "c++ -dumpfullversion -dumpversion": "13.3.0\n",
        "python3.12 -I -c*": "/usr/include/python3.12\n",
        "systemctl show*": shown + "\n", "dpkg-query -W*": (1, dpkg, "dpkg-query: no packages found matching cuda-drivers*\n"),
        "apt-cache -o*": "", "apt-get": "",
    }  # fmt: skip
    base = "/lib/x86_64-linux-gnu"
    links = {f"{base}/libcuda.so.1": f"{base}/libcuda.so.{DRIVER}", f"{base}/libnvidia-ml.so.1": f"{base}/libnvidia-ml.so.{DRIVER}",
             f"{base}/libnuma.so.1": f"{base}/libnuma.so.1.0.0"}  # fmt: skip
    links |= {f"/sys/bus/pci/devices/{slot}/driver": "/sys/bus/pci/drivers/nvidia" for slot in SLOTS}
    return Recorded(files, tools, links, paths=[*devices, *headers])


def fallen() -> Recorded:
    """One card of eight has fallen off the bus: the driver lists seven, the bus reads ones."""
    node = blackwell()
    gone = "c1"
    node.files[f"/sys/bus/pci/devices/0000:{gone}:00.0/config"] = "\ufffd" * 64
    node.tools[QUERY] = "".join(row for row in node.tools[QUERY].splitlines(True) if f":{gone.upper()}:" not in row)
    lost = f"Unable to determine the device handle for GPU6: 0000:{gone.upper()}:00.0: Unknown Error\n"
    node.tools[QUERY] = (255, lost + node.tools[QUERY], "")  # and the other cards' rows after it
    node.tools[XML] = re.sub(rf'\t<gpu id="00000000:{gone.upper()}:.*?</gpu>\n', "", node.tools[XML], flags=re.S)
    dead = (
        f"0000:{gone}:00.0 3D controller: NVIDIA Corporation GB202GL [RTX PRO 6000 Blackwell Server Edition] (rev ff)"
    )
    node.tools["lspci -D -vv"] = node.tools["lspci -D -vv"].replace(
        CARD.format(slot=f"0000:{gone}:00.0"), f"{dead} (prog-if ff)\n\t!!! Unknown header type 7f\n"
    )
    node.tools["dmesg"] += (
        f"[84211.0] NVRM: Xid (PCI:0000:{gone}:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        f"[84211.1] NVRM: GPU 0000:{gone}:00.0: GPU has fallen off the bus.\n"
        f"[84211.2] NVRM: Xid (PCI:0000:{gone}:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)\n"
    )
    seven = _matrix(7, lambda a, b: "OK", "")
    node.tools |= {P2P: seven, TOPO: seven.replace("OK", "NODE")}
    return node


def mig() -> Recorded:
    """MIG is on for one card: its memory and utilisation read N/A."""
    node = blackwell()
    node.tools[QUERY] = node.tools[QUERY].replace("Disabled", "Enabled", 1)
    node.tools[XML] = (
        node.tools[XML].replace("<current_mig>Disabled", "<current_mig>Enabled", 1)
        .replace("<used>0 MiB</used>", "<used>N/A</used>", 1).replace("<gpu_util>0 %", "<gpu_util>N/A", 1)
    )  # fmt: skip
    return node


def mismatched() -> Recorded:
    """The driver's libraries were upgraded under the loaded module."""
    node = blackwell()
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.178\n"
    node.tools |= dict.fromkeys((QUERY, XML, TOPO, P2P), (18, said, ""))
    base = "/lib/x86_64-linux-gnu"
    node.links |= {f"{base}/lib{n}.so.1": f"{base}/lib{n}.so.580.178.04" for n in ("cuda", "nvidia-ml")}
    node.tools["modinfo nvidia"] = MODINFO.replace(DRIVER, "580.178.04")
    return node


def container() -> Recorded:
    """The same machine from inside a container: no systemd, no lspci or modinfo, a small /dev/shm, limits of its own."""
    node = blackwell()
    for tool in (
        "lspci -D -vv",
        "modinfo nvidia",
        "systemctl show*",
    ):
        del node.tools[tool]
    node.tools["dmesg"] = (1, "", "dmesg: read kernel buffer failed: Operation not permitted\n")
    del node.files["/run/systemd/system/x"]
    node.files |= {
        "/.dockerenv": "", "/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": f"{256 * GIB}\n",
        "/sys/fs/cgroup/cpu.max": "1600000 100000\n", "/etc/ld.so.preload": "/usr/local/vgpu/libvgpu.so\n",
        "/proc/self/mountinfo": "1 0 0:50 / / rw,relatime - overlay overlay rw,lowerdir=/a\n"
        "2 1 0:51 / /dev/shm rw,nosuid,nodev,noexec - tmpfs shm rw,size=65536k\n",
    }  # fmt: skip
    node.sizes["/dev/shm"] = {"size": 64 << 20, "free": 64 << 20, "free_inodes": 10**6}
    return node


def laptop() -> Recorded:
    """A plain laptop: no NVIDIA GPU, no compiler, 16 GB, everything mounted from one disk."""
    kept = ("/proc/cmdline", "/proc/self/status", "/proc/self/cgroup", "/proc/sys", "/etc", "/run", "/proc/net")
    node = blackwell(0)
    files = {path: text for path, text in node.files.items() if path.startswith(kept)}
    files |= {
        "/proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {9 * GIB // 1024} kB\nSwapTotal: 2097148 kB\n",
        "/proc/cpuinfo": "".join(CPUINFO.format(n=n) for n in range(8)), "/proc/self/status": "Mems_allowed_list:\t0\n",
        "/sys/devices/system/node/has_memory": "0\n", "/proc/modules": "i915 3000000 8 - Live 0x0\n",
        "/proc/self/mountinfo": "29 1 259:2 / / rw,relatime shared:1 - btrfs /dev/nvme0n1p3 rw\n"
        "30 29 0:26 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    }  # fmt: skip
    tools = {name: said for name, said in node.tools.items() if name.split(" ")[0] in ("dmesg", "systemctl")}
    tools |= {"ldconfig -p": LDCONFIG.partition("\tlibnvidia-ml")[0], "dpkg-query -W*": (1, "", "none\n"), "apt-get": "",
              "dmesg": (1, "", "dmesg: read kernel buffer failed: Operation not permitted\n"),
              "journalctl -k*": "Hint: You are currently not seeing messages from other users and the system.\n"}  # fmt: skip
    source = Recorded(files, tools, {})
    source.sizes = {path: {"size": 500 * GIB, "free": 40 * GIB, "free_inodes": None} for path in ("/opt/gpuwright",)}
    return source


MACHINES = {f.__name__: f for f in (blackwell, fallen, mig, mismatched, container, laptop)}
