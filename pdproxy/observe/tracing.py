"""OpenTelemetry: a span for each client request and one for each call to a node, joined by ``traceparent``.

Without tracing, the client's own ``traceparent`` is passed on to the nodes. With it, `TracedApp` wraps the clients'
application, and `transport.traced.TracedTransport` the transport.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdproxy import __version__
from pdproxy.errors import SettingsError
from pdproxy.request import Endpoint, Headers
from pdproxy.settings.model import Otel
from pdproxy.settings.types import OtelExport

_TRACE_HEADERS = ("traceparent", "tracestate")
"""Of W3C Trace Context."""

_PATHS = frozenset(Endpoint)

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Tracing:
    """The tracer, and ``close``, which sends the last spans (blocking, a few seconds at most)."""

    tracer: trace.Tracer
    close: Callable[[], None]


def tracing_of(otel: Otel) -> Tracing | None:
    """Tracing as the settings want it; None where they want none.

    Raises:
        SettingsError: it is wanted, and the packages for it are not there.
    """
    if otel.export is OtelExport.OFF:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = OTLPSpanExporter(endpoint=otel.endpoint)  # imports its HTTP client
    except ImportError as error:
        raise SettingsError(
            f"otel.export is otlp, which needs packages that are not installed here ({error}): "
            "pip install 'pdproxy[otel]', or set otel.export to off."
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": otel.service}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider.get_tracer("pdproxy", __version__), provider.shutdown)


def outward(headers: Headers, span: trace.Span) -> Headers:
    """The headers of a call to a node whose spans are to be children of ``span``."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
    return (*(field for field in headers if field[0] not in _TRACE_HEADERS), *carrier.items())


def note(facts: Mapping[str, str | int | float]) -> None:
    """Put facts on the span of the request that is being served, if there is one; their names get a prefix."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes({f"pdproxy.{name}": value for name, value in facts.items()})


@dataclasses.dataclass(frozen=True, slots=True)
class TracedApp:
    """An ASGI application with a server span around each request; its parent is the client's span, if it sent one."""

    app: App
    tracer: trace.Tracer

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        with self.tracer.start_as_current_span(
            f"{method} {path}" if path in _PATHS else method,
            context=TraceContextTextMapPropagator().extract(_trace_headers(scope)),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path},
        ) as span:
            await self.app(scope, receive, _recording(span, send))


def _trace_headers(scope: Message) -> dict[str, str]:
    pairs = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
    return {name: value for name, value in pairs if name in _TRACE_HEADERS}


def _recording(span: trace.Span, send: Send) -> Send:
    async def recording(message: Message) -> None:
        if message["type"] == "http.response.start":
            span.set_attribute("http.response.status_code", message["status"])
            if message["status"] >= 500:
                span.set_status(trace.StatusCode.ERROR)
        await send(message)

    return recording
