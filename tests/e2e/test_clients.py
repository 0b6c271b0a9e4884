"""Official clients as people use them: their requests arrive, and they understand the answers."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, UnprocessableEntityError

from deploy.local.model.quiz import Quiz, quiz, recite
from deploy.local.node import SERVED_NAME
from deploy.local.stack import Proxy
from tests.e2e.asking import joined
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.legs import complete

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="function")]

FIXED: dict[str, Any] = {"model": SERVED_NAME, "temperature": 0}
QUESTION = quiz(700, 700)
LIST = recite(701, 700, lines=6)
NUMBER = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": NUMBER}}


def messages(question: Quiz) -> Any:
    """The question's messages, typed as the client wants them."""
    return cast(Any, question.messages())


@pytest.fixture
async def anthropic(proxy: Proxy) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's client, pointed at the proxy."""
    http = DefaultAsyncHttpxClient(trust_env=False, timeout=REQUEST_TIMEOUT_S)
    async with AsyncAnthropic(
        base_url=proxy.url, api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0, http_client=http
    ) as pointed:
        yield pointed


# -- the end of an answer


async def test_a_stop_string_ends_the_answer_before_itself(client: AsyncOpenAI) -> None:
    first = LIST.answer.split("\n")[0]
    whole = await client.completions.create(prompt=LIST.prompt(), stop=["\n"], max_tokens=64, **FIXED)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (first, "stop")
    parts = await client.chat.completions.create(messages=messages(LIST), stop="\n", stream=True, **FIXED)
    assert await joined(choice.delta.content or "" async for part in parts for choice in part.choices) == first


async def test_a_stop_string_may_be_kept(client: AsyncOpenAI) -> None:
    more = {"include_stop_str_in_output": True}
    got = await client.completions.create(prompt=LIST.prompt(), stop=["\n"], max_tokens=64, extra_body=more, **FIXED)
    assert got.choices[0].text == LIST.answer.split("\n")[0] + "\n"


async def test_max_completion_tokens_is_a_limit(client: AsyncOpenAI) -> None:
    got = await client.chat.completions.create(messages=messages(LIST), max_completion_tokens=2, **FIXED)
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert got.usage.completion_tokens == 2


async def test_without_a_limit_the_model_decides(client: AsyncOpenAI) -> None:
    got = await client.chat.completions.create(messages=messages(LIST), **FIXED)
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == (LIST.answer, "stop")


async def test_min_tokens_keeps_the_model_talking(client: AsyncOpenAI) -> None:
    more = {"min_tokens": 12}
    got = await client.completions.create(prompt=QUESTION.prompt(), max_tokens=12, extra_body=more, **FIXED)
    assert got.usage is not None
    assert got.usage.completion_tokens == 12
    assert got.choices[0].text.startswith(QUESTION.answer)


# -- more than text


async def test_logprobs_are_those_of_one_node(client: AsyncOpenAI, pair: Pair) -> None:
    alone = complete(pair.prefill.url, QUESTION.prompt())
    got = await client.completions.create(prompt=QUESTION.prompt(), logprobs=1, max_tokens=8, **FIXED)
    assert got.choices[0].logprobs is not None
    assert got.choices[0].logprobs.token_logprobs == pytest.approx(alone.logprobs, abs=0.05)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_chat_logprobs_spell_the_answer(client: AsyncOpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"messages": messages(QUESTION), "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    if stream:
        parts = [part async for part in await client.chat.completions.create(stream=True, **asked, **FIXED)]
        told = [choice.logprobs for part in parts for choice in part.choices if choice.logprobs]
    else:
        whole = await client.chat.completions.create(**asked, **FIXED)
        told = [choice.logprobs for choice in whole.choices if choice.logprobs]
    tokens = [token for logprobs in told for token in logprobs.content or []]
    assert "".join(token.token for token in tokens).startswith(QUESTION.answer)
    assert all(len(token.top_logprobs) == 2 for token in tokens)


async def test_several_choices_are_streamed_side_by_side(client: AsyncOpenAI) -> None:
    texts = {0: "", 1: "", 2: ""}
    asked: dict[str, Any] = {"messages": messages(QUESTION), "n": 3, "seed": 3, "max_tokens": 8}
    parts = await client.chat.completions.create(stream=True, **asked, **{**FIXED, "temperature": 0.01})
    async for part in parts:
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert set(texts.values()) == {QUESTION.answer}


async def test_usage_comes_last_and_only_where_asked(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(messages=messages(QUESTION), max_tokens=8, **FIXED)
    asked: dict[str, Any] = {"messages": messages(QUESTION), "stream": True, "max_tokens": 8, **FIXED}
    silent = [part async for part in await client.chat.completions.create(**asked)]
    assert [part.usage for part in silent if part.usage] == []
    told = [
        part async for part in await client.chat.completions.create(stream_options={"include_usage": True}, **asked)
    ]
    assert [bool(part.usage) for part in told] == [False] * (len(told) - 1) + [True]
    assert told[-1].choices == []
    assert whole.usage is not None
    assert told[-1].usage is not None
    assert told[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert told[-1].usage.prompt_tokens == whole.usage.prompt_tokens


# -- tools and structure


async def test_tools_that_may_not_be_used_change_nothing(client: AsyncOpenAI) -> None:
    got = await client.chat.completions.create(
        messages=messages(QUESTION), tools=cast(Any, [LOOK_UP]), tool_choice="none", max_tokens=8, **FIXED
    )
    assert got.choices[0].message.content == QUESTION.answer


async def test_tools_that_a_node_cannot_parse_are_refused_in_its_words(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="tool-call-parser") as refused:
        await client.chat.completions.create(
            messages=messages(QUESTION), tools=cast(Any, [LOOK_UP]), tool_choice="auto", max_tokens=8, **FIXED
        )
    assert_shaped(refused.value)


async def test_structured_output_has_its_structure(client: AsyncOpenAI) -> None:
    more = {"structured_outputs": {"choice": ["neither 1", "nor 2"]}}
    got = await client.chat.completions.create(messages=messages(QUESTION), extra_body=more, max_tokens=64, **FIXED)
    assert got.choices[0].message.content in more["structured_outputs"]["choice"]


# -- the other two APIs


async def test_responses(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"input": QUESTION.prompt(), "max_output_tokens": 8, "store": False, **FIXED}
    assert (await client.responses.create(**asked)).output_text == QUESTION.answer
    events = await client.responses.create(stream=True, **asked)
    pieces = (event.delta async for event in events if event.type == "response.output_text.delta")
    assert await joined(pieces) == QUESTION.answer


async def test_messages(anthropic: AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"messages": messages(QUESTION), "max_tokens": 8, "model": SERVED_NAME}
    asked["extra_body"] = {"temperature": 0}
    whole = await anthropic.messages.create(**asked)
    assert [block.text for block in whole.content if block.type == "text"] == [QUESTION.answer]
    async with anthropic.messages.stream(**asked) as stream:
        assert await stream.get_final_text() == QUESTION.answer


# -- mistakes of clients

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a temperature below zero": ({"temperature": -1}, "temperature"),
    "no tokens at all": ({"max_tokens": -3}, "max_tokens"),
    "n as a word": ({"n": "many"}, "`n`|n"),
    "messages as a text": ({"messages": "hello"}, "messages"),
    "more log-probabilities than there may be": ({"logprobs": True, "top_logprobs": 10**6}, "logprobs"),
    "stream options without a stream": ({"stream_options": {"include_usage": True}}, "[Ss]tream"),
    "embeddings from outside": ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
}
WRONG_TOO = [name for name in WRONG if name != "stream options without a stream"]
"""Mistakes that also apply to streams."""


@pytest.mark.parametrize(
    ("name", "stream"), [*((name, False) for name in WRONG), *((name, True) for name in WRONG_TOO)]
)
async def test_a_bad_request_is_explained(client: AsyncOpenAI, name: str, stream: bool) -> None:
    wrong, word = WRONG[name]
    body = {**FIXED, "messages": QUESTION.messages(), "max_tokens": 8, "stream": stream, **wrong}
    with pytest.raises((BadRequestError, UnprocessableEntityError), match=word) as refused:
        await client.post("/chat/completions", body=body, cast_to=object)
    assert_shaped(refused.value)


async def test_a_conversation_that_is_kept_elsewhere_is_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(APIStatusError, match="previous_response_id") as refused:
        await client.responses.create(input="hello", previous_response_id="resp_1", **FIXED)
    assert refused.value.status_code in (400, 404)
    assert_shaped(refused.value)


async def test_what_is_not_kept_cannot_be_retrieved(client: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="not kept") as refused:
        await client.responses.retrieve("resp_1")
    assert_shaped(refused.value)


async def test_a_model_that_does_not_embed_says_so(client: AsyncOpenAI) -> None:
    with pytest.raises(APIStatusError) as refused:
        await client.embeddings.create(model=SERVED_NAME, input="hello")
    assert refused.value.status_code < 500


async def test_an_unknown_model_is_not_found_by_either_client(client: AsyncOpenAI, anthropic: AsyncAnthropic) -> None:
    with pytest.raises(NotFoundError, match="nobody") as refused:
        await client.responses.create(model="nobody", input="hello")
    assert_shaped(refused.value)
    with pytest.raises(Exception, match="nobody") as also:
        await anthropic.messages.create(model="nobody", max_tokens=8, messages=messages(QUESTION))
    assert type(also.value).__name__ == "NotFoundError"


def assert_shaped(refused: APIStatusError) -> None:
    """The error has OpenAI's shape: a sentence, a type, and the request id for the log."""
    error = cast(dict[str, Any], refused.response.json()["error"])
    assert {"message", "type", "code"} <= error.keys()
    assert len(error["message"].split()) >= 4
    assert refused.request_id
