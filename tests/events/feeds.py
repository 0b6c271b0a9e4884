"""A place's feed, and a subscription to it that runs meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry

from pdproxy.events.places import PlaceCaches, PlaceFeed
from pdproxy.events.sources import EventSource
from pdproxy.events.subscription import Subscription, SubscriptionTimeouts
from pdproxy.observe.event_metrics import EventMetrics
from pdproxy.planning.block_hashes import HashAlgorithm, HashScheme
from pdproxy.planning.prefix import Place
from pdproxy.transport.coalesced_reads import CoalescedReads
from tests.fakes.clock import FakeClock

SCHEME = HashScheme(HashAlgorithm.SHA256_CBOR, 16, 16, bytes(32))
PLACE = Place("p1")
QUICK = SubscriptionTimeouts(connect=2.0, replay=2.0, first_check=0.02, check=0.05)


class Caches(PlaceCaches):
    """With metrics that can be read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.clock = FakeClock()
        self.metrics = EventMetrics(self.registry)
        super().__init__(self.clock, self.metrics)

    def count(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self.registry.get_sample_value(f"pdproxy_{name}", labels) or 0.0

    def blocks(self, place: Place = PLACE) -> int:
        """Blocks that the place is known to hold."""
        return sum(feed.blocks for feed in self.of_node(place.node) if feed.place == place)


def feed_of(caches: PlaceCaches, source: EventSource, place: Place = PLACE) -> PlaceFeed:
    """The place's feed."""
    return caches.feed_of(place, source.publisher, SCHEME)


@contextlib.asynccontextmanager
async def subscribed(
    caches: Caches, source: EventSource, waits: SubscriptionTimeouts = QUICK
) -> AsyncIterator[asyncio.Task[None]]:
    """A subscription that has caught up, and goes on meanwhile."""
    subscription = Subscription(source, feed_of(caches, source), caches.metrics, CoalescedReads(), waits)
    caught_up = asyncio.Event()
    running = asyncio.create_task(subscription.run(caught_up))
    waiting = asyncio.create_task(caught_up.wait())
    try:
        await asyncio.wait((running, waiting), timeout=10, return_when=asyncio.FIRST_COMPLETED)
        yield running
    finally:
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
