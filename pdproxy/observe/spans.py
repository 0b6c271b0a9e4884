"""Spans, as they are recorded while a request runs; one that has ended goes to a `Recorder`.

The SDK checks, copies and locks for each attribute, for it does not know who sets it; the proxy's are of its own
making, set in one thread, and of types that OTLP has. Which requests are traced is for the SDK's sampler to say.
Imported only where tracing is on: elsewhere the SDK need not be there.
"""

import dataclasses
import itertools
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanLimits
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes, AttributeValue

from pdproxy.observe.gen_ai import CommonAttributes

UNSET = Status()
"""Of a span that nothing was said of."""
_RANDOM = 0x02
"""The flag of W3C Trace Context, level 2, that an id of a trace is random."""


class SpanEvent(NamedTuple):
    """What happened at a moment, in nanoseconds since 1970."""

    name: str
    attributes: Mapping[str, AttributeValue]
    timestamp: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recorder:
    """What all spans of a process have in common.

    Attributes:
        ended: gets each recorded span, once, when it ends.
        limits: how many attributes and events a span may have, and how long a text may be.
    """

    sampler: Sampler
    ended: Callable[["RecordedSpan"], None]
    limits: SpanLimits = dataclasses.field(default_factory=SpanLimits)


class RecordedSpan(trace.Span):
    """A span that is told to its recorder when it ends; later changes are ignored."""

    dropped_attributes = dropped_events = 0

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        self._recorder = recorder
        self.name = name
        self.kind = kind
        self.context = context
        self.parent = parent
        self.common: list[CommonAttributes] = []
        self.attributes: dict[str, AttributeValue] = {}
        self.events: list[SpanEvent] = []
        self.status = UNSET
        self.start_time = time.time_ns()
        self.end_time: int | None = None
        self.set_attributes(attributes)

    def get_span_context(self) -> SpanContext:
        return self.context

    def is_recording(self) -> bool:
        return self.end_time is None

    def end(self, end_time: int | None = None) -> None:
        if self.end_time is None:
            self._keep_limits(self._recorder.limits)
            self.end_time = end_time or time.time_ns()
            self._recorder.ended(self)

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        if self.end_time is None:
            if type(attributes) is CommonAttributes:
                self.common.append(attributes)
            else:
                self.attributes.update(attributes)

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        if self.end_time is None:
            self.attributes[key] = value

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        if self.end_time is None:
            self.events.append(SpanEvent(name, dict(attributes or {}), timestamp or time.time_ns()))

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

    def _keep_limits(self, limits: SpanLimits) -> None:
        """As the SDK does: of too many the first ones go, and texts are cut, but not those of events."""
        most, longest = limits.max_span_attributes, limits.max_span_attribute_length
        number = len(self.attributes)
        for common in self.common:
            number += len(common)
        if longest is not None or (most is not None and number > most):
            first, self.common = self.common, []
            self.attributes = dict(itertools.chain(*[each.items() for each in first], self.attributes.items()))
        if most is not None and len(self.attributes) > most:
            self.dropped_attributes = len(self.attributes) - most
            self.attributes = dict(itertools.islice(self.attributes.items(), self.dropped_attributes, None))
        if longest is not None:
            self.attributes = {name: _cut(value, longest) for name, value in self.attributes.items()}
        if limits.max_events is not None and len(self.events) > limits.max_events:
            self.dropped_events = len(self.events) - limits.max_events
            del self.events[: self.dropped_events]


def _cut(value: AttributeValue, longest: int) -> AttributeValue:
    if isinstance(value, str):
        return value[:longest]
    return [_cut(each, longest) for each in value] if isinstance(value, Sequence) else value


class RecordingTracer(trace.Tracer):
    """Makes the spans of the requests that the sampler chooses. It is asked once for each request: the spans below are
    recorded where that of the request is."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

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
        parent = trace.get_current_span(context).get_span_context()
        trace_id, _, is_remote, flags, above, is_valid = parent
        state: trace.TraceState | None = above
        if is_remote or not is_valid:
            trace_id, random_flag = (trace_id, flags & _RANDOM) if is_valid else (random.getrandbits(128) or 1, _RANDOM)
            sampled = self._recorder.sampler.should_sample(context, trace_id, name, kind, attributes, ())
            flag = TraceFlags.SAMPLED if sampled.decision is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT
            flags, state = TraceFlags(flag | random_flag), sampled.trace_state
        own = SpanContext(trace_id, random.getrandbits(64) or 1, is_remote=False, trace_flags=flags, trace_state=state)
        if not flags & TraceFlags.SAMPLED:
            return trace.NonRecordingSpan(own)
        return RecordedSpan(self._recorder, name, kind, own, parent if is_valid else None, attributes or {})

    @contextmanager
    def start_as_current_span(  # type: ignore[override]  # the API's own kind of context manager is private
        self, name: str, *args: Any, **options: Any
    ) -> Iterator[trace.Span]:
        with trace.use_span(self.start_span(name, *args, **options), end_on_exit=True) as span:
            yield span
