"""The sink for pieces of a response: in order, framed, and no faster than the client reads."""

import asyncio
import socket

import pytest

from pdproxy.intake.exchange import Receive, Scope, Send, send_head, send_whole
from pdproxy.response import EXCHANGE_EXTENSION, Exchange, Sink
from pdproxy.server.protocol import ConnectionLimits
from tests.server.raw import SOON, answers, post, say, serving, whole_body

LIMITS = ConnectionLimits(2000, SOON, SOON)
BIG = b"x" * 1024 * 1024
MOST = 200
"""Pieces of that size: far more than the buffers of two sockets hold."""


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that the server offers."""
    found: Exchange = scope["extensions"][EXCHANGE_EXTENSION]
    return found


def sink_of(scope: Scope) -> Sink:
    """The sink of a client whose HTTP has chunks."""
    sink = exchange_of(scope).sink
    assert sink is not None
    return sink


class Mixed:
    """An application that sends every other piece straight."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(scope, receive)
        await send_head(send, 200, ())
        for word in (b"one ", b"two ", b"three "):
            await send({"type": "http.response.body", "body": word, "more_body": True})
            assert sink_of(scope)(word.upper())
            framed = exchange_of(scope).chunk_sink
            assert framed is not None
            assert framed(b"1\r\n-\r\n")
        await send({"type": "http.response.body", "body": b"end"})


async def test_pieces_keep_their_order_with_send_and_sink() -> None:
    async with serving(LIMITS, Mixed()) as port:
        status, body = await say(port, post("content-length: 0", "connection: close"))
    assert status == 200
    assert body == b"".join(
        b"%x\r\n%b\r\n" % (len(word), word)
        for word in (b"one ", b"ONE ", b"-", b"two ", b"TWO ", b"-", b"three ", b"THREE ", b"-", b"end", b"")
    )


async def test_head_and_first_piece_are_one_write_as_are_last_piece_and_end() -> None:
    async with serving(LIMITS, Mixed()) as port, asyncio.timeout(SOON):
        reads: list[bytes] = []
        done = asyncio.Event()

        class Reader(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                reads.append(data)

            def connection_lost(self, exc: Exception | None) -> None:
                done.set()

        transport, _ = await asyncio.get_running_loop().create_connection(Reader, "127.0.0.1", port)
        transport.write(post("content-length: 0", "connection: close"))
        await done.wait()
    assert b"\r\n\r\n4\r\none \r\n" in reads[0]
    assert reads[-1].endswith(b"3\r\nend\r\n0\r\n\r\n")


async def test_a_client_that_does_not_keep_up_is_waited_for() -> None:
    taken: list[int] = []
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(scope, receive)
        await send_head(send, 200, ())
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        sink = sink_of(scope)
        while sink(BIG):
            taken.append(len(BIG))
        go_on.set()
        await send({"type": "http.response.body", "body": b"last", "more_body": True})
        assert sink(b"again"), "it has caught up"
        await send({"type": "http.response.body", "body": b""})

    async with serving(LIMITS, app) as port, asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(post("content-length: 0", "connection: close"))
        await go_on.wait()
        assert len(taken) < MOST
        answer = await reader.read()
        writer.close()
    assert answer.endswith(b"4\r\nlast\r\n5\r\nagain\r\n0\r\n\r\n")
    assert answer.count(b"x") >= len(BIG) * (len(taken) + 1)


async def test_after_a_disconnect_the_sink_returns_false() -> None:
    said: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(scope, receive)
        await send_head(send, 200, ())
        sink = sink_of(scope)
        assert (await receive())["type"] == "http.disconnect"
        said.set_result(sink(b"hello?"))

    async with serving(LIMITS, app) as port, asyncio.timeout(SOON):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("content-length: 0"))
        await asyncio.sleep(0.05)
        writer.transport.abort()
        assert await said is False


@pytest.mark.parametrize("known", [True, False], ids=["a body of known length", "an answer that is over"])
async def test_the_sink_refuses_bodies_of_known_length(known: bool) -> None:
    refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(scope, receive)
        sink, chunk_sink = sink_of(scope), exchange_of(scope).chunk_sink
        assert chunk_sink is not None
        if known:
            await send_head(send, 200, [("content-length", "3")])
        else:
            await send_whole(send, 200, (), b"yes")
        with pytest.raises(RuntimeError) as caught:
            sink(b"no")
        with pytest.raises(RuntimeError):
            chunk_sink(b"2\r\nno\r\n")
        refused.set_result(str(caught.value))
        if known:
            await send({"type": "http.response.body", "body": b"yes"})

    async with serving(LIMITS, app) as port:
        _, body = await say(port, post("content-length: 0", "connection: close"))
        assert body == b"yes"
        assert "length is not known" in await refused


async def test_http_1_0_has_no_sink() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(scope, receive)
        sinks = exchange_of(scope).sink, exchange_of(scope).chunk_sink
        await send_whole(send, 200, (), repr(sinks).encode())

    async with serving(LIMITS, app) as port:
        _, body = await say(port, b"POST / HTTP/1.0\r\ncontent-length: 0\r\n\r\n")
    assert body == b"(None, None)"


async def test_a_body_that_has_come_with_its_head_is_there_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = exchange_of(scope).take_body()
        await send_whole(send, 200, (), b"in pieces" if body is None else body)

    async with serving(LIMITS, app) as port:
        assert (await say(port, post("content-length: 5", "connection: close") + b"whole"))[1] == b"whole"
        assert (await say(port, post("content-length: 5", "connection: close"), b"later"))[1] == b"in pieces"
        waits = post("content-length: 5", "connection: close", "expect: 100-continue") + b"asked"
        assert (await say(port, waits))[1] == b"in pieces"


async def test_a_whole_response_is_written_at_once_in_the_servers_own_frame() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange, headers = exchange_of(scope), (("x-name", "a \xe9"), ("x-name", "b"))
        assert exchange.write_whole(200, headers, b"whole")
        with pytest.raises(RuntimeError):
            await send({"type": "http.response.start", "status": 200, "headers": []})

    async with serving(LIMITS, app) as port:
        assert await answers(port, [post("content-length: 0")], [post("content-length: 0")]) == [b"whole", b"whole"]
        fields = b"x-name: a \xe9\r\nx-name: b\r\ncontent-length: 5\r\nconnection: close\r\n\r\n"
        for method, body in ((b"POST", b"whole"), (b"HEAD", b"")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"%b / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % method)
            answer = await asyncio.wait_for(reader.read(), SOON)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(fields + body)


@pytest.mark.parametrize(
    "headers",
    [[("connection", "close")], [("transfer-encoding", "chunked")], [("a", "b\r\nc: d")], [("a", "b\x00")]],
    ids=["its connection's end", "its framing", "two fields in one", "a control character"],
)
async def test_a_response_that_frames_itself_is_left_to_uvicorn(headers: list[tuple[str, str]]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        assert not exchange.write_whole(200, tuple(headers), b"no")
        assert not exchange.write_head(200, tuple(headers))
        await send_whole(send, 200, (), b"yes")
        assert not exchange.write_whole(200, (), b"no")
        assert not exchange.write_head(200, ())

    async with serving(LIMITS, app) as port:
        assert (await say(port, post("content-length: 0", "connection: close")))[1] == b"yes"


async def test_the_head_of_a_stream_and_its_first_piece_are_one_write() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(scope, receive)
        assert exchange_of(scope).write_head(200, (("x-name", "a"),))
        assert sink_of(scope)(b"first")
        assert sink_of(scope)(b"last")
        assert exchange_of(scope).write_end()
        assert not exchange_of(scope).write_end()

    async with serving(LIMITS, app) as port, asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("content-length: 0", "connection: close"))
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    framed = b"x-name: a\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n5\r\nfirst\r\n4\r\nlast\r\n0\r\n\r\n"
    assert answer.endswith(framed)


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("POST", 204), ("POST", 304)])
async def test_a_response_without_a_body_is_not_begun_as_one_in_chunks(method: str, status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert not exchange_of(scope).write_head(status, ())
        await send_head(send, status, ())
        await send({"type": "http.response.body", "body": b""})

    async with serving(LIMITS, app) as port:
        asked = f"{method} / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        assert (await say(port, asked.encode()))[0] == status


async def test_http_1_0_gets_a_whole_response_by_uvicorn() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert not exchange_of(scope).write_whole(200, (), b"no")
        await send_whole(send, 200, (), b"yes")

    async with serving(LIMITS, app) as port:
        assert (await say(port, b"POST / HTTP/1.0\r\ncontent-length: 0\r\n\r\n"))[1] == b"yes"


async def test_a_body_that_comes_in_pieces_wakes_whoever_waits_for_it() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert exchange_of(scope).take_body() is None
        await send_whole(send, 200, (), await whole_body(scope, receive))

    async with serving(LIMITS, app) as port:
        assert (await say(port, post("content-length: 6", "connection: close"), b"one", b"two"))[1] == b"onetwo"


@pytest.mark.parametrize("late", [False, True], ids=["while it is watched", "before"])
async def test_a_client_that_leaves_is_told_of_once(late: bool) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        exchange.take_body()
        if late:
            assert (await receive())["type"] == "http.disconnect"
        exchange.tell_when_left(lambda: told.put_nowait("left"))
        await asyncio.sleep(0.2)

    async with serving(LIMITS, app) as port, asyncio.timeout(SOON):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("content-length: 0"))
        await asyncio.sleep(0.05)
        writer.transport.abort()
        assert await told.get() == "left"
        await asyncio.sleep(0.05)
        assert told.empty()


@pytest.mark.parametrize("ends", [True, False], ids=["it has its response", "nobody watches any more"])
async def test_a_client_that_leaves_after_that_is_not_told_of(ends: bool) -> None:
    told: list[str] = []
    over = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        exchange.tell_when_left(lambda: told.append("left"))
        if ends:
            await send_whole(send, 200, (), b"yes")
        else:
            exchange.tell_when_left(None)
        over.set()
        await asyncio.sleep(0.1)

    async with serving(LIMITS, app) as port, asyncio.timeout(SOON):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("content-length: 0"))
        await over.wait()
        writer.transport.abort()
        await asyncio.sleep(0.15)
    assert not told


async def test_the_first_piece_of_a_stream_waits_for_no_turn_of_the_loop() -> None:
    got = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(scope, receive)
        assert exchange_of(scope).write_head(200, ())
        sink_of(scope)(b"one")
        try:
            got.set_result(client.recv(1000))  # blocks the loop: nothing can be written meanwhile
        except TimeoutError:
            got.set_result(b"")
        await send({"type": "http.response.body", "body": b""})

    async with serving(LIMITS, app) as port, asyncio.timeout(SOON):
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as client:
            client.sendall(post("content-length: 0"))
            head, _, body = (await got).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b"3\r\none\r\n"
