"""Answers and events rewritten for the client: the true cached tokens, and no ticket."""

import json

import pytest

from pdproxy.request import Endpoint
from pdproxy.stream.chunks import rewrite_answer, rewrite_event
from pdproxy.usage import CacheUse
from tests.stream.engine import events

TICKET = {"remote_host": "10.0.0.1"}


@pytest.mark.parametrize(
    ("endpoint", "usage", "expected"),
    [
        (
            Endpoint.CHAT,
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8, "multimodal_tokens": None}},
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5, "multimodal_tokens": None}},
        ),
        (
            Endpoint.COMPLETIONS,
            {"prompt_tokens": 9, "prompt_tokens_details": None},
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}},
        ),
        (
            Endpoint.RESPONSES,
            {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}},
            {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 5}},
        ),
        (
            Endpoint.MESSAGES,
            {"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 2},
            {"input_tokens": 4, "cache_read_input_tokens": 5, "output_tokens": 2},
        ),
    ],
)
def test_cached_tokens_are_the_prefill_nodes(
    endpoint: Endpoint, usage: dict[str, object], expected: dict[str, object]
) -> None:
    assert rewrite_answer(endpoint, {"usage": usage}, CacheUse(5))["usage"] == expected
    assert rewrite_answer(endpoint, {"usage": usage}, None)["usage"] == usage


@pytest.mark.parametrize(
    ("endpoint", "usage", "told"),
    [
        (
            Endpoint.CHAT,
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8, "created_cache_tokens": 0}},
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5, "created_cache_tokens": 3}},
        ),
        (
            Endpoint.RESPONSES,
            {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0}},
            {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 3}},
        ),
        (
            Endpoint.MESSAGES,
            {"input_tokens": 1, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 0, "output_tokens": 2},
            {"input_tokens": 1, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 3, "output_tokens": 2},
        ),
        (
            Endpoint.MESSAGES,
            {"input_tokens": 0, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2, "output_tokens": 2},
            {"input_tokens": 0, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2, "output_tokens": 2},
        ),
    ],
)
def test_tokens_left_in_the_cache_are_the_prefill_nodes(
    endpoint: Endpoint, usage: dict[str, object], told: dict[str, object]
) -> None:
    assert rewrite_answer(endpoint, {"usage": usage}, CacheUse(5, 3))["usage"] == told


def test_a_decode_nodes_own_count_of_what_it_left_is_not_told_for_the_prefill_nodes() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8, "created_cache_tokens": 1}}
    seen = rewrite_answer(Endpoint.CHAT, {"usage": usage}, CacheUse(5))["usage"]
    assert seen == {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5, "created_cache_tokens": None}}
    usage = {"input_tokens": 1, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 2, "output_tokens": 2}
    seen = rewrite_answer(Endpoint.MESSAGES, {"usage": usage}, CacheUse(5))["usage"]
    assert seen == {"input_tokens": 4, "cache_read_input_tokens": 5, "output_tokens": 2}


def test_tickets_do_not_leak() -> None:
    answer: dict[str, object] = {"id": "1", "kv_transfer_params": TICKET, "ec_transfer_params": None}
    assert rewrite_answer(Endpoint.CHAT, answer, None) == {
        "id": "1",
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
    (event,) = events(b"data: " + json.dumps(answer, separators=(",", ":")).encode() + b"\n\n")
    assert b"10.0.0.1" not in rewrite_event(Endpoint.CHAT, event, event.data or b"", None)
    inner = {"type": "response.completed", "response": answer}
    (event,) = events(
        b"event: response.completed\ndata: " + json.dumps(inner, separators=(",", ":")).encode() + b"\n\n"
    )
    seen = rewrite_event(Endpoint.RESPONSES, event, event.data or b"", None)
    assert b"10.0.0.1" not in seen
    assert seen.startswith(b"event: response.completed\ndata: ")


@pytest.mark.parametrize(
    ("endpoint", "raw"),
    [
        (Endpoint.CHAT, b'data: {"choices":[{"delta":{"content":"\\"usage\\":{}"}}]}\n\n'),
        (Endpoint.CHAT, b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":3}}\n\n'),
        (Endpoint.MESSAGES, b'event: message_start\ndata: {"message":{"usage":{"input_tokens":3}}}\n\n'),
    ],
)
def test_events_without_usage_or_ticket_keep_their_bytes(endpoint: Endpoint, raw: bytes) -> None:
    (event,) = events(raw)
    assert rewrite_event(endpoint, event, event.data or b"", CacheUse(5)) is event.raw


def test_streamed_usage_of_named_events() -> None:
    raw = b'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":9,"output_tokens":1}}\n\n'
    (event,) = events(raw)
    (seen,) = events(rewrite_event(Endpoint.MESSAGES, event, event.data or b"", CacheUse(5)))
    usage = json.loads(seen.data or b"")["usage"]
    assert usage == {"input_tokens": 4, "output_tokens": 1, "cache_read_input_tokens": 5}
    raw = b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":9}}}\n\n'
    (event,) = events(raw)
    (seen,) = events(rewrite_event(Endpoint.RESPONSES, event, event.data or b"", CacheUse(5)))
    assert json.loads(seen.data or b"")["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 5}
