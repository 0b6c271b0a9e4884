"""An OTLP collector for traces on loopback: it keeps the spans that are exported to it, decoded."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.fakes.http_server import QuietHandler, served

KINDS = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_CLIENT: "client", Span.SPAN_KIND_INTERNAL: "internal"}


@dataclasses.dataclass(frozen=True)
class CollectedSpan:
    """One span, as it was exported; ids in hex, ``parent`` "" where it has none, times in nanoseconds."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    failed: bool
    began: int
    ended: int


@dataclasses.dataclass
class Collector:
    """Spans that were exported so far; ``url``: where to."""

    url: str
    content_types: set[str] = dataclasses.field(default_factory=set)
    resources: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    spans: list[CollectedSpan] = dataclasses.field(default_factory=list)

    @property
    def services(self) -> set[str]:
        return {resource["service.name"] for resource in self.resources}

    def take(self, content_type: str, body: bytes) -> None:
        """An export; raises where it is none."""
        self.content_types.add(content_type)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(_attributes(resource.resource.attributes))
            self.spans += [_span(span) for scope in resource.scope_spans for span in scope.spans]


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    """A collector that listens while inside."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            collector.take(self.headers["content-type"], self.body())
            self.answer(200)

    with served(Handler) as address:
        collector = Collector(f"{address}/v1/traces")
        yield collector


def _span(span: Span) -> CollectedSpan:
    return CollectedSpan(
        span.name,
        KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _attributes(span.attributes),
        [(event.name, _attributes(event.attributes)) for event in span.events],
        span.status.code == span.status.STATUS_CODE_ERROR,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )


def _attributes(pairs: "Any") -> dict[str, Any]:
    found = {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}
    assert len(found) == len(pairs), "an attribute stands there twice"
    return found


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))
