"""Spans of a request and of its calls to nodes are one trace; without tracing there are none."""

import re
from collections.abc import AsyncIterator, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from pdproxy.errors import Fault, NodeFault
from pdproxy.observe.tracing import Message, Receive, Send, TracedApp, note_event, tracing_of
from pdproxy.request import Headers, header
from pdproxy.response import ChunkSink, Sink
from pdproxy.settings.model import Otel
from pdproxy.settings.types import OtelExport
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts, read_to_end
from pdproxy.transport.traced import TracedTransport

CLIENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


class Kept(SpanExporter):
    """Keeps finished spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


class Answer:
    """A node's answer; faulty where it has a fault."""

    status = 200
    headers: Headers = ()

    def __init__(self, fault: NodeFault | None) -> None:
        self.fault = fault

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"one"
        if self.fault:
            raise self.fault

    def take_whole(self) -> bytes | None:
        """Nothing: its pieces are read one by one."""
        return None

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Nodes:
    """A transport that keeps what was sent."""

    def __init__(self, refuse: NodeFault | None = None, broken: NodeFault | None = None) -> None:
        self.sent: list[HttpRequest] = []
        self.refuse = refuse
        self.broken = broken

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        self.sent.append(request)
        if self.refuse:
            raise self.refuse
        return Answer(self.broken)

    async def aclose(self) -> None:
        self.sent.clear()


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def tracer(kept: Kept) -> trace.Tracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return provider.get_tracer("test")


async def hears_nothing() -> Message:
    """ASGI's ``receive`` of a client that sends no more."""
    return {}


async def tells_nobody(message: Message) -> None:
    """ASGI's ``send``."""


async def run_app(nodes: Nodes, tracer: trace.Tracer, *headers: tuple[bytes, bytes], status: int = 200) -> None:
    """One client request that makes one call to a node."""
    transport = TracedTransport(nodes, tracer)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        sent = HttpRequest("POST", "http://node:1/v1/completions", (("traceparent", "the client's"), ("x", "y")))
        incoming = await transport.send(sent, Timeouts())
        assert await read_to_end(incoming, 10) == b"one"
        await incoming.aclose()
        await send({"type": "http.response.start", "status": status})

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": list(headers)}
    await TracedApp(app, tracer)(scope, hears_nothing, tells_nobody)


async def test_a_node_sees_a_child_of_the_clients_trace(kept: Kept, tracer: trace.Tracer) -> None:
    nodes = Nodes()
    await run_app(nodes, tracer, (b"traceparent", CLIENT.encode()), status=503)
    call, request = kept.spans
    assert call.parent is not None
    assert request.parent is not None
    assert request.context is not None
    assert call.context is not None
    assert request.name == "POST /v1/completions"
    assert request.status.status_code is trace.StatusCode.ERROR
    assert trace.format_trace_id(request.context.trace_id) == "ab" * 16
    assert trace.format_span_id(request.parent.span_id) == "cd" * 8
    assert call.parent.span_id == request.context.span_id
    told = header(nodes.sent[0].headers, "traceparent")
    assert told == f"00-{'ab' * 16}-{trace.format_span_id(call.context.span_id)}-01"
    assert [name for name, _ in nodes.sent[0].headers] == ["x", "traceparent"]


async def test_without_a_client_trace_a_new_one_begins(kept: Kept, tracer: trace.Tracer) -> None:
    await run_app(Nodes(), tracer)
    call, request = kept.spans
    assert request.parent is None
    assert call.parent is not None
    assert call.attributes is not None
    assert call.attributes["server.address"] == "node"
    assert call.attributes["http.response.status_code"] == 200


async def test_events_are_put_on_the_span_of_the_request(kept: Kept, tracer: trace.Tracer) -> None:
    note_event("moved", {"to_node": "nobody sees this"})
    with tracer.start_as_current_span("request"):
        note_event("moved", {"to_node": "d1"})
    (event,) = kept.spans[0].events
    assert (event.name, event.attributes) == ("pdproxy.moved", {"pdproxy.to_node": "d1"})


async def test_a_call_outside_of_any_trace_leaves_no_span(kept: Kept, tracer: trace.Tracer) -> None:
    nodes = Nodes()
    request = HttpRequest("GET", "http://node:1/health")
    incoming = await TracedTransport(nodes, tracer).send(request, Timeouts())
    await incoming.aclose()
    assert nodes.sent == [request]
    assert not kept.spans


async def test_faults_are_noted_and_end_the_span(kept: Kept, tracer: trace.Tracer) -> None:
    refused, stalled = NodeFault(Fault.REFUSED, "nobody"), NodeFault(Fault.STALL, "silence")
    with pytest.raises(NodeFault):
        await run_app(Nodes(refuse=refused), tracer)
    with tracer.start_as_current_span("request"):
        incoming = await TracedTransport(Nodes(broken=stalled), tracer).send(
            HttpRequest("GET", "http://n/"), Timeouts()
        )
        with pytest.raises(NodeFault):
            _ = [piece async for piece in incoming]
        await incoming.aclose()
    errors = [
        span.attributes["error.type"] for span in kept.spans if span.attributes and "error.type" in span.attributes
    ]
    assert errors == ["refused", "stall"]


@pytest.mark.parametrize("client", [b"", CLIENT[:-1].encode() + b"0", b"nonsense"])
async def test_a_request_that_is_not_sampled_is_handled_as_without_tracing(kept: Kept, client: bytes) -> None:
    provider = TracerProvider(ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    seen: list[tuple[Message, trace.SpanContext]] = []
    nodes = Nodes()

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        seen.append((scope, trace.get_current_span().get_span_context()))
        note_event("moved", {"to_node": "nobody sees this"})
        request = HttpRequest("POST", "http://node:1/v1/completions", (("traceparent", "as it is"),))
        await (await TracedTransport(nodes, provider.get_tracer("test")).send(request, Timeouts())).aclose()
        assert nodes.sent == [request]

    headers = [(b"x", b"y"), *([(b"traceparent", client)] if client else [])]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await TracedApp(app, provider.get_tracer("test"))(scope, hears_nothing, tells_nobody)
    ((passed, current),) = seen
    decided = client.startswith(b"00-")
    assert current.is_valid == decided
    assert (passed["headers"] == headers) == decided
    told = dict(passed["headers"])[b"traceparent"].decode()
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-0[02]", told)
    assert passed["headers"][0] == (b"x", b"y")
    assert len(passed["headers"]) == 2
    assert not kept.spans


async def passed_on(tracer: trace.Tracer, scope: Message) -> list[Message]:
    """The scopes that an app gets behind such a tracer."""
    seen: list[Message] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        seen.append(scope)

    await TracedApp(app, tracer)(scope, hears_nothing, tells_nobody)
    return seen


async def test_an_sdk_that_is_disabled_adds_no_header() -> None:
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    assert await passed_on(trace.NoOpTracer(), scope) == [scope]


async def test_other_scopes_pass_untouched(kept: Kept, tracer: trace.Tracer) -> None:
    assert await passed_on(tracer, {"type": "lifespan"}) == [{"type": "lifespan"}]
    assert not kept.spans


def test_off_is_nothing_at_all() -> None:
    assert tracing_of(Otel(), lambda outcome, number: None) is None


def test_on_makes_spans() -> None:
    otel = Otel(export=OtelExport.OTLP, endpoint="http://127.0.0.1:9/v1/traces")
    tracing = tracing_of(otel, lambda outcome, number: None)
    assert tracing is not None
    assert tracing.tracer.start_span("x").get_span_context().is_valid  # never ended, so never sent
    tracing.close()
