"""Make the host's settings as declared, and put back what nobody declares any more.

REQUEST: root, manifest (what was set before, and what was there then), apply (rows: id, kind, target, value, and what
the kind needs), revert (entries of the manifest by id), files (path, text, mode), remove (paths), unit (what sets at
boot what no file can; None where there is no systemd). Nothing is changed before the manifest says what was there: so a
run that is killed can be put back too. A setting that cannot be made so fails the host, after the others. What is no
longer there to be put back counts as put back, and is said.
"""

import glob
import re

SHM = "/dev/shm"
FOLDER = os.path.dirname(REQUEST["manifest"])  # root's, whoever a root of gpuwright belongs to
PROBLEMS = []


def say(text):
    print(text, flush=True)


def run(*argv, timeout_s=60):
    """(exit code, all it said) of a tool. Package managers are given no limit: one that is ended leaves a mess."""
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive", NEEDRESTART_SUSPEND="1", LC_ALL="C")
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def must(*argv, timeout_s=60):
    code, said = run(*argv, timeout_s=timeout_s)
    if code:
        raise OSError("%s: %s" % (" ".join(argv), said[-1500:] or "exit code %d" % code))
    return said


def chosen(path):
    """What a file of /proc or /sys holds: the word in brackets where it offers several."""
    with open(path) as handle:
        text = handle.readline().strip()
    return (re.findall(r"\[([^\]]+)\]", text) or [" ".join(text.split())])[0]


def write(path, value):
    """Write a value into such a file, and read it back."""
    with open(path, "w") as handle:
        handle.write(value)
    if chosen(path) != value:
        raise OSError("%s reads %s after %s was written" % (path, chosen(path), value))


class Kind:
    """What a kind of setting was `before`, how it is applied, how it is put back. `more`: what was before, where it is
    applied to more than the first time.
    """

    def before(self, row):
        return None

    def more(self, first, now):
        return first

    def apply(self, row):
        pass

    def revert(self, entry):
        pass


class Sysctl(Kind):
    def path(self, target):
        return "/proc/sys/" + target.partition(":")[2].replace(".", "/")

    def before(self, row):
        return chosen(self.path(row["target"]))

    def apply(self, row):
        write(self.path(row["target"]), row["value"])

    def revert(self, entry):
        if os.path.exists(self.path(entry["target"])):
            write(self.path(entry["target"]), entry["before"])
        else:
            say("%s is no more: nothing to put back" % self.path(entry["target"]))


class KernelFile(Kind):
    """before: the value by file."""

    def files(self, row):
        return sorted(glob.glob(row["target"].partition(":")[2]))

    def before(self, row):
        return {path: chosen(path) for path in self.files(row)}

    def more(self, first, now):
        return dict(now, **first)

    def apply(self, row):
        for path in self.files(row):
            write(path, row["value"])

    def revert(self, entry):
        for path, value in entry["before"].items():
            if os.path.exists(path):
                write(path, value)


class SharedMemory(Kind):
    """before: the mount's own size option, or None where it is the kernel's half of the memory."""

    def before(self, row):
        with open("/proc/self/mountinfo") as handle:
            lines = [line for line in handle if line.split()[4] == SHM]
        if not lines:
            raise OSError("%s is no mount of its own" % SHM)
        found = re.search(r"\bsize=(\w+)", lines[-1].rpartition(" - ")[2])
        return found.group(1) if found else None

    def apply(self, row):
        space = os.statvfs(SHM)
        if space.f_blocks * space.f_frsize < int(row["value"]) << 30:
            must("mount", "-o", "remount,size=%sG" % row["value"], SHM)

    def revert(self, entry):
        must("mount", "-o", "remount,size=%s" % (entry["before"] or "50%"), SHM)


class Service(Kind):
    def unit(self, target):
        return target.partition(":")[2]

    def before(self, row):
        unit = self.unit(row["target"])
        return {"enabled": run("systemctl", "is-enabled", unit)[1], "active": run("systemctl", "is-active", unit)[1]}

    def apply(self, row):
        must("systemctl", "enable", "--now", self.unit(row["target"]))

    def revert(self, entry):
        unit = self.unit(entry["target"])
        if run("systemctl", "show", unit, "--property=LoadState", "--value")[1] != "loaded":
            say("%s is no more: nothing to put back" % unit)
            return
        if entry["before"]["enabled"] == "disabled":
            must("systemctl", "disable", unit)
        if entry["before"]["active"] in ("inactive", "failed"):
            must("systemctl", "stop", unit)


class PowerLimit(Kind):
    """before: the limit in W by slot."""

    def before(self, row):
        text = must("nvidia-smi", "--query-gpu=pci.bus_id,power.limit", "--format=csv,noheader,nounits")
        return dict(re.findall(r"^(\S+), ([\d.]+)$", text, re.M))

    def more(self, first, now):
        return dict(now, **first)

    def apply(self, row):
        must("nvidia-smi", "--power-limit=%s" % row["value"])

    def revert(self, entry):
        there, failed = self.before(entry), []
        for slot, watts in entry["before"].items():
            if slot not in there:
                say("the GPU in %s is no more: nothing to put back" % slot)
                continue
            code, said = run("nvidia-smi", "--id=%s" % slot, "--power-limit=%s" % watts)
            failed += ["%s: %s" % (slot, said)] if code else []
        if failed:
            raise OSError("; ".join(failed))


def dpkg():
    """{package: its two letters of state} of all that dpkg knows, with the architecture where it is foreign."""
    rows = run("dpkg-query", "-W", "-f=${binary:Package}\t${db:Status-Abbrev}\n")[1].splitlines()
    pairs = [line.split("\t") for line in rows if "\t" in line]
    own = ":" + run("dpkg", "--print-architecture")[1]
    return {name[: -len(own)] if name.endswith(own) else name: state for name, state in pairs}


class Hold(Kind):
    """before: the packages that were not held."""

    def before(self, row):
        found = [name for name, state in dpkg().items() if state[1:2] == "i" and state[:1] != "h"]
        names = [name for name in found if name.startswith(tuple(row["prefixes"]))]
        return [name for name in names if not any(word in name for word in row["but_not"])]

    def more(self, first, now):
        return first + [name for name in now if name not in first]

    def apply(self, row):
        names = self.before(row)
        if names:
            must("apt-mark", "hold", *names)

    def revert(self, entry):
        known = dpkg()
        names = [name for name in entry["before"] if known.get(name, "")[:1] == "h"]
        if names:
            must("apt-mark", "unhold", *names)


class Packages(Kind):
    """before: the package manager, and the packages that were not there."""

    def absent(self, manager, names):
        if manager == "dnf":
            return [name for name in names if run("rpm", "-q", name)[0]]
        there = dpkg()
        return [name for name in names if there.get(name, "")[1:2] != "i"]

    def before(self, row):
        return {"manager": row["manager"], "names": self.absent(row["manager"], row["names"])}

    def more(self, first, now):
        return dict(first, names=first["names"] + [name for name in now["names"] if name not in first["names"]])

    def apply(self, row):
        names = self.absent(row["manager"], row["names"])
        if not names:
            return
        if row["manager"] == "dnf":
            must("dnf", "--assumeyes", "--quiet", "install", *names, timeout_s=None)
            return
        if run("dpkg", "--audit")[1]:
            must("dpkg", "--configure", "-a", timeout_s=None)  # an earlier run was ended in the middle
        # It removes nothing else; the lists are fetched anew only where the old ones do not do.
        wait = ("-o", "DPkg::Lock::Timeout=300")
        install = ("apt-get", "--yes", "--quiet", "--no-install-recommends", "--no-remove", *wait, "install", *names)
        if run(*install, timeout_s=None)[0]:
            must("apt-get", "--quiet", *wait, "update", timeout_s=None)
            must(*install, timeout_s=None)

    def revert(self, entry):
        names, manager = entry["before"]["names"], entry["before"]["manager"]
        absent = self.absent(manager, names)
        there = [name for name in names if name not in absent]
        if not there:
            return
        if manager == "dnf":
            code, said = run("rpm", "--erase", "--test", *there)
            if code:
                say(
                    "left installed: %s, which others now need (%s)"
                    % (", ".join(there), said.replace("\n", "; ")[:300])
                )
            else:
                must("rpm", "--erase", *there, timeout_s=None)
            return
        gone = set(re.findall(r"^Remv (\S+)", must("apt-get", "--simulate", "remove", *there), re.M))
        others = sorted(gone - set(names))
        if others:
            say("left installed: %s, which %s now need" % (", ".join(there), ", ".join(others[:5])))
            return
        must("apt-get", "--yes", "--quiet", "-o", "DPkg::Lock::Timeout=300", "remove", *there, timeout_s=None)


class ModuleOption(Kind):
    """The file is all there is."""

    def revert(self, entry):
        say("%s: counts after a reboot" % entry["target"].partition(":")[2])


KINDS = {
    "hold": Hold(), "sysctl": Sysctl(), "kernel_file": KernelFile(), "shared_memory": SharedMemory(),
    "service": Service(), "power_limit": PowerLimit(), "packages": Packages(), "limit": Kind(),
    "module_option": ModuleOption(),
}  # fmt: skip


def attempt(what, action, *arguments):
    """Whether it could be done; what went wrong is kept for the end."""
    try:
        action(*arguments)
        return True
    except Exception as error:
        PROBLEMS.append("%s: %s" % (what, error))
        return False


def ours(path):
    """Whether a file may be written or removed: it is in our folder, it is not there, or our root wrote it."""
    older = path == os.path.join(REQUEST["root"], "run", "boot_settings.sh")
    return older or path.startswith(FOLDER + "/") or owner(path) in (None, REQUEST["root"])


def same(file):
    try:
        with open(file["path"], "rb") as handle:
            return handle.read() == file["text"].encode() and os.stat(file["path"]).st_mode & 0o7777 == file["mode"]
    except OSError:
        return False


def put(file):
    os.makedirs(os.path.dirname(file["path"]), exist_ok=True)
    write_atomic(file["path"], file["text"].encode(), file["mode"])


def remove(path, unit):
    """Remove a file of ours; a unit is disabled first."""
    if unit and path.startswith(UNITS + "/") and os.path.lexists(path):
        run("systemctl", "disable", os.path.basename(path))
    if os.path.lexists(path):
        os.unlink(path)


class Manifest:
    """What was set, and what was there before: written before anything is changed."""

    def __init__(self, path):
        self.path = path
        self.before = os.path.join(REQUEST["root"], "run", "system.json")  # where an older gpuwright kept it
        found = read_json(path if os.path.exists(path) else self.before) or {}
        self.settings, self.files = found.get("settings", {}), set(found.get("files", []))

    def keep(self):
        write_json(self.path, {"settings": self.settings, "files": sorted(self.files)})
        if os.path.exists(self.before):
            os.unlink(self.before)

    def note(self, row):
        kind, first = KINDS[row["kind"]], self.settings.get(row["id"])
        now = kind.before(row)
        before = kind.more(first["before"], now) if first else now
        self.settings[row["id"]] = {
            "kind": row["kind"], "target": row["target"], "before": before, "value": row["value"],
        }  # fmt: skip
        self.keep()


def main():
    os.umask(0o022)  # who may not set anything may look
    os.makedirs(FOLDER, exist_ok=True)
    manifest, unit = Manifest(REQUEST["manifest"]), REQUEST["unit"]
    for name, entry in REQUEST["revert"].items():
        if attempt(name, KINDS[entry["kind"]].revert, entry):
            say("%s: as it was before" % name)
            manifest.settings.pop(name, None)
            manifest.keep()
    order = list(KINDS)  # holds first: what is installed after them upgrades nothing that is held
    for row in sorted(REQUEST["apply"], key=lambda row: order.index(row["kind"])):
        first = manifest.settings.get(row["id"])
        if first and first["target"] != row["target"]:
            continue  # it could not be put back, so what is there now is not what was there before
        if attempt(row["id"], manifest.note, row) and attempt(row["id"], KINDS[row["kind"]].apply, row):
            say("%s: %s" % (row["id"], row["value"] or "done"))
    wanted = {file["path"]: file for file in REQUEST["files"]}
    manifest.files |= set(wanted)
    manifest.keep()
    changed = [path for path, file in wanted.items() if not same(file)]
    for path in REQUEST["remove"]:
        if not ours(path):
            say("%s is not ours any more: left as it is" % path)
        elif not attempt(path, remove, path, unit):
            continue
        changed.append(path)
        manifest.files.discard(path)
    for path in changed:
        if path in wanted and ours(path):
            attempt(path, put, wanted[path])
    units = [path for path in (*wanted, *changed) if path.startswith(UNITS + "/")]
    if unit and units:
        attempt(unit, must, "systemctl", "daemon-reload")
        if "%s/%s" % (UNITS, unit) in wanted:
            attempt(unit, must, "systemctl", "enable", unit)
    manifest.keep()
    if PROBLEMS:
        fail(
            "\n".join(PROBLEMS)
            + "\nset it by hand where it can be (a container's kernel settings are its host's), or leave the row out of"
            " `system` in group_data"
        )


main()
