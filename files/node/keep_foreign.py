"""Keep a copy of files that are neither pristine nor ours, and show what was changed in them.

REQUEST: originals, foreign, files as for patch_files. Changes nothing in the venv.
"""

import difflib

SHOWN = 120


def lines(data):
    return data.decode("utf-8", "replace").splitlines(keepends=True)


def bases(item):
    """What the file may have been edited from: the original, and each patched state of it; empty if it is not kept."""
    kept = os.path.join(REQUEST["originals"], item["pristine"])
    if not os.path.exists(kept) or sha256_of(kept) != item["pristine"]:
        return []
    with open(kept, "rb") as handle:
        found = [("the distribution's file", handle.read())]
    for step in item["steps"]:
        try:
            found.append(("the file after %s" % step["id"], apply_diff(found[-1][1], step["diff"].encode())))
        except ValueError:
            break
    return found


def main():
    for item in REQUEST["files"]:
        path = os.path.join(item["site"], item["path"])
        with open(path, "rb") as handle:
            content = handle.read()
        copy = os.path.join(
            REQUEST["foreign"], "%s-%s" % (hashlib.sha256(content).hexdigest()[:16], os.path.basename(path))
        )
        os.makedirs(REQUEST["foreign"], exist_ok=True)
        write_atomic(copy, content)
        print("a copy of %s as it was found is kept in %s" % (item["path"], copy))
        diffs = []
        for name, base in bases(item):
            diffs.append(list(difflib.unified_diff(lines(base), lines(content), name, "as it was found")))
        if diffs:
            shortest = min(diffs, key=len)
            print("".join(shortest[:SHOWN]), end="")
            if len(shortest) > SHOWN:
                print("(and %d more lines)" % (len(shortest) - SHOWN))
        else:
            print("no original is kept on this node to compare it with")


main()
