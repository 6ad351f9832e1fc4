"""Print text files as one JSON: {path: text}. REQUEST: paths."""


def main():
    found = {}
    for path in REQUEST["paths"]:
        with open(path, encoding="utf-8", errors="replace") as handle:
            found[path] = handle.read()
    answer_with(found)


main()
