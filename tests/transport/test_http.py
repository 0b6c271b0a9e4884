"""The transport against scripted peers on loopback: what comes back, what is kept, what is left behind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from opentelemetry import trace

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.http import STALE, HttpTransport
from pdproxy.transport.pool import KEEP
from pdproxy.transport.port import Incoming, Outgoing, Patience
from pdproxy.transport.traced import TracedTransport
from tests.transport.peer import (
    GENEROUS,
    Peer,
    Visit,
    always,
    answer,
    hanging_up_after,
    peer,
    saying,
)

PATIENT = Patience(connect=GENEROUS, headers=GENEROUS, stall=GENEROUS)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class HandClock:
    """Moves when told."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def transport(clock: HandClock) -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(clock)
    yield transport
    await transport.aclose()
    assert transport.connections == 0


def post(there: Peer, body: bytes = b"{}") -> Outgoing:
    return Outgoing("POST", there.url + "/v1/completions", (("content-type", "application/json"),), body)


async def ask(transport: HttpTransport, request: Outgoing, patience: Patience = PATIENT) -> tuple[int, bytes]:
    """One exchange, read to its end."""
    incoming = await transport.send(request, patience)
    try:
        return incoming.status, await incoming.read(2**30)
    finally:
        await incoming.aclose()


async def collect(incoming: Incoming, heard: list[bytes]) -> None:
    """Keeps what came before the fault."""
    async for piece in incoming.chunks():
        heard += [piece]


async def fault_of(transport: HttpTransport, request: Outgoing, patience: Patience = PATIENT) -> Fault:
    with pytest.raises(NodeFault) as caught:
        await ask(transport, request, patience)
    return caught.value.fault


async def test_sends_what_it_was_given(transport: HttpTransport) -> None:
    async with peer(always(b"yes")) as there:
        assert await ask(transport, post(there, b'{"a": 1}')) == (200, b"yes")
    lines = there.visits[0].heads[0].decode().split("\r\n")
    assert lines[0] == "POST /v1/completions HTTP/1.1"
    assert set(lines[1:-2]) == {
        f"host: 127.0.0.1:{there.port}",
        "accept-encoding: identity",
        "content-type: application/json",
        "content-length: 8",
    }
    assert there.visits[0].bodies == [b'{"a": 1}']


async def test_headers_come_in_lower_case_and_in_order(transport: HttpTransport) -> None:
    async with peer(always(b"", b"X-One:  1 ", b"Set-Thing: a", b"X-ONE: \xe9", status=b"429 Too Many")) as there:
        incoming = await transport.send(post(there), PATIENT)
        await incoming.aclose()
    assert incoming.status == 429
    assert incoming.headers == (("x-one", "1"), ("set-thing", "a"), ("x-one", "é"), ("content-length", "0"))


async def test_one_connection_serves_many_requests(transport: HttpTransport) -> None:
    async with peer(always(b"yes")) as there:
        for _ in range(20):
            assert await ask(transport, post(there)) == (200, b"yes")
        assert len(there.visits) == 1
        assert len(there.visits[0].heads) == 20


async def test_concurrent_requests_get_connections_of_their_own(transport: HttpTransport) -> None:
    async with peer(always(b"yes")) as there:
        answers = await asyncio.gather(*(ask(transport, post(there)) for _ in range(8)))
        assert answers == [(200, b"yes")] * 8
        assert len(there.visits) == 8
        assert transport.connections == 8


async def test_chunks_arrive_as_they_are_sent(transport: HttpTransport) -> None:
    heard = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(CHUNKED, b"5\r\nfirst\r\n")
        await heard.wait()
        await visit.say(b"6;note=x\r\nsecond\r\n0\r\nTrailer: dropped\r\n\r\n")
        await always(b"again")(visit)

    async with peer(script) as there:
        incoming = await transport.send(post(there), PATIENT)
        pieces = incoming.chunks()
        assert await anext(pieces) == b"first"
        heard.set()
        assert await anext(pieces) == b"second"
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)
        await incoming.aclose()
        assert await ask(transport, post(there)) == (200, b"again")
        assert len(there.visits) == 1
    assert incoming.headers == (("transfer-encoding", "chunked"),)


async def test_an_answer_cut_into_single_bytes_is_the_same_answer(transport: HttpTransport) -> None:
    whole = CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with peer(saying(*(whole[i : i + 1] for i in range(len(whole))))) as there:
        assert await ask(transport, post(there)) == (200, b"abcde")


async def test_an_answer_without_length_ends_with_the_connection(transport: HttpTransport) -> None:
    async with peer(hanging_up_after(b"HTTP/1.1 200 OK\r\n\r\n", b"until the end")) as there:
        assert await ask(transport, post(there)) == (200, b"until the end")
        await there.all_gone()


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_no_content_has_no_body(transport: HttpTransport, method: str) -> None:
    async with peer(always(b"", status=b"204 No Content")) as there:
        for _ in range(2):
            assert await ask(transport, Outgoing(method, there.url)) == (204, b"")
        assert len(there.visits) == 1


async def test_an_answer_to_head_has_no_body_whatever_its_length_says(transport: HttpTransport) -> None:
    async with peer(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")) as there:
        assert await ask(transport, Outgoing("HEAD", there.url + "/x?y=1")) == (200, b"")
        await there.all_gone()
    assert there.visits[0].heads[0].startswith(b"HEAD /x?y=1 HTTP/1.1\r\n")
    assert b"content-length" not in there.visits[0].heads[0]


async def test_interim_answers_are_passed_over(transport: HttpTransport) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    async with peer(saying(interim, answer(b"final"))) as there:
        incoming = await transport.send(post(there), PATIENT)
        assert incoming.status == 200
        assert incoming.headers == (("content-length", "5"),)
        assert await incoming.read(5) == b"final"
        await incoming.aclose()


async def test_a_connection_that_the_peer_wants_closed_is_not_used_again(transport: HttpTransport) -> None:
    async with peer(always(b"yes", b"Connection: close")) as there:
        await ask(transport, post(there))
        await there.all_gone()
        await ask(transport, post(there))
        assert len(there.visits) == 2


async def test_a_connection_that_said_more_than_asked_is_not_used_again(transport: HttpTransport) -> None:
    async with peer(saying(answer(b"yes") + answer(b"nobody asked")), always(b"right")) as there:
        assert await ask(transport, post(there)) == (200, b"yes")
        assert await ask(transport, post(there)) == (200, b"right")


async def test_a_connection_closed_while_idle_is_not_a_fault(transport: HttpTransport) -> None:
    async with peer(hanging_up_after(answer(b"first")), always(b"second")) as there:
        assert await ask(transport, post(there)) == (200, b"first")
        await there.all_gone()
        assert await ask(transport, post(there)) == (200, b"second")


async def after_one(visit: Visit) -> None:
    """Answer once; hang up on the next request, as a keep-alive timer does that goes off as it arrives."""
    await visit.request()
    await visit.say(answer(b"first"))
    await visit.request()


async def test_a_request_that_met_a_closing_connection_goes_out_again(
    transport: HttpTransport, clock: HandClock
) -> None:
    async with peer(after_one, always(b"second")) as there:
        await ask(transport, post(there))
        await clock.sleep(STALE)
        assert await ask(transport, post(there, b"once more")) == (200, b"second")
        assert there.visits[1].bodies == [b"once more"]


async def test_a_request_lost_on_a_busy_connection_is_a_reset(transport: HttpTransport) -> None:
    async with peer(after_one, always(b"second")) as there:
        await ask(transport, post(there))
        assert await fault_of(transport, post(there)) is Fault.RESET
        assert len(there.visits) == 1


async def test_a_request_of_which_an_answer_began_never_goes_out_again(
    transport: HttpTransport, clock: HandClock
) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer(b"first"))
        await visit.request()
        await visit.say(b"HTTP/1.1 2")

    async with peer(script, always(b"second")) as there:
        await ask(transport, post(there))
        await clock.sleep(STALE)
        assert await fault_of(transport, post(there)) is Fault.RESET
        assert len(there.visits) == 1


async def test_a_connection_that_idled_too_long_is_dropped(transport: HttpTransport, clock: HandClock) -> None:
    async with peer(always(b"yes")) as there:
        await ask(transport, post(there))
        await clock.sleep(KEEP)
        await ask(transport, post(there))
        assert len(there.visits) == 2
        assert transport.connections == 1


async def test_nobody_listening_is_refused(transport: HttpTransport) -> None:
    async with peer(always(b"")) as there:
        pass
    assert await fault_of(transport, post(there)) is Fault.REFUSED


@pytest.mark.parametrize("host", ["a..b", ".", "x" * 64 + ".invalid"])
async def test_a_name_that_leads_nowhere_is_refused(transport: HttpTransport, host: str) -> None:
    assert await fault_of(transport, Outgoing("GET", f"http://{host}:1/")) is Fault.REFUSED


async def test_a_peer_that_hangs_up_without_a_word_is_a_reset(transport: HttpTransport) -> None:
    async with peer(hanging_up_after()) as there:
        assert await fault_of(transport, post(there)) is Fault.RESET


@pytest.mark.parametrize(
    "sent",
    [answer(b"0123456789")[:-1], CHUNKED + b"5\r\nhello\r\n", CHUNKED + b"5\r\nhel"],
    ids=["length", "end", "in"],
)
async def test_a_body_that_ends_before_its_end_is_a_reset(transport: HttpTransport, sent: bytes) -> None:
    async with peer(hanging_up_after(sent)) as there:
        incoming = await transport.send(post(there), PATIENT)
        heard: list[bytes] = []
        with pytest.raises(NodeFault) as caught:
            await collect(incoming, heard)
        await incoming.aclose()
    assert caught.value.fault is Fault.RESET
    assert b"".join(heard) in (b"012345678", b"hello", b"hel")


@pytest.mark.parametrize(
    "sent",
    [
        b"220 smtp.example ESMTP\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000,
        b"HTTP/1.1 102 Processing\r\n\r\n" * 10_000,
        CHUNKED + b"nonsense\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_not_http_is_a_reset(transport: HttpTransport, sent: bytes) -> None:
    async with peer(saying(sent)) as there:
        assert await fault_of(transport, post(there)) is Fault.RESET
        await there.all_gone()


async def test_a_peer_that_never_answers_times_out(transport: HttpTransport) -> None:
    async with peer(saying()) as there:
        patience = Patience(GENEROUS, headers=0.05, stall=GENEROUS)
        assert await fault_of(transport, post(there), patience) is Fault.HEADERS_TIMEOUT
        await there.all_gone()


async def test_a_head_that_drips_times_out(transport: HttpTransport) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            await visit.say(b"x")
            await asyncio.sleep(0.01)

    async with peer(script) as there:
        patience = Patience(GENEROUS, headers=0.2, stall=GENEROUS)
        assert await fault_of(transport, post(there), patience) is Fault.HEADERS_TIMEOUT
        await there.all_gone()


async def test_a_body_that_stops_is_a_stall(transport: HttpTransport) -> None:
    async with peer(saying(CHUNKED + b"5\r\nhello\r\n")) as there:
        incoming = await transport.send(post(there), Patience(GENEROUS, GENEROUS, stall=0.05))
        pieces = incoming.chunks()
        assert await anext(pieces) == b"hello"
        with pytest.raises(NodeFault) as caught:
            await anext(pieces)
        await incoming.aclose()
        await there.all_gone()
    assert caught.value.fault is Fault.STALL


async def test_the_first_piece_has_a_patience_of_its_own(transport: HttpTransport) -> None:
    async with peer(saying(CHUNKED)) as there:
        incoming = await transport.send(post(there), Patience(GENEROUS, GENEROUS, stall=GENEROUS, first=0.05))
        with pytest.raises(NodeFault, match=r"0\.05 s") as caught:
            await anext(incoming.chunks())
        await incoming.aclose()
        await there.all_gone()
    assert caught.value.fault is Fault.STALL


async def test_a_slow_reader_is_not_a_stall(transport: HttpTransport) -> None:
    async with peer(saying(CHUNKED + b"5\r\nhello\r\n0\r\n\r\n")) as there:  # all in one packet
        incoming = await transport.send(post(there), Patience(GENEROUS, GENEROUS, stall=0.01))
        await asyncio.sleep(0.1)
        assert await incoming.read(5) == b"hello"
        await incoming.aclose()


async def test_a_cancelled_send_leaves_nothing(transport: HttpTransport) -> None:
    asked = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        asked.set()
        await visit.until_gone()

    async with peer(script) as there:
        task = asyncio.create_task(transport.send(post(there), PATIENT))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await there.all_gone()
        assert transport.connections == 0


async def test_a_send_cancelled_at_any_turn_of_the_loop_leaves_nothing(transport: HttpTransport) -> None:
    async with peer(always(b"yes", b"Connection: close")) as there:
        for turns in range(12):
            task = asyncio.create_task(ask(transport, post(there)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await there.all_gone()
    await transport.aclose()
    assert transport.connections == 0


@pytest.mark.parametrize("traced", [False, True], ids=["bare", "traced"])
async def test_a_cancelled_read_loses_nothing(transport: HttpTransport, traced: bool) -> None:
    go_on = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(CHUNKED)
        await go_on.wait()
        await visit.say(b"5\r\nhello\r\n0\r\n\r\n")
        await visit.until_gone()

    async with peer(script) as there:
        with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=False))):
            through = TracedTransport(transport, trace.NoOpTracer()) if traced else transport
            incoming = await through.send(post(there), PATIENT)
        pieces = incoming.chunks()
        reading = asyncio.ensure_future(anext(pieces, b"over"))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        go_on.set()
        assert await anext(pieces, b"over") == b"hello"
        assert await anext(pieces, b"over") == b"over"
        await incoming.aclose()


async def test_closing_before_the_end_cuts_the_connection(transport: HttpTransport) -> None:
    async with peer(saying(CHUNKED, b"5\r\nhello\r\n")) as there:
        incoming = await transport.send(post(there), PATIENT)
        assert await anext(incoming.chunks()) == b"hello"
        await incoming.aclose()
        await incoming.aclose()
        await there.all_gone()
        with pytest.raises(StopAsyncIteration):
            await anext(incoming.chunks())


async def test_closing_under_a_reader_wakes_it(transport: HttpTransport) -> None:
    async with peer(saying(CHUNKED)) as there:
        incoming = await transport.send(post(there), PATIENT)
        reading = asyncio.create_task(incoming.read(10))
        await asyncio.sleep(0)
        await incoming.aclose()
        with pytest.raises(NodeFault) as caught:
            await reading
    assert caught.value.fault is Fault.RESET


async def test_a_closed_incoming_does_not_touch_who_has_its_connection_now(transport: HttpTransport) -> None:
    async with peer(always(b"yes")) as there:
        first = await transport.send(post(there), PATIENT)
        await first.read(3)
        await first.aclose()
        second = await transport.send(post(there), PATIENT)
        await first.aclose()
        assert await first.read(3) == b""
        assert await second.read(3) == b"yes"
        await second.aclose()
        assert len(there.visits) == 1


async def test_a_body_longer_than_allowed_is_invalid(transport: HttpTransport) -> None:
    async with peer(saying(answer(b"x" * 11))) as there:
        incoming = await transport.send(post(there), PATIENT)
        with pytest.raises(NodeFault) as caught:
            await incoming.read(10)
        await incoming.aclose()
    assert caught.value.fault is Fault.INVALID_BODY


async def test_a_big_body_goes_out_whole(transport: HttpTransport) -> None:
    big = bytes(range(256)) * 65536
    async with peer(always(b"got it")) as there:
        assert await ask(transport, post(there, big)) == (200, b"got it")
        assert there.visits[0].bodies == [big]
        assert await ask(transport, post(there)) == (200, b"got it")
        assert len(there.visits) == 1


async def test_a_slow_reader_makes_the_peer_wait(transport: HttpTransport) -> None:
    total = 64 * 2**20
    block = b"x" * 2**16
    sent = 0

    async def script(visit: Visit) -> None:
        nonlocal sent
        await visit.request()
        await visit.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            visit.writer.write(block)
            sent += len(block)
            await visit.writer.drain()
        await visit.until_gone()

    async with peer(script) as there:
        incoming = await transport.send(post(there), PATIENT)
        before = -1
        while before < sent:  # until the peer is stuck
            before = sent
            await asyncio.sleep(0.2)
        assert sent < total // 2
        size = 0
        async for piece in incoming.chunks():
            size += len(piece)
        await incoming.aclose()
        assert size == total
        assert transport.connections == 1


async def test_an_early_answer_to_a_body_that_is_not_read(transport: HttpTransport) -> None:
    async def script(visit: Visit) -> None:
        await visit.reader.readuntil(b"\r\n\r\n")
        await visit.say(answer(b"too large", status=b"413 Too Large"))
        await visit.until_gone()

    async with peer(script) as there:
        incoming = await transport.send(post(there, b"x" * 2**26), PATIENT)
        assert incoming.status == 413
        assert await incoming.read(100) == b"too large"
        await incoming.aclose()
        await there.all_gone()
        assert transport.connections == 0


async def test_closing_the_transport_ends_what_is_under_way(transport: HttpTransport) -> None:
    async with peer(saying(CHUNKED)) as there:
        incoming = await transport.send(post(there), PATIENT)
        await transport.aclose()
        with pytest.raises(NodeFault):
            await incoming.read(1)
        await incoming.aclose()
        await there.all_gone()


@pytest.mark.parametrize(
    "request_",
    [
        Outgoing("GET", "http://127.0.0.1:1/", (("x", "a\r\nevil: 1"),)),
        Outgoing("GET", "http://127.0.0.1:1/", (("x", "a\nb"),)),
        Outgoing("GET /evil HTTP/1.1\r\nx:", "http://127.0.0.1:1/"),
        Outgoing("GET", "http://127.0.0.1:1/a b"),
        Outgoing("GET", "ftp://127.0.0.1/"),
        Outgoing("GET", "/only/a/path"),
        Outgoing("GET", "http://user@host/"),
        Outgoing("GET", "http://127.0.0.1:99999/"),
    ],
)
async def test_what_cannot_be_written_as_http_is_not_sent(transport: HttpTransport, request_: Outgoing) -> None:
    with pytest.raises(ValueError, match=r"."):
        await transport.send(request_, PATIENT)
    assert transport.connections == 0
