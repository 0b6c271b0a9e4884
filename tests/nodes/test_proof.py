"""Nodes that join are proved, whoever is wrong is barred, and what failed is tried again."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.proof import MOST_PARTNERS, Prover, Result, WarmUp
from pdproxy.observe.labels import Proof
from pdproxy.observe.metrics import Metrics
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import settle


@dataclasses.dataclass
class Nature:
    """Nodes pass with each other where their bytes mean the same, and neither is silent."""

    dialects: dict[str, int] = dataclasses.field(default_factory=dict)
    silent: set[str] = dataclasses.field(default_factory=set)
    at_odds: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Pairs that fail though each of them is right with others."""
    asked: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    warmed: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    held: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.held.set()

    async def ask(self, prefill: Node, decode: Node) -> Result:
        pair = prefill.name, decode.name
        self.asked.append(pair)
        result = self._result(pair)
        await self.held.wait()
        await asyncio.sleep(0)
        return result

    def _result(self, pair: tuple[str, str]) -> Result:
        if self.silent & set(pair):
            return Result(Proof.UNANSWERED, "no ticket")
        right = self.dialects.get(pair[0], 0) == self.dialects.get(pair[1], 0) and pair not in self.at_odds
        return Result(Proof.PASSED) if right else Result(Proof.FAILED, "far apart")

    async def warm(self, prefill: Node, decode: Node) -> None:
        self.warmed.append((prefill.name, decode.name))


class Place:
    """A pool, its prover, and nodes that join."""

    def __init__(self) -> None:
        self.clock, self.registry, self.nature = FakeClock(), CollectorRegistry(), Nature()
        self.pool = Pool(self.clock, metrics=Metrics(self.registry))
        self.prover = Prover(self.pool, self.nature, self.clock)

    async def join(self, *names: str, cohort: str = "a") -> list[tuple[str, str]]:
        """As the joiner does, one after the other; what was asked meanwhile."""
        before = len(self.nature.asked)
        for name in names:
            node = node_of(name, cohort)
            if name not in {view.node.name for view in self.pool.snapshot().nodes}:
                self.pool.add(node)
            await self.prover.join(node)
            self.pool.admit(node)
        return self.nature.asked[before:]

    def allowed(self, prefill: str, decode: str) -> bool:
        return self.pool.snapshot().bars.allow(prefill, decode)

    def gauge(self, prefill: str, decode: str) -> float | None:
        return self.registry.get_sample_value("pdproxy_pair_barred", {"prefill": prefill, "decode": decode})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.prover.run())
        try:
            await settle()
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def after(self, seconds: int) -> list[tuple[str, str]]:
        """Let time pass, second by second; what was asked meanwhile."""
        before = len(self.nature.asked)
        for _ in range(seconds):
            self.clock.advance(1)
            await settle()
        return self.nature.asked[before:]


def node_of(name: str, cohort: str = "a") -> Node:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return Node(name, f"http://{name}", role, "tiny", cohort=cohort)


@pytest.fixture
def place() -> Place:
    return Place()


async def test_the_first_of_a_role_joins_unproved_and_is_proved_by_its_first_partner(place: Place) -> None:
    assert await place.join("p1", "p2") == []
    assert sorted(await place.join("d1")) == [("p1", "d1"), ("p2", "d1")]
    assert place.allowed("p1", "d1")
    async with place.running():
        assert await place.after(700) == [], "who is proved is left alone"


async def test_of_two_that_join_at_once_the_second_proves_both(place: Place) -> None:
    await asyncio.gather(place.join("p1"), place.join("d1"))
    assert place.nature.asked == [("p1", "d1")]


async def test_a_node_is_proved_with_one_partner_and_the_others_are_only_warmed(place: Place) -> None:
    await place.join("p1", "p2", "d1")
    assert await place.join("d2") == [("p1", "d2")]
    assert place.nature.warmed == [("p2", "d2")]


async def test_tests_are_as_many_as_nodes(place: Place) -> None:
    await place.join(*(f"p{number}" for number in range(6)), *(f"d{number}" for number in range(6)))
    assert len(place.nature.asked) == 6 + 5


async def test_nodes_that_join_at_once_do_not_ask_for_the_same_proof(place: Place) -> None:
    await place.join(*(f"p{number}" for number in range(5)))
    await asyncio.gather(*(place.join(f"d{number}") for number in range(5)))
    assert len(place.nature.asked) <= 5 + 5
    assert {prefill for prefill, _ in place.nature.asked} == {f"p{number}" for number in range(5)}


async def test_with_many_partners_a_join_is_bounded(place: Place) -> None:
    await place.join(*(f"p{number}" for number in range(30)))
    asked = await place.join("d0")
    assert len(asked) == 1 + MOST_PARTNERS
    await place.join("d1")
    assert len(place.nature.warmed) <= MOST_PARTNERS


async def test_a_pair_that_fails_is_kept_apart(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.nature.dialects["d1"] = 1
    await place.join("p1", "d1")
    assert not place.allowed("p1", "d1")
    assert place.gauge("p1", "d1") == 1
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "prefill node p1 and decode node d1 exchange no tickets: far apart"
    ]


async def test_a_node_that_fails_with_two_is_kept_apart_from_all(place: Place) -> None:
    await place.join("p1", "p2", "p3", "d1")
    place.nature.dialects["d2"] = 1
    assert await place.join("d2") == [("p1", "d2"), ("p2", "d2")]
    assert not any(place.allowed(prefill, "d2") for prefill in ("p1", "p2", "p3"))
    assert all(place.allowed(prefill, "d1") for prefill in ("p1", "p2", "p3"))
    assert place.gauge("*", "d2") == 1
    await place.join("p4")
    assert not place.allowed("p4", "d2"), "also from those that come later"
    assert place.allowed("p4", "d1")


async def test_a_node_that_passes_with_the_second_is_kept_apart_from_the_first_alone(place: Place) -> None:
    await place.join("p1", "p2", "d1")
    place.nature.at_odds.add(("p1", "d2"))
    assert await place.join("d2") == [("p1", "d2"), ("p2", "d2")]
    assert not place.allowed("p1", "d2")
    assert place.allowed("p2", "d2")
    assert place.gauge("*", "d2") is None


async def test_who_was_wrong_shows_with_the_third_node(place: Place) -> None:
    place.nature.dialects["p1"] = 1
    await place.join("p1", "d1")
    assert not place.allowed("p1", "d1")
    await place.join("p2")
    assert place.allowed("p2", "d1")
    assert place.gauge("p1", "*") == 1
    await place.join("d2")
    assert not place.allowed("p1", "d2")


async def test_a_node_that_cannot_be_asked_joins_and_is_tried_again(place: Place) -> None:
    place.nature.silent.add("d1")
    assert await place.join("p1", "p2", "d1") == [("p1", "d1"), ("p2", "d1"), ("p2", "d1")]
    assert place.allowed("p1", "d1")
    place.nature.asked.clear()
    async with place.running():
        assert await place.after(29) == []
        assert await place.after(2) != []
        place.nature.silent.clear()
        assert await place.after(700) != []
        assert await place.after(700) == []


async def test_a_pair_that_failed_is_tried_again_with_growing_waits(place: Place) -> None:
    place.nature.dialects["d1"] = 1
    await place.join("p1", "d1")
    async with place.running():
        assert len(await place.after(29)) == 0
        assert len(await place.after(2)) == 1
        assert len(await place.after(3600)) in range(7, 11)
        place.nature.dialects.clear()
        await place.after(601)
        assert place.allowed("p1", "d1")
        assert place.gauge("p1", "d1") is None
        assert await place.after(700) == []


async def test_a_wrong_node_that_was_mended_is_let_in_bar_by_bar(place: Place) -> None:
    await place.join("p1", "p2", "p3", "d1")
    place.nature.dialects["d2"] = 1
    await place.join("d2")
    place.nature.dialects.clear()
    async with place.running():
        await place.after(32)
    assert all(place.allowed(prefill, "d2") for prefill in ("p1", "p2", "p3"))


async def test_an_unproved_node_beside_a_wrong_one_is_tried_with_a_proved_one(place: Place) -> None:
    """p1 failed with d1, and who is wrong is not known; then p2 and d2 come, and pass."""
    place.nature.dialects["d1"] = 1
    await place.join("p1", "d1")
    place.nature.silent.add("p1")
    await place.join("d2", "p2")
    place.nature.silent.clear()
    async with place.running():
        await place.after(62)
    assert place.allowed("p1", "d2")
    assert place.allowed("p2", "d2")
    assert not place.allowed("p2", "d1")
    assert place.gauge("*", "d1") == 1


async def test_a_node_that_came_back_is_proved_again(place: Place) -> None:
    await place.join("p1", "p2", "d1")
    place.nature.dialects["d1"] = 1
    assert await place.join("d1") == [("p1", "d1"), ("p2", "d1")]
    assert not place.allowed("p1", "d1")
    place.nature.dialects.clear()
    await place.join("d1")
    async with place.running():
        await place.after(1)
    assert all(place.allowed(prefill, "d1") for prefill in ("p1", "p2"))


async def test_a_node_that_came_back_as_one_of_another_cohort_has_no_bars(place: Place) -> None:
    place.nature.dialects["d1"] = 1
    await place.join("p1", "d2", "d1")
    assert not place.allowed("p1", "d1")
    assert await place.join("d1", cohort="b") == []
    assert place.allowed("p1", "d1"), "they are of two cohorts: planning keeps them apart"
    assert place.gauge("*", "d1") is None
    place.nature.dialects["p2"] = 1
    assert await place.join("p2", cohort="b") == [("p2", "d1")]


async def test_a_node_that_left_is_forgotten(place: Place) -> None:
    place.nature.dialects["d1"] = 1
    await place.join("p1", "d1")
    place.pool.remove("d1")
    assert place.gauge("p1", "d1") is None
    assert place.allowed("p1", "d1")
    place.nature.dialects.clear()
    await place.join("d1")
    assert place.allowed("p1", "d1")


async def test_what_was_asked_of_a_node_that_is_gone_says_nothing_of_its_successor(place: Place) -> None:
    await place.join("p1")
    place.nature.dialects["d1"] = 1
    place.nature.held.clear()
    first = asyncio.create_task(place.join("d1"))
    await settle()
    place.pool.remove("d1")
    place.pool.add(node_of("d1"))
    place.nature.silent.add("d1")
    second = asyncio.create_task(place.prover.join(node_of("d1")))
    await settle()
    place.nature.held.set()
    await asyncio.gather(first, second)
    assert place.allowed("p1", "d1")


async def test_nodes_of_other_cohorts_and_models_are_not_asked(place: Place) -> None:
    await place.join("p1")
    assert await place.join("d1", cohort="b") == []
    other = dataclasses.replace(node_of("d2"), model="big")
    place.pool.add(other)
    await place.prover.join(other)
    assert place.nature.asked == []


async def test_a_plain_warm_up_compares_nothing(place: Place) -> None:
    await place.join("p1", "p2")
    await WarmUp(place.pool, place.nature).join(node_of("d1"))
    assert place.nature.warmed == [("p1", "d1"), ("p2", "d1")]
    assert place.nature.asked == []
