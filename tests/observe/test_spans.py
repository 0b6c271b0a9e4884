"""Spans that the proxy records and exports itself are those that opentelemetry-sdk would."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdproxy.observe.span_export import exporting
from tests.fakes.otlp_collector import CollectedSpan, Collector, otlp_collector


class Both(NamedTuple):
    """A tracer of the SDK's and one of ours, whose spans go to one collector when they are closed."""

    theirs: trace.Tracer
    ours: trace.Tracer
    close: Callable[[], None]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as listening:
        yield listening


def tracers(url: str) -> Both:
    resource = Resource.create({"service.name": "edge"})
    provider = TracerProvider(shutdown_on_exit=False, resource=resource)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=url)))
    ours, close = exporting(url, "edge", lambda outcome, number: None)

    def close_both() -> None:
        provider.shutdown()
        close()

    return Both(provider.get_tracer("t", "1"), ours, close_both)


def under(traceparent: str) -> Context:
    """The context of a client's span."""
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent, "tracestate": "vendor=1"})


def record(tracer: trace.Tracer) -> None:
    """A span with all that the proxy puts on one, under a client's, and one below it that ends with a bug."""
    above = under("00-" + "ab" * 16 + "-" + "cd" * 8 + "-01")
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
    both = tracers(collector.url)
    record(both.theirs)
    record(both.ours)
    both.close()
    below, named, own_below, own_named = collector.spans
    assert (named.name, named.parent, named.failed) == ("named", "cd" * 8, True)
    assert [own_below.parent, below.parent] == [own_named.span_id, named.span_id]
    assert comparable(own_named) == comparable(named)
    assert dataclasses.replace(comparable(own_below), parent="") == dataclasses.replace(comparable(below), parent="")
    assert own_named.began <= own_below.began <= own_below.ended <= own_named.ended
    assert collector.services == {"edge"}


@pytest.mark.parametrize(("client", "flags"), [("", 3), ("01", 1), ("03", 3), ("00", 0), ("02", 2)])
def test_flags_are_the_sdk_s_a_new_trace_is_sampled_and_random(collector: Collector, client: str, flags: int) -> None:
    both = tracers(collector.url)
    above = under(f"00-{'ab' * 16}-{'cd' * 8}-{client}") if client else None
    for tracer in (both.theirs, both.ours):
        with trace.use_span(tracer.start_span("root", above)) as root:
            contexts = [root.get_span_context(), tracer.start_span("below").get_span_context()]
        assert [each.trace_flags for each in contexts] == [flags, flags]
        assert contexts[0].trace_id == contexts[1].trace_id
        assert contexts[0].span_id != contexts[1].span_id
        assert root.is_recording() == bool(flags & 1)
    both.close()


@pytest.mark.parametrize(
    ("variables", "sampled"),
    [
        ({"OTEL_TRACES_SAMPLER": "always_off"}, (False, False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, (False, True)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, (False, True)),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1"}, (True, True)),
        ({"OTEL_SDK_DISABLED": "true"}, (False, False)),
    ],
)
def test_the_sdk_s_variables_say_which_requests_are_traced(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sampled: tuple[bool, bool]
) -> None:
    """Without a client's trace, and with one that is sampled."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    both = tracers(collector.url)
    above = under(f"00-{'ab' * 16}-{'cd' * 8}-01")
    for tracer in (both.theirs, both.ours):
        for context, wanted in zip((None, above), sampled, strict=True):
            with trace.use_span(tracer.start_span("root", context), end_on_exit=True) as root:
                assert root.is_recording() == tracer.start_span("below").is_recording() == wanted
    both.close()


def test_the_sdk_s_limits_count(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2")
    both = tracers(collector.url)
    for tracer in (both.theirs, both.ours):
        tracer.start_span("cut", attributes={"first": 1, "text": "long", "number": 12345}).end()
    both.close()
    assert [span.attributes for span in collector.spans] == [{"text": "lon", "number": 12345}] * 2


def test_variables_name_the_process(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    assert "OTEL_RESOURCE_ATTRIBUTES" in os.environ
    both = tracers(collector.url)
    record(both.theirs)
    record(both.ours)
    both.close()
    theirs, ours = collector.resources[0], collector.resources[-1]
    assert theirs == ours
    assert ours["deployment.environment"] == "test"
