"""What RECORD files say of installed distributions: sent in front of the scripts that read them."""

import csv
import glob


def canonical(name):
    return "-".join(part for part in name.lower().replace("_", "-").replace(".", "-").split("-") if part)


def site_of(path):
    """The site-packages of a venv, or None."""
    found = sorted(glob.glob(os.path.join(glob.escape(path), "lib", "python3.*", "site-packages")))
    return found[-1] if found else None


def infos(site):
    """(canonical name, version, folder of the metadata) of each distribution."""
    for info in sorted(glob.glob(os.path.join(glob.escape(site), "*.dist-info"))):
        name, _, version = os.path.basename(info)[: -len(".dist-info")].rpartition("-")
        yield canonical(name), version, info


def record_of(info):
    """The rows [path, hash, size] of a RECORD, or None if it cannot be read."""
    try:
        with open(os.path.join(info, "RECORD"), encoding="utf-8", newline="") as handle:
            return [row for row in csv.reader(handle) if len(row) == 3]
    except (OSError, ValueError):
        return None


def build_of(rows):
    """What tells one build of a version from another: the sha256, in hex, over the paths and hashes of the package's
    own files. Metadata and scripts are left out: each installer writes them in its own way.
    """
    digest = hashlib.sha256()
    for path, said, _ in sorted(rows):
        if said and ".dist-info/" not in path and not path.startswith(".."):
            digest.update(("%s %s\n" % (path, said)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
