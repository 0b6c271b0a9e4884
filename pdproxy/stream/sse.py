"""Server-sent events, framed sans-IO: bytes in, whole events out, nothing changed.

The grammar is WHATWG HTML's "server-sent events": lines end in LF, CRLF or CR, an empty line ends an event, a line
that begins with a colon is a comment.
"""

import dataclasses
import re

EVENT_BYTES = 64 * 1024 * 1024
"""The longest event that is buffered; log-probabilities of a long prompt fit."""
_END = re.compile(rb"\r\n\r\n|\r\n\n|\r\n\r(?!\n)|\n\r\n|\n\n|\n\r(?!\n)|\r\r\n|\r\n|\r\r|\r|\n")
_LINE = re.compile(rb"\r\n|\r|\n")


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event or comment block.

    Attributes:
        raw: the bytes as they came, the empty line at their end included.
        name: the ``event`` field, empty where there is none.
        data: the ``data`` lines joined by LF; None where there are none (a comment, a keep-alive).
    """

    raw: bytes
    name: bytes = b""
    data: bytes | None = None


class EventTooLong(ValueError):
    """An event grew beyond `EVENT_BYTES`."""
