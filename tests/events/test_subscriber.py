"""Nodes' publishers are found, followed and given up as nodes come, restart and go."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator

import pytest

from pdproxy.events.subscriber import NO_EVENTS_SECONDS, POLL_SECONDS, RETRY_SECONDS, EventSubscriber
from pdproxy.nodes.hashing import Hashing
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Known
from pdproxy.planning.prefix import Place
from tests.events.feeds import QUICK, Caches
from tests.events.publisher import Publisher, kept_ports, publishing, removed, stored, until
from tests.nodes.fake_pool import FakeNodeInfo, FakePoolTransport

HASHING = Hashing("sha256_cbor", 16, 16, bytes(32))
PATH = "/kv_event_sources"


class Cluster:
    """Nodes by name, all on loopback, and what is known of their caches."""

    def __init__(self) -> None:
        self.caches = Caches()
        self.clock = self.caches.clock
        self.pool = Pool(self.clock)
        self.transport = FakePoolTransport()

    def tells(self, name: str, *publishers: Publisher) -> FakeNodeInfo:
        """The node's answer when it is asked for its publishers."""
        answer = {
            str(rank): {"publisher": "zmq", "endpoint": f"tcp://*:{each.ports[0]}", "replay_endpoint": f"tcp://*:{each.ports[1]}"}
            for rank, each in enumerate(publishers)
        }  # fmt: skip
        info = self.transport.nodes.setdefault(self.at(name), FakeNodeInfo(Role.PREFILL))
        info.paths[PATH] = 200, json.dumps(answer).encode()
        return info

    @staticmethod
    def at(name: str) -> str:
        return f"127.0.0.1:{1 + ord(name[-1])}"

    def node(self, name: str, hashing: Hashing | None = HASHING) -> Node:
        return Node(name, f"http://{self.at(name)}", (Role.PREFILL,), "tiny", hashing=hashing)

    def join(self, name: str, hashing: Hashing | None = HASHING) -> None:
        node = self.node(name, hashing)
        if name not in self.pool:
            self.pool.add(node)
        self.pool.bring_up(dataclasses.replace(node))

    def known(self, name: str, rank: int = 0) -> Known:
        feeds = [feed for feed in self.caches.of_node(name) if feed.place == Place(name, rank)]
        return feeds[0].known if feeds else Known.NOTHING

    async def pass_time(self, seconds: float = POLL_SECONDS) -> None:
        """Seconds of the proxy's clock pass; and some of the loop's, for what waits on sockets."""
        self.clock.advance(seconds)
        await asyncio.sleep(0.01)

    async def until_known(self, name: str, known: Known, rank: int = 0) -> None:
        """While the proxy's clock runs."""
        async with asyncio.timeout(10):
            while self.known(name, rank) is not known:
                await self.pass_time()


@contextlib.asynccontextmanager
async def following() -> AsyncIterator[Cluster]:
    """A cluster whose events are followed meanwhile; nothing is left running."""
    before = asyncio.all_tasks()
    async with following_cluster() as cluster:
        yield cluster
    assert asyncio.all_tasks() <= before


@contextlib.asynccontextmanager
async def following_cluster() -> AsyncIterator[Cluster]:
    """One of several that follow events."""
    cluster = Cluster()
    subscriber = EventSubscriber(
        cluster.pool, cluster.transport, cluster.caches, cluster.clock, cluster.caches.metrics, waits=QUICK
    )
    running = asyncio.create_task(subscriber.run())
    try:
        yield cluster
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_every_rank_of_every_node_is_a_place() -> None:
    async with contextlib.AsyncExitStack() as stack:
        publishers = [await stack.enter_async_context(publishing(rank=rank)) for rank in (0, 1, 0, 0)]
        cluster = await stack.enter_async_context(following())
        cluster.tells("a", *publishers[:2])
        cluster.tells("b", publishers[2])
        cluster.tells("c", publishers[3])
        for name in "abc":
            cluster.join(name)
        for number, publisher in enumerate(publishers, 1):
            publisher.publish(stored(*range(number)))
        places = [Place("a"), Place("a", 1), Place("b"), Place("c")]
        for place in places:
            await cluster.until_known(place.node, Known.ALL, place.rank)
        await until(lambda: [cluster.caches.blocks(place) for place in places] == [1, 2, 3, 4])
        assert cluster.caches.count("prefix_index_places", known="all") == 4
        assert cluster.caches.count("prefix_index_blocks") == 10


async def test_proxies_that_follow_one_node_know_the_same_of_it_whenever_they_came() -> None:
    """They share nothing, and plan alike because each follows all nodes."""
    async with publishing() as publisher, contextlib.AsyncExitStack() as stack:
        proxies = []
        for hashes in ((1, 2, 3), (4, 5)):
            proxies.append(one := await stack.enter_async_context(following_cluster()))
            one.tells("a", publisher)
            one.join("a")
            publisher.publish(stored(*hashes))
            await one.until_known("a", Known.ALL)
        publisher.publish(removed(2))
        await until(lambda: [each.caches.blocks(Place("a")) for each in proxies] == [4, 4])


async def test_a_node_that_leaves_is_forgotten_and_one_that_joins_again_is_known_again() -> None:
    async with publishing() as publisher, following() as cluster:
        cluster.tells("a", publisher)
        cluster.join("a")
        publisher.publish(stored(1))
        await cluster.until_known("a", Known.ALL)
        cluster.pool.rejoin("a")  # its preflight is made again: it may be another one
        await cluster.until_known("a", Known.NOTHING)
        cluster.join("a")
        await cluster.until_known("a", Known.ALL)
        assert cluster.caches.blocks(Place("a")) == 1
        cluster.pool.remove("a")
        await cluster.until_known("a", Known.NOTHING)
        assert cluster.caches.count("prefix_index_blocks") == 0
        assert cluster.caches.count("kv_places_forgotten_total", reason="left") == 2


async def test_a_node_that_restarted_at_other_ports_is_found_again() -> None:
    async with following() as cluster:
        async with publishing() as old:
            cluster.tells("a", old)
            cluster.join("a")
            old.publish(stored(1, 2, 3))
            await cluster.until_known("a", Known.ALL)
        async with publishing() as new:
            new.later(60)
            new.publish(stored(9))
            cluster.tells("a", new)
            async with asyncio.timeout(10):
                while cluster.caches.blocks(Place("a")) != 1:
                    await cluster.pass_time()
            assert cluster.known("a") is Known.ALL


async def test_a_node_that_was_admitted_again_is_asked_for_its_publishers_again() -> None:
    """The node may be another process by now, though all that it says of itself is the same."""
    async with publishing() as publisher, following() as cluster:
        info = cluster.tells("a", publisher)
        cluster.join("a")
        publisher.publish(stored(1))
        await cluster.until_known("a", Known.ALL)
        assert len(info.asked) == 1
        cluster.join("a")
        async with asyncio.timeout(10):
            while len(info.asked) < 2:
                await cluster.pass_time()
        await cluster.until_known("a", Known.ALL)
        assert cluster.caches.count("kv_event_batches_total", outcome="applied") == 1


async def test_a_publisher_out_of_reach_is_told_of_once_and_what_was_known_is_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with following() as cluster:
        async with publishing(kept_ports()) as publisher:
            cluster.tells("a", publisher)
            cluster.join("a")
            publisher.publish(stored(1))
            await cluster.until_known("a", Known.ALL)
        await cluster.until_known("a", Known.NOTHING)
        for _ in range(2 * len(RETRY_SECONDS)):
            await cluster.pass_time(RETRY_SECONDS[-1])
        cannot = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
        assert [line[:7] for line in cannot] == ["node a:"]
        assert cluster.caches.count("kv_places_forgotten_total", reason="unreachable") == 1
        async with publishing(publisher.ports) as back:
            back.publish(stored(1, 2))
            async with asyncio.timeout(10):
                while cluster.caches.blocks(Place("a")) != 2:
                    await cluster.pass_time(RETRY_SECONDS[-1])


async def test_a_node_without_events_is_asked_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with publishing() as publisher, following() as cluster:
        info = cluster.tells("a")
        cluster.join("a")
        for _ in range(5):
            await cluster.pass_time()
        assert len(info.asked) == 1
        assert "node a publishes no KV events" in caplog.text
        cluster.tells("a", publisher)
        await cluster.pass_time(NO_EVENTS_SECONDS)
        await cluster.until_known("a", Known.ALL)


@pytest.mark.parametrize(
    ("hashing", "why"),
    [
        (None, "does not say how it hashes prompts"),
        (Hashing("xxhash", 16, 16, bytes(32)), "cannot be hashed here as there, by xxhash"),
        (Hashing("sha256_cbor", 16, 16, bytes(5)), "cannot be hashed here"),
    ],
)
async def test_a_node_whose_hashes_cannot_be_computed_is_told_of_once_and_left_alone(
    hashing: Hashing | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with following() as cluster:
        info = cluster.tells("a")
        cluster.join("a", hashing)
        for _ in range(5):
            await cluster.pass_time()
        assert info.asked == []
        assert sum(why in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("answer", [(404, b""), (500, b"{}"), (200, b"[1]")])
async def test_a_vllm_without_the_route_is_a_node_without_events(answer: tuple[int, bytes]) -> None:
    async with following() as cluster:
        cluster.tells("a").paths[PATH] = answer
        cluster.join("a")
        for _ in range(5):
            await cluster.pass_time()
        assert cluster.known("a") is Known.NOTHING
