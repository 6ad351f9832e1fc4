"""Answer, in one JSON, what a node is like. Reads only; never writes, not even a temporary file.

The one exception is asked for: with `deep` and `remember`, what was read is remembered in run/integrity.json.
REQUEST says where to look: root, venv, tools, files, folders, commands, address, port, unit, model, interpreter,
patched, adopt, manifest, originals, deep, remember, machine (what files/node/machine.py is asked), run (argv and env
that the active tier's launch script ends in), system_manifest.
"""

import base64
import collections
import glob
import marshal
import re
import shutil
import stat
import subprocess


def folder(path):
    try:
        found = os.stat(path)
    except OSError:
        return None
    return {"mode": found.st_mode & 0o777, "uid": found.st_uid} if stat.S_ISDIR(found.st_mode) else None


def file(path):
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return None
        return {"sha256": sha256_of(path), "size": found.st_size, "mode": stat.S_IMODE(found.st_mode)}
    except OSError:
        return None


def listing(path):
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def unreadable(paths):
    """Those that are there, and that this user may not read; another user's folder hides whether they are."""
    found = []
    for path in paths:
        try:
            os.stat(path)
            if not os.access(path, os.R_OK):
                found.append(path)
        except PermissionError:
            found.append(path)
        except OSError:
            continue
    return sorted(found)


def nearest_existing(path):
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


# Read and hashed in every observation: sources, headers, configuration. The rest (libraries, kernels) only when `deep`.
TEXT = tuple(
    ".py .pyi .pyx .pxd .pxi .c .cc .cpp .cu .cuh .h .hpp .hxx .inl .json .jsonl .yaml .yml .toml .cfg .ini .txt .md"
    " .rst .sh .cmake .jinja .j2 .js .css .html .typed .in".split()
)


def recorded_form(sha256):
    """A sha256 as RECORD writes it."""
    return base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()


def shared_out(work, items, weight):
    """[work(item) for item in items], on every core and in any order; `weight` says how long one takes, roughly.

    By forking: this script has no file of its own that a worker process could import.
    """
    jobs = min(8, os.cpu_count() or 1, 1 + sum(map(weight, items)) // 100_000)
    shares = [[0, []] for _ in range(jobs)]
    for item in sorted(items, key=weight, reverse=True):
        least = min(shares, key=lambda share: share[0])
        least[0] += weight(item)
        least[1].append(item)
    readers, answer = [], []
    for _, share in shares[1:]:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "wb") as out:
                marshal.dump([work(item) for item in share], out)
            os._exit(0)
        os.close(writer)
        readers.append((child, reader))
    answer += [work(item) for item in shares[0][1]]
    for child, reader in readers:
        with os.fdopen(reader, "rb") as handle:
            answer += marshal.load(handle)
        os.waitpid(child, 0)
    return answer


def distribution(site, info, patched, build, kept, hashes):
    """What an installed distribution is like, of its own RECORD alone: {"problem" (or None), "paths" that it brings but
    for `patched` ones (which count as they were installed), "odd" {path: how it is not as recorded}, "missing",
    "content" and "times" (digests), "newest", "read" {path: [what it is known again by, its sha256]}, "anew" (whether
    one of them was not in `kept`)}.

    `kept` is what an earlier deep reading read, None where only text is read.
    """
    found = {"problem": None, "paths": [], "odd": {}, "missing": [], "read": {}, "anew": False}
    rows = record_of(info)
    if rows is None:
        found["problem"] = "has no readable RECORD"
    elif build and build_of(rows) != build:
        found["problem"] = "is another build of this version than the deploy installed"
    elif not os.path.exists(os.path.join(info, "INSTALLER")):
        found["problem"] = "has no INSTALLER: its installation was cut off"
    times, content = {}, {}
    for path, said, size in rows or ():
        full, recorded = os.path.join(site, path), said.partition("sha256=")[2]
        if path in patched:
            content[path] = recorded
            continue
        if path.endswith(".pyc"):  # recorded by pip; Python itself writes it anew where it finds it stale
            continue
        found["paths"].append(path)
        try:
            there = os.stat(full)
        except OSError:
            found["missing"].append(path)
            continue
        times[path] = there.st_mtime_ns
        content[path] = "%d %d" % (there.st_size, there.st_mtime_ns)
        wrong = size.isdigit() and there.st_size != int(size)
        if wrong:
            found["odd"][path] = "has %d bytes, not the recorded %s" % (there.st_size, size)
        text = path.endswith(TEXT)
        if not hashes or not recorded or not (text or (kept is not None and not wrong)):
            continue
        known = [there.st_size, there.st_mtime_ns, there.st_ino]
        digest = kept[path][1] if kept and path in kept and kept[path][0] == known else None
        if digest is None:
            found["anew"] = True
            try:
                digest = recorded_form(sha256_of(full))
            except OSError:
                digest = "unreadable"
        if digest != recorded:
            found["odd"].setdefault(path, "has another content than recorded")
        if text and digest != "unreadable":
            content[path] = digest
        if kept is not None and digest != "unreadable":
            found["read"][path] = [known, digest]
    newest = max(times, key=lambda path: (times[path], path), default=None)
    found["newest"] = [times[newest], newest] if newest else None
    found["content"], found["times"] = digest_of(content), digest_of(times)
    return found


def distributions(site, patched, builds, deep_cache=None, hashes=True):
    """({name: version}, {name: what is damaged}, {"content", "times", "newest"}) of a site-packages folder.

    Damaged: no RECORD, no INSTALLER (uv writes it last, so its absence means a killed installation), a RECORD of
    another build than the deploy installed (`builds`), a recorded file that is missing, not of the recorded size or not
    of the recorded sha256, or a second copy of the metadata. `patched` files are not looked at. Where several
    distributions bring the same file (flashinfer and torch-c-dlpack-ext each bring a build_backend.py) the one that was
    installed last wins, and its content is right for all of them.

    Two digests over every recorded and patched file: of its content (of one that is not text its size and time stand
    for it, however deep the reading), and of its time of writing. `newest`: the file written last.
    """
    kept = (read_json(deep_cache) or {}) if deep_cache else None
    named = {info: (name, version) for name, version, info in infos(site)}

    def look(info):
        return info, distribution(site, info, patched, builds.get(named[info][0]), kept, hashes)

    found = dict(shared_out(look, list(named), lambda info: size_of(os.path.join(info, "RECORD"))))
    versions, damaged = {}, {}
    odd = {path for each in found.values() for path in each["odd"]}
    claims = collections.Counter(path for each in found.values() for path in each["paths"] if path in odd)
    claims.subtract(path for each in found.values() for path in each["odd"])  # 0: no one's record has it as it is
    for info, (name, version) in named.items():
        each = found[info]
        if name in versions:
            damaged[name] = "has the metadata of both %s and %s" % (versions[name], version)
        versions[name] = version
        problems = [each["problem"], *("lacks %s" % path for path in each["missing"][:1])]
        problems += ["%s %s" % item for item in each["odd"].items() if not claims[item[0]]]
        for problem in filter(None, problems):
            damaged.setdefault(name, problem)
    if any(each["anew"] for each in found.values()) and deep_cache and REQUEST["remember"]:
        read = {path: entry for each in found.values() for path, entry in each["read"].items()}
        write_atomic(deep_cache, json.dumps(read).encode())
    content = {info[len(site) :]: each["content"] for info, each in found.items()}
    times = {info[len(site) :]: each["times"] for info, each in found.items()}
    newest = [each["newest"] for each in found.values() if each["newest"]]
    for path in patched:
        try:
            times[path] = os.stat(os.path.join(site, path)).st_mtime_ns
            content[path] = sha256_of(os.path.join(site, path))
        except OSError:
            continue
        newest.append([times[path], path])
    newest = max(newest)[1] if newest else None
    return versions, damaged, {"content": digest_of(content), "times": digest_of(times), "newest": newest}


def digest_of(values):
    """The sha256 of a mapping, in hex."""
    lines = ["%s %s\n" % (name, values[name]) for name in sorted(values)]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def venv(path, patched, builds, deep_cache=None, hashes=True):
    """A venv of ours; None where it is none, or no longer one: its interpreter is gone, or is of another Python by now
    (a release of the system that follows another link from /usr/bin/python3), which does not see what is installed.
    """
    config = os.path.join(path, "pyvenv.cfg")
    try:
        with open(config, encoding="utf-8") as handle:
            pairs = dict(line.split("=", 1) for line in handle.read().splitlines() if "=" in line)
    except OSError:
        return None
    version = next((v.strip() for k, v in pairs.items() if k.strip() in ("version_info", "version")), "")
    site = os.path.join(path, "lib", "python" + ".".join(version.split(".")[:2]), "site-packages")
    python = os.path.join(path, "bin", "python")
    now = re.fullmatch(r"python(3\.\d+)", os.path.basename(os.path.realpath(python)))
    moved = now is not None and now[1] != ".".join(version.split(".")[:2])
    if not os.path.exists(python) or not os.path.isdir(site) or moved:
        return None
    versions, damaged, installed = distributions(site, set(patched), builds, deep_cache, hashes)
    return {"python": version, "site": site, "distributions": versions, "damaged": damaged, "installed": installed}


def interpreter(wanted, path):
    """The interpreter for the venv: {"path", "version"}, run to be sure (a pyenv shim exists and cannot run)."""
    for candidate in [path] if path else ["python" + wanted, sys.executable, "/usr/bin/python" + wanted]:
        where = shutil.which(candidate or "")
        if not where:
            continue
        code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
        try:
            done = subprocess.run(
                [where, "-IB", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        version = done.stdout.decode().strip()
        if done.returncode == 0 and ".".join(version.split(".")[:2]) == wanted:
            return {"path": where, "version": version}
    return None


SITES = """
import json, sys
sites = [path for path in sys.path if path.rstrip("/").rpartition("/")[2] in ("site-packages", "dist-packages")]
print(json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "sites": sites}))
"""


def adopted(asked, patched):
    """The interpreter that someone else keeps, with what it has of the distributions asked for; None if it cannot be
    run. Where it has one twice, the first folder wins, as in an import.
    """
    try:
        done = subprocess.run(
            [asked["interpreter"], "-IB", "-c", SITES], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    named, skipped = {}, patched if asked["patch_in_place"] else set()
    for site in found["sites"]:
        for name, version, info in infos(site):
            if name in asked["distributions"]:
                named.setdefault(name, (site, version, info))

    def look(name):
        site, version, info = named[name]
        seen = distribution(site, info, skipped, None, None, True)
        folders = path_lines(site, info)
        newest = seen["newest"] and seen["newest"][1]
        answer = {"version": version, "site": site, "content": seen["content"], "newest": newest}
        return name, folders is not None and dict(answer, folders=folders)

    rows = shared_out(look, list(named), lambda name: size_of(os.path.join(named[name][2], "RECORD")))
    found["distributions"] = {name: row for name, row in rows if row}
    return found


def path_lines(site, info):
    """The folders that a distribution's own .pth files name, as some have their modules there alone; their code is not
    run. None where it is installed in editable form: what is imported then lies wherever its code says.
    """
    names = [row[0] for row in record_of(info) or () if row[0].endswith(".pth") and "/" not in row[0]]
    if any(name.startswith("__editable__") for name in names):
        return None
    folders = []
    for name in names:
        try:
            with open(os.path.join(site, name), encoding="utf-8", errors="replace") as handle:
                lines = [line.strip() for line in handle]
        except OSError:
            continue
        lines = [line for line in lines if line and not line.startswith(("#", "import ", "import\t"))]
        folders += [path for path in (os.path.join(site, line) for line in lines) if os.path.isdir(path)]
    return folders


def patched_at(path, site, others):
    """A file that carries patches: the venv's; or, where they go in place, that of the adopted interpreter."""
    places = [site] if site else []
    if others and REQUEST["adopt"]["patch_in_place"]:
        places += others["sites"]
    return next(filter(None, (file(os.path.join(place, path)) for place in places)), None)


DATA_END = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d+)\s*\]')


def cut_shard(path, size):
    """What is wrong with a safetensors file's size, or None: its header says how long its data is.

    Source: the safetensors format: 8 bytes of header length, the header, the tensors.
    """
    try:
        with open(path, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = handle.read(length) if 2 <= length <= min(size, 100_000_000) else b""  # the format's own bound
    except OSError as error:
        return "cannot be read: %s" % error.strerror
    if not header.startswith(b"{") or len(header) != length:
        return "has no whole header"
    wanted = 8 + length + max((int(end) for end in DATA_END.findall(header)), default=0)
    return None if size == wanted else "has %d bytes, and its header says %d" % (size, wanted)


def model(request):
    """The model folder: sizes of its files, the shards its index names, and hashes of what `hash` names."""
    path = request["path"]
    if not os.path.isdir(path):
        return None
    files = {}
    fetched = (read_json(request["manifest"]) or {}).get("files", {})
    index = read_json(os.path.join(path, "model.safetensors.index.json"))
    names = index.get("weight_map") if isinstance(index, dict) else None
    names = names if isinstance(names, dict) else None
    inside = [n for n in {*fetched, *(names or {}).values()} if isinstance(n, str) and ".." not in n.split("/")]
    for name in sorted({*listing(path), *(n for n in inside if not n.startswith("/"))}):  # some lie in folders
        full = os.path.join(path, name)
        try:
            found = os.stat(full)
        except OSError:  # one that is being fetched may be gone by now
            continue
        if stat.S_ISREG(found.st_mode):
            files[name] = {
                "size": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino,
                "sha256": sha256_of(full) if request["hash"] else None,
            }  # fmt: skip
    config_path = os.path.join(path, "config.json")
    config = read_json(config_path)
    shards = [name for name in files if name.endswith(".safetensors")]
    problems = {name: cut_shard(os.path.join(path, name), files[name]["size"]) for name in shards}
    return {
        "files": files,
        "cut": {name: problem for name, problem in problems.items() if problem},
        "unfinished": sorted(
            os.path.basename(each)
            for folder in ("", ".cache/huggingface/download", ".cache/gpuwright")
            for each in glob.glob(os.path.join(glob.escape(os.path.join(path, folder)), "*.incomplete"))
        ),
        "shards": sorted(set(names.values())) if names is not None else None,
        "model_type": config.get("model_type") if isinstance(config, dict) else None,
        "config_sha256": sha256_of(config_path) if config is not None else None,
        "manifest": read_json(os.path.join(path, "gpuwright-model.json")) if request["hash"] else None,
        "tensors": {start: any(name.startswith(start) for name in names or ()) for start in request["tensors"]},
    }


# A loaded server may answer late, and must not be restarted for it. SGLang answers 503 after 20 s without a token.
HEALTH_TIMEOUT_S = 25


def server(root, unit):
    record = read_json(os.path.join(root, "run", "server.json"))
    units = units_of(root)
    known = [supervisor_status(os.path.join(root, "run", "supervisor.sock"))]
    known += [systemd_status(each) for each in sorted(units, key=lambda each: each != unit)]
    known = [each for each in known if each]
    running = [each for each in known if each["pid"]]
    nobody = {
        "manager": None,
        "unit": None,
        "status": None,
        "pid": None,
        "cgroup": None,
        "restarts": None,
        "enabled": None,
    }
    nobody.update(dropins=[], stale=False)
    kept = (running or known or [nobody])[0]
    recorded = server_processes(record)
    ours = {*recorded, *(cgroup_processes(kept["cgroup"]) if kept["cgroup"] else []), kept["pid"]}
    marked = marked_processes(root)
    orphans = {pid for pid in marked if pid not in ours and not supervised(pid, ours)}
    if not kept["pid"]:
        orphans |= set(recorded)
    ready = bool(kept["pid"] and record and record.get("ready_at"))
    return {
        "manager": kept["manager"],
        "unit": kept["unit"],
        "status": kept["status"],
        "pid": kept["pid"],
        "restarts": kept["restarts"],
        "record": record,
        "processes": recorded,
        "family": sorted(pid for pid in {*marked, *ours} - orphans if pid and process(pid)),
        "orphans": [{"pid": pid, "command": command_line(pid)[:80]} for pid in sorted(orphans)],
        "units": units,
        "enabled": kept["enabled"],
        "dropins": kept["dropins"],
        "stale": kept["stale"],
        "differs": differs(kept["pid"]) if kept["pid"] else [],
        "health": http_status("/health", HEALTH_TIMEOUT_S) if ready else None,
    }


def pairs(argv):
    """{"--flag": [values]} of the words after the module's name."""
    found, flag = {}, None
    for word in argv:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            found[flag] = [value] if value else []
        elif flag:
            found[flag].append(word)
    return found


def differs(pid):
    """In which arguments and variables the server's process is not what the launch script starts. Of what nobody has
    declared only the name is told: a value may be a secret. Nothing while the script itself still runs.
    """
    wanted = REQUEST["run"]
    argv, environ = words_of(pid, "cmdline"), words_of(pid, "environ")
    if not argv or environ is None or os.path.basename(argv[0]) == "bash":
        return []
    if argv[1:3] != ["-m", wanted["module"]]:
        return ["its command is %s, not %s" % (command_line(pid)[:80], wanted["module"])]
    expected, found, said = pairs(wanted["argv"]), pairs(argv[3:]), []
    for flag in sorted({*expected, *found}):
        if flag not in found:
            said.append("%s is missing" % " ".join([flag, *expected[flag]]))
        elif flag not in expected:
            said.append("%s is not in it" % flag)
        elif expected[flag] != found[flag]:
            said.append("%s is %s, not %s" % (flag, masked(" ".join(found[flag])), " ".join(expected[flag])))
    env = dict(each.split("=", 1) for each in environ if "=" in each)
    for name, value in sorted(wanted["env"].items()):
        if name not in env:
            said.append("variable %s is missing" % name)
        elif env[name] != value:
            said.append("variable %s is %s, not %s" % (name, env[name][:80], value))
    known = {*wanted["env"], *wanted["names"], "PWD", "SHLVL", "_", "OLDPWD"}
    said += ["variable %s is not in it" % name for name in sorted({*env} - known)]
    return said


def supervised(pid, ours):
    """Whether a process has one of `ours` above it: a compiler of the server, in a group of its own, is no orphan."""
    while pid > 1:
        if pid in ours:
            return True
        info = process(pid)
        pid = info["ppid"] if info else 0
    return False


def results(path):
    found = []
    for name in listing(path):
        if name.endswith(".json"):
            record = read_json(os.path.join(path, name)) or {}
            digest, verdict = record.get("spec_digest"), record.get("verdict")
            if isinstance(digest, str) and isinstance(verdict, str):
                benchmark = record.get("benchmark_digest")
                row = {"file": name, "spec_digest": digest, "verdict": verdict}
                found.append(dict(row, benchmark_digest=benchmark if isinstance(benchmark, str) else None))
    return found


def system_manifest(path):
    """What settings of ours say of themselves: {} where there are none, None where the file is damaged. An older
    gpuwright kept them in the root's own run/, where they count until settings.py moves them.
    """
    before = os.path.join(REQUEST["root"], "run", "system.json")
    if not os.path.exists(path) and os.path.exists(before):
        path = before
    found = read_json(path) if os.path.exists(path) else {"settings": {}, "files": []}
    whole = isinstance(found, dict) and isinstance(found.get("settings"), dict) and isinstance(found.get("files"), list)
    return found if whole else None


def deployed(path):
    """What the last deploy of each stage declared, by stage and name, or None where nothing is on record."""
    found = read_json(path)
    if found is None:
        return None
    stages = {stage: things for stage, things in found.items() if isinstance(things, dict)}
    return {stage: {name: str(value) for name, value in things.items()} for stage, things in stages.items()}


def wheels(path):
    """{name: bytes} of the files in the folder of wheels, and in its folder of parts."""
    names = listing(path) + ["parts/" + name for name in listing(os.path.join(path, "parts"))]
    return {name: size_of(os.path.join(path, name)) for name in names if os.path.isfile(os.path.join(path, name))}


STAMPS = ("runtime", "patches", "config")


def main():
    root, port = REQUEST["root"], REQUEST["port"]
    disk = nearest_existing(root)
    manifest = read_json(REQUEST["manifest"]) or {}
    patched = sorted(set(REQUEST["patched"]) | set(manifest))
    kept_by_others = adopted(REQUEST["adopt"], set(patched)) if REQUEST["adopt"] else None
    sites = [site_of(REQUEST["venv"]), *(kept_by_others["sites"] if kept_by_others else [])]
    asked = dict(REQUEST["machine"], sites=[site for site in sites if site])
    reader = begin_readings(asked)
    try:
        import ensurepip  # noqa: F401  (absent on Debian without python3-venv)

        has_ensurepip = True
    except ImportError:
        has_ensurepip = False
    tools = venv(REQUEST["tools"], [], {}, hashes=False)
    deep_cache = os.path.join(root, "run", "integrity.json") if REQUEST["deep"] else None
    answer = {
        "version": 6,
        "python": "%d.%d.%d" % sys.version_info[:3],
        "uid": os.geteuid(),
        "machine": os.uname().machine,
        "system_manifest": system_manifest(REQUEST["system_manifest"]),
        "system_owners": {path: owner(path) for path in REQUEST["system_files"]},
        "model_manifest": read_json(os.path.join(root, "run", "model.json")),
        "root_writable": os.access(disk, os.W_OK),
        "unreadable": unreadable(
            [root, *REQUEST["folders"], *REQUEST["files"], REQUEST["venv"], REQUEST["tools"], REQUEST["model"]["path"]]
        ),
        "ensurepip": has_ensurepip,
        "commands": {name: shutil.which(name) for name in REQUEST["commands"]},
        "interpreter": interpreter(REQUEST["python"], REQUEST["interpreter"]),
        "folders": {path: folder(path) for path in REQUEST["folders"]},
        "files": {path: file(path) for path in REQUEST["files"]},
        "launch_scripts": [
            name for name in listing(os.path.join(root, "launch")) if os.path.isfile(os.path.join(root, "launch", name))
        ],
        "tools": tools and {"distributions": tools["distributions"], "damaged": tools["damaged"]},
        "venv": venv(REQUEST["venv"], patched, read_json(os.path.join(root, "run", "builds.json")) or {}, deep_cache),
        "adopted": kept_by_others,
        "adopted_before": read_json(os.path.join(root, "run", "adopted.json")),
        "stamps": {name: read_json(os.path.join(root, "run", "%s.json" % name)) for name in STAMPS},
        "model": model(REQUEST["model"]),
        "port": port_holder(port),
        "server": server(root, REQUEST["unit"]),
        "systemd": has_systemd(),
        "unit_owner": unit_owner(REQUEST["unit"]),
        "logrotate_owner": owner("/etc/logrotate.d/%s" % REQUEST["unit"]),
        "caches": listing(os.path.join(root, "cache")),
        "state": read_json(os.path.join(root, "state.json")),
        "deployed": deployed(os.path.join(root, "run", "deployed.json")),
        "results": results(os.path.join(root, "results")),
        "wheels": wheels(REQUEST["wheels"]),
    }
    site = answer["venv"]["site"] if answer["venv"] else None
    answer["patched"] = {path: patched_at(path, site, kept_by_others) for path in patched}
    answer["manifest"] = manifest
    answer["originals"] = [name for name in listing(REQUEST["originals"]) if len(name) == 64]
    answer["machine_readings"] = finish_readings(reader, asked)
    answer_with(answer)


main()
