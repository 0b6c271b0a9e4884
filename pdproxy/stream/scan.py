"""One read of a stream that is one HTTP chunk with one event like the last one: nearly every token comes so. Pure.

Such a read goes to the client as it is framed; with a journal, its record is cut out. Both functions exist twice: here,
and compiled in ``_scan.c``, which is built where there is a C compiler (``hatch_build.py``) and takes half of the
instructions of a token. The same tests run over both.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from pdproxy.stream.journal import ONE_EVENT, RECORD_OF_ONE


class Scan(NamedTuple):
    """The two functions, and the language that they are written in."""

    language: str
    plain: Callable[[bytes, bytes, bytes], bytes | None]
    journaled: Callable[[bytes, bytes, bytes, bytearray, int], bytes | None]


def plain(read: bytes, head: bytes, tail: bytes) -> bytes | None:
    """The chunk for the client, which is the read itself; None where it is not one chunk with one such event.

    Args:
        head: of the event, up to its text, the quote before it included.
        tail: what comes after the quote that ends the text.
    """
    line = _size_line_in(len(read))
    if line is None:
        return None
    before = line + head
    text = len(before)
    return read if read[:text] == before and read[text:].partition(b'"')[2] == tail + b"\r\n" else None


def journaled(read: bytes, head: bytes, tail: bytes, records: bytearray, most: int) -> bytes | None:
    """The same with a journal: the read's one chunk has the event, and the record that commits it.

    The record is appended to ``records``, a comma behind it. None, and nothing is appended, where they would grow
    beyond ``most``.
    """
    line, after = _size_line_in(len(read)), tail + RECORD_OF_ONE
    if line is None:
        return None
    before = line + head
    text, begin = len(before), len(after)
    rest = read[text:].partition(b'"')[2]
    record, _, end = rest[begin:].partition(b"\n\n")
    if end != b"\r\n" or read[:text] != before or rest[:begin] != after:
        return None
    if len(records) + len(ONE_EVENT) + len(record) >= most:
        return None
    records += b"".join((ONE_EVENT, record, b","))
    event = read[len(line) : len(tail) - len(rest)]
    return b"".join((_size_line(len(event)), event, b"\r\n"))


_size_line = functools.lru_cache(maxsize=4096)(b"%x\r\n".__mod__)
"""Begins a chunk of so many bytes, as servers of nodes write it: in small letters, without a zero in front. Tokens of
a stream differ little in their length, so nearly all are found in the cache."""


@functools.lru_cache(maxsize=4096)
def _size_line_in(read: int) -> bytes | None:
    """Begins a read of so many bytes that is one chunk; None where no chunk has that length."""
    for digits in range(1, 16):
        size = read - digits - 4
        if size > 0 and len(line := _size_line(size)) == digits + 2:
            return line
    return None


def compiled() -> Scan | None:
    """The compiled functions; None where they were not built."""
    try:
        from pdproxy.stream import _scan
    except ImportError:
        return None
    return Scan("C", _scan.plain, _scan.journaled)


PYTHON = Scan("Python", plain, journaled)
BEST = compiled() or PYTHON
