"""A Debian tree that containers on this machine boot from, and whether this machine can boot one at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from gpuwright import REPOSITORY

PACKAGES = (
    "systemd,systemd-sysv,dbus,openssh-server,python3,python3-venv,ca-certificates,sudo,libnuma1,logrotate,iproute2,"
    "procps,g++,openssl"
)
BASE = REPOSITORY / ".lab" / "debian"
MADE_OF = BASE / "made-of"
TOOLS = {"systemd-nspawn": "systemd-container", "debootstrap": "debootstrap", "ssh": "openssh-client"}


def reason_to_skip(**more_tools: str) -> str | None:
    """Why this machine cannot boot a container, or None. `more_tools` are other commands needed, and their packages."""
    if os.geteuid() != 0:
        return "needs root, to boot a container"
    for tool, package in (TOOLS | more_tools).items():
        if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin"):
            return f"needs {tool}: apt-get install {package}"
    return None if _mirror() else "needs Debian's package sources in /etc/apt, for debootstrap"


def _mirror() -> str | None:
    """This machine's own Debian mirror."""
    for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
        if path.suffix in (".list", ".sources") and path.is_file():
            for line in path.read_text().splitlines():
                words = line.split()
                for word in words[1:] if words[:1] in (["deb"], ["URIs:"]) else []:
                    if word.startswith("http") and word.rstrip("/").endswith("/debian"):
                        return word
    return None


def is_made() -> bool:
    """Whether the tree is there, of these packages."""
    return MADE_OF.exists() and MADE_OF.read_text() == PACKAGES


def base() -> Path:
    """A pristine tree, made once: about a minute and 650 MB. Raises RuntimeError."""
    if not is_made():
        if f"lowerdir={BASE}," in Path("/proc/mounts").read_text():
            raise RuntimeError(f"{BASE} must be made anew and a fleet lies over it: make fleet-down")
        mirror = _mirror()
        assert mirror is not None
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(BASE), mirror]
        for _ in range(2):  # a mirror may answer badly once
            shutil.rmtree(BASE, ignore_errors=True)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                break
        if done.returncode != 0:
            raise RuntimeError(f"debootstrap failed: {done.stdout[-3000:]}")
        MADE_OF.write_text(PACKAGES)
    return BASE


def refusal() -> str | None:
    """What keeps this machine from starting any container, such as a sandbox without namespaces, or None."""
    command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--directory={base()}", "/bin/true"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return None if done.returncode == 0 else f"this machine starts no container: {done.stderr.strip()[-300:]}"
