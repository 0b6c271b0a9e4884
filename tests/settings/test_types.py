"""How values are converted to settings, and what is said of those that cannot be."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from pdproxy.settings.catalog import Setting
from pdproxy.settings.model import Section
from pdproxy.settings.types import (
    Address,
    Bytes,
    LogLevel,
    OptionalAddress,
    OptionalFile,
    OtelExport,
    Port,
    Seconds,
    Text,
    Texts,
)

HERE = __file__
ABOVE_0 = Field(gt=0)
AT_LEAST_1024 = Field(ge=1024)
PLAIN = Field()


@cache
def section(kind: Any, bounds: FieldInfo) -> type[Section]:
    """A section with one setting, ``x``; pydantic searches all loaded modules to make it."""
    made: type[Section] = create_model("Sample", __base__=Section, x=(kind, bounds))
    return made


def converted(value: object, kind: Any, bounds: FieldInfo) -> object:
    """The value that a setting becomes. Raises ValidationError: it cannot be a value of the setting."""
    return section(kind, bounds).model_validate({"x": value}).model_dump()["x"]


@pytest.mark.parametrize(
    ("value", "kind", "bounds", "result"),
    [
        ("5", Seconds, ABOVE_0, 5.0),
        (5, Seconds, ABOVE_0, 5.0),
        ("2.5s", Seconds, ABOVE_0, 2.5),
        ("500ms", Seconds, ABOVE_0, 0.5),
        ("1.5 h", Seconds, ABOVE_0, 5400.0),
        ("10m", Seconds, ABOVE_0, 600.0),
        ("64MiB", Bytes, AT_LEAST_1024, 64 * 2**20),
        ("1 KiB", Bytes, AT_LEAST_1024, 1024),
        (8080, Port, PLAIN, 8080),
        ("8080", Port, PLAIN, 8080),
        (False, OtelExport, PLAIN, OtelExport.OFF),
        ("Debug", LogLevel, PLAIN, LogLevel.DEBUG),
        ("a, b,", Texts, PLAIN, ("a", "b")),
        (["a", "b"], Texts, PLAIN, ("a", "b")),
        (" x ", Text, PLAIN, "x"),
        ("", OptionalFile, PLAIN, None),
        (None, OptionalFile, PLAIN, None),
        (HERE, OptionalFile, PLAIN, Path(HERE)),
        ("http://[::1]:8000/", Address, PLAIN, "http://[::1]:8000"),
        ("", OptionalAddress, PLAIN, ""),
    ],
)
def test_values_are_converted(value: object, kind: object, bounds: FieldInfo, result: object) -> None:
    made = converted(value, kind, bounds)
    assert made == result
    assert type(made) is type(result)


@pytest.mark.parametrize(
    ("value", "kind", "bounds", "words"),
    [
        ("soon", Seconds, ABOVE_0, "a number of seconds above 0"),
        (0, Seconds, ABOVE_0, "a number of seconds above 0"),
        ("nan", Seconds, ABOVE_0, "a number of seconds above 0"),
        ("inf", Seconds, ABOVE_0, "a number of seconds above 0"),
        (10**400, Seconds, ABOVE_0, "a number of seconds above 0"),
        (True, Seconds, ABOVE_0, "a number of seconds above 0"),
        ("5MiB", Seconds, ABOVE_0, "a number of seconds above 0"),
        (None, Bytes, AT_LEAST_1024, "a whole number of bytes, at least 1024"),
        (10, Bytes, AT_LEAST_1024, "a whole number of bytes, at least 1024"),
        (2000.5, Bytes, AT_LEAST_1024, "a whole number of bytes, at least 1024"),
        (65536, Port, PLAIN, "a whole number from 0 to 65535"),
        (-1, Port, PLAIN, "a whole number from 0 to 65535"),
        (True, LogLevel, PLAIN, "one of debug, info, warning, error"),
        ("loud", LogLevel, PLAIN, "one of debug, info, warning, error"),
        (["x"], LogLevel, PLAIN, "one of debug, info, warning, error"),
        (5, Text, PLAIN, "a text"),
        ([1], Texts, PLAIN, "a list of texts"),
        (5, OptionalFile, PLAIN, "the path of a file"),
        ("/nowhere", OptionalFile, PLAIN, "the path of a file"),
        ("here", Address, PLAIN, "an address such as http://10.0.0.1:8000"),
        ("http://", Address, PLAIN, "an address such as http://10.0.0.1:8000"),
        ("http://a b", Address, PLAIN, "an address such as http://10.0.0.1:8000"),
        ("http://a:0", Address, PLAIN, "an address such as http://10.0.0.1:8000"),
        ("http://a:b", Address, PLAIN, "an address such as http://10.0.0.1:8000"),
        ("http://u:p@a", Address, PLAIN, "an address such as http://10.0.0.1:8000"),
        ("64MiB and more", Bytes, AT_LEAST_1024, "a whole number of bytes, at least 1024"),
    ],
)
def test_invalid_values_are_refused_with_what_is_valid(
    value: object, kind: object, bounds: FieldInfo, words: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        converted(value, kind, bounds)
    assert caught.value.error_count() == 1
    assert Setting("", "x", section(kind, bounds).model_fields["x"]).takes == words
