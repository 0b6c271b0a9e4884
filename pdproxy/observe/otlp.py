"""Spans as OTLP has them: the protobuf messages of ``opentelemetry.proto.trace.v1``, field by field.

The official encoder makes objects of each attribute. Here an attribute is bytes, and those that come again and again
are kept: nearly all names, and most values. What is written is the same, byte for byte: `tests/observe/test_otlp.py`.
"""

import functools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from opentelemetry.trace import SpanKind, Status
from opentelemetry.util.types import AttributeValue

from pdproxy.observe.gen_ai import CommonAttributes
from pdproxy.observe.spans import UNSET, RecordedSpan, SpanEvent

_MOST_KEPT = 2048
"""Pieces whose bytes are kept: the last ones used."""
# Tags of fields, number << 3 | wire type; and fields that are always the same.
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"
_TIMES = struct.Struct("<BQBQ")
_START, _END, _EVENT_TIME = 7 << 3 | 1, 8 << 3 | 1, 1 << 3 | 1
_DOUBLE, _DOUBLE_TAG = struct.Struct("<d"), b"\x21"
_NO_STATUS = b"\x7a\x00"
_PARENT_HERE, _PARENT_REMOTE = b"\x85\x01\x00\x01\x00\x00", b"\x85\x01\x00\x03\x00\x00"
"""`SpanFlags`: it is known whether the parent is in another process, and it is not, or it is."""


class Origin(NamedTuple):
    """What all spans of a process have in common: fields of ``ResourceSpans``, and of ``ScopeSpans``."""

    resource: bytes
    schema_url: bytes
    scope: bytes


def encode_origin(attributes: Mapping[str, AttributeValue], schema_url: str, scope: str, version: str) -> Origin:
    """``attributes``: of the resource, which is this process; ``scope``: the name of what makes the spans."""
    resource = _delimited(1, _attributes(1, attributes))
    return Origin(resource, _text(3, schema_url), _delimited(1, _text(1, scope) + _text(2, version)))


def encode_request(origin: Origin, spans: Iterable[bytes]) -> bytes:
    """An ``ExportTraceServiceRequest`` with spans as `encode_span` writes them."""
    scope_spans = _delimited(2, b"".join((origin.scope, *spans)))
    return _delimited(1, origin.resource + scope_spans + origin.schema_url)


def encode_span(span: RecordedSpan) -> bytes:
    """A span that has ended, as a field of ``ScopeSpans``."""
    (trace_id, span_id, _, _, state, _), parent = span.context, span.parent
    fields = [
        _TRACE_ID,
        trace_id.to_bytes(16, "big"),
        _SPAN_ID,
        span_id.to_bytes(8, "big"),
        _text(3, state.to_header()) if state else b"",
        b"" if parent is None else _PARENT_ID + parent.span_id.to_bytes(8, "big"),
        _name_and_kind(span.name, span.kind),
        _TIMES.pack(_START, span.start_time, _END, span.end_time or 0),
        *[_common(attributes) for attributes in span.common],
        _span_attributes(span.attributes),
        _number(10, span.dropped_attributes) if span.dropped_attributes else b"",
        b"".join([_delimited(11, _event(event)) for event in span.events]) if span.events else b"",
        _number(12, span.dropped_events) if span.dropped_events else b"",
        _NO_STATUS if span.status is UNSET else _status(span.status),
        _PARENT_HERE if parent is None or not parent.is_remote else _PARENT_REMOTE,
    ]
    return _delimited(2, b"".join(fields))


@functools.lru_cache(_MOST_KEPT)
def _name_and_kind(name: str, kind: SpanKind) -> bytes:
    return _text(5, name) + _number(6, kind.value + 1)


@functools.lru_cache(_MOST_KEPT)
def _common(attributes: CommonAttributes) -> bytes:
    return _span_attributes(attributes)


def _event(event: SpanEvent) -> bytes:
    time = struct.pack("<BQ", _EVENT_TIME, event.timestamp)
    return time + _text(2, event.name) + _attributes(3, event.attributes)


def _status(status: Status) -> bytes:
    code = status.status_code.value
    return _delimited(15, _text(2, status.description or "") + (_number(3, code) if code else b""))


def _span_attributes(attributes: Mapping[str, AttributeValue]) -> bytes:
    """As `_attributes` in field 9, from pieces that are kept. No text is: a client could have sent it."""
    pieces: list[bytes] = []
    for key, value in attributes.items():
        if isinstance(value, str):
            text = value.encode("utf-8", "replace")
            pieces += _text_head(key, len(text)), text
        elif isinstance(value, float):
            pieces += _double_head(key), _DOUBLE.pack(value)
        elif isinstance(value, int):
            pieces.append(_whole_number(key, value))
        else:
            pieces.append(_attribute(9, key, value))
    return b"".join(pieces)


@functools.lru_cache(_MOST_KEPT)
def _text_head(key: str, length: int) -> bytes:
    """All of an attribute but its text of so many bytes, which comes last."""
    return _attribute(9, key, " " * length)[:-length] if length else _attribute(9, key, "")


@functools.lru_cache(_MOST_KEPT)
def _double_head(key: str) -> bytes:
    """All of an attribute but its number, which comes last."""
    return _attribute(9, key, 0.0)[: -_DOUBLE.size]


@functools.lru_cache(_MOST_KEPT, typed=True)  # True is another value than 1
def _whole_number(key: str, value: int) -> bytes:
    return _attribute(9, key, value)


def _attributes(field: int, attributes: Mapping[str, AttributeValue]) -> bytes:
    """Each as a ``KeyValue`` in this field."""
    return b"".join([_attribute(field, key, value) for key, value in attributes.items()])


def _attribute(field: int, key: str, value: AttributeValue) -> bytes:
    return _delimited(field, _text(1, key) + _delimited(2, _value(value)))


def _value(value: AttributeValue) -> bytes:
    """The field of an ``AnyValue``. Half a surrogate pair, which JSON can hold and protobuf cannot, becomes ``?``."""
    match value:
        case str():
            return _delimited(1, value.encode("utf-8", "replace"))
        case bool():
            return b"\x10\x01" if value else b"\x10\x00"
        case int():
            return b"\x18" + _varint(value)
        case float():
            return _DOUBLE_TAG + _DOUBLE.pack(value)
        case bytes():
            return _delimited(7, value)
        case Sequence():
            return _delimited(5, b"".join([_delimited(1, _value(each)) for each in value]))
        case Mapping():
            return _delimited(6, _attributes(1, value))
        case None:
            return b""


def _text(field: int, text: str) -> bytes:
    return _delimited(field, text.encode("utf-8", "replace")) if text else b""


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _delimited(field: int, content: bytes) -> bytes:
    return _tag_and_length(field, len(content)) + content


@functools.lru_cache(_MOST_KEPT)
def _tag_and_length(field: int, length: int) -> bytes:
    return _varint(field << 3 | 2) + _varint(length)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; of a negative number its two's complement of 64 bits."""
    left, encoded = number & (1 << 64) - 1, bytearray()
    while left > 127:
        encoded.append(left & 127 | 128)
        left >>= 7
    encoded.append(left)
    return bytes(encoded)
