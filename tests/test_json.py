"""JSON as the standard library has it, whatever comes: only quicker."""

import datetime as dt
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.request import read_json, write_json, write_json_line

RARE = [
    b'"\\ud800"', b'{"\\udfff":[1]}', b'"\\ud83d\\ude00"', b"NaN", b"[-Infinity]", b"1e400", b"-0", b"-0.0", b"1E5",
    b"18446744073709551616", b"-9223372036854775809", b"9007199254740993", b"5e-324", b"123456789.123456789012345",
    b'{"a":1,"a":2}', b'"\x01"', b'"\xff"', b'"\xed\xa0\x80"', b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b"", b" ",
    b"[1,]", b"{}x", b"01", b"1.", b"'a'", b'"\xe2\x80\xa8"',
]  # fmt: skip

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


def outcome(read: Callable[[bytes], object], raw: bytes) -> str:
    """The value with its types, or the kind of error."""
    try:
        return repr(read(raw))
    except (ValueError, RecursionError) as error:
        return type(error).__name__


@pytest.mark.parametrize("raw", RARE, ids=repr)
def test_what_is_rare_is_read_as_by_the_standard_library(raw: bytes) -> None:
    assert outcome(read_json, raw) == outcome(json.loads, raw)


@pytest.mark.hypothesis
@given(
    st.binary(max_size=20)
    | st.text(alphabet='{}[]",:0123456789.eE-+\\u\ud800 truefalsn').map(
        lambda text: text.encode("utf-8", "surrogatepass")
    )
)
def test_any_bytes_are_read_as_by_the_standard_library(raw: bytes) -> None:
    assert outcome(read_json, raw) == outcome(json.loads, raw)


@pytest.mark.hypothesis
@given(values)
def test_any_value_survives(value: Any) -> None:
    assert repr(json.loads(write_json(value))) == repr(value)
    assert repr(read_json(write_json(value))) == repr(value)


def test_deep_nesting_is_an_error_of_the_standard_library() -> None:
    with pytest.raises(RecursionError):
        read_json(b"[" * 100_000)


def test_what_is_no_number_in_json_becomes_null() -> None:
    assert write_json([math.nan, math.inf]) == b"[null,null]"


def test_a_log_line_is_printable_ascii_whatever_is_in_it() -> None:
    line = {"text": "a\u2028b\x9bc\x7f\ud800é", "at": dt.timedelta(seconds=1), "error": ValueError("x"), None: 1}
    written = write_json_line(line)
    assert written.isascii()
    assert written.isprintable()
    assert json.loads(written)["text"] == line["text"]
    assert json.loads(write_json_line({"error": ValueError("x")})) == {"error": "x"}
