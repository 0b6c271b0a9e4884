"""Spans as opentelemetry-sdk records them, in a fraction of its time.

The SDK checks and locks for each attribute, for it does not know who sets it; the proxy's are of its own making, set in
one thread, and of types that OTLP has. Which requests are traced, how spans are queued and exported stays the SDK's.
Imported only where tracing is on: elsewhere the SDK need not be there.
"""

import dataclasses
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes, AttributeValue

_UNSET = Status()
_RANDOM = 0x02
"""The flag of W3C Trace Context, level 2, that an id of a trace is random."""


class HashedResource(Resource):
    """A resource whose hash is computed once. An exporter asks for it with each span, and the SDK's own writes all of
    its attributes as JSON to answer."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@dataclasses.dataclass(frozen=True, slots=True)
class Recorder:
    """What all spans of a process have in common.

    Attributes:
        longest: characters of a text that a span tells; None for any number.
    """

    provider: TracerProvider
    processor: BatchSpanProcessor
    resource: HashedResource
    scope: InstrumentationScope
    longest: int | None


class RecordedSpan(trace.Span):
    """A span that is exported once it ends; later changes are ignored. It has the attributes of the SDK's
    `ReadableSpan`, which exporters read."""

    links = ()
    dropped_attributes = dropped_events = dropped_links = 0

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: dict[str, AttributeValue],
    ) -> None:
        self._recorder = recorder
        self.name = name
        self.kind = kind
        self.context = context
        self.parent = parent
        self.attributes = attributes
        self.events: list[Event] = []
        self.status = _UNSET
        self.start_time = time.time_ns()
        self.end_time: int | None = None
        self.resource = recorder.resource
        self.instrumentation_scope = recorder.scope

    def get_span_context(self) -> SpanContext:
        return self.context

    def is_recording(self) -> bool:
        return self.end_time is None

    def end(self, end_time: int | None = None) -> None:
        if self.end_time is None:
            self._shorten(self._recorder.longest)
            self.end_time = end_time or time.time_ns()
            self._recorder.processor.on_end(self)  # type: ignore[arg-type]  # it reads what a ReadableSpan has

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        if self.end_time is None:
            self.attributes.update(attributes)

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        if self.end_time is None:
            self.attributes[key] = value

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        if self.end_time is None:
            self.events.append(Event(name, dict(attributes or {}), timestamp))

    def update_name(self, name: str) -> None:
        if self.end_time is None:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if self.end_time is None:
            self.status = status if isinstance(status, Status) else Status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        facts: dict[str, AttributeValue] = {
            "exception.type": type(exception).__qualname__,
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", facts | dict(attributes or {}), timestamp)

    def _shorten(self, longest: int | None) -> None:
        if longest is not None:
            for name, value in self.attributes.items():
                self.attributes[name] = value[:longest] if isinstance(value, str) else value


class RecordingTracer(trace.Tracer):
    """Makes `RecordedSpan`s of the requests that the provider's sampler chooses."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._new_trace_id = recorder.provider.id_generator.generate_trace_id
        self._new_span_id = recorder.provider.id_generator.generate_span_id
        self._sample = recorder.provider.sampler.should_sample
        is_random = getattr(recorder.provider.id_generator, "is_trace_id_random", None)  # older SDKs do not tell
        self._random = _RANDOM if is_random is not None and is_random() else 0

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[trace.Link] | None = None,  # noqa: ARG002 - the proxy has none
        start_time: int | None = None,  # noqa: ARG002
        record_exception: bool = True,  # noqa: ARG002 - `trace.use_span` does both
        set_status_on_exception: bool = True,  # noqa: ARG002
    ) -> trace.Span:
        found = trace.get_current_span(context).get_span_context()
        parent = found if found.is_valid else None
        trace_id = self._new_trace_id() if parent is None else parent.trace_id
        sampled = self._sample(context, trace_id, name, kind, attributes, ())
        random = self._random if parent is None else parent.trace_flags & _RANDOM
        flags = TraceFlags(
            (TraceFlags.SAMPLED if sampled.decision is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT) | random
        )
        own = SpanContext(
            trace_id, self._new_span_id(), is_remote=False, trace_flags=flags, trace_state=sampled.trace_state
        )
        if sampled.decision is Decision.DROP:
            return trace.NonRecordingSpan(own)
        return RecordedSpan(self._recorder, name, kind, own, parent, dict(sampled.attributes or {}))

    @contextmanager
    def start_as_current_span(  # type: ignore[override]  # the API's own kind of context manager is private
        self, name: str, *args: Any, **options: Any
    ) -> Iterator[trace.Span]:
        with trace.use_span(self.start_span(name, *args, **options), end_on_exit=True) as span:
            yield span


def tracer_of(provider: TracerProvider, processor: BatchSpanProcessor, name: str, version: str) -> trace.Tracer:
    """A tracer whose spans go to ``processor``; the provider's own where it is disabled by the SDK's variables."""
    own = provider.get_tracer(name, version)
    if isinstance(own, trace.NoOpTracer):
        return own
    limits, scope = SpanLimits(), InstrumentationScope(name, version)
    return RecordingTracer(
        Recorder(provider, processor, HashedResource(provider.resource), scope, limits.max_span_attribute_length)
    )
