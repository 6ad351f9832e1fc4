"""Whether a package index lets us in: pip says of a wrong login only that there is no such version.

REQUEST: index (URL), name (of a distribution), login ([user, password] or None). Whatever else may be wrong is left to
the installer, which says it better.
"""

import base64
import urllib.error
import urllib.request


def main():
    url, login = "%s/%s/" % (REQUEST["index"].rstrip("/"), REQUEST["name"]), REQUEST["login"]
    request = urllib.request.Request(url)
    if login:
        token = base64.b64encode(":".join(login).encode()).decode()
        request.add_unredirected_header("Authorization", "Basic " + token)
    try:
        urllib.request.urlopen(request, timeout=20).close()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            why = "refuses `index_credentials`" if login else "asks for a login: set `index_credentials`"
            fail("%s %s (HTTP %d)" % (REQUEST["index"], why, error.code))
    except (OSError, ValueError):
        pass


main()
