"""A request under which a kept-alive connection breaks is sent once more, on a fresh one."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.port import HttpRequest, Timeouts
from tests.transport.asking import CHUNKED, PATIENT, HandClock, ask, fault_of, post
from tests.transport.peer import GENEROUS, Peer, Script, Visit, always, answer, peer
from tests.transport.test_tls import HERE, serving

LARGE = b"x" * (8 * 1024 * 1024)
"""More than the sockets' buffers take: it is still being written when the connection breaks."""
Break = Callable[[Visit], Awaitable[None]]


async def reset_before_reading(visit: Visit) -> None:
    """The keep-alive timer went off as the request arrived: it is not read, and the kernel answers with a reset."""
    await asyncio.sleep(0.05)


async def reset_in_the_head(visit: Visit) -> None:
    await visit.reader.readexactly(10)
    reset(visit)


async def reset_in_the_body(visit: Visit) -> None:
    await visit.reader.readuntil(b"\r\n\r\n")
    await visit.reader.read(1)
    reset(visit)


async def reset_after_reading(visit: Visit) -> None:
    await visit.request()
    reset(visit)


async def closed_in_the_body(visit: Visit) -> None:
    await visit.reader.readuntil(b"\r\n\r\n")
    await visit.reader.read(1)


async def closed_after_reading(visit: Visit) -> None:
    await visit.request()


async def half_closed(visit: Visit) -> None:
    """Nothing more is said, though all is read to its end; over TLS this is a close_notify."""
    if visit.writer.can_write_eof():
        visit.writer.write_eof()
    await visit.request()


async def timed_out(visit: Visit) -> None:
    """HAProxy and others say so to an idle connection, just when the request is on its way."""
    await visit.reader.read(1)
    await visit.say(answer(b"late", b"Connection: close", status=b"408 Request Timeout"))
    await visit.until_gone()


BREAKS = (
    reset_before_reading, reset_in_the_head, reset_in_the_body, reset_after_reading,
    closed_in_the_body, closed_after_reading, half_closed, timed_out,
)  # fmt: skip


def reset(visit: Visit) -> None:
    """Close with a reset, whatever was read."""
    visit.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    visit.writer.transport.abort()


def once_then(how: Break) -> Script:
    """Answer one request; break the connection under the second."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer(b"first"))
        await how(visit)

    return script


@contextlib.asynccontextmanager
async def kept(transport: H1Transport, *scripts: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    """A peer to which one connection is kept, served by the first script."""
    async with peer(*scripts, tls=tls) as there:
        assert await ask(transport, post(there)) == (200, b"first")
        yield there


async def broken_under(transport: H1Transport, method: str, body: bytes, how: Break, *, secure: bool) -> None:
    """One cell of the table."""
    async with kept(transport, once_then(how), always(b"second"), tls=serving() if secure else None) as there:
        request = HttpRequest(method, f"{there.url}/v1/chat/completions", (), body)
        expected = b"" if method == "HEAD" else b"second"
        assert await ask(transport, request) == (200, expected)
        assert len(there.visits) == 2
        assert there.visits[1].bodies == [body]


@pytest.mark.long
@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize(
    ("how", "body"),
    [
        (how, body)
        for how in BREAKS
        for body in (b"", b"{}", LARGE)
        if body or how not in (reset_in_the_body, closed_in_the_body)
    ],
    ids=lambda value: f"{len(value)}-bytes" if isinstance(value, bytes) else value.__name__,
)
async def test_whatever_breaks_under_whatever_request(method: str, body: bytes, how: Break, secure: bool) -> None:
    transport = trusting()
    await broken_under(transport, method, body, how, secure=secure)
    await transport.aclose()


async def test_a_post_that_meets_a_break_is_sent_again(transport: H1Transport) -> None:
    for how in BREAKS:
        for body in (b"{}", LARGE):
            await broken_under(transport, "POST", body, how, secure=False)


async def test_a_post_that_meets_a_break_over_tls_is_sent_again() -> None:
    transport = trusting()
    for how in BREAKS:
        for body in (b"{}", LARGE):
            await broken_under(transport, "POST", body, how, secure=True)
    await transport.aclose()


def trusting(on_resend: Callable[[], None] = lambda: None) -> H1Transport:
    """Over TLS to the test's peers."""
    return H1Transport(HandClock(), ssl.create_default_context(cafile=HERE / "certificate.pem"), on_resend)


async def test_the_second_try_takes_no_pooled_connection(transport: H1Transport) -> None:
    """All that were kept are about to be closed, most likely."""
    together = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await together.wait()
        await visit.say(answer(b"first"))
        await visit.request()

    async with peer(script, script, script, always(b"second")) as there:
        asking = [asyncio.create_task(ask(transport, post(there))) for _ in range(3)]
        while len(there.visits) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        together.set()
        await asyncio.gather(*asking)
        assert await ask(transport, post(there)) == (200, b"second")
        assert [len(visit.heads) for visit in there.visits] == [1, 1, 2, 1]


async def test_a_second_try_is_counted_and_told() -> None:
    counted, told = [0], [0]
    transport = H1Transport(HandClock(), on_resend=lambda: counted.append(1))
    async with kept(transport, once_then(closed_after_reading), always(b"second")) as there:
        plain = post(there)
        request = HttpRequest(plain.method, plain.url, plain.headers, plain.body, lambda: told.append(1))
        for _ in range(3):
            assert await ask(transport, request) == (200, b"second")
    await transport.aclose()
    assert (sum(counted), sum(told)) == (1, 1)


async def test_there_is_one_second_try(transport: H1Transport) -> None:
    async def breaks(visit: Visit) -> None:
        await visit.request()

    async with kept(transport, once_then(closed_after_reading), breaks) as there:
        assert await fault_of(transport, post(there)) is Fault.RESET
        assert len(there.visits) == 2


async def test_a_fresh_connection_that_breaks_is_a_reset(transport: H1Transport) -> None:
    async def breaks(visit: Visit) -> None:
        await visit.request()

    async with peer(breaks) as there:
        assert await fault_of(transport, post(there)) is Fault.RESET
        assert len(there.visits) == 1


async def test_a_408_on_a_fresh_connection_is_an_answer(transport: H1Transport) -> None:
    async with peer(always(b"late", status=b"408 X")) as there:
        assert await ask(transport, post(there)) == (408, b"late")
        assert len(there.visits) == 1


async def test_a_node_that_says_408_to_every_try_is_asked_twice(transport: H1Transport) -> None:
    async with kept(transport, once_then(timed_out), always(b"late", status=b"408 X")) as there:
        assert await ask(transport, post(there)) == (408, b"late")
        assert len(there.visits) == 2


async def test_a_request_whose_answer_has_begun_is_not_sent_again(transport: H1Transport) -> None:
    for begun in (b"H", b"HTTP/1.1 2", b"HTTP/1.1 100 Continue\r\n\r\n", b"nonsense"):

        async def script(visit: Visit, begun: bytes = begun) -> None:
            await visit.request()
            await visit.say(begun)

        async with kept(transport, once_then(script), always(b"second")) as there:
            assert await fault_of(transport, post(there)) is Fault.RESET
            assert len(there.visits) == 1


async def test_a_port_that_closed_with_the_connection_is_refused(transport: H1Transport) -> None:
    """The node has gone: another one may be tried, but the request may be what ended it."""
    listening: list[Peer] = []

    async def goes(visit: Visit) -> None:
        await visit.request()
        listening[0].stop_listening()

    async with kept(transport, once_then(goes)) as there:
        listening.append(there)
        with pytest.raises(NodeFault) as caught:
            await ask(transport, post(there))
        assert (caught.value.fault, caught.value.resent) == (Fault.REFUSED, True)
        with pytest.raises(NodeFault) as caught:
            await ask(transport, post(there))
        assert (caught.value.fault, caught.value.resent) == (Fault.REFUSED, False)


class _Slow:
    """Lets some seconds go by on the kept connection, then breaks it; never answers on the next."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def __call__(self, visit: Visit) -> None:
        await visit.request()
        await asyncio.sleep(self._seconds)

    @staticmethod
    async def mute(visit: Visit) -> None:
        await visit.request()
        await visit.until_gone()


@pytest.mark.parametrize(
    "timeouts",
    [Timeouts(GENEROUS, 0.6, GENEROUS), Timeouts(GENEROUS, GENEROUS, GENEROUS, whole=0.6)],
    ids=["headers", "whole"],
)
async def test_both_tries_share_a_deadline(transport: H1Transport, timeouts: Timeouts) -> None:
    loop = asyncio.get_running_loop()
    async with kept(transport, once_then(_Slow(0.4)), _Slow.mute) as there:
        began = loop.time()
        assert await fault_of(transport, post(there), timeouts) is Fault.HEADERS_TIMEOUT
        assert loop.time() - began < 2 * 0.4 + 0.15
        assert len(there.visits) == 2
        await there.all_gone()


async def test_the_whole_holds_for_the_body_of_the_second_answer(transport: H1Transport) -> None:
    async def drips(visit: Visit) -> None:
        await visit.request()
        await visit.say(CHUNKED)
        while True:
            await visit.say(b"1\r\nx\r\n")
            await asyncio.sleep(0.05)

    loop, timeouts = asyncio.get_running_loop(), Timeouts(GENEROUS, GENEROUS, GENEROUS, whole=0.6)
    async with kept(transport, once_then(_Slow(0.4)), drips) as there:
        began = loop.time()
        assert await fault_of(transport, post(there), timeouts) is Fault.STALL
        assert loop.time() - began < 2 * 0.4 + 0.15


async def test_a_caller_that_is_cancelled_sends_nothing_again(transport: H1Transport) -> None:
    """Even in the turn of the loop in which the connection breaks."""
    read = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        read.set()
        await visit.until_gone()

    async with kept(transport, once_then(script), always(b"second")) as there:
        asking = asyncio.create_task(ask(transport, post(there)))
        await read.wait()
        there.visits[0].writer.transport.abort()
        await asyncio.sleep(0)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, NodeFault):
            await asking
        assert asking.cancelled()
        await there.all_gone()
        assert len(there.visits) == 1


async def test_a_transport_that_is_closed_sends_nothing_again(transport: H1Transport) -> None:
    async def waits(visit: Visit) -> None:
        await visit.request()
        await visit.until_gone()

    async with kept(transport, once_then(waits), always(b"second")) as there:
        asking = asyncio.create_task(transport.send(post(there), PATIENT))
        while len(there.visits[0].heads) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await transport.aclose()
        with pytest.raises(NodeFault, match="closed by us"):
            await asking
        assert len(there.visits) == 1
