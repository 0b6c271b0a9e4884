"""From what somebody wrote to what a setting is."""

from pathlib import Path

import pytest

from pdproxy.settings import LogLevel, OtelExport
from pdproxy.settings.convert import Unfit, convert, expected
from pdproxy.settings.meaning import Meaning

PLAIN = Meaning("Plain.")
SECONDS = Meaning("Time.", "seconds", above=0)
BYTES = Meaning("Size.", "bytes", least=1024)
PORT = Meaning("Port.", least=0, most=65535)


@pytest.mark.parametrize(
    ("value", "kind", "meaning", "result"),
    [
        ("5", float, SECONDS, 5.0),
        (5, float, SECONDS, 5.0),
        ("2.5s", float, SECONDS, 2.5),
        ("500ms", float, SECONDS, 0.5),
        ("1.5 h", float, SECONDS, 5400.0),
        ("10m", float, SECONDS, 600.0),
        ("64MiB", int, BYTES, 64 * 2**20),
        ("1 KiB", int, BYTES, 1024),
        (8080, int, PORT, 8080),
        ("8080", int, PORT, 8080),
        (False, OtelExport, PLAIN, OtelExport.OFF),
        ("Debug", LogLevel, PLAIN, LogLevel.DEBUG),
        ("a, b,", tuple[str, ...], PLAIN, ("a", "b")),
        (["a", "b"], tuple[str, ...], PLAIN, ("a", "b")),
        (" x ", str, PLAIN, "x"),
        ("", Path | None, PLAIN, None),
        (None, Path | None, PLAIN, None),
        ("/a", Path | None, PLAIN, Path("/a")),
    ],
)
def test_fits(value: object, kind: object, meaning: Meaning, result: object) -> None:
    converted = convert(value, kind, meaning)
    assert converted == result
    assert type(converted) is type(result)


@pytest.mark.parametrize(
    ("value", "kind", "meaning", "message"),
    [
        ("soon", float, SECONDS, "a number of seconds above 0"),
        (0, float, SECONDS, "a number of seconds above 0"),
        ("nan", float, SECONDS, "a number of seconds above 0"),
        ("inf", float, SECONDS, "a number of seconds above 0"),
        (10**400, float, SECONDS, "a number of seconds above 0"),
        (True, float, SECONDS, "a number of seconds above 0"),
        ("5MiB", float, SECONDS, "a number of seconds above 0"),
        (None, int, BYTES, "a whole number of bytes, at least 1024"),
        (10, int, BYTES, "a whole number of bytes, at least 1024"),
        (2000.5, int, BYTES, "a whole number of bytes, at least 1024"),
        (65536, int, PORT, "a whole number from 0 to 65535"),
        (-1, int, PORT, "a whole number from 0 to 65535"),
        (True, LogLevel, PLAIN, "one of debug, info, warning, error"),
        ("loud", LogLevel, PLAIN, "one of debug, info, warning, error"),
        (["x"], LogLevel, PLAIN, "one of debug, info, warning, error"),
        (5, str, PLAIN, "a text"),
        ([1], tuple[str, ...], PLAIN, "a list of texts"),
        (5, Path | None, PLAIN, "the path of a file"),
    ],
)
def test_does_not_fit_and_says_what_would(value: object, kind: object, meaning: Meaning, message: str) -> None:
    with pytest.raises(Unfit) as caught:
        convert(value, kind, meaning)
    assert str(caught.value) == message == expected(kind, meaning)
