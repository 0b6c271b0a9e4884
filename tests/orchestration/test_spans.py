"""The spans of a stream that moves."""

import dataclasses
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.request import Endpoint
from pdproxy.transport.traced import TracedTransport
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.cluster import FakeCluster

CHAT = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 8, "stream": True, "temperature": 0}


def traced(tracer: trace.Tracer) -> FakeCluster:
    """A cluster whose legs have spans."""
    cluster = FakeCluster(decodes=2)
    transport = TracedTransport(cluster.transport, tracer)
    cluster.context = dataclasses.replace(cluster.context, tracer=tracer, transport=transport)
    cluster.orchestrator = Orchestrator(cluster.context)
    return cluster


async def spans_of_chat(fault: InjectedFault | None) -> Sequence[ReadableSpan]:
    """The spans of one chat, in the order in which they ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    cluster = traced(tracer)
    cluster.decodes[0].fault = fault
    with tracer.start_as_current_span("request"):
        got = await cluster.ask(Endpoint.CHAT, CHAT)
        assert got.body.endswith(b"data: [DONE]\n\n")
        await cluster.settle()
    return exporter.get_finished_spans()


def told(span: ReadableSpan, *names: str) -> list[object]:
    """Some attributes of a span."""
    return [(span.attributes or {}).get(name) for name in names]


def legs_among(spans: Sequence[ReadableSpan]) -> list[list[object]]:
    """Leg, node and error of each leg, in the order of their beginnings."""
    legs = [span for span in spans if "pdproxy.leg" in (span.attributes or {})]
    legs.sort(key=lambda span: span.start_time or 0)
    return [told(span, "pdproxy.leg", "pdproxy.node", "error.type") for span in legs]


async def test_each_leg_of_a_moved_stream_has_a_span_and_the_request_tells_of_all() -> None:
    usage = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.response.finish_reasons")
    whole = await spans_of_chat(None)
    moved = await spans_of_chat(InjectedFault(FaultKind.RESET, at=3))
    (root,) = (span for span in moved if span.name == "chat tiny" and span.parent is None)
    (unbroken,) = (span for span in whole if span.parent is None)
    assert told(root, *usage) == told(unbroken, *usage)
    assert None not in told(root, *usage)
    found = legs_among(moved)
    assert [leg for leg in found if leg[0] == "decode"] == [["decode", "d0", "reset"], ["decode", "d1", None]]
    assert [(leg, error) for leg, _, error in found if leg != "decode"] == [("prefill", None)] * 2
    (event,) = root.events
    assert dict(event.attributes or {}) == {
        "pdproxy.move": "resumed",
        "pdproxy.from_node": "d0",
        "pdproxy.to_node": "d1",
    }
    assert told(root, "pdproxy.moves", "pdproxy.moved", "pdproxy.route") == [1, "resumed", "disaggregated"]
