"""Run proofs in the venv, each in a process of its own, and stamp the result when all hold.

REQUEST: python (with its options), env, proofs [{"id", "code", "expect"}], stamp (a file), value (what to stamp).
A proof holds when its code ends with exit code 0 and, where `expect` is given, its last printed line equals it.
"""

import concurrent.futures
import shutil
import subprocess
import tempfile

WORKSPACE = tempfile.mkdtemp(prefix="gpuwright-proof-")


def run(proof):
    """None when the proof holds, else what was found."""
    env = {"PATH": "/usr/bin:/bin", "HOME": os.path.expanduser("~"), "HF_HUB_OFFLINE": "1"}
    # flashinfer makes its folders at import, transformers keeps the code of a config: a proof leaves nothing behind
    env.update(FLASHINFER_WORKSPACE_BASE=WORKSPACE, HF_HOME=WORKSPACE)
    env.update(REQUEST["env"])
    done = subprocess.run(
        [*REQUEST["python"], "-I", "-"],
        input=proof["code"].encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
    )
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    if done.returncode:
        return "ended with exit code %d:\n%s" % (
            done.returncode,
            done.stderr.decode("utf-8", "replace").strip()[-2000:],
        )
    found = lines[-1] if lines else ""
    if proof["expect"] is not None and found != proof["expect"]:
        return "expected %r, found %r" % (proof["expect"], found)
    return None


def main():
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for proof, problem in [(each, pool.submit(run, each)) for each in REQUEST["proofs"]]:
            found = problem.result()
            failed += found is not None
            print("%s: %s" % (proof["id"], found or "holds"), flush=True)
    if failed:
        fail("%d of %d proofs do not hold" % (failed, len(REQUEST["proofs"])))
    write_json(REQUEST["stamp"], {"value": REQUEST["value"], "at": "%s.%09d" % (now(), time.time_ns() % 10**9)})


try:
    main()
finally:
    shutil.rmtree(WORKSPACE, ignore_errors=True)
