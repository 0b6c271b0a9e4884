"""Framing of server-sent events: any split of the bytes gives the same events, and the same bytes."""

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.stream import sse
from pdproxy.stream.sse import Event, Framer, event_of

BODIES = [
    b'data: {"a":1}\n\ndata: [DONE]\n\n',
    b'data: {"a":1}\r\n\r\ndata: [DONE]\r\n\r\n',
    b"data: a\r\rdata: b\r\r",
    b": keep-alive\n\nevent: ping\ndata: x\ndata: y\n\n",
    b"data:no space\n\nid: 7\n\n",
    b"data: mixed\r\n\ndata: ends\n\r\n",
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_any_split_gives_the_same_events(body: bytes, size: int) -> None:
    # A CR may be the first half of CRLF, so an event that ends in one waits for the next byte.
    whole = Framer().feed(body + b":\n\n")
    parser = Framer()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    split = [event for piece in [*pieces, b":\n\n"] for event in parser.feed(piece)]
    assert b"".join(split) == body + b":\n\n"
    assert split == whole
    assert parser.rest == b""


def test_fields_are_read() -> None:
    framed = Framer().feed(b": hi\n\nevent: ping\ndata: x\ndata: y\n\ndata:z\n\n")
    comment, ping, plain = map(event_of, framed)
    assert comment == Event(b": hi\n\n")
    assert (ping.name, ping.data) == (b"ping", b"x\ny")
    assert (plain.name, plain.data) == (b"", b"z")


def test_an_unfinished_event_is_kept() -> None:
    parser = Framer()
    assert parser.feed(b"data: a\n\ndata: b\n") == [b"data: a\n\n"]
    assert parser.rest == b"data: b\n"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES", 100)
    parser = Framer()
    parser.feed(b"x" * 100)
    with pytest.raises(NodeFault) as caught:
        parser.feed(b"x")
    assert caught.value.fault is Fault.INVALID_BODY
