"""Measure the running server with sglang.bench_serving, level after level, and keep everything raw.

Runs in the venv's Python. REQUEST: address, port, root, run_id, model, device, gpus, tier, runs_on (what the server
must have been started on), timeout_s (of one repeat), probe {"tokens", "prompts"}, levels [{"concurrency", "about",
"prompts", "sockets", "repeats": [{"number", "seed", "discarded", "argv"}]}].
Answers with facts only, in results/raw/<run_id>/summary.json; what they are worth is judged elsewhere.
"""

import ctypes
import re
import resource
import runpy
import shutil
import signal
import traceback
import warnings

import requests  # the venv's: the engine depends on it

RAW = os.path.join(REQUEST["root"], "results", "raw")
FOLDER = os.path.join(RAW, REQUEST["run_id"])
PART = FOLDER + ".part"  # a run that is killed leaves no folder that looks like a whole one
FILES_BESIDE = 256  # open files that the client needs beside a socket per request


def say(message):
    print(message, flush=True)


SERVER = requests.Session()
SERVER.trust_env = False  # the server is here: no proxy has a part in it
SECRETS = read_json(os.path.join(REQUEST["root"], "run", "secrets.yaml")) or {}
KEY = SECRETS.get("api-key")
if KEY:
    SERVER.headers["Authorization"] = "Bearer " + KEY
    os.environ["OPENAI_API_KEY"] = KEY  # which bench_serving sends to every backend


def at(path):
    return "http://%s:%d%s" % (REQUEST["address"], REQUEST["port"], path)


def flush():
    """Empty the prefix cache: whether it was done, None where the server does not answer. With an admin key the server
    takes no other for it.
    """
    key = SECRETS.get("admin-api-key") or KEY
    for _ in range(20):  # 400: a request is not quite over yet
        try:
            response = SERVER.post(
                at("/flush_cache"), headers={"Authorization": "Bearer " + key} if key else {}, timeout=60
            )
        except requests.RequestException:
            return None
        if response.status_code != 400:
            return response.status_code == 200
        time.sleep(0.5)
    return False


def ask(path, body=None, stream=False):
    """The JSON the server answers to `body` (a GET without one), or {"error": ...}. Streamed: a list of such."""
    url = at(path)
    try:
        if body is None:
            response = SERVER.get(url, timeout=60)
        else:
            response = SERVER.post(url, json=dict(body, stream=True) if stream else body, timeout=300, stream=stream)
        if response.status_code != 200:
            return {"error": "HTTP %d: %s" % (response.status_code, response.text[:200])}
        if not stream:
            return response.json()
        lines = [line[len(b"data: ") :] for line in response.iter_lines() if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]
    except (requests.RequestException, ValueError) as error:
        return {"error": str(error)[:300]}


def text_of(answer, pick):
    """The text that `pick` finds in an answer, or {"error"} where it finds none."""
    try:
        return {"text": pick(answer)}
    except (KeyError, IndexError, TypeError):
        return {"error": str(answer.get("error", answer) if isinstance(answer, dict) else answer)[:300]}


def native(prompt):
    """The greedy answer of /generate: {"text", "tokens"} or {"error"}."""
    greedy = {"temperature": 0, "max_new_tokens": REQUEST["probe"]["tokens"], "ignore_eos": True}
    answer = ask("/generate", {"text": prompt, "sampling_params": greedy})
    found = text_of(answer, lambda given: given["text"])
    return dict(found, tokens=answer.get("output_ids", [])) if "text" in found else found


def other_ways(prompt):
    """The same prompt by the other ways in, each on an empty cache: {"generate, streamed", "completions", ...}."""
    tokens = REQUEST["probe"]["tokens"]
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    generate = ("/generate", {"text": prompt, "sampling_params": greedy})
    body = {"model": REQUEST["model"], "prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    ways = {
        "generate, streamed": (generate, True, lambda given: given[-1]["text"]),
        "completions": (("/v1/completions", body), False, lambda given: given["choices"][0]["text"]),
        "completions, streamed": (
            ("/v1/completions", body),
            True,
            lambda given: "".join(part["choices"][0]["text"] for part in given if part["choices"]),
        ),
    }
    found = {}
    for way, (request, stream, pick) in ways.items():
        flush()
        found[way] = text_of(ask(*request, stream=stream), pick)
    return found


def answers():
    """The native answer to every prompt, one at a time, on an empty cache; after one that failed no more are asked."""
    flush()
    found = []
    for prompt in REQUEST["probe"]["prompts"]:
        failed = found and "error" in found[-1]
        found.append({"error": "not asked: the one before it failed"} if failed else native(prompt))
    return found


def probe_before():
    """Two answers to every prompt, and the first stable one's by the other ways in (by number; the first of all if none
    is stable).
    """
    first, again = answers(), answers()
    failed = [answer["error"] for answer in first + again if "error" in answer]
    if failed:
        fail("the server does not answer a plain prompt, so it is not measured: %s" % failed[0])
    stable = [number for number, answer in enumerate(first) if answer == again[number]] or [0]
    ways = other_ways(REQUEST["probe"]["prompts"][stable[0]])
    return {"answers": first, "again": again, "asked_otherwise": stable[0], "other_ways": ways}


def probe_after(number):
    """One answer to every prompt, and that prompt's by the other ways in."""
    found = answers()
    failed = any("error" in answer for answer in found)
    return {"answers": found, "other_ways": {} if failed else other_ways(REQUEST["probe"]["prompts"][number])}


def raise_open_files(needed):
    """Make room for `needed` open files, or end with what to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard if hard == unlimited else max(hard, needed)))
    except (ValueError, OSError):
        fail(
            "the benchmark needs %d open files, and this user may have %d\n    -> raise nofile in "
            "/etc/security/limits.conf (or LimitNOFILE of sshd), or leave out the highest level" % (needed, hard)
        )


def nvidia_smi():
    """([{index, name, ...} of every GPU], driver version, why nothing is known)."""
    if REQUEST["device"] != "cuda":
        return [], None, None
    fields = "index,name,memory.total,power.limit,clocks.max.sm,clocks.sm,power.draw,temperature.gpu,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=" + fields, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], None, "nvidia-smi: %s" % error
    rows = [line.split(", ") for line in done.stdout.decode("utf-8", "replace").splitlines()]
    if done.returncode or not all(len(row) == 9 for row in rows):
        return [], None, "nvidia-smi: %s" % done.stdout.decode("utf-8", "replace").strip()[:200]

    def number(text):
        try:
            return float(text)
        except ValueError:
            return None  # [N/A], [Not Supported]

    names = ("memory_mib", "power_limit_w", "max_sm_clock_mhz", "sm_clock_mhz", "power_w", "temperature_c")
    gpus = [{"index": int(row[0]), "name": row[1], **dict(zip(names, map(number, row[2:8])))} for row in rows]
    return gpus, rows[0][8] if rows else None, None


def xids():
    """(the kernel log's lines about GPU errors, why they cannot be read)."""
    if REQUEST["device"] != "cuda":
        return [], None
    why = []
    for command in (["dmesg"], ["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet"]):
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why.append("%s: %s" % (command[0], error))
            continue
        if not done.returncode and done.stdout:
            lines = done.stdout.decode("utf-8", "replace").splitlines()
            return [line.strip() for line in lines if "NVRM: Xid" in line], None
        why.append("%s: %s" % (command[0], done.stderr.decode("utf-8", "replace").strip()[:100] or "says nothing"))
    return None, "kernel log: " + "; ".join(why)


def host():
    """The machine, by what a person would want to see the same before comparing two runs."""
    with open("/proc/cpuinfo") as handle:
        models = re.findall(r"^model name\s*: (.*)$", handle.read(), re.M)
    return {
        "name": socket.gethostname(),
        "cpu": models[0] if models else os.uname().machine,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes() / 1024**3),
        "kernel": os.uname().release,
    }


def model():
    """The model folder: a digest over names and sizes of its files, and over its config's content."""
    path, rows = REQUEST["model"], []
    for name in sorted(os.listdir(path)):
        if os.path.isfile(os.path.join(path, name)):
            rows.append([name, os.path.getsize(os.path.join(path, name))])
    config = os.path.join(path, "config.json")
    rows.append(sha256_of(config) if os.path.isfile(config) else None)
    return {"path": path, "digest": hashlib.sha256(json.dumps(rows).encode()).hexdigest()}


def preload():
    """Import what bench_serving imports, once; every repeat is then a fork that runs it as `python -m` would."""
    import sglang.bench_serving

    del sys.modules["sglang.bench_serving"]


def post(url, **options):
    """requests.post for bench_serving: it flushes the cache after its warm-up, looks at no answer, has no admin key."""
    if url != at("/flush_cache"):
        return requests.request("post", url, **options)
    if not flush():
        raise SystemExit("the server did not empty its prefix cache after the warm-up")
    return None


def cpu_seconds(pid):
    """The CPU time of a process so far, in s."""
    with open("/proc/%d/stat" % pid, "rb") as handle:
        fields = handle.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(argv, log):
    """Run bench_serving in a child: (pid). Its output goes to `log`; it dies with this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # Python 3.12 warns of threads that an import has started; a child that hung on one would meet its deadline.
    warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for descriptor, of in ((0, os.open(os.devnull, os.O_RDONLY)), (1, handle), (2, handle)):
            os.dup2(of, descriptor)
        os.chdir(PART)
        SERVER.close()  # its connection is the parent's
        requests.post = post
        sys.argv = ["sglang.bench_serving", *argv]
        runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def says(path, words):
    """Whether a log has these words by now."""
    if not os.path.exists(path):
        return False
    with open(path, "rb") as handle:
        return words in handle.read()


LOADS = b"Starting main benchmark run"  # what bench_serving says when its warm-up is over


def repeat(level, wanted, title, alive):
    """Run bench_serving once: its facts. The raw JSONL and its log stay in the run's folder. It is stopped when it
    takes too long, or when processes of `alive`, the server's, are gone: "stopped" says why.
    """
    name = "c%d-r%d" % (level["concurrency"], wanted["number"])
    raw, log = os.path.join(PART, name + ".jsonl"), os.path.join(PART, name + ".log")
    begin = shown = looked = time.time()
    pid, stopped, ended, before = load([*wanted["argv"], "--output-file", raw], log), None, 0, None
    try:
        while not ended:
            time.sleep(0.05)
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended or stopped:
                continue
            if before is None and says(log, LOADS):
                before = cpu_seconds(pid)
            if time.time() - begin > REQUEST["timeout_s"]:
                stopped = "a repeat took more than %d s" % REQUEST["timeout_s"]
            elif time.time() - looked >= 1:
                looked = time.time()
                stopped = gone(alive)
            if stopped:
                os.killpg(pid, signal.SIGKILL)
            elif time.time() - shown >= 30:
                shown = time.time()
                say("    %s: %d s, and at most %d" % (title, shown - begin, REQUEST["timeout_s"]))
    finally:
        if not ended:  # we are being ended: the load must not go on without us
            os.killpg(pid, signal.SIGKILL)
    seconds = time.time() - begin
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
    text = ""
    if os.path.exists(raw):
        with open(raw, encoding="utf-8", errors="replace") as handle:
            text = handle.read()
    if code:
        with open(log, encoding="utf-8", errors="replace") as handle:
            say("    bench_serving ended with exit code %d:\n%s" % (code, handle.read()[-1500:]))
    return {
        "number": wanted["number"],
        "seed": wanted["seed"],
        "discarded": wanted["discarded"],
        "exit_code": code,
        "timed_out": bool(stopped),
        "stopped": stopped,
        "client_cpu_s": round(used.ru_utime + used.ru_stime - (before or 0), 3),
        "seconds": round(seconds, 3),
        "raw": os.path.join(FOLDER, name + ".jsonl"),
        "sha256": sha256_of(raw) if os.path.exists(raw) else None,
        "facts": raw_facts(text),
    }


def left(levels, spent):
    """About how long the rest takes, in s, by the levels run so far: {concurrency: [seconds of each repeat]}."""
    waves = {level["concurrency"]: level["prompts"] / level["concurrency"] for level in levels}
    known = [c for c in spent if spent[c]]
    if not known:
        return None
    total = 0.0
    for level in levels:
        c, done = level["concurrency"], spent.get(level["concurrency"], [])
        each = done[-1] if done else spent[known[-1]][-1] * waves[c] / waves[known[-1]]
        total += each * (len(level["repeats"]) - len(done))
    return total


def duration(seconds):
    return "%d s" % seconds if seconds < 90 else "%d min" % round(seconds / 60)


def serving(record):
    """The server's processes, but for torch's compilers: inductor ends those by itself once it has nothing for them."""
    compilers = "/torch/_inductor/compile_worker/"
    return [
        pid for pid in server_processes(record) if not any(compilers in word for word in words_of(pid, "cmdline") or [])
    ]


def gone(alive):
    """Which of the server's processes ended, in words, or None."""
    ended = [str(pid) for pid in alive if not process(pid)]
    return "the server's process %s ended" % ", ".join(ended) if ended else None


def measure(levels, alive):
    """What every level's repeats gave. Ends early, with the reason, where going on would only wait: a repeat hung, or
    processes of `alive`, the server's, are gone.
    """
    spent, found = {}, []
    for position, level in enumerate(levels, 1):
        say("level %d of %d: concurrency %d, %s" % (position, len(levels), level["concurrency"], level["about"]))
        of = len(level["repeats"]) - 1
        found.append({"concurrency": level["concurrency"], "repeats": []})
        for wanted in level["repeats"]:
            title = "warm-up repeat, discarded" if wanted["discarded"] else "repeat %d of %d" % (wanted["number"], of)
            flushed = flush()
            if flushed is None:
                return found, gone(alive) or "the server does not answer"
            run = dict(repeat(level, wanted, title, alive), flushed=flushed)
            found[-1]["repeats"].append(run)
            spent.setdefault(level["concurrency"], []).append(run["seconds"])
            figures = run["facts"].get("figures")
            rest = left(levels, spent)
            say(
                "  concurrency %d, %s: %s in %s%s"
                % (
                    level["concurrency"],
                    title,
                    "%.1f output tok/s" % figures["output_tok_s"] if figures else "no figures",
                    duration(run["seconds"]),
                    "; about %s left" % duration(rest) if rest >= 1 else "",
                )
            )
            if run["stopped"] or gone(alive):
                return found, run["stopped"] or gone(alive)
    return found, None


def refuse_another_server(record, info, gpus, unknown_gpus):
    """End before any load where the server is not the one that is to be measured, or does not say what it holds."""
    if not record or record.get("tier") != REQUEST["tier"] or record.get("runs_on") != REQUEST["runs_on"]:
        fail("the server that runs is not tier %s as this deploy left it: was it changed by another? deploy again"
             % REQUEST["tier"])  # fmt: skip
    if not info.get("max_total_num_tokens"):
        said = info.get("error", "no max_total_num_tokens")
        fail("the server does not say how many tokens it holds, so nobody could tell a queue: /server_info: %s" % said)
    if len(gpus) < REQUEST["gpus"]:
        why = unknown_gpus or "see nvidia-smi"
        fail(
            "%d GPUs are stated for this node (tp of the ladder), and %d are there: %s"
            % (REQUEST["gpus"], len(gpus), why)
        )


def main():
    begin = time.time()
    levels = REQUEST["levels"]
    raise_open_files(max(level["sockets"] for level in levels) + FILES_BESIDE)
    for name in os.listdir(RAW) if os.path.isdir(RAW) else []:
        if name.endswith(".part"):  # of a run that was killed: the node's lock is ours, so no run is going on
            shutil.rmtree(os.path.join(RAW, name))
    record = read_json(os.path.join(REQUEST["root"], "run", "server.json"))
    before, started_at = serving(record), now()
    gpus, driver, unknown_gpus = nvidia_smi()
    xids_before, unknown_before = xids()
    refuse_another_server(record, ask("/server_info"), gpus, unknown_gpus)
    say("%d deterministic prompts first" % len(REQUEST["probe"]["prompts"]))
    asked_before = probe_before()
    os.makedirs(PART)
    say("loading bench_serving")
    preload()
    found, ended_early = measure(levels, before)
    if ended_early:
        say("ended early: %s" % ended_early)
    asked_after = probe_after(asked_before["asked_otherwise"])
    info = ask("/server_info")
    states = info.get("internal_states") or [{}]
    xids_after, unknown_after = xids()
    new = None
    if xids_before is not None and xids_after is not None:
        new = [line for line in xids_after if line not in xids_before]
    dp = info.get("dp_size") or 1
    tokens, running = info.get("max_total_num_tokens"), states[0].get("effective_max_running_requests_per_dp")
    summary = {
        "started_at": started_at,
        "seconds": round(time.time() - begin, 3),
        "load_seconds": round(sum(run["seconds"] for level in found for run in level["repeats"]), 3),
        "ended_early": ended_early,
        "levels": found,
        "before": asked_before,
        "after": asked_after,
        "processes_before": before,
        "processes_after": serving(record),
        "xids": new,
        "unobserved": [why for why in (unknown_gpus, unknown_before or unknown_after) if why],
        "gpus": gpus,
        "driver": driver,
        "model": model(),
        "max_total_num_tokens": tokens * dp if tokens else None,
        "max_running_requests": running * dp if running else None,
        "server_version": info.get("version"),
        "host": host(),
    }
    write_json(os.path.join(PART, "summary.json"), summary)
    os.rename(PART, FOLDER)
    say("raw files are in %s on the node" % FOLDER)


main()
