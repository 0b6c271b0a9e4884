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


SIZES = st.sampled_from([b"%x\r\n", b"%X\r\n", b"00%x\r\n", b"%x;a=b\r\n", b'%x;a="b c"\r\n'])
CONTENTS = st.one_of(
    st.binary(min_size=1, max_size=20), st.sampled_from([b"\r\n", b"5\r\n", b"1\r\na\r\n", b"a" * 300])
)


@given(
    chunks=st.lists(st.tuples(SIZES, CONTENTS), max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
    trailers=st.sampled_from([b"", b"T: 1\r\n"]),
)
def test_a_reader_knows_when_it_is_between_two_chunks(
    chunks: list[tuple[bytes, bytes]], cuts: list[int], trailers: bytes
) -> None:
    reader, raw = ResponseParser(), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    between = {len(raw)}
    for size, content in chunks:
        raw += size % len(content) + content + b"\r\n"
        between.add(len(raw))
    raw += b"0\r\n" + trailers + b"\r\n"
    edges = [0, *sorted({cut % (len(raw) + 1) for cut in cuts} | {len(raw)})]
    for start, end in itertools.pairwise(edges):
        if start < end:
            reader.feed(raw[start:end])
            # Half of a line's end that comes alone is not looked at: the next chunk goes the general way.
            assert reader.between_chunks == (end in between and end - start > 1)
    assert reader.ended


def test_no_answer_but_a_chunked_one_is_between_chunks() -> None:
    for head in (b"Content-Length: 9\r\n", b""):
        reader = ResponseParser()
        reader.feed(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")
        assert not reader.between_chunks
        reader.feed(b"1\r\na\r\n")
        assert not reader.between_chunks


def test_a_chunk_that_passes_by_between_two_others_is_not_missed() -> None:
    reader = ResponseParser()
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
    assert reader.between_chunks
    reader.feed(b"1\r\nc\r\n0\r\n\r\n")  # 1, b was there
    assert (reader.take(), reader.ended, reader.reusable, reader.between_chunks) == (b"ac", True, True, False)


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
    """The encoded bytes would be passed on as if they were plain."""
    with pytest.raises(ProtocolError, match="transfer coding 'gzip, chunked'"):
        ResponseParser().feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n")


def test_the_answer_to_head_has_no_body_whatever_its_length_says() -> None:
    reader = ResponseParser()
    reader.expect("HEAD")
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n")
    reader.feed(b"body")
    assert (reader.ended, reader.take(), reader.reusable) == (True, b"", False)
