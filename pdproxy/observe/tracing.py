"""OpenTelemetry: a span for each client request and one for each call to a node, joined by ``traceparent``.

Without tracing, the client's own ``traceparent`` is passed on to the nodes, and log lines show its trace. With tracing,
`TracedApp` makes the span of a request, `leg_span` those of its legs, and `transport.traced.TracedTransport` those of
other calls. The sampler is asked once for each request. A request that it does not choose is handled as without
tracing, and has no spans; if its client sent no ``traceparent``, the nodes get one that says "not sampled".

A leg's span begins before its call and ends with the leg, which may be long after its response's head. The call carries
the span: it sends the span's ``traceparent``, and gets no span of its own.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdproxy.errors import Fault, SettingsError
from pdproxy.observe.gen_ai import ERROR_TYPE, operation_attributes, span_name, usage_attributes
from pdproxy.observe.labels import Leg, SpanOutcome
from pdproxy.request import Endpoint, Headers
from pdproxy.settings.model import Otel
from pdproxy.settings.types import OtelExport
from pdproxy.usage import Usage

_TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers of W3C Trace Context."""
LONGEST_KEPT = 512
"""Characters of a client's words that a span keeps until it is sent; a longer ``tracestate`` may be dropped (W3C)."""

_PATHS = frozenset(Endpoint)
_NO_CONTEXT = Context()
_PROPAGATOR = TraceContextTextMapPropagator()

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Tracing:
    """The tracer, and ``close``, which sends the last spans (blocking, a few seconds at most)."""

    tracer: trace.Tracer
    close: Callable[[], None]


def tracing_of(otel: Otel, count: Callable[[SpanOutcome, int], None]) -> Tracing | None:
    """Tracing as the settings want it; None where they want none. ``count``: told what becomes of spans.

    Raises:
        SettingsError: it is wanted, and the packages for it are not there, or a variable for it cannot be used.
    """
    if otel.export is OtelExport.OFF:
        return None
    try:
        from pdproxy.observe.span_export import exporting
    except ImportError as error:
        raise SettingsError(
            f"otel.export is otlp, which needs packages that are not installed here ({error}): "
            "pip install 'pdproxy[otel]', or set otel.export to off."
        ) from error
    return Tracing(*exporting(otel, count))


def outward(headers: Headers, span: trace.Span) -> Headers:
    """The headers of a call to a node whose spans are to be children of ``span``."""
    ids = span.get_span_context()
    kept = [field for field in headers if field[0] not in _TRACE_HEADERS]
    if not ids.is_valid:
        return tuple(kept)
    kept.append(("traceparent", _traceparent(ids)))
    return (*kept, ("tracestate", ids.trace_state.to_header())) if ids.trace_state else tuple(kept)


def note_event(name: str, facts: Mapping[str, str | int | float]) -> None:
    """Put an event of this moment on the span of the request that is being served, if there is one; its name and those
    of the facts get a prefix."""
    span = trace.get_current_span()
    if span.is_recording():
        span.add_event(f"pdproxy.{name}", {f"pdproxy.{fact}": value for fact, value in facts.items()})


def trace_ids() -> dict[str, str]:
    """The ids of the current span, for a log line; empty outside of any trace."""
    span = trace.get_current_span()
    if span is trace.INVALID_SPAN or not (ids := span.get_span_context()).is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(ids.trace_id), "span_id": trace.format_span_id(ids.span_id)}


class LegSpan:
    """The span of one leg, and of the call that opens it (`transport.port.HttpRequest.span`); `end` ends it.

    Attributes:
        span: the span itself.
    """

    __slots__ = ("span",)

    def __init__(self, span: trace.Span) -> None:
        self.span = span

    def note(self, facts: Mapping[str, str | int | bool]) -> None:
        """Further facts about the leg; their names get a prefix."""
        self.span.set_attributes({f"pdproxy.{name}": value for name, value in facts.items()})

    def set_usage(self, usage: Usage) -> None:
        """The tokens that the node reports of this leg."""
        self.span.set_attributes(usage_attributes(usage))

    def failed(self, fault: Fault) -> None:
        """The leg failed."""
        self.span.set_attribute(ERROR_TYPE, fault.value)
        self.span.set_status(trace.StatusCode.ERROR)

    def end(self) -> None:
        """The leg is over. Idempotent."""
        if self.span.is_recording():
            self.span.end()


def leg_span(
    tracer: trace.Tracer, leg: Leg, endpoint: Endpoint, model: str, label: str, facts: Mapping[str, str | int | bool]
) -> LegSpan:
    """The span of a leg that begins now, under the request's span; ``label``: the model if nodes serve it, else "".

    ``facts`` are told with a prefix.
    """
    own = {"pdproxy.leg": leg.value, **{f"pdproxy.{name}": value for name, value in facts.items()}}
    attributes = {**operation_attributes(endpoint, model), **own}
    return LegSpan(tracer.start_span(span_name(endpoint, label), kind=trace.SpanKind.CLIENT, attributes=attributes))


@dataclasses.dataclass(frozen=True, slots=True)
class TracedApp:
    """An ASGI application with a server span around each request that is sampled; its parent is the client's span, if
    the client sent one.

    Around any other request, the client's own span is the current one.
    """

    app: App
    tracer: trace.Tracer | None

    def __call__(self, scope: Message, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self.app(scope, receive, send)
        above = _PROPAGATOR.extract(_trace_headers(scope)) if _has_trace(scope) else _NO_CONTEXT
        if self.tracer is not None:
            # No attributes yet: they would be for nothing where the span is not sampled.
            span = self.tracer.start_span(_first_name(scope), context=above, kind=trace.SpanKind.SERVER)
            if span.is_recording():
                return self._traced(span, scope, receive, send)
            if not above:
                return self.app(_with_trace_header(scope, span), receive, send)
        return self._within(above, scope, receive, send) if above else self.app(scope, receive, send)

    async def _within(self, clients: Context, scope: Message, receive: Receive, send: Send) -> None:
        token = context.attach(clients)
        try:
            await self.app(scope, receive, send)
        finally:
            context.detach(token)

    async def _traced(self, span: trace.Span, scope: Message, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        span.set_attributes({"http.request.method": method, "url.path": path[:LONGEST_KEPT], **_server(scope)})
        with trace.use_span(span, end_on_exit=True):
            await self.app(scope, receive, _recording(span, send))


def _first_name(scope: Message) -> str:
    """The name of a request's span until its body is understood."""
    method, path = scope["method"], scope["path"]
    return f"{method} {path}" if path in _PATHS else method


def _with_trace_header(scope: Message, span: trace.Span) -> Message:
    """A scope as if the client had sent the ``traceparent`` of this span, which is not sampled."""
    ids = span.get_span_context()
    if not ids.is_valid:
        return scope
    headers = [field for field in scope["headers"] if field[0] not in (b"traceparent", b"tracestate")]
    return {**scope, "headers": [*headers, (b"traceparent", _traceparent(ids).encode())]}


def _traceparent(ids: trace.SpanContext) -> str:
    return f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"


def _server(scope: Message) -> dict[str, str | int]:
    """The address that the client reached, as the server knows it."""
    host, port = scope.get("server") or (None, None)
    return {} if host is None else {"server.address": host, **({} if port is None else {"server.port": port})}


def _has_trace(scope: Message) -> bool:
    return b"traceparent" in dict(scope["headers"])


def _trace_headers(scope: Message) -> dict[str, str]:
    pairs = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
    return {name: value for name, value in pairs if name in _TRACE_HEADERS and len(value) <= LONGEST_KEPT}


def _recording(span: trace.Span, send: Send) -> Send:
    def recording(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            span.set_attribute("http.response.status_code", message["status"])
            if message["status"] >= 500:
                span.set_status(trace.StatusCode.ERROR)
        return send(message)  # what it returns is awaited by the caller: a stream sends for each of its tokens

    return recording
