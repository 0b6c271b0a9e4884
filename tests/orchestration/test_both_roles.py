"""Requests on nodes of both roles: what each of them holds there, and what follows where one fails."""

import asyncio

import pytest

from pdproxy.nodes.node import BOTH, DECODE, PREFILL, Binding, Capacity, Footprint, Role, Roles, State
from pdproxy.nodes.pool_entry import LegLoad
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.planning.plan import LEAST_LOADED
from pdproxy.request import Endpoint
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.cluster import FakeCluster, Got
from tests.orchestration.prompts import body_for, right
from tests.orchestration.test_decode_room import FOOTPRINT, Streams, streams

COMPLETIONS = Endpoint.COMPLETIONS
PAIRS = OrchestrationConfig(routing_policy=LEAST_LOADED)
"""A policy that knows no prices hands over wherever it can."""
PROMPT = Footprint(18, 1)


async def ask(cluster: FakeCluster, name: str = "r-1") -> Got:
    got = await cluster.ask(COMPLETIONS, body_for(COMPLETIONS, stream=False), name=name)
    assert (got.status, got.json()["choices"][0]["text"]) == (200, right(COMPLETIONS))
    return got


def computed_alone(cluster: FakeCluster, reason: str) -> float:
    return cluster.count("pdproxy_local_total", reason=reason)


async def test_one_node_serves_and_nothing_is_wrong_with_that(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster(0, 0, shared=1)
    for _ in range(3):
        assert (await ask(cluster)).route == "local"
    assert computed_alone(cluster, "only_node") == 3
    assert not [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    await cluster.settle()


async def test_two_nodes_hand_over_to_each_other() -> None:
    cluster = FakeCluster(0, 0, PAIRS, shared=2)
    for number in range(6):
        assert (await ask(cluster, f"r-{number}")).route == "disaggregated"
    assert all(node.legs() for node in cluster.shared)
    await cluster.settle()


async def test_a_prompt_counts_on_its_prefill_node_until_it_is_read() -> None:
    """The first event of a stream says that it was read; until then no leg runs there, and its blocks are held."""
    cluster = FakeCluster(0, 0, PAIRS, shared=2, capacity=Capacity(1000, None, 1, Binding.ATTENTION))
    views = [cluster.pool.view(name) for name in ("n0", "n1")]
    async with streams(cluster) as made:
        starting, seen = asyncio.create_task(made.start("a")), set[tuple[Footprint, int]]()
        while not starting.done():
            seen |= {(view.footprint, view.active) for view in views}
            await asyncio.sleep(0)
        assert {(PROMPT, 1), (PROMPT, 0), (FOOTPRINT, 1)} <= seen
        assert sorted(view.footprint for view in views) == [Footprint(), FOOTPRINT]
        await made.finish("a")


async def test_a_hand_over_begins_only_where_both_have_room() -> None:
    """Each node has room for two answers, or one and two prompts."""
    cluster = FakeCluster(0, 0, PAIRS, shared=2, capacity=Capacity(60, None, 1, Binding.ATTENTION))
    async with streams(cluster) as made:
        for name in "abcdef":
            await made.start(name)
        assert 2 <= len(made.begun) < 6
        for name in ("n0", "n1"):
            assert cluster.pool.view(name).footprint.tokens <= 60
        await made.finish(*"abcdef")


async def test_a_node_without_room_computes_no_prompt_for_others() -> None:
    """The node has the fewest legs, and its caches are nearly full."""
    cluster = FakeCluster(0, 0, PAIRS, shared=3, capacity=Capacity(60, None, 1, Binding.ATTENTION))
    others = [cluster.pool.acquire(name) for name in ("n1", "n1", "n2", "n2")]
    with cluster.pool.acquire("n0", LegLoad(footprint=Footprint(50, 1))):
        for number in range(6):
            assert (await ask(cluster, f"r-{number}")).route == "disaggregated"
        assert cluster.shared[0].legs() == []
    for slot in others:
        slot.release()
    await cluster.settle()


@pytest.mark.parametrize("kind", [FaultKind.REFUSE, FaultKind.RESET, FaultKind.STATUS, FaultKind.NO_TICKET])
@pytest.mark.parametrize("number", [0, 1])
async def test_a_node_that_fails_costs_no_request(kind: FaultKind, number: int) -> None:
    for policy in (PAIRS, OrchestrationConfig()):
        cluster = FakeCluster(0, 0, policy, shared=2)
        cluster.shared[number].fault = InjectedFault(kind, status=503)
        for count in range(4):
            await ask(cluster, f"r-{count}")
        await cluster.settle()


@pytest.mark.parametrize("roles", [PREFILL, DECODE], ids=["prefill", "decode"])
async def test_roles_change_while_requests_run(roles: Roles) -> None:
    """Legs that began in a role that is gone go on to their ends."""
    cluster = FakeCluster(0, 0, PAIRS, shared=2)
    made = Streams(cluster)
    for name in "abcd":
        await made.start(name)
    cluster.pool.change_roles("n0", roles)
    assert cluster.pool.view("n0").node.roles == roles
    assert cluster.pool.view("n0").state is State.UP
    for name in "efgh":
        await made.start(name)
    await made.finish(*"abcdefgh")
    legs = len(cluster.shared[0].legs())
    await ask(cluster)
    other = Role.DECODE if roles == PREFILL else Role.PREFILL
    assert other not in cluster.pool.view("n0").node.roles
    assert len(cluster.shared[0].legs()) == legs + 1
    await cluster.settle()


async def test_a_role_that_is_new_waits_for_its_tests() -> None:
    cluster = FakeCluster(0, 0, PAIRS, shared=2)
    for name in ("n0", "n1"):
        cluster.pool.change_roles(name, DECODE)
    assert not cluster.pool.joins_anew("n0")
    cluster.pool.change_roles("n0", BOTH)
    assert cluster.pool.joins_anew("n0")
    assert (await ask(cluster)).route == "local"
    cluster.pool.bring_up(cluster.pool.configured("n0"))
    assert not cluster.pool.joins_anew("n0")
    assert (await ask(cluster)).route == "disaggregated"
    await asyncio.sleep(0)
    await cluster.settle()


async def test_a_stream_of_the_only_node_ends_with_an_error_event() -> None:
    """Nobody else could go on with it; the next request finds the node again."""
    cluster = FakeCluster(0, 0, shared=1)
    cluster.shared[0].fault = InjectedFault(FaultKind.RESET, at=3, times=1)
    got = await cluster.ask(COMPLETIONS, body_for(COMPLETIONS, stream=True))
    assert got.status == 200
    assert b'"code": "excluded"' in got.body
    assert got.body.endswith(b"data: [DONE]\n\n")
    await ask(cluster, "r-2")
    await cluster.settle()
