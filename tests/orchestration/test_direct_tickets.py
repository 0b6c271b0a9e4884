"""Tickets that prefill nodes send to waiting decode legs themselves: faster, and nothing else changes."""

import asyncio
from typing import Any

import pytest

from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.rendezvous import ANSWER_SECONDS
from pdproxy.request import Endpoint
from pdproxy.settings.types import OnPrefillFailure
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.node import FakeNode
from tests.fakes.reading import follow
from tests.fakes.waiting import TICKETS_PATH
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for
from tests.orchestration.test_rendezvous import check_right, deliveries, params, slow_prefill

CHAT = Endpoint.CHAT
STREAM = body_for(CHAT, stream=True)
RESET = InjectedFault(FaultKind.RESET)


@pytest.fixture(autouse=True)
def decode_nodes_take_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNode, "takes_tickets", True)


async def until(condition: Any) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it did not come to that")


async def test_the_prefill_leg_says_where_its_ticket_is_waited_for() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    [prefill], [decode] = cluster.prefills, cluster.decodes
    check_right(await cluster.ask(CHAT, STREAM))
    wait_id = params(decode)["pdproxy_wait"]["id"]
    assert params(prefill)["pdproxy_send_ticket"] == {"id": wait_id, "addresses": ["engine of d0"]}
    assert (decode.waiting.taken, cluster.fabric.pulled) == ([wait_id], 1)
    await cluster.settle()


async def test_nodes_that_say_nothing_get_theirs_from_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNode, "takes_tickets", False)
    cluster = FakeCluster(prefills=1, decodes=1)
    check_right(await cluster.ask(CHAT, STREAM))
    assert "pdproxy_send_ticket" not in params(cluster.prefills[0])
    await cluster.settle()


async def test_the_proxy_delivers_all_the_same() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    cluster.prefills[0].sends_late = True
    got = await cluster.ask(CHAT, STREAM)
    check_right(got)
    assert got.route == "disaggregated"
    assert (len(cluster.decodes[0].waiting.deliveries), deliveries(cluster)) == (1, {"ticket": 1})
    assert (cluster.fabric.pulled, cluster.fabric.released) == (1, set())
    await cluster.settle()


async def test_a_first_event_that_overtakes_the_prefill_s_answer_is_a_hand_over() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    go = await slow_prefill(cluster)
    asking = asyncio.ensure_future(cluster.ask(CHAT, STREAM))
    await until(lambda: cluster.fabric.pulled)
    go.set()
    check_right(got := await asking)
    assert got.route == "disaggregated"
    assert cluster.prefills[0].cut == 0
    assert cluster.count("pdproxy_local_total") == cluster.count("pdproxy_recomputed_total") == 0
    await cluster.settle()


async def test_an_answer_that_does_not_come_is_waited_for_no_longer_than_a_moment() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    await slow_prefill(cluster)
    asking = asyncio.ensure_future(cluster.ask(CHAT, STREAM))
    await until(lambda: cluster.fabric.pulled)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done()
    cluster.clock.advance(ANSWER_SECONDS)
    check_right(await asking)
    assert cluster.prefills[0].cut == 1
    await cluster.settle()
    assert (len(cluster.fabric.released), cluster.fabric.held) == (1, {})


async def test_a_node_that_did_not_wait_leaves_nothing_held() -> None:
    """The prefill's answer comes while its first event waits for it: nobody reads the ticket."""
    cluster = FakeCluster(prefills=1, decodes=1)
    go = await slow_prefill(cluster)
    cluster.decodes[0].waiting.most = 0
    cluster.prefills[0].sends_late = True
    asked = asyncio.create_task(cluster.orchestrator.answer(cluster.request(CHAT, STREAM)))
    await until(lambda: cluster.decodes[0].waiting._missed)
    go.set()
    reply = await asked
    assert not isinstance(reply.body, bytes)
    await follow(reply.body, most=1)
    await cluster.settle()
    assert (cluster.fabric.pulled, cluster.fabric.held) == (0, {})


async def test_a_ticket_whose_answer_is_lost_was_still_read() -> None:
    """The prefill node fails after it has sent the ticket: the second prefill is not needed, and holds nothing."""
    cluster = FakeCluster(decodes=1)
    cluster.prefills[0].fault = InjectedFault(FaultKind.RESET, at=0)
    check_right(await cluster.ask(CHAT, STREAM))
    await cluster.settle()
    assert cluster.fabric.held == {}


async def test_a_prefill_that_fails_after_the_first_event_does_not_disturb_it() -> None:
    config = OrchestrationConfig(on_prefill_failure=OnPrefillFailure.FAIL, retries=0)
    cluster = FakeCluster(prefills=1, decodes=1, config=config)
    cluster.prefills[0].fault = InjectedFault(FaultKind.RESET, at=0)
    go = await slow_prefill(cluster)
    asking = asyncio.ensure_future(cluster.ask(CHAT, STREAM))
    await until(lambda: cluster.fabric.pulled)
    for _ in range(20):
        await asyncio.sleep(0)
    go.set()
    check_right(await asking)
    await cluster.settle()


async def test_several_choices_get_theirs_from_the_proxy() -> None:
    """The first one's first event would release what the others still read."""
    cluster = FakeCluster(prefills=1, decodes=1)
    body = body_for(Endpoint.COMPLETIONS, stream=True, tokens=3, n=2)
    assert (await cluster.ask(Endpoint.COMPLETIONS, body)).status == 200
    assert "pdproxy_send_ticket" not in params(cluster.prefills[0])
    assert (cluster.fabric.pulled, cluster.fabric.released) == (1, set())
    await cluster.settle()


async def test_a_leg_that_moves_is_waited_for_at_its_new_node() -> None:
    cluster = FakeCluster(prefills=2)
    go = await slow_prefill(cluster)
    cluster.prefills[0].sends_late = True
    cluster.decodes[0].fault = RESET
    asking = asyncio.ensure_future(cluster.ask(CHAT, STREAM))
    await until(lambda: len(cluster.decodes[1].waiting))
    go.set()
    check_right(await asking)
    assert len({params(node)["pdproxy_wait"]["id"] for node in cluster.decodes}) == 2, "an id is of one leg"
    await cluster.settle()


async def test_a_second_prefill_leg_names_the_leg_that_waits_by_then() -> None:
    cluster = FakeCluster(prefills=2)
    go = await slow_prefill(cluster)
    cluster.prefills[0].fault = InjectedFault(FaultKind.RESET, at=0)
    cluster.prefills[0].sends_late = True
    cluster.decodes[0].fault = RESET
    asking = asyncio.ensure_future(cluster.ask(CHAT, STREAM))
    await until(lambda: len(cluster.decodes[1].waiting))
    go.set()
    check_right(await asking)
    assert params(cluster.prefills[1])["pdproxy_send_ticket"] == {
        "id": params(cluster.decodes[1])["pdproxy_wait"]["id"],
        "addresses": ["engine of d1"],
    }
    await cluster.settle()


async def test_a_delivery_that_fails_moves_a_leg_only_if_it_still_waits() -> None:
    cluster = FakeCluster(prefills=1)
    cluster.prefills[0].sends_late = True
    cluster.decodes[0].delivery_fault = InjectedFault(FaultKind.STATUS, status=500)
    check_right(await cluster.ask(CHAT, STREAM))
    assert params(cluster.decodes[1])["do_remote_prefill"]
    assert [seen.path for seen in cluster.decodes[0].seen].count(TICKETS_PATH) == 1
    await cluster.settle()
