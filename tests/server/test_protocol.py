"""Connections that misbehave, against a real server on loopback."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
import uvicorn

from pdproxy.intake.asgi import JSON, Receive, Scope, Send, headers_of, read_body, send_whole
from pdproxy.server.ports import Port, bind
from pdproxy.server.protocol import HeadLimits, guarded

SOON = 30.0
"""Seconds that nothing here should need; a bound on a hang, not a measure."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body it got."""
    await send_whole(send, 200, (JSON,), await read_body(receive, headers_of(scope), 1000))


@contextlib.asynccontextmanager
async def serving(limits: HeadLimits) -> AsyncIterator[int]:
    """A server with these limits; its port."""
    config = uvicorn.Config(echo, http=guarded(limits), lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    bound = bind("127.0.0.1", 0, "listen.port")
    server = Port(config, bound)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    await asyncio.wait_for(listening(server), SOON)
    yield bound.getsockname()[1]
    server.should_exit = True
    await task


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A patient server."""
    async with serving(HeadLimits(2000, SOON)) as number:
        yield number


@pytest.fixture
async def hasty() -> AsyncIterator[int]:
    """A server that waits for heads hardly at all."""
    async with serving(HeadLimits(2000, 0.3)) as number:
        yield number


async def listening(server: Port) -> None:
    """Return once the server accepts connections; uvicorn has no event for it."""
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def say(port: int, *pieces: bytes) -> tuple[int, bytes]:
    """Send the pieces; the first response's status and everything after the head, once the server closed."""
    async with asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1] if head else 0), body


def post(*headers: str, body: bytes = b"") -> bytes:
    """A request's bytes."""
    return ("\r\n".join(["POST / HTTP/1.1", "host: x", *headers]) + "\r\n\r\n").encode() + body


async def test_a_good_request_in_many_pieces(port: int) -> None:
    whole = post("content-length: 5", "connection: close", body=b"hello")
    assert await say(port, whole[:9], whole[9:40], whole[40:-2], whole[-2:]) == (200, b"hello")


@pytest.mark.parametrize(
    "wrong",
    [
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
    ids=range(11),
)
async def test_ambiguous_framing_is_refused_in_openai_shape(port: int, wrong: bytes) -> None:
    status, body = await say(port, wrong)
    assert status == 400
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("pieces", [1, 2, 40])
async def test_a_head_has_a_size(port: int, pieces: int) -> None:
    long = post("x-long: " + "a" * 4000)
    step = -(-len(long) // pieces)
    status, body = await say(port, *(long[at : at + step] for at in range(0, 2100, step)))
    assert status == 431
    assert "2000 bytes" in json.loads(body)["error"]["message"]


async def test_a_head_has_an_end(hasty: int) -> None:
    status, body = await say(hasty, b"POST / HTTP/1.1\r\nhost: x\r\n")
    assert status == 408
    assert json.loads(body)["error"]["code"] == "headers_timeout"


async def test_a_silent_connection_is_closed(hasty: int) -> None:
    assert await say(hasty) == (0, b"")


async def test_a_second_head_on_a_kept_connection_has_an_end_too(hasty: int) -> None:
    first = post("content-length: 2", body=b"ok")
    status, rest = await say(hasty, first, b"POST / HTTP/1.1\r\nhost:")
    assert status == 200
    assert rest.startswith(b"ok")
    assert b"headers_timeout" in rest
