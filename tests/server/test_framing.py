"""Requests that could be read in two ways, or that have no end, over raw connections."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from pdproxy.intake.exchange import JSON_HEADER, Receive, Scope, Send, headers_of, send_head, send_whole
from pdproxy.server.protocol import ConnectionLimits
from tests.server.raw import SOON, post, say, serving, whole_body

LIMITS = ConnectionLimits(2000, SOON, SOON)
CHUNKED = ("transfer-encoding: chunked", "connection: close")


async def headers_back(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the names of the request's headers, once its body is here."""
    await whole_body(scope, receive, 100_000)
    await send_whole(send, 200, (JSON_HEADER,), json.dumps([name for name, _ in headers_of(scope)]).encode())


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(LIMITS) as number:
        yield number


@pytest.mark.parametrize(
    "head",
    [
        post("content-length: 5", "content-length: 5", body=b"hello"),
        post("content-length: 5, 5", body=b"hello"),
        post("content-length: +5", body=b"hello"),
        post("content-length: 0x5", body=b"hello"),
        post("transfer-encoding: gzip, chunked", body=b"0\r\n\r\n"),
        post("transfer-encoding: identity", body=b""),
        post("transfer-encoding: chunked", "transfer-encoding: chunked", body=b"0\r\n\r\n"),
        post("transfer-encoding: chunked", body=b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"),
        post("transfer-encoding: chunked", body=b"5\nhello\n0\n\n"),
        post("transfer-encoding: chunked", body=b"zz\r\n"),
        post("transfer-encoding: chunked", body=b"fffffffffffffffff\r\n"),
        post("host: y", "content-length: 0"),
        b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n",
        b"GET /\r\n\r\n",
        post("x: a", " b", "content-length: 0"),
        post("x: a\0b", "content-length: 0"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        post("content-length: 5", "transfer-encoding: chunked", body=b"0\r\n\r\n"),
        post("transfer-encoding: chunked", "content-length: 5", body=b"0\r\n\r\n"),
        post("content-length: 5", "content-length: 6", body=b"hello"),
        post("content-length: -1"),
        post("content-length: 5x", body=b"hello"),
        post("transfer-encoding: xchunked", body=b"0\r\n\r\n"),
        post("transfer-encoding : chunked", body=b"0\r\n\r\n"),
        post("x y: 1"),
        b"POST / HTTP/1.1\nhost: x\n\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
    ],
    ids=range(29),
)
async def test_ambiguous_requests_are_refused(port: int, head: bytes) -> None:
    status, body = await say(port, head)
    assert status == 400
    assert json.loads(body)["error"]["code"] == "invalid_http"


async def host_back(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the request's host and path."""
    hosts = [value for name, value in headers_of(scope) if name == "host"]
    await send_whole(send, 200, (JSON_HEADER,), json.dumps([hosts, scope["path"]]).encode())


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        ("/a?b=http://c/d", "x", "/a"),
        ("//evil/a", "x", "//evil/a"),
        ("http://evil:81/a", "evil:81", "/a"),
        ("HTTP://[::1]/a?b", "[::1]", "/a"),
        ("http://evil/a?b=http://x/", "evil", "/a"),
        ("http://x@evil/a", "x@evil", "/a"),
    ],
)
async def test_the_host_of_a_target_that_is_a_whole_address_counts(target: str, host: str, path: str) -> None:
    """RFC 9112, 3.2.2: else a check of `Host` would be about another request."""
    async with serving(LIMITS, host_back) as port:
        _, body = await say(port, f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert json.loads(body) == [[host], path]


async def test_http_1_0_and_chunk_extensions_are_understood(port: int) -> None:
    assert await say(port, b"POST / HTTP/1.0\r\ncontent-length: 5\r\n\r\nhello") == (200, b"hello")
    chunks = b'3;a=b;c="d"\r\nhel\r\n2\r\nlo\r\n0;last\r\n\r\n'
    assert await say(port, post(*CHUNKED, body=chunks)) == (200, b"hello")


@pytest.mark.parametrize("pieces", [1, 3])
async def test_trailers_are_not_headers(pieces: int) -> None:
    whole = post(*CHUNKED, body=b"5\r\nhello\r\n0\r\nauthorization: Bearer theirs\r\nx-late: 1\r\n\r\n")
    step = -(-len(whole) // pieces)
    async with serving(LIMITS, headers_back) as port:
        status, body = await say(port, *(whole[at : at + step] for at in range(0, len(whole), step)))
    assert (status, json.loads(body)) == (200, ["host", "transfer-encoding", "connection"])


@pytest.mark.parametrize(
    ("begun", "more"),
    [(b"5;", b"x" * 1000), (b"5\r\nhello\r\n0\r\n", b"t: " + b"x" * 1000 + b"\r\n")],
    ids=["extension", "trailers"],
)
async def test_framing_is_limited_in_size(port: int, begun: bytes, more: bytes) -> None:
    status, body = await say(port, post(*CHUNKED, body=begun), more, more, more)
    assert status == 400
    assert json.loads(body)["error"]["code"] == "framing_too_large"


async def test_a_long_body_in_small_chunks_is_no_framing() -> None:
    async with serving(LIMITS, headers_back) as port:
        status, _ = await say(port, post(*CHUNKED), *[b"1;abc\r\nx\r\n" * 1000] * 3, b"0\r\n\r\n")
    assert status == 200


async def test_expect_gets_100_continue(port: int) -> None:
    head = post("content-length: 5", "expect: 100-continue", "connection: close")
    status, rest = await say(port, head, b"hello")
    assert status == 100
    assert rest.startswith(b"HTTP/1.1 200 ")
    assert rest.endswith(b"hello")


async def test_of_pipelined_requests_the_first_is_answered_and_the_connection_closed(port: int) -> None:
    async with asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("content-length: 1", body=b"1") + post("content-length: 1", body=b"2"))
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b"\r\nconnection: close" in head  # RFC 9112, 9.6: what came after this request was not processed
    assert rest == b"1"


class Slow:
    """Streams three words, one each time that it is told to go on."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(scope, receive)
        await send_head(send, 200, ())
        self.begun.set()
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"whole", "more_body": False})

    async def until_gone(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams for ever, until the client leaves."""
        await whole_body(scope, receive)
        await send_head(send, 200, ())
        self.begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def flood(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends without end."""
        await whole_body(scope, receive)
        await send_head(send, 200, ())
        leaving = asyncio.create_task(self._wait(receive))
        while not self.gone.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        await leaving

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


@pytest.mark.parametrize(
    "bad", [b"nonsense\r\n\r\n", post("x-long: " + "a" * 4000), post("content-length: 5", "host: y")]
)
async def test_a_bad_request_does_not_cut_the_answer_before_it(bad: bytes) -> None:
    app = Slow()
    async with serving(LIMITS, app) as port, asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("content-length: 0"))
        await app.begun.wait()
        writer.write(bad)
        await asyncio.sleep(0.3)
        app.go_on.set()
        answer = await reader.read()
        writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"5\r\nwhole\r\n0\r\n\r\n")


async def test_a_disconnect_after_pipelined_requests_is_noticed() -> None:
    app = Slow()
    async with serving(LIMITS, app.until_gone) as port, asyncio.timeout(SOON):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("content-length: 0") * 2)
        await app.begun.wait()
        writer.transport.abort()
        await app.gone.wait()


async def test_a_client_that_reads_nothing_is_closed() -> None:
    app = Slow()
    async with serving(ConnectionLimits(2000, SOON, 0.2), app.flood) as port, asyncio.timeout(SOON):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(post("content-length: 0"))
        await app.gone.wait()
        writer.transport.abort()
