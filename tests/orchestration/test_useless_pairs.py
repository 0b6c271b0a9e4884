"""A pair whose tickets are of no use: it is barred, and tried again."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdproxy.admin.incident import incident
from pdproxy.admin.seen import Seen
from pdproxy.background import Background
from pdproxy.nodes.hand_over_verdict import verdict
from pdproxy.nodes.hand_overs import LAST
from pdproxy.nodes.node import Node
from pdproxy.nodes.proof import NothingCompared, ProofResult, Prover
from pdproxy.observe.labels import Proof
from pdproxy.request import Endpoint
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import settle
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import WORDS, body_for, right

CHAT = Endpoint.CHAT


class Passing:
    """A hand-over test that is passed, as that of nodes whose tokenizers differ in words that it does not use."""

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, prefill: Node, decode: Node) -> ProofResult:
        self.asked += 1
        return ProofResult(Proof.PASSED)

    async def warm(self, prefill: Node, decode: Node) -> ProofResult:
        self.asked += 1
        return ProofResult(Proof.PASSED)


@contextlib.asynccontextmanager
async def proving(cluster: FakeCluster, *, compares: bool = True) -> AsyncIterator[Passing]:
    test = Passing()
    prover = Prover(cluster.pool, test if compares else NothingCompared(test), cluster.clock)
    background = Background(cluster.clock)
    background.every("proof", 1.0, prover.look)
    try:
        yield test
    finally:
        await background.aclose()


async def ask(cluster: FakeCluster, times: int, *, stream: bool, **more: Any) -> list[str]:
    """Ask other prompts each time; the routes."""
    routes = []
    for number in range(times):
        body = body_for(CHAT, stream=stream, messages=[{"role": "user", "content": f"{WORDS} {number}"}], **more)
        routes.append((await cluster.ask(CHAT, body, name=f"r-{number}-{cluster.clock.now()}")).route)
    return routes


async def second(cluster: FakeCluster, times: int = 1) -> None:
    for _ in range(times):
        await settle()
        cluster.clock.advance(1.0)
        await settle()


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_barred_tested_tried_and_used_again_once_it_is_mended(stream: bool, compares: bool) -> None:
    cluster = FakeCluster(prefills=1, decodes=1, clock=FakeClock())
    async with proving(cluster, compares=compares) as test:
        cluster.fabric.deaf = True
        assert set(await ask(cluster, 50, stream=stream)) == {"disaggregated"}
        await second(cluster)
        assert set(await ask(cluster, 5, stream=stream)) == {"local"}
        assert cluster.count("pdproxy_pair_barred", prefill="p0", decode="d0") == 1
        assert cluster.count("pdproxy_local_total", reason="barred_pair") == 5
        now = cluster.pool.state()
        found = verdict(now, cluster.pool.hand_overs.recent(cluster.clock.now()))
        recent = cluster.context.in_flight.recent
        shown = incident(Seen(cluster.clock.now(), now.nodes, recent, now.bars, hand_overs=found))
        assert found.fail
        assert "Computed twice" not in shown.hand_overs
        assert any(
            "d0 computed the prompts of 50 of the last 50 tickets of p0 itself" in each.what for each in shown.now
        )
        assert test.asked == 1, "why?"
        await second(cluster, 31)
        assert (test.asked, cluster.count("pdproxy_pair_barred")) == (2, 0)
        assert set(await ask(cluster, 10, stream=stream)) == {"disaggregated"}
        await second(cluster, 2)
        assert set(await ask(cluster, 5, stream=stream)) == {"local"}, "ten tickets are enough this time"
        await second(cluster, 31)
        assert test.asked == 3
        await second(cluster, 31)
        assert test.asked == 4
        cluster.fabric.deaf = False
        assert set(await ask(cluster, 60, stream=stream)) == {"disaggregated"}
        await second(cluster)
        assert not cluster.pool.bars
    await cluster.settle()


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}, "uuid": "u"}]}]},
    ],
)
async def test_what_a_client_can_bring_about_bars_no_pair(more: dict[str, Any]) -> None:
    cluster = FakeCluster(prefills=1, decodes=1, clock=FakeClock())
    cluster.fabric.deaf = True
    async with proving(cluster):
        for number in range(120):
            body = body_for(CHAT, stream=False) | more
            await cluster.ask(CHAT, body, name=f"r-{number}")
        await second(cluster)
        assert not cluster.pool.bars
    await cluster.settle()


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.RESPONSES])
async def test_endpoints_whose_usage_does_not_tell_show_nothing(endpoint: Endpoint) -> None:
    cluster = FakeCluster(prefills=1, decodes=1, clock=FakeClock())
    cluster.fabric.deaf = True
    for number in range(120):
        await cluster.ask(endpoint, body_for(endpoint, stream=False), name=f"r-{number}")
    assert cluster.pool.hand_overs.bars() == {}
    await cluster.settle()


async def test_short_prompts_show_nothing_and_hide_nothing() -> None:
    """A decode node computes them with a good ticket, too."""
    cluster = FakeCluster(prefills=1, decodes=1, clock=FakeClock())
    cluster.fabric.deaf = True
    for number in range(LAST):
        await cluster.ask(Endpoint.COMPLETIONS, {"prompt": [4, 5, 6 + number], "max_tokens": 2}, name=f"r-{number}")
        assert cluster.pool.hand_overs.bars() == {}
        await ask(cluster, 1, stream=False)
        cluster.clock.advance(1.0)
    assert set(cluster.pool.hand_overs.bars()) == {("p0", "d0")}


async def test_a_pair_that_reads_its_tickets_is_told_of_and_never_barred() -> None:
    cluster = FakeCluster(prefills=1, decodes=1, clock=FakeClock())
    for number in range(120):
        cluster.fabric.deaf = number % 5 != 0
        got = await cluster.ask(CHAT, body_for(CHAT, stream=False), name=f"r-{number}")
        assert got.json()["choices"][0]["message"]["content"] == right(CHAT)
    assert cluster.pool.hand_overs.bars() == {}
    await cluster.settle()
