"""Remember which build of each distribution a deploy has installed: another wheel of the same version is told by it.

REQUEST: venv, path (of run/builds.json), anew (names whose build is what lies there now; the others keep theirs).
"""


def main():
    kept, found = read_json(REQUEST["path"]) or {}, {}
    for name, _, info in infos(site_of(REQUEST["venv"]) or ""):
        rows = record_of(info)
        if name in kept and name not in REQUEST["anew"]:
            found[name] = kept[name]
        elif rows is not None:
            found[name] = build_of(rows)
    write_json(REQUEST["path"], found)


main()
