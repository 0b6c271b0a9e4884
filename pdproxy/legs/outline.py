"""The outline of a prompt for planning: about how many tokens it has, whether it holds media, and how it begins.

All of it is taken from raw JSON. Values of up to `raw_json.SMALL` bytes are decoded and measured; long ones are gone
through in steps, and of what they hold at most `MOST_BYTES` are kept. So neither a long prompt nor one of millions of
values keeps others from the event loop, or takes memory beyond its own bytes.
"""

from array import array

import msgspec
from msgspec import Raw

from pdproxy.legs.prompt_text import MOST_BYTES, MOST_IDS, MOST_PARTS, abridged, field_part, message_part
from pdproxy.raw_json import (
    LIST,
    MOST_ITEMS,
    OBJECT,
    SMALL,
    TEXT,
    Steps,
    TooManyFieldsError,
    at_once,
    count_ids,
    ends,
    fields_of,
    first_byte,
    first_ids,
    first_items,
    head_of_text,
    kind_of_items,
    pieces,
    value_of,
)
from pdproxy.request import Json, PromptText

MEDIA = frozenset(
    {"image", "image_url", "image_embeds", "input_image", "audio_url", "input_audio", "audio_embeds", "video_url"}
)
NO_TEXT = MEDIA | {"source", "file", "file_data"}
"""Fields that hold media: their length has nothing to do with their number of tokens."""
BYTES_PER_TOKEN = 4
"""UTF-8 bytes that a token stands for, in prose; of code and rare scripts it stands for fewer."""
PROMPT_FIELDS = ("prompt", "tools", "system", "instructions", "messages", "input")
"""The fields that a prompt is rendered from, in the order in which templates render them."""
LONG_AT_ONCE = 4
"""Long prompts that are read at once."""
_CONVERSATIONS = ("messages", "input")
_STEP_BYTES = 128 * 1024
"""The most bytes that one step decodes: about a millisecond."""
_ITEM_BYTES = 256
"""To go through an item takes as long as to decode so many bytes."""
_DEPTH = 5
"""How deep texts lie in messages: message, content, part, text. Each level is gone through once more, so that a bound
is needed: what lies deeper is not looked at."""


class PromptFacts(msgspec.Struct, frozen=True):
    """Facts of a prompt that planning needs.

    Attributes:
        tokens: about how many: token ids are counted, text goes by its length, media count nothing.
        media: the messages hold anything but text.
        text: of the prompt, from which marks are made.
    """

    tokens: int
    media: bool = False
    text: PromptText | None = None


def facts_of(body: Json) -> PromptFacts:
    """The facts of a body's prompt, found out at once."""
    small = small_facts(body)
    return at_once(long_facts(body)) if small is None else small


def small_facts(body: Json) -> PromptFacts | None:
    """The facts of a prompt that is decoded to be looked at; None for any other."""
    fields: dict[str, object] = {}
    text_bytes, media = 0, False
    for name in filter(body.__contains__, PROMPT_FIELDS):
        fields[name] = value = value_of(body[name])
        if isinstance(value, Raw):
            return None
        if name == "messages":
            media = _has_media(value)
        elif name == "prompt" and isinstance(value, list) and value and isinstance(value[0], int):
            return PromptFacts(len(value), text=PromptText([], fields=fields))
        text_bytes += text_length(value)
    return PromptFacts(-(-text_bytes // BYTES_PER_TOKEN), media, PromptText([], fields=fields))


def long_facts(body: Json) -> Steps[PromptFacts]:
    ids = body.get("prompt")
    count = yield from _id_count(ids)
    if count:
        long = isinstance(ids, Raw) and len(ids) > SMALL
        first = (yield from first_ids(ids, MOST_IDS)) if long and isinstance(ids, Raw) else array("I")
        return PromptFacts(count, text=PromptText([], first) if long else None)
    outliner = Outliner()
    for name in PROMPT_FIELDS:
        if name in body:
            yield from outliner.look_at(name, value_of(body[name]))
    return PromptFacts(-(-outliner.text_bytes // BYTES_PER_TOKEN), outliner.media, PromptText(outliner.parts))


def _id_count(prompt: object) -> Steps[int]:
    if isinstance(prompt, Raw):
        kind = kind_of_items(prompt) if first_byte(prompt) == LIST else b""
        return (yield from count_ids(prompt)) if kind.isdigit() else 0
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else 0


def text_length(value: object) -> int:
    """Bytes of all texts within a value in UTF-8, without media. No recursion: clients choose the depth."""
    if isinstance(value, str) and value.isascii():
        return len(value)
    length, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            length += len(item) if item.isascii() else len(item.encode("utf-8", "surrogatepass"))
        elif isinstance(item, dict):
            plain = NO_TEXT.isdisjoint(item)
            left += item.values() if plain else [inner for key, inner in item.items() if key not in NO_TEXT]
        elif isinstance(item, list):
            left += item
    return length


def _has_media(messages: object) -> bool:
    return isinstance(messages, list) and any(map(is_media_message, messages))


def is_media_message(message: object) -> bool:
    """Whether a message holds anything but text."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(not _is_text(part) for part in content)


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and "text" in part and not MEDIA & part.keys())


class Outliner:
    """Goes through the fields of a long prompt, one after the other.

    Attributes:
        text_bytes: of the texts so far, in UTF-8, about.
        media: there were messages that hold anything but text.
        parts: what later prompts of the same conversation begin with, as `prompt_text.prompt_parts`.
    """

    def __init__(self) -> None:
        self.text_bytes = 0
        self.media = False
        self.parts: list[bytes] = []
        self._left = MOST_BYTES
        """Bytes of all parts together that are still kept."""
        self._room = MOST_BYTES
        """Bytes of JSON that are decoded and kept until the part that they belong to is made of them."""

    def look_at(self, name: str, value: object) -> Steps[None]:
        """The next field."""
        conversation = name in _CONVERSATIONS
        if isinstance(value, Raw) and conversation and first_byte(value) == LIST:
            yield from self._conversation(value)
            return
        self._room = MOST_BYTES
        whole = (yield from self._outline(value, _DEPTH)) if isinstance(value, Raw) else self._measured(value)
        if name == "messages":
            self.media = self.media or _has_media(whole)
        if name == "prompt" and isinstance(whole, str):
            self._add(whole.encode("utf-8", "surrogatepass"))
        elif conversation:
            for message in whole if isinstance(whole, list) else [whole] if whole else ():
                self._add(message_part(message))
        elif name != "prompt" and whole:
            self._add(field_part(name, whole))

    def _conversation(self, raw: Raw) -> Steps[None]:
        items = first_items(raw)
        yield
        step = seen = 0
        for item in items:
            seen += len(item)
            if step > _STEP_BYTES:
                step = 0
                yield
            step += len(item) + _ITEM_BYTES
            self._room = MOST_BYTES
            message = yield from self._outline(item, _DEPTH)
            self.media = self.media or is_media_message(message)
            self._add(message_part(message))
        if len(items) == MOST_ITEMS:  # what follows was not looked at
            self.text_bytes += max(0, len(raw) - seen)
            self.media = True

    def _add(self, part: bytes) -> None:
        if self._left > 0 and len(self.parts) < MOST_PARTS:
            self.parts.append(part[: self._left])
            self._left -= len(part)

    def _outline(self, raw: Raw, depth: int) -> Steps[object]:
        """A value as a parser would give it, of bounded size."""
        if len(raw) <= SMALL:
            return self._measured(value_of(raw), len(raw))
        yield
        begin = first_byte(raw)
        if begin == TEXT:
            return (yield from self._text(raw))
        if depth and begin == LIST:
            return (yield from self._list(raw, depth - 1))
        if depth and begin == OBJECT:
            return (yield from self._dict(raw, depth - 1))
        return _abridged(raw)

    def _measured(self, value: object, size: int = 0) -> object:
        """The value, or what stands for it where there is no room to keep more; its texts are counted."""
        self.text_bytes += text_length(value)
        self._room -= size
        if self._room > 0:
            return value
        return "" if isinstance(value, str) else {}

    def _text(self, raw: Raw) -> Steps[str]:
        escapes = unicode = 0
        for piece in pieces(memoryview(raw)):
            escapes += piece.count(b"\\")
            unicode += piece.count(b"\\u") if escapes else 0
            yield
        # \n is one byte, and \u0434 mostly two
        self.text_bytes += len(raw) - 2 - escapes - 3 * unicode
        wanted = min(self._left, self._room)
        self._room -= len(raw)
        return head_of_text(raw, 3 * wanted if escapes else wanted) if wanted > 0 else ""

    def _list(self, raw: Raw, depth: int) -> Steps[list[object]]:
        outlines: list[object] = []
        step = 0
        for item in first_items(raw):
            if step > _STEP_BYTES:
                step = 0
                yield
            step += len(item) + _ITEM_BYTES
            outlines.append((yield from self._outline(item, depth)))
        return outlines

    def _dict(self, raw: Raw, depth: int) -> Steps[object]:
        try:
            fields = yield from fields_of(raw)
        except TooManyFieldsError:
            return _abridged(raw)
        outlines: dict[str, object] = {}
        for name, value in fields.items():
            yield
            known = name in NO_TEXT
            outlines[name] = _abridged(value) if known else (yield from self._outline(value, depth))
        return outlines


def _abridged(raw: Raw) -> str:
    """In the place of media, and of what is not looked at."""
    begin, end = ends(raw)
    return abridged(begin, end, len(raw) - 2)
