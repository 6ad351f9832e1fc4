"""Preflight: each thing a host can lack is named, with what was found and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from gpuwright import plan as p
from gpuwright.plan import plan
from gpuwright.preflight import problems, report, shell_failure
from gpuwright.state import SeenPort
from tests.make import GIB, STOPPED, empty_state, gpu_spec, lab_spec, settled_state

LAB = lab_spec()
COMMANDS = empty_state(LAB).commands


def said(installed: bool = False, **changed: Any) -> str:
    return report(problems(LAB, empty_state(LAB, **changed), installed=installed, manager="supervisor"))


def test_a_good_host_has_no_problem() -> None:
    assert said() == ""


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"python": "3.8.10"}, "python3: expected 3.9 or later; found 3.8.10"),
        ({"machine": "aarch64"}, "machine: expected x86_64; found aarch64"),
        ({"ensurepip": False}, "-> install python3-venv"),
        ({"commands": COMMANDS | {"cc": None}}, "cc: expected on PATH; found not"),
        (
            {"commands": COMMANDS | {"c++": None}},
            "c++: expected on PATH; found not found\n    -> install a C++ compiler",
        ),
        ({"commands": COMMANDS | {"openssl": None}}, "openssl: expected on PATH; found not found"),
        ({"commands": COMMANDS | {"flock": None}}, "-> install util-linux"),
        ({"interpreter": None}, "Python 3.12 for the venv: expected python3.12 on PATH; found not found"),
        ({"root_writable": False}, "root: expected /opt/gpuwright can be made by this user; found permission denied"),
        ({"disk_free_bytes": 14.9 * GIB}, "free disk: expected 15 GiB at /opt/gpuwright; found 14.9 GiB"),
        ({"memory_bytes": 5.5 * GIB}, "memory: expected 6 GiB; found 5.5 GiB"),
        (
            {"port": SeenPort(pid=7, command="nginx")},
            "port 31000: expected free, or held by our own server; found held",
        ),
        ({"port": SeenPort(pid=None, command="a process of another user")}, "held by pid None (a process of another"),
    ],
)
def test_each_lack_is_named(changed: dict[str, Any], expected: str) -> None:
    changed = {k: int(v) if isinstance(v, float) else v for k, v in changed.items()}
    text = said(**changed)
    assert expected in text and "\n    -> " in text
    assert text.count("\n    -> ") == 1


def test_all_lacks_are_named_together() -> None:
    text = said(disk_free_bytes=0, memory_bytes=0)
    assert "free disk" in text and "memory" in text


def test_our_own_server_may_hold_the_port() -> None:
    server = STOPPED.model_copy(update={"status": "RUNNING", "pid": 7, "processes": [7, 8], "health": 200})
    assert said(port=SeenPort(pid=8, command="sglang"), server=server) == ""


def test_an_installed_stack_needs_no_second_15_gib() -> None:
    assert said(installed=True, disk_free_bytes=2 * GIB) == ""
    assert "expected 1 GiB" in said(installed=True, disk_free_bytes=GIB // 2)
    assert plan(LAB, settled_state(LAB, disk_free_bytes=2 * GIB)).changes == ()


def test_a_downloadable_python_is_no_problem() -> None:
    spec = lab_spec(python_download=True)
    assert problems(spec, empty_state(spec, interpreter=None), installed=False, manager="supervisor") == []


def test_a_root_too_long_for_a_unix_socket_is_refused_first() -> None:
    spec = lab_spec(root="/" + "x" * 90)
    assert "shorter `root`" in report(problems(spec, empty_state(spec), installed=False, manager="supervisor"))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({"systemd": False}, "systemd: expected PID 1; found another"),
        ({"uid": 1000}, "root, to write a systemd unit; found uid 1000"),
        ({"commands": COMMANDS | {"logrotate": None}}, "install logrotate"),
        ({"unit_owner": ""}, "unit sglang-server: expected none, or of /opt/gpuwright; found one that is not of"),
        ({"unit_owner": "/srv/other"}, "one that is of gpuwright's root /srv/other"),
        ({"logrotate_owner": ""}, "one that is not of gpuwright"),
    ],
)
def test_what_systemd_needs(seen: dict[str, Any], expected: str) -> None:
    spec = lab_spec(supervisor="systemd")
    state = empty_state(spec, **({"systemd": True} | seen))
    assert expected in report(problems(spec, state, installed=False, manager="systemd"))
    assert problems(spec, empty_state(spec, systemd=True), installed=False, manager="systemd") == []


def test_a_problem_blocks_the_host() -> None:
    gpu = gpu_spec()
    (change,) = plan(gpu, empty_state(gpu, memory_bytes=GIB)).of(p.PREFLIGHT)
    assert change.blocked and "64 GiB" in str(change)


def test_the_failing_command_prints_its_text_whatever_is_in_it() -> None:
    import subprocess

    text = 'it\'s 100% "broken" $HOME `ls`\nsecond line'
    done = subprocess.run(["sh", "-c", shell_failure(text)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, text + "\n")
