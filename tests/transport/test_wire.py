"""Requests on the wire."""

import pytest

from pdproxy.transport.h1_messages import Origin, request_head, target_of
from pdproxy.transport.port import HttpRequest


@pytest.mark.parametrize(
    ("url", "origin", "host", "path"),
    [
        ("http://node", Origin("http", "node", 80), "node", "/"),
        ("http://node:8000/v1?x=1#no", Origin("http", "node", 8000), "node:8000", "/v1?x=1"),
        ("https://[::1]:1/a", Origin("https", "::1", 1), "[::1]:1", "/a"),
        ("https://NODE/a", Origin("https", "node", 443), "NODE", "/a"),
    ],
)
def test_a_url_leads_to_an_origin(url: str, origin: Origin, host: str, path: str) -> None:
    target = target_of(url)
    assert (target.origin, target.host, target.path) == (origin, host, path)


def test_headers_of_one_connection_are_not_passed_on() -> None:
    ours = [
        ("connection", "close"),
        ("transfer-encoding", "chunked"),
        ("content-length", "99"),
        ("host", "evil"),
        ("expect", "100-continue"),
        ("accept-encoding", "gzip"),
    ]
    request = HttpRequest("POST", "http://node/", (*ours, ("x-kept", "yes")), b"{}")
    lines = request_head(request, target_of(request.url)).decode().split("\r\n")
    assert lines == [
        "POST / HTTP/1.1",
        "host: node",
        "accept-encoding: identity",
        "x-kept: yes",
        "content-length: 2",
        "",
        "",
    ]


def test_a_post_without_a_body_says_so() -> None:
    request = HttpRequest("POST", "http://node/drain")
    assert b"content-length: 0\r\n" in request_head(request, target_of(request.url))


def test_header_values_keep_their_bytes() -> None:
    request = HttpRequest("GET", "http://node/", (("x", "\xe9"),))
    assert b"x: \xe9\r\n" in request_head(request, target_of(request.url))
