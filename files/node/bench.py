"""Measure the running server with sglang.bench_serving, one level after another, and keep everything raw.

REQUEST: python, env, address, port, model, root, run_id, timeout_s, levels [{"concurrency", "about", "argv"}], prompts,
prompt_tokens.
Answers with facts only, in results/raw/<run_id>/summary.json; what they are worth is judged elsewhere.
"""

import subprocess
import urllib.error
import urllib.request

FOLDER = os.path.join(REQUEST["root"], "results", "raw", REQUEST["run_id"])


def say(message):
    print(message, flush=True)


def get(path, body=None, timeout=120):
    """The JSON the server answers, or {"error": ...}."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request("http://%s:%d%s" % (REQUEST["address"], REQUEST["port"], path), data, HEADERS)
    try:
        with DIRECT.open(request, timeout=timeout) as response:
            return json.loads(response.read())
    except (OSError, ValueError) as error:
        return {"error": str(error)}


def generate():
    """The greedy continuation of every prompt: {"text"} or {"error"}."""
    greedy = {"temperature": 0, "max_new_tokens": REQUEST["prompt_tokens"], "ignore_eos": True}
    answers = [get("/generate", {"text": prompt, "sampling_params": greedy}) for prompt in REQUEST["prompts"]]
    return [{"text": a["text"]} if "text" in a else {"error": str(a.get("error", a))[:300]} for a in answers]


def level(number, wanted):
    """Run bench_serving once; the raw JSONL and its log stay in the run's folder."""
    raw = os.path.join(FOLDER, "c%d.jsonl" % wanted["concurrency"])
    log = os.path.join(FOLDER, "c%d.log" % wanted["concurrency"])
    say("level %d of %d: concurrency %d, %s" % (number, len(REQUEST["levels"]), wanted["concurrency"], wanted["about"]))
    command = [REQUEST["python"], "-m", "sglang.bench_serving", *wanted["argv"], "--output-file", raw]
    begin, timed_out = time.time(), False
    with open(log, "wb") as handle:
        running = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=handle, stderr=subprocess.STDOUT, env=ENV, cwd=FOLDER
        )
        shown = begin
        while running.poll() is None:
            time.sleep(0.1)
            if time.time() - begin > REQUEST["timeout_s"]:
                running.kill()
                timed_out = True
            if time.time() - shown >= 10:
                shown = time.time()
                say("    %d s" % (shown - begin))
    lines = []
    if os.path.exists(raw):
        with open(raw, encoding="utf-8") as handle:
            lines = handle.read().splitlines()
    if running.returncode:
        with open(log, encoding="utf-8", errors="replace") as handle:
            say("    bench_serving ended with exit code %d:\n%s" % (running.returncode, handle.read()[-1500:]))
    return {
        "concurrency": wanted["concurrency"],
        "argv": command[1:],
        "exit_code": running.returncode,
        "timed_out": timed_out,
        "seconds": round(time.time() - begin, 3),
        "raw": raw,
        "lines": lines,
    }


def main():
    os.makedirs(FOLDER, exist_ok=True)
    record = read_json(os.path.join(REQUEST["root"], "run", "server.json"))
    before = server_processes(record)
    begin = time.time()
    say("a deterministic generation first: %d prompts" % len(REQUEST["prompts"]))
    generated_before = generate()
    levels = [level(number, wanted) for number, wanted in enumerate(REQUEST["levels"], 1)]
    generated_after = generate()
    info = get("/server_info")
    summary = {
        "started_at": now(),
        "seconds": round(time.time() - begin, 3),
        "levels": levels,
        "generated_before": generated_before,
        "generated_after": generated_after,
        "processes_before": before,
        "processes_after": server_processes(record),
        "max_total_num_tokens": info.get("max_total_num_tokens"),
        "server_version": info.get("version"),
        "host": {"name": socket.gethostname(), "cpus": os.cpu_count(), "kernel": os.uname().release},
    }
    write_json(os.path.join(FOLDER, "summary.json"), summary)
    say("raw files are in %s" % FOLDER)


ENV = {"PATH": "/usr/bin:/bin", "HOME": os.path.expanduser("~"), **REQUEST["env"]}
KEY = (read_json(os.path.join(REQUEST["root"], "run", "secrets.yaml")) or {}).get("api-key")
HEADERS = {"Content-Type": "application/json"}
if KEY:
    HEADERS["Authorization"] = "Bearer " + KEY
    ENV["OPENAI_API_KEY"] = KEY  # which bench_serving sends to every backend
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is here: no proxy has a part in it
main()
