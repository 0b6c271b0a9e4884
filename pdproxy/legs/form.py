"""Forms (multipart/form-data), such as audio comes in: of one that goes to a node unread, the model's name.

Read as a node reads it: by python-multipart, with what starlette makes of it. What is wrong with a form is the node's
to say.
"""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from pdproxy.legs.parse import LONGEST_MODEL, model_name
from pdproxy.raw_json import Steps, pieces

FORM = "multipart/form-data"
"""Its media type."""
MOST_PARTS = 2000
"""A node takes 1000 fields and 1000 files (starlette's `MultiPartParser`)."""
LONGEST_HEADER = 1024
"""Bytes of a content type, or of a part's disposition, that is looked into; to take one apart costs 1 µs a byte."""
STEP_BYTES = 64 * 1024
"""Bytes of one step: a thousand parts, in some milliseconds, and of a long part nearly nothing."""
_LONGEST_VALUE = 4 * (LONGEST_MODEL + 1)
"""Bytes of a name that are kept: enough to see that it is too long, whatever its characters are."""


def model_in_form(raw: bytes, content_type: str) -> Steps[str]:
    """The first field ``model``; "" where none comes before the form cannot be read any further.

    Raises:
        ClientError: 404 for a name that is too long to be one.
    """
    boundary = _options(content_type.encode("latin-1")).get(b"boundary")
    if boundary is None:
        return ""
    field, boundaries = _ModelField(), 0
    try:
        parser = field.parser(boundary)
        for piece in pieces(memoryview(raw), STEP_BYTES):
            boundaries += piece.count(b"\r\n--" + boundary)
            if boundaries > MOST_PARTS:
                break
            parser.write(piece)
            if field.found is not None:
                return model_name(field.found.decode("utf-8", "replace"))
            yield
    except FormParserError:
        pass
    return ""


def _options(content: bytes) -> dict[bytes, bytes]:
    """The parameters of a header; none of one that is too long."""
    return parse_options_header(content)[1] if len(content) <= LONGEST_HEADER else {}


class _ModelField:
    """Collects the value of the first field ``model`` from what the parser calls.

    Attributes:
        found: its value, once all of it is here.
    """

    def __init__(self) -> None:
        self._header = self._content = self._disposition = b""
        self._value: bytes | None = None
        self.found: bytes | None = None

    def parser(self, boundary: bytes) -> MultipartParser:
        """One that calls this."""
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._add_to_header,
                "on_header_value": self._add_to_content,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add,
                "on_part_end": self._end,
            },
        )

    def _begin(self) -> None:
        self._disposition, self._value = b"", None

    def _add_to_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_to_content(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._content
        self._header = self._content = b""

    def _end_headers(self) -> None:
        options = _options(self._disposition)
        if options.get(b"name") == b"model" and b"filename" not in options:
            self._value = b""

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._value is not None and len(self._value) < _LONGEST_VALUE:
            self._value += data[start : min(end, start + _LONGEST_VALUE)]

    def _end(self) -> None:
        if self.found is None:
            self.found = self._value
