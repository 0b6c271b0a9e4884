"""A transport that leaves a span for each call made on behalf of a traced request."""

import dataclasses
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from opentelemetry import trace

from pdproxy.errors import NodeFault
from pdproxy.observe.tracing import outward
from pdproxy.response import Sink
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts, Transport


@dataclasses.dataclass(frozen=True, slots=True)
class TracedTransport:
    """See `port.Transport`. A call outside of any trace, such as a health check, leaves no span."""

    inner: Transport
    tracer: trace.Tracer

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        """As the inner transport, under a client span that lasts until the response is closed."""
        if not trace.get_current_span().get_span_context().is_valid:
            return await self.inner.send(request, timeouts)
        span = self._begin(request)
        try:
            traced = dataclasses.replace(request, headers=outward(request.headers, span))
            response = await self.inner.send(traced, timeouts)
        except BaseException as error:
            _record(span, error)
            span.end()
            raise
        span.set_attribute("http.response.status_code", response.status)
        return TracedResponse(response, span)

    async def aclose(self) -> None:
        await self.inner.aclose()

    def _begin(self, request: HttpRequest) -> trace.Span:
        parts = urlsplit(request.url)
        attributes: dict[str, str | int] = {
            "http.request.method": request.method,
            "server.address": parts.hostname or "",
            "server.port": parts.port or (443 if parts.scheme == "https" else 80),
            "url.path": parts.path,
        }
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

    async def pipe_to(self, sink: Sink) -> None:
        await self._inner.pipe_to(sink)

    async def aclose(self) -> None:
        """Close the response, and with it the span."""
        try:
            await self._inner.aclose()
        finally:
            self._span.end()


def _record(span: trace.Span, error: BaseException) -> None:
    kind = error.fault.value if isinstance(error, NodeFault) else type(error).__name__
    span.set_attribute("error.type", kind)
    span.set_status(trace.StatusCode.ERROR)
