"""The prompt tokens that prefill nodes still owe: counted while their legs run, and by no client's word."""

import asyncio
from typing import Any

import pytest

from pdproxy.legs.shape import estimated_prompt_tokens
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.request import Endpoint, Json
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.cluster import MODEL, FakeCluster
from tests.orchestration.prompts import body_for

SERIES = "pdproxy_prefill_pending_tokens_estimate"
COMPLETIONS = body_for(Endpoint.COMPLETIONS, stream=True)

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
ASKED = {"role": "user", "content": [{"type": "text", "text": "x" * 70}, PICTURE]}
"""4 + 4 + 9 + 70 bytes of words and text."""
DEEP: list[object] = []
for _ in range(5000):
    DEEP = [DEEP]


async def levels(world: FakeCluster, endpoint: Endpoint, body: dict[str, Any], names: int = 1) -> list[float]:
    """The values that the series had, one after the other, while requests went their way."""
    seen = [0.0]
    asking = asyncio.gather(*(world.ask(endpoint, body, name=f"r-{number}") for number in range(names)))
    while not asking.done():
        await asyncio.sleep(0)
        if (now := world.count(SERIES, model=MODEL)) != seen[-1]:
            seen.append(now)
    assert all(got.status == 200 for got in await asking)
    await world.settle()
    return seen


@pytest.mark.parametrize("endpoint", list(Endpoint))
async def test_a_prompt_is_pending_until_its_ticket_is_here(endpoint: Endpoint) -> None:
    body = body_for(endpoint, stream=False)
    about = estimated_prompt_tokens(body)
    assert about > 15
    assert await levels(FakeCluster(), endpoint, body) == [0, about, 0]


async def test_prompts_add_up() -> None:
    seen = await levels(FakeCluster(), Endpoint.COMPLETIONS, COMPLETIONS, names=3)
    assert max(seen) == 3 * estimated_prompt_tokens(COMPLETIONS)
    assert seen[-1] == 0


async def test_a_second_try_takes_the_place_of_the_first() -> None:
    world = FakeCluster()
    world.prefills[0].trouble = InjectedFault(FaultKind.RESET, times=1)
    about = estimated_prompt_tokens(COMPLETIONS)
    assert await levels(world, Endpoint.COMPLETIONS, COMPLETIONS) == [0, about, 0]
    assert [len(node.legs()) for node in world.prefills] == [1, 1]


async def test_what_a_stream_continues_with_is_counted_exactly() -> None:
    world = FakeCluster(prefills=1, decodes=2)
    world.decodes[0].trouble = InjectedFault(FaultKind.RESET, at=3, times=1)
    body = body_for(Endpoint.CHAT, stream=True)
    again = (await levels(world, Endpoint.CHAT, body))[3]
    [_, continued] = [seen.body for seen in world.prefills[0].legs()]
    assert again == len(continued["kv_transfer_params"]["prompt_token_ids"]) != estimated_prompt_tokens(body)


async def test_a_prompt_that_no_prefill_node_gets_is_not_pending() -> None:
    assert await levels(FakeCluster(prefills=0), Endpoint.COMPLETIONS, COMPLETIONS) == [0]


async def test_the_series_is_there_as_soon_as_a_node_of_the_model_is() -> None:
    world = FakeCluster()
    pool = Pool(world.clock, metrics=world.context.metrics)
    for role, model in ((Role.PREFILL, "mine"), (Role.DECODE, "other"), (Role.PREFILL, "")):
        pool.add(Node(f"{role}-{model}", "http://n", role, model))
    told = [world.registry.get_sample_value(SERIES, {"model": model}) for model in ("mine", "other", "")]
    assert told == [0, None, None]


@pytest.mark.parametrize(
    ("body", "about"),
    [
        ({"prompt": "a" * 400}, 100),
        ({"prompt": "a" * 401}, 101),
        ({"prompt": "\u8a9e" * 400}, 300),
        ({"prompt": "\ud800"}, 1),
        ({"prompt": [7] * 33}, 33),
        ({"prompt": None}, 0),
        ({"messages": [ASKED], "max_tokens": 9, "user": "y" * 400}, 22),
        ({"messages": [ASKED], "kv_transfer_params": {"prompt_token_ids": [1] * 1234}}, 1234),
        ({"messages": [ASKED], "tools": [{"type": "function", "function": {"description": "z" * 390}}]}, 122),
        ({"system": "s" * 40, "messages": []}, 10),
        ({"instructions": "i" * 40, "input": "j" * 40}, 20),
        ({"messages": DEEP}, 0),
    ],
)
def test_a_prompts_length_is_estimated(body: Json, about: int) -> None:
    assert estimated_prompt_tokens(body) == about
