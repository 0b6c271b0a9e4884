"""Events of megabytes: no piece of one costs more than another, and the ids of a long prompt are not parsed."""

import json
import time

import pytest

from pdproxy.errors import NodeFault
from pdproxy.request import Endpoint, Shape
from pdproxy.stream.chunks import short_event_of
from pdproxy.stream.sse import EVENT_BYTES, Event, Framer, event_of
from pdproxy.stream.transcript import Transcript

LONG = 300_000
"""Bytes; beyond what is joined with each piece."""
ENDS = [b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r\n", b"\r\n\n"]
IDS = [number % 150_000 for number in range(40_000)]


def opening(endpoint: Endpoint, **choice: object) -> Event:
    """The first event of a node that was asked for token ids."""
    said: dict[str, object] = {"text": "a"} if endpoint is Endpoint.COMPLETIONS else {"delta": {"content": "a"}}
    inner = {"index": 0, **said, "logprobs": None, "finish_reason": None, **choice}
    outer: dict[str, object] = {"id": "x", "object": "o", "created": 1, "model": "m", "choices": [inner]}
    (inner if endpoint is Endpoint.COMPLETIONS else outer)["prompt_token_ids"] = IDS
    inner["token_ids"] = [7]
    return short_event_of(b"data: %b\n\n" % json.dumps(outer, separators=(",", ":")).encode())


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("size", [LONG // 3 + 1, 100_000, LONG + 7, LONG + 8, LONG + 9])
def test_any_split_of_a_long_event_gives_the_same_events(end: bytes, size: int) -> None:
    body = b"data: " + b"x" * LONG + end + b"data: short\n\n"
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    framer = Framer()
    found = [event for piece in pieces for event in framer.feed(piece)]
    assert [event_of(raw).data for raw in found] == [b"x" * LONG, b"short"]
    assert b"".join(found) == body


def test_the_time_that_a_long_event_takes_does_not_grow_with_its_square() -> None:
    framer, piece = Framer(), b"x" * 4096
    began = time.thread_time()
    for _ in range(EVENT_BYTES // len(piece)):
        framer.feed(piece)
    assert time.thread_time() - began < 1.0  # joined with each piece: 8 s and more
    with pytest.raises(NodeFault):
        framer.feed(piece)


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT])
def test_a_client_that_asked_for_them_gets_the_ids_of_a_long_prompt(endpoint: Endpoint) -> None:
    transcript = Transcript(endpoint, Shape(1, stream=True))
    event = opening(endpoint)
    assert event.shortened
    assert b"[" + b"0,1" not in (event.data or b"")
    assert transcript.take(event) == event.raw
    assert transcript.started


def test_the_ids_of_a_very_long_prompt_are_looked_through_only_once() -> None:
    ids = b"123456," * 1_200_000 + b"1"
    body = b'data: {"id":"x","choices":[{"index":0,"text":"a","prompt_token_ids":[%b],"token_ids":[7]}]}\n\n' % ids
    pieces = [body[at : at + 65_536] for at in range(0, len(body), 65_536)]
    # Of what it takes as any event is, parsed: 0.02; looked through byte by byte once more: 0.09. Both in one moment: a
    # busy machine stretches CPU time, too.
    tries = ((_seconds_of_the_last(pieces), _seconds_of_the_last(pieces, parsed=True)) for _ in range(10))
    assert any(ours < 0.05 * parsed for ours, parsed in tries)


def _seconds_of_the_last(pieces: list[bytes], *, parsed: bool = False) -> float:
    """CPU time of the piece that completes a first event."""
    framer, read = Framer(), event_of if parsed else short_event_of
    transcript = Transcript(Endpoint.COMPLETIONS, Shape(1, stream=True))
    for piece in pieces[:-1]:
        assert framer.feed(piece) == []
    began = time.thread_time()
    (raw,) = framer.feed(pieces[-1])
    seen = transcript.take(read(raw))
    seconds = time.thread_time() - began
    assert seen == b"".join(pieces)
    return seconds


def test_a_text_that_looks_like_ids_stays() -> None:
    transcript = Transcript(Endpoint.COMPLETIONS, Shape(1, stream=True))
    text = '"prompt_token_ids":[' + "1," * LONG + "1]"
    seen = transcript.take(opening(Endpoint.COMPLETIONS, text=text))
    assert json.loads(seen.removeprefix(b"data: "))["choices"][0]["text"] == text
