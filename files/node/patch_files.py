"""Bring files of the venv from one known content to another, by hash.

REQUEST: originals, manifest, stamp, files [{"site" (the folder that "path" is below), "path", "distribution",
"pristine", "known", "forget", "steps": [{"id", "pre", "post", "diff"}]}].
A file that is at the pre-image of a step is taken through it and all after it. One that holds another content of ours
(`known`) starts anew from the kept original. Without steps the original is put back. One that is to be forgotten is not
looked at: it is of another version by now, and only the manifest still names it. Anything else is refused and left as
it is. The order of writes is such that a kill between any two leaves a state the next run finishes: the original is
kept before the file is replaced, and the manifest names a file before it carries a patch and until it no longer does.
"""


def original(item, content, digest):
    """The pristine bytes of a file: the file itself, kept on the way, or what was kept before."""
    kept = os.path.join(REQUEST["originals"], item["pristine"])
    if digest == item["pristine"]:
        if not os.path.exists(kept) or sha256_of(kept) != digest:
            write_atomic(kept, content)
        return content
    try:
        with open(kept, "rb") as handle:
            data = handle.read()
    except OSError:
        fail(
            "%s: its original %s is not kept on this node: install %s anew"
            % (item["path"], item["pristine"], item["distribution"])
        )
    if hashlib.sha256(data).hexdigest() != item["pristine"]:
        fail("%s: its kept original %s is damaged: install %s anew" % (item["path"], kept, item["distribution"]))
    return data


def note(item, post):
    """Write into the manifest that a file carries `post`, or (None) that it is pristine again."""
    manifest = read_json(REQUEST["manifest"]) or {}
    wanted = dict(manifest)
    if post is None:
        wanted.pop(item["path"], None)
    else:
        wanted[item["path"]] = {"pristine": item["pristine"], "post": post, "distribution": item["distribution"]}
    if wanted != manifest:
        write_json(REQUEST["manifest"], wanted)


def replace(path, content):
    try:
        write_atomic(path, content, None)
    except OSError as error:
        fail(
            "%s cannot be written (%s): make site-packages writable for uid %d, or deploy as its owner"
            % (path, error.strerror or error, os.geteuid())
        )


def patch(item):
    if item["forget"]:
        note(item, None)
        print("forgot %s" % item["path"])
        return
    path = os.path.join(item["site"], item["path"])
    try:
        with open(path, "rb") as handle:
            content = handle.read()
    except OSError as error:
        fail("%s: %s" % (path, error.strerror))
    digest, steps = hashlib.sha256(content).hexdigest(), item["steps"]
    first = next((i for i, step in enumerate(steps) if step["pre"] == digest), None)
    if not steps:
        if digest in item["known"]:
            replace(path, original(item, content, digest))
            print("restored %s" % item["path"])
        elif digest != item["pristine"]:
            fail("%s: sha256 %s is not the content of any known state; left as it is" % (path, digest))
        note(item, None)
        return
    if digest == steps[-1]["post"]:
        note(item, digest)
        return
    if first is None and digest not in item["known"]:
        fail("%s: sha256 %s is not the content of any known state; left as it is" % (path, digest))
    if first is None or first == 0:
        content, first = original(item, content, digest), 0
    for step in steps[first:]:
        try:
            content = apply_diff(content, step["diff"].encode())
        except ValueError as error:
            fail("%s by %s: %s" % (path, step["id"], error))
        digest = hashlib.sha256(content).hexdigest()
        if digest != step["post"]:
            fail("%s by %s: the result's sha256 is %s, not the %s expected" % (path, step["id"], digest, step["post"]))
    if path.endswith(".py"):
        compile(content, path, "exec")
    note(item, digest)
    replace(path, content)
    print("patched %s: %s" % (item["path"], ", ".join(step["id"] for step in steps[first:])))


def main():
    if os.path.exists(REQUEST["stamp"]):
        os.unlink(REQUEST["stamp"])  # what was proved of the files as they were is no longer proved
    for item in REQUEST["files"]:
        patch(item)


main()
