"""Fetch wheels from another node of the fleet, going on after what is there; each is verified before it has its name.

REQUEST: folder, wheels [{"file", "size", "sha256"}], last (whether no others are to come), address, port, token.
Answers {"came": [files], "problem"}.
"""

import http.client
import urllib.parse

TIMEOUT_S, TRIES = 20, 3


def pull(row):
    """Have all of a wheel's bytes in its part; a connection that breaks is opened again while it brings something."""
    part, tries = part_of(row), 0
    while bytes_at(part) < row["size"]:
        before = bytes_at(part)
        connection = http.client.HTTPConnection(REQUEST["address"], REQUEST["port"], timeout=TIMEOUT_S)
        try:
            path = "/%s/%s" % (REQUEST["token"], urllib.parse.quote(row["file"]))
            connection.request("GET", path, headers={"Range": "bytes=%d-" % before})
            answer = connection.getresponse()
            if answer.status != 206:
                raise ValueError("it answers HTTP %d" % answer.status)
            if int(answer.headers.get("Content-Length", -1)) != row["size"] - before:
                raise ValueError("its %s has another size" % row["file"])
            with open(part, "ab") as handle:
                own(part)
                shutil.copyfileobj(answer, handle, 1 << 20)
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "filename", None):  # of this node's disk
                raise
            tries = 0 if bytes_at(part) > before else tries + 1
            if tries >= TRIES or isinstance(error, ConnectionRefusedError):
                raise ValueError(str(error) or type(error).__name__) from None
            time.sleep(tries)
        finally:
            connection.close()


def main():
    came, problem = [], ""
    last, REQUEST["last"] = REQUEST["last"], False
    for row in REQUEST["wheels"]:
        try:
            pull(row)
        except ValueError as error:
            problem = str(error)
            break
        found = settle([row])
        if found:
            problem = "%s came wrong: %s" % (row["file"], found[row["file"]])
            break
        came.append(row["file"])
    if last and not problem:
        tidy()
    answer_with({"came": came, "problem": problem})


main()
