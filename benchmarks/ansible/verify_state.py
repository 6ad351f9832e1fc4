"""What no module of Ansible can say and what a bare ssh asks: which recorded files of a node are not as expected.

Run as `python3 -IB -` with a last line `main("…")` behind it: zlib and base64 over JSON of {"site": folder, "hashes":
{path: sha256}, "sizes": {path: bytes}, "modes": {path: octal}, "shm": bytes at least}. Paths are absolute or below it.
Prints a line for each difference and ends with 2, or prints `clean` and ends with 0. Standard library only.
"""

import base64
import hashlib
import json
import os
import stat
import sys
import zlib


def different(hashes, site):
    """Those of `hashes` that are not there or have another content."""
    found = []
    for path, expected in hashes:
        try:
            with open(os.path.join(site, path), "rb") as handle:
                if hashlib.sha256(handle.read()).hexdigest() != expected:
                    found.append(f"{path}: another content")
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
    return found


def on_every_core(hashes, site):
    """`different`, in a process for each core, as observe.py does it."""
    jobs, readers, found = min(8, os.cpu_count() or 1), [], []
    for number in range(jobs):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as out:
                out.write("\n".join(different(hashes[number::jobs], site)))
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    for reader in readers:
        with os.fdopen(reader) as handle:
            found += handle.read().split("\n")
        os.wait()
    return [line for line in found if line]


def main(given):
    expected = json.loads(zlib.decompress(base64.b64decode(given)))
    site = expected["site"]
    found = on_every_core(sorted(expected["hashes"].items()), site)
    for path, size in expected["sizes"].items():
        try:
            if os.stat(os.path.join(site, path)).st_size != size:
                found.append(f"{path}: another size")
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
    for path, mode in expected["modes"].items():
        try:
            if format(stat.S_IMODE(os.stat(path).st_mode), "04o") != mode:
                found.append(f"{path}: another mode")
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
    shm = os.statvfs("/dev/shm")
    if shm.f_blocks * shm.f_frsize < expected["shm"]:
        found.append("/dev/shm: too small")
    print("\n".join(f"{os.uname().nodename} {line}" for line in found or ["clean"]))
    sys.exit(2 if found else 0)
