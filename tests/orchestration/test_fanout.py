"""Lists of prompts: one hand-over each, one answer, and one failure that ends them all."""

import asyncio
import functools
import json

import pytest

from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.fanout import gather_bounded
from pdproxy.request import Endpoint
from tests.fakes.fake_model import generate, tokenize
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.reading import pieces_of
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import FakeCluster

COMPLETIONS = Endpoint.COMPLETIONS
PROMPTS = [f"prompt number {number} of several words" for number in range(7)]
RIGHT = {index: "".join(said.text for said in generate(tokenize(prompt), 5)) for index, prompt in enumerate(PROMPTS)}


def _body(*, stream: bool, **more: object) -> dict[str, object]:
    return {"prompt": PROMPTS, "max_tokens": 5, "stream": stream, "temperature": 0, **more}


@pytest.mark.parametrize("width", [1, 2, 64])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_prompt_has_its_own_hand_over(stream: bool, width: int) -> None:
    cluster = FakeCluster(config=OrchestrationConfig(fan_out=width))
    got = await cluster.ask(COMPLETIONS, _body(stream=stream))
    if stream:
        answer = read_answer(COMPLETIONS, got.body)
        assert (answer.texts, answer.finishes, answer.ended) == (RIGHT, dict.fromkeys(RIGHT, "length"), True)
        assert (len(answer.ids), answer.usage) == (1, None)
    else:
        assert {choice["index"]: choice["text"] for choice in got.json()["choices"]} == RIGHT
    assert cluster.fabric.pulled == len(PROMPTS)
    assert cluster.count("pdproxy_requests_total", endpoint=COMPLETIONS, outcome="ok") == 1
    await cluster.settle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_usage_and_choices_add_up(stream: bool) -> None:
    cluster = FakeCluster()
    more = {"stream_options": {"include_usage": True}} if stream else {}
    got = await cluster.ask(COMPLETIONS, _body(stream=stream, n=2, **more))
    usage = read_answer(COMPLETIONS, got.body).usage if stream else got.json()["usage"]
    assert usage is not None
    assert usage["completion_tokens"] == len(PROMPTS) * 2 * 5
    assert usage["prompt_tokens"] == sum(len(tokenize(prompt)) for prompt in PROMPTS)
    assert usage["prompt_tokens_details"] == {"cached_tokens": len(PROMPTS)}
    if stream:
        assert set(read_answer(COMPLETIONS, got.body).texts) == set(range(14))
    await cluster.settle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_refused_prompt_refuses_all(stream: bool) -> None:
    cluster = FakeCluster(config=OrchestrationConfig(fan_out=1))
    cluster.prefills[0].fault = InjectedFault(FaultKind.STATUS, status=400, times=1)
    got = await cluster.ask(COMPLETIONS, _body(stream=stream))
    assert got.status == 400
    await cluster.settle()


async def test_a_prompt_that_is_refused_later_ends_the_stream_with_an_error_event() -> None:
    cluster = FakeCluster(config=OrchestrationConfig(fan_out=1))
    reply = await cluster.orchestrator.answer(cluster.request(COMPLETIONS, _body(stream=True)))
    for node in cluster.prefills:
        node.fault = InjectedFault(FaultKind.STATUS, status=400)
    assert not isinstance(reply.body, bytes)
    answer = read_answer(COMPLETIONS, b"".join([piece async for piece in pieces_of(reply.body)]))
    assert answer.error is not None
    assert answer.ended
    assert cluster.count("pdproxy_requests_total", endpoint=COMPLETIONS, outcome="failed") == 1
    await cluster.settle()


async def test_a_prompt_that_breaks_ends_the_stream_once() -> None:
    cluster = FakeCluster(config=OrchestrationConfig(migrations=0))
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3, times=1)
    answer = read_answer(COMPLETIONS, (await cluster.ask(COMPLETIONS, _body(stream=True))).body)
    assert answer.error is not None
    assert answer.ended
    assert all(RIGHT[index].startswith(text) for index, text in answer.texts.items())
    await cluster.settle()


async def test_a_migrating_prompt_does_not_disturb_the_others() -> None:
    cluster = FakeCluster(decodes=3)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=2)
    answer = read_answer(COMPLETIONS, (await cluster.ask(COMPLETIONS, _body(stream=True))).body)
    assert (answer.texts, answer.error) == (RIGHT, None)
    await cluster.settle()


async def test_gathering_keeps_order_and_width() -> None:
    running: list[int] = []
    most = 0

    async def run(number: int) -> int:
        nonlocal most
        running.append(number)
        most = max(most, len(running))
        for _ in range(10 - number):
            await asyncio.sleep(0)
        running.remove(number)
        return number

    parts = [functools.partial(run, number) for number in range(8)]
    assert await gather_bounded(parts, 3) == list(range(8))
    assert most == 3


async def test_prompts_that_were_read_for_their_length_are_answered_and_dropped() -> None:
    cluster = FakeCluster()
    request = cluster.request(COMPLETIONS, _body(stream=False))
    tokens, _ = await cluster.orchestrator.expected_tokens(request)
    assert tokens == sum(-(-len(prompt) // 4) for prompt in PROMPTS)
    assert [prompt.shape.prompt_tokens for prompt in request.prompts] == [-(-len(prompt) // 4) for prompt in PROMPTS]
    reply = await cluster.orchestrator.answer(request)
    assert isinstance(reply.body, bytes)
    assert {choice["index"]: choice["text"] for choice in json.loads(reply.body)["choices"]} == RIGHT
    assert request.prompts == []
    await cluster.settle()
