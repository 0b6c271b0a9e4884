"""The reader of nodes' KV events: built, and loaded, only where the policy goes by them."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdproxy.background import Background
from pdproxy.clock import Clock
from pdproxy.credential import OwnHeaders
from pdproxy.nodes.cache_advice import EventsSeen
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Known
from pdproxy.observe.metrics import Metrics
from pdproxy.request import Json
from pdproxy.settings.model import Settings
from pdproxy.settings.types import Routing
from pdproxy.transport.port import Transport

if TYPE_CHECKING:
    from pdproxy.events.places import PlaceCaches
    from pdproxy.events.prefix_source import EventPrefixSource
    from pdproxy.events.prompt_hashes import TextMemory
    from pdproxy.events.subscriber import EventSubscriber


@dataclasses.dataclass(frozen=True, slots=True)
class KvEvents:
    """The parts that work together: the one that runs, the one that requests ask, and what is known."""

    subscriber: "EventSubscriber"
    source: "EventPrefixSource"
    caches: "PlaceCaches"

    def statuses(self, node: str) -> Sequence[Json]:
        """How much is known of the caches of a node's ranks, for operators."""
        return [dataclasses.asdict(feed.status()) for feed in self.caches.of_node(node)]

    def seen(self, node: str) -> EventsSeen:
        """Whether a node's KV events are read now."""
        feeds = self.caches.of_node(node)
        if not feeds:
            return EventsSeen.OFF
        return EventsSeen.UNREACHABLE if any(feed.known is Known.NOTHING for feed in feeds) else EventsSeen.READ


def kv_events(
    settings: Settings,
    pool: Pool,
    transport: Transport,
    clock: Clock,
    metrics: Metrics,
    headers: OwnHeaders,
    texts: "TextMemory",
    background: Background,
) -> KvEvents | None:
    """All of it; None where the policy does not go by it. ``headers``: of the proxy's own requests to nodes."""
    if settings.policy.routing is not Routing.CACHE:
        return None
    from pdproxy.events.places import PlaceCaches
    from pdproxy.events.prefix_source import EventPrefixSource
    from pdproxy.events.prompt_hashes import HashFinder
    from pdproxy.events.subscriber import EventSubscriber
    from pdproxy.events.token_ids import TokenIds

    caches = PlaceCaches(clock, metrics.events)
    token_ids = TokenIds(transport, clock, metrics.events, settings.events.token_ids_seconds, headers)
    return KvEvents(
        EventSubscriber(pool, transport, caches, clock, metrics.events, headers),
        EventPrefixSource(pool, caches, HashFinder(texts, token_ids, pool.load), clock, metrics.events, background),
        caches,
    )
