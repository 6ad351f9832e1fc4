"""Apply a unified diff exactly: no fuzz, no offset. Every context and removed line must match to the byte."""

import re

HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def apply_diff(source, diff):
    """The bytes of `source` after `diff` (bytes). Raises ValueError naming the line that is not as the diff expects."""
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
                    raise ValueError("line %d is not what the diff expects" % (at + 1))
                at += 1
            if kind in b" +":
                new.append(text)
    return b"".join(new + old[at:])
