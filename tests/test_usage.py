"""Usage in the shapes that vLLM 0.32 writes."""

import json

import pytest

from pdproxy.usage import Usage, read_usage, read_usage_event

SHAPES = [
    ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}, Usage(9, 2, 8)),
    ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None}, Usage(9, 2, None)),
    ({"prompt_tokens": 9, "completion_tokens": 2}, Usage(9, 2, None)),
    ({"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}, Usage(9, 2, 8)),
    ({"input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": 8}, Usage(9, 2, 8)),
    (
        {"input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 3},
        Usage(9, 2, 5),
    ),
    ({"input_tokens": 9, "output_tokens": 2}, Usage(9, 2, None)),
    ({"input_tokens": "9", "output_tokens": True}, Usage(None, None, None)),
]


@pytest.mark.parametrize(("usage", "told"), SHAPES)
def test_usage_is_read_as_each_endpoint_writes_it(usage: object, told: Usage) -> None:
    assert read_usage(usage) == told


@pytest.mark.parametrize("usage", [{}, None, [1], "9"])
def test_other_values_are_no_usage(usage: object) -> None:
    assert read_usage(usage) is None


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"choices": [], "usage": SHAPES[0][0]}, SHAPES[0][1]),
        ({"choices": [], "usage": SHAPES[2][0]}, SHAPES[2][1]),
        ({"type": "message_delta", "delta": {}, "usage": SHAPES[4][0]}, SHAPES[4][1]),
        ({"type": "response.completed", "response": {"usage": SHAPES[3][0]}}, SHAPES[3][1]),
        ({"type": "message_start", "message": {"usage": SHAPES[6][0]}}, None),
        ({"type": "response.created", "response": {"usage": None}}, None),
        ({"choices": [{"text": '"prompt_tokens":7, "output_tokens":7'}]}, None),
        ({"delta": {"partial_json": '{"output_tokens": 1}'}}, None),
    ],
)
def test_usage_is_read_from_events(event: object, told: Usage | None) -> None:
    assert read_usage_event(json.dumps(event).encode()) == told


def test_an_event_that_is_no_json_has_no_usage() -> None:
    assert read_usage_event(b'{"usage":{"output_tokens":') is None


@pytest.mark.parametrize(
    ("prompt", "cached", "tail", "recomputed"),
    [
        (100, 99, 8, False),
        (100, 96, 8, False),
        (100, 84, 8, True),
        (100, 84, 32, False),
        (100, 67, 32, True),
        (100, 0, 8, True),
        (100, None, 8, False),
        (None, 3, 8, False),
    ],
)
def test_recomputing_shows_in_the_cached_tokens(
    prompt: int | None, cached: int | None, tail: int, recomputed: bool
) -> None:
    assert Usage(prompt, 1, cached).recomputed(tail) is recomputed
