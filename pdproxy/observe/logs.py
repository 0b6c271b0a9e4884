"""Logs: one line a record, logfmt or JSON, on top of the standard library's logging.

Details stand in ``extra``: ``_LOG.info("client left", extra={"request_id": name})``. A line that is written on behalf
of a traced request has the ids of its trace and span, ``trace_id`` and ``span_id``.

A line holds printable ASCII and nothing else, whatever text clients, nodes and libraries put into it: all other
characters are escaped as in JSON, in both formats, and long values are cut. So no value can end a line, add a field, or
control a terminal.

Logging never waits for whoever reads standard error. `LineWriter` has a thread that writes; where the pipe is full or
closed, lines are dropped, counted (``pdproxy_log_lines_dropped_total``), and told of when the reader goes on.
"""

import collections
import datetime as dt
import functools
import json
import logging
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from pdproxy.observe.tracing import trace_ids
from pdproxy.request import write_json_line
from pdproxy.settings.model import Log
from pdproxy.settings.types import LogFormat

MOST_WAITING = 1 << 20
"""Bytes of lines that wait to be written; what comes while there are more is dropped."""
LONGEST_VALUE, LONGEST_TRACEBACK = 1000, 8000
"""Characters of a value, and of a traceback, that a line shows."""
COLLECTED_SECONDS = 0.02
"""Within so many seconds lines are collected, to be written together."""
CLOSE_SECONDS = 1.0
"""For the last lines to be written when the process ends."""

_STANDARD_ERROR = 2
_PIPE_BUF = select.PIPE_BUF
"""Bytes that a pipe takes in one piece, where several processes write to it."""
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}
_OWN = frozenset({"time", "level", "logger", "message", "exception", ""})
"""Names that no further field can have."""
_PLAIN = frozenset({int, float, bool, type(None)})
_BARE = re.compile(r"[!#-<>-\[\]-~]*").fullmatch
"""Text that logfmt needs no quotes for: printable ASCII without space, quotation mark, equals sign and backslash."""
_MOST_REMEMBERED, _REMEMBERED_LENGTH = 1000, 100
_MOST_LAYOUTS = 100
_NOT_IN_NAMES = re.compile(r"[^!#-<>-\[\]-~]")

Value = str | int | float | bool | None


class LineFormatter(logging.Formatter):
    """The part that both formats have in common."""

    def extras(self, record: logging.LogRecord) -> dict[str, object]:
        """The fields behind the message, as they are: those of ``extra`` and those of the trace."""
        extras = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        if ids := trace_ids():
            extras.update(ids)
        return extras

    def traceback(self, record: logging.LogRecord) -> str:
        """The traceback, which comes last; "" for none."""
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return _cut_middle("\n".join(filter(None, (trace, record.stack_info))))


class JsonFormatter(LineFormatter):
    """One JSON object a line: time (UTC), level, logger, message, the ``extra`` fields, and ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Value] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage(), 2 * LONGEST_VALUE),
        }
        for name, value in self.extras(record).items():
            fields[_field_name(name)] = _shown(value)
        if trace := self.traceback(record):
            fields["exception"] = trace
        return write_json_line(fields)


class Written(dict[str, str]):
    """How logfmt writes short texts; remembered, for most lines have the same names, nodes, models, …"""

    def __missing__(self, text: str) -> str:
        if len(text) > _REMEMBERED_LENGTH:
            return _logfmt(_cut(text))
        if len(self) >= _MOST_REMEMBERED:
            self.clear()
        self[text] = made = text if _BARE(text) else json.dumps(text)
        return made


class Layout(NamedTuple):
    """How fields of some names are written: a template, and the names whose values it takes."""

    template: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, names: tuple[str, ...]) -> "Layout":
        """Make the layout of all these names but those that every record has."""
        own = tuple(name for name in names if name not in _STANDARD)
        return cls("".join([f" {_field_name(name).replace('%', '%%')}=%s" for name in own]), own)


class TextFormatter(LineFormatter):
    """logfmt, with the same fields: ``time=… level=info logger=pdproxy message="request ended" key=value``.

    A value that has more than `_BARE` allows is a JSON string.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layout = functools.lru_cache(maxsize=_MOST_LAYOUTS)(Layout.of)
        self._texts = Written()

    def format(self, record: logging.LogRecord) -> str:
        message, texts, plain = _cut(record.getMessage(), 2 * LONGEST_VALUE), self._texts, _PLAIN
        line = f"time={_time(record)} {_head(record.levelname, record.name, message)}"
        # In one go, and without `extras`: it is done for each request.
        for more in (record.__dict__, trace_ids()):
            if more:
                template, names = self._layout(tuple(more))
                values = map(more.__getitem__, names)
                line += template % tuple([value if type(value) in plain else texts[str(value)] for value in values])
        trace = self.traceback(record) if record.exc_info or record.stack_info else ""
        return f"{line} exception={json.dumps(trace)}" if trace else line


class LineWriter:
    """A stream that never keeps its writer waiting: a thread of its own writes the lines to a file descriptor.

    It is given lines of ASCII by one thread at a time, as `logging.Handler` does.

    ``notice``: makes the line that tells of so many dropped lines.
    """

    def __init__(self, descriptor: int, notice: Callable[[int], str]) -> None:
        self._descriptor = descriptor
        self._notice = notice
        self._lines: collections.deque[str] = collections.deque()
        self._given = self._taken = 0
        """Bytes: each is changed by one thread alone."""
        self._turned_away = self._lost = self._told = 0
        """Lines: that found too much waiting, that could not be written, that were told of."""
        self._asleep = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were dropped since the start."""
        return self._turned_away + self._lost

    def write(self, line: str) -> None:
        """Have a line written soon, or drop it."""
        if self._given - self._taken > MOST_WAITING:
            self._turned_away += 1
            return
        self._lines.append(line)
        self._given += len(line)
        if self._asleep:
            self._asleep = False
            self._bell.put(None)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, and end; lines that are not written by then are lost."""
        self._closing = True
        self._bell.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while self._lines or not self._closing:
            self._sleep()
            time.sleep(COLLECTED_SECONDS)
            while self._lines:
                self._write_some()

    def _sleep(self) -> None:
        """Until there are lines, or for nothing. What comes after `_asleep` is set rings; what came before is seen."""
        self._asleep = True
        if not self._lines and not self._closing:
            self._bell.get()
        self._asleep = False

    def _write_some(self) -> None:
        """As many lines as a pipe takes in one piece, or one that is longer."""
        piece = [self._lines.popleft()]
        size = len(piece[0])
        while self._lines and size + len(self._lines[0]) <= _PIPE_BUF:
            piece.append(self._lines.popleft())
            size += len(piece[-1])
        try:
            self._write_whole("".join(piece).encode())
            self._tell_of_dropped()
        except OSError:  # nobody is there to read any more, the disk is full, …
            self._lost += len(piece)
        self._taken += size

    def _tell_of_dropped(self) -> None:
        untold = self.dropped - self._told
        if untold:
            self._write_whole(self._notice(untold).encode())
            self._told += untold

    def _write_whole(self, piece: bytes) -> None:
        while piece:
            try:
                piece = piece[os.write(self._descriptor, piece) :]
            except BlockingIOError:  # another process made the pipe so
                self._wait_for_room()

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.poll()


class DroppedLines(Collector):
    """The metric of the lines that were dropped; ``dropped`` is asked for their number."""

    def __init__(self, dropped: Callable[[], int]) -> None:
        self._dropped = dropped

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The metric."""
        text = "Log lines that were dropped, since standard error was not read, or could not be written to."
        yield CounterMetricFamily("pdproxy_log_lines_dropped", text, value=self._dropped())


class LineHandler(logging.StreamHandler[LineWriter]):
    """logging's, without filters and in half as many calls: each request writes a line."""

    def __init__(self, formatter: logging.Formatter, descriptor: int) -> None:
        super().__init__(LineWriter(descriptor, self._notice))
        self.setFormatter(formatter)

    @property
    def dropped(self) -> int:
        """Lines that were dropped since the start."""
        return self.stream.dropped

    def handle(self, record: logging.LogRecord) -> bool:
        assert self.lock is not None
        with self.lock:
            self.emit(record)
        return True

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A line in the place of one that cannot be made; logging would write to standard error itself, and wait."""
        why = sys.exc_info()[1]
        text = f"a log line could not be made: {type(why).__name__}: {why}"
        self.stream.write(f"{self.format(_record(record.name, logging.ERROR, text))}\n")

    def flush(self) -> None:
        """Lines are written by themselves."""

    def close(self) -> None:
        """Called by logging when the process ends."""
        self.stream.close()
        super().close()

    def _notice(self, dropped: int) -> str:
        text = f"{dropped} log lines were dropped: standard error was not read, or could not be written to"
        return f"{self.format(_record(__name__, logging.WARNING, text))}\n"


def configure(log: Log, descriptor: int) -> LineHandler:
    """Send the proxy's records, and warnings of the libraries, to a file descriptor; returns the handler, for tests to
    remove and close.
    """
    # No line shows its thread, its process or its place in the code: finding out costs time on every request. The
    # names are those of Python's logging HOWTO, under "Optimization".
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    formatter = JsonFormatter() if log.format is LogFormat.JSON else TextFormatter()
    handler = LineHandler(formatter, descriptor)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each malformed form that a client sends
    logging.getLogger("pdproxy").setLevel(log.level.upper())
    return handler


def configure_process(log: Log) -> LineHandler:
    """`configure` for standard error, where a process starts; and whatever else Python writes there becomes a record:
    warnings, and the tracebacks of errors that nobody catches.
    """
    _open_standard_streams()
    handler = configure(log, _STANDARD_ERROR)
    logging.captureWarnings(capture=True)
    sys.excepthook = _on_uncaught
    sys.unraisablehook = _on_unraisable
    threading.excepthook = _on_thread_ended
    return handler


def _open_standard_streams() -> None:
    """Put the null device where a standard stream is closed: a socket would get its number, and lines be sent to it."""
    opened = os.open(os.devnull, os.O_RDWR)
    while opened <= _STANDARD_ERROR:
        os.set_inheritable(opened, True)
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("pdproxy").critical("the process ends", exc_info=(kind, error, trace))


def _on_unraisable(found: "sys.UnraisableHookArgs") -> None:
    text, error = found.err_msg or "an error where none can be raised", found.exc_value
    logging.getLogger("pdproxy").error("%s: %r", text, found.object, exc_info=error)


def _on_thread_ended(found: threading.ExceptHookArgs) -> None:
    logging.getLogger("pdproxy").error("a thread ended", exc_info=found.exc_value)


def _record(name: str, level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, "%s", (text,), None)


def _time(record: logging.LogRecord) -> str:
    second = int(record.created)
    return f"{_second(second)}.{int((record.created - second) * 1000):03d}Z"


@functools.lru_cache(maxsize=1)
def _second(second: int) -> str:
    """Without its fraction: the records of one second have that in common."""
    return dt.datetime.fromtimestamp(second, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _field_name(name: str) -> str:
    """A library may use any name, even one of our own fields."""
    safe = _NOT_IN_NAMES.sub("_", name)[:LONGEST_VALUE] or "_"
    return f"{safe}_" if safe in _OWN else safe


@functools.lru_cache(maxsize=64)
def _head(level: str, logger: str, message: str) -> str:
    return f"level={level.lower()} logger={_logfmt(logger)} message={json.dumps(message)}"


def _shown(value: object) -> Value:
    return value if type(value) in _PLAIN else _cut(str(value))  # type: ignore[return-value]


def _cut(text: str, most: int = LONGEST_VALUE) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _cut_middle(text: str) -> str:
    """The end of a traceback says what happened."""
    half = LONGEST_TRACEBACK // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n... ({len(text)} characters)\n{text[-half:]}"


def _logfmt(value: Value) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if _BARE(text) else json.dumps(text)
