"""What the machine is like: GPUs, driver, toolchain, limits, disks. Reads only; every tool with a timeout of its own.

Needs no request of its own: the control machine parses recorded tool output with the very same code. A reading is a
function of a source (the node, or a recorded one) and of what it is asked; it answers with plain values, or raises
Unobserved with the reason: a tool that is missing, refused, hung, or says what cannot be understood.
"""

import fnmatch
import glob as globs
import json
import os
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
import xml.etree.ElementTree as tree

SMI_TIMEOUT_S = 20  # without persistence it wakes every GPU first
TOOL_TIMEOUT_S = 8
MOST_BYTES = 32 << 20  # of one tool's output
PLACES = os.pathsep.join(("/usr/local/sbin", "/usr/sbin", "/sbin"))  # of lspci and modinfo, for a user who is not root


class Unobserved(Exception):
    """A reading that could not be made, with the reason."""


class Node:
    """The machine itself, as a source of readings."""

    def read(self, path):
        """The text of a file of /proc, /sys or /etc. Raises OSError."""
        parts, left = [], MOST_BYTES
        with open(path, "rb", buffering=0) as handle:
            while left > 0:
                part = handle.read(1 << 16)  # a file of /proc/sys is refused to a larger buffer
                if not part:
                    break
                parts.append(part)
                left -= len(part)
        return b"".join(parts).decode("utf-8", "replace")

    def exists(self, path):
        return os.path.exists(path)

    def glob(self, pattern):
        return sorted(globs.glob(pattern))

    def real(self, path):
        return os.path.realpath(path)

    def which(self, name):
        return shutil.which(name, path=os.environ.get("PATH", os.defpath) + os.pathsep + PLACES)

    def run(self, argv, timeout_s=TOOL_TIMEOUT_S):
        """(exit code, stdout, stderr) of a tool. One that hangs is ended with all its children; one that cannot be
        ended (it waits for a driver that does not answer) is left behind.
        """
        path = self.which(argv[0])
        if path is None:
            raise Unobserved("%s is not installed" % argv[0])
        environment = dict(os.environ, LC_ALL="C", LANG="C", LANGUAGE="C")
        try:
            started = subprocess.Popen(
                [path, *argv[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=environment, start_new_session=True, cwd="/",
            )  # fmt: skip
        except OSError as error:
            raise Unobserved("%s cannot be run: %s" % (argv[0], error.strerror)) from None
        ends = time.monotonic() + timeout_s
        said = {started.stdout: [], started.stderr: []}
        why = gather(said, ends)
        try:
            code = started.wait(0.5 if why else max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            code, why = None, why or "did not end"
        if why:
            try:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait(0.5)
            except (OSError, subprocess.TimeoutExpired):
                pass
        out, err = (b"".join(said[pipe]).decode("utf-8", "replace") for pipe in (started.stdout, started.stderr))
        for pipe in said:
            pipe.close()
        if why:
            raise Unobserved("%s %s within %g s" % (" ".join(argv), why, timeout_s))
        return code, out, err

    def space(self, path):
        """{"size", "free" (bytes), "free_inodes"} of the file system of a path, or of its nearest folder there."""
        while not os.path.exists(path):
            path = os.path.dirname(path)
        found = os.statvfs(path)
        inodes = found.f_favail if found.f_files else None  # btrfs and others have no fixed number of them
        return {"size": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize, "free_inodes": inodes}

    def limit(self, name):
        """[soft, hard] of a resource limit of this session; None: unlimited."""
        pair = resource.getrlimit(getattr(resource, name))
        return [None if each == resource.RLIM_INFINITY else each for each in pair]

    def environ(self):
        return dict(os.environ)

    def kernel(self):
        return os.uname().release

    def libc(self):
        try:
            return os.confstr("CS_GNU_LIBC_VERSION")
        except (ValueError, OSError):
            return None


def gather(said, ends):
    """Read pipes, {pipe: [what it gave]}, to their end; why it was given up, or None."""
    pipes, size = list(said), 0
    while pipes:
        ready = select.select(pipes, [], [], max(0, ends - time.monotonic()))[0]
        if not ready or time.monotonic() > ends:
            return "did not answer"
        if size > MOST_BYTES:
            return "said more than can be read"
        for pipe in ready:
            part = os.read(pipe.fileno(), 1 << 16)
            said[pipe].append(part)
            size += len(part)
            if not part:
                pipes.remove(pipe)
    return None


def said_by(source, argv, timeout_s=TOOL_TIMEOUT_S):
    """What a tool prints. Raises Unobserved with its own words where it fails."""
    code, out, err = source.run(argv, timeout_s)
    if code:
        refuse(argv, code, out, err)
    return out


def refuse(argv, code, out, err):
    """Raises Unobserved with the words of a tool that failed."""
    shown = " ".join(each.partition("=")[0] for each in argv)
    lines = [line.strip() for line in (err.strip() or out.strip()).splitlines() if line.strip()]
    raise Unobserved("%s: %s" % (shown, " ".join(lines[:3])[:300] or "exit code %d" % code))


def text_of(source, path):
    """A file's text; None when there is no such file. Raises Unobserved when it may not be read."""
    try:
        return source.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unobserved("%s cannot be read: %s" % (path, error.strerror or error)) from None


def first_line(source, path):
    text = text_of(source, path)
    return None if text is None else text.strip().partition("\n")[0].strip()


def stated(text, what):
    """A value as nvidia-smi states it; None for "N/A", which a card says of what it does not have. Raises Unobserved
    for what a sick card says in its place ("[Unknown Error]", "[GPU requires reset]"): it must not pass for none.
    """
    text = (text or "").strip()
    bare = text.strip("[]")
    if bare in ("", "N/A", "Not Supported", "Not Active"):
        return None
    if text.startswith("[") or re.search("error|requires reset|ERR!", bare, re.I):
        raise Unobserved("nvidia-smi says %r of %s" % (text, what))
    return text


def number(text):
    """The first number of a text ("450.00 W", "16x"), or None ("N/A", "[Unknown Error]")."""
    found = re.match(r"\s*(-?\d+(?:\.\d+)?)", text or "")
    if not found:
        return None
    value = float(found.group(1))
    return int(value) if value.is_integer() else value


def slot_of(text):
    """A PCI address as /sys writes it: 0000:c1:00.0 for "00000000:C1:00.0", "C1:00.0" and "0000:c1:00"."""
    found = re.search(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", (text or "").lower())
    if not found:
        return None
    domain, bus, device, function = found.groups()
    return "%s:%s:%s.%s" % ((domain or "0000")[-4:], bus, device, function or "0")


# --- NVIDIA's tools -------------------------------------------------------------------------------------------------

GPU_FIELDS = (
    "index", "name", "pci.bus_id", "compute_cap", "memory.total", "vbios_version", "mig.mode.current",
    "persistence_mode", "compute_mode", "pcie.link.gen.max", "pcie.link.width.current", "power.limit",
    "power.min_limit", "power.max_limit", "clocks.max.mem", "ecc.mode.current",
)  # fmt: skip


# What is said of a card that the driver has lost, in front of the others' rows and with an exit code of its own.
NO_HANDLE = re.compile(r"Unable to determine the device handle for GPU")


def parse_gpus(text):
    """The rows of `nvidia-smi --query-gpu=GPU_FIELDS --format=csv,noheader,nounits`."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(GPU_FIELDS):
            if line.strip() and not NO_HANDLE.search(line):
                raise Unobserved("nvidia-smi --query-gpu: cannot be understood: %s" % line.strip()[:200])
            continue
        row = dict(zip(GPU_FIELDS, cells))
        slot = slot_of(row["pci.bus_id"])
        if slot is None:
            raise Unobserved("nvidia-smi --query-gpu: names no PCI address: %s" % line.strip()[:200])
        row = {name: stated(text, "%s of %s" % (name, slot)) for name, text in row.items()}
        found.append(
            {
                "index": number(row["index"]),
                "slot": slot,
                "name": row["name"],
                "compute_capability": row["compute_cap"],
                "memory_mib": number(row["memory.total"]),
                "vbios": row["vbios_version"],
                "mig": row["mig.mode.current"],
                "persistence": row["persistence_mode"],
                "compute_mode": row["compute_mode"],
                "pcie_gen": number(row["pcie.link.gen.max"]),
                "pcie_width": number(row["pcie.link.width.current"]),
                "power_limit_w": number(row["power.limit"]),
                "power_min_w": number(row["power.min_limit"]),
                "power_max_w": number(row["power.max_limit"]),
                "memory_clock_mhz": number(row["clocks.max.mem"]),
                "ecc": row["ecc.mode.current"],
            }
        )
    if not found:
        raise Unobserved("nvidia-smi --query-gpu: lists no GPU: %s" % " ".join(text.split())[:200])
    return found


def gpus(source, asked):
    argv = ["nvidia-smi", "--query-gpu=" + ",".join(GPU_FIELDS), "--format=csv,noheader,nounits"]
    code, out, err = source.run(argv, SMI_TIMEOUT_S)
    rows = [line for line in out.splitlines() if line.count(",") == len(GPU_FIELDS) - 1]
    if code and not (rows and NO_HANDLE.search(out + err)):
        refuse(argv, code, out, err)
    return parse_gpus(out)


# Reasons for a slow clock that are a fault of power or cooling; a software power cap is how a power limit works.
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


def parse_gpu_health(text):
    """`nvidia-smi -q -x`: {"gpus": [...]}, with what is wrong with each GPU and who uses it."""
    try:
        log = tree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", text.strip()))
    except (tree.ParseError, ValueError) as error:
        raise Unobserved("nvidia-smi -q -x: is not whole XML (%s)" % error) from None
    found = []
    for gpu in log.findall("gpu"):
        slot = slot_of(gpu.get("id"))
        if slot is None:
            raise Unobserved("nvidia-smi -q -x: a GPU without a PCI address")

        def field(path, gpu=gpu, slot=slot):
            return stated(gpu.findtext(path), "%s of %s" % (path, slot))

        reasons = gpu.find("clocks_event_reasons")
        old = "clocks_throttle_reasons"  # before driver 535
        slow = [
            name
            for name in SLOWDOWNS
            if field("clocks_event_reasons/clocks_event_reason_%s" % name) == "Active"
            or (reasons is None and field("%s/clocks_throttle_reason_%s" % (old, name)) == "Active")
        ]
        processes = [
            {"pid": number(each.findtext("pid")), "name": (each.findtext("process_name") or "").strip()[:200],
             "memory_mib": number(each.findtext("used_memory"))}
            for each in gpu.findall("processes/process_info")
        ]  # fmt: skip
        found.append(
            {
                "slot": slot,
                "bar1_mib": number(field("bar1_memory_usage/total")),
                "memory_used_mib": number(field("fb_memory_usage/used")),
                "utilization": number(field("utilization/gpu_util")),
                "temperature_c": number(field("temperature/gpu_temp")),
                "slowdowns": slow,
                "ecc_uncorrectable": sum(
                    number(field("ecc_errors/volatile/%s" % name)) or 0
                    for name in (
                        "dram_uncorrectable", "sram_uncorrectable", "sram_uncorrectable_parity",
                        "sram_uncorrectable_secded",
                    )
                ),
                "remap_pending": field("remapped_rows/remapped_row_pending"),
                "remap_failure": field("remapped_rows/remapped_row_failure"),
                "recovery": field("gpu_recovery_action"),
                "virtualization": field("gpu_virtualization_mode/virtualization_mode"),
                "fabric": ", ".join(
                    each for each in (field("fabric/state"), field("fabric/status")) if each not in (None, "Success")
                )
                or None,
                "processes": processes,
            }
        )  # fmt: skip
    return {"gpus": found}


def gpu_health(source, asked):
    return parse_gpu_health(said_by(source, ["nvidia-smi", "-q", "-x"], SMI_TIMEOUT_S))


LINKS = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV\d+")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def parse_matrix(text, cell):
    """A matrix of GPU pairs as `nvidia-smi topo` prints it: {"0-1": "NV18", ...} for each pair once."""
    lines = [ESCAPES.sub("", line) for line in text.splitlines()]
    head = next((line.split() for line in lines if line.split()[:1] == ["GPU0"] and "X" not in line.split()[:2]), None)
    if head is None:
        raise Unobserved("nvidia-smi topo: shows no matrix: %s" % " ".join(text.split())[:200])
    count = sum(1 for word in head if re.fullmatch(r"GPU\d+", word))
    found = {}
    for line in lines:
        words = line.split()
        if words and words is not head and re.fullmatch(r"GPU\d+", words[0]) and words != head:
            row, cells = int(words[0][3:]), words[1 : 1 + count]
            if len(cells) < count or not all(re.fullmatch(cell, each) for each in cells):
                raise Unobserved("nvidia-smi topo: a row cannot be understood: %s" % line.strip()[:200])
            found.update({"%d-%d" % (row, column): each for column, each in enumerate(cells) if column > row})
    if len(found) != count * (count - 1) // 2:
        raise Unobserved("nvidia-smi topo: the matrix is not whole: %d pairs of %d GPUs" % (len(found), count))
    return found


def topology(source, asked):
    return parse_matrix(said_by(source, ["nvidia-smi", "topo", "-m"], SMI_TIMEOUT_S), LINKS)


def p2p(source, asked):
    return parse_matrix(said_by(source, ["nvidia-smi", "topo", "-p2p", "r"], SMI_TIMEOUT_S), re.compile(r"[A-Z]+"))


# --- the driver and the kernel ----------------------------------------------------------------------------------------


def driver(source, asked):
    """The loaded kernel module: {"version", "open"}; both None when none is loaded."""
    text = text_of(source, "/proc/driver/nvidia/version")
    if text is None:
        return {"version": None, "open": None}
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    if not found:
        raise Unobserved("/proc/driver/nvidia/version cannot be understood: %s" % " ".join(text.split())[:200])
    return {"version": found.group(1), "open": "Open Kernel Module" in text}


def parse_modinfo(text):
    """{"version", "license"} of `modinfo nvidia`."""
    pairs = dict(re.findall(r"^(\w+):[ \t]*(.*?)[ \t]*$", text, re.M))
    if "license" not in pairs:
        raise Unobserved("modinfo nvidia: names no license: %s" % " ".join(text.split())[:200])
    return {"version": pairs.get("version"), "license": pairs["license"]}


def module_on_disk(source, asked):
    """The module that the next boot loads; Debian's own packages give it another name."""
    try:
        return parse_modinfo(said_by(source, ["modinfo", "nvidia"]))
    except Unobserved:
        if source.exists("/etc/alternatives/nvidia"):
            return parse_modinfo(said_by(source, ["modinfo", "nvidia-current"]))
        raise


def modules(source, asked):
    """The names of the loaded kernel modules."""
    text = text_of(source, "/proc/modules") or ""  # a kernel without modules has no such file
    return sorted(line.split()[0] for line in text.splitlines() if line.strip())


def module_options(source, asked):
    """{"module.option": value} of what is asked for; None where the module is not loaded or has no such option."""
    return {
        name: first_line(source, "/sys/module/%s/parameters/%s" % tuple(name.split(".", 1)))
        for name in asked["module_options"]
    }


def parse_libraries(text, source):
    """{"libcuda.so.1": [{"path", "version"}], ...} of `ldconfig -p`, 64-bit ones; the version is of the file it is."""
    found = {name: [] for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libnuma.so.1")}
    if "=>" not in text:
        raise Unobserved("ldconfig -p: lists nothing")
    for name, kind, path in re.findall(r"^\s*(\S+) \((.*?)\) => (\S+)\s*$", text, re.M):
        if name in found and "x86-64" in kind:
            version = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", source.real(path))
            found[name].append({"path": path, "version": version.group(1) if version else None})
    return found


def libraries(source, asked):
    return parse_libraries(said_by(source, ["ldconfig", "-p"]), source)


XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)(.*)")
# Said over three lines, before the driver has taken the card.
NO_ANSWER = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F:.]+)[^\n]*(?:\n[^\n]*){0,2}?fallen off the bus and is not")
FALLEN = re.compile(r"NVRM: .*?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}).*fallen off the bus")
# A card's own are BAR 0 to 5: older kernels number its ROM, its virtual functions and a bridge's windows from 6 on.
BAR = re.compile(r"pci (\S+): (BAR [0-5])\b.*?(no space|failed to assign|: assigned)")


def parse_kernel_log(text):
    """What the kernel log says of the GPUs: Xids (the last of each kind and slot: {"slot", "xid", "text", "count"}, in
    the order of the last ones), slots whose card has fallen off the bus, devices without address space ({"slot",
    "text"}; a later "assigned" wins), lines about a GPU that cannot be initialised, about PCIe errors, and about
    processes that were ended for want of memory.
    """
    found = {"init_failed": [], "pcie_errors": [], "out_of_memory": []}
    bars, xids, gone = {}, {}, [slot_of(each) for each in NO_ANSWER.findall(text)]
    kinds = (
        ("init_failed", re.compile(r"RmInitAdapter failed|requires use of the NVIDIA open kernel modules", re.I)),
        (
            "pcie_errors",
            re.compile(r"AER:.*(?:Uncorrect|Fatal)|PCIe Bus Error: severity=Uncorrect|Surprise Down", re.I),
        ),
        ("out_of_memory", re.compile(r"Out of memory: Killed process|oom-kill:", re.I)),
    )
    for line in text.splitlines():
        xid = XID.search(line)
        if xid:
            words, key = xid.group(3).strip(" ,")[:160], (slot_of(xid.group(1)), int(xid.group(2)))
            count = xids.pop(key, {"count": 0})["count"] + 1
            xids[key] = {"slot": key[0], "xid": key[1], "text": words, "count": count}
        fallen = FALLEN.search(line)
        if fallen or (xid and xid.group(2) == "79"):
            gone.append(slot_of((fallen or xid).group(1)))
        bar = BAR.search(line)
        if bar and "[io" not in line:
            row = {"slot": slot_of(bar.group(1)), "text": line.strip()[:200]}
            bars[bar.group(1), bar.group(2)] = None if "assigned" in bar.group(3) else row
        for name, pattern in kinds:
            if pattern.search(line):
                found[name].append(line.strip()[:200])
    kept = {name: lines[-20:] for name, lines in found.items()}
    fallen = sorted({slot for slot in gone if slot})
    return dict(kept, xids=list(xids.values()), fallen=fallen, no_space=[row for row in bars.values() if row])


def kernel_log(source, asked):
    """Of this boot, from its beginning: dmesg, or the journal where dmesg may not be read or has lost its beginning."""
    reasons = []
    for argv in (["dmesg"], ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-monotonic"]):
        try:
            text = said_by(source, argv)
            if "Linux version" in text:
                return parse_kernel_log(text)
            reasons.append("%s does not reach back to the boot" % argv[0])
        except Unobserved as why:
            reasons.append(str(why))
    raise Unobserved("; ".join(reasons))


def cmdline(source, asked):
    """The words of the kernel's command line."""
    text = text_of(source, "/proc/cmdline")
    if text is None:
        raise Unobserved("/proc/cmdline does not exist")
    return text.split()


# --- PCI --------------------------------------------------------------------------------------------------------------


def pci(source, asked):
    """NVIDIA's display devices on the bus, whether the driver knows them or not; one that `answers` nothing reads as
    ones.
    """
    found = []
    for folder in source.glob("/sys/bus/pci/devices/*"):
        if first_line(source, folder + "/vendor") != "0x10de":
            continue
        kind = first_line(source, folder + "/class") or ""
        if not kind.startswith("0x03"):  # not the card's audio function
            continue
        bound = source.exists(folder + "/driver")
        found.append(
            {
                "slot": os.path.basename(folder),
                "device": first_line(source, folder + "/device"),
                "answers": not (text_of(source, folder + "/config") or "").startswith("\ufffd" * 4),
                "driver": os.path.basename(source.real(folder + "/driver")) if bound else None,
                "iommu": first_line(source, folder + "/iommu_group/type"),
            }
        )  # fmt: skip
    return found


def parse_lspci(text):
    """{"redirecting": bridges whose ACS sends peer traffic up to the root}.

    Raises Unobserved where the capabilities may not be read, which is only root's.
    """
    redirecting, capable, denied = [], 0, 0
    for block in re.split(r"\n(?=\S)", text.strip()):
        head, _, body = block.partition("\n")
        slot = slot_of(head.split(" ", 1)[0])
        if slot is None:
            raise Unobserved("lspci -vv: cannot be understood: %s" % head[:200])
        denied += "Capabilities: <access denied>" in body
        control = re.search(r"ACSCtl:\s*(.*)", body)
        if control:
            capable += 1
            if re.search(r"(?:ReqRedir|CmpltRedir)\+", control.group(1)) and "PCI bridge" in head:
                redirecting.append(slot)
    if denied and not capable:
        raise Unobserved("lspci -vv: only root may read the capabilities")
    return {"redirecting": redirecting}


def lspci(source, asked):
    return parse_lspci(said_by(source, ["lspci", "-D", "-vv"]))


def iommu(source, asked):
    """Whether an IOMMU is on."""
    return bool(source.glob("/sys/class/iommu/*"))


def devices(source, asked):
    """{"nodes": NVIDIA's device nodes, "made": whether what makes them at need is there}; nvidia-smi makes some."""
    if source.which("nvidia-smi"):
        source.run(["nvidia-smi", "-L"], SMI_TIMEOUT_S)
    nodes = [os.path.basename(path) for path in source.glob("/dev/nvidia*")]
    return {"nodes": nodes, "made": source.which("nvidia-modprobe") is not None}


def infiniband(source, asked):
    return [os.path.basename(path) for path in source.glob("/sys/class/infiniband/*")]


# --- toolchain --------------------------------------------------------------------------------------------------------

HEADERS = ("cuda_runtime.h", "curand.h", "nvrtc.h", "cublas_v2.h", "nv/target")


def toolkit(source, asked):
    """The CUDA toolkit: {"home", "release", "architectures", "missing"}; release None where it has no nvcc."""
    home = asked["cuda_home"]
    if home is None or not source.exists(home + "/bin/nvcc"):
        return {"home": home, "release": None, "architectures": [], "missing": []}
    release = re.search(r"release (\d+\.\d+)", said_by(source, [home + "/bin/nvcc", "--version"]))
    if not release:
        raise Unobserved("%s/bin/nvcc --version: names no release" % home)
    listed = said_by(source, [home + "/bin/nvcc", "--list-gpu-arch"]).split()
    return {
        "home": home,
        "release": release.group(1),
        "architectures": [each.partition("_")[2] for each in listed],
        "missing": [name for name in HEADERS if not source.exists("%s/include/%s" % (home, name))],
    }


def compilers(source, asked):
    """The full version of `gcc`, which nvcc calls, and of `c++`; None where there is none."""
    found = {}
    for name in ("gcc", "c++"):
        found[name] = None
        if source.which(name):
            text = said_by(source, [name, "-dumpfullversion", "-dumpversion"])
            version = re.match(r"\s*(\d+(?:\.\d+)*)", text)
            if not version:
                raise Unobserved("%s -dumpversion: cannot be understood: %s" % (name, text.strip()[:100]))
            found[name] = version.group(1)
    return found


def python_headers(source, asked):
    """Whether the venv's Python, or the one it will be made of, has its headers: {"include", "present"}."""
    code = "import sysconfig; print(sysconfig.get_path('include'))"
    python = next((each for each in asked["pythons"] if each and source.which(each)), None)
    if python is None:
        raise Unobserved("there is no Python yet to ask")
    lines = said_by(source, [python, "-I", "-c", code]).strip().splitlines()
    if not lines:
        raise Unobserved("%s says nothing of its headers" % python)
    return {"include": lines[-1], "present": source.exists(lines[-1] + "/Python.h")}


FATBIN, ELF_KIND = 0xBA55ED50, 2


def architectures(path):
    """The SM versions (such as 90, 120) that a library holds compiled kernels for: it reads only the headers of its
    .nv_fatbin section. Seen to agree with cuobjdump --list-elf on sgl-kernel 0.3.21 and torch 2.9.1.
    """
    found = set()
    with open(path, "rb") as handle:

        def unpack(form, at):
            return struct.unpack(form, os.pread(handle.fileno(), struct.calcsize(form), at))

        if os.pread(handle.fileno(), 4, 0) != b"\x7fELF":
            return []
        (sections,) = unpack("<Q", 0x28)
        size, count, names = unpack("<HHH", 0x3A)
        rows = [unpack("<IIQQQQ", sections + number * size) for number in range(count)]
        for row in rows:
            name = os.pread(handle.fileno(), 16, rows[names][4] + row[0]).partition(b"\0")[0]
            if name not in (b".nv_fatbin", b"__nv_relfatbin"):
                continue
            at, end = row[4], row[4] + row[5]
            while at + 16 <= end:
                magic, _, head, length = unpack("<IHHQ", at)
                if magic != FATBIN:
                    at += 8  # padding
                    continue
                entry, at = at + head, at + max(16, head + length)
                while entry + 32 <= at:
                    kind, _, entry_head, entry_length = unpack("<HHIQ", entry)
                    if kind == ELF_KIND:
                        found.add(unpack("<I", entry + 28)[0])
                    entry += max(16, entry_head + entry_length)
    return sorted(found)


def kernels(source, asked):
    """{library: its SM versions} of what is asked for below site-packages; empty while nothing is installed."""
    found = {}
    for pattern in asked["kernels"]:
        for site in reversed(asked["sites"]):  # so that the first one wins, as in an import
            for path in source.glob("%s/%s" % (site, pattern)):
                try:
                    found[os.path.relpath(path, site)] = architectures(path)
                except (OSError, ValueError, struct.error, IndexError) as error:
                    raise Unobserved("%s cannot be read: %s" % (path, error)) from None
    return found


# --- host -------------------------------------------------------------------------------------------------------------


def memory(source, asked):
    """/proc/meminfo, in bytes: {"total", "available", "swap"}."""
    text = text_of(source, "/proc/meminfo") or ""
    rows = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    if "MemTotal" not in rows or "MemAvailable" not in rows:
        raise Unobserved("/proc/meminfo cannot be understood")
    return {"total": rows["MemTotal"], "available": rows["MemAvailable"], "swap": rows.get("SwapTotal", 0)}


def cgroup(source, asked):
    """The tightest limits of this session's control group and of those above it: {"memory" (bytes), "cpus"}."""
    lines = (text_of(source, "/proc/self/cgroup") or "").splitlines()
    own = next((line[3:] for line in lines if line[:3] == "0::"), "/")
    limits, cpus = [], []
    parts = [part for part in own.split("/") if part and part != ".."]
    for depth in range(len(parts) + 1):
        folder = "/".join(["/sys/fs/cgroup", *parts[:depth]])
        limits.append(number(first_line(source, folder + "/memory.max")))
        quota = (first_line(source, folder + "/cpu.max") or "").split()
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]):
            cpus.append(int(quota[0]) / int(quota[1]))
    # Of the hierarchy before the unified one, a container sees its own group at the top.
    limits.append(number(first_line(source, "/sys/fs/cgroup/memory/memory.limit_in_bytes")))
    quota, period = (number(first_line(source, "/sys/fs/cgroup/cpu/cpu.cfs_%s_us" % n)) for n in ("quota", "period"))
    if quota and period and quota > 0:
        cpus.append(quota / period)
    memory = [each for each in limits if each is not None and each < 1 << 60]  # no limit is written as a huge one
    return {"memory": min(memory, default=None), "cpus": min(cpus, default=None)}


def limits(source, asked):
    """[soft, hard] of this session's limits; None: unlimited. `nr_open`: the most open files that a limit may allow."""
    found = {name: source.limit("RLIMIT_" + name.upper()) for name in ("nofile", "memlock")}
    return dict(found, nr_open=number(first_line(source, "/proc/sys/fs/nr_open")))


def sysctls(source, asked):
    """The values of the names asked for; None where the kernel has no such setting."""
    found = {}
    for name in asked["sysctls"]:
        text = first_line(source, "/proc/sys/" + name.replace(".", "/"))
        found[name] = None if text is None else " ".join(text.split())
    return found


def chosen(source, path):
    """The chosen word of a file such as "always [madvise] never"; its whole text where none is in brackets."""
    text = first_line(source, path)
    found = re.search(r"\[([^\]]+)\]", text or "")
    return found.group(1) if found else text


def kernel_files(source, asked):
    """{pattern: {value: how many files hold it}} of files of /sys, such as the governors of all CPUs."""
    found = {}
    for pattern in asked["kernel_files"]:
        counts = {}
        for path in source.glob(pattern):
            value = chosen(source, path)
            counts[value] = counts.get(value, 0) + 1
        found[pattern] = counts
    return found


def cpu(source, asked):
    """{"model", "count", "hypervisor", "numa_nodes" (those with memory), "nodes_allowed"}."""
    text = text_of(source, "/proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
    flags = (re.search(r"^flags\s*:\s*(.*)$", text, re.M) or [""])[0].split()
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", text_of(source, "/proc/self/status") or "", re.M)
    if not model or not allowed:
        raise Unobserved("/proc/cpuinfo or /proc/self/status cannot be understood")
    return {
        "model": model.group(1),
        "count": len(re.findall(r"^processor\s*:", text, re.M)),
        "hypervisor": "hypervisor" in flags,
        "numa_nodes": ranges(first_line(source, "/sys/devices/system/node/has_memory") or "0"),
        "nodes_allowed": ranges(allowed.group(1)),
    }


def ranges(text):
    """The numbers of a list as the kernel writes it: "0-2,5"."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found += range(int(first), min(int(last or first), int(first) + 4096) + 1)
    return found


def parse_mounts(text):
    """[(mount point, file system, options)] of /proc/self/mountinfo, in the order in which they were mounted."""
    found = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        words, kind = left.split(), right.split()
        if dash and len(words) > 5 and kind:
            point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal.group(1), 8)), words[4])
            found.append(
                (point, kind[0], words[5].split(",") + kind[-1].split(","))
            )  # a disk's errors show in the latter
    return found


def mounts(source, asked):
    """{name: {"at", "kind", "options", "size", "free", "free_inodes"}} of the file systems of the paths asked for."""
    rows = parse_mounts(text_of(source, "/proc/self/mountinfo") or "")
    if not rows:
        raise Unobserved("/proc/self/mountinfo cannot be understood")
    found = {}
    for name, path in asked["mounts"].items():
        real = source.real(path)
        above = [row for row in rows if row[0] == "/" or real == row[0] or real.startswith(row[0].rstrip("/") + "/")]
        if not above:
            raise Unobserved("/proc/self/mountinfo has no file system for %s" % path)
        at, kind, options = max(reversed(above), key=lambda row: len(row[0]))  # of two at one place, the later is seen
        found[name] = dict(source.space(real), at=at, kind=kind, options=options)
    return found


def environment(source, asked):
    """Variables of this session that change how a GPU program starts, and the two files that change every program."""
    wanted = ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_*", "NVIDIA_*", "NCCL_*", "PYTHONHOME", "PYTHONPATH")
    session = source.environ()
    preload = (text_of(source, "/etc/ld.so.preload") or "").split()
    text = text_of(source, "/etc/environment") or ""
    shared = dict(re.findall(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=[\"']?(.*?)[\"']?\s*$", text, re.M))

    def matter(pairs):
        return {k: v[:200] for k, v in sorted(pairs.items()) if any(fnmatch.fnmatchcase(k, each) for each in wanted)}

    return {"session": matter(session), "everyone": matter(shared), "preload": preload}


def system(source, asked):
    """{"os", "os_version", "kernel", "libc", "container", "reboot_required"}."""
    release = dict(re.findall(r"^(\w+)=\"?(.*?)\"?\s*$", text_of(source, "/etc/os-release") or "", re.M))
    container = first_line(source, "/run/systemd/container")
    if not container and source.exists("/.dockerenv"):
        container = "docker"
    if not container and source.exists("/run/.containerenv"):
        container = "podman"
    if not container and "KUBERNETES_SERVICE_HOST" in source.environ():
        container = "kubernetes"
    return {
        "os": release.get("ID"),
        "os_version": release.get("VERSION_ID"),
        "kernel": source.kernel(),
        "libc": (source.libc() or "").rpartition(" ")[2] or None,
        "container": container or None,
        "reboot_required": source.exists("/run/reboot-required"),
    }


def services(source, asked):
    """{unit: {"load", "active", "enabled"}} of the units asked for, as systemd tells it; empty without systemd."""
    if not source.exists("/run/systemd/system"):
        return {}
    found = {}
    names = "--property=Id,LoadState,ActiveState,UnitFileState"
    for block in said_by(source, ["systemctl", "show", names, *asked["services"]]).strip().split("\n\n"):
        pairs = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" not in pairs or "ActiveState" not in pairs:
            raise Unobserved("systemctl show: cannot be understood: %s" % block[:200])
        state = {"load": pairs.get("LoadState"), "active": pairs["ActiveState"], "enabled": pairs.get("UnitFileState")}
        found[pairs["Id"]] = state
    return found


DRIVER_PACKAGES = ("nvidia-*", "libnvidia-*", "cuda-drivers*", "xserver-xorg-video-nvidia-*")


def parse_dpkg(text):
    """{package: {"version", "held"}} of the installed ones of `dpkg-query`."""
    found = {}
    for line in text.splitlines():
        name, tab, rest = line.partition("\t")
        version, _, status = rest.partition("\t")
        if tab and status[1:2] == "i":
            found[name] = {"version": version, "held": status[:1] == "h"}
    return found


def packages(source, asked):
    """{"manager": "apt", "dnf" or None, "installed": {package: {"version", "held"}}, "available": [...]} of what is
    asked for, and of the driver's; held is None where the package manager has no such mark. `available`: those that are
    not installed and that the configured repositories have, of the ones for which this is asked.
    """
    names = list(asked["packages"])
    maybe = asked["packages_maybe"]
    if source.which("dpkg-query") and source.which("apt-get"):
        form = "-f=${binary:Package}\t${Version}\t${db:Status-Abbrev}\n"  # with the architecture where it is foreign
        argv = ["dpkg-query", "-W", form, *names, *DRIVER_PACKAGES]
        code, out, err = source.run(argv)
        if code not in (0, 1):  # it ends with 1 where one of the names is not known, and that is an answer
            refuse(argv, code, out, err)
        native = re.compile(r":(?:amd64|%s)\t" % (os.uname().machine), re.M)
        installed = parse_dpkg(native.sub("\t", out))
        wanted = [name for name in maybe if name not in installed]
        memory = ["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="]  # else it may write its cache
        policy = said_by(source, ["apt-cache", *memory, "policy", *wanted]) if wanted else ""
        blocks = re.findall(r"^(\S+):\n(?:  .*\n)*?  Candidate: (?!\(none\))\S+", policy, re.M)
        return {"manager": "apt", "installed": installed, "available": blocks}
    if source.which("rpm") and source.which("dnf"):
        patterns = [*names, *DRIVER_PACKAGES]
        out = said_by(source, ["rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n", *patterns])
        rows = [line.partition("\t") for line in out.splitlines() if "\t" in line]
        installed = {name: {"version": version, "held": None} for name, _, version in rows}
        wanted = [name for name in maybe if name not in installed]
        query = ["dnf", "--quiet", "--cacheonly", "repoquery", "--queryformat", "%{name}\n", *wanted]
        try:
            listed = said_by(source, query).split() if wanted else []
        except Unobserved:
            listed = []  # dnf has no cache yet: nothing is known to be available
        return {"manager": "dnf", "installed": installed, "available": sorted(set(listed) & set(wanted))}
    return {"manager": None, "installed": {}, "available": []}


def updates(source, asked):
    """Whether packages are upgraded by themselves, and which are left out: {"automatic", "blacklist"}."""
    texts = [text_of(source, path) or "" for path in source.glob("/etc/apt/apt.conf.d/*")]
    text = "\n".join(re.sub(r"^\s*(?://|#).*$", "", each, flags=re.M) for each in texts)
    switch = re.findall(r'APT::Periodic::Unattended-Upgrade\s+"(\w+)"', text)
    block = re.findall(r"Unattended-Upgrade::Package-Blacklist\s*\{(.*?)\}", text, re.S)
    block += re.findall(r'Unattended-Upgrade::Package-Blacklist::\s*("[^"]*")', text)
    automatic = bool(switch) and switch[-1] not in ("0", "no", "false")
    return {"automatic": automatic, "blacklist": re.findall(r'"([^"]+)"', " ".join(block))}


def ports(source, asked):
    """Which of the TCP ports asked for are listened on, on any address."""
    wanted, taken = set(asked["ports"]), set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in (text_of(source, table) or "").splitlines()[1:]:
            words = row.split()
            if len(words) > 3 and words[3] == "0A":
                taken.add(int(words[1].rpartition(":")[2], 16))
    return sorted(wanted & taken)


def cuda_compat(source, asked):
    """Libraries of CUDA's forward compatibility, which stand in for the driver's where the loader finds them first."""
    return source.glob("/usr/local/cuda*/compat/libcuda.so.1")


READINGS = {
    "gpus": gpus, "gpu_health": gpu_health, "topology": topology, "p2p": p2p, "driver": driver,
    "module_on_disk": module_on_disk, "modules": modules, "module_options": module_options, "libraries": libraries,
    "kernel_log": kernel_log, "cmdline": cmdline, "pci": pci, "lspci": lspci, "iommu": iommu, "devices": devices,
    "infiniband": infiniband, "toolkit": toolkit, "compilers": compilers, "python_headers": python_headers,
    "kernels": kernels, "memory": memory, "cgroup": cgroup, "limits": limits, "sysctls": sysctls,
    "kernel_files": kernel_files, "cpu": cpu, "mounts": mounts, "environment": environment, "system": system,
    "services": services, "packages": packages, "updates": updates, "ports": ports,
    "cuda_compat": cuda_compat,
}  # fmt: skip


def reading(function, source, asked):
    """One reading: {"value", "problem", "seconds"}, of which either value or problem is None. Never raises."""
    began = time.monotonic()
    value = problem = None
    try:
        value = function(source, asked)
    except Unobserved as why:
        problem = str(why)
    except Exception as error:  # what the tool says is not ours to trust: it must cost one reading, not the answer
        problem = "cannot be understood: %s: %s" % (type(error).__name__, str(error)[:200])
    return {"value": value, "problem": problem, "seconds": round(time.monotonic() - began, 3)}


def readings(source, asked):
    """Every reading that is asked for, side by side. One that does not come back at all is left behind."""
    found, threads = {}, []

    def make(name):
        found[name] = reading(READINGS[name], source, asked)

    for name in asked["readings"]:
        thread = threading.Thread(target=make, args=(name,), daemon=True)
        thread.start()
        threads.append(thread)
    ends = time.monotonic() + SMI_TIMEOUT_S + 2 * TOOL_TIMEOUT_S
    for thread in threads:
        thread.join(max(0, ends - time.monotonic()))
    lost = {"value": None, "problem": "did not come back: the kernel does not answer", "seconds": None}
    return {name: found.get(name, lost) for name in asked["readings"]}


def begin_readings(asked):
    """Start the readings in a process of their own, beside the rest of the observation: what finish_readings needs.

    It holds neither our output nor our errors open, so that a tool that hangs for ever does not keep the session.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return reader
    os.close(reader)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    with os.fdopen(writer, "wb") as out:
        out.write(json.dumps(readings(Node(), asked)).encode() + b"\n")
    os._exit(0)


def finish_readings(reader, asked):
    """The answer of begin_readings; every reading with a problem where there is none."""
    answer, ends = b"", time.monotonic() + SMI_TIMEOUT_S + 3 * TOOL_TIMEOUT_S
    while not answer.endswith(b"\n"):
        if not select.select([reader], [], [], max(0, ends - time.monotonic()))[0]:
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        answer += part
    try:
        return json.loads(answer)
    except ValueError:
        lost = {"value": None, "problem": "the readings of the machine did not come back", "seconds": None}
        return dict.fromkeys(asked["readings"], lost)
