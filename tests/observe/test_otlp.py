"""Spans are written as the official encoder writes them, and its classes read them."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from pdproxy.observe.gen_ai import CommonAttributes
from pdproxy.observe.otlp import encode_origin, encode_request, encode_span
from pdproxy.observe.spans import RecordedSpan, Recorder, SpanEvent

RECORDER = Recorder(ALWAYS_ON, lambda _: None)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
PLAIN = st.one_of(TEXTS, st.booleans(), NUMBERS, st.floats(), st.binary(max_size=9), st.none())
VALUES = st.recursive(PLAIN, lambda each: st.lists(each, max_size=3) | st.dictionaries(TEXTS, each, max_size=3))
ATTRIBUTES = st.dictionaries(TEXTS.filter(bool), VALUES, max_size=6)
TIMES = st.integers(1, 2**64 - 1)
STATES = st.sampled_from([TraceState(), TraceState([("vendor", "1"), ("other", "x=y")])])
CONTEXTS = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.sampled_from([TraceFlags(1), TraceFlags(3)]),
    STATES,
)
STATUSES = st.sampled_from(
    [Status(), Status(StatusCode.OK), Status(StatusCode.ERROR), Status(StatusCode.ERROR, "why: é")]
)
ORIGIN = Resource({"service.name": "edge", "process.pid": 7, "odd": ["a", "b"]}, "https://schema")
SCOPE = InstrumentationScope("pdproxy", "1.2")


@st.composite
def spans(draw: Callable[..., Any]) -> tuple[RecordedSpan, ReadableSpan]:
    """One span, as we and as the SDK have it."""
    name, kind, parent = draw(TEXTS), draw(st.sampled_from(SpanKind)), draw(st.none() | CONTEXTS)
    span = RecordedSpan(RECORDER, name, kind, draw(CONTEXTS), parent, draw(ATTRIBUTES))
    span.start_time, span.end_time, span.status = draw(TIMES), draw(TIMES), draw(STATUSES)
    span.events = draw(st.lists(st.builds(SpanEvent, TEXTS, ATTRIBUTES, TIMES), max_size=2))
    readable = ReadableSpan(
        name,
        span.context,
        parent,
        ORIGIN,
        span.attributes,
        [Event(*event) for event in span.events],
        kind=kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=SCOPE,
    )
    return span, readable


@given(st.lists(spans(), min_size=1, max_size=3))
def test_requests_are_the_official_encoder_s_byte_for_byte(pairs: list[tuple[RecordedSpan, ReadableSpan]]) -> None:
    origin = encode_origin(ORIGIN.attributes, ORIGIN.schema_url, SCOPE.name, SCOPE.version or "")
    written = encode_request(origin, [encode_span(span) for span, _ in pairs])
    assert written == encode_spans([readable for _, readable in pairs]).SerializeToString(deterministic=True)


def read(span: RecordedSpan) -> Any:
    """What the official classes find in it."""
    request = encode_request(encode_origin({}, "", "", ""), [encode_span(span)])
    return ExportTraceServiceRequest.FromString(request).resource_spans[0].scope_spans[0].spans[0]


def a_span(limits: SpanLimits | None = None, **attributes: Any) -> RecordedSpan:
    """A root span with these attributes."""
    context = SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1))
    recorder = Recorder(ALWAYS_ON, lambda _: None, limits or SpanLimits())
    return RecordedSpan(recorder, "root", SpanKind.SERVER, context, None, attributes)


def test_attributes_that_many_spans_have_in_common_are_among_its_own() -> None:
    common = CommonAttributes({"where": "here", "port": 80})
    for number in (1, 2):
        span = a_span(number=number)
        span.set_attributes(common)
        found = {pair.key: pair.value for pair in read(span).attributes}
        assert (found["number"].int_value, found["where"].string_value, found["port"].int_value) == (number, "here", 80)


@pytest.mark.parametrize("values", [(1, True, 1.0), (True, 1.0, 1), (0, -0.0, False)])
def test_values_that_are_equal_keep_their_types(values: tuple[Any, ...]) -> None:
    kinds = {bool: "bool_value", int: "int_value", float: "double_value"}
    for value in values:
        (pair,) = read(a_span(same=value)).attributes
        assert pair.value.WhichOneof("value") == kinds[type(value)]


def test_half_a_surrogate_pair_is_a_question_mark() -> None:
    span = a_span(model="m\ud800", many=["\udfff"])
    span.update_name("n\ud800")
    model, many = read(span).attributes
    assert (read(span).name, model.value.string_value, many.value.array_value.values[0].string_value) == (
        "n?",
        "m?",
        "?",
    )


def test_what_is_over_the_limits_is_left_out_and_counted() -> None:
    span = a_span(SpanLimits(max_span_attributes=3, max_events=1, max_span_attribute_length=2), first=1, text="long")
    span.set_attributes(CommonAttributes({"common": "long"}))
    span.set_attributes({"list": ["long"]})
    for number in (1, 2):
        span.add_event(f"event {number}")
    span.end()
    found = read(span)
    assert [pair.key for pair in found.attributes] == ["first", "text", "list"]
    assert (found.dropped_attributes_count, found.dropped_events_count) == (1, 1)
    assert found.attributes[1].value.string_value == "lo"
    assert found.attributes[2].value.array_value.values[0].string_value == "lo"
    assert [event.name for event in found.events] == ["event 2"]
