"""Spans go to a collector by OTLP over HTTP, a batch in one request.

A span is written when it ends, a few microseconds at a time, and waits as bytes. The thread that sends has only to join
them and to wait, and seldom holds the interpreter's lock, for which the event loop would have to wait.
"""

import gzip
import logging
import os
import random
import ssl
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from http.client import HTTPException
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.util.re import parse_env_headers

from pdproxy import __version__
from pdproxy.errors import SettingsError
from pdproxy.observe.labels import SpanOutcome
from pdproxy.observe.otlp import Origin, encode_origin, encode_request, encode_span
from pdproxy.observe.spans import Recorder, RecordingTracer

_LOG = logging.getLogger(__name__)
_SCOPE = "pdproxy"
"""The name of what makes the spans."""
_COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {"none": bytes, "gzip": gzip.compress, "deflate": zlib.compress}
_HEADERS = {"content-type": "application/x-protobuf", "user-agent": f"pdproxy/{__version__}"}
_TRY_AGAIN = frozenset({429, 502, 503, 504})
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before a batch is sent again, about."""
_LAST_SECONDS = 5.0
"""For all that is left when the proxy ends."""
_ANSWER_BYTES = 65536

CountSpans = Callable[[SpanOutcome, int], None]


class Collector(NamedTuple):
    """Where spans go; ``seconds``: for one batch, tries and pauses together.

    ``tls`` is None where it is not asked for: to read the system's authorities takes a twentieth of the start.
    """

    url: str
    headers: Mapping[str, str]
    compression: str
    seconds: float
    tls: ssl.SSLContext | None

    @classmethod
    def read(cls, url: str, environment: Mapping[str, str]) -> "Collector":
        """As the variables of OTLP exporters say: those for traces, else those for all signals.

        Raises:
            SettingsError: one of them cannot be used.
        """

        def variable(name: str, default: str = "") -> str:
            own = environment.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}")
            return own or environment.get(f"OTEL_EXPORTER_OTLP_{name}") or default

        headers = {**_HEADERS, **parse_env_headers(variable("HEADERS"), liberal=True)}
        compression = variable("COMPRESSION", "none").strip().lower()
        if compression not in _COMPRESS:
            raise SettingsError(f"OTEL_EXPORTER_OTLP_COMPRESSION is {compression!r}: none, gzip and deflate are known.")
        if compression != "none":
            headers["content-encoding"] = compression
        files = [variable(name) for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")]
        tls = _tls(*files) if any(files) or not url.startswith("http://") else None
        return cls(url, headers, compression, _seconds(variable("TIMEOUT", "10")), tls)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise SettingsError(f"OTEL_EXPORTER_OTLP_TIMEOUT is {text!r}: seconds are wanted.") from error


def _tls(authorities: str, certificate: str, key: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=authorities or None)
        if certificate:
            context.load_cert_chain(certificate, key or None)
    except OSError as error:  # ssl.SSLError is one
        raise SettingsError(f"A file that OTEL_EXPORTER_OTLP_… names cannot be used: {error}.") from error
    return context


class BatchLimits(NamedTuple):
    """How many spans wait at most, how many go together, and for how many seconds one waits for others."""

    queue: int = 2048
    batch: int = 512
    delay: float = 5.0

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "BatchLimits":
        """As the variables of batches say. Raises `SettingsError`."""
        queue, batch, delay = (
            _positive(f"OTEL_BSP_{name}", environment.get(f"OTEL_BSP_{name}") or default)
            for name, default in (
                ("MAX_QUEUE_SIZE", "2048"),
                ("MAX_EXPORT_BATCH_SIZE", "512"),
                ("SCHEDULE_DELAY", "5000"),
            )
        )
        return cls(queue, min(batch, queue), delay / 1000)


class Answer(NamedTuple):
    """What the collector made of a batch; ``pause``: seconds for which it wants to be left alone."""

    taken: bool
    reason: str = ""
    try_again: bool = False
    pause: float | None = None


class Exporter:
    """Sends batches from a thread, one after another. One that the collector cannot take now is sent again, as OTLP
    says, until the time for a batch is over; any other that it does not take is given up.

    Args:
        count: told how many spans were sent, given up, or dropped because too many waited.
    """

    def __init__(self, collector: Collector, limits: BatchLimits, origin: Origin, count: CountSpans) -> None:
        self._collector = collector
        self._limits = limits
        self._origin = origin
        self._count = count
        self._opener = urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=collector.tls))
        self._waiting: deque[bytes] = deque()
        self._batch_waits, self._ending = threading.Event(), threading.Event()
        self._end = float("inf")
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="pdproxy-spans", daemon=True)
        self._thread.start()

    def add(self, span: bytes) -> None:
        """One that `encode_span` wrote. Never waits."""
        if len(self._waiting) >= self._limits.queue:
            self._count(SpanOutcome.DROPPED, 1)
            return
        self._waiting.append(span)
        if len(self._waiting) == self._limits.batch:
            self._batch_waits.set()

    def close(self) -> None:
        """Send what waits, in a few seconds at most, and nothing twice. What then still waits is given up."""
        self._end = time.monotonic() + _LAST_SECONDS
        self._ending.set()
        self._batch_waits.set()
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        while not self._ending.is_set():
            full = self._batch_waits.wait(self._limits.delay)
            self._batch_waits.clear()
            self._export_batches(of_at_least=self._limits.batch if full else 1)
        self._export_batches(of_at_least=1)

    def _export_batches(self, of_at_least: int) -> None:
        while len(self._waiting) >= of_at_least:
            self._export([self._waiting.popleft() for _ in range(min(self._limits.batch, len(self._waiting)))])

    def _export(self, spans: Sequence[bytes]) -> None:
        body = _COMPRESS[self._collector.compression](encode_request(self._origin, spans))
        answer = self._send(body)
        self._count(SpanOutcome.SENT if answer.taken else SpanOutcome.FAILED, len(spans))
        if answer.taken and self._failing:
            _LOG.info("the collector of traces takes spans again")
        elif not answer.taken and not self._failing:
            _LOG.warning("the collector of traces at %s takes no spans: %s", self._collector.url, answer.reason)
        self._failing = not answer.taken

    def _send(self, body: bytes) -> Answer:
        """Try, and try again where that may help."""
        until = time.monotonic() + self._collector.seconds
        answer = self._post(body, until)
        for pause in _PAUSES:
            pause = pause * random.uniform(0.8, 1.2) if answer.pause is None else answer.pause
            if not answer.try_again or time.monotonic() + pause > until or self._ending.wait(pause):
                break
            answer = self._post(body, until)
        return answer

    def _post(self, body: bytes, until: float) -> Answer:
        seconds = min(until, self._end) - time.monotonic()
        if seconds <= 0:
            return Answer(False, "the time is over")
        request = urllib.request.Request(self._collector.url, body, dict(self._collector.headers), method="POST")
        try:
            with self._opener.open(request, timeout=seconds) as response:
                response.read(_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                return Answer(False, str(error), error.code in _TRY_AGAIN, _retry_after(error.headers))
        except (OSError, HTTPException) as error:  # not reached, broken off, too late, or no HTTP
            return Answer(False, str(error) or repr(error), try_again=True)
        return Answer(True)


def exporting(url: str, service: str, count: CountSpans) -> tuple[trace.Tracer, Callable[[], None]]:
    """A tracer whose spans go to a collector, and what sends the last ones. Where the SDK's variables disable it, it is
    the SDK's own, which does nothing.

    Raises:
        SettingsError: a variable of the environment cannot be used.
    """
    provider = TracerProvider(shutdown_on_exit=False, resource=Resource.create({"service.name": service}))
    tracer = provider.get_tracer(_SCOPE, __version__)
    if isinstance(tracer, trace.NoOpTracer):
        return tracer, provider.shutdown
    origin = encode_origin(provider.resource.attributes, provider.resource.schema_url, _SCOPE, __version__)
    exporter = Exporter(Collector.read(url, os.environ), BatchLimits.read(os.environ), origin, count)
    recorder = Recorder(provider.sampler, lambda span: exporter.add(encode_span(span)))
    return RecordingTracer(recorder), exporter.close


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: spans would not be sent on."""

    def redirect_request(self, *_: object) -> None:
        return None


def _positive(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise SettingsError(f"{name} is {text!r}: a positive number is wanted.")
    return int(text)


def _retry_after(headers: Message) -> float | None:
    """The seconds of this header; dates, which it may have too, are not read."""
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else None
