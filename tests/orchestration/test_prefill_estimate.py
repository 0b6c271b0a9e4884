"""The estimate of prompt tokens in prefill legs: counted while the legs run, labelled by the node's model."""

import asyncio
from typing import Any

import pytest

from pdproxy.legs.outline import facts_of
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.request import Endpoint
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.cluster import MODEL, FakeCluster
from tests.orchestration.prompts import body_for

SERIES = "pdproxy_prefill_pending_tokens_estimate"
COMPLETIONS = body_for(Endpoint.COMPLETIONS, stream=True)


async def levels(cluster: FakeCluster, endpoint: Endpoint, body: dict[str, Any], names: int = 1) -> list[float]:
    """The values that the series had, one after the other, while requests went their way."""
    seen = [0.0]
    asking = asyncio.gather(*(cluster.ask(endpoint, body, name=f"r-{number}") for number in range(names)))
    while not asking.done():
        await asyncio.sleep(0)
        if (now := cluster.count(SERIES, model=MODEL)) != seen[-1]:
            seen.append(now)
    assert all(got.status == 200 for got in await asking)
    await cluster.settle()
    return seen


@pytest.mark.parametrize("endpoint", list(Endpoint))
async def test_a_prompt_is_pending_until_its_ticket_is_here(endpoint: Endpoint) -> None:
    body = body_for(endpoint, stream=False)
    about = facts_of(body).tokens
    assert about > 15
    assert await levels(FakeCluster(), endpoint, body) == [0, about, 0]


async def test_prompts_add_up() -> None:
    seen = await levels(FakeCluster(), Endpoint.COMPLETIONS, COMPLETIONS, names=3)
    assert max(seen) == 3 * facts_of(COMPLETIONS).tokens
    assert seen[-1] == 0


async def test_a_second_try_takes_the_place_of_the_first() -> None:
    cluster = FakeCluster()
    cluster.prefills[0].fault = InjectedFault(FaultKind.RESET, times=1)
    about = facts_of(COMPLETIONS).tokens
    assert await levels(cluster, Endpoint.COMPLETIONS, COMPLETIONS) == [0, about, 0]
    assert [len(node.legs()) for node in cluster.prefills] == [1, 1]


async def test_the_prompt_of_a_stream_that_moves_is_pending_once_more() -> None:
    cluster = FakeCluster(prefills=1, decodes=2)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3, times=1)
    body = body_for(Endpoint.CHAT, stream=True)
    about = facts_of(body).tokens
    assert await levels(cluster, Endpoint.CHAT, body) == [0, about, 0, about, 0]


async def test_a_prompt_that_no_prefill_node_gets_is_not_pending() -> None:
    assert await levels(FakeCluster(prefills=0), Endpoint.COMPLETIONS, COMPLETIONS) == [0]


async def test_the_series_appears_with_the_first_prefill_node_of_a_model() -> None:
    cluster = FakeCluster()
    pool = Pool(cluster.clock, metrics=cluster.context.metrics)
    for role, model in ((Role.PREFILL, "mine"), (Role.DECODE, "other"), (Role.PREFILL, "")):
        pool.add(Node(f"{role}-{model}", "http://n", (role,), model))
    told = [cluster.registry.get_sample_value(SERIES, {"model": model}) for model in ("mine", "other", "")]
    assert told == [0, None, None]
