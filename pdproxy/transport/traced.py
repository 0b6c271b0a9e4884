"""A transport that leaves a span for each call made on behalf of a traced request."""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from opentelemetry import trace

from pdproxy.errors import NodeFault
from pdproxy.observe.tracing import outward
from pdproxy.request import Headers
from pdproxy.response import Sink
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts, Transport


class TracedTransport:
    """See `port.Transport`. A call outside of any trace, such as a health check, leaves no span."""

    def __init__(self, inner: Transport, tracer: trace.Tracer) -> None:
        self._inner = inner
        self._tracer = tracer

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        """As the inner transport, under a client span that lasts until the answer is closed."""
        if not trace.get_current_span().get_span_context().is_valid:
            return await self._inner.send(request, timeouts)
        span = self._begin(request)
        told = HttpRequest(request.method, request.url, outward(request.headers, span), request.body)
        try:
            response = await self._inner.send(told, timeouts)
        except BaseException as error:
            _end(span, error)
            raise
        span.set_attribute("http.response.status_code", response.status)
        return TracedResponse(response, span)

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()

    def _begin(self, request: HttpRequest) -> trace.Span:
        parts = urlsplit(request.url)
        attributes: dict[str, str | int] = {
            "http.request.method": request.method,
            "server.address": parts.hostname or "",
            "server.port": parts.port or (443 if parts.scheme == "https" else 80),
            "url.path": parts.path,
        }
        return self._tracer.start_span(request.method, kind=trace.SpanKind.CLIENT, attributes=attributes)


class TracedResponse:
    """See `port.HttpResponse`."""

    def __init__(self, inner: HttpResponse, span: trace.Span) -> None:
        self._inner = inner
        self._span = span

    @property
    def status(self) -> int:
        return self._inner.status

    @property
    def headers(self) -> Headers:
        return self._inner.headers

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; a fault is noted."""
        return _Noting(self._inner.chunks(), self._span)

    async def pipe_to(self, sink: Sink) -> None:
        """As the inner answer."""
        await self._inner.pipe_to(sink)

    async def read(self, limit: int) -> bytes:
        """The whole body; a fault is noted."""
        try:
            return await self._inner.read(limit)
        except NodeFault as fault:
            _note(self._span, fault)
            raise

    async def aclose(self) -> None:
        """Close the answer, and with it the span."""
        try:
            await self._inner.aclose()
        finally:
            self._span.end()


class _Noting:
    """Not a generator: that would be over once a read of it was cancelled, and look like the body's end."""

    def __init__(self, pieces: AsyncIterator[bytes], span: trace.Span) -> None:
        self._pieces = pieces
        self._span = span

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._pieces)
        except NodeFault as fault:
            _note(self._span, fault)
            raise


def _end(span: trace.Span, error: BaseException) -> None:
    _note(span, error)
    span.end()


def _note(span: trace.Span, error: BaseException) -> None:
    kind = error.fault.value if isinstance(error, NodeFault) else type(error).__name__
    span.set_attribute("error.type", kind)
    span.set_status(trace.StatusCode.ERROR)
