"""200 conversations on nodes of both roles with small caches, while nodes are killed and roles change repeatedly.

No answer is wrong or lost, none waits forever, and afterwards no node holds a block.
"""

import asyncio

import httpx
import pytest

from deploy.local.stack import Proxy
from tests.e2e.conversations import Turn, remote_share, wrong
from tests.e2e.equal_nodes import TURNS, Equals, equal_nodes, give_roles, kill_and_heal

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(1200)]

TALKS = 200
BETWEEN_S = 2.0
ROLES = (["decode"], ["prefill", "decode"], ["prefill"], ["prefill", "decode"])


async def trouble(equals: Equals, proxy: Proxy) -> None:
    """Each node in turn changes its roles, gets both back, is killed, and is started again."""
    async with httpx.AsyncClient(base_url=proxy.admin_url, trust_env=False) as operator:
        for number in range(len(equals.nodes)):
            for roles in ROLES:
                await asyncio.sleep(BETWEEN_S)
                await give_roles(operator, number, *roles)
            await asyncio.sleep(BETWEEN_S)
            await kill_and_heal(equals, number, proxy)


@pytest.mark.parametrize("routing", ["least-loaded", "cache"])
@pytest.mark.parametrize("nodes", [2, 3])
async def test_conversations_under_kills_and_role_changes(nodes: int, routing: str) -> None:
    """`TALKS` conversations at a time, until every node was killed once."""
    with equal_nodes(f"e2e-many-on-{nodes}-{routing}", nodes) as equals:
        proxy = await asyncio.to_thread(equals.proxy, nodes, routing)
        turns, rounds = list[Turn](), 0
        async with asyncio.TaskGroup() as both:
            troubling = both.create_task(trouble(equals, proxy))
            while not troubling.done():
                turns += await equals.talk(proxy, TALKS)
                rounds += 1
        print(f"{nodes} nodes, {routing}: {len(turns)} turns, {remote_share(turns):.0%} handed over")
        assert len(turns) == rounds * TALKS * len(TURNS)
        assert wrong(turns, equals.nodes[0]) == []
        equals.empty()
