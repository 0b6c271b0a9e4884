"""A read that is one chunk with one event like the last one: in Python, and compiled where that was built."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.stream.journal import MOST_BYTES, RECORD_OF_ONE
from pdproxy.stream.scan import PYTHON, Scan, compiled

HEAD, TAIL = b'data: {"id":"c-1","choices":[{"text":"', b',"finish_reason":null}]}\n\n'
COMPILED = compiled()
SCANS = [PYTHON] if COMPILED is None else [PYTHON, COMPILED]
each_scan = pytest.mark.parametrize("scan", SCANS, ids=lambda scan: scan.language)


def chunk(content: bytes) -> bytes:
    """As servers of nodes write it."""
    return b"%x\r\n%b\r\n" % (len(content), content)


def event(text: bytes) -> bytes:
    return HEAD + text + b'"' + TAIL


@each_scan
@pytest.mark.parametrize("text", [b"", b" the", b"x" * 5000, "é\\n".encode(), b"\\u0022"])
def test_one_event_like_the_last_one_goes_on_as_it_is_framed(scan: Scan, text: bytes) -> None:
    read, records = chunk(event(text)), bytearray(b"[1,[]],")
    assert scan.plain(read, HEAD, TAIL) is read
    journaled = chunk(event(text) + b": pdproxy [1,[[[0,[7]]]]]\n\n")
    assert scan.journaled(journaled, HEAD, TAIL, records, MOST_BYTES) == read
    assert records == b"[1,[]],[1,[[[0,[7]]]]],"


ONE = event(b"x")
RECORD = b": pdproxy [1,[]]\n\n"
ODD_READS = {
    "nothing": b"",
    "half a chunk": chunk(ONE)[:-1],
    "the end of one": chunk(ONE)[1:],
    "two chunks": chunk(ONE) * 2,
    "two events": chunk(ONE * 2),
    "the last chunk with it": chunk(ONE) + b"0\r\n\r\n",
    "the last chunk alone": b"0\r\n\r\n",
    "a size that is too small": b"%x\r\n%b\r\n" % (len(ONE) - 1, ONE),
    "a size that is too large": b"%x\r\n%b\r\n" % (len(ONE) + 1, ONE),
    "a zero before the size": b"0" + chunk(ONE),
    "a size in large letters": (b"%X\r\n%b\r\n" % (len(ONE + b"x" * 90), event(b"x" * 91))),
    "a size with a sign": b"+" + chunk(ONE),
    "an extension": b"%x;a=b\r\n%b\r\n" % (len(ONE), ONE),
    "no return after the size": b"%x\n%b\r\n" % (len(ONE), ONE),
    "no return at the end": b"%x\r\n%b\n\n" % (len(ONE), ONE),
    "an escaped quote": chunk(event(b'\\"')),
    "another head": chunk(ONE.replace(b"c-1", b"c-2")),
    "another end": chunk(ONE.replace(b"null", b'"stop"')),
    "a comment before it": chunk(b": alive\n\n" + ONE),
}
ODD_RECORDS = {
    "none": ONE,
    "of two events": ONE + b": pdproxy [2,[]]\n\n",
    "of two events, first two": ONE * 2 + RECORD,
    "two of them": ONE + RECORD * 2,
    "half of one": ONE + RECORD[:-1],
    "the beginning of one": ONE + RECORD_OF_ONE,
    "an event behind it": ONE + RECORD + ONE,
    "before the event": RECORD + ONE,
}


@each_scan
@pytest.mark.parametrize("read", ODD_READS.values(), ids=ODD_READS)
def test_any_other_read_is_left_alone(scan: Scan, read: bytes) -> None:
    records = bytearray(b"[1,[]],")
    assert scan.plain(read, HEAD, TAIL) is None
    assert scan.journaled(read, HEAD, TAIL, records, MOST_BYTES) is None
    assert records == b"[1,[]],"


@each_scan
@pytest.mark.parametrize("content", ODD_RECORDS.values(), ids=ODD_RECORDS)
def test_any_other_record_is_left_alone(scan: Scan, content: bytes) -> None:
    records = bytearray()
    assert scan.journaled(chunk(content), HEAD, TAIL, records, MOST_BYTES) is None
    assert records == b""


@each_scan
def test_a_record_for_which_there_is_no_room_is_left_alone(scan: Scan) -> None:
    read, kept = chunk(ONE + RECORD), b"[1,[]],"
    records = bytearray(kept)
    assert scan.journaled(read, HEAD, TAIL, records, 2 * len(kept) - 1) is None
    assert scan.journaled(read, HEAD, TAIL, records, 0) is None
    assert records == kept
    assert scan.journaled(read, HEAD, TAIL, records, 2 * len(kept)) is not None
    assert records == kept * 2


MARKS = [b'"', b"\n", b"\n\n", b"\r\n", b"0", b"a", b"[1,", b": pdproxy ", RECORD_OF_ONE, RECORD, HEAD, TAIL, ONE]
SNIPPET = st.lists(st.one_of(st.sampled_from(MARKS), st.binary(max_size=4)), max_size=6).map(b"".join)


@st.composite
def reads(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """A read, nearly always of one chunk, and the head and tail that it is compared with."""
    head = draw(st.one_of(st.just(HEAD), SNIPPET))
    tail = draw(st.one_of(st.just(TAIL), SNIPPET))
    content = head + draw(SNIPPET) + draw(st.sampled_from([b'"', b""])) + tail + draw(SNIPPET)
    content += draw(st.sampled_from([b"", RECORD, b"\n\n"]))
    read = chunk(content)
    place, length = draw(st.integers(0, len(read))), draw(st.sampled_from([0, 0, 0, 1, 2, 1000]))
    return read[:place] + draw(st.one_of(st.just(b""), SNIPPET)) + read[place + length :], head, tail


@pytest.mark.skipif(COMPILED is None, reason="there was no compiler")
@given(found=st.one_of(reads(), st.tuples(SNIPPET, SNIPPET, SNIPPET)), room=st.integers(-9, 60))
def test_both_do_the_same_with_any_bytes(found: tuple[bytes, bytes, bytes], room: int) -> None:
    assert COMPILED is not None
    outcomes = []
    for scan in (PYTHON, COMPILED):
        records = bytearray(b"[1,[]],")
        outcomes.append((scan.plain(*found), scan.journaled(*found, records, room), records))
    assert outcomes[0] == outcomes[1]


@pytest.mark.skipif(COMPILED is None, reason="there was no compiler")
@pytest.mark.parametrize("wrong", [bytearray(chunk(ONE)), "text", None, 7], ids=repr)
def test_the_compiled_functions_look_at_what_they_are_given(wrong: object) -> None:
    assert COMPILED is not None
    good = [chunk(ONE + RECORD), HEAD, TAIL, bytearray(), MOST_BYTES]
    for place in range(5):
        if not (place == 3 and isinstance(wrong, bytearray)) and not (place == 4 and wrong == 7):
            with pytest.raises(TypeError):
                COMPILED.journaled(*good[:place], wrong, *good[place + 1 :])  # type: ignore[arg-type, call-arg]
    for place in range(3):
        with pytest.raises(TypeError):
            COMPILED.plain(*good[:place], wrong, *good[place + 1 : 3])  # type: ignore[arg-type, call-arg]
    for few in ([], good[:2], [*good, good[0]]):
        with pytest.raises(TypeError):
            COMPILED.plain(*few)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            COMPILED.journaled(*few)  # type: ignore[arg-type]
