"""How connections end: no response is lost, and no connection stays for ever."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from pdproxy.intake.exchange import JSON_HEADER, Receive, Scope, Send, send_head, send_whole
from pdproxy.server.protocol import ConnectionLimits
from tests.server.raw import SOON, answers, echo, post, running, serving, trickle, whole_body

HASTY = ConnectionLimits(2000, 0.3, SOON)
LONG = 64 * 1024 * 1024


@pytest.fixture
async def impatient() -> AsyncIterator[int]:
    async with serving(HASTY, unread) as number:
        yield number


async def unread(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before it has read the body."""
    await send_whole(send, 200, (JSON_HEADER,), b"no")


async def too_much(scope: Scope, receive: Receive, send: Send) -> None:
    """Will not read what comes."""
    await send_whole(send, 413, (("connection", "close"),), b"too much")


async def streams(scope: Scope, receive: Receive, send: Send) -> None:
    """Two pieces of a length that nobody knows."""
    await whole_body(scope, receive)
    await send_head(send, 200, ())
    for piece in (b"one ", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def at_length(scope: Scope, receive: Receive, send: Send) -> None:
    """More than fits into the buffers on the way."""
    await whole_body(scope, receive)
    await send_whole(send, 200, (), b"x" * LONG)


async def test_http_1_0_gets_no_chunks_and_the_end_of_the_connection() -> None:
    async with serving(ConnectionLimits(2000, SOON, SOON), streams) as port, asyncio.timeout(SOON):
        for more in (b"", b"connection: keep-alive\r\n", b"expect: 100-continue\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.0\r\ncontent-length: 0\r\n" + more + b"\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert body == b"one two"


async def test_http_1_0_gets_a_length_where_there_is_one() -> None:
    async with serving(ConnectionLimits(2000, SOON, SOON)) as port, asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.0\r\ncontent-length: 5\r\n\r\nhello")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b"content-length: 5" in head
    assert body == b"hello"


async def test_the_rest_of_a_body_is_read_after_an_early_response() -> None:
    async with serving(ConnectionLimits(2000, SOON, SOON), unread) as port:
        late = (post("content-length: 1000"), b"x" * 500, b"x" * 500)
        assert await answers(port, late, late, (post(),)) == [b"no"] * 3


async def test_the_rest_of_a_body_after_an_early_response_is_limited_in_time(impatient: int) -> None:
    said = await trickle(impatient, post("content-length: 1000000"), b"x")
    assert said.endswith(b"no")


@pytest.mark.parametrize("begun", [b"\r\n", post()], ids=["at-first", "later"])
async def test_line_breaks_do_not_begin_a_request(impatient: int, begun: bytes) -> None:
    said = await trickle(impatient, begun, b"\r\n")
    assert said.count(b"HTTP/1.1 ") == begun.count(b"HTTP/1.1")


async def test_a_client_that_still_sends_gets_its_response() -> None:
    async with serving(ConnectionLimits(2000, SOON, SOON), too_much) as port, asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(f"content-length: {LONG}"))
        await asyncio.sleep(0.3)
        writer.write(b"x" * LONG)
        await writer.drain()
        answer = await reader.read()
        writer.close()
    assert answer.endswith(b"too much")


@pytest.mark.parametrize("more", ["content-length: 0", "connection: close"])
async def test_a_client_that_reads_nothing_of_a_complete_response_is_closed(more: str) -> None:
    async with running(ConnectionLimits(2000, SOON, 0.2), at_length) as (server, port), asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(post(more))
        while not server.server_state.total_requests or server.server_state.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        size = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := await reader.read(LONG):
                size += len(piece)
        writer.close()
    assert size < LONG


async def test_a_slow_reader_gets_the_whole_response() -> None:
    async with serving(ConnectionLimits(2000, SOON, 3.0), at_length) as port, asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4_000_000)
        writer.write(post("connection: close"))
        size = 0
        while piece := await reader.read(4_000_000):
            size += len(piece)
            await asyncio.sleep(0.25)
        writer.close()
    assert size > LONG


async def last_words(scope: Scope, receive: Receive, send: Send) -> None:
    """Streams for ever; when it is cancelled at the end of the grace, its end takes a moment."""
    await whole_body(scope, receive)
    await send_head(send, 200, ())
    await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0.3)
        await send({"type": "http.response.body", "body": b"ended"})


async def asks_until_told(port: int, lost: list[BaseException]) -> None:
    """A client that sends request after request on one connection, until a response says that it ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b""
    try:
        while b"connection: close" not in head:
            writer.write(post("content-length: 2") + b"hi")
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            await asyncio.sleep(0.002)
        assert await reader.read() == b""
    except (OSError, asyncio.IncompleteReadError) as error:
        lost.append(error)
    writer.close()


async def test_no_request_is_lost_when_the_server_begins_to_end() -> None:
    lost: list[BaseException] = []
    async with asyncio.timeout(SOON), running(ConnectionLimits(2000, SOON, SOON), echo) as (server, port):
        clients = [asyncio.create_task(asks_until_told(port, lost)) for _ in range(8)]
        await asyncio.sleep(0.05)
        server.should_exit = True
        await asyncio.gather(*clients)
    assert lost == []


async def test_after_a_stream_that_could_not_tell_one_more_request_is_served() -> None:
    """Its head was out before the server began to end."""
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(scope, receive)
        await send_head(send, 200, ())
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"ended"})

    async with asyncio.timeout(SOON), running(ConnectionLimits(2000, SOON, SOON), slow) as (server, port):
        server.config.timeout_graceful_shutdown = None
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("content-length: 0"))
        assert b"connection: close" not in await reader.readuntil(b"begun ")
        server.should_exit = True
        await until_closed(port)
        go_on.set()
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(post("content-length: 0"))
        assert b"connection: close" in await reader.readuntil(b"begun ")
        assert await reader.read() == b"\r\n5\r\nended\r\n0\r\n\r\n"
        writer.close()


async def until_closed(port: int) -> None:
    """Return once the port takes no connection: the server has begun to end."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionResetError:  # it was in the kernel's queue when the port closed
            continue
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)
            return
        writer.close()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("sent", [b"", post("content-length: 2") + b"hi"], ids=["new", "idle"])
async def test_a_connection_without_request_ends_with_the_server(sent: bytes) -> None:
    async with asyncio.timeout(SOON):
        async with running(ConnectionLimits(2000, SOON, SOON), echo) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            if sent:
                await reader.readuntil(b"hi")
            while not server.server_state.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await reader.read() == b""
        writer.close()


async def test_a_server_ends_after_what_outlived_its_grace_has_said_so() -> None:
    async with asyncio.timeout(SOON):
        async with running(ConnectionLimits(2000, SOON, SOON), last_words) as (server, port):
            server.config.timeout_graceful_shutdown = 0
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post("content-length: 0"))
            await reader.readuntil(b"begun ")
        assert not server.server_state.connections
        assert (await reader.read()).endswith(b"ended\r\n0\r\n\r\n")
        writer.close()


async def test_a_connection_that_comes_while_the_server_ends_is_closed() -> None:
    async with running(ConnectionLimits(2000, SOON, SOON), echo) as (server, port), asyncio.timeout(SOON):
        server.should_exit = True
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("content-length: 0"))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_a_connection_is_closed_once_it_has_been_idle_for_too_long() -> None:
    """A response that takes longer is not cut, and its end is when the time begins anew."""
    delays = [0.0, 1.5]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(scope, receive)
        await asyncio.sleep(delays.pop(0))
        await send_whole(send, 200, (), b"yes")

    limits, loop = ConnectionLimits(2000, SOON, SOON), asyncio.get_running_loop()
    async with running(limits, answer) as (server, port), asyncio.timeout(SOON):
        server.config.timeout_keep_alive = 1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(post("content-length: 0"))
            assert (await reader.readuntil(b"yes")).startswith(b"HTTP/1.1 200 ")
        ended = loop.time()
        assert await reader.read() == b""
        assert loop.time() - ended > 0.9
        writer.close()
