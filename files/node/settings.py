"""Make the host's settings as declared, and put back what nobody declares any more.

REQUEST: manifest (what was set before, and what was there then), apply (rows: id, kind, target, value, and what the
kind needs), revert (entries of the manifest by id), files (path, text, mode), remove (paths), unit (what sets at boot
what no file can; None where there is no systemd). Nothing is changed before the manifest says what was there: so a run
that is killed can be put back too. A setting that cannot be made so fails the host, after the others.
"""

import glob
import re

SHM = "/dev/shm"
PROBLEMS = []


def say(text):
    print(text, flush=True)


def run(*argv, timeout_s=1800):
    """(exit code, all it said) of a tool."""
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive", LC_ALL="C")
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def must(*argv):
    code, said = run(*argv)
    if code:
        raise OSError("%s: %s" % (" ".join(argv), said[-1500:] or "exit code %d" % code))
    return said


def first_line(path):
    with open(path) as handle:
        return handle.readline().strip()


def write(path, value):
    """Write a value into a file of /proc or /sys, and read it back."""
    with open(path, "w") as handle:
        handle.write(value)
    now = first_line(path)
    now = (re.findall(r"\[(\w+)\]", now) or [" ".join(now.split())])[0]
    if now != value:
        raise OSError("%s reads %s after %s was written" % (path, now, value))


class Sysctl:
    """before: the value."""

    def path(self, target):
        return "/proc/sys/" + target.partition(":")[2].replace(".", "/")

    def before(self, row):
        return " ".join(first_line(self.path(row["target"])).split())

    def apply(self, row):
        write(self.path(row["target"]), row["value"])

    def revert(self, entry):
        write(self.path(entry["target"]), entry["before"])


class KernelFile:
    """before: the value by file."""

    def before(self, row):
        found = {}
        for path in sorted(glob.glob(row["target"].partition(":")[2])):
            text = first_line(path)
            found[path] = (re.findall(r"\[(\w+)\]", text) or [text])[0]
        return found

    def apply(self, row):
        for path in sorted(glob.glob(row["target"].partition(":")[2])):
            write(path, row["value"])

    def revert(self, entry):
        for path, value in entry["before"].items():
            if os.path.exists(path):
                write(path, value)


class SharedMemory:
    """before: the mount's own size option, or none where it is the kernel's half of the memory."""

    def before(self, row):
        with open("/proc/self/mountinfo") as handle:
            lines = [line for line in handle if line.split()[4] == SHM]
        if not lines:
            raise OSError("%s is no mount of its own" % SHM)
        found = re.search(r"\bsize=(\w+)", lines[-1].rpartition(" - ")[2])
        return found.group(1) if found else None

    def apply(self, row):
        must("mount", "-o", "remount,size=%sG" % row["value"], SHM)

    def revert(self, entry):
        must("mount", "-o", "remount,size=%s" % (entry["before"] or "50%"), SHM)


class Service:
    """before: whether it was enabled, and active."""

    def unit(self, target):
        return target.partition(":")[2]

    def before(self, row):
        unit = self.unit(row["target"])
        return {"enabled": run("systemctl", "is-enabled", unit)[1], "active": run("systemctl", "is-active", unit)[1]}

    def apply(self, row):
        must("systemctl", "enable", "--now", self.unit(row["target"]))

    def revert(self, entry):
        unit = self.unit(entry["target"])
        if entry["before"]["enabled"] == "disabled":
            must("systemctl", "disable", unit)
        if entry["before"]["active"] in ("inactive", "failed"):
            must("systemctl", "stop", unit)


class PowerLimit:
    """before: the limit in W by slot."""

    def before(self, row):
        text = must("nvidia-smi", "--query-gpu=pci.bus_id,power.limit", "--format=csv,noheader,nounits")
        return dict(re.findall(r"^(\S+), ([\d.]+)$", text, re.M))

    def apply(self, row):
        must("nvidia-smi", "--power-limit=%s" % row["value"])

    def revert(self, entry):
        for slot, watts in entry["before"].items():
            must("nvidia-smi", "--id=%s" % slot, "--power-limit=%s" % watts)


class Hold:
    """before: the packages that were not held."""

    def names(self, row):
        rows = run("dpkg-query", "-W", "-f=${Package}\t${db:Status-Abbrev}\n")[1].splitlines()
        pairs = [line.split("\t") for line in rows if "\t" in line]
        return [n for n, s in pairs if n.startswith(tuple(row["prefixes"])) and s[:2] not in ("hi", "un", "rc", "dn")]

    def before(self, row):
        return self.names(row)

    def apply(self, row):
        names = self.names(row)
        if names:
            must("apt-mark", "hold", *names)

    def revert(self, entry):
        if entry["before"]:
            must("apt-mark", "unhold", *entry["before"])


class Packages:
    """before: the packages that were not there."""

    def absent(self, row):
        if row["manager"] == "apt":
            text = run("dpkg-query", "-W", "-f=${Package}\t${db:Status-Abbrev}\n", *row["names"])[1]
            there = re.findall(r"^(\S+)\t.i", text, re.M)
        else:
            there = [name for name in row["names"] if run("rpm", "-q", "--whatprovides", name)[0] == 0]
        return [name for name in row["names"] if name not in there]

    def before(self, row):
        return {"manager": row["manager"], "names": self.absent(row)}

    def apply(self, row):
        names = self.absent(row)
        if not names:
            return
        if row["manager"] == "dnf":
            must("dnf", "--assumeyes", "--quiet", "install", *names)
            return
        # Never what would take away or exchange something else; the lists are fetched anew only where they are old.
        install = ("apt-get", "--yes", "--quiet", "--no-install-recommends", "--no-remove", "install")
        wait = ("-o", "DPkg::Lock::Timeout=300")
        code, said = run(*install, *wait, *names)
        if code:
            must("apt-get", "--quiet", *wait, "update")
            must(*install, *wait, *names)

    def revert(self, entry):
        names, manager = entry["before"]["names"], entry["before"]["manager"]
        row = {"manager": manager, "names": names}
        there = [name for name in names if name not in self.absent(row)]
        if not there:
            return
        if manager == "dnf":
            must("dnf", "--assumeyes", "--quiet", "remove", "--noautoremove", *there)
            return
        gone = set(re.findall(r"^Remv (\S+)", must("apt-get", "--simulate", "remove", *there), re.M))
        others = sorted(gone - set(names))
        if others:
            say("left installed: %s, which %s now need" % (", ".join(there), ", ".join(others[:5])))
            return
        must("apt-get", "--yes", "--quiet", "remove", *there)


class FileAlone:
    """Limits and module options: the file is all there is, and it goes with its row."""

    def before(self, row):
        return None

    def apply(self, row):
        pass

    def revert(self, entry):
        pass


KINDS = {
    "sysctl": Sysctl(), "kernel_file": KernelFile(), "shared_memory": SharedMemory(), "service": Service(),
    "power_limit": PowerLimit(), "hold": Hold(), "packages": Packages(), "limit": FileAlone(),
    "module_option": FileAlone(),
}  # fmt: skip


def attempt(what, action, argument):
    """Whether it could be done; what went wrong is kept for the end."""
    try:
        action(argument)
        return True
    except OSError as error:
        PROBLEMS.append("%s: %s" % (what, error))
        return False


def main():
    manifest = read_json(REQUEST["manifest"]) or {}
    kept, files = manifest.get("settings", {}), set(manifest.get("files", []))

    def keep():
        write_json(REQUEST["manifest"], {"settings": kept, "files": sorted(files)})

    for name, entry in REQUEST["revert"].items():
        if attempt(name, KINDS[entry["kind"]].revert, entry):
            say("%s: as it was before" % name)
            kept.pop(name, None)
            keep()
    for row in REQUEST["apply"]:
        kind = KINDS[row["kind"]]
        entry = kept.get(row["id"])

        def note(row=row, kind=kind, entry=entry):
            before = kind.before(row)
            if entry is None:
                kept[row["id"]] = {"kind": row["kind"], "target": row["target"], "before": before}
            elif row["kind"] in ("hold", "packages"):  # more of them than when it was first made so
                first = entry["before"]["names"] if row["kind"] == "packages" else entry["before"]
                more = before["names"] if row["kind"] == "packages" else before
                first += [name for name in more if name not in first]
            kept[row["id"]] = dict(kept[row["id"]], value=row["value"])
            keep()

        if attempt(row["id"], lambda _: note(), None) and attempt(row["id"], kind.apply, row):
            say("%s: %s" % (row["id"], row["value"] or "done"))
    wanted = {file["path"]: file for file in REQUEST["files"]}
    files |= set(wanted)
    keep()
    unit = REQUEST["unit"]
    unit_file = "%s/%s" % (UNITS, unit) if unit else None
    changed = [path for path, file in wanted.items() if not same(file)]
    for path in REQUEST["remove"]:
        if path == unit_file and os.path.exists(path):
            attempt(path, lambda _: must("systemctl", "disable", unit), None)
        if os.path.exists(path):
            os.unlink(path)
            changed.append(path)
        files.discard(path)
    for path in changed:
        if path in wanted:
            attempt(path, put, wanted[path])
    if unit and unit_file in changed:
        attempt(unit, lambda _: must("systemctl", "daemon-reload"), None)
        if unit_file in wanted:
            attempt(unit, lambda _: must("systemctl", "enable", unit), None)
    keep()
    if PROBLEMS:
        fail(
            "\n".join(PROBLEMS)
            + "\nset it by hand where it can be (a container's kernel settings are its host's), or leave the row out of"
            " `system` in group_data"
        )


def same(file):
    try:
        with open(file["path"], "rb") as handle:
            return handle.read() == file["text"].encode() and os.stat(file["path"]).st_mode & 0o7777 == file["mode"]
    except OSError:
        return False


def put(file):
    os.makedirs(os.path.dirname(file["path"]), exist_ok=True)
    write_atomic(file["path"], file["text"].encode(), file["mode"])


main()
