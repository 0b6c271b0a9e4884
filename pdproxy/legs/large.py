"""Bodies that are too long to be parsed at once: read in steps between which other requests have their turn.

The time that JSON takes goes by its length and, more, by the objects that are made of it: 8 MB of messages or a
million token ids are 50 ms and more, in which no other stream moves; a thread would not help, for a parser in C keeps
the interpreter's lock. So the fields that prompts are made of stay as they are (`LargeValue`). What is made of them is
what plans need: how long they are, whether they hold media, and how they begin.

To find where messages or token ids end is one call in C, which is not divided: it takes about a millisecond for each
megabyte. Of a long text it is done in steps, too (`large_fields`).
"""

import asyncio
import contextlib
from array import array
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pdproxy.legs import parse
from pdproxy.legs.large_fields import Result, Steps, fields_of
from pdproxy.legs.parse import bad_json, check, check_commas, invalid_prompt
from pdproxy.legs.prompt_text import MOST_BYTES, MOST_IDS, MOST_PARTS, abridged
from pdproxy.legs.shape import NO_TEXT, is_media_message, text_length
from pdproxy.request import Endpoint, read_json
from pdproxy.unparsed import LargeValue

SMALL = 32 * 1024
"""Bytes up to which a part of a large body is parsed."""
STEP_BYTES, STEP_ITEMS = 256 * 1024, 256
"""What one step parses at most: about a millisecond."""
_SCAN = 1024 * 1024
"""Bytes that one step looks through without parsing them."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_IDS = msgspec.json.Decoder(list[int]).decode
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw]).decode
_LONG = ("prompt", "messages", "input")
"""Fields that are left unparsed: the ones that prompts are made of, and grow with them."""
_DEPTH = 5
"""How deep texts lie in messages: message, content, part, text. Each level is gone through once more, so that a bound
is needed: what lies deeper is not looked at."""
_ANSWER_DEPTH = 3
"""Of an answer: its fields, its choices, and the fields of those."""
_ID_CHARACTERS = b"0123456789, \n\r\t"


async def parse_in_steps(endpoint: Endpoint, raw: bytes) -> dict[str, object]:
    """As `parse.parse`, of which long prompts are `LargeValue`: for a body of more than `LARGE` bytes.

    Raises:
        ClientError: as `parse.parse`.
    """
    body = await in_turns(_large_object(raw))
    check(endpoint, body)
    return body


async def in_turns(steps: Steps[Result]) -> Result:
    """The result; between two steps everything else that waits for the event loop has its turn."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        await asyncio.sleep(0)


def partly(raw: bytes) -> Steps[object]:
    """A JSON value whose long parts are left as they are, below the fields of the items of its lists.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        return (yield from _partly(msgspec.Raw(raw.strip()), _ANSWER_DEPTH))
    except msgspec.MsgspecError:
        return read_json(raw)


def _partly(raw: msgspec.Raw, depth: int) -> Steps[object]:
    begin = bytes(memoryview(raw)[:1])
    yield
    if len(raw) <= SMALL:
        return read_json(bytes(raw))
    if depth and begin == b"{":
        fields = dict[str, object]()
        for name, value in _FIELDS(raw).items():
            fields[name] = yield from _partly(value, depth - 1)
        return fields
    if depth and begin == b"[":
        values = list[object]()
        for batch in _batches(_ITEMS(raw)):
            alone = len(batch) == 1
            values += [(yield from _partly(batch[0], depth - 1))] if alone else _parsed(batch)
            yield
        return values
    return raw


def _large_object(raw: bytes) -> Steps[dict[str, object]]:
    commas = 0
    for piece in _pieces(memoryview(raw)):
        commas += piece.count(b",")
        yield
    check_commas(commas)
    try:
        return (yield from _fields((yield from fields_of(raw))))
    except msgspec.MsgspecError:  # the standard library reads more, and says better what is wrong
        return parse.read_object(raw)
    except (RecursionError, ValueError) as error:
        raise bad_json(error) from error


def _fields(fields: Mapping[str, msgspec.Raw]) -> Steps[dict[str, object]]:
    body: dict[str, object] = {}
    for name, value in fields.items():
        yield
        long = name in _LONG and len(value) > SMALL
        body[name] = (yield from _large(name, value)) if long else read_json(bytes(value))
    return body


def _large(name: str, raw: msgspec.Raw) -> Steps[object]:
    begin = bytes(memoryview(raw)[:1])
    if begin == b'"':
        outliner = Outliner()
        text = yield from outliner.text(raw)
        yield
        return LargeValue(raw, text, text_bytes=outliner.text_bytes)
    if begin != b"[":
        return read_json(bytes(raw))
    return (yield from (_prompts(raw) if name == "prompt" else _conversation(raw)))


def _conversation(raw: msgspec.Raw) -> Steps[LargeValue]:
    outliner, kept, media = Outliner(), list[object](), False
    items = _ITEMS(raw)
    yield
    for batch in _batches(items):
        begins = outliner.left > 0 and len(kept) < MOST_PARTS
        messages = yield from outliner.batch(batch, _DEPTH)
        media = media or any(map(is_media_message, messages))
        if begins:
            kept += messages
        yield
    return LargeValue(raw, kept, text_bytes=outliner.text_bytes, media=media)


def _prompts(raw: msgspec.Raw) -> Steps[object]:
    """Token ids are one prompt; of a list of prompts each is parsed, or large."""
    count = yield from _count_ids(raw)
    if count:
        return LargeValue(raw, (yield from _first_ids(raw)), ids=count)
    first = bytes(memoryview(raw)[1:SMALL]).lstrip()[:1]
    if first not in (b'"', b"["):
        raise invalid_prompt()
    prompts = list[object]()
    for batch in _batches(_ITEMS(raw)):
        yield
        if len(batch) > 1 or len(batch[0]) <= SMALL:
            prompts += _parsed(batch)
        else:
            prompts.append((yield from _large("prompt", batch[0])))
    return prompts


def _count_ids(raw: msgspec.Raw) -> Steps[int]:
    """How many token ids a list is; 0 where it is anything else."""
    count = 1
    for piece in _pieces(memoryview(raw)[1:-1]):
        if piece.translate(None, _ID_CHARACTERS):
            return 0
        count += piece.count(b",")
        yield
    return count


def _first_ids(raw: msgspec.Raw) -> Steps["array[int]"]:
    """`MOST_IDS` of them; none where one is no id of a token."""
    found, rest, view = array("I"), b"", memoryview(raw)[1:-1]
    for piece in _pieces(view, STEP_BYTES // 4):
        ids, _, rest = (rest + piece).rpartition(b",")
        try:
            found.extend(_IDS(b"[%b]" % ids))
        except (msgspec.MsgspecError, OverflowError):
            return array("I")
        yield
        if len(found) >= MOST_IDS:
            return found[:MOST_IDS]
    with contextlib.suppress(msgspec.MsgspecError, OverflowError):
        found.extend(_IDS(b"[%b]" % rest))
    return found


class Outliner:
    """Goes through the texts of a large value.

    Attributes:
        text_bytes: of the texts so far, in UTF-8, about.
        left: of `MOST_BYTES` that are kept as the outline's text.
    """

    def __init__(self) -> None:
        self.text_bytes = 0
        self.left = MOST_BYTES

    def batch(self, batch: Sequence[msgspec.Raw], depth: int) -> Steps[list[object]]:
        """The outlines of some values: of small ones, or of one."""
        if len(batch) == 1 and len(batch[0]) > SMALL:
            return [(yield from self._outline(batch[0], depth))]
        values = _parsed(batch)
        self._add(text_length(values))
        return values

    def text(self, raw: msgspec.Raw) -> Steps[str]:
        """The outline of a long text, in quotes."""
        escapes = unicode = 0
        for piece in _pieces(memoryview(raw)):
            escapes += piece.count(b"\\")
            unicode += piece.count(b"\\u") if escapes else 0
            yield
        head = _head(raw, 3 * self.left if escapes else self.left) if self.left > 0 else ""
        # \n is one byte, and \u0434 mostly two
        self._add(len(raw) - 2 - escapes - 3 * unicode)
        return head

    def _add(self, length: int) -> None:
        self.text_bytes += length
        self.left -= length

    def _outline(self, raw: msgspec.Raw, depth: int) -> Steps[object]:
        begin = bytes(memoryview(raw)[:1])
        if begin == b'"':
            return (yield from self.text(raw))
        if depth and begin == b"[":
            return (yield from self._list(raw, depth - 1))
        if depth and begin == b"{":
            return (yield from self._dict(raw, depth - 1))
        return _ends(raw)

    def _list(self, raw: msgspec.Raw, depth: int) -> Steps[list[object]]:
        outlines = list[object]()
        for batch in _batches(_ITEMS(raw)):
            yield
            outlines += yield from self.batch(batch, depth)
        return outlines

    def _dict(self, raw: msgspec.Raw, depth: int) -> Steps[dict[str, object]]:
        outlines = dict[str, object]()
        for name, value in _FIELDS(raw).items():
            yield
            if len(value) <= SMALL:
                outlines[name] = read_json(bytes(value))
                self._add(text_length({name: outlines[name]}))
            else:
                outlines[name] = _ends(value) if name in NO_TEXT else (yield from self._outline(value, depth))
        return outlines


def _ends(raw: msgspec.Raw) -> str:
    """In the place of media, and of what is not looked at."""
    view = memoryview(raw)
    return abridged(str(view[1:129], "latin-1"), str(view[-129:-1], "latin-1"), len(raw) - 2)


def _head(raw: msgspec.Raw, size: int) -> str:
    """The beginning of a text in quotes, of about so many bytes as they stand there."""
    if len(raw) <= size + 16:
        return str(read_json(bytes(raw)))
    head = bytes(memoryview(raw)[1 : size + 16])
    while head and head[-1] & 0xC0 == 0x80:  # in the middle of a character
        head = head[:-1]
    head = head[:-1] if head and head[-1] >= 0xC0 else head
    escape = head.find(b"\\", -12)  # a pair of surrogates is twelve characters
    if escape >= 0:
        head = head[: escape + 1].rstrip(b"\\")
    return str(read_json(b'"%b"' % head))


def _parsed(batch: Sequence[msgspec.Raw]) -> list[object]:
    values: list[object] = read_json(b"[%b]" % b",".join(batch))
    return values


def _batches(items: Sequence[msgspec.Raw]) -> Iterator[Sequence[msgspec.Raw]]:
    """Neighbours that one step may parse together; one that is not small is alone."""
    begin = size = 0
    for at, item in enumerate(items):
        length = len(item)
        if at > begin and (length > SMALL or size + length > STEP_BYTES or at - begin >= STEP_ITEMS):
            yield items[begin:at]
            begin, size = at, 0
        size += length
        if length > SMALL:
            yield items[begin : at + 1]
            begin, size = at + 1, 0
    if begin < len(items):
        yield items[begin:]


def _pieces(view: memoryview, size: int = _SCAN) -> Iterator[bytes]:
    return (bytes(view[at : at + size]) for at in range(0, len(view), size))
