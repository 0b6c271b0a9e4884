"""Nodes that join are proved, wrong ones are barred, and what failed is tested again."""

import asyncio
import dataclasses
import logging

import pytest

from pdproxy.nodes.node import State
from pdproxy.nodes.proof import MOST_PARTNERS, PATIENCE, warm_up
from tests.nodes.fake_pool import settle
from tests.nodes.proved_pool import CANNOT, ProvedPool, node_of


@pytest.fixture
def nodes() -> ProvedPool:
    return ProvedPool()


async def test_the_first_of_a_role_joins_unproved_and_is_proved_by_its_first_partner(nodes: ProvedPool) -> None:
    assert await nodes.join("p1", "p2") == []
    assert sorted(await nodes.join("d1")) == [("p1", "d1"), ("p2", "d1")]
    assert nodes.allowed("p1", "d1")
    async with nodes.running():
        assert await nodes.after(700) == [], "proved nodes are not tested again"


async def test_of_two_that_join_at_once_the_second_proves_both(nodes: ProvedPool) -> None:
    await asyncio.gather(nodes.join("p1"), nodes.join("d1"))
    assert nodes.test.asked == [("p1", "d1")]


async def test_a_node_is_proved_with_one_partner_and_the_others_are_only_warmed_up(nodes: ProvedPool) -> None:
    await nodes.join("p1", "p2", "d1")
    assert await nodes.join("d2") == [("p1", "d2")]
    assert nodes.test.warmed_up == [("p2", "d2")]


async def test_tests_are_as_many_as_nodes(nodes: ProvedPool) -> None:
    await nodes.join(*(f"p{number}" for number in range(6)), *(f"d{number}" for number in range(6)))
    assert len(nodes.test.asked) == 6 + 5


async def test_nodes_that_join_at_once_do_not_ask_for_the_same_proof(nodes: ProvedPool) -> None:
    await nodes.join(*(f"p{number}" for number in range(5)))
    await asyncio.gather(*(nodes.join(f"d{number}") for number in range(5)))
    assert len(nodes.test.asked) <= 5 + 5
    assert {prefill for prefill, _ in nodes.test.asked} == {f"p{number}" for number in range(5)}


async def test_with_many_partners_a_join_is_bounded(nodes: ProvedPool) -> None:
    await nodes.join(*(f"p{number}" for number in range(30)))
    asked = await nodes.join("d0")
    assert len(asked) == 1 + MOST_PARTNERS
    await nodes.join("d1")
    assert len(nodes.test.warmed_up) <= MOST_PARTNERS


async def test_a_pair_that_fails_is_kept_apart(nodes: ProvedPool, caplog: pytest.LogCaptureFixture) -> None:
    nodes.test.formats["d1"] = 1
    await nodes.join("p1", "d1")
    assert not nodes.allowed("p1", "d1")
    assert nodes.gauge("p1", "d1") == 1
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "prefill node p1 and decode node d1 exchange no tickets: far apart"
    ]


async def test_a_node_that_fails_with_two_is_kept_apart_from_all(nodes: ProvedPool) -> None:
    await nodes.join("p1", "p2", "p3", "d1")
    nodes.test.formats["d2"] = 1
    assert await nodes.join("d2") == [("p1", "d2"), ("p2", "d2")]
    assert not any(nodes.allowed(prefill, "d2") for prefill in ("p1", "p2", "p3"))
    assert all(nodes.allowed(prefill, "d1") for prefill in ("p1", "p2", "p3"))
    assert nodes.gauge("*", "d2") == 1
    await nodes.join("p4")
    assert not nodes.allowed("p4", "d2"), "also from those that come later"
    assert nodes.allowed("p4", "d1")


async def test_a_node_that_passes_with_the_second_is_kept_apart_from_the_first_alone(nodes: ProvedPool) -> None:
    await nodes.join("p1", "p2", "d1")
    nodes.test.failing_pairs.add(("p1", "d2"))
    assert await nodes.join("d2") == [("p1", "d2"), ("p2", "d2")]
    assert not nodes.allowed("p1", "d2")
    assert nodes.allowed("p2", "d2")
    assert nodes.gauge("*", "d2") is None


async def test_which_node_was_wrong_shows_with_the_third_one(nodes: ProvedPool) -> None:
    nodes.test.formats["p1"] = 1
    await nodes.join("p1", "d1")
    assert not nodes.allowed("p1", "d1")
    await nodes.join("p2")
    assert nodes.allowed("p2", "d1")
    assert nodes.gauge("p1", "*") == 1
    await nodes.join("d2")
    assert not nodes.allowed("p1", "d2")


async def test_a_node_that_cannot_be_asked_joins_and_is_tried_again(nodes: ProvedPool) -> None:
    nodes.test.silent.add("d1")
    assert await nodes.join("p1", "p2", "d1") == [("p1", "d1"), ("p2", "d1"), ("p2", "d1")]
    assert nodes.allowed("p1", "d1")
    nodes.test.asked.clear()
    async with nodes.running():
        assert await nodes.after(29) == []
        assert await nodes.after(2) != []
        nodes.test.silent.clear()
        assert await nodes.after(700) != []
        assert await nodes.after(700) == []


async def test_a_pair_that_failed_is_tried_again_with_growing_waits(nodes: ProvedPool) -> None:
    nodes.test.formats["d1"] = 1
    await nodes.join("p1", "d1")
    async with nodes.running():
        assert len(await nodes.after(29)) == 0
        assert len(await nodes.after(2)) == 1
        assert len(await nodes.after(3600)) in range(7, 11)
        nodes.test.formats.clear()
        await nodes.after(601)
        assert nodes.allowed("p1", "d1")
        assert nodes.gauge("p1", "d1") is None
        assert await nodes.after(700) == []


async def test_the_bars_of_a_wrong_node_that_was_mended_are_lifted_one_by_one(nodes: ProvedPool) -> None:
    await nodes.join("p1", "p2", "p3", "d1")
    nodes.test.formats["d2"] = 1
    await nodes.join("d2")
    nodes.test.formats.clear()
    async with nodes.running():
        await nodes.after(32)
    assert all(nodes.allowed(prefill, "d2") for prefill in ("p1", "p2", "p3"))


async def test_an_unproved_node_beside_a_wrong_one_is_tried_with_a_proved_one(nodes: ProvedPool) -> None:
    """p1 failed with d1, and which one is wrong is not known; then p2 and d2 come, and pass."""
    nodes.test.formats["d1"] = 1
    await nodes.join("p1", "d1")
    nodes.test.silent.add("p1")
    await nodes.join("d2", "p2")
    nodes.test.silent.clear()
    async with nodes.running():
        await nodes.after(62)
    assert nodes.allowed("p1", "d2")
    assert nodes.allowed("p2", "d2")
    assert not nodes.allowed("p2", "d1")
    assert nodes.gauge("*", "d1") == 1


async def test_a_node_that_came_back_is_proved_again(nodes: ProvedPool) -> None:
    await nodes.join("p1", "p2", "d1")
    nodes.test.formats["d1"] = 1
    assert await nodes.join("d1") == [("p1", "d1"), ("p2", "d1")]
    assert not nodes.allowed("p1", "d1")
    nodes.test.formats.clear()
    await nodes.join("d1")
    async with nodes.running():
        await nodes.after(1)
    assert all(nodes.allowed(prefill, "d1") for prefill in ("p1", "p2"))


async def test_a_node_that_came_back_as_one_of_another_cohort_has_no_bars(nodes: ProvedPool) -> None:
    nodes.test.formats["d1"] = 1
    await nodes.join("p1", "d2", "d1")
    assert not nodes.allowed("p1", "d1")
    assert await nodes.join("d1", cohort="b") == []
    assert nodes.allowed("p1", "d1"), "they are of two cohorts: planning keeps them apart"
    assert nodes.gauge("*", "d1") is None
    nodes.test.formats["p2"] = 1
    assert await nodes.join("p2", cohort="b") == [("p2", "d1")]


async def test_a_node_that_left_is_forgotten(nodes: ProvedPool) -> None:
    nodes.test.formats["d1"] = 1
    await nodes.join("p1", "d1")
    nodes.pool.remove("d1")
    assert nodes.gauge("p1", "d1") is None
    assert nodes.allowed("p1", "d1")
    nodes.test.formats.clear()
    await nodes.join("d1")
    assert nodes.allowed("p1", "d1")


async def test_a_result_of_a_node_that_is_gone_does_not_count_for_its_successor(nodes: ProvedPool) -> None:
    await nodes.join("p1")
    nodes.test.formats["d1"] = 1
    nodes.test.held.clear()
    first = asyncio.create_task(nodes.join("d1"))
    await settle()
    nodes.pool.remove("d1")
    nodes.pool.add(node_of("d1"))
    nodes.test.silent.add("d1")
    second = asyncio.create_task(nodes.prover.join(node_of("d1")))
    await settle()
    nodes.test.held.set()
    await asyncio.gather(first, second)
    assert nodes.allowed("p1", "d1")


async def test_nodes_of_other_cohorts_and_models_are_not_asked(nodes: ProvedPool) -> None:
    await nodes.join("p1")
    assert await nodes.join("d1", cohort="b") == []
    other = dataclasses.replace(node_of("d2"), model="big")
    nodes.pool.add(other)
    await nodes.prover.join(other)
    assert nodes.test.asked == []


async def test_a_plain_warm_up_compares_nothing(nodes: ProvedPool) -> None:
    await nodes.join("p1", "p2")
    await warm_up(nodes.pool, nodes.test, nodes.clock, node_of("d1"))
    assert nodes.test.warmed_up == [("p1", "d1"), ("p2", "d1")]
    assert nodes.test.asked == []
    assert nodes.pool.hand_overs.bars() == {}


@pytest.mark.parametrize("compares", [True, False])
async def test_a_pair_that_hands_nothing_over_is_barred_at_once_and_says_why(
    compares: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = ProvedPool(compares=compares)
    nodes.test.deaf.add("d1")
    await nodes.join("p1", "d1")
    assert not nodes.allowed("p1", "d1")
    assert nodes.pool.bars.pairs == {("p1", "d1"): CANNOT}
    assert not nodes.prover.proved("d1")
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        f"prefill node p1 and decode node d1 exchange no tickets: {CANNOT}"
    ]
    async with nodes.running():
        nodes.test.deaf.clear()
        await nodes.after(31)
        assert nodes.allowed("p1", "d1")


async def test_where_no_decode_node_serves_one_under_test_does_without_tickets(nodes: ProvedPool) -> None:
    """The hosts are busy: a test takes minutes, in which clients would get 503."""
    await nodes.join("p1")
    node = node_of("d1")
    nodes.pool.add(node)
    nodes.test.held.clear()
    joining = asyncio.create_task(nodes.prover.join(node))
    await settle()
    assert nodes.pool.view("d1").state is State.JOINING
    nodes.clock.advance(PATIENCE)
    await settle()
    assert nodes.pool.view("d1").state is State.UP
    assert not nodes.allowed("p1", "d1")
    nodes.test.held.set()
    await joining
    assert nodes.allowed("p1", "d1")
    assert nodes.prover.proved("d1")


@pytest.mark.parametrize("joins", ["d2", "p2"])
async def test_where_a_decode_node_serves_no_node_does_before_its_tests_are_over(nodes: ProvedPool, joins: str) -> None:
    await nodes.join("p1", "d1")
    node = node_of(joins)
    nodes.pool.add(node)
    nodes.test.held.clear()
    joining = asyncio.create_task(nodes.prover.join(node))
    await settle()
    nodes.clock.advance(100)
    await settle()
    assert nodes.pool.view(joins).state is State.JOINING
    nodes.test.held.set()
    await joining
    assert not nodes.pool.bars


async def test_a_warm_up_shows_pairs_that_hand_nothing_over(nodes: ProvedPool) -> None:
    await nodes.join("d1", "d2", "d3", "d4", "p1")
    nodes.test.deaf.add("p2")
    await nodes.join("p2")
    assert nodes.test.warmed_up
    assert not any(nodes.allowed("p2", decode) for decode in ("d1", "d2", "d3", "d4"))
    assert all(nodes.allowed("p1", decode) for decode in ("d1", "d2", "d3", "d4"))
    async with nodes.running():
        asked = await nodes.after(3600)
    assert 30 * 4 <= len(asked) <= 32 * 4, "soon after the network is mended the node is to be used"
