"""Spans that the proxy records itself are exported as those that opentelemetry-sdk records."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdproxy.observe.spans import tracer_of
from tests.fakes.otlp_collector import CollectedSpan, Collector, otlp_collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as listening:
        yield listening


def tracers(url: str) -> tuple[TracerProvider, trace.Tracer, trace.Tracer]:
    """A provider, its own tracer, and ours."""
    provider, processor = TracerProvider(shutdown_on_exit=False), BatchSpanProcessor(OTLPSpanExporter(endpoint=url))
    provider.add_span_processor(processor)
    return provider, provider.get_tracer("t", "1"), tracer_of(provider, processor, "t", "1")


def record(tracer: trace.Tracer) -> None:
    """A span with all that the proxy puts on one, under a client's, and one below it that ends with a bug."""
    headers = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", "tracestate": "vendor=1"}
    above = TraceContextTextMapPropagator().extract(headers)
    span = tracer.start_span("begun", above, trace.SpanKind.SERVER, {"text": "é", "whole": 7})
    with contextlib.suppress(ValueError), trace.use_span(span, end_on_exit=True):
        tracer.start_span("below", kind=trace.SpanKind.CLIENT, attributes={"share": 0.5}).end()
        span.set_attributes({"yes": True, "words": ["a", "b"]})
        span.add_event("moved", {"to": "d1"})
        span.update_name("named")
        raise ValueError("a bug")
    span.set_attribute("late", "no")
    span.end()


def comparable(span: CollectedSpan) -> CollectedSpan:
    """Without what is another one each time."""
    events = [(name, {**facts, "exception.stacktrace": ""}) for name, facts in span.events]
    return dataclasses.replace(span, span_id="", began=0, ended=0, events=events)


def test_they_are_exported_as_the_sdk_exports_its_own(collector: Collector) -> None:
    provider, theirs, ours = tracers(collector.url)
    record(theirs)
    record(ours)
    provider.shutdown()
    below, named, own_below, own_named = collector.spans
    assert (named.name, named.parent, named.failed) == ("named", "cd" * 8, True)
    assert [own_below.parent, below.parent] == [own_named.span_id, named.span_id]
    assert comparable(own_named) == comparable(named)
    assert dataclasses.replace(comparable(own_below), parent="") == dataclasses.replace(comparable(below), parent="")
    assert own_named.began <= own_below.began <= own_below.ended <= own_named.ended


def test_a_trace_of_its_own_is_random_and_its_flags_are_the_sdk_s(collector: Collector) -> None:
    provider, theirs, ours = tracers(collector.url)
    contexts = [tracer.start_span("root").get_span_context() for tracer in (theirs, ours)]
    provider.shutdown()
    assert contexts[0].trace_id != contexts[1].trace_id
    assert contexts[0].trace_flags == contexts[1].trace_flags


def test_the_sdk_s_variables_count(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
    provider, _, ours = tracers(collector.url)
    ours.start_span("cut", attributes={"text": "long", "number": 12345}).end()
    provider.shutdown()
    assert collector.spans[0].attributes == {"text": "lon", "number": 12345}
    for variable, value in (("OTEL_TRACES_SAMPLER", "always_off"), ("OTEL_SDK_DISABLED", "true")):
        monkeypatch.setenv(variable, value)
        provider, _, ours = tracers(collector.url)
        assert not ours.start_span("left out").is_recording()
        provider.shutdown()
