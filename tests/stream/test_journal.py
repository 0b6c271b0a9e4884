"""A stream with a journal: however its bytes are cut, the same events and records come out of it."""

import itertools
import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.errors import Fault, NodeFault
from pdproxy.request import Endpoint, NotContinuableReason, Shape
from pdproxy.stream.journal import Batch, Journal, RecordSplitter
from pdproxy.stream.sse import EVENT_BYTES, Event, SseParser
from pdproxy.stream.transcript import Transcript

KEEP_ALIVE = b": keep-alive\n\n"
TEXTS = ("a", "", "é", ": pdproxy [1,[]]", "data: x", '"usage":{', "\\n\n")


def event(text: str, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    said = {"id": "c-1", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    return f"{head}data: {json.dumps(said, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def comment(record: object) -> bytes:
    return b": pdproxy " + json.dumps(record, separators=(",", ":")).encode() + b"\n\n"


@st.composite
def batch_lists(draw: st.DrawFn) -> list[Batch]:
    batches = []
    for number in range(draw(st.integers(1, 6))):
        blocks = [event(text) for text in draw(st.lists(st.sampled_from(TEXTS), max_size=3))]
        groups = draw(st.sampled_from([[], [[[0, [number]]]], [[[0, [1, 2]]], [[1, [3], "stop", None]]]]))
        batches.append(Batch(b"".join(blocks), json.dumps([len(blocks), groups], separators=(",", ":")).encode()))
        if draw(st.booleans()):
            batches.append(Batch(KEEP_ALIVE, b""))
    return batches


def whole(batches: Iterable[Batch]) -> bytes:
    return b"".join(
        batch.events + (b": pdproxy " + batch.record + b"\n\n" if batch.record else b"") for batch in batches
    )


def cut(raw: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [raw[start:end] for start, end in itertools.pairwise(edges)]


@given(batch_lists(), st.lists(st.integers(0, 10_000), max_size=12))
def test_the_cuts_do_not_matter(batches: list[Batch], places: list[int]) -> None:
    splitter = RecordSplitter()
    found = [batch for piece in cut(whole(batches), places) for batch in splitter.feed(piece)]
    assert found == batches
    assert splitter.rest == b""


@given(batch_lists(), st.integers(0, 10_000))
def test_a_stream_that_breaks_gives_whole_batches_alone(batches: list[Batch], place: int) -> None:
    raw = whole(batches)
    splitter = RecordSplitter()
    found = splitter.feed(raw[: place % len(raw)])
    assert found == batches[: len(found)]
    assert whole(found) + splitter.rest == raw[: place % len(raw)]


def test_events_wait_for_their_record() -> None:
    splitter = RecordSplitter()
    assert splitter.feed(event("a") + event("b")) == []
    assert splitter.feed(b": pdproxy [2,[[[0,[7]]]]]\n\n") == [Batch(event("a") + event("b"), b"[2,[[[0,[7]]]]]")]


def test_a_keep_alive_waits_for_nothing() -> None:
    splitter = RecordSplitter()
    assert splitter.feed(KEEP_ALIVE + event("a")) == [Batch(KEEP_ALIVE, b"")]


def test_what_waits_is_bounded() -> None:
    splitter = RecordSplitter()
    splitter.feed(b"data: " + b"x" * (EVENT_BYTES - 6))
    with pytest.raises(NodeFault) as raised:
        splitter.feed(b"x")
    assert raised.value.fault is Fault.INVALID_BODY


def journal_of(*batches: Batch, most: int = 1000) -> Journal:
    journal = Journal(most)
    for batch in batches:
        journal.append(batch)
    return journal


def test_the_records_are_kept_as_they_came_and_in_order() -> None:
    odd = b'[1, [[[0, [8]]]], {"id": "\\u00e9"}]'
    journal = journal_of(Batch(b"", b"[0,[]]"), Batch(event("a"), odd), Batch(b"", b"[0,[[[0,[9]]]]]"))
    assert journal.records() == b"[0,[]]," + odd + b",[0,[[[0,[9]]]]]"
    assert journal.reason is None


def test_beyond_its_bound_the_journal_is_given_up_and_its_memory_back() -> None:
    record = Batch(event("a"), b"[1,[[[0,[1]]]]]")
    most = len(record.record) + 1
    assert journal_of(record, most=most).reason is None
    journal = journal_of(record, record, record, most=most)
    assert (journal.reason, journal.records()) == (NotContinuableReason.JOURNAL_SIZE, b"")


@pytest.mark.parametrize("record", [b"[2,[]]", b"[0,[]]", b"[]", b"{}", b"[01,[]]", b"nonsense"])
def test_a_record_that_does_not_tell_its_events_ends_the_journal(record: bytes) -> None:
    journal = journal_of(Batch(event("a"), b"[1,[]]"), Batch(KEEP_ALIVE + event("b"), record))
    assert (journal.reason, journal.records()) == (NotContinuableReason.JOURNAL_BROKEN, b"")


def test_keep_alives_are_no_events() -> None:
    journal = journal_of(Batch(KEEP_ALIVE + event("a") + KEEP_ALIVE + event("b"), b"[2,[]]"))
    assert journal.reason is None


FAST = (event("a"), event('é "quoted": { \\'))
SLOW = (
    event("a") + event("b"),
    event("a")[:-1],
    event("a").replace(b"null", b'"stop"'),
    event("a").replace(b'"choices"', b'"usage":{},"choices"'),
    event("a").replace(b'"choices"', b'"kv_transfer_params":{},"choices"'),
    b'data: {"error":{}}\n\n',
    b"data: [DONE]\n\n",
    event("a", "some"),
    event("a").replace(b'"a"', b'"\r"'),
    event("a").replace(b'"a"', b'"\n"'),
    KEEP_ALIVE,
)


def started(endpoint: Endpoint) -> Transcript:
    transcript = Transcript(endpoint, Shape(1, stream=True))
    (first,) = SseParser().feed(event("x", "" if endpoint is Endpoint.COMPLETIONS else "some"))
    transcript.take(first)
    return transcript


@pytest.mark.parametrize("raw", FAST, ids=repr)
def test_an_event_that_says_nothing_but_text_is_not_parsed(raw: bytes) -> None:
    transcript = started(Endpoint.COMPLETIONS)
    assert transcript.take_fast_path(raw) == raw
    (read,) = SseParser().feed(raw)
    before = transcript.checkpoint()
    assert transcript.take(read) == raw
    assert transcript.checkpoint() == before, "so nothing was missed"


@pytest.mark.parametrize("raw", SLOW, ids=repr)
def test_any_other_is_looked_at(raw: bytes) -> None:
    assert started(Endpoint.COMPLETIONS).take_fast_path(raw) is None


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.RESPONSES])
@pytest.mark.parametrize(
    ("name", "fast"),
    [
        ("content_block_delta", True),
        ("response.output_text.delta", True),
        ("message_delta", False),
        ("message_stop", False),
        ("response.completed", False),
        ("response.incomplete", False),
        ("response.failed", False),
        ("error", False),
    ],
)
def test_of_named_events_the_name_tells(endpoint: Endpoint, name: str, fast: bool) -> None:
    raw = event("text", name)
    assert started(endpoint).take_fast_path(raw) == (raw if fast else None)


def test_what_did_not_reach_the_client_is_forgotten() -> None:
    transcript = Transcript(Endpoint.COMPLETIONS, Shape(1, stream=True))
    before = transcript.checkpoint()
    for each in SseParser().feed(event("a").replace(b"null", b'"stop"') + b"data: [DONE]\n\n"):
        transcript.take(Event(*each))
    assert (transcript.started, transcript.finished, transcript.ended) == (True, True, True)
    transcript.rollback(before)
    assert (transcript.started, transcript.finished, transcript.ended) == (False, False, False)
