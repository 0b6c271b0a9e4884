"""Fields of a client's body that are too long for the event loop to parse: their JSON goes to the nodes as it came."""

from array import array
from collections.abc import Sequence

import msgspec


class LargeValue:
    """A prompt, or the messages that one is rendered from, and what the proxy needs to know of it.

    `legs.large` makes it; `request.write_json` writes it, which would write a dataclass field by field.

    Attributes:
        raw: its JSON; a view of the body.
        outline: its beginning as a parser would give it: a text, messages, or token ids. Media in it are replaced.
        text_bytes: the length of its texts in UTF-8, about; media count nothing.
        ids: how many token ids it is; 0 where it is something else.
        media: some of its messages hold anything but text.
    """

    __slots__ = ("ids", "media", "outline", "raw", "text_bytes")

    def __init__(
        self,
        raw: msgspec.Raw,
        outline: "str | list[object] | array[int]",
        *,
        text_bytes: int = 0,
        ids: int = 0,
        media: bool = False,
    ) -> None:
        self.raw = raw
        self.outline = outline
        self.text_bytes = text_bytes
        self.ids = ids
        self.media = media


def outline_of(value: object) -> object:
    """The value itself, where it was parsed; else its beginning."""
    return value.outline if isinstance(value, LargeValue) else value


def json_of(value: object) -> msgspec.Raw:
    """For JSON encoders: what a value that they do not know is written as; raises TypeError for other kinds."""
    if isinstance(value, LargeValue):
        return value.raw
    if isinstance(value, msgspec.Raw):
        return value
    raise TypeError(f"{type(value).__name__} is no JSON value")


class IdList:
    """The token ids of a long prompt as a node tells them: JSON without brackets, of which nothing is parsed."""

    __slots__ = ("_joined",)

    def __init__(self, joined: memoryview) -> None:
        self._joined = joined

    def __len__(self) -> int:
        """Counted when it is asked: of the streams of long prompts, few ever move."""
        return bytes(self._joined).count(b",") + 1

    def followed_by(self, ids: Sequence[int]) -> LargeValue:
        """The prompt that goes on with these ids."""
        more = msgspec.json.encode(ids)[1:-1]
        raw = msgspec.Raw(b"[%b]" % b",".join(filter(None, (self._joined, more))))
        return LargeValue(raw, array("I"), ids=len(self) + len(ids))
