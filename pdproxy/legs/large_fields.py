"""Where the fields of a large body end, found in steps. A long text is looked through piece by piece: in one call it
takes about a millisecond for each megabyte, in which no other stream moves."""

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

import msgspec

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]

PIECE = 256 * 1024
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_ONE = msgspec.json.Decoder(msgspec.Raw).decode
_TO_TEXT = re.compile(
    rb'\s*+\{\s*+(?:"[^"\\]{0,100}+"\s*+:\s*+(?:"[^"\\]{0,1000}+"|[-+.\w]{1,100}+)\s*+,\s*+){0,50}"(prompt|input)"\s*+:\s*+"'
)
"""From a body's beginning to the inside of its long text, where nothing but short texts and numbers precedes it. The
repetition of whole fields is not possessive (`{0,50}+`): Python 3.11.2 finds nothing with that."""
_REST_OF_TEXT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"')


def fields_of(raw: bytes) -> Steps[dict[str, msgspec.Raw]]:
    """The fields of a JSON object, each as it stands there.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    begin = _TO_TEXT.match(raw)
    end = None if begin is None else (yield from _end_of_text(raw, begin.end()))
    if begin is None or end is None:
        return _FIELDS(raw)
    start = begin.end() - 1
    yield
    fields = _FIELDS(b'%b""%b' % (raw[:start], raw[end:]))
    name = begin[1].decode()
    if bytes(fields[name]) == b'""':  # else the name comes twice, and the last one counts
        fields[name] = msgspec.Raw(memoryview(raw)[start:end])
    return fields


def _end_of_text(raw: bytes, start: int) -> Steps[int | None]:
    """Behind the quote that ends a text; None where there is no such quote, or the text is no JSON."""
    while start < len(raw):
        piece = raw[start : start + PIECE]
        if start + PIECE < len(raw):
            piece = _whole_escapes(piece)
        try:
            _ONE(b'"%b"' % piece)
        except msgspec.MsgspecError:  # the text ends in this piece, or is no JSON
            return _end_within(raw, start, start + len(piece) + 16)
        if not piece:
            return None
        start += len(piece)
        yield
    return None


def _whole_escapes(piece: bytes) -> bytes:
    """Without what may be the first half of an escape; a pair of surrogates is twelve characters."""
    escape = piece.find(b"\\", -12)
    return piece if escape < 0 else piece[: escape + 1].rstrip(b"\\")


def _end_within(raw: bytes, start: int, stop: int) -> int | None:
    found = _REST_OF_TEXT.match(raw, start, stop)
    if found is None:
        return None
    try:
        _ONE(b'"%b' % found[0])
    except msgspec.MsgspecError:
        return None
    return found.end()
