"""Fetch a model from a Hugging Face hub at one commit, and prove every file by its hash.

Runs in the venv's Python. REQUEST: path (the model's folder), repo ("org/name"), revision (a commit, 40 hex digits),
endpoint (the hub's URL, or None for the public one), token (or None; it is sent to the hub and goes nowhere else),
system_certs (whether what the node trusts is trusted),
manifest (the file that says what has been verified: {"repo", "revision", "files": {name: {"size", "mtime_ns",
"inode", "sha256" or "blob"}}, and "complete": true once all are}).

The files come by huggingface_hub's http_get, not hf_hub_download: of late that one deletes what it has of a file when
a connection breaks, and never goes on with what an earlier process left (huggingface/huggingface_hub#4196). Here what
there is of a file stays in `.cache/gpuwright`, and gets the file's name only once its hash is right.
"""

import errno
import fcntl
import logging
import re
import shutil
import stat
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

# What the node's other programs trust, a company's own CA included; the client alone trusts a list of its own.
BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem")
THERE = [path for path in BUNDLES if os.path.exists(path)]
if REQUEST.get("system_certs") and THERE:
    os.environ.setdefault("SSL_CERT_FILE", THERE[0])
# Without Xet: plain HTTP, which is taken up again where it was cut.
os.environ.update(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers
from huggingface_hub.utils.sha import git_hash

PATH, REPO, REVISION, TOKEN = (REQUEST[key] for key in ("path", "repo", "revision", "token"))
ENDPOINT = (REQUEST["endpoint"] or constants.ENDPOINT).rstrip("/")
CREDENTIAL = TOKEN or False  # None would be what someone logged in with on the node
PARTS = ".cache/gpuwright"  # from PATH, where the script goes
constants.DOWNLOAD_CHUNK_SIZE = 1 << 20  # what has come of a chunk (of 10 MiB otherwise) goes with the connection
THREADS, RETRIES, LINE_EVERY_S = 4, 5, 10
LOG = logging.getLogger("huggingface_hub")  # it warns of cut connections: a person sees that among our own words
LOG.handlers = [logging.StreamHandler(sys.stdout)]


class Wrong(Exception):
    """What is wrong and what to do, in words."""


def advice(error):
    """What an error means to a person, and what to do next."""
    where, number, text = f"{ENDPOINT}/{REPO}", getattr(error, "errno", None), str(error).replace(TOKEN or "\0", "***")
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    rows = [
        (isinstance(error, Wrong), text),
        (isinstance(error, RevisionNotFoundError), f"{REPO} has no commit {REVISION}: see {where}/commits/main"),
        (status in (401, 403) and TOKEN, f"{where} refuses `token` (HTTP {status}): mend it, or ask for access there"),
        (
            status in (401, 403),
            f"{where} is private, gated or not there (HTTP {status}): set `token`, or mend the name",
        ),
        (status == 404, f"{where} is not found (HTTP 404): mend the name, or set a `token` that may see it\n{text}"),
        (status, f"{where} answers HTTP {status}: try again later; what was fetched is kept\n{text}"),
        (number in (errno.ENOSPC, errno.EDQUOT), f"the disk of {PATH} is full: make room; what was fetched is kept"),
        (number, f"{PATH} cannot be written ({text}): mend its mount or owner, or set another folder"),
        (isinstance(error, (KeyError, TypeError, ValueError)), f"{ENDPOINT} is not a hub ({text}): check `endpoint`"),
        (True, f"{ENDPOINT} cannot be reached ({text}): check `endpoint` and this host's DNS, firewall and proxy"),
    ]
    return next(words for applies, words in rows if applies)


def wanted():
    """The repository's files at the revision: {name: {"size", and "sha256" (LFS) or "blob" (git)}}."""
    info = HfApi(ENDPOINT, token=CREDENTIAL).model_info(REPO, revision=REVISION, files_metadata=True, timeout=60)
    if info.sha != REVISION:
        raise Wrong(f"{ENDPOINT}/{REPO} was asked for {REVISION} and gave {info.sha}: set a whole commit")
    files = {}
    for each in info.siblings or []:
        name, steps = each.rfilename, each.rfilename.split("/")
        if {"", ".", ".."} & set(steps) or re.search(r"[\\\0]", name) or steps[:2] == PARTS.split("/"):
            raise Wrong(f"{REPO} has a file named {name!r}, which has no place in {PATH}: do not trust it")
        kind, value, digits = ("sha256", each.lfs.sha256, 64) if each.lfs else ("blob", each.blob_id, 40)
        if each.size is None or not re.fullmatch("[0-9a-f]{%d}" % digits, value or ""):
            raise Wrong(f"{ENDPOINT} gives no size or hash of {name}: set an `endpoint` that does")
        if each.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise Wrong(f"{name} is over 50 GB, which a hub does not send by plain HTTP: fetch it by hand")
        files[name] = {"size": each.size, kind: value}
    return files


def size_at(path):
    """A regular file's size, -1 where there is none; in one look, as another thread may move the file away."""
    try:
        found = os.stat(path)
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def part_of(name, file):
    """Where a file grows, by its name and hash: another revision's half is not taken for its own."""
    text = name + "\0" + (file.get("sha256") or file["blob"])
    return f"{PARTS}/{hashlib.sha256(text.encode()).hexdigest()[:32]}.incomplete"


def row(name, file):
    """A file's row of the manifest: what it was verified to be, and by what it is known again without reading it."""
    found = os.stat(name)
    return {**file, "size": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}


def difference(path, file):
    """What was expected of a file's content and what was found; empty where it is as the hub says."""
    kind = "sha256" if "sha256" in file else "blob"
    with open(path, "rb") as handle:  # what is not in LFS is small
        found = sha256_of(path) if kind == "sha256" else git_hash(handle.read())
    return "" if found == file[kind] else f"expected {kind} {file[kind]}, found {found}"


def download(name, part, size):
    """Have all of a file's bytes in `part`, after those that are there; a cut connection is opened again."""
    url, retries = hf_hub_url(REPO, name, revision=REVISION, endpoint=ENDPOINT), 0
    headers = build_hf_headers(token=CREDENTIAL, headers={"Accept-Encoding": "identity"})
    while True:
        before = size_at(part) if size_at(part) in range(size + 1) else 0
        try:
            with open(part, "ab" if before else "wb") as handle:
                http_get(url, handle, resume_size=before, headers=headers, expected_size=size)
                handle.flush()
                os.fsync(handle.fileno())
            return
        except Exception as error:
            refused = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
            retries = 1 if before < size_at(part) <= size else retries + 1
            if refused or retries > RETRIES or getattr(error, "errno", None):
                raise
            LOG.warning(f"{name}: {type(error).__name__}; again in {2 ** (retries - 1)} s")
            time.sleep(2 ** (retries - 1))


def settle(name, file):
    """Have a verified file in its place; its row of the manifest."""
    part = part_of(name, file)
    if size_at(name) == file["size"] and not difference(name, file):
        return row(name, file)
    for _ in range(2):
        download(name, part, file["size"])
        wrong = difference(part, file)
        if not wrong:
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            os.replace(part, name)
            return row(name, file)
        os.unlink(part)
        LOG.warning(f"{name} came wrong: {wrong}")
    raise Wrong(f"{name} came wrong twice: {wrong}. Check what is between: `endpoint`, a proxy, this disk")


def ahead(files):
    """Bytes that are still to come."""
    missing = {name: file for name, file in files.items() if size_at(name) != file["size"]}
    return sum(file["size"] - max(0, size_at(part_of(name, file))) for name, file in missing.items())


def gib(size):
    return f"{size / (1 << 30):.2f} GiB"


def main():
    if TOKEN and not re.fullmatch("[!-~]+", TOKEN):
        raise Wrong("`token` holds a space or a line break, which no token has: set it anew")
    os.makedirs(f"{PATH}/{PARTS}", exist_ok=True)
    os.chdir(PATH)
    lock = os.open(f"{PARTS}/lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another node, where the folder is shared, or another deploy
        print(f"another process is fetching into {PATH}: waiting for it to end")
        fcntl.flock(lock, fcntl.LOCK_EX)
    files, listed = wanted(), (read_json(REQUEST["manifest"]) or {}).get("files", {})
    rows = {n: listed[n] for n in files if n in listed and os.path.isfile(n) and row(n, files[n]) == listed[n]}
    left = sorted(set(files) - set(rows), key=lambda name: -files[name]["size"])  # large ones first
    for name in {"lock", *os.listdir(PARTS)} - {"lock", *(os.path.basename(part_of(n, files[n])) for n in left)}:
        os.unlink(f"{PARTS}/{name}")  # no file will go on from it
    total, coming = sum(file["size"] for file in files.values()), ahead(files)
    lacking = coming + (1 << 30) - shutil.disk_usage(".").free
    if coming and lacking > 0:
        raise Wrong(f"{PATH} lacks {gib(lacking)} of disk for {gib(coming)} and 1 GiB beside: make room, or move it")
    print(f"{REPO} at {REVISION[:12]}: {len(left)} of {len(files)} files to fetch or verify, {gib(coming)} to come")
    manifest = {"repo": REPO, "revision": REVISION, "files": rows}
    pool, begun, before = ThreadPoolExecutor(THREADS), time.monotonic(), coming
    running, last = {pool.submit(settle, name, files[name]): name for name in left}, begun
    while running:
        write_json(REQUEST["manifest"], manifest)
        for each in wait(running, max(0, last + LINE_EVERY_S - time.monotonic()), FIRST_COMPLETED).done:
            rows[running.pop(each)] = each.result()
        now, still = time.monotonic(), ahead(files)
        if running and now >= last + LINE_EVERY_S:
            rate = (before - still) / (now - last)
            until = f"about {still / rate / 60:.0f} min left" if rate > 0 else "nothing came of late"
            done = f"{len(rows)} of {len(files)} files, {gib(total - still)} of {gib(total)}"
            print(f"{done}, {rate / (1 << 20):.0f} MiB/s, {until}")
            last, before = now, still
    for name in set(listed) - set(files):  # of an earlier commit, as we left it
        if os.path.isfile(name) and row(name, listed[name]) == listed[name]:
            os.unlink(name)
    write_json(REQUEST["manifest"], {**manifest, "complete": True})
    print(f"all {len(files)} files are verified; {gib(coming)} came in {time.monotonic() - begun:.0f} s")


try:
    main()
except Exception as error:
    logging.disable()  # what the threads have to say would come after the last word
    try:
        fail("the model was not fetched: " + advice(error))
    finally:
        os._exit(1)  # without waiting for the threads
