"""`pipe_to`: no piece is lost or comes twice, and every end is left to iteration."""

import asyncio
import contextlib

import pytest
from opentelemetry import trace

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.port import HttpResponse, Timeouts
from pdproxy.transport.traced import TracedTransport
from tests.transport.asking import CHUNKED, PATIENT, ask, post
from tests.transport.peer import GENEROUS, Peer, Script, Visit, always, peer

WORDS = (b"one ", b"two ", b"three ", b"four ", b"five ", b"six ")
END = b"0\r\n\r\n"


def chunk(word: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(word), word)


def speaking(*parts: bytes, then: asyncio.Event | None = None) -> Script:
    """Says the parts slowly enough that each is read for itself; the last only when told."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(CHUNKED)
        for part in parts[:-1]:
            await visit.say(part)
            await asyncio.sleep(0.005)
        if then is not None:
            await then.wait()
        await visit.say(parts[-1])
        await visit.until_gone()

    return script


async def open_answer(transport: H1Transport, there: Peer, timeouts: Timeouts = PATIENT) -> tuple[HttpResponse, bytes]:
    """An answer of which the first piece was read."""
    response = await transport.send(post(there), timeouts)
    return response, await anext(aiter(response))


class Taken:
    """A sink that keeps what it gets, and wants no more after so many at once."""

    def __init__(self, most: int = 100) -> None:
        self.pieces: list[bytes] = []
        self.piped = 0
        self._most = most

    def __call__(self, piece: bytes) -> bool:
        self.piped += 1
        self.pieces.append(piece)
        return self.piped % self._most != 0

    async def rest(self, response: HttpResponse) -> None:
        """The bytes after the first piece, to the end: by itself, and by reading in between."""
        await response.pipe_to(self)
        async for piece in response:
            self.pieces.append(piece)
            await response.pipe_to(self)


@pytest.mark.parametrize("most", [1, 2, 100])
@pytest.mark.parametrize("traced", [False, True], ids=["bare", "traced"])
async def test_nothing_is_lost_between_sinks_and_reads(transport: H1Transport, most: int, traced: bool) -> None:
    async with peer(speaking(*map(chunk, WORDS), END)) as there:
        with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=False))):
            through = TracedTransport(transport, trace.NoOpTracer()) if traced else transport
            response = await through.send(post(there), PATIENT)
        first = await anext(aiter(response))
        taken = Taken(most)
        await taken.rest(response)
        await response.aclose()
        assert first + b"".join(taken.pieces) == b"".join(WORDS)
        assert taken.piped >= 2
        assert transport.connections == 1, "it was read to its end, and serves again"


class Framed(Taken):
    """A sink that takes each whole chunk as it is framed, but for every third."""

    def __init__(self, most: int = 100) -> None:
        super().__init__(most)
        self.shown: list[bytes] = []

    def take_chunk(self, read: bytes) -> bool | None:
        self.shown.append(read)
        word = read[3:-2]
        return self(word) if word and len(self.shown) % 3 and read == chunk(word) else None

    async def rest(self, response: HttpResponse) -> None:
        await response.pipe_to(self, self.take_chunk)
        async for piece in response:
            self.pieces.append(piece)
            await response.pipe_to(self, self.take_chunk)


@pytest.mark.parametrize("most", [1, 2, 100])
@pytest.mark.parametrize("traced", [False, True], ids=["bare", "traced"])
async def test_chunks_that_are_taken_as_they_are_framed_keep_their_order(
    transport: H1Transport, most: int, traced: bool
) -> None:
    whole = [*map(chunk, WORDS * 3)]
    parts = [*whole[:4], whole[4] + whole[5], *whole[6:9], whole[9][:4], whole[9][4:], *whole[10:], END]
    async with peer(speaking(*parts)) as there:
        with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=False))):
            through = TracedTransport(transport, trace.NoOpTracer()) if traced else transport
            response = await through.send(post(there), PATIENT)
        first = await anext(aiter(response))
        taken = Framed(most)
        await taken.rest(response)
        await response.aclose()
        assert first + b"".join(taken.pieces) == b"".join(WORDS * 3)
        assert any(each in taken.shown for each in whole)
        assert whole[9][4:] not in taken.shown, "it begins within a chunk"
        assert transport.connections == 1, "it was read to its end, and serves again"


async def test_the_last_piece_is_left_to_be_read_if_the_end_comes_with_it(transport: H1Transport) -> None:
    go_on = asyncio.Event()
    async with peer(speaking(chunk(b"one"), chunk(b"two") + END, then=go_on)) as there:
        response, _ = await open_answer(transport, there)
        taken = Taken()
        asyncio.get_running_loop().call_later(0.01, go_on.set)
        await response.pipe_to(taken)
        assert taken.pieces == []
        assert await anext(aiter(response)) == b"two"
        await response.pipe_to(lambda piece: pytest.fail("the answer is over"))
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(response))
        await response.aclose()


@pytest.mark.parametrize("bad", [b"", b"no chunk\r\n"], ids=["cut", "garbage"])
async def test_a_fault_is_left_to_be_read(transport: H1Transport, bad: bytes) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(CHUNKED, chunk(b"one"))
        await asyncio.sleep(0.01)
        await visit.say(chunk(b"two"))
        await asyncio.sleep(0.01)
        if bad:
            await visit.say(bad)
        visit.writer.close()

    async with peer(script) as there:
        response, _ = await open_answer(transport, there)
        taken = Taken()
        with pytest.raises(NodeFault) as caught:
            await taken.rest(response)
        await response.aclose()
    assert caught.value.fault is Fault.RESET
    assert b"".join(taken.pieces) == b"two"


@pytest.mark.parametrize(
    ("timeouts", "lively", "words"),
    [
        (Timeouts(GENEROUS, GENEROUS, stall=0.1), False, "nothing came for 0.1 s"),
        (Timeouts(GENEROUS, GENEROUS, stall=GENEROUS, whole=0.2), True, "did not end in time"),
        (Timeouts(GENEROUS, GENEROUS, stall=GENEROUS, whole=0.2), False, "did not end in time"),
    ],
    ids=["stalled", "lively", "overdue"],
)
async def test_a_sink_does_not_extend_the_stall_timeout(
    transport: H1Transport, timeouts: Timeouts, lively: bool, words: str
) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(CHUNKED, chunk(b"one"))
        with contextlib.suppress(ConnectionError):
            while lively:
                await visit.say(chunk(b"more"))
                await asyncio.sleep(0.005)
        await visit.until_gone()

    async with peer(script) as there, asyncio.timeout(GENEROUS):
        response, _ = await open_answer(transport, there, timeouts)
        with pytest.raises(NodeFault, match=words) as caught:
            await Taken().rest(response)
        await response.aclose()
    assert caught.value.fault is Fault.STALL


async def test_pieces_to_a_sink_restart_the_stall_timeout(transport: H1Transport) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(CHUNKED)
        for word in WORDS:
            await visit.say(chunk(word))
            await asyncio.sleep(0.2)
        await visit.say(END)
        await visit.until_gone()

    async with peer(script) as there:
        response, first = await open_answer(transport, there, Timeouts(GENEROUS, GENEROUS, stall=0.8))
        taken = Taken()
        await taken.rest(response)
        await response.aclose()
    assert first + b"".join(taken.pieces) == b"".join(WORDS)


async def test_a_cancelled_pipe_loses_nothing(transport: H1Transport) -> None:
    go_on = asyncio.Event()
    async with peer(speaking(chunk(b"one"), chunk(b"two") + END, then=go_on)) as there:
        response, _ = await open_answer(transport, there)
        taken = Taken()
        piping = asyncio.ensure_future(response.pipe_to(taken))
        await asyncio.sleep(0)
        piping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await piping
        go_on.set()
        assert await anext(aiter(response)) == b"two"
        assert taken.pieces == [], "nobody waits for it any more"
        await response.aclose()


async def test_closing_under_a_sink_ends_the_wait(transport: H1Transport) -> None:
    async with peer(speaking(chunk(b"one"))) as there:
        response, _ = await open_answer(transport, there)
        piping = asyncio.ensure_future(response.pipe_to(lambda piece: True))
        await asyncio.sleep(0)
        await response.aclose()
        await piping
        await response.pipe_to(lambda piece: pytest.fail("it is closed"))
        await there.all_gone()
        assert transport.connections == 0


async def test_an_exception_in_a_sink_is_raised_in_pipe_to_and_ends_the_exchange(transport: H1Transport) -> None:
    loop = asyncio.get_running_loop()
    told: list[str] = []
    loop.set_exception_handler(lambda _, context: told.append(str(context.get("message"))))

    def broken(piece: bytes) -> bool:
        raise KeyError(piece)

    async with peer(speaking(*map(chunk, WORDS), END), always(b"yes")) as there:
        response, _ = await open_answer(transport, there)
        with pytest.raises(KeyError):
            await response.pipe_to(broken)
        await response.aclose()
        assert (await ask(transport, post(there))) == (200, b"yes")
    assert len(told) == 1
    assert told[0].startswith("Fatal error")
