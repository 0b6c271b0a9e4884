"""Logs: one line a record, JSON or text, on top of the standard library's logging.

Details stand in ``extra``: ``_LOG.info("client left", extra={"request_id": name})``. A line that is written on behalf
of a traced request has the ids of its trace and span, ``trace_id`` and ``span_id``.
"""

import datetime as dt
import functools
import logging
from typing import TextIO

from pdproxy.observe.tracing import trace_ids
from pdproxy.request import write_json_line
from pdproxy.settings.model import Log
from pdproxy.settings.types import LogFormat

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)} | {10: "\\n", 13: "\\r"}
"""Characters that could end a line, or control a terminal."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and the ``extra`` fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return write_json_line(line)


class TextFormatter(logging.Formatter):
    """``time LEVEL logger: message key=value …``; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        extras = "".join([f" {name}={value}" for name, value in _extras(record).items()])
        text = f"{record.name}: {record.getMessage()}{extras}"
        if not text.isprintable():
            text = text.translate(_ESCAPES)
        line = f"{_time(record)} {record.levelname} {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class LineHandler(logging.StreamHandler[TextIO]):
    """logging's, without filters and in half as many calls: each request writes a line."""

    def handle(self, record: logging.LogRecord) -> bool:
        assert self.lock is not None
        with self.lock:
            self.emit(record)
        return True

    def flush(self) -> None:
        self.stream.flush()


def configure(log: Log, stream: TextIO) -> logging.Handler:
    """Send the proxy's records, and warnings of the libraries, to a stream; returns the handler, for tests to remove.

    Called once, where a process starts.
    """
    # No line shows its thread, its process or its place in the code: finding out costs time on every request. The
    # names are those of Python's logging HOWTO, under "Optimization".
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = LineHandler(stream)
    handler.setFormatter(JsonFormatter() if log.format is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("pdproxy").setLevel(log.level.upper())
    return handler


def _time(record: logging.LogRecord) -> str:
    second, part = divmod(record.created, 1)
    return f"{_second(second)}.{int(part * 1000):03d}Z"


@functools.lru_cache(maxsize=1)
def _second(second: float) -> str:
    """Without its fraction: the records of one second have that in common."""
    return dt.datetime.fromtimestamp(second, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _extras(record: logging.LogRecord) -> dict[str, object]:
    extras = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
    extras.update(trace_ids())
    return extras
