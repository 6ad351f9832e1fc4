"""Settings of the host, really set, found settled, kept over a reboot and put back, in a booted Debian container.

The tests share one container and build on each other, in the order of this file. `/proc/sys` and `/sys` are read-only
in a container until it makes them writable; what is set there is this machine's own, and is put back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwright import REPOSITORY
from gpuwright import plan as p
from gpuwright.state import read_observation
from gpuwright.system import kept_in
from tests.lab import container
from tests.lab.conftest import Lab, Run, ok

ROOT = "/opt/gpuwright"
UNIT = "gpuwright-system"
SWAPPINESS = Path("/proc/sys/vm/swappiness")
PERSISTENCED = "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n"
DRIVER = (
    "Package: nvidia-driver-test\nVersion: 580.1\nArchitecture: all\nMaintainer: t\nDescription: stands for a driver\n"
)


class Host:
    """The container as an inventory of one host, deployed to over SSH with the settings that a test declares."""

    def __init__(self, machine: container.Container, folder: Path) -> None:
        self.machine, self.folder = machine, folder

    def deploy(self, system: dict[str, object], *arguments: str, deploy: str = "deploy.py") -> Run:
        lab = Lab(Path(ROOT), 31999)
        inventory = self.folder / "lab.py"
        data = self.machine.data() | {"supervisor": "auto", "unit": UNIT, "system": system}
        inventory.write_text(f"lab = [('127.0.0.1', {data!r})]\n")
        lab.inventory = str(inventory)
        return lab.deploy("--data", "stages=system", *arguments, timeout=300, deploy=deploy)

    def run(self, line: str, *, check: bool = True) -> str:
        return self.machine.run(line, check=check)

    def manifest(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.run(f"cat {kept_in(ROOT)}/system.json"))
        return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    reason = container.reason_to_skip() or container.refusal()
    if reason:
        pytest.skip(reason)
    folder = REPOSITORY / ".lab" / "container-system"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    machine = container.Container(folder, [])
    machine.prepare()
    (machine.tree / "etc" / "systemd" / "system" / "nvidia-persistenced.service").write_text(PERSISTENCED)
    package = machine.tree / "root" / "driver" / "DEBIAN"
    package.mkdir(parents=True)
    (package / "control").write_text(DRIVER)
    machine.boot()
    before = SWAPPINESS.read_text()
    machine.run("dpkg-deb --build /root/driver /root/driver.deb && dpkg -i /root/driver.deb")
    machine.run("dpkg --purge python3-venv python3.11-venv")  # as on a Debian that nobody has prepared
    yield Host(machine, tmp_path_factory.mktemp("inventory"))
    machine.end()
    SWAPPINESS.write_text(before)
    shutil.rmtree(folder)


SETTINGS: dict[str, object] = {
    "numa": True, "shared-memory": 3, "persistence": True, "hold-driver": True, "open-files": 4096, "uvm-no-hmm": True,
    "governor": True,
}  # fmt: skip
FILES = [
    f"/etc/modprobe.d/90-{UNIT}.conf", f"/etc/security/limits.d/90-{UNIT}.conf",
    f"/etc/systemd/system/{UNIT}-settings.service", f"{kept_in(ROOT)}/boot_settings.sh",
]  # fmt: skip


def shm_gib(host: Host) -> float:
    blocks, size = host.run("stat -f -c '%b %S' /dev/shm").split()
    return int(blocks) * int(size) / (1 << 30)


def test_settings_are_made_so(host: Host) -> None:
    assert host.run("command -v numactl", check=False) == "", "the base tree has none"
    assert shm_gib(host) != 3
    run = ok(host.deploy(SETTINGS))
    assert run.changed == [p.FOLDERS, p.SETTINGS]
    for said in (
        "numa: package numactl: expected installed, found absent", "shared-memory: /dev/shm: expected 3 GiB",
        "persistence: nvidia-persistenced.service: expected enabled, active, found disabled, inactive",
        "hold-driver: package nvidia-driver-test: expected held, found not held",
    ):  # fmt: skip
        assert said in run.said, run.said
    assert host.run("command -v numactl") == "/usr/bin/numactl" and shm_gib(host) == 3
    assert (
        host.run("systemctl is-active nvidia-persistenced; systemctl is-enabled nvidia-persistenced")
        == "active\nenabled"
    )
    assert host.run("apt-mark showhold") == "nvidia-driver-test"
    assert [host.run(f"head -c 2 {path}") for path in FILES] == ["#", "#", "#", "#!"]
    assert "options nvidia_uvm uvm_disable_hmm=1" in host.run(f"cat {FILES[0]}")
    assert host.run("su - root -c 'ulimit -Hn'") == "4096", "a new login has it"
    assert host.run(f"systemctl is-enabled {UNIT}-settings") == "enabled"
    assert set(host.manifest()["settings"]) == set(SETTINGS)  # type: ignore[arg-type]


def test_they_are_found_settled(host: Host) -> None:
    run = ok(host.deploy(SETTINGS))
    assert run.changed == []
    dry = ok(host.deploy(SETTINGS, "--dry"))
    assert dry.planned == []


def test_the_doctor_sees_the_host_as_it_is_set(host: Host, tmp_path: Path) -> None:
    run = host.deploy(SETTINGS, "--data", f"save_observation={tmp_path}", deploy="doctor.py")
    assert run.code == 2 and "python3-venv: expected python3 can make a venv" in run.said, run.said
    state = read_observation((tmp_path / "127.0.0.1.json").read_text())
    assert state.systemd and state.server.units == [], "the unit of the settings is no server of ours"
    units = {"load": "loaded", "active": "active", "enabled": "enabled"}
    assert state.readings["services"]["nvidia-persistenced.service"] == units
    assert state.readings["packages"]["installed"]["nvidia-driver-test"] == {"version": "580.1", "held": True}
    assert state.readings["packages"]["manager"] == "apt" and state.readings["system"]["os"] == "debian"
    assert (
        state.readings["mounts"]["shm"]["size"] == 3 << 30 and state.readings["system"]["container"] == "systemd-nspawn"
    )


def test_a_boot_unit_that_someone_disabled_is_enabled_again(host: Host) -> None:
    host.run(f"systemctl disable {UNIT}-settings")
    run = ok(host.deploy(SETTINGS))
    assert run.changed == [p.SETTINGS] and f"{UNIT}-settings.service: expected enabled, found disabled" in run.said
    assert host.run(f"systemctl is-enabled {UNIT}-settings") == "enabled"


def test_what_someone_else_changes_is_found_and_mended(host: Host) -> None:
    host.run(
        "mount -o remount,size=1G /dev/shm && apt-mark unhold nvidia-driver-test && systemctl stop nvidia-persistenced"
    )
    host.run(f"echo >> {FILES[1]}")
    run = ok(host.deploy(SETTINGS))
    assert run.changed == [p.SETTINGS]
    assert (
        "shared-memory: /dev/shm: expected 3 GiB, found 1 GiB" in run.said
        and f"{FILES[1]}: expected sha256" in run.said
    )
    assert shm_gib(host) == 3 and host.run("apt-mark showhold") == "nvidia-driver-test"
    assert host.run("systemctl is-active nvidia-persistenced") == "active"


def test_they_last_over_a_reboot(host: Host) -> None:
    host.machine.reboot()
    assert shm_gib(host) == 3, host.run(f"systemctl status {UNIT}-settings", check=False)
    assert ok(host.deploy(SETTINGS)).changed == []


def test_a_row_that_is_taken_out_is_put_back(host: Host) -> None:
    kept = {name: value for name, value in SETTINGS.items() if name not in ("shared-memory", "numa")}
    run = ok(host.deploy(kept))
    assert run.changed == [p.SETTINGS]
    assert "shared-memory: shared_memory: expected as it was before" in run.said
    assert "mount" not in host.run(f"cat {kept_in(ROOT)}/boot_settings.sh"), "what is left there is the governor's line"
    assert host.run("command -v numactl", check=False) == "", "what we installed is removed"
    assert host.run("dpkg-query -W -f '${db:Status-Abbrev}' libnuma1") == "ii", "what was there before is not"
    assert shm_gib(host) != 3 and host.run(f"test -e {FILES[2]} || echo gone") == (
        "gone" if "governor" not in kept else ""
    )
    assert ok(host.deploy(kept)).changed == []


def test_all_of_them_are_put_back(host: Host) -> None:
    run = ok(host.deploy({}))
    assert run.changed == [p.SETTINGS]
    assert host.run("apt-mark showhold") == ""
    assert host.run(
        "systemctl is-active nvidia-persistenced; systemctl is-enabled nvidia-persistenced", check=False
    ) == ("inactive\ndisabled")
    assert host.run("ls " + " ".join(FILES) + " 2>/dev/null", check=False) == ""
    assert host.run(f"systemctl is-enabled {UNIT}-settings", check=False) in ("", "not-found", "disabled")
    assert host.manifest() == {"settings": {}, "files": []}
    assert ok(host.deploy({})).changed == []


def test_a_package_that_others_need_by_now_stays(host: Host) -> None:
    ok(host.deploy({"numa": True}))
    needs = (
        "Package: needs-numactl\\nVersion: 1\\nArchitecture: all\\nMaintainer: t\\nDepends: numactl\\nDescription: x\\n"
    )
    host.run(f"mkdir -p /root/needs/DEBIAN && printf '{needs}' > /root/needs/DEBIAN/control")
    host.run("dpkg-deb --build /root/needs /root/needs.deb && dpkg -i /root/needs.deb")
    run = ok(host.deploy({}))
    assert "left installed: numactl, which needs-numactl now need" in run.said
    assert host.run("command -v numactl") == "/usr/bin/numactl"
    assert ok(host.deploy({})).changed == []


def test_what_a_container_may_not_set_fails_with_the_reason_and_the_rest_is_set(host: Host) -> None:
    run = host.deploy({"swappiness": 7, "open-files": 65536})
    assert run.code != 0 and "swappiness: [Errno 30] Read-only file system" in run.said
    assert "leave the row out of `system` in group_data" in run.said
    assert "nofile 65536" in host.run(f"cat {FILES[1]}")


def test_a_kernel_parameter_is_set_and_put_back(host: Host) -> None:
    before = SWAPPINESS.read_text().strip()
    assert before != "7"
    if host.run("mount -o remount,rw,bind /proc/sys && echo writable", check=False) != "writable":
        pytest.skip("this machine starts no container that may write /proc/sys")
    ok(host.deploy({"swappiness": 7}))
    assert SWAPPINESS.read_text().strip() == "7"
    assert "vm.swappiness = 7" in host.run(f"cat /etc/sysctl.d/90-{UNIT}.conf")
    assert ok(host.deploy({"swappiness": 7})).changed == []
    again = ok(host.deploy({"swappiness": 9}))
    assert again.changed == [p.SETTINGS] and SWAPPINESS.read_text().strip() == "9"
    ok(host.deploy({}))
    assert SWAPPINESS.read_text().strip() == before, "as it was before the first of them"


def test_a_file_of_another_program_is_not_touched(host: Host) -> None:
    other = f"/etc/security/limits.d/90-{UNIT}.conf"
    host.run(f"echo '* - nofile 512' > {other}")
    run = host.deploy({"open-files": 4096, "numa": True})
    assert run.code != 0 and f"{other} is not of gpuwright" in run.said
    assert host.run(f"cat {other}") == "* - nofile 512" and host.run("command -v numactl"), "the rest is done"
    host.run(f"rm {other}")
    assert ok(host.deploy({"open-files": 4096, "numa": True})).changed == [p.SETTINGS]
    ok(host.deploy({}))


def test_a_row_that_cannot_be_made_does_not_keep_the_others(host: Host) -> None:
    unit = "/etc/systemd/system/nvidia-persistenced.service"
    host.run(f"systemctl stop nvidia-persistenced; mv {unit} /root/; systemctl daemon-reload")
    run = host.deploy({"persistence": True, "open-files": 4096})
    assert run.code != 0 and "the node has no unit nvidia-persistenced.service" in run.said
    assert "stopped; the rest of this step was done" in run.said and "nofile 4096" in host.run(f"cat {FILES[1]}")
    host.run("mv /root/nvidia-persistenced.service /etc/systemd/system/ && systemctl daemon-reload")
    ok(host.deploy({"persistence": True, "open-files": 4096}))
    host.run(f"systemctl disable --now nvidia-persistenced; rm {unit}; systemctl daemon-reload")
    gone = ok(host.deploy({}))
    assert "nvidia-persistenced.service is no more: nothing to put back" in gone.said
    assert ok(host.deploy({})).changed == []


SPEC = """\
Name: {name}
Version: 2.0
Release: 1
Summary: stands for {name}
License: MIT
BuildArch: noarch
%description
stands for {name}
%files
"""


def test_packages_by_dnf(host: Host) -> None:
    """A real dnf on a repository of its own, in the same container after apt-get is out of the way."""
    tools = "apt-get update -qq; apt-get install -qq -y --no-install-recommends dnf rpm createrepo-c"
    host.run(f"{tools} >/dev/null 2>&1 && mkdir -p /srv/repo /etc/yum.repos.d")
    for name in ("numactl", "numactl-libs"):
        host.run(f"cat > /root/{name}.spec <<'E'\n{SPEC.format(name=name)}E")
        host.run(f"rpmbuild --quiet -bb --define '_rpmdir /srv/repo' /root/{name}.spec >/dev/null 2>&1")
    host.run("createrepo_c -q /srv/repo")
    host.run("printf '[local]\\nname=local\\nbaseurl=file:///srv/repo\\ngpgcheck=0\\n' > /etc/yum.repos.d/local.repo")
    host.run("mv /usr/bin/apt-get /usr/bin/apt-get.away")
    try:
        run = ok(host.deploy({"numa": True, "cuda-toolkit": True}))
        assert "numa: package numactl-libs: expected installed, found absent" in run.said
        assert "not done yet: cuda-toolkit: no repository that the node knows has cuda-toolkit-12-8" in run.said
        assert sorted(host.run("rpm -qa --qf '%{NAME}\\n' 'numactl*'").split()) == ["numactl", "numactl-libs"]
        assert ok(host.deploy({"numa": True, "cuda-toolkit": True})).changed == []
        blocked = host.deploy({"numa": True, "hold-driver": True})
        assert blocked.code != 0 and "only apt can hold packages back" in blocked.said
        needs = SPEC.format(name="needs-numactl").replace("License", "Requires: numactl\nLicense")
        host.run(f"cat > /root/needs.spec <<'E'\n{needs}E")
        host.run("rpmbuild --quiet -bb --define '_rpmdir /srv' /root/needs.spec && rpm -i /srv/noarch/needs-*.rpm")
        assert "left installed: numactl-libs, numactl, which others now need" in ok(host.deploy({})).said
        assert host.run("rpm -q needs-numactl numactl | wc -l") == "2"
        host.run("rpm -e needs-numactl numactl numactl-libs")
        ok(host.deploy({"numa": True}))
        ok(host.deploy({}))
        assert host.run("rpm -qa 'numactl*'") == ""
    finally:
        host.run("mv /usr/bin/apt-get.away /usr/bin/apt-get")
