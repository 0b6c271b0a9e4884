"""Log lines: one for each record, whatever is in it."""

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from pdproxy.observe.logs import JsonFormatter, TextFormatter, configure
from pdproxy.settings.model import Log
from pdproxy.settings.types import LogFormat, LogLevel


@pytest.fixture
def levels() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("pdproxy")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    # Not `makeLogRecord`: that one uses the record factory, which vLLM replaces for the whole process when imported.
    made = logging.LogRecord("pdproxy.x", logging.INFO, __file__, 1, message, args, None)
    made.created = 0.0
    made.__dict__.update(extra)
    return made


def test_json_has_the_extras_as_fields() -> None:
    line = json.loads(JsonFormatter().format(record("took %d", 5, request_id="r1", odd=object)))
    assert line == {
        "time": "1970-01-01T00:00:00.000Z",
        "level": "info",
        "logger": "pdproxy.x",
        "message": "took 5",
        "request_id": "r1",
        "odd": str(object),
    }


def test_text_has_the_extras_behind_the_message() -> None:
    line = TextFormatter().format(record("took %d", 5, request_id="r1"))
    assert line == "1970-01-01T00:00:00.000Z INFO pdproxy.x: took 5 request_id=r1"


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_control_characters_are_escaped(formatter: logging.Formatter) -> None:
    line = formatter.format(record("a\nb\r\x1b[2J\x85c\u2028d\x9b2J", request_id="x\n2026 INFO forged"))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert "\x9b" not in line


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_a_traceback_is_logged(formatter: logging.Formatter) -> None:
    nothing: dict[str, str] = {}
    try:
        nothing["missing"]
    except KeyError:
        line = formatter.format(record("failed", exc_info=sys.exc_info()))
    assert "KeyError: 'missing'" in line


@pytest.mark.usefixtures("levels")
@pytest.mark.parametrize("form", LogFormat)
def test_configured_level_and_format_hold(form: LogFormat) -> None:
    stream = io.StringIO()
    handler = configure(Log(level=LogLevel.INFO, format=form), stream)
    try:
        logging.getLogger("pdproxy.x").debug("not this")
        logging.getLogger("elsewhere").info("nor this")
        logging.getLogger("pdproxy.x").info("but this")
        logging.getLogger("elsewhere").warning("and this")
    finally:
        logging.getLogger().removeHandler(handler)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "but this" in lines[0]
    assert "and this" in lines[1]
    assert lines[0].startswith("{") is (form is LogFormat.JSON)


def test_a_request_leaves_its_timeline(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("pdproxy.test")
    with caplog.at_level(logging.INFO, logger.name):
        facts = {"request_id": "r1", "model": "m", "status": 200, "prefill_ms": 12.3}
        logger.info("request ended", extra=facts)
    line = json.loads(JsonFormatter().format(caplog.records[0]))
    assert line["message"] == "request ended"
    assert {name: line[name] for name in ("request_id", "model", "status", "prefill_ms")} == {
        "request_id": "r1",
        "model": "m",
        "status": 200,
        "prefill_ms": 12.3,
    }
