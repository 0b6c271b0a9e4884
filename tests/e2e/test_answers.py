"""Answers through the proxy and two nodes are a single engine's answers."""

import asyncio

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import SERVED_NAME
from deploy.local.stack import Proxy
from tests.e2e.asking import Way, answer
from tests.e2e.conftest import REQUEST_TIMEOUT_S

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="function")]


def shared_and_distinct() -> list[tuple[Way, Quiz]]:
    """24 questions: three lists, four questions over each (shared prefixes), and twelve lists of their own."""
    shared = [quiz(seed, 700).ask(k) for seed in (1, 2, 3) for k in range(4)]
    distinct = [quiz(seed, tokens) for seed, tokens in zip(range(10, 22), (60, 300, 900, 1300) * 3, strict=True)]
    ways = list(Way)
    return [(ways[at % len(ways)], question) for at, question in enumerate([*shared, *distinct])]


async def test_24_at_once_are_what_one_engine_says(client: AsyncOpenAI, reference_client: AsyncOpenAI) -> None:
    asked = shared_and_distinct()
    assert len(asked) == 24
    ours = await asyncio.gather(*(answer(client, way, question) for way, question in asked))
    theirs = [await answer(reference_client, way, question) for way, question in asked]
    assert ours == theirs
    assert ours == [question.answer for _, question in asked]


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("tokens", [200, 2000])
async def test_the_far_past_is_remembered(client: AsyncOpenAI, way: Way, tokens: int) -> None:
    question = quiz(40 + tokens, tokens)
    assert await answer(client, way, question) == question.answer


async def test_a_conversation_goes_on(client: AsyncOpenAI) -> None:
    talk = quiz(50, 900)
    for turn in (1, 2, 3):
        now = talk.at_turn(turn)
        assert await answer(client, Way.CHAT_STREAM, now) == now.answer


async def test_a_list_of_prompts_gets_each_its_own_answer(client: AsyncOpenAI) -> None:
    asked = [quiz(seed, 600) for seed in (60, 61, 62)]
    got = await client.completions.create(
        model=SERVED_NAME, prompt=[question.prompt() for question in asked], temperature=0, max_tokens=8
    )
    assert [choice.text for choice in got.choices] == [question.answer for question in asked]
    assert [choice.index for choice in got.choices] == [0, 1, 2]
    assert got.usage is not None
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


async def test_several_samples_of_one_prompt(client: AsyncOpenAI) -> None:
    question = quiz(63, 700)
    got = await client.completions.create(
        model=SERVED_NAME, prompt=question.prompt(), n=3, temperature=0.01, seed=1, max_tokens=8
    )
    assert [choice.text for choice in got.choices] == [question.answer] * 3


async def test_the_response_tells_its_timeline(proxy: Proxy) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=REQUEST_TIMEOUT_S) as http:
        body = {"model": SERVED_NAME, "prompt": quiz(64, 700).prompt(), "max_tokens": 8, "temperature": 0}
        whole = await http.post(f"{proxy.url}/v1/completions", json=body, headers={"x-request-id": "mine-1"})
        assert whole.headers["x-request-id"] == "mine-1"
        assert whole.headers["x-pdproxy-route"].startswith("disaggregated; reason=")
        assert {"plan", "prefill", "handover"} <= {part.split(";")[0] for part in timeline(whole)}
        streamed = await http.post(f"{proxy.url}/v1/completions", json={**body, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert {"plan", "prefill", "handover", "first_token"} <= {part.split(";")[0] for part in timeline(streamed)}


def timeline(response: httpx.Response) -> list[str]:
    """The entries of the Server-Timing header."""
    return response.headers["server-timing"].replace(" ", "").split(",")


async def test_an_unknown_model_is_a_404_that_helps(client: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match=f"Valid aliases: {SERVED_NAME}"):
        await client.completions.create(model="nobody", prompt="hello")
    assert [model.id async for model in client.models.list()] == [SERVED_NAME]


async def test_a_prompt_that_is_too_long_gets_the_nodes_own_error(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="context length"):
        await client.completions.create(model=SERVED_NAME, prompt=[5] * 5000, max_tokens=8)


@pytest.mark.parametrize("place", ["top", "vllm_xargs"])
async def test_a_client_cannot_bring_its_own_ticket(proxy: Proxy, place: str) -> None:
    forged = {"do_remote_prefill": True, "remote_block_ids": [[1], [2], [3], [4]], "remote_host": "127.0.0.1"}
    smuggled = {"kv_transfer_params": forged} if place == "top" else {"vllm_xargs": {"kv_transfer_params": forged}}
    question = quiz(65, 700)
    body = {"model": SERVED_NAME, "prompt": question.prompt(), "max_tokens": 8, "temperature": 0, **smuggled}
    async with httpx.AsyncClient(trust_env=False, timeout=REQUEST_TIMEOUT_S) as http:
        got = await http.post(f"{proxy.url}/v1/completions", json=body)
    assert got.status_code == 200
    assert got.json()["choices"][0]["text"] == question.answer
    assert "kv_transfer_params" not in got.text or got.json().get("kv_transfer_params") is None
