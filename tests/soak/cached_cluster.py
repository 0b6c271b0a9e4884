"""A loopback cluster that plans by what its nodes have cached, from KV events that are wrong at times."""

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import math
import random
from collections.abc import AsyncIterator

from prometheus_client import Counter

from pdproxy.background import Background
from pdproxy.events.places import PlaceCaches
from pdproxy.events.prefix_source import EventPrefixSource
from pdproxy.events.prompt_hashes import HashFinder
from pdproxy.events.subscriber import EventSubscriber
from pdproxy.events.subscription import SubscriptionTimeouts
from pdproxy.events.token_ids import TokenIds
from pdproxy.nodes.hashing import Hashing
from pdproxy.nodes.node import Binding, Capacity, Role
from pdproxy.observe.labels import Known, Prediction, Task
from pdproxy.orchestration.context import OrchestrationConfig, OrchestrationContext
from pdproxy.orchestration.in_flight import PlannedHits
from pdproxy.orchestration.keeping import Keeping
from pdproxy.orchestration.prefix_source import CombinedSource
from pdproxy.orchestration.text_prefix_source import TextPrefixSource
from pdproxy.planning.conversations import Conversations
from pdproxy.planning.prefix_index import PrefixIndex
from pdproxy.planning.renderings import Renderings
from pdproxy.planning.shares import LimitsByKey
from pdproxy.planning.text_index import TextIndex
from pdproxy.settings.types import Keep
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.orchestration.loopback_cluster import LoopbackCluster, until
from tests.soak.caching_node import CachingNode, Rumours
from tests.soak.event_cache import SCHEME, UNIT
from tests.soak.faulty_publisher import HONEST, RECOVERABLE

WAITS = SubscriptionTimeouts(connect=1.0, replay=0.5, first_check=0.1, check=1.0)
"""Short, so that every way of a subscription is gone often."""
TOKEN_IDS_SECONDS = 0.2
TURN_SECONDS = 0.01
REJOIN_SECONDS = 4.0
"""Between two nodes whose preflight is made again, about: what is known of them is forgotten."""
MOST_CONVERSATIONS = 50
"""Conversations that are remembered: fewer than there are."""
ROOM = Capacity(1600, 4, 4, Binding.STATE)
"""The capacity of each decode node: a few conversations have room, so that others wait for it."""
HASHING = Hashing(SCHEME.algorithm, SCHEME.unit, SCHEME.block_size, SCHEME.root, states=True)


class CountingHits(PlannedHits):
    """Counts answers whose place had another number of tokens cached than was planned, to the token."""

    def __init__(self, hits: Counter) -> None:
        super().__init__()
        self._hits = hits

    def add(self, prompt_tokens: int, planned: int, real: int, outcome: Prediction) -> None:
        """Count one."""
        super().add(prompt_tokens, planned, real, outcome)
        self._hits.labels("right" if planned == real else "too_many" if planned > real else "too_few").inc()


class CachedCluster(LoopbackCluster):
    """A cluster whose index is right again at the end, and can be emptied."""

    def __init__(
        self, fabric: FakeKvTransfer, nodes: dict[LoopbackNode, CachingNode], config: OrchestrationConfig
    ) -> None:
        super().__init__(fabric, list(nodes), config, ROOM)
        self._caching = list(nodes.values())
        for node in self._caching:
            self._join(node.name)
        self.context.background.run_forever(Task.EVENTS, self._subscriber.run)
        self._publishing = asyncio.create_task(self._publish())
        self._rejoining = asyncio.create_task(self._rejoin(random.Random(5)))

    def make_context(self, config: OrchestrationConfig) -> OrchestrationContext:
        """With all that `app.build` makes for the policy `cache`."""
        metrics = self.metrics
        self.caches = PlaceCaches(self.clock, metrics.events)
        token_ids = TokenIds(self.transport, self.clock, metrics.events, TOKEN_IDS_SECONDS)
        self._subscriber = EventSubscriber(
            self.pool, self.transport, self.caches, self.clock, metrics.events, waits=WAITS
        )
        background = Background(self.clock, metrics.task_failed)
        texts = TextPrefixSource(self.pool, self.clock, TextIndex(1000, renderings=Renderings(20_000)))
        finder = HashFinder(texts, token_ids, self.pool.load)
        self._exact = EventPrefixSource(self.pool, self.caches, finder, self.clock, metrics.events, background)
        source = CombinedSource(self._exact, texts)
        context = OrchestrationContext(
            self.transport, self.pool, metrics, self.clock, config,
            prefix_source=source, keeping=self._keeping(source), background=background,
        )  # fmt: skip
        hits = Counter("soak_hits", "Answers by what was planned.", ["planned"], registry=self.registry)
        context.in_flight.planned_hits = {role: CountingHits(hits) for role in Role}
        return context

    def _keeping(self, source: CombinedSource) -> Keeping:
        numbers = itertools.count()
        self.conversations = Conversations(
            Keep.AUTO, lambda: f"conversation-{next(numbers):08}", LimitsByKey(), 60.0, MOST_CONVERSATIONS
        )
        return Keeping(self.conversations, self.clock, self.metrics.keeps, source)

    async def close(self) -> None:
        """As of the base. Once nothing goes wrong any more, all that is known is right; and then nothing is left."""
        self._rejoining.cancel()
        await asyncio.gather(self._rejoining, return_exceptions=True)
        await self._settle()
        await self.stop()
        await super().close()
        assert self.registry.get_sample_value("pdproxy_task_failures_total", {"task": "events"}) == 0
        [index] = {id(index): index for node in self._caching for index in [self._index(node.name)]}.values()
        for node in self._caching:
            self.caches.leave(node.name)
        assert len(index) == 0
        assert not any(each.running for each in self.conversations), "a turn has not ended"
        assert len(self.conversations) <= MOST_CONVERSATIONS
        assert self.registry.get_sample_value("pdproxy_keeps_total", {"outcome": "kept"}), "nothing was ever kept"
        assert self.registry.get_sample_value("pdproxy_prefix_index_blocks") == 0
        index.hits((), 1, math.inf)
        assert not any(type(each).__name__ == "_Expectation" for each in gc.get_objects()), "what was expected stays"

    async def stop(self) -> None:
        """End what goes on beside the requests. Raises what one of these tasks failed with."""
        tasks = (self._publishing, self._rejoining)
        for task in tasks:
            task.cancel()
        await self.context.background.aclose()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _settle(self) -> None:
        """Restart all nodes: then all is known of each; and still is after faults that a replay can mend."""
        for node in self._caching:
            node.publisher.weights = RECOVERABLE
            node.die()
            node.publisher.open()
        await until(lambda: all(self._known(node.name) is Known.ALL for node in self._caching))
        for number in range(30):
            for node in self._caching:
                node.blocks.compute(range(3 + number, 83 + number))
            await asyncio.sleep(TURN_SECONDS)
        for node in self._caching:
            node.publisher.weights = HONEST
            node.blocks.compute(range(100, 300))
        await until(lambda: all(self._blocks(node.name) == node.blocks.attention() for node in self._caching))

    def _known(self, name: str) -> Known:
        return min((feed.known for feed in self.caches.of_node(name)), default=Known.NOTHING)

    def _blocks(self, name: str) -> int:
        return sum(feed.blocks for feed in self.caches.of_node(name))

    def _index(self, name: str) -> PrefixIndex:
        [feed] = self.caches.of_node(name)
        return feed.scheme.index

    def _join(self, name: str) -> None:
        """Its preflight is made, anew or for the first time."""
        node = self.pool.view(name).node
        self.pool.bring_up(dataclasses.replace(node, hashing=HASHING, prefix_match_unit=UNIT, keeps=True))

    async def _publish(self) -> None:
        while True:
            for node in self._caching:
                node.publisher.turn()
            await asyncio.sleep(TURN_SECONDS)

    async def _rejoin(self, dice: random.Random) -> None:
        while True:
            await asyncio.sleep(dice.uniform(0, 2 * REJOIN_SECONDS))
            name = dice.choice(self._caching).name
            self.pool.rejoin(name)
            try:
                await asyncio.sleep(dice.uniform(0, 1.5))
            finally:
                self._join(name)


@contextlib.asynccontextmanager
async def cached_cluster(config: OrchestrationConfig) -> AsyncIterator[CachedCluster]:
    """Three prefill and three decode nodes; they stop when the block ends."""
    fabric, rumours, dice = FakeKvTransfer(), Rumours(), random.Random(4)
    async with contextlib.AsyncExitStack() as stack:
        nodes = dict[LoopbackNode, CachingNode]()
        for name in ("p0", "p1", "p2", "d0", "d1", "d2"):
            node = CachingNode(name, fabric, dice, rumours)
            nodes[await stack.enter_async_context(LoopbackNode(node))] = node
        cluster = CachedCluster(fabric, nodes, config)
        try:
            yield cluster
        finally:
            await cluster.stop()
