"""Bring files of the venv from one known content to another, by hash.

REQUEST: site, originals, stamp, files [{"path", "steps": [{"id", "pre", "post", "diff"}]}].
A file whose content is the pre-image of a step is taken through that step and all after it. The pristine content is
kept first, under its hash. Anything else is refused and left as it is. Applying needs no tool: with the pre-image known
by hash, every hunk lies exactly where the diff says, and the post-image's hash is the judge.
"""

import re

HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def apply(source, diff, what):
    """The bytes of `source` after a unified diff; context and removed lines must match to the byte."""
    old, new, at = source.splitlines(keepends=True), [], 0
    lines = diff.splitlines(keepends=True)
    index = 0
    while index < len(lines):
        header = HUNK.match(lines[index])
        index += 1
        if not header:
            continue
        start, count = int(header.group(1)), int(header.group(2) or b"1")
        start = start - 1 if count else start
        new += old[at:start]
        at = start
        while index < len(lines) and lines[index][:1] in b" -+\\" and not lines[index].startswith(b"--- "):
            kind, text = lines[index][:1], lines[index][1:]
            index += 1
            if kind == b"\\":  # "\ No newline at end of file" takes it from the line before
                if new and lines[index - 2][:1] in b" +":
                    new[-1] = new[-1].rstrip(b"\n")
                continue
            if kind in b" -":
                if at >= len(old) or old[at].rstrip(b"\n") != text.rstrip(b"\n"):
                    fail("%s: line %d is not what the diff expects" % (what, at + 1))
                at += 1
            if kind in b" +":
                new.append(text)
    return b"".join(new + old[at:])


def patch(item):
    path = os.path.join(REQUEST["site"], item["path"])
    try:
        with open(path, "rb") as handle:
            content = handle.read()
    except OSError as error:
        fail("%s: %s" % (path, error.strerror))
    digest = hashlib.sha256(content).hexdigest()
    steps = item["steps"]
    if digest == steps[-1]["post"]:
        return
    first = next((i for i, step in enumerate(steps) if step["pre"] == digest), None)
    if first is None:
        fail("%s: sha256 %s is not the content of any known state; left as it is" % (path, digest))
    if first == 0:
        original = os.path.join(REQUEST["originals"], digest)
        if not os.path.exists(original) or sha256_of(original) != digest:
            write_atomic(original, content)
    for step in steps[first:]:
        content = apply(content, step["diff"].encode(), "%s by %s" % (path, step["id"]))
        digest = hashlib.sha256(content).hexdigest()
        if digest != step["post"]:
            fail("%s by %s: the result's sha256 is %s, not the %s expected" % (path, step["id"], digest, step["post"]))
    if path.endswith(".py"):
        compile(content, path, "exec")
    write_atomic(path, content, None)
    print("patched %s: %s" % (item["path"], ", ".join(step["id"] for step in steps[first:])))


def main():
    if os.path.exists(REQUEST["stamp"]):
        os.unlink(REQUEST["stamp"])  # what was proved of the files as they were is no longer proved
    for item in REQUEST["files"]:
        patch(item)


main()
