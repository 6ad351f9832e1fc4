"""Answer with the last failed start: what was said of it, and its part of the log. REQUEST: root, most_bytes."""

failure = read_json(os.path.join(REQUEST["root"], "run", "failure.json"))
text = ""
if failure:
    try:
        with open(failure["log"], "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            begin = failure["log_offset"] if failure["log_offset"] <= size else 0
            handle.seek(max(begin, size - REQUEST["most_bytes"]))
            text = handle.read().decode("utf-8", "replace")
    except OSError:
        pass
answer_with({"failure": failure, "text": text})
