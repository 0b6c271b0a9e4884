"""The fields that the proxy looks at are read as vLLM's own request models read them.

Their annotations are read out of the installed source, not imported: an engine takes seconds and gigabytes to import.
"""

import ast
import json
from typing import Annotated, Any

import pytest
from msgspec import Raw
from pydantic import Field, TypeAdapter, ValidationError

from pdproxy.errors import ClientError
from pdproxy.legs.lax_fields import FIELDS, LONGEST, StreamOptions, UnreadableField, read_fields
from pdproxy.legs.shape import shape
from pdproxy.raw_json import SMALL
from pdproxy.reasons import LocalReason
from pdproxy.request import Endpoint
from tests.legs.test_fields import annotations

VALUES = [
    "null", "true", "false", "0", "1", "-1", "2", "1.0", "16.0", "-0.0", "0.5", "1e400", "1e5", "99999999999999999999",
    '""', '"0"', '"1"', '" 1 "', '"1.0"', '"1_0"', '"0.5"', '"true"', '"True"', '"no"', '"off"', '"maybe"', '"nan"',
    "[]", "[1]", "[[[]]]", "{}", '{"include_usage":"yes"}', '{"include_usage":2}', '{"continuous_usage_stats":[]}',
]  # fmt: skip
LARGEST = 2**63 - 1
NAMES = {"_INT64_MIN": -LARGEST - 1, "_INT64_MAX": LARGEST, "Annotated": Annotated, "Field": Field}
READ = [(endpoint, name) for endpoint in Endpoint for name in FIELDS[endpoint]]


def theirs(endpoint: Endpoint, name: str) -> TypeAdapter[Any]:
    """A field's value in vLLM's model."""
    annotation, default = annotations(endpoint)[name]
    known = {**NAMES, "StreamOptions": StreamOptions}
    kind = eval(ast.unparse(annotation), known)  # vLLM's own source
    bounds = default.keywords if isinstance(default, ast.Call) else []
    given = {each.arg: eval(ast.unparse(each.value), known) for each in bounds if each.arg in ("ge", "le")}
    whole: Any = Annotated[kind, Field(**given)]
    return TypeAdapter(whole)


def of(read: Any, value: object) -> Any:
    try:
        return read(value)
    except (ValidationError, UnreadableField):
        return "refused"


@pytest.mark.parametrize(("endpoint", "name"), READ)
def test_values_are_read_as_vllm_reads_them(endpoint: Endpoint, name: str) -> None:
    adapter = theirs(endpoint, name)
    for value in VALUES:
        ours = of(lambda raw: read_fields(endpoint, {name: raw})[name], Raw(value.encode()))
        expected = of(adapter.validate_python, json.loads(value))
        unserved = type(expected) is int and expected < 1
        read = float(ours) if type(ours) is int and isinstance(expected, float) else ours  # 1 is a float's value, too
        assert (unserved and ours == "refused") or repr(read) == repr(expected), (value, ours, expected)


def test_what_needs_no_conversion_is_the_value_itself() -> None:
    fields = read_fields(Endpoint.CHAT, {"stream": True, "n": 3, "presence_penalty": 0.5, "messages": [], "model": "m"})
    assert fields == {"stream": True, "n": 3, "presence_penalty": 0.5}


def test_a_field_that_an_endpoint_does_not_have_is_not_read() -> None:
    body = {"n": "x", "echo": [], "max_completion_tokens": "x", "priority": {}, "max_tokens": 7}
    assert read_fields(Endpoint.MESSAGES, body) == {"max_tokens": 7}
    assert shape(Endpoint.MESSAGES, {**body, "n": 5}).choices == 1


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT])
def test_so_many_answers_that_their_tokens_are_no_float_can_be_reckoned_with(endpoint: Endpoint) -> None:
    body = {"model": "m", "prompt": "one", "messages": [{"role": "user", "content": "one"}], "n": 10**400}
    assert float(1_000_000 * shape(endpoint, body).choices) > 0


LONG = b" " * (SMALL + 1)
REFUSED = [b"[%b1]" % (b"1," * SMALL), b'"x%b"' % LONG, b"1" * 5000, b"{%b}" % LONG]


@pytest.mark.parametrize("value", REFUSED, ids=["list", "text", "number", "object"])
def test_what_is_long_and_no_number_is_for_nodes_to_refuse(value: bytes) -> None:
    with pytest.raises(UnreadableField, match="max_tokens"):
        read_fields(Endpoint.CHAT, {"max_tokens": Raw(value)})


def test_long_values_that_nodes_take_are_read() -> None:
    options = Raw(b'{"include_usage":true,"other":"%b"}' % LONG)
    body = {"max_tokens": Raw(b'"7%b"' % LONG), "n": Raw(b"2.%b" % (b"0" * SMALL)), "stream_options": options}
    fields = read_fields(Endpoint.CHAT, body)
    assert (fields["max_tokens"], fields["n"], fields["stream_options"].include_usage) == (7, 2, True)


def test_what_is_longer_than_any_value_is_not_passed_on() -> None:
    with pytest.raises(ClientError, match="`n` is longer than") as caught:
        read_fields(Endpoint.CHAT, {"n": Raw(b'"1%b"' % (b" " * LONGEST))})
    assert (caught.value.status, caught.value.param) == (400, "n")


COMPLETION = {"prompt": "one two three"}
CHAT = {"messages": [{"role": "user", "content": "one two three"}]}
LOCAL = [
    (Endpoint.COMPLETIONS, {"echo": 1, "logprobs": 1}, LocalReason.ECHO_LOGPROBS),
    (Endpoint.COMPLETIONS, {"echo": "true", "logprobs": False}, LocalReason.ECHO_LOGPROBS),
    (Endpoint.COMPLETIONS, {"echo": 0, "logprobs": 1}, None),
    (Endpoint.COMPLETIONS, {"echo": "off", "logprobs": 1}, None),
    (Endpoint.COMPLETIONS, {"use_beam_search": "yes"}, LocalReason.BEAM_SEARCH),
    (Endpoint.COMPLETIONS, {"use_beam_search": 0.0}, None),
    (Endpoint.COMPLETIONS, {"max_tokens": False}, LocalReason.NO_TOKENS),
    (Endpoint.COMPLETIONS, {"max_tokens": "0"}, LocalReason.NO_TOKENS),
    (Endpoint.COMPLETIONS, {"prompt_logprobs": True}, LocalReason.PROMPT_LOGPROBS),
    (Endpoint.CHAT, {"echo": 1}, LocalReason.ECHO_LOGPROBS),
    (Endpoint.CHAT, {"n": 5000.0}, LocalReason.CHOICES),
    (Endpoint.CHAT, {"truncate_prompt_tokens": "-1"}, LocalReason.OPEN_TRUNCATION),
    (Endpoint.CHAT, {"truncate_prompt_tokens": -1.0, "max_tokens": "5"}, None),
    (Endpoint.CHAT, {"truncation": "auto"}, None),
    (Endpoint.RESPONSES, {"truncation": None}, LocalReason.OPEN_TRUNCATION),
    (Endpoint.RESPONSES, {"truncation": "disabled"}, None),
]


@pytest.mark.parametrize(("endpoint", "more", "why"), LOCAL)
def test_where_a_request_is_computed_depends_on_what_nodes_read(
    endpoint: Endpoint, more: dict[str, object], why: LocalReason | None
) -> None:
    base = COMPLETION if endpoint is Endpoint.COMPLETIONS else CHAT
    assert shape(endpoint, {**base, **more}).local is why


def test_a_shape_is_made_of_what_nodes_read() -> None:
    more = {"stream": "true", "n": 2.0, "max_tokens": "7", "stream_options": {"include_usage": 1}}
    made = shape(Endpoint.CHAT, {**CHAT, **more})
    assert (made.stream, made.choices, made.longest, made.wants_usage) == (True, 2, 7, True)
    assert shape(Endpoint.CHAT, {**CHAT, "stream": "off", "n": True}).choices == 1
