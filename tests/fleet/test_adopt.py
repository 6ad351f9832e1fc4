"""An interpreter that someone else keeps on a node: seen, never written to, and what became of it found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwright import plan as p
from tests.fleet.conftest import Control
from tests.fleet.nodes import Node
from tests.fleet.test_rollout import changes
from tests.lab.conftest import ok
from tests.make import catalogue

VENDOR, ROOT = "/opt/vendor", "/opt/adopting"
SITE = f"{VENDOR}/lib/python3.11/site-packages"
OWN = f"{ROOT}/venv/lib/python3.11/site-packages"
PYTHON = f"{ROOT}/venv/bin/python"


@pytest.fixture(scope="module")
def vendor(control: Control, three: list[Node]) -> Iterator[Node]:
    """A node with a venv of someone else's, of the very wheels that the lock names, and some more."""
    node = three[0]
    uv = "/opt/gpuwright/tools/bin/uv --quiet --system-certs pip install --no-deps --link-mode copy"
    uv += f" --python {VENDOR}/bin/python"
    node.run(f"/opt/gpuwright/tools/bin/uv --quiet venv --python /usr/bin/python3 {VENDOR}")
    node.run(f"{uv} -r /opt/gpuwright/run/runtime.lock.txt && {uv} einops==0.8.1 && useradd --system keeper")
    node.run(f"chown -R keeper {VENDOR}")
    yield node
    node.run(f"rm -rf {VENDOR} {ROOT} /etc/systemd/system/adopting* /etc/logrotate.d/adopting; userdel keeper")


def adopting(node: Node, folder: Path, patches: str = "series", **given: Any) -> Control:
    adopt = {"interpreter": f"{VENDOR}/bin/python", **given}
    data = {"root": ROOT, "unit": "adopting", "system": {}, "patches": patches, "adopt": adopt}
    return Control(folder, {node.name: node.data() | data})


def tree(node: Node) -> str:
    """All of the vendor's: each file's mode, owner, times, inode, and content."""
    listed = node.run(f"find {VENDOR} -printf '%p %s %m %U %i %T@ %C@\\n' | sort")
    return listed + node.run(f"find {VENDOR} -type f -exec sha256sum {{}} + | sort")


def distributions(node: Node) -> set[str]:
    """What is installed in our own venv."""
    return {name.partition("-")[0] for name in node.run(f"ls {OWN}").split() if name.endswith(".dist-info")}


def test_what_it_has_is_seen_and_what_carries_a_patch_lies_beside_it(vendor: Node, tmp_path: Path) -> None:
    before = tree(vendor)
    control = adopting(vendor, tmp_path)
    ok(control.deploy())
    assert distributions(vendor) == {"sglang", "flashinfer_python"}
    find = "import importlib.util as u; print(u.find_spec({!r}).origin)"
    seen = {name: vendor.run(f'{PYTHON} -I -c "{find.format(name)}"') for name in ("sglang", "einops")}
    assert seen == {"sglang": f"{OWN}/sglang/__init__.py", "einops": f"{SITE}/einops/__init__.py"}
    patch = catalogue().patches[0]
    hashes = [vendor.run(f"sha256sum {site}/{patch.file}").split()[0] for site in (OWN, SITE)]
    assert hashes == [patch.post_sha256, patch.pre_sha256]
    assert control.check().code == 0 and ok(control.deploy()).changed == []
    assert tree(vendor) == before, "nothing of what is adopted was written"


def test_without_patches_nothing_is_installed_at_all(vendor: Node, tmp_path: Path) -> None:
    control = adopting(vendor, tmp_path, patches="none")
    assert p.SYNC in ok(control.deploy()).changed and distributions(vendor) == set()
    assert control.check().code == 0 and ok(control.deploy()).changed == []


def test_a_hand_edit_stops_the_host_until_it_is_accepted_or_taken_back(vendor: Node, tmp_path: Path) -> None:
    control = adopting(vendor, tmp_path, patches="none")
    file = f"{SITE}/sglang/utils.py"
    vendor.run(f"cp -p {file} /root/kept; echo '# by hand' >>{file}")
    found = control.check()
    assert found.code == 2 and {each.step for each in found.findings("node-1")} == {p.ADOPT}, found.out
    assert "sglang/utils.py was written last" in found.out and "have its keeper put it back" in found.out
    stopped = control.deploy()
    assert stopped.code == 1 and "sglang of /opt/vendor/bin/python is not what was adopted" in stopped.said
    accepting = adopting(vendor, tmp_path, patches="none", changes="accept")
    assert changes(ok(accepting.deploy())) == {p.ADOPT: ["node-1"], p.VERIFY: ["node-1"]}
    assert control.check().code == 0 and ok(control.deploy()).changed == []
    vendor.run(f"cp -p /root/kept {file}")
    assert control.check().code == 2, "by the same rule, taking it back is a change"
    ok(accepting.deploy())


def test_it_is_upgraded_under_us(vendor: Node, tmp_path: Path) -> None:
    """What is declared of it is gone: the host stops. What only happened to be there comes into the venv."""
    declared = adopting(vendor, tmp_path, patches="none", versions={"sglang": "==0.5.*"})
    ok(declared.deploy())
    vendor.run(f"cp -a {SITE} /root/site; mv {SITE}/sglang-0.5.9.dist-info {SITE}/sglang-0.6.0.dist-info")
    stopped = declared.deploy()
    assert stopped.code == 1 and "/opt/vendor/bin/python has sglang 0.6.0" in stopped.said
    loose = adopting(vendor, tmp_path, patches="none")
    ok(loose.deploy())
    assert distributions(vendor) == {"sglang"}
    vendor.run(f"rm -rf {SITE} && mv /root/site {SITE}")
    ok(loose.deploy())
    assert distributions(vendor) == set()


def test_patches_go_in_place_only_where_the_group_says_so(vendor: Node, tmp_path: Path) -> None:
    control = adopting(vendor, tmp_path, patch_in_place=True)
    ok(control.deploy())
    series = catalogue().patches_for({"sglang": "0.5.9", "flashinfer-python": "0.6.3"})
    files = {patch.file: patch.post_sha256 for patch in series}
    listed = vendor.run(f"cd {SITE} && sha256sum {' '.join(files)}").splitlines()
    assert dict(reversed(line.split()) for line in listed) == files and distributions(vendor) == set()
    assert vendor.run(f"find {VENDOR} ! -user keeper") == "", "its files keep their owner"
    assert control.check().code == 0 and ok(control.deploy()).changed == []
    first = next(iter(files))
    vendor.run(f"echo '# by hand' >>{SITE}/{first}")
    assert control.check().code == 2
    assert "is foreign, in an interpreter that is adopted and never installed into" in control.deploy().said
    vendor.run(f"cp /opt/adopting/patches/originals/{series[0].pre_sha256} {SITE}/{first}")
    ok(control.deploy())
    ok(adopting(vendor, tmp_path, patches="none", patch_in_place=True).deploy())
    pristine = {patch.file: patch.pre_sha256 for patch in series}
    listed = vendor.run(f"cd {SITE} && sha256sum {' '.join(pristine)}").splitlines()
    assert dict(reversed(line.split()) for line in listed) == pristine, "and are taken back"


def test_it_is_let_go(vendor: Node, tmp_path: Path) -> None:
    data = {"root": ROOT, "unit": "adopting", "system": {}, "patches": "none"}
    control = Control(tmp_path, {vendor.name: vendor.data() | data})
    ok(control.deploy())
    assert distributions(vendor) == {"sglang", "flashinfer_python"}
    assert "gpuwright_adopted.pth" not in vendor.run(f"ls {OWN}")
    assert control.check().code == 0 and ok(control.deploy()).changed == []
