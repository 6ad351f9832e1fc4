"""Put text files in place, each atomically; remove others.

REQUEST: files [{"path", "text", "mode"}], remove [paths], only_where {path: sha256} (what must lie there, or nothing is
done).
"""


def lies_there(path, sha256):
    try:
        return sha256_of(path) == sha256
    except OSError:
        return False


def main():
    others = sorted(path for path, sha256 in REQUEST.get("only_where", {}).items() if not lies_there(path, sha256))
    if others:
        fail(
            "not recorded: %s is not as this deploy left it, so another has changed this host meanwhile: deploy again"
            % ", ".join(others[:3])
        )
    for item in REQUEST["files"]:
        os.makedirs(os.path.dirname(item["path"]), exist_ok=True)
        write_atomic(item["path"], item["text"].encode(), item["mode"])
        print("wrote %s" % item["path"])
    for path in REQUEST["remove"]:
        if os.path.lexists(path):
            os.unlink(path)
            print("removed %s" % path)


main()
