"""A server on an interpreter that someone else keeps: the lab's own venv stands for a vendor's image."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from tests.lab.conftest import Lab, children, free_ports, ok
from tests.lab.test_server_drift import check

ROOT = REPOSITORY / ".lab" / "test-vendor"


@pytest.fixture(scope="module")
def adopting(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A second node on this machine, which adopts the first one's venv; the first one's server is stopped."""
    ok(lab.deploy("--data", "stages=preflight,system,runtime"))
    ok(lab.deploy(deploy="stop.py"))
    shutil.rmtree(ROOT, ignore_errors=True)
    node = Lab(ROOT, free_ports(1)[0])
    inventory = tmp_path_factory.mktemp("inventory") / "lab.py"
    data: dict[str, Any] = {"interpreter": None, "adopt": {"interpreter": str(lab.venv / "bin" / "python")}}
    inventory.write_text(f"lab = [('@local', {data!r})]\n")
    node.inventory = str(inventory)
    yield node
    node.deploy(deploy="stop.py")
    shutil.rmtree(ROOT)


def test_it_serves_with_what_the_vendor_has_and_with_patches_of_its_own(adopting: Lab, lab: Lab) -> None:
    before = {path: path.stat().st_mtime_ns for path in lab.site.rglob("*.py")}
    ok(adopting.deploy("--data", "smoke=never"))
    own = {path.name.partition("-")[0] for path in adopting.site.glob("*.dist-info")}
    assert own == {"sglang", "flashinfer_python"}, "what carries a patch; all else is the vendor's"
    loaded = [Path(f"/proc/{pid}/maps").read_text() for pid in (adopting.pid(), *children(adopting.pid()))]
    assert any(f"{lab.site}/torch/lib/libtorch_cpu.so" in maps for maps in loaded)
    with urllib.request.urlopen(f"http://127.0.0.1:{adopting.port}/health", timeout=30) as answer:
        assert answer.status == 200
    assert {path: path.stat().st_mtime_ns for path in lab.site.rglob("*.py")} == before
    again = ok(adopting.deploy("--data", "smoke=never"))
    assert again.changed == []


def test_a_file_of_the_vendors_that_changes_is_drift_and_restarts_once_it_is_accepted(adopting: Lab, lab: Lab) -> None:
    file = lab.site / "einops" / "parsing.py"
    kept, mode, pid = file.read_bytes(), file.stat().st_mode, adopting.pid()
    file.unlink()  # a hard link of uv's cache
    file.write_bytes(kept + b"# by hand\n")
    code, verdict = check(adopting)
    assert code == 2 and {each.step for each in verdict.findings} == {p.ADOPT, p.SERVER}, verdict
    stopped = adopting.deploy("--data", "smoke=never")
    assert stopped.code == 1 and "einops/parsing.py was written last" in stopped.said and adopting.pid() == pid
    inventory = Path(adopting.inventory)
    text = inventory.read_text()
    inventory.write_text(text.replace("'adopt': {", "'adopt': {'changes': 'accept', "))
    run = ok(adopting.deploy("--data", "smoke=never"))
    inventory.write_text(text)
    assert set(run.changed) == {p.ADOPT, p.VERIFY, p.PROBE, p.CONFIG, p.SERVER} and adopting.pid() != pid
    assert ok(adopting.deploy("--data", "smoke=never")).changed == []
    file.write_bytes(kept)
    file.chmod(mode)
