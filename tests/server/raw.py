"""Raw bytes to a real server on loopback, and what comes back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import uvicorn

from pdproxy.intake.body import check_head, read_body
from pdproxy.intake.exchange import JSON_HEADER, AsgiApp, Receive, Scope, Send, headers_of, send_whole
from pdproxy.server.protocol import ConnectionLimits, guarded
from pdproxy.server.server import bind
from tests.fakes.quick_server import QuickServer

SOON = 30.0
"""Seconds that nothing here should need; a bound on a hang, not a measure."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body it got."""
    await send_whole(send, 200, (JSON_HEADER,), await whole_body(scope, receive))


async def whole_body(scope: Scope, receive: Receive, limit: int = 1000) -> bytes:
    """The request's whole body. Raises ClientError: it is longer than the limit."""
    check_head(dict(headers_of(scope)), limit)
    return await read_body(receive, limit, lambda size: None)


@contextlib.asynccontextmanager
async def serving(limits: ConnectionLimits, app: AsgiApp = echo) -> AsyncIterator[int]:
    """A server with these limits; its port."""
    async with running(limits, app) as (_, port):
        yield port


@contextlib.asynccontextmanager
async def running(limits: ConnectionLimits, app: AsgiApp) -> AsyncIterator[tuple[QuickServer, int]]:
    """A server with these limits, and its port."""
    config = uvicorn.Config(
        app,
        http=guarded(limits),
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    bound = bind("127.0.0.1", 0, "listen.port")
    server = QuickServer(config, bound)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        await asyncio.wait_for(listening(server), SOON)
        yield server, bound.getsockname()[1]
    finally:  # a loop that has a server cannot be closed: a test that fails would hang
        server.should_exit = True
        await task


async def listening(server: QuickServer) -> None:
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


async def answers(port: int, *requests: Sequence[bytes]) -> list[bytes]:
    """The bodies of the answers to requests that come one after the other, each in pieces."""
    bodies = []
    async with asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for pieces in requests:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200 ")
            bodies.append(await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0])))
        writer.close()
    return bodies


async def trickle(port: int, begun: bytes, drop: bytes) -> bytes:
    """Send drops until the server has had enough; its answer."""
    async with asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        answer = asyncio.create_task(_until_closed(reader))
        while not answer.done():
            writer.write(drop)
            await asyncio.sleep(0.02)
        writer.transport.abort()
        return await answer


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that came; a drop that arrives after the server closed is answered with a reset."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := await reader.read(65536):
            pieces.append(piece)
    return b"".join(pieces)


def post(*headers: str, body: bytes = b"") -> bytes:
    """A request's bytes."""
    return ("\r\n".join(["POST / HTTP/1.1", "host: x", *headers]) + "\r\n\r\n").encode() + body
