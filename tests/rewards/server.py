"""A reward server on the loopback interface, in a thread of its own."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def lengths(_, message):
    return 200, json.dumps({"scores": [len(text) for text in message["responses"]]}).encode()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Says nothing of a client that went away, as one does whose time is up."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Server:
    """Answers with what `answers` gives for the number of a request and its message: status, body, seconds to wait."""

    def __init__(self, answers):
        self.messages, self.headers = [], []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.messages.append(message)
                server.headers.append(dict(self.headers))
                status, body, *more = answers(len(server.messages), message)
                time.sleep(more[0] if more else 0)
                self.send_response(status)
                for name, value in (more[1] if len(more) > 1 else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self.http = _Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/score"

    def stop(self):
        self.http.shutdown()
        self.http.server_close()
