"""Fetch wheels from another node of the fleet, going on after what is there; each is verified before it has its name.

REQUEST: folder, wheels [{"file", "size", "sha256"}], last (whether no others are to come), address, port, token.
Answers {"came": [files], "problem"}.
"""

import errno
import http.client
import urllib.parse

TIMEOUT_S, TRIES = 20, 3


def pull(row):
    """Have all of a wheel's bytes in its part; a connection that breaks is opened again while it brings something.

    Raises ValueError with what is wrong with the other node.
    """
    part, tries = part_of(row), 0
    while size_of(part) < row["size"]:
        before, problem = size_of(part), "it ends the connection"
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
        except ConnectionRefusedError as error:
            raise ValueError(str(error)) from None
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "filename", None) or getattr(error, "errno", None) == errno.ENOSPC:  # of this node's disk
                raise
            problem = str(error) or type(error).__name__
        finally:
            connection.close()
        tries = 0 if size_of(part) > before else tries + 1
        if tries == TRIES:
            raise ValueError(problem)
        time.sleep(tries)


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
