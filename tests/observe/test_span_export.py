"""Which spans are exported, and what happens where the collector is slow, full, gone or strange."""

import functools
import gzip
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdproxy.errors import SettingsError
from pdproxy.observe import span_export
from pdproxy.observe.labels import SpanOutcome
from pdproxy.observe.span_export import exporting
from pdproxy.settings.model import Otel
from pdproxy.settings.types import OtelExport
from tests.fakes.http_server import HOST, QuietHandler, served

WITHIN_S = 10.0
EACH_ALONE = {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1", "OTEL_BSP_MAX_QUEUE_SIZE": "8"}
IN_PAIRS = {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2", "OTEL_BSP_MAX_QUEUE_SIZE": "3"}
ABOVE = "ab" * 16, "cd" * 8


class Scripted:
    """A collector that answers as it is told, and with 200 after that.

    Attributes:
        answers: what is left to answer: a status and headers.
        go_on: is waited for before each answer.
        bodies: what was sent to it; ``heads``: the headers of these.
    """

    def __init__(self, *answers: tuple[int, dict[str, str]]) -> None:
        self.answers = list(answers)
        self.go_on = threading.Event()
        self.go_on.set()
        self.bodies: list[bytes] = []
        self.heads: list[Mapping[str, str]] = []
        self.url = ""

    @contextmanager
    def listening(self) -> Iterator["Scripted"]:
        """The collector listens while inside."""
        scripted = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                scripted.bodies.append(self.body())
                scripted.heads.append({name.lower(): value for name, value in self.headers.items()})
                scripted.go_on.wait(WITHIN_S)
                status, headers = scripted.answers.pop(0) if scripted.answers else (200, {})
                self.answer(status, headers=headers)

        with served(Handler) as address:
            self.url = f"{address}/v1/traces"
            try:
                yield self
            finally:
                self.go_on.set()


class Traced:
    """A tracer, what it counts of its spans, and its end."""

    def __init__(self, url: str, sample: float = 1.0) -> None:
        self.counted: Counter[SpanOutcome] = Counter()
        self.tracer, self.close = exporting(Otel(export=OtelExport.OTLP, endpoint=url, sample=sample), self._count)

    def span(self, name: str) -> None:
        """Begin and end one."""
        self.tracer.start_span(name).end()

    def _count(self, outcome: SpanOutcome, number: int) -> None:
        self.counted[outcome] += number


@contextmanager
def traced(url: str, sample: float = 1.0) -> Iterator[Traced]:
    """Closed at the end."""
    made = Traced(url, sample)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """Sets these variables for the test; spans wait for others for a minute."""

    def put(variables: Mapping[str, str]) -> None:
        for name, value in {"OTEL_BSP_SCHEDULE_DELAY": "60000", **variables}.items():
            monkeypatch.setenv(name, value)

    return put


def all_counted(made: Traced, number: int) -> bool:
    return made.counted.total() == number


def names(bodies: list[bytes]) -> list[list[str]]:
    """The names of spans in each of these exports."""
    return [
        [span.name for resource in read.resource_spans for scope in resource.scope_spans for span in scope.spans]
        for read in map(ExportTraceServiceRequest.FromString, bodies)
    ]


def until(condition: Callable[[], object]) -> None:
    """Wait for it. Raises TimeoutError."""
    limit = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError
        time.sleep(0.005)


Environment = Callable[[Mapping[str, str]], None]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_batch_that_cannot_be_taken_now_is_sent_again(status: int, environment: Environment) -> None:
    environment(EACH_ALONE)
    with Scripted((status, {"retry-after": "0"})).listening() as collector, traced(collector.url) as made:
        made.span("a")
        until(lambda: made.counted)
        assert made.counted == {SpanOutcome.SENT: 1}
        assert names(collector.bodies) == [["a"], ["a"]]


def test_what_is_refused_is_given_up_and_told_once(environment: Environment, caplog: pytest.LogCaptureFixture) -> None:
    environment(EACH_ALONE)
    with Scripted((400, {}), (400, {})).listening() as collector, traced(collector.url) as made:
        for number in (1, 2, 3):
            made.span("a")
            until(functools.partial(all_counted, made, number))
    assert made.counted == {SpanOutcome.FAILED: 2, SpanOutcome.SENT: 1}
    assert len(collector.bodies) == 3
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]
    assert "400" in line


def test_a_collector_that_is_not_there_costs_one_line_and_the_spans(
    environment: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    environment({**EACH_ALONE, "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2"})
    with traced(f"http://{HOST}:9/v1/traces") as made:
        for _ in range(5):
            made.span("a")
        until(functools.partial(all_counted, made, 5))
    assert made.counted == {SpanOutcome.FAILED: 5}
    assert len([record for record in caplog.records if record.name.startswith("opentelemetry")]) == 1


def test_no_more_wait_than_the_queue_takes_and_the_others_are_counted(
    environment: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    environment(IN_PAIRS)
    with Scripted().listening() as collector:
        collector.go_on.clear()
        with traced(collector.url) as made:
            made.span("1")
            made.span("2")
            until(lambda: collector.bodies)
            began = time.monotonic()
            for name in "34567":
                made.span(name)
            assert time.monotonic() - began < 1
            assert made.counted == {SpanOutcome.DROPPED: 2}
            collector.go_on.set()
    assert made.counted == {SpanOutcome.DROPPED: 2, SpanOutcome.SENT: 5}
    assert names(collector.bodies) == [["1", "2"], ["3", "4"], ["5"]]
    assert not caplog.records


def test_a_batch_that_is_not_full_goes_after_a_while(environment: Environment) -> None:
    environment({"OTEL_BSP_SCHEDULE_DELAY": "100"})
    with Scripted().listening() as collector, traced(collector.url) as made:
        made.span("1")
        made.span("2")
        until(lambda: made.counted)
        assert names(collector.bodies) == [["1", "2"]]


@pytest.mark.parametrize("gone", [False, True], ids=["silent", "gone"])
def test_the_end_waits_a_few_seconds_at_most(
    gone: bool, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_export, "LAST_SECONDS", 0.5)
    environment({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2"})
    with Scripted().listening() as collector:
        collector.go_on.clear()
        made = Traced(f"http://{HOST}:9/v1/traces" if gone else collector.url)
        for _ in range(7):
            made.span("a")
        began = time.monotonic()
        made.close()
        assert time.monotonic() - began < 1.5
        assert SpanOutcome.SENT not in made.counted
        collector.go_on.set()
        threads = [each for each in threading.enumerate() if each.name == "pdproxy-last-spans"]
        for each in threads:
            each.join(WITHIN_S)
        assert len(collector.bodies) <= 1


@pytest.mark.parametrize(("name", "unpacked"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_compression_and_headers_are_those_of_the_variables(
    name: str, unpacked: Callable[[bytes], bytes], environment: Environment
) -> None:
    environment(
        {
            "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": name,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=se%20cret,x-other=1",
        }
    )
    with Scripted().listening() as collector, traced(collector.url) as made:
        made.span("a")
    assert names([unpacked(body) for body in collector.bodies]) == [["a"]]
    head = collector.heads[0]
    assert (head["content-encoding"], head["api-key"], head["x-other"]) == (name, "se cret", "1")
    assert head["content-type"] == "application/x-protobuf"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
    ],
)
def test_a_limit_that_cannot_be_used_ends_the_start(name: str, value: str, environment: Environment) -> None:
    environment({name: value})
    with pytest.raises(SettingsError, match="OTEL_BSP_"):
        Traced(f"http://{HOST}:9/v1/traces")


@pytest.mark.parametrize(
    ("sample", "flags", "recorded"),
    [(0.0, "", False), (0.0, "00", False), (0.0, "01", True), (1.0, "", True), (1.0, "00", False), (1.0, "01", True)],
)
def test_the_setting_samples_requests_whose_client_did_not_decide(
    sample: float, flags: str, recorded: bool, environment: Environment
) -> None:
    environment({"OTEL_TRACES_SAMPLER": "always_on"})  # the setting alone decides
    carrier = {"traceparent": f"00-{ABOVE[0]}-{ABOVE[1]}-{flags}"} if flags else {}
    above = TraceContextTextMapPropagator().extract(carrier)
    with (
        Scripted().listening() as collector,
        traced(collector.url, sample) as made,
        trace.use_span(made.tracer.start_span("request", above), end_on_exit=True) as span,
    ):
        below = made.tracer.start_span("leg")
        below.end()
    assert (span.get_span_context().trace_flags.sampled, bool(collector.bodies)) == (recorded, recorded)
    assert below.get_span_context().trace_id == span.get_span_context().trace_id
    if flags:
        assert trace.format_trace_id(span.get_span_context().trace_id) == ABOVE[0]


def test_a_twentieth_is_about_a_twentieth() -> None:
    with Scripted().listening() as collector, traced(collector.url, Otel().sample) as made:
        chosen = sum(made.tracer.start_span("a").is_recording() for _ in range(4000))
    assert 120 <= chosen <= 280  # 200 on the mean; that far off once in 10 ^ 8 runs


def test_the_sdk_can_be_disabled(environment: Environment) -> None:
    environment({"OTEL_SDK_DISABLED": "true"})
    with traced(f"http://{HOST}:9/v1/traces") as made:
        assert not made.tracer.start_span("a").get_span_context().is_valid
