"""A small HTTP server in a thread, for tests of what speaks to one by sockets of its own."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from types import MappingProxyType

HOST = "127.0.0.1"


class QuietHandler(BaseHTTPRequestHandler):
    """Answers, and logs nothing: a test's output is for its findings."""

    def body(self) -> bytes:
        """The request's body."""
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """Send a whole response."""
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def answer_json(self, status: int, value: object) -> None:
        """Send a value as JSON."""
        self.answer(status, json.dumps(value).encode(), {"content-type": "application/json"})

    def log_message(self, *args: object) -> None:
        """Nothing."""


@contextmanager
def running(server: HTTPServer) -> Iterator[int]:
    """The server's port, while it serves in a thread."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def served(handler: type[QuietHandler]) -> Iterator[str]:
    """The address of a server that answers by this handler."""
    with running(ThreadingHTTPServer((HOST, 0), handler)) as port:
        yield f"http://{HOST}:{port}"
