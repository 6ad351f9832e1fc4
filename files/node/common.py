"""What every node script shares: sent in front of each of them. Standard library only, Python 3.9 or later.

gpuwright sends a script over stdin to `python3 -I -`, so nothing lies on the node before it runs. REQUEST, the
script's input, is set in front of this text.
"""

import hashlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
import xmlrpc.client


def plainly(kind, error, trace):
    """What a full disk, a mount or a permission refuses is said in one line; a fault of the script keeps its trace."""
    if not issubclass(kind, OSError):
        sys.__excepthook__(kind, error, trace)
        return
    said = "%s: %s" % (error.filename, error.strerror) if error.filename else str(error)
    print("failed: %s" % said, file=sys.stderr, flush=True)


sys.excepthook = plainly


def sha256_of(path):
    """The sha256 of a file, in hex. By plain reads: of small files, a buffer takes longer to make than to fill."""
    digest, handle = hashlib.sha256(), os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for block in iter(lambda: os.read(handle, 1 << 18), b""):
            digest.update(block)
    finally:
        os.close(handle)
    return digest.hexdigest()


def size_of(path):
    """A file's size in bytes, 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def read_json(path):
    """A file's JSON object, or None if it is absent or holds none (a half-written or foreign file counts as absent).

    Only of a regular file: reading a pipe would wait for ever.
    """
    try:
        with open(path if os.path.isfile(path) else os.devnull, "rb") as handle:
            found = json.loads(handle.read())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_atomic(path, data, mode=0o644):
    """Replace `path` by `data`: written beside it, flushed, read back by hash, renamed. Old file or new, never half.

    The mode is `mode`, or that of the file replaced where `mode` is None; an owner is kept where we may set it.
    A hard link is never written through: the new file is a new inode.
    """
    path = os.path.realpath(path)
    beside = path + ".gpuwright-new"  # one name, so that what a killed run left is overwritten by the next
    old = os.stat(path) if os.path.exists(path) else None
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as handle:
            os.fchmod(handle.fileno(), 0o600)  # also where a killed run left one: it may hold a secret
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(beside, mode if mode is not None else old.st_mode & 0o7777)
        if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
            try:
                os.chown(beside, old.st_uid, old.st_gid)
            except PermissionError:
                pass  # only root may give a file away; to an unprivileged owner the new file is as good as the old one
        if sha256_of(beside) != hashlib.sha256(data).hexdigest():
            raise OSError("what was written to %s does not read back the same: is the disk full or failing?" % beside)
        os.replace(beside, path)
    except OSError as error:
        if os.path.exists(beside):
            os.unlink(beside)
        if error.errno and not error.filename:  # of a write, which does not know of what
            raise OSError(error.errno, error.strerror, path) from None
        raise
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path, value, mode=0o644):
    """write_atomic of a JSON value, keys sorted."""
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode)


def now():
    """UTC time, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def answer_with(value):
    """Print a script's answer, on a line of its own: a shell's start-up file may have printed half a line before it."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a file's name may be any bytes, which no JSON can hold
        value = json.loads(text.encode("utf-8", "replace"))
    print("\n" + json.dumps(value))


def fail(message):
    """End the script with a message a person can act on."""
    print(message, flush=True)
    sys.exit(1)


class UnixTransport(xmlrpc.client.Transport):
    """XML-RPC over a unix socket, which is how supervisord is spoken to."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def make_connection(self, host):
        connection = http.client.HTTPConnection("localhost", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(30)
        connection.sock.connect(self.path)
        return connection


def supervisor(socket_path):
    """supervisord's API, or None when no supervisord answers on the socket."""
    if not os.path.exists(socket_path):
        return None
    api = xmlrpc.client.ServerProxy("http://localhost/RPC2", transport=UnixTransport(socket_path)).supervisor
    try:
        api.getState()
    except (OSError, xmlrpc.client.Error, http.client.HTTPException):
        return None
    return api


def supervisor_status(socket_path):
    """supervisord's word on the server, or None when it does not know it or does not answer.

    {"manager", "unit", "status" (in its own words), "pid", "cgroup", "ended" (it does not run), "restarts", "enabled"
    (at boot; None where nothing can be enabled), "dropins" (files that change the unit), "stale" (its file was written
    since its manager read it)}.
    """
    api = supervisor(socket_path)
    try:
        info = api.getProcessInfo("sglang-server") if api is not None else None
    except (OSError, xmlrpc.client.Error, http.client.HTTPException):
        return None
    if info is None:
        return None
    status = info["statename"]
    return {
        "manager": "supervisor",
        "unit": None,
        "status": status,
        "pid": info["pid"] if status in ("RUNNING", "STARTING") and info["pid"] else None,
        "cgroup": None,
        "ended": status in ("FATAL", "EXITED", "BACKOFF"),
        "restarts": None,
        "enabled": None,
        "dropins": [],
        "stale": False,
    }


def memory_bytes():
    """The machine's memory."""
    with open("/proc/meminfo") as handle:
        return int(handle.readline().split()[1]) * 1024


def has_systemd():
    """Whether PID 1 is systemd, as sd_booted(3) tells it."""
    return os.path.isdir("/run/systemd/system")


def systemctl(*arguments):
    """(exit code, what it said) of systemctl."""
    done = subprocess.run(
        ["systemctl", "--no-ask-password", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


UNITS = "/etc/systemd/system"


def owner(path):
    """The root whose deploy wrote a file of /etc: None when there is no such file, "" when it is not of gpuwright."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            first = handle.readline()
    except OSError:
        return None
    head, _, rest = first.partition("# Written by gpuwright for ")
    return rest.rpartition(": ")[0] if not head else ""


def unit_path(unit):
    return "%s/%s.service" % (UNITS, unit)


def units_of(root):
    """The systemd units of servers that deploys of `root` wrote, by name; that of the host's settings is none."""
    files = sorted(os.listdir(UNITS)) if os.path.isdir(UNITS) else []
    names = [name[: -len(".service")] for name in files if name.endswith(".service")]
    return [name for name in names if not name.endswith("-settings") and owner(unit_path(name)) == root]


def unit_owner(unit):
    """As `owner` of a unit's file; "" also when the unit comes from elsewhere, such as a package."""
    found = owner(unit_path(unit))
    if found is None and has_systemd():
        # systemd still names the file of a unit that was deleted under it.
        loaded = systemctl("show", unit, "--property=FragmentPath", "--value")[1]
        return "" if loaded not in ("", unit_path(unit)) else None
    return found


def systemd_status(unit):
    """systemd's word on a unit of ours, as supervisor_status gives it; None when systemd does not answer."""
    if not has_systemd():
        return None
    names = "ActiveState,SubState,MainPID,ControlGroup,NRestarts,Result,Job,UnitFileState,DropInPaths,NeedDaemonReload"
    code, said = systemctl("show", unit, "--property=" + names)
    found = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    if code or "ActiveState" not in found:
        return None
    state, pid = found["ActiveState"], int(found["MainPID"] or 0)
    result = found["Result"] if found["Result"] != "success" else found["SubState"]
    waiting = found["SubState"] == "auto-restart"
    return {
        "manager": "systemd",
        "unit": unit,
        "status": "%s (%s)" % (state, result) if state != "active" else state,
        "pid": pid if pid and state in ("active", "activating", "reloading") and not waiting else None,
        "cgroup": found["ControlGroup"] or None,
        "ended": waiting or (state in ("failed", "inactive") and not found.get("Job")),
        "restarts": int(found["NRestarts"] or 0),
        "enabled": found.get("UnitFileState") == "enabled",
        # Of this unit alone: what a distribution says of every service is not of us.
        "dropins": [path for path in found.get("DropInPaths", "").split() if "/%s.service.d/" % unit in path],
        "stale": found.get("NeedDaemonReload") == "yes",
    }


def http_status(path, timeout):
    """The status of GET `path` from the server REQUEST speaks of, or None when nothing answers in `timeout` seconds."""
    connection = http.client.HTTPConnection(REQUEST["address"], REQUEST["port"], timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def process(pid):
    """{"ppid", "pgid", "started"} of a live process (`started`: clock ticks since boot), or None; zombies are dead."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as handle:
            fields = handle.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return {"ppid": int(fields[1]), "pgid": int(fields[2]), "started": int(fields[19])}


def boot_id():
    """The kernel's id of this boot: process ids of another boot mean nothing."""
    with open("/proc/sys/kernel/random/boot_id") as handle:
        return handle.read().strip()


def server_processes(record):
    """The live processes of the server that `record` (run/server.json) describes: its process group, which is the one
    that its supervisor gave it, and the marked ones of its control group.

    A number is used again once it is free. So while the group's leader lives, it must be the very process that was
    started; when it is gone, only members with our mark are ours.
    """
    if not record or record.get("boot_id") != boot_id():
        return []
    leader = process(record["pgid"]) if record["pgid"] > 0 else None
    if leader and leader["started"] != record["started_ticks"]:
        return []
    # Every environment is read for it, so only where it decides.
    marked = set(marked_processes(REQUEST["root"])) if record.get("cgroup") or not leader else set()
    found = {pid for pid in cgroup_processes(record["cgroup"]) if pid in marked} if record.get("cgroup") else set()
    for pid in processes():
        info = process(pid)
        if info and info["pgid"] == record["pgid"] and (leader or pid in marked):
            found.add(pid)
    return sorted(found)


def processes():
    """Every process of this PID namespace: a container's are seen from its host, and are not the host's."""
    own = os.readlink("/proc/self/ns/pid")
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink("/proc/%s/ns/pid" % name) == own:
                found.append(int(name))
        except OSError:
            continue  # it is gone, or another user's
    return found


def cgroup_processes(cgroup):
    """The live processes of a control group and of those below it, in the unified hierarchy or in systemd's own."""
    found = []
    for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"):
        for folder, _, names in os.walk(mount + cgroup):
            if "cgroup.procs" in names:
                try:
                    with open(os.path.join(folder, "cgroup.procs")) as handle:
                        found += [int(pid) for pid in handle.read().split() if process(int(pid))]
                except OSError:
                    continue
    return sorted(set(found))


def marked_processes(root):
    """The live processes that a supervisor of `root` started, by the mark that it gives them and that they inherit. It
    finds those that are in no record: of an earlier crash, after which the record was lost or written anew.
    """
    mark, found = b"GPUWRIGHT_SUPERVISED=" + root.encode(), []
    for pid in processes():
        try:
            with open("/proc/%d/environ" % pid, "rb") as handle:
                if mark in handle.read().split(b"\0") and process(pid):
                    found.append(pid)
        except OSError:
            continue
    return sorted(found)


SECRET = re.compile(r"(?i)([\w-]*(?:token(?!s)|secret|passw|[_-]key|apikey|credential)[\w-]*[= ])\S+")


def masked(text):
    """A command line without the values of what looks like a secret: it is told to whoever asks for a verdict."""
    return SECRET.sub(r"\1***", text)


def words_of(pid, name):
    """The NUL-separated words of a process's cmdline or environ, or None."""
    try:
        with open("/proc/%d/%s" % (pid, name), "rb") as handle:
            return handle.read().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        return None


def command_line(pid):
    """A process's command line, for a message."""
    return masked(" ".join(words_of(pid, "cmdline") or []).strip())[:200]


def listeners(port):
    """The socket inodes that listen on a TCP port, IPv4 and IPv6."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as handle:
                rows = handle.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def port_holder(port):
    """Who listens on a port: None when free, else {"pid", "command"} (pid None when another user's)."""
    inodes = listeners(port)
    if not inodes:
        return None
    wanted = {"socket:[%s]" % inode for inode in inodes}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            for descriptor in os.listdir("/proc/%s/fd" % name):
                if os.readlink("/proc/%s/fd/%s" % (name, descriptor)) in wanted:
                    return {"pid": int(name), "command": command_line(int(name))}
        except OSError:
            continue
    return {"pid": None, "command": "a process of another user"}
