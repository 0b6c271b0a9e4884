"""The origin of an answer's end: the model, or the node."""

from typing import Any

import pytest

from pdproxy.finish_reasons import chunk_reasons, is_aborted, message_stop_reason, whole_reasons
from pdproxy.request import Endpoint

WHOLE: dict[Endpoint, list[dict[str, Any]]] = {
    Endpoint.COMPLETIONS: [
        {"choices": [{"finish_reason": reason}]} for reason in ("stop", "length", "repetition", None)
    ],
    Endpoint.CHAT: [{"choices": [{"finish_reason": "tool_calls", "message": {"content": "abort"}}]}, {"choices": []}],
    Endpoint.MESSAGES: [{"stop_reason": "end_turn"}, {"content": []}],
    Endpoint.RESPONSES: [
        {"status": "completed", "usage": {"output_tokens": 1}},
        {"status": "incomplete", "usage": {"output_tokens": 0}},
        {"status": "completed"},
    ],
}
ABORTED: dict[Endpoint, list[dict[str, Any]]] = {
    Endpoint.COMPLETIONS: [{"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]}],
    Endpoint.CHAT: [{"choices": [{"finish_reason": "abort", "message": {"content": "half an"}}]}],
    Endpoint.MESSAGES: [{"stop_reason": None, "content": []}],
    Endpoint.RESPONSES: [
        {"status": "completed", "usage": {"output_tokens": 0}},
        {"status": "cancelled", "usage": {"output_tokens": 5}},
    ],
}


@pytest.mark.parametrize("endpoint", Endpoint)
def test_an_answer_that_the_node_gave_up_is_told_from_a_whole_one(endpoint: Endpoint) -> None:
    assert [is_aborted(endpoint, answer) for answer in WHOLE[endpoint]] == [False] * len(WHOLE[endpoint])
    assert [is_aborted(endpoint, answer) for answer in ABORTED[endpoint]] == [True] * len(ABORTED[endpoint])


def test_the_reasons_of_events() -> None:
    chunk = b'{"choices":[{"index":0,"finish_reason":"stop"},{"index":1,"finish_reason":"length"}]}'
    assert chunk_reasons(chunk) == ["stop", "length"]
    assert (
        chunk_reasons(b'{"choices":[{"delta":{"content":"\\"finish_reason\\":\\"stop\\""},"finish_reason":null}]}')
        == []
    )
    assert message_stop_reason(b'{"delta": {"stop_reason": "end_turn"}}') == "end_turn"
    assert message_stop_reason(b'{"delta":{"stop_reason":null,"stop_sequence":null}}') == "abort"
    assert message_stop_reason(b'{"delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":0}}') == "abort"
    assert message_stop_reason(b'{"delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":10}}') == "end_turn"
    assert message_stop_reason(b'{"usage":{}}') is None


def test_the_reasons_of_whole_answers() -> None:
    chat = {"choices": [{"finish_reason": "stop"}, {"finish_reason": None}, {"finish_reason": "length"}]}
    assert whole_reasons(chat) == ["stop", "length"]
    assert whole_reasons(ABORTED[Endpoint.COMPLETIONS][0]) == ["stop", "abort"]
    assert whole_reasons({"stop_reason": "max_tokens"}) == ["max_tokens"]
    assert whole_reasons({"status": "completed"}) == ["completed"]
