"""Follows the KV events of every node that serves: finds its publishers, keeps a subscription to each, tries again.

A node that leaves, or that must join again, is forgotten at once. One whose publishers cannot be reached is forgotten
at the second try, a second or two later: what it evicts meanwhile is not known. Nodes without events are served all the
same.
"""

import asyncio
import logging
from collections.abc import Iterable

from pdproxy.clock import Clock
from pdproxy.credential import OwnHeaders, no_headers
from pdproxy.errors import NodeFault
from pdproxy.events.places import PlaceCaches, scheme_of
from pdproxy.events.sources import EventSource, read_sources
from pdproxy.events.subscription import WAITS, Subscription, SubscriptionTimeouts
from pdproxy.nodes.node import Node, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import exchange
from pdproxy.observe.event_metrics import EventMetrics
from pdproxy.planning.block_hashes import HashScheme
from pdproxy.planning.prefix import Place
from pdproxy.transport.coalesced_reads import CoalescedReads
from pdproxy.transport.port import HttpRequest, Timeouts, Transport

_LOG = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Between two looks at the pool."""
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Before each further try to reach a node's publishers; the last one again and again."""
NO_EVENTS_SECONDS = 60.0
"""Until a node that publishes nothing is asked again."""
_TIMEOUTS = Timeouts(connect=5.0, headers=10.0, stall=10.0, whole=20.0)
_FLAG = "--prefix-caching-hash-algo sha256_cbor"
_FOLLOWED = frozenset({State.UP, State.PROBING, State.DOWN, State.DRAINING, State.TERMINATING})


class EventSubscriber:
    """Keeps `PlaceCaches` up to date. ``headers``: of its requests to nodes, such as a credential."""

    def __init__(
        self,
        pool: Pool,
        transport: Transport,
        caches: PlaceCaches,
        clock: Clock,
        metrics: EventMetrics,
        headers: OwnHeaders = no_headers,
        waits: SubscriptionTimeouts = WAITS,
    ) -> None:
        self._pool = pool
        self._transport = transport
        self._caches = caches
        self._clock = clock
        self._metrics = metrics
        self._headers = headers
        self._waits = waits
        self._reads = CoalescedReads()
        self._following: dict[str, tuple[Node, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Follow whatever nodes the pool has, until cancelled."""
        try:
            while True:
                await self._keep_up()
                await self._clock.sleep(POLL_SECONDS)
        finally:
            await self._end(self._following)

    async def _keep_up(self) -> None:
        """One task for each node that is to be followed, as the pool has it now."""
        nodes = {view.node.name: view.node for view in self._pool.state().nodes if view.state in _FOLLOWED}
        # A node that was admitted again is another object: it may have restarted, with other ports.
        following = self._following.items()
        outdated = [name for name, (node, task) in following if nodes.get(name) is not node or _failed(task)]
        await self._end(outdated)
        for name in outdated:
            if name not in nodes:
                self._caches.leave(name)
        for name, node in nodes.items():
            if name not in self._following:
                task = asyncio.get_running_loop().create_task(self._follow(node), name=f"KV events of {name}")
                self._following[name] = node, task

    async def _end(self, names: Iterable[str]) -> None:
        tasks = [self._following.pop(name)[1] for name in tuple(names)]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):  # a bug: the task keeper logs it, and begins again
                raise result

    async def _follow(self, node: Node) -> None:
        scheme = None if node.hashing is None else scheme_of(node.hashing)
        if scheme is None:
            self._caches.leave(node.name)
            _LOG.info("node %s: KV events are not read: %s", node.name, _why_not(node))
            return
        failures = 0
        while True:
            caught_up = asyncio.Event()
            try:
                await self._follow_publishers(node, scheme, caught_up, failures)
                await self._clock.sleep(NO_EVENTS_SECONDS)
            except NodeFault as fault:
                failures = 1 if caught_up.is_set() else failures + 1
                self._failed(node, fault, failures)
                await self._clock.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1])

    async def _follow_publishers(self, node: Node, scheme: HashScheme, caught_up: asyncio.Event, failures: int) -> None:
        """Follow all ranks until one fails; returns where there is nothing to follow."""
        request = HttpRequest("GET", f"{node.url}/kv_event_sources", self._headers())
        status, body = await exchange(self._transport, request, _TIMEOUTS)
        sources = read_sources(body if status == 200 else b"", node.url)
        self._caches.leave(node.name, frozenset(source.rank for source in sources.usable))
        for why in sources.unusable:
            _LOG.warning("node %s: %s: its KV events are not read", node.name, why)
        if not sources.usable:
            _LOG.info("node %s publishes no KV events: what it has cached is not known", node.name)
            return
        events = [asyncio.Event() for _ in sources.usable]
        try:
            async with asyncio.TaskGroup() as group:
                for source, event in zip(sources.usable, events, strict=True):
                    group.create_task(self._subscription(node, scheme, source).run(event))
                for event in events:
                    await event.wait()
                caught_up.set()
                text = "node %s: KV events of %d ranks are read%s"
                _LOG.info(text, node.name, len(events), " again" if failures else "")
        except ExceptionGroup as group:  # not `except*`: Python 3.11.2 wraps once more what is raised there
            faults, others = group.split(NodeFault)
            if faults is None or others is not None:
                raise
            raise _first(faults) from None

    def _subscription(self, node: Node, scheme: HashScheme, source: EventSource) -> Subscription:
        feed = self._caches.feed_of(Place(node.name, source.rank), source.publisher, scheme)
        return Subscription(source, feed, self._metrics, self._reads, self._waits)

    def _failed(self, node: Node, fault: NodeFault, failures: int) -> None:
        if failures == 1:
            return  # a restart or a passing fault: the next try shows
        if failures == 2:
            text = "node %s: KV events cannot be read: %s. What it has cached is not known until they can"
            _LOG.warning(text, node.name, fault.detail)
        for feed in self._caches.of_node(node.name):
            feed.unreachable()


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _first(faults: ExceptionGroup[NodeFault]) -> NodeFault:
    """Any of them: all ranks of a node tell the same."""
    first = faults.exceptions[0]
    return first if isinstance(first, NodeFault) else _first(first)


def _why_not(node: Node) -> str:
    if node.hashing is None:
        return (
            "it does not say how it hashes prompts. pdproxy's connector does; start it with that, or at least with "
            + _FLAG
        )
    return (
        f"prompts cannot be hashed here as there, by {node.hashing.algorithm or 'nothing known'}: start it with {_FLAG}"
    )
