"""Start, stop and await the server that supervisor keeps, printing what happens as it happens.

REQUEST: root, actions (of "stop", "start", "wait", "shut_down", in order), address, port, script, log, tier, runs_on,
conf, deadline_s, seen and never (regular expressions over the log since this start).
"""

import re
import signal
import subprocess

ROOT = REQUEST["root"]
RECORD = os.path.join(ROOT, "run", "server.json")
SOCKET = os.path.join(ROOT, "run", "supervisor.sock")
PROGRAM = "sglang-server"
TROUBLE = re.compile(r"Error|Exception|Traceback|errno|CUDA|OOM|killed|No such file", re.I)
# SGLang lives on after some fatal errors; these end the wait at once. Its own words, read in 0.5.9's sources.
FATAL = re.compile(r"\[Errno \d+\] error while attempting to bind|Scheduler hit an exception|Received sigquit")
TELLING = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:]+[^\]]*\] (?!.*(WARNING|HTTP/1|Ignore import error))(.+)")


def say(message):
    print(message, flush=True)


def group_of(pid):
    """What server_processes needs to know of a live process that leads its group, or None."""
    info = process(pid) if pid else None
    return info and {"boot_id": boot_id(), "pgid": pid, "started_ticks": info["started"]}


def running(api):
    """supervisor's word on the program, or None when it does not know it or does not answer."""
    try:
        return api.getProcessInfo(PROGRAM) if api is not None else None
    except (OSError, xmlrpc.client.Error, http.client.HTTPException):
        return None


def end(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def until(holds, seconds):
    """Whether `holds()` comes true within `seconds`."""
    deadline = time.time() + seconds
    while not holds():
        if time.time() > deadline:
            return False
        time.sleep(0.1)
    return True


def stop(patience=30):
    """End the server and every process of its group: asked first, killed after `patience` seconds."""
    groups = [read_json(RECORD)]
    api = supervisor(SOCKET)
    info = running(api)
    if info and info["statename"] in ("RUNNING", "STARTING", "BACKOFF", "STOPPING"):
        groups.append(group_of(info["pid"]))  # not the recorded one, if supervisor has restarted it
        say("stopping the server (pid %d) and its children" % info["pid"])
        if info["statename"] != "STOPPING":
            api.stopProcess(PROGRAM, False)

    def left():
        return sorted({pid for group in groups for pid in server_processes(group)})

    if not info:
        for pid in left():
            say("ending a process left of an earlier server: %d %s" % (pid, command_line(pid)[:60]))
        end(left(), signal.SIGTERM)
    if not until(lambda: not left(), patience):
        say("still there after %d s, so killed: %s" % (patience, ", ".join(map(str, left()))))
        end(left(), signal.SIGKILL)
        if not until(lambda: not left(), 10):
            fail("processes %s of the server cannot be ended, even by SIGKILL" % left())
    if info and not until(lambda: (running(api) or {"statename": ""})["statename"] != "STOPPING", 20):
        fail("supervisor still holds the server for stopping; see %s" % os.path.join(ROOT, "logs", "supervisord.log"))
    if os.path.exists(RECORD):
        os.unlink(RECORD)


def start():
    """Start the program under supervisord, which is started itself if it does not run."""
    holder = port_holder(REQUEST["port"])
    if holder:
        fail(
            "port %d is held by pid %s (%s): end it, or set another port"
            % (REQUEST["port"], holder["pid"], holder["command"])
        )
    api = supervisor(SOCKET)
    if api is None:
        command = [os.path.join(ROOT, "tools", "bin", "supervisord"), "-c", REQUEST["conf"]]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            fail("supervisord does not start:\n%s" % done.stdout.decode("utf-8", "replace"))
        deadline = time.time() + 20
        while api is None and time.time() < deadline:
            time.sleep(0.1)
            api = supervisor(SOCKET)
        if api is None:
            fail("supervisord does not answer on %s; see %s" % (SOCKET, os.path.join(ROOT, "logs", "supervisord.log")))
    else:
        added, changed, removed = api.reloadConfig()[0]
        for name in changed + removed:
            api.removeProcessGroup(name)
        for name in changed + added:
            api.addProcessGroup(name)
    offset = os.path.getsize(REQUEST["log"]) if os.path.exists(REQUEST["log"]) else 0
    api.startProcess(PROGRAM, False)
    deadline = time.time() + 10
    info = api.getProcessInfo(PROGRAM)
    while not info["pid"] and time.time() < deadline:
        if info["statename"] in ("FATAL", "EXITED"):
            break
        time.sleep(0.05)
        info = api.getProcessInfo(PROGRAM)
    live = process(info["pid"]) if info["pid"] else None
    if live is None:
        fail("the server ended at once (%s)%s" % (info["spawnerr"] or info["statename"], last_words(offset)))
    write_json(
        RECORD,
        {
            "pid": info["pid"],
            "pgid": info["pid"],
            "started_ticks": live["started"],
            "boot_id": boot_id(),
            "started_at": now(),
            "tier": REQUEST["tier"],
            "script": REQUEST["script"],
            "log": REQUEST["log"],
            "log_offset": offset,
            "runs_on": REQUEST["runs_on"],
        },
    )
    say("started tier %s: pid %d, log %s" % (REQUEST["tier"], info["pid"], REQUEST["log"]))


def log_since(offset):
    """The log's text since `offset` (all of it, if the log was rotated since)."""
    try:
        with open(REQUEST["log"], "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            handle.seek(offset if size >= offset else 0)
            return handle.read().decode("utf-8", "replace")
    except OSError:
        return ""


def last_words(offset):
    """The log's last error and its last lines, for a message."""
    lines = [line for line in log_since(offset).splitlines() if line.strip()]
    if not lines:
        return "; its log %s is empty" % REQUEST["log"]
    errors = [line for line in lines if re.match(r"\s*[\w.]*(Error|Exception|Unsupported)\b.*", line)]
    errors = errors or [line for line in lines if TROUBLE.search(line)]
    text = "\n".join("    " + line[:300] for line in lines[-12:])
    last = "\nlast error: %s" % errors[-1].strip()[:500] if errors else ""
    return "%s\nlast lines of %s:\n%s" % (last, REQUEST["log"], text)


def phase(text):
    """The last line of SGLang's own logger that tells how far it is, shortened."""
    for line in reversed(text.splitlines()):
        found = TELLING.match(line)
        if found:
            return found.group(2)[:100]
    return "starting"


def wait():
    """Until /health answers 200 and one token was generated; ends early when the server does, or at the deadline."""
    record = read_json(RECORD)
    if record is None:
        fail("there is no record of a started server (%s)" % RECORD)
    api = supervisor(SOCKET)
    begin, shown = time.time(), 0.0
    offset = record["log_offset"]
    while True:
        elapsed = time.time() - begin
        info = running(api)
        text = log_since(offset)
        if not info or info["statename"] not in ("RUNNING", "STARTING") or info["pid"] != record["pid"]:
            words = last_words(offset)
            stop(patience=5)
            fail(
                "the server ended %d s after its start (%s)%s"
                % (elapsed, info["statename"] if info else "supervisord is gone", words)
            )
        if FATAL.search(text):
            time.sleep(1)  # let it finish its traceback
            words = last_words(offset)
            stop(patience=5)
            fail("the server met a fatal error and did not end by itself%s" % words)
        if http_status("/health", 5) == 200:
            break
        if elapsed > REQUEST["deadline_s"]:
            words = last_words(offset)
            stop(patience=5)
            fail("the server was not ready within %d s%s" % (REQUEST["deadline_s"], words))
        if elapsed - shown >= 5:
            shown = elapsed
            say("%4d s of %d: %s" % (elapsed, REQUEST["deadline_s"], phase(text)))
        time.sleep(0.5)
    if http_status("/health_generate", 60) != 200:
        fail("the server answers /health, but does not generate%s" % last_words(offset))
    text = log_since(offset)
    missing = [pattern for pattern in REQUEST["seen"] if not re.search(pattern, text)]
    unwanted = [line for line in text.splitlines() if any(re.search(pattern, line) for pattern in REQUEST["never"])]
    if missing or unwanted:
        stop(patience=5)
        fail(
            "tier %s came up but did not take effect:%s%s"
            % (
                REQUEST["tier"],
                "".join("\n    never logged: %s" % pattern for pattern in missing),
                "".join("\n    logged: %s" % line[:300] for line in unwanted[:3]),
            )
        )
    record["ready_at"] = now()
    write_json(RECORD, record)
    say("ready after %d s: pid %d answers on port %d" % (time.time() - begin, record["pid"], REQUEST["port"]))


def shut_down():
    """End supervisord itself."""
    api = supervisor(SOCKET)
    if api is not None:
        api.shutdown()
        say("supervisord ends")


ACTIONS = {"stop": stop, "start": start, "wait": wait, "shut_down": shut_down}
for action in REQUEST["actions"]:
    ACTIONS[action]()
