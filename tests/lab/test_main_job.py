"""The main job on the real stack: killed in the middle, finished, repeated, damaged by hand, mended.

The tests share one node and build on each other, in the order of this file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import urllib.request
from pathlib import Path

import jsonschema

from gpuwright import REPOSITORY
from gpuwright import plan as p
from gpuwright.catalogue import PATCHES, flags_path
from gpuwright.flags import load_flags, read_flags
from gpuwright.lockfile import lock_path, read_lock
from gpuwright.record import SCHEMA
from tests.lab.conftest import RESULTS, Lab, alive, children, ok, sha256
from tests.make import catalogue

PATCH = catalogue().patches[0]
STACK = catalogue().stacks["sglang-0.5.9-cu128"]
LOCK = read_lock(lock_path(STACK, f"{sys.version_info.major}.{sys.version_info.minor}"))
PROBE = (PATCHES / PATCH.probe).read_text()
PRISTINE_RUN = [p.FOLDERS, p.TOOLS, p.VENV, p.SYNC, p.STUB, p.VERIFY, p.APPLY, p.PROBE, p.MODEL, p.CONFIG, p.LAUNCHERS,
                p.CONFIGURE, p.SERVER, p.RECORD, p.SMOKE]  # fmt: skip


def health(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as response:
        return int(response.status)


def test_a_dry_run_on_nothing_prints_the_whole_plan_and_changes_nothing(lab: Lab) -> None:
    run = ok(lab.deploy("--dry"))
    assert run.planned == PRISTINE_RUN
    assert f"{len(LOCK.versions)} distributions to install from the lock" in run.said
    assert not lab.root.exists()


def test_a_foreign_port_stops_the_host_before_anything_is_changed(lab: Lab) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        run = lab.deploy("--data", f"port={held.getsockname()[1]}")
    assert run.code == 1 and f"held by pid {os.getpid()}" in run.said
    assert not lab.root.exists()


def installed(lab: Lab) -> int:
    return len(list(lab.site.glob("*.dist-info"))) if lab.site.is_dir() else 0


def test_killed_in_the_sync(lab: Lab) -> None:
    for _ in range(5):
        lab.kill_deploy_when(lambda: installed(lab) >= 20)
        if "sync venv to lock" in "".join(lab.deploy("--dry").planned):
            break
        shutil.rmtree(lab.venv)  # it had just finished: once more
    planned = ok(lab.deploy("--dry")).planned
    assert p.SYNC in planned and p.VENV not in planned, "the venv is there, and is not whole"


def test_killed_between_patch_and_rename(lab: Lab, tmp_path: Path) -> None:
    """A python3 first on PATH runs the node scripts with an os.replace that kills everything at the patched file."""
    killer = tmp_path / "python3"
    code = (
        "import os, signal, sys\n"
        "real = os.replace\n"
        "def replace(a, b):\n"
        "    if str(b).endswith('flashinfer/jit/cpp_ext.py'):\n"
        f"        open({str(tmp_path / 'reached')!r}, 'w').close()\n"
        "        os.killpg(0, signal.SIGKILL)\n"
        "    return real(a, b)\n"
        "os.replace = replace\n"
        "exec(compile(sys.stdin.read(), '<stdin>', 'exec'))\n"
    )
    killer.write_text(
        f'#!/bin/sh\ncase "$*" in "-IBu -") exec {sys.executable} -IBu -c {_quoted(code)};; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    killer.chmod(0o755)
    lab.kill_deploy_when(lambda: False, path=f"{tmp_path}:{os.environ['PATH']}")
    assert (tmp_path / "reached").exists()
    assert sha256(lab.patched) == PATCH.pre_sha256, "the old file, whole"
    assert lab.patched.with_name("cpp_ext.py.gpuwright-new").exists(), "it was killed after the new one was written"
    planned = ok(lab.deploy("--dry")).planned
    assert p.APPLY in planned and p.SYNC not in planned


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


def test_killed_while_the_server_loads(lab: Lab) -> None:
    lab.kill_deploy_when(lambda: (lab.root / "run" / "server.json").exists())
    assert sha256(lab.patched) == PATCH.post_sha256
    assert not lab.patched.with_name("cpp_ext.py.gpuwright-new").exists()
    pid = lab.pid()
    assert alive(pid) and "ready_at" not in lab.record()
    run = ok(lab.deploy())
    assert run.changed == [p.SERVER, p.RECORD, p.SMOKE]
    assert lab.pid() == pid, "a server that is loading is awaited, not started again"


def test_the_deploy_ended_with_accepted_results_and_a_healthy_server(lab: Lab) -> None:
    assert health(lab.port) == 200
    (record,) = [json.loads(path.read_text()) for path in (lab.root / "results").glob("*.json")]
    assert record["verdict"] == "accepted"
    assert [level["concurrency"] for level in record["levels"]] == [1, 4, 10]
    for level in record["levels"]:
        assert [run["discarded"] for run in level["repeats"]] == [True, False, False, False]
        kept = []
        for run in level["repeats"]:
            path = Path(run["raw"])
            (raw,) = [json.loads(line) for line in path.read_text().splitlines()]
            assert sha256(path) == run["sha256"] and run["broken"] == []
            assert raw["completed"] == level["prompts"] == len(raw["ttfts"]) and min(raw["ttfts"]) > 0
            printed = re.search(
                r"^Output token throughput \(tok/s\): +([0-9.]+)", path.with_suffix(".log").read_text(), re.M
            )
            assert printed and f"{run['figures']['output_tok_s']:.2f}" == printed.group(1), "what bench_serving printed"
            kept += [] if run["discarded"] else [raw["output_throughput"]]
        assert level["median"]["output_tok_s"] == statistics.median(kept)
        assert level["spread"]["output_tok_s"] == [min(kept), max(kept)]
    jsonschema.validate(record, json.loads(SCHEMA.read_text()))
    assert json.loads((RESULTS / "local" / f"{record['run']}.json").read_text()) == record


def test_a_second_deploy_changes_nothing(lab: Lab) -> None:
    pid = lab.pid()
    run = ok(lab.deploy())
    assert run.changed == []
    assert lab.pid() == pid == lab.record()["pid"]


def test_state_says_what_was_deployed_from_which_revision(lab: Lab) -> None:
    state = json.loads((lab.root / "state.json").read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert state["revision"].rstrip("+") == head.stdout.strip()


def test_the_venv_is_as_locked_by_its_own_account(lab: Lab) -> None:
    done = lab.python(
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.metadata['Name'].lower().replace('_', '-').replace('.', '-'): d.version "
        "for d in m.distributions()}))"
    )
    assert json.loads(done.stdout) == LOCK.versions


def test_the_flags_file_is_the_installed_engines(lab: Lab) -> None:
    assert load_flags(flags_path(STACK)) == read_flags(lab.site / "sglang"), "run `make flags`"


def test_uvs_cache_keeps_the_pristine_file(lab: Lab) -> None:
    uv = lab.root / "tools" / "bin" / "uv"
    cache = subprocess.run([uv, "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    cached = {sha256(path) for path in Path(cache).glob("archive-v*/*/flashinfer/jit/cpp_ext.py")}  # of any version
    assert PATCH.pre_sha256 in cached and PATCH.post_sha256 not in cached
    assert sha256(lab.root / "patches" / "originals" / PATCH.pre_sha256) == PATCH.pre_sha256


def test_the_patched_file_passes_its_probe(lab: Lab) -> None:
    assert lab.python(PROBE).returncode == 0


def test_flashinfer_reinstalled_by_hand_is_patched_again_and_the_server_restarted(lab: Lab) -> None:
    pid = lab.pid()
    uv = lab.root / "tools" / "bin" / "uv"
    pin = f"flashinfer-python=={LOCK.versions['flashinfer-python']}"
    subprocess.run([uv, "pip", "install", "--python", lab.venv, "--no-deps", "--reinstall", pin], check=True)
    assert sha256(lab.patched) == PATCH.pre_sha256
    failed = lab.python(PROBE)
    assert failed.returncode != 0 and "torch._dynamo.exc.Unsupported" in failed.stderr, "pristine, the probe must fail"
    run = ok(lab.deploy())
    assert run.changed == [p.APPLY, p.PROBE, p.SERVER]
    assert "because of what changed since it was started: patches" in run.said
    assert sha256(lab.patched) == PATCH.post_sha256 and lab.pid() != pid
    assert ok(lab.deploy()).changed == []


def test_a_foreign_edit_stops_the_host_and_is_kept(lab: Lab) -> None:
    ours = lab.patched.read_bytes()
    lab.patched.write_bytes(ours + b"# an edit by hand\n")
    run = lab.deploy()
    assert run.code == 1 and "is foreign and was left as it is" in run.said and PATCH.post_sha256 in run.said
    assert "--- the file after flashinfer-cuda-version-from-torch" in run.said and "+# an edit by hand" in run.said
    assert lab.patched.read_bytes() == ours + b"# an edit by hand\n" and health(lab.port) == 200
    lab.patched.write_bytes(ours)
    assert ok(lab.deploy()).changed == []


def test_a_damaged_distribution_is_installed_anew(lab: Lab) -> None:
    target = lab.site / "einops" / "einops.py"
    size = target.stat().st_size
    target.unlink()
    run = ok(lab.deploy("--data", "stages=runtime"))
    assert run.changed == [p.SYNC, p.VERIFY] and "lacks einops/einops.py" in run.said
    assert target.stat().st_size == size


def test_an_edit_in_place_reaches_uvs_cache_and_is_mended_there_too(lab: Lab) -> None:
    """Where uv has hard-linked the file, what is appended to it is appended to the one that a reinstall would take."""
    target = lab.site / "einops" / "einops.py"
    ours, cached = sha256(target), target.stat().st_nlink > 1
    with target.open("a") as handle:
        handle.write("# by hand\n")
    run = ok(lab.deploy("--data", "stages=runtime"))
    assert run.changed == [p.SYNC, p.VERIFY] and "einops/einops.py has " in run.said
    assert sha256(target) == ours, f"hard-linked: {cached}"
    assert ok(lab.deploy("--data", "stages=runtime")).changed == []


def test_another_tier_replaces_the_server_and_all_its_children(lab: Lab) -> None:
    before = [lab.pid(), *children(lab.pid())]
    assert len(before) >= 3, "the scheduler and the detokenizer"
    unused = lab.root / "cache" / "0123456789abcdef" / "flashinfer"
    unused.mkdir(parents=True)
    (used,) = [path.name for path in (lab.root / "cache").iterdir() if path.name != "0123456789abcdef"]
    run = ok(lab.deploy("--data", "tier=no-radix", "--data", "smoke=never"))
    assert run.changed == [p.CONFIGURE, p.SERVER, p.PRUNE, p.RECORD]
    assert [path.name for path in (lab.root / "cache").iterdir()] == [used], "caches of other runtimes are pruned"
    assert not [pid for pid in before if alive(pid)]
    assert health(lab.port) == 200 and lab.record()["tier"] == "no-radix"
    log = (lab.root / "logs" / "sglang-server-no-radix.log").read_text()
    assert "disable_radix_cache=True" in log
    assert (lab.root / "logs" / "sglang-server-baseline.log").exists(), "each tier keeps its own log"


def test_a_server_that_cannot_bind_is_named_by_its_cause_and_the_one_before_it_serves_again(lab: Lab) -> None:
    """192.0.2.1 is an address for documentation, of no machine: SGLang cannot bind to it."""
    run = lab.deploy("--data", "bind=192.0.2.1", "--data", "smoke=never")
    assert run.code == 1
    assert "cannot assign requested address" in run.said and "[bind-address-not-here]" in run.said
    assert "tier no-radix serves again" in run.said and health(lab.port) == 200
    assert "left of an earlier server" not in ok(lab.deploy("--dry")).said


def test_children_of_a_killed_server_are_ended_at_the_next_deploy(lab: Lab) -> None:
    ok(lab.deploy("--data", "smoke=never"))
    parent = lab.pid()
    before = [parent, *children(parent)]
    control = [lab.root / "tools" / "bin" / "supervisorctl", "-c", lab.root / "run" / "supervisord.conf"]
    daemon = int(subprocess.run([*control, "pid"], capture_output=True, text=True).stdout)
    os.kill(daemon, signal.SIGKILL)  # nobody is left to restart or to end them
    os.kill(parent, signal.SIGKILL)
    run = ok(lab.deploy("--data", "smoke=never"))
    assert run.changed == [p.SERVER]
    assert not [pid for pid in before if alive(pid)]
    assert health(lab.port) == 200


def test_stopping_leaves_no_process(lab: Lab) -> None:
    before = [lab.pid(), *children(lab.pid())]
    ok(lab.deploy(deploy="stop.py"))
    assert not [pid for pid in before if alive(pid)]
    owned = subprocess.run(["pgrep", "-f", str(lab.root)], capture_output=True, text=True).stdout.split()
    assert owned == []
