"""The official SDK and OTLP exporter, put together as the settings say. Imported only where tracing is on."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from pdproxy import __version__
from pdproxy.errors import SettingsError
from pdproxy.observe.labels import SpanOutcome
from pdproxy.settings.model import Otel

SCOPE = "pdproxy"
"""The name of what makes the spans."""
LAST_SECONDS = 5.0
"""For all spans that are left when the proxy ends."""
_QUEUE = 2048
"""Spans that wait at most, where the environment names no number."""
_LINE_SECONDS = 60.0

CountSpans = Callable[[SpanOutcome, int], None]


class CountingExporter(SpanExporter):
    """Counts the spans that the collector took, and those that it did not.

    Attributes:
        begun: the spans whose export has begun; only the processor's thread changes it.
    """

    def __init__(self, inner: SpanExporter, count: CountSpans) -> None:
        self._inner = inner
        self._count = count
        self._ended = False
        self.begun = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.begun += len(spans)
        result = SpanExportResult.FAILURE if self._ended else self._inner.export(spans)
        self._count(SpanOutcome.SENT if result is SpanExportResult.SUCCESS else SpanOutcome.FAILED, len(spans))
        return result

    def shutdown(self) -> None:
        """End the wait before another try; nothing is sent after this. Idempotent."""
        if not self._ended:
            self._ended = True
            self._inner.shutdown()


class CountingProcessor(BatchSpanProcessor):
    """Drops and counts a span that ends while ``most`` others wait. The SDK's processor would drop the oldest one, and
    only log it."""

    def __init__(self, exporter: CountingExporter, most: int, count: CountSpans) -> None:
        super().__init__(exporter, max_queue_size=most)
        self._counting_exporter = exporter
        self._most = most
        self._count = count
        self._kept = 0

    def on_end(self, span: ReadableSpan) -> None:
        if self._kept - self._counting_exporter.begun >= self._most:
            self._count(SpanOutcome.DROPPED, 1)
            return
        self._kept += 1
        super().on_end(span)


class OneLineAMinute(logging.Filter):
    """Lets one line through each minute: the SDK's exporter writes several for each batch that it cannot deliver."""

    def __init__(self) -> None:
        super().__init__()
        self._next = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 - whichever line is first
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _LINE_SECONDS
        return True


def exporting(otel: Otel, count: CountSpans) -> tuple[trace.Tracer, Callable[[], None]]:
    """A tracer whose spans go to a collector, and what sends the last ones and then stops. The environment's variables
    for the SDK and its exporter count, but for those that name a sampler.

    Raises:
        SettingsError: a limit of the queue or of a batch cannot be used.
    """
    resource = Resource.create({"service.name": otel.service})
    sampler = ParentBased(TraceIdRatioBased(otel.sample))
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    try:
        exporter = CountingExporter(OTLPSpanExporter(endpoint=otel.endpoint), count)
        most = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) or _QUEUE)
        provider.add_span_processor(CountingProcessor(exporter, most, count))
    except ValueError as error:
        raise SettingsError(f"A variable OTEL_BSP_… cannot be used: {error}") from error
    log, rarely = logging.getLogger(OTLPSpanExporter.__module__), OneLineAMinute()
    log.addFilter(rarely)

    def close() -> None:
        """The SDK's shutdown has no limit of its own that could be set, and may wait for half a minute."""
        ending = threading.Thread(target=provider.shutdown, name="pdproxy-last-spans", daemon=True)
        ending.start()
        ending.join(LAST_SECONDS)
        exporter.shutdown()  # where the provider still waits
        log.removeFilter(rarely)

    return provider.get_tracer(SCOPE, __version__), close
