"""How long clients want their conversations kept, in the fields of OpenAI and Anthropic."""

import json
from typing import Any

import pytest

from pdproxy.errors import ClientError
from pdproxy.legs.keep_words import keep_asked
from pdproxy.legs.parse import parse
from pdproxy.raw_json import MOST_ITEMS, PIECE, at_once
from pdproxy.reasons import KeepReason
from pdproxy.request import Endpoint, KeepAsk

OPENAI = [Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.RESPONSES]
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def asked(endpoint: Endpoint, **body: Any) -> KeepAsk | None:
    raw = json.dumps(body).encode()
    return at_once(keep_asked(endpoint, parse(raw), raw))


@pytest.mark.parametrize("endpoint", OPENAI)
@pytest.mark.parametrize(("word", "seconds"), [("24h", 86400.0), ("in_memory", 3600.0), ("in-memory", 3600.0)])
def test_a_retention_is_a_time(endpoint: Endpoint, word: str, seconds: float) -> None:
    assert asked(endpoint, prompt_cache_retention=word) == KeepAsk(seconds, KeepReason.PROMPT_CACHE_RETENTION)


@pytest.mark.parametrize("endpoint", OPENAI)
def test_options_have_a_time(endpoint: Endpoint) -> None:
    half_an_hour = KeepAsk(1800.0, KeepReason.PROMPT_CACHE_OPTIONS)
    assert asked(endpoint, prompt_cache_options={"ttl": "30m"}) == half_an_hour
    assert asked(endpoint, prompt_cache_options={"ttl": "30m", "mode": "implicit"}) == half_an_hour
    assert asked(endpoint, prompt_cache_options={"mode": "implicit"}) is None


def test_of_two_fields_the_longer_time_counts() -> None:
    both = asked(Endpoint.CHAT, prompt_cache_retention="24h", prompt_cache_options={"ttl": "30m"})
    assert both == KeepAsk(86400.0, KeepReason.PROMPT_CACHE_RETENTION)
    both = asked(Endpoint.CHAT, prompt_cache_retention=None, prompt_cache_options={"ttl": "1h"})
    assert both == KeepAsk(3600.0, KeepReason.PROMPT_CACHE_OPTIONS)


def test_explicit_caching_without_a_breakpoint_asks_for_none() -> None:
    explicit = {"mode": "explicit", "ttl": "30m"}
    assert asked(Endpoint.CHAT, prompt_cache_options=explicit) == KeepAsk(0.0, KeepReason.PROMPT_CACHE_OPTIONS)
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {}}
    messages = [{"role": "user", "content": [part]}]
    assert asked(Endpoint.CHAT, prompt_cache_options=explicit, messages=messages) == KeepAsk(
        1800.0, KeepReason.PROMPT_CACHE_OPTIONS
    )


@pytest.mark.parametrize("endpoint", Endpoint)
def test_most_requests_ask_for_nothing(endpoint: Endpoint) -> None:
    assert asked(endpoint, model="m", prompt="p", messages=[{"role": "user", "content": "cache_control"}]) is None
    assert asked(endpoint, prompt_cache_key="k", prompt_cache_retention=None, prompt_cache_options=None) is None


@pytest.mark.parametrize(
    "body",
    [
        {"cache_control": EPHEMERAL},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}]}]},
        {"system": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}], "messages": []},
        {"tools": [{"name": "t", "input_schema": {}, "cache_control": EPHEMERAL}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "content": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}]}
                    ],
                },
                {"role": "assistant", "content": "b"},
            ]
        },
    ],
)
def test_a_cache_control_may_stand_in_many_places(body: dict[str, Any]) -> None:
    assert asked(Endpoint.MESSAGES, **body) == KeepAsk(300.0, KeepReason.CACHE_CONTROL)


def test_the_last_breakpoint_says_how_long() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": HOUR}]}
    system = [{"type": "text", "text": "s", "cache_control": EPHEMERAL}]
    found = asked(Endpoint.MESSAGES, system=system, messages=[message, {"role": "user", "content": "b"}])
    assert found == KeepAsk(3600.0, KeepReason.CACHE_CONTROL)
    assert asked(Endpoint.MESSAGES, cache_control=EPHEMERAL, messages=[message]) == KeepAsk(
        300.0, KeepReason.CACHE_CONTROL
    )
    assert asked(Endpoint.MESSAGES, cache_control=None, messages=[message]) == found


def test_a_breakpoint_deep_in_a_long_body_is_found() -> None:
    long = [{"role": "user", "content": "a" * PIECE}, {"role": "user", "content": [{"cache_control": HOUR}]}]
    assert asked(Endpoint.MESSAGES, messages=long) == KeepAsk(3600.0, KeepReason.CACHE_CONTROL)


def test_only_a_breakpoint_counts() -> None:
    """Not what a tool calls so, or a text says."""
    schema = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    call = {"type": "tool_use", "id": "1", "name": "t", "input": {"cache_control": 7}}
    text = {"type": "text", "text": '"cache_control":{"ttl":"9h"}'}
    messages = [{"role": "assistant", "content": [call, text]}]
    assert asked(Endpoint.MESSAGES, tools=[{"name": "t", "input_schema": schema}], messages=messages) is None


@pytest.mark.parametrize(
    "odd", [7, "a", [7], [[]], {"role": "user"}, [{"content": 7}], [{"content": [[{"cache_control": {}}]]}], None]
)
def test_values_that_a_node_refuses_are_left_to_it(odd: object) -> None:
    assert asked(Endpoint.MESSAGES, messages=odd, system=odd, tools=odd, metadata={"cache_control": 1}) is None


@pytest.mark.parametrize(
    ("endpoint", "body", "says"),
    [
        (Endpoint.CHAT, {"prompt_cache_retention": "48h"}, "`prompt_cache_retention` must be `in_memory` or `24h`."),
        (Endpoint.CHAT, {"prompt_cache_retention": 24}, "`prompt_cache_retention` must be `in_memory` or `24h`."),
        (Endpoint.CHAT, {"prompt_cache_options": "30m"}, "`prompt_cache_options` must be an object."),
        (
            Endpoint.RESPONSES,
            {"prompt_cache_options": {"ttl": "2d"}},
            "`prompt_cache_options.ttl` must be `5m` or `30m` or `1h` or `24h`.",
        ),
        (Endpoint.MESSAGES, {"cache_control": "ephemeral"}, "`cache_control` must be an object."),
        (Endpoint.MESSAGES, {"cache_control": {"ttl": "1h"}}, "`cache_control.type` must be `ephemeral`."),
        (
            Endpoint.MESSAGES,
            {"tools": [{"cache_control": {"type": "ephemeral", "ttl": "24h"}}]},
            "`cache_control.ttl` must be `5m` or `1h`.",
        ),
    ],
)
def test_a_bad_value_is_refused_in_words(endpoint: Endpoint, body: dict[str, Any], says: str) -> None:
    with pytest.raises(ClientError) as refused:
        asked(endpoint, **body)
    assert (refused.value.status, refused.value.message) == (400, says)
    assert refused.value.param == next(iter(body)) or refused.value.param == "cache_control"


def test_a_body_of_very_many_blocks_is_looked_at_in_part() -> None:
    found = asked(Endpoint.MESSAGES, messages=[{}] * (2 * MOST_ITEMS) + [{"content": [{"cache_control": HOUR}]}])
    assert found is None, "no more than so many are looked at, so that a client cannot make millions of objects"
