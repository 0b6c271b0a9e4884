"""`ResponseParser`, without a socket."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.transport.faults import ProtocolError
from pdproxy.transport.h1_messages import ResponseParser

WHOLE = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nA: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4\r\nbody\r\n1\r\n!\r\n0\r\nT: 1\r\n\r\n"
)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
def test_where_the_bytes_are_cut_does_not_matter(cuts: list[int]) -> None:
    reader = ResponseParser()
    edges = [0, *sorted(cuts), len(WHOLE)]
    body = b""
    for start, end in itertools.pairwise(edges):
        if start < end:
            reader.feed(WHOLE[start:end])
            body += reader.take()
    assert (reader.status, body) == (200, b"body!")
    assert reader.headers == (("a", "1"), ("transfer-encoding", "chunked"))
    assert reader.ended
    assert reader.reusable


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_protocol_errors(data: bytes) -> None:
    reader = ResponseParser()
    try:
        reader.feed(b"HTTP/1.1 2" + data)
    except ProtocolError:
        assert not reader.ended


def test_one_answer_after_another() -> None:
    reader = ResponseParser()
    for status, body in ((200, b"one"), (404, b""), (200, b"three")):
        reader.expect("POST")
        assert reader.silent
        reader.feed(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        assert (reader.status, reader.take(), reader.ended, reader.reusable) == (status, body, True, True)


def test_http_1_0_is_not_kept_alive() -> None:
    reader = ResponseParser()
    reader.feed(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab")
    assert reader.ended
    assert not reader.reusable


def test_the_end_of_the_connection_ends_only_what_has_no_length() -> None:
    measured, endless = ResponseParser(), ResponseParser()
    measured.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")
    endless.feed(b"HTTP/1.1 200 OK\r\n\r\nab")
    assert not measured.feed_eof()
    assert endless.feed_eof()
    assert endless.take() == b"ab"


def test_trailers_are_bounded() -> None:
    reader = ResponseParser()
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
    line = b"X: " + b"x" * 1000 + b"\r\n"
    with pytest.raises(ProtocolError):
        reader.feed(line * 200)


def test_a_stream_may_be_longer_than_the_bound_on_heads() -> None:
    reader = ResponseParser()
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(400):
        reader.feed(b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert len(reader.take()) == 1024


def test_an_unsupported_transfer_coding_is_named() -> None:
    """What it covers would be passed on as if it were plain."""
    with pytest.raises(ProtocolError, match="transfer coding 'gzip, chunked'"):
        ResponseParser().feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n")


def test_the_answer_to_head_has_no_body_whatever_its_length_says() -> None:
    reader = ResponseParser()
    reader.expect("HEAD")
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n")
    reader.feed(b"body")
    assert (reader.ended, reader.take(), reader.reusable) == (True, b"", False)
