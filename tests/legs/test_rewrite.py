"""The bodies of both legs, and the shapes of requests."""

import itertools
import json

import pytest
from msgspec import Raw

from pdproxy.legs.parse import split
from pdproxy.legs.rewrite import decode_body, prefill_body
from pdproxy.legs.shape import shape
from pdproxy.request import Endpoint, Json, LegForm, write_json

HAND_OVER = "hand-over-0123456789"
TICKET = {"do_remote_prefill": True, "remote_block_ids": [[1], [2]], "odd": {"x": 1}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
MESSAGES = [{"role": "user", "content": "hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
TEXT = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


def completion(**fields: object) -> dict[str, object]:
    return {"model": "m", "prompt": "once upon", **fields}


def chat(**fields: object) -> dict[str, object]:
    return {"model": "m", "messages": MESSAGES, **fields}


@pytest.mark.parametrize(
    ("endpoint", "limits"),
    [
        (Endpoint.COMPLETIONS, {"max_tokens"}),
        (Endpoint.CHAT, {"max_tokens", "max_completion_tokens"}),
        (Endpoint.MESSAGES, {"max_tokens"}),
        (Endpoint.RESPONSES, {"max_output_tokens"}),
    ],
)
def test_the_prefill_leg_asks_for_exactly_one_token(endpoint: Endpoint, limits: set[str]) -> None:
    costly = {"stream": True, "stream_options": {}, "min_tokens": 5, "stop": ["x"], "stop_sequences": ["x"], "n": 3}
    costly |= {
        "logprobs": 5,
        "top_logprobs": 5,
        "best_of": 4,
        "return_token_ids": True,
        "echo": True,
        "request_id": "r",
    }
    leg = prefill_body(endpoint, {"model": "m", "max_completion_tokens": 9, **costly, "max_tokens": 50}, HAND_OVER, 3)
    assert {key: leg[key] for key in limits} == dict.fromkeys(limits, 1)
    assert not (costly.keys() - {"n"}) & leg.keys()
    assert leg["n"] == 1


def test_what_shapes_the_prompt_stays() -> None:
    shaping = {
        "tools": TOOLS, "tool_choice": "required", "chat_template": "{{x}}", "chat_template_kwargs": {"a": 1},
        "add_generation_prompt": False, "continue_final_message": True, "add_special_tokens": True, "documents": [],
        "mm_processor_kwargs": {}, "media_io_kwargs": {}, "truncate_prompt_tokens": 5, "truncation_side": "left",
        "cache_salt": "s", "reasoning_effort": "low", "response_format": {"type": "json_object"}, "priority": 3,
        "suffix": "end", "vllm_xargs": {"a": 1}, "system": "be kind", "thinking": {}, "instructions": "x",
        "reasoning": {}, "temperature": 0.5, "user": "u", "unknown_vendor_field": 1,
    }  # fmt: skip
    body = chat(**shaping)
    assert {key: value for key, value in prefill_body(Endpoint.CHAT, body, HAND_OVER, 1).items() if key in body} == body


@pytest.mark.parametrize(
    ("endpoint", "choice", "sent"),
    [
        (Endpoint.MESSAGES, {"type": "tool", "name": "f"}, {"type": "none"}),
        (Endpoint.MESSAGES, {"type": "any"}, {"type": "any"}),
        (Endpoint.MESSAGES, {"type": "auto"}, {"type": "auto"}),
        (Endpoint.MESSAGES, "tool", "tool"),
        (Endpoint.CHAT, {"type": "tool", "name": "f"}, {"type": "tool", "name": "f"}),
        (Endpoint.RESPONSES, {"type": "tool", "name": "f"}, {"type": "tool", "name": "f"}),
    ],
)
@pytest.mark.parametrize("raw", [False, True], ids=["decoded", "raw"])
def test_the_one_token_of_a_messages_prefill_is_no_beginning_of_a_call(
    endpoint: Endpoint, choice: object, sent: object, raw: bool
) -> None:
    given = Raw(write_json(choice)) if raw else choice
    leg = prefill_body(endpoint, chat(tools=TOOLS, tool_choice=given), HAND_OVER, 1)
    assert json.loads(write_json(leg["tool_choice"])) == sent
    assert leg["tools"] == TOOLS


def test_the_prefill_leg_names_its_hand_over_and_its_readers() -> None:
    one = prefill_body(Endpoint.CHAT, chat(), HAND_OVER, 1)["kv_transfer_params"]
    many = prefill_body(Endpoint.CHAT, chat(n=4), HAND_OVER, 4)["kv_transfer_params"]
    assert isinstance(one, dict)
    assert isinstance(many, dict)
    assert (one["do_remote_decode"], one["do_remote_prefill"], one["pdproxy_hand_over"]) == (True, False, HAND_OVER)
    assert "pdproxy_readers" not in one
    assert many["pdproxy_readers"] == 4


def test_a_prefill_of_a_response_is_not_kept() -> None:
    assert prefill_body(Endpoint.RESPONSES, {"model": "m", "input": "x"}, HAND_OVER, 1)["store"] is False


def test_the_decode_leg_is_what_the_client_sent_and_the_ticket() -> None:
    body = completion(min_tokens=3, stop=["x"], n=2, stream=True, vendor=1)
    assert json.loads(write_json(decode_body(body, Raw(write_json(TICKET))))) == {**body, "kv_transfer_params": TICKET}
    assert decode_body(body, None) == body


def test_the_usage_event_is_asked_for() -> None:
    leg = decode_body(chat(stream=True, stream_options=None), None, LegForm(adds_usage=True))
    assert leg == chat(stream=True, stream_options={"include_usage": True})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", ["one"]),
        (["one"], ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([], [[]]),
        (None, [None]),
    ],
)
def test_a_list_of_prompts_is_split(prompt: object, expected: list[object]) -> None:
    bodies = split(Endpoint.COMPLETIONS, completion(prompt=prompt, n=2))
    assert [json.loads(write_json(body["prompt"])) for body in bodies] == expected
    assert all(body["n"] == 2 for body in bodies)
    assert len(bodies) == len(expected)


def test_a_chat_has_one_prompt_whatever_it_is_called() -> None:
    assert split(Endpoint.CHAT, chat(prompt=["a", "b"])) == (chat(prompt=["a", "b"]),)


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (Endpoint.COMPLETIONS, completion(), None),
        (Endpoint.COMPLETIONS, completion(logprobs=3, n=4, echo=True, logit_bias={}), "echo_logprobs"),
        (Endpoint.COMPLETIONS, completion(logprobs=0, echo=True), "echo_logprobs"),
        (Endpoint.COMPLETIONS, completion(logprobs=3, n=4), None),
        (Endpoint.COMPLETIONS, completion(echo=True), None),
        (Endpoint.COMPLETIONS, completion(prompt_logprobs=0), "prompt_logprobs"),
        (Endpoint.COMPLETIONS, completion(use_beam_search=True), "beam_search"),
        (Endpoint.COMPLETIONS, completion(max_tokens=0, echo=True), "no_tokens"),
        (Endpoint.COMPLETIONS, completion(prompt=[5]), "one_token"),
        (Endpoint.COMPLETIONS, completion(prompt=[5, 6]), None),
        (Endpoint.COMPLETIONS, completion(prompt=""), "no_prompt"),
        (Endpoint.COMPLETIONS, completion(n=1025), "choices"),
        (Endpoint.CHAT, chat(), None),
        (Endpoint.CHAT, chat(echo=True), "echo_logprobs"),
        (Endpoint.CHAT, chat(truncate_prompt_tokens=-1), "open_truncation"),
        (Endpoint.CHAT, chat(truncate_prompt_tokens=-1, max_tokens=5), None),
        (Endpoint.COMPLETIONS, completion(truncate_prompt_tokens=-1), None),
        (Endpoint.RESPONSES, {"model": "m", "input": "x", "truncation": "auto"}, "open_truncation"),
        (Endpoint.CHAT, chat(logprobs=True, top_logprobs=2, tools=TOOLS, messages=IMAGE), None),
        (Endpoint.MESSAGES, chat(), None),
        (Endpoint.RESPONSES, {"model": "m", "input": "x", "tools": [{"type": "function", "name": "f"}]}, None),
        (Endpoint.RESPONSES, {"model": "m", "input": "x", "tools": [{"type": "mcp"}]}, "server_tools"),
        (Endpoint.RESPONSES, {"model": "m", "prompt": {"id": "p"}}, "stored_prompt"),
    ],
)
def test_what_cannot_be_disaggregated_is_known(endpoint: Endpoint, body: Json, reason: str | None) -> None:
    assert shape(endpoint, body).local == reason


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (Endpoint.COMPLETIONS, completion(n=3, presence_penalty=0.5, structured_outputs={"regex": "a"}), None),
        (Endpoint.COMPLETIONS, completion(echo=True, logprobs=None), None),
        (Endpoint.COMPLETIONS, completion(echo=True, logprobs=1), "prompt_logprobs"),
        (Endpoint.COMPLETIONS, completion(prompt_logprobs=0), "prompt_logprobs"),
        (Endpoint.COMPLETIONS, completion(use_beam_search=True), "beam_search"),
        (Endpoint.CHAT, chat(tools=TOOLS, messages=IMAGE), None),
        (Endpoint.CHAT, chat(echo=True), "prompt_logprobs"),
        (Endpoint.MESSAGES, chat(), None),
        (Endpoint.RESPONSES, {"model": "m", "input": "x"}, None),
        (Endpoint.RESPONSES, {"model": "m", "input": "x", "tools": [{"type": "mcp"}]}, "server_tools"),
        (
            Endpoint.RESPONSES,
            {"model": "m", "input": "x", "include": ["message.output_text.logprobs"]},
            "response_logprobs",
        ),
    ],
)
def test_what_cannot_be_resumed_is_known(endpoint: Endpoint, body: Json, reason: str | None) -> None:
    assert shape(endpoint, body).not_resumable == reason


def test_a_shape_has_what_the_client_asked_for() -> None:
    known = shape(Endpoint.CHAT, chat(stream=True, stream_options={"include_usage": True}, n=1))
    assert (known.stream, known.wants_usage) == (True, True)
    plain = shape(Endpoint.CHAT, chat(stream_options={"continuous_usage_stats": True}, max_completion_tokens=7))
    assert (plain.stream, plain.wants_usage, plain.longest) == (False, False, 7)


def test_nothing_is_changed_in_place() -> None:
    for endpoint, make in itertools.product(Endpoint, (completion, chat)):
        body, before = (make(stream=True, n=2, stream_options={"a": 1}) for _ in range(2))
        shape(endpoint, body)
        split(endpoint, body)
        prefill_body(endpoint, body, HAND_OVER, 2)
        decode_body(body, Raw(write_json(TICKET)), LegForm(adds_usage=True))
        assert body == before
