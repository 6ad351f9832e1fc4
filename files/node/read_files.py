"""Print the text files of a folder as one JSON: {name: text}. REQUEST: folder, names."""


def main():
    found = {}
    for name in REQUEST["names"]:
        with open(os.path.join(REQUEST["folder"], os.path.basename(name)), encoding="utf-8") as handle:
            found[name] = handle.read()
    print(json.dumps(found))


main()
