"""Batches of spans on their way to a collector that is slow, full, gone or strange."""

import functools
import gzip
import ssl
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pdproxy.errors import SettingsError
from pdproxy.observe import span_export
from pdproxy.observe.labels import SpanOutcome
from pdproxy.observe.otlp import Origin, encode_request
from pdproxy.observe.span_export import BatchLimits, Collector, Exporter

HOST = "127.0.0.1"
ORIGIN = Origin(b"", b"", b"")
WITHIN_S = 10.0
AT_ONCE = BatchLimits(queue=8, batch=1, delay=60.0)


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
        """It listens while inside."""
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                scripted.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                scripted.heads.append({name.lower(): value for name, value in self.headers.items()})
                scripted.go_on.wait(WITHIN_S)
                status, headers = scripted.answers.pop(0) if scripted.answers else (200, {})
                self.send_response(status)
                for name, value in {"content-length": "0", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Nothing: a test's output is for its findings."""

        server = ThreadingHTTPServer((HOST, 0), Handler)
        self.url = f"http://{HOST}:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.go_on.set()
            server.shutdown()
            thread.join()
            server.server_close()


@contextmanager
def exporter(
    url: str, limits: BatchLimits = AT_ONCE, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Exporter, Counter[SpanOutcome]]]:
    """An exporter, and what it counts; closed at the end."""
    counted: Counter[SpanOutcome] = Counter()

    def count(outcome: SpanOutcome, number: int) -> None:
        counted[outcome] += number

    made = Exporter(Collector.read(url, environment or {}), limits, ORIGIN, count)
    try:
        yield made, counted
    finally:
        made.close()


def _all_counted(counted: Counter[SpanOutcome], number: int) -> bool:
    return counted.total() == number


def until(condition: Callable[[], object]) -> None:
    """Wait for it. Raises TimeoutError."""
    limit = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError
        time.sleep(0.005)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_batch_that_cannot_be_taken_now_is_sent_again(status: int) -> None:
    with Scripted((status, {"retry-after": "0"})).listening() as collector, exporter(collector.url) as (made, counted):
        made.add(b"span")
        until(lambda: counted)
        assert counted == {SpanOutcome.SENT: 1}
        assert collector.bodies == [encode_request(ORIGIN, [b"span"])] * 2


def test_tries_are_apart_and_end_with_the_time_for_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "_PAUSES", (0.2, 0.4, 0.8))
    fast = {"OTEL_EXPORTER_OTLP_TIMEOUT": "0.7"}
    with (
        Scripted(*[(503, {})] * 9).listening() as collector,
        exporter(collector.url, environment=fast) as (made, counted),
    ):
        began = time.monotonic()
        made.add(b"span")
        until(lambda: counted)
        assert counted == {SpanOutcome.FAILED: 1}
        assert 0.15 < time.monotonic() - began < 2
        assert 2 <= len(collector.bodies) <= 3


@pytest.mark.parametrize("answer", [(400, {}), (500, {}), (302, {"location": "/other"})])
def test_what_is_refused_is_given_up_and_told_once(
    answer: tuple[int, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with Scripted(answer, answer).listening() as collector, exporter(collector.url) as (made, counted):
        for number in (1, 2, 3):
            made.add(b"span")
            until(functools.partial(_all_counted, counted, number))
    assert counted == {SpanOutcome.FAILED: 2, SpanOutcome.SENT: 1}
    assert len(collector.bodies) == 3
    refused, again = (record.getMessage() for record in caplog.records if record.name == span_export.__name__)
    assert str(answer[0]) in refused
    assert collector.url in refused
    assert again == "the collector of traces takes spans again"


def test_no_more_wait_than_the_queue_takes_and_the_others_are_counted() -> None:
    limits = BatchLimits(queue=3, batch=2, delay=60.0)
    with Scripted().listening() as collector:
        collector.go_on.clear()
        with exporter(collector.url, limits) as (made, counted):
            made.add(b"1")
            made.add(b"2")
            until(lambda: collector.bodies)
            for span in (b"3", b"4", b"5", b"6", b"7"):
                made.add(span)
            assert counted == {SpanOutcome.DROPPED: 2}
            collector.go_on.set()
    assert counted == {SpanOutcome.DROPPED: 2, SpanOutcome.SENT: 5}
    assert collector.bodies == [encode_request(ORIGIN, spans) for spans in ([b"1", b"2"], [b"3", b"4"], [b"5"])]


def test_a_batch_that_is_not_full_goes_after_a_while() -> None:
    limits = BatchLimits(batch=100, delay=0.1)
    with Scripted().listening() as collector, exporter(collector.url, limits) as (made, counted):
        made.add(b"1")
        made.add(b"2")
        until(lambda: counted)
        assert collector.bodies == [encode_request(ORIGIN, [b"1", b"2"])]


@pytest.mark.parametrize("gone", [False, True], ids=["silent", "gone"])
def test_the_end_waits_a_few_seconds_at_most(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "_LAST_SECONDS", 0.5)
    with Scripted().listening() as collector:
        collector.go_on.clear()
        url = f"http://{HOST}:9/v1/traces" if gone else collector.url
        with exporter(url, BatchLimits(batch=2, delay=60.0)) as (made, counted):
            for _ in range(7):
                made.add(b"span")
            began = time.monotonic()
            made.close()
            assert time.monotonic() - began < 1.5
            assert SpanOutcome.SENT not in counted


@pytest.mark.parametrize(("name", "unpacked"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_compression_and_headers_are_those_of_the_variables(name: str, unpacked: Callable[[bytes], bytes]) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": name,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=se%20cret,x-other=1",
    }
    with Scripted().listening() as collector, exporter(collector.url, environment=variables) as (made, counted):
        made.add(b"span")
        until(lambda: counted)
    assert unpacked(collector.bodies[0]) == encode_request(ORIGIN, [b"span"])
    head = collector.heads[0]
    assert (head["content-encoding"], head["api-key"], head["x-other"]) == (name, "se cret", "1")
    assert head["content-type"] == "application/x-protobuf"


def test_limits_are_those_of_the_variables() -> None:
    assert BatchLimits.read({}) == BatchLimits(2048, 512, 5.0)
    some = {"OTEL_BSP_MAX_QUEUE_SIZE": "100", "OTEL_BSP_SCHEDULE_DELAY": "250"}
    assert BatchLimits.read(some) == BatchLimits(100, 100, 0.25)
    assert BatchLimits.read({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "7"}).batch == 7


@pytest.mark.parametrize(("name", "value"), [("OTEL_BSP_MAX_QUEUE_SIZE", "0"), ("OTEL_BSP_SCHEDULE_DELAY", "soon")])
def test_a_limit_that_is_none_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        BatchLimits.read({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli"),
        ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "/nowhere.pem"),
        ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(Path(__file__))),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_"):
        Collector.read(f"http://{HOST}:9/v1/traces", {name: value})


def test_the_systems_authorities_are_read_where_a_collector_speaks_tls() -> None:
    assert Collector.read("http://collector:4318/v1/traces", {}).tls is None
    tls = Collector.read("https://collector:4318/v1/traces", {}).tls
    assert tls is not None
    assert tls.verify_mode is ssl.CERT_REQUIRED
