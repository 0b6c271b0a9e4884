"""As much of a Kubernetes API server as Helm's `lookup` asks for: secrets that are there, and nothing else."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Secrets = Mapping[str, Mapping[str, str]]
"""Base64 data by secret's name."""

_RESOURCES = {
    "kind": "APIResourceList",
    "apiVersion": "v1",
    "groupVersion": "v1",
    "resources": [
        {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
    ],
}
_MISSING = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def _handler(namespace: str, secrets: Secrets) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = path.removeprefix(f"/api/v1/namespaces/{namespace}/secrets/")
            if path == "/api/v1":
                self._answer(200, _RESOURCES)
            elif name in secrets:
                metadata = {"name": name, "namespace": namespace}
                kept = {"kind": "Secret", "apiVersion": "v1", "metadata": metadata, "data": secrets[name]}
                self._answer(200, kept)
            else:
                self._answer(404, _MISSING)

        def _answer(self, status: int, body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Nothing: a test's output is for its findings."""

    return Handler


@contextmanager
def cluster(namespace: str, secrets: Secrets) -> Iterator[str]:
    """The kubeconfig of a cluster with these secrets, while inside."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(namespace, secrets))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield _kubeconfig(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _kubeconfig(port: int) -> str:
    here = "here"
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": here,
            "contexts": [{"name": here, "context": {"cluster": here, "user": here}}],
            "clusters": [{"name": here, "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": here, "user": {}}],
        }
    )
