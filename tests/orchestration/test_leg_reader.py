"""The stream of a leg: what the client sees of it, what of it counts when it breaks, and that cuts do not matter.

The streams are recorded from vLLM (`tests/e2e/recorded_streams.py`), chunk by chunk, and fake.
"""

import functools
import gzip
import itertools
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.errors import Fault, NodeFault
from pdproxy.orchestration.leg_reader import LegReader
from pdproxy.reasons import NotContinuableReason
from pdproxy.request import Endpoint, Headers, Shape
from pdproxy.response import ChunkSink, Sink
from pdproxy.stream.journal import Journal
from pdproxy.stream.scan import PYTHON, Scan, compiled
from pdproxy.stream.sse import EVENT_BYTES, Framer
from pdproxy.stream.transcript import Transcript
from pdproxy.stream.usage_event import UsageEventFilter
from pdproxy.usage import CacheUse
from tests.fakes.journal import journaled
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.vllm_answers import ParsedRequest

_RECORDED = Path(__file__).parent / "recorded_streams.json.gz"
_RECORD = b": pdproxy "
BODY = {"model": "m", "prompt": "a b c", "messages": [], "input": "a b c", "max_tokens": 5, "stream": True}


class Written(NamedTuple):
    """A stream with a journal: each chunk holds events, their record, or both."""

    name: str
    endpoint: Endpoint
    chunks: tuple[bytes, ...]

    @property
    def blocks(self) -> list[bytes]:
        """Events and records, each for itself."""
        return [block + b"\n\n" for block in b"".join(self.chunks).split(b"\n\n") if block]

    @property
    def events(self) -> bytes:
        """All that is no record."""
        return b"".join(block for block in self.blocks if not block.startswith(_RECORD))

    @property
    def records(self) -> bytes:
        """As a journal keeps them."""
        return b",".join(block[len(_RECORD) : -2] for block in self.blocks if block.startswith(_RECORD))

    def without_journal(self) -> "Written":
        """The same as a node without our plugin writes it: each event in a chunk of its own."""
        return self._replace(chunks=tuple(block for block in self.blocks if not block.startswith(_RECORD)))


def split(piece: bytes) -> tuple[bytes, bytes]:
    """The events of a piece, and its record."""
    at = piece.rindex(_RECORD)
    return piece[:at], piece[at + len(_RECORD) :].strip()


@functools.cache
def fake_stream(endpoint: Endpoint) -> Written:
    """Always the same one."""
    question = ParsedRequest.of(endpoint, BODY, 1)
    return Written(f"fake, {endpoint}", endpoint, journaled(question, 0, [], FakeKvTransfer()))


@functools.cache
def recorded_streams() -> tuple[Written, ...]:
    """All shapes that vLLM was asked for."""
    found = json.loads(gzip.decompress(_RECORDED.read_bytes()))
    return tuple(
        Written(each["name"], Endpoint(each["path"]), tuple(chunk.encode() for chunk in each["chunks"]))
        for each in found
    )


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    """The bytes in pieces."""
    edges = [0, *sorted({place % (len(raw) + 1) for place in places}), len(raw)]
    return [raw[start:end] for start, end in itertools.pairwise(edges) if start < end]


ENDPOINTS = tuple(Endpoint)
KEEP_ALIVE = b": keep-alive\n\n"
FINISH = {"id": "c-1", "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
FINISHED = b"data: " + json.dumps(FINISH, separators=(",", ":")).encode() + b"\n\n"
_OBJECT = re.compile(rb'"object":"[^"]*","created":[0-9]*')
STREAMS = [*map(fake_stream, ENDPOINTS), *recorded_streams()]
SCANS = [scan for scan in (PYTHON, compiled()) if scan is not None]
ODD = (
    KEEP_ALIVE,
    b": pdproxy [0,[]]\n\n",
    b": pdproxy [2,[]]\n\n",
    b'data: {"error":{"message":"no"}}\n\n',
    b'event: error\ndata: {"error":{"message":"no","code":400}}\n\n',
    b"data: nonsense\n\n",
    b"data: [DONE]\n\n",
    FINISHED,
    FINISHED.replace(b'"stop"', b'"abort"'),
    FINISHED.replace(b'"stop"', b"null"),
    FINISHED.replace(b'"stop"', b'null,"kv_transfer_params":{"remote_host":"h"}'),
    FINISHED + b"data: [DONE]\n\n: pdproxy [2,[]]\n\n",
    b"data: x\r\n\r\n",
)
"""Blocks that end or change a stream, or are not as vLLM writes them."""


def chunk_of(piece: bytes) -> bytes:
    """As servers frame it."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class Pieces:
    """A response that is read to its end, or to where its connection breaks; ``piped``: what may pass by a sink is.
    Each piece comes as one chunk."""

    status = 200
    headers: Headers = ()

    def __init__(
        self, pieces: Sequence[bytes], *, breaks: bool = False, piped: bool = False, chunks_in_read: int = 1
    ) -> None:
        self._chunks_in_read = chunks_in_read
        self._pieces = list(pieces)
        self._breaks = breaks
        self._piped = piped

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._pieces:
            return self._pieces.pop(0)
        if self._breaks:
            raise NodeFault(Fault.RESET, "broken")
        raise StopAsyncIteration

    def take_whole(self) -> bytes | None:
        """Nothing: its pieces are read one by one."""
        return None

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        """See the port. The last piece is left to be read."""
        more = self._piped
        while more and len(self._pieces) > 1:
            most = min(self._chunks_in_read, len(self._pieces) - 1)
            read, self._pieces = self._pieces[:most], self._pieces[most:]
            taken = None if chunk_sink is None else chunk_sink(b"".join(map(chunk_of, read)))
            more = sink(b"".join(read)) if taken is None else taken

    async def aclose(self) -> None:
        """Nothing is held."""


class Leg:
    """One leg, and what came of it."""

    def __init__(
        self,
        endpoint: Endpoint,
        pieces: Sequence[bytes],
        *,
        breaks: bool = False,
        journal: Journal | None = None,
        usage_filter: UsageEventFilter | None = None,
        cache_use: CacheUse | None = None,
        piped: bool = False,
        scan: Scan | None = None,
        chunks_in_read: int = 1,
    ) -> None:
        self.journal = journal
        self.transcript = Transcript(endpoint, Shape(1, stream=True), cache_use)
        response = Pieces(pieces, breaks=breaks, piped=piped, chunks_in_read=chunks_in_read)
        self.reader = LegReader(response, self.transcript, 8, usage_filter, journal, scan or PYTHON)
        self._chunk_sink = None if scan is None else self._take_chunk
        self.seen = b""
        self.as_framed = 0
        """Chunks that were passed on as they are framed."""
        self.fault: Fault | None = None

    async def read(self) -> "Leg":
        """To the end; raises what the reader raises."""
        self._take(await self.reader.read_first())
        while not self.reader.ended:
            await self.reader.pipe_to(self._take, lambda _: True, self._chunk_sink)
            self._take(await self.reader.read_next())
        return self

    async def read_all(self) -> "Leg":
        """To the end, or to a fault."""
        try:
            await self.read()
        except NodeFault as fault:
            self.fault = fault.fault
        self.seen += self.reader.flush()
        return self

    @property
    def outcome(self) -> tuple[object, ...]:
        """All that may not depend on how its bytes were cut."""
        kept = None if self.journal is None else (self.journal.records(), self.journal.reason)
        seen = self.transcript
        state = (*msgspec.structs.astuple(seen.checkpoint()), seen.finish_reasons, seen.finished, seen.cache_use)
        return self.seen, self.fault, kept, state, self.reader.usage, self.reader.has_data_event, self.reader.has_begun

    def _take(self, seen: bytes) -> bool:
        self.seen += seen
        return True

    def _take_chunk(self, chunk: bytes) -> bool:
        pieces, at = list[bytes](), 0
        while at < len(chunk):
            begin = chunk.index(b"\n", at) + 1
            end = begin + int(chunk[at : begin - 2], 16)
            pieces.append(chunk[begin:end])
            at = end + 2
        assert chunk == b"".join(map(chunk_of, pieces))
        self.as_framed += len(pieces)
        return self._take(b"".join(pieces))


def run(leg: Coroutine[None, None, Leg]) -> Leg:
    """Nothing in it waits for anything but its pieces."""
    with pytest.raises(StopIteration) as ended:
        leg.send(None)
    found: Leg = ended.value.value
    return found


def unlike(chunks: Sequence[bytes]) -> list[bytes]:
    """The same bytes in pieces of which none is a whole event: all of them go the general way."""
    return [half for chunk in chunks for half in (chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]) if half]


def together(chunks: Sequence[bytes], counts: Sequence[int]) -> list[bytes]:
    """The same where several chunks come in one read, as they do when the proxy is busy."""
    rest, bursts = list(chunks), []
    for count in itertools.cycle([*counts, 1]):
        if not rest:
            break
        bursts.append(b"".join(rest[: count % 4 + 1]))
        del rest[: count % 4 + 1]
    return bursts


@st.composite
def ways(draw: st.DrawFn) -> Callable[[Sequence[bytes], Endpoint], Leg]:
    """Reads a stream with or without a journal, a usage event that only we asked for, and tokens cached elsewhere; with
    chunks passed on as they are framed, or none."""
    with_journal, ours, cached = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([None, CacheUse(3)]))
    scan, in_read = draw(st.sampled_from([None, *SCANS])), draw(st.integers(1, 3))

    def read(pieces: Sequence[bytes], endpoint: Endpoint) -> Leg:
        ours_alone = UsageEventFilter() if ours and endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT) else None
        journal = Journal() if with_journal else None
        leg = Leg(
            endpoint, pieces, journal=journal, usage_filter=ours_alone, cache_use=cached, piped=True, scan=scan,
            chunks_in_read=in_read,
        )  # fmt: skip
        return run(leg.read_all())

    return read


@given(written=st.sampled_from(STREAMS), places=st.lists(st.integers(0, 1 << 20), max_size=30), read=ways())
def test_the_cuts_of_a_stream_do_not_matter(
    written: Written, places: list[int], read: Callable[[Sequence[bytes], Endpoint], Leg]
) -> None:
    for each in (written, written.without_journal()):
        general = read(unlike(each.chunks), each.endpoint).outcome
        assert read(each.chunks, each.endpoint).outcome == general
        assert read(cut(b"".join(each.chunks), places), each.endpoint).outcome == general
        assert read(together(each.chunks, places), each.endpoint).outcome == general


def with_usage(event: bytes) -> bytes:
    """An event that differs from others in its beginning alone, and not in its length."""
    return _OBJECT.sub(lambda found: b'"usage":{"prompt_tokens":7}'.ljust(len(found.group())), event)


@given(
    written=st.sampled_from(STREAMS),
    odd=st.lists(st.tuples(st.integers(0, 1 << 20), st.sampled_from(ODD)), min_size=1, max_size=3),
    read=ways(),
)
def test_whatever_comes_in_a_stream_is_seen_on_each_way(
    written: Written, odd: list[tuple[int, bytes]], read: Callable[[Sequence[bytes], Endpoint], Leg]
) -> None:
    for each in (written, written.without_journal()):
        chunks = list(each.chunks)
        for place, block in odd:
            at = place % len(chunks)
            chunks[at : at + 1] = [chunks[at], block, with_usage(chunks[at])]
        assert read(chunks, each.endpoint).outcome == read(unlike(chunks), each.endpoint).outcome


@pytest.mark.parametrize("written", STREAMS, ids=lambda written: written.name)
def test_a_client_sees_all_events_and_the_journal_all_records(written: Written) -> None:
    leg = run(Leg(written.endpoint, written.chunks, journal=Journal(), piped=True).read())
    assert (leg.seen, leg.journal and leg.journal.records()) == (written.events, written.records)
    plain = written.without_journal()
    leg = run(Leg(plain.endpoint, plain.chunks, piped=True).read())
    assert (leg.seen, leg.transcript.ended) == (plain.events, True)


@pytest.mark.parametrize("name", ["completion", "chat", "messages, reasoning"])
@pytest.mark.parametrize("with_journal", [True, False])
def test_hardly_an_event_of_a_stream_of_text_is_looked_at(name: str, with_journal: bool) -> None:
    (written,) = (each for each in recorded_streams() if each.name == name)
    written = written if with_journal else written.without_journal()
    leg = Leg(written.endpoint, written.chunks, journal=Journal() if with_journal else None, piped=True)
    looked_at = 0

    def on_call(frame: FrameType, event: str, _: object) -> None:
        nonlocal looked_at
        looked_at += event == "call" and frame.f_code in (Framer.feed.__code__, Transcript.passes.__code__)

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        run(leg.read())
    finally:
        sys.setprofile(before)
    assert looked_at < len(written.chunks) / 4


@pytest.mark.parametrize("name", ["completion", "chat", "messages, reasoning"])
@pytest.mark.parametrize("with_journal", [True, False])
@pytest.mark.parametrize("in_read", [1, 2])
@pytest.mark.parametrize("scan", SCANS, ids=lambda scan: scan.language)
def test_nearly_every_chunk_of_a_stream_of_text_goes_on_as_it_is_framed(
    name: str, with_journal: bool, scan: Scan, in_read: int
) -> None:
    (written,) = (each for each in recorded_streams() if each.name == name)
    written = written if with_journal else written.without_journal()
    journal = Journal() if with_journal else None
    leg = Leg(written.endpoint, written.chunks, journal=journal, piped=True, scan=scan, chunks_in_read=in_read)
    run(leg.read())
    assert leg.as_framed > len(written.chunks) * 3 / 4
    assert (leg.seen, leg.transcript.ended) == (written.events, True)


@pytest.mark.parametrize("scan", SCANS, ids=lambda scan: scan.language)
def test_a_journal_that_has_grown_too_long_is_given_up_whichever_way_its_records_come(scan: Scan) -> None:
    (written,) = (each for each in recorded_streams() if each.name == "completion")
    journal = Journal(200)
    leg = run(Leg(written.endpoint, written.chunks, journal=journal, piped=True, scan=scan).read())
    assert (journal.reason, journal.records()) == (NotContinuableReason.JOURNAL_SIZE, b"")
    assert leg.seen == written.events


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@given(data=st.data())
def test_where_it_breaks_the_client_has_what_the_journal_tells(endpoint: Endpoint, data: st.DataObject) -> None:
    pieces = fake_stream(endpoint).chunks
    raw = b"".join(pieces)
    place = data.draw(st.integers(len(pieces[0]), len(raw) - 1))
    leg = run(Leg(endpoint, [raw[:place]], breaks=True, journal=Journal()).read_all())
    assert leg.fault is Fault.RESET
    whole = [split(piece) for number, piece in enumerate(pieces) if len(b"".join(pieces[: number + 1])) <= place]
    assert leg.seen == b"".join(events for events, _ in whole)
    assert leg.journal is not None
    assert leg.journal.records() == b",".join(record for _, record in whole)


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (b'data: {"error":{"message":"no"}}\n\n', Fault.ERROR_EVENT),
        (b'data: {"error":{"code":400}}\n\n', Fault.CLIENT_ERROR),
        (b"data: nonsense\n\n", Fault.INVALID_BODY),
        (b'data: {"error":{"code":400}}\n\ndata: nonsense\n\n', Fault.CLIENT_ERROR),
    ],
)
async def test_events_committed_together_with_an_error_count_for_nothing(bad: bytes, fault: Fault) -> None:
    first, *_ = fake_stream(Endpoint.COMPLETIONS).chunks
    pieces = [first, FINISHED + bad + b": pdproxy [2,[]]\n\n" + first]
    leg = Leg(Endpoint.COMPLETIONS, pieces, journal=Journal())
    with pytest.raises(NodeFault) as raised:
        await leg.read()
    assert raised.value.fault is fault
    assert leg.journal is not None
    assert (leg.seen, leg.journal.records()) == split(first)
    assert not leg.transcript.finished, "the client did not see that it finished"


async def test_a_record_without_events_shows_that_the_node_generates() -> None:
    leg = Leg(Endpoint.CHAT, [b": pdproxy [0,[[[0,[7]]]]]\n\n", FINISHED], journal=Journal())
    assert await leg.reader.read_first() == b""
    assert (leg.reader.has_begun, leg.reader.has_data_event) == (True, False)


async def test_an_end_without_its_record_is_no_end() -> None:
    """The end is sent again by the node that resumes the stream."""
    first, *_ = fake_stream(Endpoint.COMPLETIONS).chunks
    leg = Leg(Endpoint.COMPLETIONS, [first, FINISHED + b"data: [DONE]\n\n"], journal=Journal())
    with pytest.raises(NodeFault, match="reset"):
        await leg.read()
    assert (leg.seen, leg.transcript.ended) == (split(first)[0], False)


async def test_a_keep_alive_waits_for_no_record_and_events_do() -> None:
    first, *_ = fake_stream(Endpoint.COMPLETIONS).chunks
    events, record = split(first)
    leg = Leg(Endpoint.COMPLETIONS, [KEEP_ALIVE + events, b": pdproxy " + record + b"\n\n"], journal=Journal())
    assert await leg.reader.read_next() == KEEP_ALIVE
    assert await leg.reader.read_next() == events


async def test_what_waits_for_a_record_is_bounded() -> None:
    block = b"data: " + b"x" * (EVENT_BYTES // 2) + b"\n\n"
    leg = Leg(Endpoint.COMPLETIONS, [block, block], journal=Journal())
    assert await leg.reader.read_next() == b""
    with pytest.raises(NodeFault) as raised:
        await leg.reader.read_next()
    assert raised.value.fault is Fault.INVALID_BODY


class FramedRead(Pieces):
    """Pieces that are read one by one, and then a read that is offered as it is framed; ``taken``: whether it was."""

    def __init__(self, pieces: Sequence[bytes], read: bytes) -> None:
        super().__init__(pieces)
        self._read = read
        self.taken: bool | None = None

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        """See the port."""
        assert chunk_sink is not None
        self.taken = chunk_sink(self._read)


@pytest.mark.parametrize(
    "last", [b"", b"\r\n", b"5", b"5\r\n", b"5\r\nab", b"-8\r\n", b"0\r\n\r\n", b"\r\n\r\n", b"1\r\nx\r\n"]
)
@pytest.mark.parametrize("scan", SCANS, ids=lambda scan: scan.language)
async def test_of_a_read_that_is_not_whole_chunks_of_text_alone_nothing_is_kept(scan: Scan, last: bytes) -> None:
    (written,) = (each for each in recorded_streams() if each.name == "completion")
    before, framed, journal = 6, b"".join(map(chunk_of, written.chunks[6:8])), Journal()
    response = FramedRead(written.chunks[:before], framed + last)
    reader = LegReader(response, Transcript(written.endpoint, Shape(1, stream=True)), 8, None, journal, scan)
    await reader.read_first()
    for _ in written.chunks[1:before]:
        await reader.read_next()
    kept, passed_on = journal.records(), bytearray()

    def pass_on(chunk: bytes) -> bool:
        passed_on.extend(chunk)
        return True

    await reader.pipe_to(lambda _: True, lambda _: True, pass_on)
    assert (response.taken, bool(passed_on), journal.records() != kept) == (
        (None, False, False) if last else (True,) * 3
    )
