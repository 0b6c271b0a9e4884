"""JSON that is passed on without being parsed: what is looked at is decoded when it is looked at, and only as far.

A parser makes up to 30 bytes of objects for each byte of JSON (`[[],[],…`), and a client chooses the JSON. So a body is
a mapping of names to `msgspec.Raw`, which are views of the bytes that came: they cost nothing, and are written back
unchanged. Values of up to `SMALL` bytes are decoded to be looked at; of longer ones their beginning, or how they are
made. The functions that take time in proportion to a long value are steps, between which others may have their turn.
"""

import codecs
from array import array
from collections.abc import Generator, Iterator, Sequence
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import Raw

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]

SMALL = 32 * 1024
"""Bytes of JSON that are decoded whole: a megabyte of objects at most, for a moment."""
PIECE = 1024 * 1024
"""Bytes that one step looks through without parsing them."""
MOST_FIELDS = 256
"""Names of one object, each of which costs 200 bytes. A request of vLLM's has a hundred."""
MOST_ITEMS = 8192
"""The most items of a long list that are looked at."""
TEXT, LIST, OBJECT = b'"[{'
_MOST_COLONS = 64 * 1024
_IDS_OF_STEP = 64 * 1024
"""Bytes of token ids that one step parses."""
_ID_CHARACTERS = b"-0123456789, \n\r\t"
_BLANK = b" \n\r\t"
_LONG_NAMES = (
    "prompt", "messages", "input", "system", "instructions", "tools", "documents", "content", "text", "tool_calls",
    "function", "arguments", "parameters", "output", "image_url", "input_audio", "source", "response_format",
    "structured_outputs", "chat_template", "chat_template_kwargs", "vllm_xargs",
)  # fmt: skip
"""Fields that may be long and hold anything."""

_VALUE = msgspec.json.Decoder().decode
_FIELDS = msgspec.json.Decoder(dict[str, Raw]).decode
_ITEMS = msgspec.json.Decoder(list[Raw]).decode
_IDS = msgspec.json.Decoder(list[int]).decode
_LONG_FIELDS = msgspec.json.Decoder(
    msgspec.defstruct("LongFields", [(name, Raw, Raw()) for name in _LONG_NAMES])
).decode
_FIRST_ITEMS = msgspec.json.Decoder(
    msgspec.defstruct("FirstItems", [(f"item_{number}", Raw, Raw()) for number in range(MOST_ITEMS)], array_like=True)
).decode
"""A list as a tuple of so many fields: the parser skips what follows, and makes nothing of it."""


class TooManyFieldsError(ValueError):
    """An object has more than `MOST_FIELDS` names."""


def value_of(value: object) -> object:
    """A value that may be raw JSON, to be looked at: decoded, if it is small.

    What is long, or has a number that no float or integer of ours can hold, stays `msgspec.Raw`.
    """
    if not isinstance(value, Raw) or len(value) > SMALL:
        return value
    try:
        return _VALUE(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return value


def first_byte(raw: Raw) -> int:
    """By which one sees what kind of value it is: `TEXT`, `LIST`, `OBJECT`, or another one."""
    return memoryview(raw)[0]


def fields_of(raw: bytes | Raw) -> Steps[dict[str, Raw]]:
    """The values of an object by their names; where a name comes twice, the last one counts, as for nodes.

    Raises:
        TooManyFieldsError: before they are made.
        msgspec.MsgspecError: it is no JSON, or no object.
        RecursionError: it is nested too deeply.
    """
    if len(raw) <= PIECE:
        return small_fields_of(raw)
    yield from _check_number_of_fields(raw)
    return small_fields_of(raw)


def small_fields_of(raw: bytes | Raw) -> dict[str, Raw]:
    """As `fields_of`, of up to `PIECE` bytes, or of an object whose number of names is known to be small."""
    fields = _FIELDS(raw)
    if len(fields) > MOST_FIELDS:
        raise TooManyFieldsError
    return fields


def _check_number_of_fields(raw: bytes | Raw) -> Steps[None]:
    colons = 0
    for piece in pieces(memoryview(raw)):
        colons += piece.count(b":")
        yield
    if colons > _MOST_COLONS:
        long_fields = msgspec.structs.astuple(_LONG_FIELDS(raw))
        yield
        if len(raw) - sum(map(len, long_fields)) > PIECE:
            raise TooManyFieldsError


def check_utf8(raw: bytes) -> Steps[None]:
    """The parser does not look into the texts of raw JSON.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    if raw.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for piece in pieces(memoryview(raw)):
        decoder.decode(piece)
        yield
    decoder.decode(b"", final=True)


def first_items(raw: Raw) -> Sequence[Raw]:
    """The items of a list, `MOST_ITEMS` at most of a long one; raises `msgspec.MsgspecError` where it is no list."""
    if len(raw) <= SMALL:
        return _ITEMS(raw)
    items = msgspec.structs.astuple(_FIRST_ITEMS(raw))
    return items if items[-1] else items[: items.index(Raw())]


def kind_of_items(raw: Raw) -> bytes:
    """The first character of a list's first item; "]" for an empty one, "" where there are too many blanks."""
    return bytes(memoryview(raw)[1:SMALL]).lstrip(_BLANK)[:1]


def count_ids(raw: Raw) -> Steps[int]:
    """How many token ids a list is; 0 where it is empty or anything else."""
    count = 1
    for piece in pieces(memoryview(raw)[1:-1]):
        if piece.translate(None, _ID_CHARACTERS):
            return 0
        count += piece.count(b",")
        yield
    return 0 if count == 1 and kind_of_items(raw) == b"]" else count


def first_ids(raw: Raw, most: int) -> Steps["array[int]"]:
    """The first token ids of a list of such; none where one is no id of a token."""
    found, rest = array("I"), b""
    for piece in pieces(memoryview(raw)[1:-1], _IDS_OF_STEP):
        ids, _, rest = (rest + piece).rpartition(b",")
        try:
            found.extend(_IDS(b"[%b]" % ids))
        except (msgspec.MsgspecError, OverflowError):
            return array("I")
        yield
        if len(found) >= most:
            return found[:most]
    try:
        found.extend(_IDS(b"[%b]" % rest))
    except (msgspec.MsgspecError, OverflowError):
        return array("I")
    return found


def head_of_text(raw: Raw, size: int) -> str:
    """The beginning of a text, of about so many bytes as they stand there."""
    if len(raw) <= size + 16:
        return str(_VALUE(raw))
    head = bytes(memoryview(raw)[1 : size + 16])
    while head and head[-1] & 0xC0 == 0x80:  # in the middle of a character
        head = head[:-1]
    head = head[:-1] if head and head[-1] >= 0xC0 else head
    escape = head.find(b"\\", -12)  # a pair of surrogates is twelve characters
    if escape >= 0:
        head = head[: escape + 1].rstrip(b"\\")
    return str(_VALUE(b'"%b"' % head))


def ends(raw: Raw) -> tuple[str, str]:
    """The first and the last bytes of a long value, which stand for one that is not looked into."""
    view = memoryview(raw)
    return str(view[1:129], "latin-1"), str(view[-129:-1], "latin-1")


def pieces(view: memoryview, size: int = PIECE) -> Iterator[bytes]:
    """One after the other."""
    return (bytes(view[at : at + size]) for at in range(0, len(view), size))


def at_once(steps: Steps[Result]) -> Result:
    """The result, without a turn for anything else."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
