"""A transport that leaves a span for each call on behalf of a sampled request; a leg's call is in the leg's own."""

import dataclasses
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import msgspec
from opentelemetry import trace

from pdproxy.errors import NodeFault
from pdproxy.observe.gen_ai import Attributes
from pdproxy.observe.tracing import outward
from pdproxy.response import ChunkSink, Sink
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts, Transport


@dataclasses.dataclass(frozen=True, slots=True)
class TracedTransport:
    """See `port.Transport`. A call for no request, such as a health check, and a call for a request that is not sampled
    are sent as they are."""

    inner: Transport
    tracer: trace.Tracer

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        """As the inner transport, under a client span that lasts until the response is closed; a leg's call under the
        leg's span."""
        if request.span is not None:
            return await self._send_leg(request.span, request, timeouts)
        if not trace.get_current_span().is_recording():
            return await self.inner.send(request, timeouts)
        span = self._begin(request)
        try:
            response = await self.inner.send(_traced(request, span), timeouts)
        except BaseException as error:
            _record(span, error)
            span.end()
            raise
        span.set_attribute("http.response.status_code", response.status)
        return TracedResponse(response, span)

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _send_leg(self, span: trace.Span, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        """Send the leg; the leg records its own failures, and ends the span."""
        span.set_attributes(_attributes(request.method, request.url))
        response = await self.inner.send(_traced(request, span), timeouts)
        span.set_attribute("http.response.status_code", response.status)
        return response

    def _begin(self, request: HttpRequest) -> trace.Span:
        attributes = _attributes(request.method, request.url)
        return self.tracer.start_span(request.method, kind=trace.SpanKind.CLIENT, attributes=attributes)


class TracedResponse:
    """See `port.HttpResponse`. Faults while the body is read are recorded in the span."""

    def __init__(self, inner: HttpResponse, span: trace.Span) -> None:
        self._inner = inner
        self._pieces = aiter(inner)
        self._span = span
        self.status = inner.status
        self.headers = inner.headers

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._pieces)
        except NodeFault as fault:
            _record(self._span, fault)
            raise

    def take_whole(self) -> bytes | None:
        return self._inner.take_whole()

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        await self._inner.pipe_to(sink, chunk_sink)

    async def aclose(self) -> None:
        """Close the response, and with it the span."""
        try:
            await self._inner.aclose()
        finally:
            if self._span.is_recording():
                self._span.end()


def _traced(request: HttpRequest, span: trace.Span) -> HttpRequest:
    return msgspec.structs.replace(request, headers=outward(request.headers, span))


def _attributes(method: str, url: str) -> Attributes:
    parts = urlsplit(url)
    return {
        "http.request.method": method,
        "server.address": parts.hostname or "",
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        "url.path": parts.path,
    }


def _record(span: trace.Span, error: BaseException) -> None:
    kind = error.fault.value if isinstance(error, NodeFault) else type(error).__name__
    span.set_attribute("error.type", kind)
    span.set_status(trace.StatusCode.ERROR)
