"""The folder of wheels: what is there in part, and what may have its name. Sent in front of scripts that fill it."""

import shutil
from concurrent.futures import ThreadPoolExecutor

PARTS = "parts"


def part_of(row):
    """Where a wheel grows."""
    return os.path.join(REQUEST["folder"], PARTS, row["file"] + ".part")


def own(path):
    """Leave a part to the user who logs in, where this runs through his sudo: more of it may come over his SFTP."""
    if os.geteuid() == 0 and "SUDO_UID" in os.environ:
        os.chown(path, int(os.environ["SUDO_UID"]), -1)


def wrong(path, row):
    """In what a file is not the lock's wheel, or "". Hashing lets other threads run."""
    size = size_of(path)
    if size != row["size"]:
        return "expected %d bytes, found %d" % (row["size"], size)
    found = sha256_of(path)
    return "" if found == row["sha256"] else "expected sha256 %s, found %s" % (row["sha256"], found)


def differences(pairs):
    """{file: what is wrong with it} of (path, row) pairs."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        said = list(pool.map(lambda pair: wrong(*pair), pairs))
    return {row["file"]: problem for (_, row), problem in zip(pairs, said) if problem}


def settle(rows):
    """Give parts that are the lock's wheels their names, and remove those that are not: {file: what is wrong}. When
    these are the last that are to come, and they are right, the folder of parts goes, too.
    """
    places = {row["file"]: os.path.join(REQUEST["folder"], row["file"]) for row in rows}
    # Where there is no part, another deploy has given it its name meanwhile.
    found = differences([(part_of(row) if os.path.exists(part_of(row)) else places[row["file"]], row) for row in rows])
    for row in rows:
        part = part_of(row)
        if row["file"] not in found and os.path.exists(part):
            os.chmod(part, 0o644)
            if os.geteuid() == 0:
                os.chown(part, 0, 0)  # it came by SFTP as another user, where this runs through sudo
            os.replace(part, places[row["file"]])
        elif row["file"] in found and size_of(part) >= row["size"]:
            os.unlink(part)  # no rest that comes can make it right
    if REQUEST["last"] and not found:
        tidy()
    return found


def tidy():
    """Remove the folder of parts, where it is empty."""
    try:
        os.rmdir(os.path.join(REQUEST["folder"], PARTS))
    except OSError:
        pass
