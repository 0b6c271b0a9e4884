"""Nodes that join are proved, wrong ones are barred, and what failed is tested again."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.proof import MOST_PARTNERS, ProofResult, Prover, warm_up
from pdproxy.observe.labels import Proof
from pdproxy.observe.metrics import Metrics
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import settle


@dataclasses.dataclass
class FakeHandOverTest:
    """Two nodes pass where they have the same format, and neither is silent."""

    formats: dict[str, int] = dataclasses.field(default_factory=dict)
    silent: set[str] = dataclasses.field(default_factory=set)
    failing_pairs: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Pairs that fail though each of them is right with others."""
    asked: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    warmed_up: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    held: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.held.set()

    async def ask(self, prefill: Node, decode: Node) -> ProofResult:
        pair = prefill.name, decode.name
        self.asked.append(pair)
        result = self._result(pair)
        await self.held.wait()
        await asyncio.sleep(0)
        return result

    def _result(self, pair: tuple[str, str]) -> ProofResult:
        if self.silent & set(pair):
            return ProofResult(Proof.UNANSWERED, "no ticket")
        right = self.formats.get(pair[0], 0) == self.formats.get(pair[1], 0) and pair not in self.failing_pairs
        return ProofResult(Proof.PASSED) if right else ProofResult(Proof.FAILED, "far apart")

    async def warm(self, prefill: Node, decode: Node) -> None:
        self.warmed_up.append((prefill.name, decode.name))


class FakePool:
    """A pool, its prover, and nodes that join."""

    def __init__(self) -> None:
        self.clock, self.registry, self.test = FakeClock(), CollectorRegistry(), FakeHandOverTest()
        self.pool = Pool(self.clock, metrics=Metrics(self.registry))
        self.prover = Prover(self.pool, self.test, self.clock)

    async def join(self, *names: str, cohort: str = "a") -> list[tuple[str, str]]:
        """Join one after the other, as the joiner does; the pairs that were tested meanwhile."""
        before = len(self.test.asked)
        for name in names:
            node = node_of(name, cohort)
            if name not in {view.node.name for view in self.pool.snapshot().nodes}:
                self.pool.add(node)
            await self.prover.join(node)
            self.pool.admit(node)
        return self.test.asked[before:]

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
        """Let time pass, second by second; the pairs that were tested meanwhile."""
        before = len(self.test.asked)
        for _ in range(seconds):
            self.clock.advance(1)
            await settle()
        return self.test.asked[before:]


def node_of(name: str, cohort: str = "a") -> Node:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return Node(name, f"http://{name}", role, "tiny", cohort=cohort)


@pytest.fixture
def nodes() -> FakePool:
    return FakePool()


async def test_the_first_of_a_role_joins_unproved_and_is_proved_by_its_first_partner(nodes: FakePool) -> None:
    assert await nodes.join("p1", "p2") == []
    assert sorted(await nodes.join("d1")) == [("p1", "d1"), ("p2", "d1")]
    assert nodes.allowed("p1", "d1")
    async with nodes.running():
        assert await nodes.after(700) == [], "proved nodes are not tested again"


async def test_of_two_that_join_at_once_the_second_proves_both(nodes: FakePool) -> None:
    await asyncio.gather(nodes.join("p1"), nodes.join("d1"))
    assert nodes.test.asked == [("p1", "d1")]


async def test_a_node_is_proved_with_one_partner_and_the_others_are_only_warmed_up(nodes: FakePool) -> None:
    await nodes.join("p1", "p2", "d1")
    assert await nodes.join("d2") == [("p1", "d2")]
    assert nodes.test.warmed_up == [("p2", "d2")]


async def test_tests_are_as_many_as_nodes(nodes: FakePool) -> None:
    await nodes.join(*(f"p{number}" for number in range(6)), *(f"d{number}" for number in range(6)))
    assert len(nodes.test.asked) == 6 + 5


async def test_nodes_that_join_at_once_do_not_ask_for_the_same_proof(nodes: FakePool) -> None:
    await nodes.join(*(f"p{number}" for number in range(5)))
    await asyncio.gather(*(nodes.join(f"d{number}") for number in range(5)))
    assert len(nodes.test.asked) <= 5 + 5
    assert {prefill for prefill, _ in nodes.test.asked} == {f"p{number}" for number in range(5)}


async def test_with_many_partners_a_join_is_bounded(nodes: FakePool) -> None:
    await nodes.join(*(f"p{number}" for number in range(30)))
    asked = await nodes.join("d0")
    assert len(asked) == 1 + MOST_PARTNERS
    await nodes.join("d1")
    assert len(nodes.test.warmed_up) <= MOST_PARTNERS


async def test_a_pair_that_fails_is_kept_apart(nodes: FakePool, caplog: pytest.LogCaptureFixture) -> None:
    nodes.test.formats["d1"] = 1
    await nodes.join("p1", "d1")
    assert not nodes.allowed("p1", "d1")
    assert nodes.gauge("p1", "d1") == 1
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "prefill node p1 and decode node d1 exchange no tickets: far apart"
    ]


async def test_a_node_that_fails_with_two_is_kept_apart_from_all(nodes: FakePool) -> None:
    await nodes.join("p1", "p2", "p3", "d1")
    nodes.test.formats["d2"] = 1
    assert await nodes.join("d2") == [("p1", "d2"), ("p2", "d2")]
    assert not any(nodes.allowed(prefill, "d2") for prefill in ("p1", "p2", "p3"))
    assert all(nodes.allowed(prefill, "d1") for prefill in ("p1", "p2", "p3"))
    assert nodes.gauge("*", "d2") == 1
    await nodes.join("p4")
    assert not nodes.allowed("p4", "d2"), "also from those that come later"
    assert nodes.allowed("p4", "d1")


async def test_a_node_that_passes_with_the_second_is_kept_apart_from_the_first_alone(nodes: FakePool) -> None:
    await nodes.join("p1", "p2", "d1")
    nodes.test.failing_pairs.add(("p1", "d2"))
    assert await nodes.join("d2") == [("p1", "d2"), ("p2", "d2")]
    assert not nodes.allowed("p1", "d2")
    assert nodes.allowed("p2", "d2")
    assert nodes.gauge("*", "d2") is None


async def test_which_node_was_wrong_shows_with_the_third_one(nodes: FakePool) -> None:
    nodes.test.formats["p1"] = 1
    await nodes.join("p1", "d1")
    assert not nodes.allowed("p1", "d1")
    await nodes.join("p2")
    assert nodes.allowed("p2", "d1")
    assert nodes.gauge("p1", "*") == 1
    await nodes.join("d2")
    assert not nodes.allowed("p1", "d2")


async def test_a_node_that_cannot_be_asked_joins_and_is_tried_again(nodes: FakePool) -> None:
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


async def test_a_pair_that_failed_is_tried_again_with_growing_waits(nodes: FakePool) -> None:
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


async def test_a_wrong_node_that_was_mended_is_let_in_bar_by_bar(nodes: FakePool) -> None:
    await nodes.join("p1", "p2", "p3", "d1")
    nodes.test.formats["d2"] = 1
    await nodes.join("d2")
    nodes.test.formats.clear()
    async with nodes.running():
        await nodes.after(32)
    assert all(nodes.allowed(prefill, "d2") for prefill in ("p1", "p2", "p3"))


async def test_an_unproved_node_beside_a_wrong_one_is_tried_with_a_proved_one(nodes: FakePool) -> None:
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


async def test_a_node_that_came_back_is_proved_again(nodes: FakePool) -> None:
    await nodes.join("p1", "p2", "d1")
    nodes.test.formats["d1"] = 1
    assert await nodes.join("d1") == [("p1", "d1"), ("p2", "d1")]
    assert not nodes.allowed("p1", "d1")
    nodes.test.formats.clear()
    await nodes.join("d1")
    async with nodes.running():
        await nodes.after(1)
    assert all(nodes.allowed(prefill, "d1") for prefill in ("p1", "p2"))


async def test_a_node_that_came_back_as_one_of_another_cohort_has_no_bars(nodes: FakePool) -> None:
    nodes.test.formats["d1"] = 1
    await nodes.join("p1", "d2", "d1")
    assert not nodes.allowed("p1", "d1")
    assert await nodes.join("d1", cohort="b") == []
    assert nodes.allowed("p1", "d1"), "they are of two cohorts: planning keeps them apart"
    assert nodes.gauge("*", "d1") is None
    nodes.test.formats["p2"] = 1
    assert await nodes.join("p2", cohort="b") == [("p2", "d1")]


async def test_a_node_that_left_is_forgotten(nodes: FakePool) -> None:
    nodes.test.formats["d1"] = 1
    await nodes.join("p1", "d1")
    nodes.pool.remove("d1")
    assert nodes.gauge("p1", "d1") is None
    assert nodes.allowed("p1", "d1")
    nodes.test.formats.clear()
    await nodes.join("d1")
    assert nodes.allowed("p1", "d1")


async def test_a_result_of_a_node_that_is_gone_does_not_count_for_its_successor(nodes: FakePool) -> None:
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


async def test_nodes_of_other_cohorts_and_models_are_not_asked(nodes: FakePool) -> None:
    await nodes.join("p1")
    assert await nodes.join("d1", cohort="b") == []
    other = dataclasses.replace(node_of("d2"), model="big")
    nodes.pool.add(other)
    await nodes.prover.join(other)
    assert nodes.test.asked == []


async def test_a_plain_warm_up_compares_nothing(nodes: FakePool) -> None:
    await nodes.join("p1", "p2")
    await warm_up(nodes.pool, nodes.test, node_of("d1"))
    assert nodes.test.warmed_up == [("p1", "d1"), ("p2", "d1")]
    assert nodes.test.asked == []
