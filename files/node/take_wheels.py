"""Wheels that come to this node: room for them, their names once they are whole, and a look before each installation.

REQUEST: folder, action, wheels [{"file", "size", "sha256"}], last (whether no others are to come); to prepare: stale
[names in the folder], copy_from (where they lie on this machine, or None). Answers {"parts": {file: bytes}, "wrong":
{file: what}}.
"""

SPARE = 256 << 20


def prepare():
    folder, rows = REQUEST["folder"], REQUEST["wheels"]
    parts = os.path.join(folder, PARTS)
    for name in REQUEST["stale"]:
        if os.path.exists(os.path.join(folder, name)):
            os.unlink(os.path.join(folder, name))
    if not rows:
        tidy()
        if os.path.isdir(folder) and not os.listdir(folder):
            os.rmdir(folder)
        return {}
    os.makedirs(folder, 0o755, exist_ok=True)
    os.makedirs(parts, 0o755, exist_ok=True)
    user = int(os.environ.get("SUDO_UID", os.geteuid()))
    if os.geteuid() not in (0, user):
        fail("wheels come by SFTP as uid %d, and this runs as uid %d: log in as that user" % (user, os.geteuid()))
    own(parts)
    for part in map(part_of, rows):
        if os.path.exists(part):
            own(part)
    for row in rows:
        if size_of(part_of(row)) > row["size"]:
            os.unlink(part_of(row))
    sizes = {row["file"]: size_of(part_of(row)) for row in rows}
    coming = sum(row["size"] for row in rows) - sum(sizes.values())
    free = shutil.disk_usage(folder).free
    if coming + SPARE > free:
        fail("%s has %d MB free, and %d MB of wheels are to come: make room" % (folder, free // 10**6, coming // 10**6))
    return sizes


def copy():
    """Of this machine's own wheelhouse."""
    for row in REQUEST["wheels"]:
        shutil.copyfile(os.path.join(REQUEST["copy_from"], row["file"]), part_of(row))
    return settle(REQUEST["wheels"])


def check():
    folder, rows = REQUEST["folder"], REQUEST["wheels"]
    paths = {row["file"]: os.path.join(folder, row["file"]) for row in rows}
    found = differences([(paths[row["file"]], row) for row in rows])
    for file in found:
        if os.path.exists(paths[file]):
            os.unlink(paths[file])
            print("%s is not the wheel of the lock, and was removed: %s" % (paths[file], found[file]))
        else:
            print("%s is not there" % paths[file])
    if found:
        fail("nothing was installed from them: deploy again with the runtime stage, and they are sent anew")


def main():
    if REQUEST["action"] == "prepare":
        sizes = prepare()
        wrong_ones = copy() if REQUEST["copy_from"] and REQUEST["wheels"] else {}
        answer_with({"parts": sizes, "wrong": wrong_ones})
    elif REQUEST["action"] == "settle":
        answer_with({"parts": {}, "wrong": settle(REQUEST["wheels"])})
    else:
        check()


main()
