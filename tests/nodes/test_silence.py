"""Nodes whose legs are silent: which of them are probed, and which are given up at once."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import Fault
from pdproxy.nodes.health_check import ALIVE
from pdproxy.nodes.join import OutageLog
from pdproxy.nodes.node import Role, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import Slot
from pdproxy.nodes.silence import SilenceConfig, SilenceWatch
from pdproxy.observe.labels import SilenceOutcome
from pdproxy.observe.metrics import Metrics
from pdproxy.settings.types import OnNoDecode
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import FakeNodeInfo, FakePoolTransport, settle
from tests.nodes.health import health_check, state, visit_all


class Cluster:
    """Joined nodes p1 and d1, d2, …, and the watch over them, which runs inside of `watched`."""

    def __init__(self, decodes: int, config: SilenceConfig | None = None) -> None:
        self.clock = FakeClock()
        names = [f"d{number + 1}" for number in range(decodes)]
        nodes = {"p1": FakeNodeInfo(Role.PREFILL), **{name: FakeNodeInfo(Role.DECODE) for name in names}}
        self.transport = FakePoolTransport(**nodes)
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry)
        self.pool = Pool(self.clock, metrics=metrics)
        self.health = health_check(self.pool, self.transport, self.clock)
        outages = OutageLog(self.clock)
        self.watch = SilenceWatch(
            self.pool, self.transport, self.clock, outages, metrics, config or SilenceConfig(), lambda: (("a", "b"),)
        )

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        for name in self.transport.nodes:
            self.pool.add(self.transport.node(name))
        await visit_all(self.health, self.pool)
        task = asyncio.create_task(self.watch.run())
        await settle()
        for node in self.transport.nodes.values():
            node.asked.clear()
        try:
            yield
        finally:
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def pass_time(self, seconds: float, *streams: Slot) -> None:
        """In small steps; meanwhile something comes for these streams."""
        for _ in range(round(seconds / 0.05)):
            for stream in streams:
                stream.progress()
            self.clock.advance(0.05)
            await settle()

    def freeze(self, *names: str) -> None:
        """From now on they answer nothing."""
        for name in names:
            self.transport.nodes[name].held.clear()

    @contextmanager
    def streams(self, *names: str) -> Iterator[list[Slot]]:
        """One leg on each of these nodes."""
        slots = [self.pool.acquire(name) for name in names]
        try:
            yield slots
        finally:
            for slot in slots:
                slot.release()

    def probes(self, name: str) -> int:
        """How often it was asked whether it is alive, and answered."""
        return self.transport.nodes[name].asked.count((ALIVE, None))

    def outcomes(self, role: Role = Role.DECODE) -> dict[SilenceOutcome, float]:
        """The outcomes that were counted."""
        counted = {
            each: self.registry.get_sample_value("pdproxy_silence_probes_total", {"role": role, "outcome": each}) or 0
            for each in SilenceOutcome
        }
        return {each: count for each, count in counted.items() if count}


async def test_a_frozen_node_is_given_up_within_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    cluster, alarms = Cluster(decodes=2), []
    async with cluster.watched():
        with cluster.streams("d1", "d2") as (frozen, other):
            frozen.alarm = lambda: alarms.append("d1")
            await cluster.pass_time(1, frozen, other)
            cluster.freeze("d1")
            leaving = cluster.pool.leaving("d1")
            await cluster.pass_time(1.7, other)
            assert (state(cluster.pool, "d1"), alarms) == (State.UP, [])
            with caplog.at_level(logging.WARNING):
                await cluster.pass_time(0.25, other)
    assert (state(cluster.pool, "d1"), alarms, leaving.is_set()) == (State.DOWN, ["d1"], True)
    evidence = "health: nothing came for its requests for 2.0 s, and two probes got no answer"
    assert cluster.pool.view("d1").reason == evidence
    assert state(cluster.pool, "d2") is State.UP
    assert cluster.outcomes() == {SilenceOutcome.GIVEN_UP: 1}
    [line] = [vars(record) for record in caplog.records]
    assert (line["message"], line["reason"]) == ("node d1 is down", evidence)


async def test_a_frozen_prefill_node_is_given_up_too() -> None:
    """Its silence says nothing, so that its answer may take longer."""
    cluster = Cluster(decodes=1)
    cluster.transport.nodes["p2"] = FakeNodeInfo(Role.PREFILL)
    async with cluster.watched():
        with cluster.streams("p1"):
            cluster.freeze("p1")
            await cluster.pass_time(4.5)
            assert state(cluster.pool, "p1") is State.UP
            await cluster.pass_time(0.3)
    assert state(cluster.pool, "p1") is State.DOWN
    assert cluster.outcomes(Role.PREFILL) == {SilenceOutcome.GIVEN_UP: 1}


@pytest.mark.parametrize("prefills", [1, 2, 3])
async def test_the_last_prefill_node_is_given_up_for_a_decode_node_can_compute(prefills: int) -> None:
    """However many freeze at once: their legs would wait for nodes that are dead."""
    cluster = Cluster(decodes=1)
    names = [f"p{number + 1}" for number in range(prefills)]
    cluster.transport.nodes |= {name: FakeNodeInfo(Role.PREFILL) for name in names}
    async with cluster.watched():
        with cluster.streams("d1") as (stream,), cluster.streams(*names) as slots:
            alarms: list[str] = []
            for name, slot in zip(names, slots, strict=True):
                slot.alarm = functools.partial(alarms.append, name)
            cluster.freeze(*names)
            await cluster.pass_time(4.9, stream)
            assert sorted(alarms) == names
    assert cluster.outcomes(Role.PREFILL) == {SilenceOutcome.GIVEN_UP: prefills}


@pytest.mark.parametrize("elsewhere", ["silent", "of another model"])
async def test_without_a_decode_node_that_could_compute_the_last_prefill_node_stays(elsewhere: str) -> None:
    """Where nodes of both roles are silent, the network of the proxy is the likely cause."""
    cluster = Cluster(decodes=1)
    if elsewhere != "silent":
        cluster.transport.nodes["d1"] = dataclasses.replace(cluster.transport.nodes["d1"], names=("large",))
    async with cluster.watched():
        with cluster.streams("p1", "d1") as (_, stream):
            cluster.freeze("p1", *["d1"][: elsewhere == "silent"])
            await cluster.pass_time(20, *[stream][: elsewhere != "silent"])
    assert state(cluster.pool, "p1") is State.UP
    assert cluster.outcomes(Role.PREFILL).keys() == {SilenceOutcome.TOO_MANY}


@pytest.mark.parametrize(("policy", "expected"), [(OnNoDecode.FAIL, State.UP), (OnNoDecode.PREFILL, State.DOWN)])
async def test_the_last_decode_node_is_given_up_where_prefill_nodes_may_serve(
    policy: OnNoDecode, expected: State
) -> None:
    cluster = Cluster(decodes=1, config=SilenceConfig(on_no_decode=policy))
    async with cluster.watched():
        with cluster.streams("d1"):
            cluster.freeze("d1")
            await cluster.pass_time(4)
    assert state(cluster.pool, "d1") is expected


async def test_a_node_that_streams_or_has_no_legs_is_never_probed() -> None:
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        with cluster.streams("d1", "d1") as (stream, _waiting):
            await cluster.pass_time(20, stream)
    assert (cluster.probes("d1"), cluster.probes("d2"), cluster.outcomes()) == (0, 0, {})


async def test_a_silent_node_that_answers_is_left_alone() -> None:
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        with cluster.streams("d1", "p1"):
            await cluster.pass_time(60)
    assert state(cluster.pool, "d1") is state(cluster.pool, "p1") is State.UP
    assert 95 <= cluster.probes("d1") <= 121, "about one for each half second"
    assert cluster.outcomes().keys() == cluster.outcomes(Role.PREFILL).keys() == {SilenceOutcome.ANSWERED}


async def test_a_node_that_freezes_during_a_long_silence_is_found_too() -> None:
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        with cluster.streams("d1"):
            await cluster.pass_time(30.3)
            cluster.freeze("d1")
            await cluster.pass_time(5.4)
    assert state(cluster.pool, "d1") is State.DOWN


async def test_silence_begins_with_the_leg() -> None:
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        await cluster.pass_time(30)
        with cluster.streams("d1"):
            await cluster.pass_time(0.4)
            assert cluster.probes("d1") == 0
            await cluster.pass_time(0.3)
            assert cluster.probes("d1") == 1


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.RESET, Fault.BUSY])
async def test_what_is_refused_is_no_silence(fault: Fault) -> None:
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        cluster.transport.nodes["d1"].fault = fault
        with cluster.streams("d1"):
            await cluster.pass_time(10)
    assert state(cluster.pool, "d1") is State.UP
    assert cluster.outcomes().keys() == {SilenceOutcome.ANSWERED}


@pytest.mark.parametrize("status", [200, 404, 401, 500, 503])
async def test_any_status_is_an_answer(status: int) -> None:
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        cluster.transport.nodes["d1"].paths[ALIVE] = status, b""
        with cluster.streams("d1"):
            await cluster.pass_time(10)
    assert cluster.outcomes().keys() == {SilenceOutcome.ANSWERED}
    plain = cluster.transport.nodes["d1"].asked.count(("/health", None))
    assert (plain > 5) == (status == 404), "a node without the route is not asked for it again"


async def test_something_that_comes_during_the_probe_counts() -> None:
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        with cluster.streams("d1") as [stream]:
            cluster.freeze("d1")
            for _ in range(20):
                await cluster.pass_time(1.4)
                stream.progress()
                await cluster.pass_time(0.3)
    assert state(cluster.pool, "d1") is State.UP
    assert cluster.outcomes().keys() == {SilenceOutcome.PROGRESSED}


async def test_a_node_whose_answers_are_slow_is_given_more_time() -> None:
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        with cluster.streams("d1") as [stream]:
            stream.progress()
            cluster.freeze("d1")
            await cluster.pass_time(1.3)
            cluster.transport.nodes["d1"].held.set()
            await cluster.pass_time(0.1)
            assert cluster.outcomes() == {SilenceOutcome.ANSWERED: 1}, "after 0.9 s"
            stream.progress()
            cluster.freeze("d1")
            await cluster.pass_time(2.5)
            assert state(cluster.pool, "d1") is State.UP
            await cluster.pass_time(1.2)
    assert state(cluster.pool, "d1") is State.DOWN


async def test_one_lost_probe_proves_nothing() -> None:
    class Lossy(FakePoolTransport):
        """Every other request is lost."""

        lost = False

        async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
            self.lost = request.url.endswith(ALIVE) and not self.lost
            if self.lost:
                await asyncio.Event().wait()
            return await super().send(request, timeouts)

    cluster = Cluster(decodes=2)
    cluster.watch._transport = Lossy(**cluster.transport.nodes)
    async with cluster.watched():
        with cluster.streams("d1"):
            await cluster.pass_time(20)
    assert cluster.outcomes().keys() == {SilenceOutcome.ANSWERED}


@pytest.mark.parametrize("moment", [0.2, 0.8, 1.3])
async def test_a_proxy_that_did_not_run_itself_blames_nobody(moment: float) -> None:
    """The proxy was stopped for a while, before or during the probe; what nodes sent meanwhile is not read yet."""
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        with cluster.streams("d1", "d2") as (stream, other):
            cluster.freeze("d1")
            stream.progress()
            await cluster.pass_time(moment, other)
            cluster.clock.advance(5)
            await settle()
            await cluster.pass_time(1.3, other)
            assert state(cluster.pool, "d1") is State.UP
            await cluster.pass_time(3.5, other)
            assert state(cluster.pool, "d1") is State.DOWN, "it has been silent since, too"
    assert SilenceOutcome.LATE in cluster.outcomes() or moment == 0.2


@pytest.mark.parametrize(
    ("decodes", "share", "frozen", "given_up"),
    [
        (1, 1.0, 1, 0),
        (2, 0.5, 1, 1),
        (2, 1.0, 2, 0),
        (3, 0.5, 1, 1),
        (3, 0.5, 2, 0),
        (4, 0.5, 2, 2),
        (4, 0.5, 3, 0),
        (4, 0.0, 1, 1),
        (4, 0.0, 2, 0),
        (8, 0.25, 2, 2),
        (8, 0.25, 3, 0),
    ],
)
async def test_only_a_share_of_a_role_is_given_up(decodes: int, share: float, frozen: int, given_up: int) -> None:
    cluster = Cluster(decodes, SilenceConfig(share=share))
    names = [f"d{number + 1}" for number in range(frozen)]
    async with cluster.watched():
        with cluster.streams(*names):
            cluster.freeze(*names)
            await cluster.pass_time(20)
    assert [state(cluster.pool, name) for name in names].count(State.DOWN) == given_up
    expected = {SilenceOutcome.GIVEN_UP} if given_up else {SilenceOutcome.TOO_MANY}
    assert cluster.outcomes().keys() == expected


async def test_those_that_are_still_out_count() -> None:
    cluster = Cluster(decodes=3)
    async with cluster.watched():
        with cluster.streams("d1", "d2") as (first, second):
            first.progress()
            cluster.freeze("d1")
            await cluster.pass_time(3, second)
            cluster.freeze("d2")
            await cluster.pass_time(4)
            assert (state(cluster.pool, "d1"), state(cluster.pool, "d2")) == (State.DOWN, State.UP)
            cluster.transport.nodes["d1"].held.set()
            await visit_all_but(cluster, "d2")
            await cluster.pass_time(6)
            assert (state(cluster.pool, "d1"), state(cluster.pool, "d2")) == (State.UP, State.DOWN)


async def visit_all_but(cluster: Cluster, name: str) -> None:
    views = [view for view in cluster.pool.state().nodes if view.node.name != name]
    await asyncio.gather(*(cluster.health.visit(view) for view in views))


async def test_nodes_of_another_model_are_no_others() -> None:
    cluster = Cluster(decodes=2)
    cluster.transport.nodes["d2"] = dataclasses.replace(cluster.transport.nodes["d2"], names=("large",))
    async with cluster.watched():
        with cluster.streams("d1"):
            cluster.freeze("d1")
            await cluster.pass_time(5)
    assert state(cluster.pool, "d1") is State.UP
    assert cluster.outcomes().keys() == {SilenceOutcome.TOO_MANY}


async def test_it_comes_back_only_when_all_of_it_answers() -> None:
    """Its HTTP server may answer while its engine is stopped."""
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        with cluster.streams("d1"):
            cluster.freeze("d1")
            await cluster.pass_time(5)
        cluster.transport.nodes["d1"].held.set()
        for fault in (Fault.HEADERS_TIMEOUT, (504, b"")):
            cluster.transport.nodes["d1"].paths[ALIVE] = fault
            await visit_all(cluster.health, cluster.pool)
            assert state(cluster.pool, "d1") is State.DOWN
        cluster.transport.nodes["d1"].paths[ALIVE] = 200, b"{}"
        await visit_all(cluster.health, cluster.pool)
        assert state(cluster.pool, "d1") is State.UP


async def test_a_node_that_is_removed_while_it_is_probed_does_no_harm() -> None:
    cluster = Cluster(decodes=2)
    async with cluster.watched():
        with cluster.streams("d1"):
            cluster.freeze("d1")
            await cluster.pass_time(0.8)
            cluster.pool.remove("d1")
            await cluster.pass_time(2)
    assert cluster.outcomes() == {}
