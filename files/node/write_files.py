"""Put text files in place, each atomically; remove others.

REQUEST: files [{"path", "text", "mode"}], remove [paths].
"""


def main():
    for item in REQUEST["files"]:
        os.makedirs(os.path.dirname(item["path"]), exist_ok=True)
        write_atomic(item["path"], item["text"].encode(), item["mode"])
        print("wrote %s" % item["path"])
    for path in REQUEST["remove"]:
        if os.path.lexists(path):
            os.unlink(path)
            print("removed %s" % path)


main()
