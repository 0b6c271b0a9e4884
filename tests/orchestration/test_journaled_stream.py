"""The stream of a leg with a journal: what the client sees of it, and what of it counts when it breaks."""

import functools
import json
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.errors import Fault, NodeFault
from pdproxy.orchestration.journaled_stream import JournaledStream
from pdproxy.request import Endpoint, Headers, Shape
from pdproxy.response import Sink
from pdproxy.stream.journal import Journal
from pdproxy.stream.transcript import Transcript
from tests.fakes.journal import journaled
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.vllm_answers import ParsedRequest

ENDPOINTS = tuple(Endpoint)
BODY = {"model": "m", "prompt": "a b c", "messages": [], "input": "a b c", "max_tokens": 5, "stream": True}


class Pieces:
    """A response that is read to its end, or to where its connection breaks."""

    status = 200
    headers: Headers = ()

    def __init__(self, pieces: Sequence[bytes], *, breaks: bool = False) -> None:
        self._pieces = pieces
        self._breaks = breaks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
        if self._breaks:
            raise NodeFault(Fault.RESET, "broken")

    async def pipe_to(self, sink: Sink) -> None:
        """All is left to be read."""

    async def aclose(self) -> None:
        """Nothing is held."""


class Leg:
    """One leg, and what came of it."""

    def __init__(self, endpoint: Endpoint, pieces: Sequence[bytes], *, breaks: bool = False) -> None:
        self.journal = Journal()
        self.transcript = Transcript(endpoint, Shape(1, stream=True))
        self.stream = JournaledStream(Pieces(pieces, breaks=breaks), self.transcript, None, None, self.journal)
        self.seen = b""

    async def read(self) -> "Leg":
        self.seen += await self.stream.read_first()
        while not self.stream.ended:
            self.seen += await self.stream.read_next()
        return self


@functools.cache
def pieces_of(endpoint: Endpoint) -> tuple[bytes, ...]:
    """Always the same ones."""
    question = ParsedRequest.of(endpoint, BODY, 1)
    return journaled(question, 0, [], FakeKvTransfer())


def split(piece: bytes) -> tuple[bytes, bytes]:
    """The events of a piece, and its record."""
    at = piece.rindex(b": pdproxy ")
    return piece[:at], piece[at + len(b": pdproxy ") :].strip()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@given(data=st.data())
def test_the_cuts_of_its_bytes_do_not_matter(endpoint: Endpoint, data: st.DataObject) -> None:
    pieces = pieces_of(endpoint)
    raw = b"".join(pieces)
    edges = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=20)))
    cut = [raw[start:end] for start, end in zip([0, *edges], [*edges, len(raw)], strict=True)]
    leg = Leg(endpoint, cut)
    run(leg)
    assert leg.seen == b"".join(split(piece)[0] for piece in pieces)
    assert leg.journal.records() == b",".join(split(piece)[1] for piece in pieces)
    assert leg.transcript.ended


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@given(data=st.data())
def test_where_it_breaks_the_client_has_what_the_journal_tells(endpoint: Endpoint, data: st.DataObject) -> None:
    pieces = pieces_of(endpoint)
    raw = b"".join(pieces)
    place = data.draw(st.integers(len(pieces[0]), len(raw) - 1))
    leg = Leg(endpoint, [raw[:place]], breaks=True)
    with pytest.raises(NodeFault):
        run(leg)
    whole = [split(piece) for number, piece in enumerate(pieces) if len(b"".join(pieces[: number + 1])) <= place]
    assert leg.seen == b"".join(events for events, _ in whole)
    assert leg.journal.records() == b",".join(record for _, record in whole)


def run(leg: Leg) -> None:
    """Nothing in it waits for anything but its pieces."""
    coroutine = leg.read()
    with pytest.raises(StopIteration):
        coroutine.send(None)


FINISH = {"id": "c-1", "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
FINISHED = b"data: " + json.dumps(FINISH, separators=(",", ":")).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (b'data: {"error":{"message":"no"}}\n\n', Fault.ERROR_EVENT),
        (b'data: {"error":{"code":400}}\n\n', Fault.CLIENT_ERROR),
        (b"data: nonsense\n\n", Fault.INVALID_BODY),
    ],
)
async def test_a_batch_with_an_error_counts_for_nothing(bad: bytes, fault: Fault) -> None:
    first, *_ = pieces_of(Endpoint.COMPLETIONS)
    leg = Leg(Endpoint.COMPLETIONS, [first, FINISHED + bad + b": pdproxy [2,[]]\n\n" + first])
    with pytest.raises(NodeFault) as raised:
        await leg.read()
    assert raised.value.fault is fault
    assert (leg.seen, leg.journal.records()) == split(first)
    assert not leg.transcript.finished, "the client did not see that it finished"


async def test_a_record_without_events_shows_that_the_node_generates() -> None:
    leg = Leg(Endpoint.CHAT, [b": pdproxy [0,[[[0,[7]]]]]\n\n", FINISHED])
    assert await leg.stream.read_first() == b""
    assert (leg.stream.has_begun, leg.stream.has_data_event) == (True, False)


async def test_an_end_without_its_record_is_no_end() -> None:
    """It is sent again by the node that resumes the stream."""
    first, *_ = pieces_of(Endpoint.COMPLETIONS)
    leg = Leg(Endpoint.COMPLETIONS, [first, FINISHED + b"data: [DONE]\n\n"])
    with pytest.raises(NodeFault, match="reset"):
        await leg.read()
    assert (leg.seen, leg.transcript.ended) == (split(first)[0], False)
