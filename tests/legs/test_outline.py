"""Long bodies: what is known of them without parsing them is what a parser would tell, and their bytes stay."""

import json
from typing import Any

import msgspec
import pytest

from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.legs.calls import outlined_object
from pdproxy.legs.outline import PromptFacts, facts_of
from pdproxy.legs.parse import LARGE, checked_fields, reading, scrub, split
from pdproxy.legs.prompt_text import MOST_IDS, prompt_parts
from pdproxy.legs.rewrite import decode_body, prefill_body
from pdproxy.legs.shape import shape
from pdproxy.legs.turns import PromptReader, in_turns
from pdproxy.orchestration.fanout import merge_answers
from pdproxy.raw_json import MOST_ITEMS
from pdproxy.request import Endpoint, Json, write_json
from pdproxy.stream.chunks import choices_of

LINE = 'She said: "no", and\nwent on to über-long texts, \\o/ дальше. '
TEXT = LINE * (2 * LARGE // len(LINE))
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * LARGE}}
CHATS: dict[str, list[Any]] = {
    "one message": [{"role": "user", "content": TEXT}],
    "many messages": [{"role": "user", "content": LINE}] * 3000,
    "parts": [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": TEXT}] * 2},
    ],
    "image": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}],
    "image after text": [{"role": "user", "content": TEXT}] * 4 + [{"role": "user", "content": [IMAGE]}],
    "arguments": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": TEXT}}]}],
}


async def read(endpoint: Endpoint, body: dict[str, Any], *, ascii_only: bool = False) -> dict[str, object]:
    raw = json.dumps({"model": "m", **body}, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    assert len(raw) > LARGE
    body = scrub(await in_turns(reading(raw)))
    await in_turns(checked_fields(endpoint, body))
    return body


async def parts_of(endpoint: Endpoint, body: Json) -> list[bytes]:
    text = (await PromptReader().read(body)).text
    assert text is not None
    parts = text.take_parts()
    assert text.take_parts() == []
    return parts


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
async def test_of_a_long_chat_the_same_is_known_as_of_a_parsed_one(messages: list[Any]) -> None:
    body = {"model": "m", "stream": True, "messages": messages}
    large, exact = await read(Endpoint.CHAT, body), facts_of(body).tokens
    facts = await PromptReader().read(large)
    assert facts.tokens == pytest.approx(exact, rel=0.02, abs=16)
    known = PromptFacts(exact, facts.media)
    assert shape(Endpoint.CHAT, large, known) == shape(Endpoint.CHAT, body)
    assert json.loads(write_json(decode_body(large, None))) == body


@pytest.mark.parametrize("name", ["one message", "many messages", "parts", "arguments"])
async def test_a_long_chat_begins_with_the_same_parts(name: str) -> None:
    body = {"tools": [{"type": "function", "name": "f"}], "messages": CHATS[name]}
    found, exact = await parts_of(Endpoint.CHAT, await read(Endpoint.CHAT, body)), prompt_parts(body)
    assert found[:-1] == exact[:-1]
    assert found[-1][:64] == exact[-1][:64]
    assert name == "arguments" or found == exact


async def test_two_images_differ_in_a_long_chat_as_in_a_parsed_one() -> None:
    other = json.loads(json.dumps(CHATS["image"]).replace("QUJD", "QUJE"))
    chats = [await read(Endpoint.CHAT, {"messages": messages}) for messages in (CHATS["image"], other)]
    parts = [await parts_of(Endpoint.CHAT, chat) for chat in chats]
    assert parts[0] != parts[1]


async def test_of_more_messages_than_are_looked_at_the_rest_counts_by_its_bytes_and_may_hold_media() -> None:
    body = {"messages": [{"role": "user", "content": LINE}] * (3 * MOST_ITEMS)}
    facts = await PromptReader().read(await read(Endpoint.CHAT, body))
    assert facts.tokens == pytest.approx(facts_of(body).tokens, rel=0.5)
    assert facts.media


@pytest.mark.parametrize("ascii_only", [False, True])
async def test_of_a_long_text_the_same_is_known_as_of_a_parsed_one(ascii_only: bool) -> None:
    body = {"model": "m", "prompt": TEXT, "max_tokens": 5}
    large = await read(Endpoint.COMPLETIONS, body, ascii_only=ascii_only)
    facts, exact = await PromptReader().read(large), facts_of(body).tokens
    assert facts.tokens == pytest.approx(exact, rel=0.03)
    known = PromptFacts(exact)
    assert shape(Endpoint.COMPLETIONS, large, known) == shape(Endpoint.COMPLETIONS, body)
    assert await parts_of(Endpoint.COMPLETIONS, large) == prompt_parts(body)
    assert json.loads(write_json(prefill_body(Endpoint.COMPLETIONS, large, "id", 1)))["prompt"] == TEXT


@pytest.mark.parametrize("count", [LARGE // 4, MOST_IDS + 1000])
async def test_token_ids_are_counted_and_the_first_are_known(count: int) -> None:
    ids = [number % 150_000 for number in range(count)]
    large = await read(Endpoint.COMPLETIONS, {"prompt": ids})
    facts = await PromptReader().read(large)
    assert facts.text is not None
    assert (facts.tokens, list(facts.text.ids)) == (count, ids[:MOST_IDS])
    assert split(Endpoint.COMPLETIONS, large) == (large,)
    assert json.loads(write_json(large))["prompt"] == ids


async def test_a_list_of_long_prompts_is_split_unparsed() -> None:
    prompts = [TEXT, "short", TEXT]
    bodies = split(Endpoint.COMPLETIONS, await read(Endpoint.COMPLETIONS, {"prompt": prompts}))
    assert all(isinstance(body["prompt"], msgspec.Raw) for body in bodies)
    assert [json.loads(write_json(body))["prompt"] for body in bodies] == prompts


@pytest.mark.parametrize(
    "prompt",
    [[1.5] * LARGE, [None] * LARGE, [1, [2]] * LARGE, ["a", 1] * LARGE, [TEXT, [1]], [TEXT] * 2 + ["a"] * 1024],
)
async def test_a_long_prompt_of_no_known_kind_is_refused(prompt: list[Any]) -> None:
    with pytest.raises(ClientError, match="prompt") as error:
        await read(Endpoint.COMPLETIONS, {"prompt": prompt})
    assert (error.value.status, error.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"model":"m","prompt":"%b' % (b"a" * LARGE), "not valid JSON"),
        (b'{"model":"m","prompt":NaN,"x":"%b"}' % (b"a" * LARGE), "not valid JSON"),
        (b'{"model":"m","prompt":"\xff%b"}' % (b"a" * LARGE), "not valid JSON"),
        (b'{"model":"m","prompt":"\\ud800%b"}' % (b"a" * LARGE), "not valid JSON"),
        (b'["%b"]' % (b"a" * LARGE), "must be a JSON object"),
        (b'{"model":"m","prompt":%b%b}' % (b"[" * LARGE, b"]" * LARGE), "nested too deeply"),
    ],
)
async def test_a_long_body_that_is_no_json_is_refused(raw: bytes, text: str) -> None:
    with pytest.raises(ClientError, match=text) as error:
        await in_turns(reading(raw))
    assert error.value.status == 400


async def test_what_may_not_be_sent_is_left_out_of_a_long_body_too() -> None:
    large = await read(
        Endpoint.COMPLETIONS, {"prompt": TEXT, "kv_transfer_params": {}, "vllm_xargs": {"kv_transfer_params": 1}}
    )
    assert json.loads(write_json(large)) == {"model": "m", "prompt": TEXT, "vllm_xargs": {}}


LOGPROBS = {"tokens": ["a"] * LARGE, "token_logprobs": [-0.5] * LARGE}
CHOICE = {"index": 0, "text": "a", "logprobs": LOGPROBS, "finish_reason": "length"}
ANSWER = {"id": "x", "choices": [CHOICE], "usage": {"prompt_tokens": 3}, "kv_transfer_params": None}


async def test_of_a_long_answer_the_long_parts_stay_unparsed() -> None:
    answer = await outlined_object(json.dumps(ANSWER).encode())
    assert answer["usage"] == ANSWER["usage"]
    (choice,) = choices_of(answer)
    assert (choice["finish_reason"], choice["text"]) == ("length", "a")
    assert isinstance(choice["logprobs"], msgspec.Raw)
    assert json.loads(write_json(answer)) == ANSWER


async def test_long_answers_of_several_prompts_become_one() -> None:
    answers = [await outlined_object(json.dumps(ANSWER).encode()) for _ in range(2)]
    merged = json.loads(write_json(merge_answers(answers)))
    assert merged["choices"] == [{**CHOICE, "index": index} for index in range(2)]


@pytest.mark.parametrize("raw", [b'{"a":"%b"' % (b"a" * LARGE), b'["%b"]' % (b"a" * LARGE), b"[" * LARGE])
async def test_a_long_answer_that_is_no_object_is_a_fault(raw: bytes) -> None:
    with pytest.raises(NodeFault) as error:
        await outlined_object(raw)
    assert error.value.fault is Fault.INVALID_BODY
