"""Two nodes of both roles with small caches: conversations while one dies and while roles change, then one node alone.

With `least-loaded` every prompt is handed over, both ways at once; with `cache` the estimated cost decides.
"""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conversations import remote_share, wrong
from tests.e2e.equal_nodes import TURNS, Equals, equal_nodes, give_roles, kill_and_heal
from tests.e2e.metrics_reader import read

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(900)]

TALKS, MANY = 16, 64


@pytest.fixture(scope="module")
def equals() -> Iterator[Equals]:
    """Logs: `.run/e2e-both-roles`."""
    with equal_nodes("e2e-both-roles", 2) as nodes:
        yield nodes


@pytest.mark.parametrize("routing", ["least-loaded", "cache"])
async def test_conversations_on_two_equal_nodes(equals: Equals, routing: str) -> None:
    proxy = await asyncio.to_thread(equals.proxy, 2, routing)
    turns = await equals.talk(proxy, TALKS)
    assert len(turns) == TALKS * len(TURNS)
    assert wrong(turns, equals.nodes[0]) == []
    print(f"{routing}: {remote_share(turns):.0%} of {len(turns)} turns were handed over")
    if routing == "least-loaded":
        assert remote_share(turns) > 0.9
        reads = [read(node.url, "pdproxy_connector_reads_total", outcome="verified") for node in equals.nodes]
        assert all(reads), reads
    equals.empty()


async def test_roles_change_under_conversations(equals: Equals) -> None:
    """Each node in turn is made a decode node and then gets both roles back."""
    proxy = await asyncio.to_thread(equals.proxy, 2, "least-loaded")
    talking = asyncio.create_task(equals.talk(proxy, MANY))
    async with httpx.AsyncClient(base_url=proxy.admin_url, trust_env=False) as operator:
        for node, roles in ((0, ["decode"]), (0, ["prefill", "decode"]), (1, ["prefill"]), (1, ["prefill", "decode"])):
            await asyncio.sleep(1.0)
            assert not talking.done()
            await give_roles(operator, node, *roles)
        turns = await talking
        assert (await operator.get("/nodes/node-0")).json()["state"] == "up"
    assert len(turns) == MANY * len(TURNS)
    assert wrong(turns, equals.nodes[0]) == []
    equals.empty()


async def test_a_node_dies_under_conversations(equals: Equals) -> None:
    """The other node goes on alone."""
    proxy = await asyncio.to_thread(equals.proxy, 2, "least-loaded")
    talking = asyncio.create_task(equals.talk(proxy, MANY))
    await asyncio.sleep(2.0)
    assert not talking.done()
    await kill_and_heal(equals, 1, proxy)
    turns = await talking
    assert len(turns) == MANY * len(TURNS)
    assert wrong(turns, equals.nodes[0]) == []
    equals.empty()


async def test_one_node_alone(equals: Equals) -> None:
    proxy = await asyncio.to_thread(equals.proxy, 1, "cache")
    async with httpx.AsyncClient(base_url=proxy.admin_url, trust_env=False) as operator:
        assert (await operator.get("/ready")).json()["status"] == "ready"
    turns = await equals.talk(proxy, 6)
    assert {turn.remote for turn in turns} == {False}
    assert wrong(turns, equals.nodes[0]) == []
    assert read(proxy.admin_url, "pdproxy_local_total", reason="only_node") == len(turns)
    assert read(proxy.admin_url, "pdproxy_hand_overs_failing") == 0
    equals.empty()
