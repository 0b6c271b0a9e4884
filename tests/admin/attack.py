"""Requests that a stranger's web page can send to a proxy that its reader's browser reaches, tried on one that runs.

``python -m tests.admin.attack http://127.0.0.1:8081 http://127.0.0.1:8080`` (operators' port, clients' port) prints a
line for each attack, and ends with status 1 where one gets through. An attack that gets through adds a node, or removes
one: for a proxy that serves nobody.
"""

import json
import socket
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse

EVIL = "evil.example"
"""The page's name, which it has pointed at the proxy's address after it was loaded (DNS rebinding)."""
NODE = json.dumps({"url": "http://127.0.0.1:9", "role": "decode", "name": "evil"})
ASK = json.dumps({"model": "m", "prompt": "one two", "max_tokens": 1})
FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", "")
"""Types that a page may post to another origin without asking it first (a preflight); "" is a body without a type."""


@dataclass(frozen=True)
class Attack:
    """One request. ``fields``: its header fields but the length; ``target``: as in its first line."""

    name: str
    method: str
    target: str
    fields: tuple[str, ...] = ()
    body: str = ""

    def head_and_body(self) -> bytes:
        """As sent."""
        length = (f"content-length: {len(self.body)}",) if self.body else ()
        return "\r\n".join([f"{self.method} {self.target} HTTP/1.1", *self.fields, *length, "", self.body]).encode()


@dataclass(frozen=True)
class Answer:
    """The proxy's answer."""

    status: int
    body: bytes


def on_operators(port: int) -> Iterator[Attack]:
    """By a rebound name, and from a page of another origin."""
    json_of = "content-type: application/json"
    reads = ["/nodes", "/nodes/decode-0", "/ui", "/ui/state", "/metrics", "/health", "/ready", "/prometheus/targets"]
    changes = (
        ("POST", "/nodes", NODE),
        ("DELETE", "/nodes/decode-0?seconds=0", ""),
        ("POST", "/nodes/decode-0/drain?seconds=0", ""),
        ("POST", "/debug/plan", ASK),
    )
    for host in (f"{EVIL}:{port}", f"{EVIL}.:{port}", EVIL.upper(), "localhost.evil.example", "127.0.0.1.evil.example"):
        for path in reads:
            yield Attack("rebound name, read", "GET", path, (f"host: {host}", "sec-fetch-site: same-origin"))
        for method, path, body in changes:
            fields = (f"host: {host}", f"origin: http://{host}", "sec-fetch-site: same-origin", json_of)
            yield Attack("rebound name, change", method, path, fields, body)
    here = f"127.0.0.1:{port}"
    for method, path, body in changes:
        for origin in (f"http://{EVIL}", "null", "http://127.0.0.1:1", f"http://{here}.{EVIL}"):
            yield Attack("page of another origin", method, path, (f"host: {here}", f"origin: {origin}", json_of), body)
        for site in ("cross-site", "same-site"):
            yield Attack("page of another site", method, path, (f"host: {here}", f"sec-fetch-site: {site}"), body)
    yield Attack("whole address as target", "GET", f"http://{EVIL}:{port}/nodes", (f"host: {here}",))
    yield Attack("whole address as target", "GET", f"http://{here}@{EVIL}/nodes", (f"host: {here}",))
    yield Attack("no host", "GET", "/nodes")
    yield Attack("two hosts", "GET", "/nodes", (f"host: {here}", f"host: {EVIL}"))
    yield Attack("two hosts in one", "GET", "/nodes", (f"host: {here}, {EVIL}",))


def on_clients(paths: Sequence[str]) -> Iterator[Attack]:
    """A body that a page may post without a preflight; and what is for operators alone."""
    for path in paths:
        for kind in FORMS:
            fields = ("host: x", f"origin: http://{EVIL}", *([f"content-type: {kind}"] if kind else []))
            yield Attack(f"posted as {kind or 'nothing'}", "POST", path, fields, ASK)
    for path in ("/metrics", "/nodes", "/ui", "/ui/state", "/debug/plan", "/prometheus/targets", "/may-leave"):
        yield Attack("for operators", "GET", path, ("host: x",))


def send(address: str, attack: Attack) -> Answer:
    """Send it to ``http://HOST:PORT``. Raises OSError."""
    to = urllib.parse.urlsplit(address)
    with socket.create_connection((to.hostname or "", to.port or 80), timeout=30) as connection:
        connection.sendall(attack.head_and_body())
        response = HTTPResponse(connection, method=attack.method)
        response.begin()
        return Answer(response.status, response.read())


def got_through(answer: Answer) -> bool:
    """Whether the proxy did what it was asked, or answered as if it might have."""
    return answer.status not in (400, 403, 404)


def main(operators: str, clients: str) -> int:
    """Print a line for each attack; 1 where one got through."""
    attacks = [(operators, each) for each in on_operators(urllib.parse.urlsplit(operators).port or 80)]
    attacks += [(clients, each) for each in on_clients(("/v1/completions", "/v1/embeddings", "/tokenize"))]
    through = 0
    for address, attack in attacks:
        answer = send(address, attack)
        through += got_through(answer)
        said = answer.body[:100].decode(errors="replace")
        verdict = "GOT THROUGH" if got_through(answer) else "refused"
        print(
            f"{verdict:12}{attack.name:32}{attack.method} {attack.target} {attack.fields[:2]}: {answer.status} {said}"
        )
    print(f"{through} of {len(attacks)} got through")
    return 1 if through else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
