"""Log lines: one for each record, whatever is in it, that is read back as it was written; and written by a thread that
keeps nobody waiting.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import select
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.observe.logs import (
    LONGEST_TRACEBACK,
    LONGEST_VALUE,
    JsonFormatter,
    LineFormatter,
    LineHandler,
    LineWriter,
    TextFormatter,
    configure,
)
from pdproxy.settings.model import Log
from pdproxy.settings.types import LogFormat, LogLevel

SOON = 20.0
FORMATTERS = [JsonFormatter(), TextFormatter()]
PAIR = re.compile(r'([^\s="]+)=("(?:[^"\\]|\\.)*"|[^\s="]*)(?: |$)')
"""A field of logfmt, as its parsers read it."""


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


def read_back(line: str) -> dict[str, object]:
    """The fields of a line in either format, as text."""
    if line.startswith("{"):
        return {name: each if isinstance(each, str) else str(each) for name, each in json.loads(line).items()}
    found, at = {}, 0
    while at < len(line):
        pair = PAIR.match(line, at)
        assert pair is not None, line[at:]
        found[pair[1]] = json.loads(pair[2]) if pair[2].startswith('"') else pair[2]
        at = pair.end()
    return found


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


def test_text_is_logfmt() -> None:
    line = TextFormatter().format(record("took %d", 5, request_id="r1", part=0.5))
    start = "time=1970-01-01T00:00:00.000Z level=info logger=pdproxy.x"
    assert line == f'{start} message="took 5" request_id=r1 part=0.5'


HOSTILE = [
    "x outcome=ok",
    'x" outcome="ok',
    "\\",
    '\\"',
    "",
    "=",
    "a\nb\r\x1b[2J\x85c\u2028d\x9b2J\x7f\x00",
    "2026 INFO forged",
    "\udc80\ud800",
    "\U0001f600 模型",
    "{}",
    "%s %d",
]


def check(formatter: LineFormatter, text: str, name: str) -> None:
    made = record("%s", text, model=text, status=200)
    made.__dict__[name] = text
    line = formatter.format(made)
    text = json.loads(json.dumps(text))  # two surrogates that make a pair are one character, to any reader of JSON
    assert re.fullmatch(r"[ -~]+", line)
    fields = read_back(line)
    assert fields.pop("message") == fields.pop("model") == text
    assert fields.pop("status") == "200"
    assert (fields.pop("level"), fields.pop("logger"), fields.pop("time")) == (
        "info",
        "pdproxy.x",
        "1970-01-01T00:00:00.000Z",
    )
    assert list(fields.values()) == ([text] if fields else [])


@pytest.mark.parametrize("formatter", FORMATTERS)
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_adds_no_line_and_no_field(formatter: LineFormatter, text: str) -> None:
    check(formatter, text, "odd")


ANY_TEXT = st.text(st.characters(codec=None), max_size=300)  # lone surrogates too
NAMES = st.one_of(st.sampled_from(["time", "level", "message", "exception", "a b", "a=b", 'a"', "\n", ""]), ANY_TEXT)


@given(text=ANY_TEXT, name=NAMES)
def test_any_text_is_read_back(text: str, name: str) -> None:
    for formatter in FORMATTERS:
        if name not in record("x").__dict__ and name not in ("model", "status"):
            check(formatter, text, name)


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_giant_values_are_cut(formatter: LineFormatter) -> None:
    fields = read_back(formatter.format(record("%s", "a" * 10**6, model="b" * 10**6, names=["c" * 10**6])))
    assert fields["model"] == "b" * LONGEST_VALUE + "... (1000000 characters)"
    assert sum(len(str(value)) for value in fields.values()) < 5 * LONGEST_VALUE


def fail(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("formatter", FORMATTERS)
@pytest.mark.parametrize("size", [0, 10**6])
def test_a_traceback_is_a_field(formatter: LineFormatter, size: int) -> None:
    try:
        fail("a" * size + "\nlevel=info forged")
    except ValueError:
        line = formatter.format(record("failed", exc_info=sys.exc_info()))
    fields = read_back(line)
    assert re.fullmatch(r"[ -~]+", line)
    assert str(fields["exception"]).startswith("Traceback (most recent call last):\n")
    assert str(fields["exception"]).endswith("\nlevel=info forged")
    assert len(str(fields["exception"])) < LONGEST_TRACEBACK + 100


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """The smallest there is, with its two ends."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)
    try:
        yield read, write
    finally:
        for end in (read, write):
            with contextlib.suppress(OSError):
                os.close(end)


@contextlib.contextmanager
def configured(descriptor: int, form: LogFormat = LogFormat.TEXT) -> Iterator[None]:
    handler = configure(Log(level=LogLevel.INFO, format=form), descriptor)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


@pytest.mark.usefixtures("levels")
@pytest.mark.parametrize("form", LogFormat)
def test_configured_level_and_format_hold(form: LogFormat, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file, configured(file.fileno(), form):
        logging.getLogger("pdproxy.x").debug("not this")
        logging.getLogger("elsewhere").info("nor this")
        logging.getLogger("python_multipart.multipart").warning("nor what a library says of a client's bytes")
        logging.getLogger("pdproxy.x").info("but this")
        logging.getLogger("elsewhere").warning("and this")
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2
    assert "but this" in lines[0]
    assert "and this" in lines[1]
    assert lines[0].startswith("{") is (form is LogFormat.JSON)


class Odd:
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


def test_a_line_that_cannot_be_made_is_told_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "log").open("wb") as file:
        handler = LineHandler(TextFormatter(), file.fileno())
        for each in (record("%d", "no number"), record("odd", what=Odd()), record("and on")):
            handler.handle(each)
        handler.close()
    lines = (tmp_path / "log").read_text().splitlines()
    told = ("TypeError: %d format", "RuntimeError: cannot be shown", "and on")
    assert [word in line for word, line in zip(told, lines, strict=True)] == [True] * 3
    assert capfd.readouterr() == ("", "")


def notice(dropped: int) -> str:
    return f"dropped {dropped}\n"


def wait_until(reached: Callable[[], bool]) -> None:
    for _ in range(int(SOON / 0.005)):
        if reached():
            return
        threading.Event().wait(0.005)
    raise AssertionError("never")


def drain(read: int) -> str:
    """The bytes until all that write have closed."""
    with open(read, "rb", closefd=False) as file:
        return file.read().decode()


def test_a_pipe_that_nobody_reads_keeps_nobody_waiting() -> None:
    line = "x" * 999 + "\n"
    with pipe() as (read, write):
        writer = LineWriter(write, notice)
        for _ in range(5000):
            writer.write(line)
        dropped = writer.dropped
        assert 3000 < dropped < 5000
        got: list[str] = []
        reader = threading.Thread(target=lambda: got.append(drain(read)))
        reader.start()
        wait_until(lambda: not writer._lines)
        writer.write("after\n")
        writer.close(SOON)
        os.close(write)
        reader.join(SOON)
    lines = got[0].splitlines(keepends=True)
    assert lines.count(line) == 5000 - dropped
    assert [each for each in lines if each != line] in ([f"dropped {dropped}\n", "after\n"], ["after\n"])
    assert f"dropped {dropped}\n" in lines


def test_its_end_does_not_wait_for_a_reader() -> None:
    with pipe() as (read, write):
        writer = LineWriter(write, notice)
        for _ in range(100):
            writer.write("x" * 999 + "\n")
        writer.close(0.05)
        os.close(read)  # ends the thread
        writer.close(SOON)


def test_a_closed_pipe_is_counted_and_survived() -> None:
    with pipe() as (read, write):
        os.close(read)
        writer = LineWriter(write, notice)
        writer.write("one\n")
        wait_until(lambda: writer.dropped == 1)
        writer.write("two\n")
        writer.close(SOON)
        assert writer.dropped == 2


def test_a_pipe_that_another_process_made_non_blocking_loses_nothing() -> None:
    with pipe() as (read, write):
        os.set_blocking(write, False)
        writer = LineWriter(write, notice)
        lines = [f"{number:0999}\n" for number in range(100)]
        for line in lines:
            writer.write(line)
        got: list[str] = []
        reader = threading.Thread(target=lambda: got.append(drain(read)))
        reader.start()
        writer.close(SOON)
        os.close(write)
        reader.join(SOON)
    assert got[0] == "".join(lines)


def test_lines_go_out_soon_whole_and_in_pieces_that_a_pipe_takes_at_once() -> None:
    with pipe() as (read, write):
        writer = LineWriter(write, notice)
        writer.write("one\n")
        assert os.read(read, 10_000) == b"one\n"
        for _ in range(12):
            writer.write("x" * 999 + "\n")
        pieces: list[bytes] = []
        while sum(map(len, pieces)) < 12_000:
            pieces.append(os.read(read, 10_000))
        writer.close(SOON)
    assert all(piece.endswith(b"x\n") for piece in pieces)
