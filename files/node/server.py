"""Start, stop and await the server that supervisor or systemd keeps, printing what happens as it happens.

REQUEST: root, actions (of "stop", "start", "enable", "adopt", "wait", "retire", "roll_back" and "shut_down", in order),
attempt (a name for it), saw (started_at of the record that was observed, "*" for any), manager ("supervisor" or
"systemd"), unit, address, port, script, log, tier, runs_on, conf, files (what the server is started from), deadline_s,
seen and never (regular expressions over the log since this start), phases [[regular expression, words]].

run/server.json is the record of the server that was started last; run/ready.json what it was started from, once it was
ready; run/previous.json that of the server before it, until the new one is ready; run/failure.json the last failure.
"""

import re
import signal
import subprocess

ROOT = REQUEST["root"]
RUN = os.path.join(ROOT, "run")
RECORD, READY, PREVIOUS, FAILURE = (
    os.path.join(RUN, name) for name in ("server.json", "ready.json", "previous.json", "failure.json")
)
# SGLang lives on after some fatal errors; these end the wait at once. Its own words, read in 0.5.9's sources.
FATAL = re.compile(r"\[Errno \d+\] error while attempting to bind|Scheduler hit an exception|Received sigquit")
TELLING = re.compile(
    r"^\[\d{4}-\d\d-\d\d [\d:]+[^\]]*\] (?!.*(WARNING|HTTP/1|INFO: |Ignore import error))(.+)|^(Loading .*\d+%.*)"
)
# What supervisord is started with; the launch script sets the server's own environment.
PLAIN_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": RUN, "LANG": "C.UTF-8"}


class Failed(Exception):
    """A server that did not come up; the message says how it showed."""


def say(message):
    print(message, flush=True)


def remove(*paths):
    for path in paths:
        if os.path.exists(path):
            os.unlink(path)


def until(holds, seconds):
    """Whether `holds()` comes true within `seconds`."""
    deadline = time.time() + seconds
    while not holds():
        if time.time() > deadline:
            return False
        time.sleep(0.1)
    return True


class Supervisor:
    """supervisord, from gpuwright's own tools, over its unix socket."""

    program = "sglang-server"

    def __init__(self):
        self.socket = os.path.join(RUN, "supervisor.sock")
        self.log = os.path.join(ROOT, "logs", "supervisord.log")

    def seen(self):
        return supervisor_status(self.socket)

    def start(self):
        api = supervisor(self.socket)
        if api is None:
            command = [os.path.join(ROOT, "tools", "bin", "supervisord"), "-c", REQUEST["conf"]]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=PLAIN_ENV
            )
            if done.returncode:
                raise Failed("supervisord does not start:\n%s" % done.stdout.decode("utf-8", "replace"))
            if not until(lambda: supervisor(self.socket) is not None, 20):
                raise Failed("supervisord does not answer on %s; see %s" % (self.socket, self.log))
            api = supervisor(self.socket)
        else:
            added, changed, removed = api.reloadConfig()[0]
            for name in changed + removed:
                api.removeProcessGroup(name)
            for name in changed + added:
                api.addProcessGroup(name)
        api.startProcess(self.program, False)

    def stop(self):
        """Ask for the end; does not wait for it."""
        api = supervisor(self.socket)
        try:
            if api is not None:
                api.stopProcess(self.program, False)
        except xmlrpc.client.Fault:
            pass  # it does not run

    def settled(self):
        return (self.seen() or {"status": ""})["status"] != "STOPPING"

    def enable(self):
        """supervisord does not start at boot."""

    def keep_down(self):
        """supervisord starts nothing by itself."""

    def shut_down(self):
        api = supervisor(self.socket)
        if api is not None:
            api.shutdown()
            if not until(lambda: supervisor(self.socket) is None, 20):
                fail("supervisord does not end; see %s" % self.log)
            say("supervisord ends")

    def retire(self):
        self.shut_down()
        remove(REQUEST["conf"])


class Systemd:
    """A unit of the system's systemd."""

    def __init__(self, unit):
        self.unit, self.log = unit, "journalctl -u %s" % unit

    def seen(self):
        return systemd_status(self.unit)

    def start(self):
        systemctl("daemon-reload")
        systemctl("reset-failed", self.unit)  # fails where nothing has failed
        for command in (("enable",), ("start", "--no-block")):  # the unit's own start ends when the server answers
            code, said = systemctl(*command, self.unit)
            if code:
                raise Failed("systemctl %s %s: %s" % (command[0], self.unit, said))

    def stop(self):
        """Ask for the end; does not wait for it."""
        systemctl("stop", "--no-block", self.unit)

    def settled(self):
        return not (self.seen() or {"status": ""})["status"].startswith("deactivating")

    def enable(self):
        """Have the unit read anew, and started at boot; what runs is left alone."""
        systemctl("daemon-reload")
        code, said = systemctl("enable", self.unit)
        if code:
            fail("systemctl enable %s: %s" % (self.unit, said))

    def keep_down(self):
        systemctl("disable", self.unit)

    def shut_down(self):
        self.keep_down()
        systemctl("reset-failed", self.unit)  # SGLang ends itself by SIGKILL when it is asked to end: no failure here

    def retire(self):
        """Of a unit whose server has been stopped: nothing of it stays."""
        systemctl("disable", self.unit)
        for path in (unit_path(self.unit), "/etc/logrotate.d/%s" % self.unit):
            if owner(path) == ROOT:
                os.unlink(path)
        systemctl("daemon-reload")
        say("unit %s is removed" % self.unit)


def declared():
    """The manager that REQUEST names."""
    return Systemd(REQUEST["unit"]) if REQUEST["manager"] == "systemd" else Supervisor()


def managers():
    """Every manager that may keep a server of this root: supervisord, and each unit that a deploy of it wrote."""
    return [Supervisor(), *(Systemd(unit) for unit in (units_of(ROOT) if has_systemd() else []))]


def retire():
    """Stop what an earlier manager keeps, and remove its configuration: it would start beside the declared one."""
    for manager in managers():
        if isinstance(manager, Supervisor):
            if REQUEST["manager"] != "supervisor" and (os.path.exists(REQUEST["conf"]) or manager.seen()):
                manager.retire()
        elif REQUEST["manager"] != "systemd" or manager.unit != REQUEST["unit"]:
            manager.stop()
            until(manager.settled, 60)
            manager.retire()


def identity(seen):
    """What server_processes needs to know of the live server process that a manager has, or None."""
    pid = seen["pid"] if seen else None
    info = process(pid) if pid else None
    if info is None:
        return None
    return {
        "pid": pid,
        "pgid": pid,  # either supervisor gives it a group of its own
        "started_ticks": info["started"],
        "boot_id": boot_id(),
        "manager": seen["manager"],
        "cgroup": seen["cgroup"],
    }


def end(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def stop(patience=30):
    """End the server and every process that is ours: asked first, killed after `patience` seconds."""
    record = read_json(RECORD)
    groups, managed = [record], set()
    for manager in managers():
        seen = manager.seen()
        if seen and seen["pid"]:
            say("stopping the server (pid %d) and its children" % seen["pid"])
            groups.append(identity(seen))  # not the recorded, if its manager has restarted it
        managed.update(cgroup_processes(seen["cgroup"]) if seen and seen["cgroup"] else [])

    known = {}

    def left():
        """What still lives of it. A process that is ending shows its mark no more, and is known by its start."""
        for pid in {pid for group in groups for pid in server_processes(group)} | set(marked_processes(ROOT)):
            found = process(pid)
            if found:  # else it ended between the two looks, and must not be waited for
                known.setdefault(pid, found["started"])
        return sorted(pid for pid, started in known.items() if (process(pid) or {}).get("started") == started)

    ours = left()
    managed.update(pid for group in groups[1:] for pid in server_processes(group))
    strays = [pid for pid in ours if pid not in managed]
    for pid in strays:
        say("ending a process left of an earlier server: %d %s" % (pid, command_line(pid)[:60]))
    for manager in managers():
        manager.stop()
    end(strays, signal.SIGTERM)
    if not until(lambda: not left(), patience):
        say("still there after %d s, so killed: %s" % (patience, ", ".join(map(str, left()))))
        end(left(), signal.SIGKILL)
        if not until(lambda: not left(), 10):
            fail("processes %s of the server cannot be ended, even by SIGKILL" % left())
    for manager in managers():
        if not until(manager.settled, 45):
            fail("the server is gone, but its supervisor still holds it for stopping; see %s" % manager.log)
    wait_for_gpu_memory(ours)
    ready = read_json(READY)
    if ready:
        write_json(PREVIOUS, ready, mode=0o600)
    remove(RECORD, READY)


def wait_for_gpu_memory(pids):
    """Until the driver has the memory of the ended processes back; where there is no nvidia-smi, there is no GPU.

    In a container nvidia-smi may name no process at all; then what is in use on each GPU is waited for, and told.
    """
    if not pids or nvidia_smi("--query-gpu=index") is None:
        return

    def held():
        return sorted({int(row) for row in nvidia_smi("--query-compute-apps=pid") or [] if row.isdigit()} & set(pids))

    def used():
        rows = [row.split(",") for row in nvidia_smi("--query-gpu=index,memory.used") or []]
        return ["GPU %s: %s MiB" % (row[0], row[1].strip()) for row in rows if float(row[1]) > GPU_IDLE_MIB]

    if not until(lambda: not held() and (nvidia_smi("--query-compute-apps=pid") or not used()), 60):
        if held():
            fail(
                "processes %s are gone, but their GPU memory is not: nvidia-smi still lists them after 60 s\n"
                "    -> reset the GPU (nvidia-smi --gpu-reset) or reboot, then deploy again" % held()
            )
        say("GPU memory is in use, and nvidia-smi names no process: %s" % ", ".join(used()))


GPU_IDLE_MIB = 1024


def nvidia_smi(query):
    """The rows that nvidia-smi answers, or None where it is not or does not answer."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [row for row in done.stdout.decode().splitlines() if row.strip()] if done.returncode == 0 else None


def start():
    """Start the server of REQUEST under its manager, and record which process it is."""
    until(lambda: not port_holder(REQUEST["port"]), 5)
    holder = port_holder(REQUEST["port"])
    if holder:
        raise Failed(
            "port %d is held by pid %s (%s): end it, or set another port"
            % (REQUEST["port"], holder["pid"], holder["command"])
        )
    retire()
    manager, offset = declared(), log_size()
    try:
        manager.start()
    except (OSError, xmlrpc.client.Error, http.client.HTTPException) as error:
        raise Failed("its supervisor cannot start it: %s" % getattr(error, "faultString", error)) from None
    until(lambda: (manager.seen() or {"pid": 0})["pid"] or (manager.seen() or {"ended": 0})["ended"], 15)
    seen = manager.seen()
    record = identity(seen) or {"pid": None, "pgid": -1, "started_ticks": 0, "boot_id": boot_id(), "cgroup": None}
    write_record(record, offset, REQUEST["runs_on"])
    if record["pid"] is None:
        raise Failed("it ended at once (%s)" % (seen["status"] if seen else "its supervisor does not know it"))
    say("started tier %s: pid %d, log %s" % (REQUEST["tier"], record["pid"], REQUEST["log"]))


def write_record(record, offset, runs_on):
    record.update(
        started_at=now(), tier=REQUEST["tier"], script=REQUEST["script"], log=REQUEST["log"], log_offset=offset,
        runs_on=runs_on,
    )  # fmt: skip
    write_json(RECORD, record)


# What the launch script says in the log before it starts the engine.
STARTS = re.compile(rb"^\[gpuwright\] \S+ tier \S+ starts$", re.M)


def adopt():
    """Take the server that its manager has started again by itself, after a crash or a reboot, for the recorded one."""
    old, found = read_json(RECORD) or {}, identity(declared().seen())
    if found is None:
        raise Failed("it is not running any more")
    offset = 0
    if os.path.exists(REQUEST["log"]):
        with open(REQUEST["log"], "rb") as handle:
            offset = max([0, *(start.start() for start in STARTS.finditer(handle.read()))])
    write_record(found, offset, old.get("runs_on"))
    say("taking over pid %d, which its supervisor has started" % found["pid"])


def log_size():
    return os.path.getsize(REQUEST["log"]) if os.path.exists(REQUEST["log"]) else 0


class Log:
    """A log from an offset on, read as it grows (from the beginning, once it was rotated)."""

    def __init__(self, path, offset):
        self.path, self.offset, self.text = path, offset, ""

    def read(self):
        try:
            with open(self.path, "rb") as handle:
                if os.fstat(handle.fileno()).st_size < self.offset:
                    self.offset = 0
                handle.seek(self.offset)
                fresh = handle.read()
        except OSError:
            return self.text
        self.offset += len(fresh)
        self.text += fresh.decode("utf-8", "replace")
        return self.text


class Progress:
    """How far a start is, by the last phase that the log names and its latest telling line."""

    def __init__(self, begin):
        self.phase, self.since, self.shown, self.begin, self.index = "starting", begin, begin, begin, 0
        self.phases = [(re.compile(pattern), words) for pattern, words in REQUEST["phases"]]
        self.line = ""

    def look(self, text):
        lines = text.splitlines()
        for line in lines[self.index :]:
            for pattern, words in self.phases:
                if pattern.search(line) and words != self.phase:
                    self.phase, self.since = words, time.time()
            told = TELLING.match(line)
            if told:
                self.line = (told.group(2) or told.group(3))[:90]
        self.index = max(0, len(lines) - 1)  # the last line may be half written
        elapsed = time.time() - self.begin
        if time.time() - self.shown >= 5:
            self.shown = time.time()
            inside = time.time() - self.since
            line = ": " + self.line if self.line else ""
            say("%4d s of %d: %s (%d s)%s" % (elapsed, REQUEST["deadline_s"], self.phase, inside, line))


def workers(parent):
    """The engine's own processes under the server: {pid: what it was called}. Compilers come and go; these do not."""
    found = {}
    for pid in processes():
        info = process(pid)
        if info and info["ppid"] == parent:
            line = command_line(pid)
            if line.startswith("sglang::"):
                found[pid] = line[:60]
    return found


def wait():
    """Until the server answers, generates and shows that its tier took effect. Raises Failed as soon as it cannot."""
    record = read_json(RECORD)
    if record is None:
        fail("there is no record of a started server (%s)" % RECORD)
    manager = declared()
    begin, log, known = time.time(), Log(REQUEST["log"], record["log_offset"]), {}
    progress = Progress(begin)
    while True:
        text = log.read()
        progress.look(text)
        problem = trouble(record, manager, text, known)
        if problem:
            until(lambda: not process(record["pid"]), 3)  # let it finish its traceback
            raise Failed(problem)
        if http_status("/health", 5) == 200:
            break
        if time.time() - begin > REQUEST["deadline_s"]:
            inside = time.time() - progress.since
            raise Failed(
                "it was not ready within %d s; the last %d s of them: %s"
                % (REQUEST["deadline_s"], inside, progress.phase)
            )
        time.sleep(0.5)
    status = http_status("/health_generate", 60)
    if status != 200:
        raise Failed("it answers /health, but does not generate: /health_generate gave %s" % (status or "no answer"))
    text = log.read()
    missing = [pattern for pattern in REQUEST["seen"] if not re.search(pattern, text)]
    unwanted = [line for line in text.splitlines() if any(re.search(pattern, line) for pattern in REQUEST["never"])]
    if missing or unwanted:
        raise Failed(
            "it came up, but the tier did not take effect:%s%s"
            % (
                "".join("\n    never logged: %s" % pattern for pattern in missing),
                "".join("\n    logged: %s" % line[:300] for line in unwanted[:3]),
            )
        )
    record["ready_at"] = now()
    write_json(READY, started_from(record), mode=0o600)
    write_json(RECORD, record)
    remove(PREVIOUS)
    say("ready after %d s: pid %d answers on port %d" % (time.time() - begin, record["pid"], REQUEST["port"]))


def trouble(record, manager, text, known):
    """What shows that the server will not come up, or None. `known` remembers its workers from call to call."""
    seen = manager.seen()
    if not seen:
        return "its supervisor is gone (%s)" % manager.log
    if seen["pid"] and seen["pid"] != record["pid"]:
        return "it ended, and its supervisor has started it again"
    if not seen["pid"] or not process(record["pid"]):
        return "it ended (%s)" % seen["status"]
    found = FATAL.search(text)
    if found:
        line = text[text.rfind("\n", 0, found.start()) + 1 : text.find("\n", found.start())]
        return "it logged a fatal error: %s" % line[:200]
    there = workers(record["pid"])
    gone = {pid: name for pid, name in known.items() if pid not in there}
    if gone:
        return "its process %s ended, and it lives on" % ", ".join("%s (pid %d)" % (gone[pid], pid) for pid in gone)
    known.update(there)
    holder = port_holder(REQUEST["port"])
    if holder and holder["pid"] not in server_processes(record):
        return "port %d was taken by pid %s (%s) meanwhile" % (REQUEST["port"], holder["pid"], holder["command"])
    return None


def started_from(record):
    """Everything needed to start this server again: its files as they are now, and this request."""
    files = []
    for path in filter(os.path.exists, REQUEST["files"]):  # there are secrets only where some are declared
        with open(path, encoding="utf-8") as handle:
            files.append({"path": path, "text": handle.read(), "mode": os.stat(path).st_mode & 0o777})
    request = {key: value for key, value in REQUEST.items() if key not in ("actions", "attempt", "saw")}
    return {"tier": record["tier"], "request": request, "files": files}


def roll_back():
    """Start the server again that was ready before the one that failed, from the very files it was started from."""
    previous, failed = read_json(PREVIOUS), REQUEST["tier"]
    if previous is None:
        say("no server was ready before it, so there is none to go back to")
        return
    if previous["request"]["runs_on"] == REQUEST["runs_on"]:
        say("the server that ran before it was started from the very same, so it is not tried again")
        return
    say("going back to tier %s, which was ready before" % previous["tier"])
    for file in previous["files"]:
        write_atomic(file["path"], file["text"].encode(), file["mode"])
    REQUEST.update(previous["request"])
    try:
        start()
        wait()
    except Failed as error:
        say("tier %s did not come up, and neither did tier %s after it: %s" % (failed, previous["tier"], error))
        give_up()
    say("tier %s did not come up; tier %s serves again" % (failed, previous["tier"]))


def give_up():
    """End what was started, keep it from starting at boot, and end this script as failed."""
    stop(patience=5)
    declared().keep_down()
    sys.exit(1)


def shut_down():
    """Keep the supervisors from starting the server again, and forget what could be gone back to."""
    for manager in managers():
        manager.shut_down()
    remove(READY, PREVIOUS, FAILURE)


def overtaken():
    """Whether another deploy has done the same since this one observed the node, while it waited for the lock. Fails
    when it has done something else.
    """
    record = read_json(RECORD) or {}
    if REQUEST["saw"] in ("*", record.get("started_at")):
        return False
    if record.get("ready_at") and record.get("runs_on") == REQUEST["runs_on"]:
        say("another deploy has started tier %s meanwhile" % record["tier"])
        return True
    return fail("another deploy has changed the server meanwhile (tier %s): deploy again" % record.get("tier", "none"))


def main():
    if overtaken():
        return
    actions = {
        "stop": stop, "start": start, "enable": lambda: declared().enable(), "adopt": adopt, "wait": wait,
        "retire": retire, "roll_back": roll_back, "shut_down": shut_down,
    }  # fmt: skip
    if REQUEST["actions"] != ["roll_back"]:
        remove(FAILURE)
    try:
        for action in REQUEST["actions"]:
            actions[action]()
    except Failed as error:
        record = read_json(RECORD) or {}
        failure = {
            "attempt": REQUEST["attempt"], "tier": REQUEST["tier"], "why": str(error), "at": now(),
            "log": REQUEST["log"], "log_offset": record.get("log_offset", log_size()),
        }  # fmt: skip
        write_json(FAILURE, failure)  # before anything else, which may fail too
        say("tier %s did not come up: %s" % (REQUEST["tier"], error))
        give_up()


main()
