"""Hand out this node's wheels to other nodes, by HTTP, to who knows the token in the path; or end doing so.

REQUEST: action; to start: folder, address (where others reach this node), token, idle_s, limit_s; to stop: pid,
started. Answers {"pid", "started", "port"} or {"problem"}. It ends by itself after `idle_s` without a request, or
`limit_s`.
"""

import hmac
import http.server
import signal
import socketserver
import threading
import urllib.parse

AT_ONCE = 16


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    counting, busy, last = threading.Lock(), 0, 0.0

    def count(self, more):
        with self.counting:
            self.busy, self.last = self.busy + more, time.monotonic()

    def process_request(self, request, client_address):
        if threading.active_count() > AT_ONCE:  # each connection has a thread, from its first byte on
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def server_bind(self):  # without asking DNS for a name, as http.server does
        socketserver.TCPServer.server_bind(self)


class Handler(http.server.BaseHTTPRequestHandler):
    timeout = 30  # of a peer that says or takes nothing

    def log_message(self, *arguments):
        pass  # the token is in the path

    def do_GET(self):
        self.server.count(1)
        try:
            self.hand_out()
        finally:
            self.server.count(-1)

    def hand_out(self):
        token, _, name = self.path[1:].partition("/")
        name, begin = urllib.parse.unquote(name), re.fullmatch(r"bytes=(\d{1,15})-", self.headers.get("Range", ""))
        path = os.path.join(REQUEST["folder"], name)
        known = hmac.compare_digest(token.encode(), REQUEST["token"].encode())
        if not known or "/" in name or not name.endswith(".whl") or not os.path.isfile(path):
            self.send_error(404)
            return
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            offset = int(begin[1]) if begin else 0
            if begin and offset >= size:
                self.send_error(416)
                return
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(size - offset))
            if begin:
                self.send_header("Content-Range", "bytes %d-%d/%d" % (offset, size - 1, size))
            self.end_headers()
            self.wfile.flush()
            self.connection.sendfile(handle, offset)


def start():
    try:
        family, _, _, _, where = socket.getaddrinfo(REQUEST["address"], 0, type=socket.SOCK_STREAM)[0]
        if where[0].startswith("127.") != REQUEST["address"].startswith("127.") and REQUEST["address"] != "localhost":
            answer_with({"problem": "%s is %s here: set cluster_address" % (REQUEST["address"], where[0])})
            return
        Server.address_family = family
        server = Server(where, Handler)
    except OSError as error:
        answer_with({"problem": "it cannot listen at %s: %s" % (REQUEST["address"], error.strerror or error)})
        return
    sys.stdout.flush()
    child = os.fork()
    if child:
        answer_with({"pid": child, "started": process(child)["started"], "port": server.server_address[1]})
        return
    os.setsid()
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    begun = server.last = time.monotonic()
    while time.monotonic() < begun + REQUEST["limit_s"]:
        time.sleep(1)
        if not server.busy and time.monotonic() > server.last + REQUEST["idle_s"]:
            break
    os._exit(0)


def stop():
    found = process(REQUEST["pid"])
    if found and found["started"] == REQUEST["started"]:
        os.kill(REQUEST["pid"], signal.SIGTERM)


start() if REQUEST["action"] == "start" else stop()
