"""One place's publisher, listened to over one connection, with its replay endpoint asked for what was missed.

    connect, subscribe ─► replay from the last batch on ─► batches as they come ──► the place's feed
                                   ▲                          │ a gap, or silence for a while
                                   └──────────────────────────┘

A replay begins with the batch that was taken last. If that very batch comes again the engine is the same one as before,
and what follows is what was missed; otherwise it was restarted, and is replayed from its start. vLLM's publisher keeps
its last 10,000 batches, and has no snapshot of what is cached: a proxy that comes later knows a part.
"""

import asyncio
import contextlib
import dataclasses

from pdproxy.errors import Fault, NodeFault
from pdproxy.events.batch_order import Position
from pdproxy.events.places import PlaceFeed
from pdproxy.events.sources import EventSource
from pdproxy.events.wire import END_OF_REPLAY, InvalidBatch, NumberedBatch, numbered, replay_request
from pdproxy.observe.event_metrics import EventMetrics
from pdproxy.observe.labels import Replay
from pdproxy.transport.coalesced_reads import CoalescedReads
from pdproxy.transport.zmtp import SocketType, ZmtpConnection

LONGEST_BATCH = 32 * 1024 * 1024
"""Bytes. A step of 64,000 tokens in five cache groups has 2 MB, the eviction of 100,000 blocks 10 MB."""


@dataclasses.dataclass(frozen=True, slots=True)
class SubscriptionTimeouts:
    """Seconds.

    Attributes:
        connect: until a connection stands.
        replay: between two batches of a replay. The publisher looks for questions 10 times a second.
        first_check: of silence after the first replay. What was published between that and the moment at which the
            publisher took the subscription in is found missing by then.
        check: of silence, after which a replay shows whether anything was lost, and the engine is the same.
    """

    connect: float = 5.0
    replay: float = 10.0
    first_check: float = 1.0
    check: float = 15.0


WAITS = SubscriptionTimeouts()


class Subscription:
    """Follows one publisher into a feed until it fails.

    Args:
        reads: live batches are read and applied together with those of other publishers; replays are not.
        longest: bytes of a message.
    """

    def __init__(
        self,
        source: EventSource,
        feed: PlaceFeed,
        metrics: EventMetrics,
        reads: CoalescedReads,
        waits: SubscriptionTimeouts = WAITS,
        longest: int = LONGEST_BATCH,
    ) -> None:
        self._source = source
        self._reads = reads
        self._feed = feed
        self._metrics = metrics
        self._waits = waits
        self._longest = longest

    async def run(self, caught_up: asyncio.Event) -> None:
        """Follow the publisher; ``caught_up`` is set once all that it still has was read.

        Raises:
            NodeFault: it cannot be reached, the connection ended, or it sends something else.
        """
        live = await self._open(self._source.port, SocketType.SUB)
        live.subscribe(self._source.topic)
        if self._source.replay_port is None and self._feed.last >= 0:
            self._feed.unreachable()
        try:
            await self._catch_up()
            caught_up.set()
            await self._listen(live)
        finally:
            live.close()

    async def _listen(self, live: ZmtpConnection) -> None:
        clock, patience = asyncio.get_running_loop().time, self._waits.first_check
        silent_since, behind_gap = clock(), list[NumberedBatch]()

        def on_message(frames: tuple[bytes, ...]) -> bool:
            nonlocal silent_since
            silent_since, batch = clock(), self._numbered(frames)
            if batch is not None and self._feed.apply_next(batch) is Position.GAP:
                behind_gap.append(batch)
            return not behind_gap

        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(silent_since + patience):
                    await live.deliver(on_message, self._reads)
            if behind_gap:
                self._metrics.gap()
                await self._catch_up()
                self._feed.apply_after_gap(behind_gap.pop())
            elif clock() >= silent_since + patience:
                await self._catch_up()
                silent_since, patience = clock(), self._waits.check

    def _numbered(self, frames: tuple[bytes, ...]) -> NumberedBatch | None:
        try:
            return numbered(frames)
        except InvalidBatch as error:
            self._feed.on_junk(error)
            return None

    async def _catch_up(self) -> None:
        """Take what was missed, as far as the publisher still has it."""
        port = self._source.replay_port
        if port is None:
            return
        if await self._replay(port, max(0, self._feed.last), same_engine=self._feed.last < 0):
            self._metrics.replayed(Replay.COMPLETE)
        else:
            self._metrics.replayed(Replay.RESTARTED)
            self._feed.restarted()
            await self._replay(port, 0, same_engine=True)
        self._feed.nothing_yet()

    async def _replay(self, port: int, first: int, *, same_engine: bool) -> bool:
        """Take all batches from ``first`` on; whether the engine is known to be, or found to be, the same as before."""
        connection = await self._open(port, SocketType.DEALER)
        try:
            connection.send(*replay_request(first))
            while True:
                async with asyncio.timeout(self._waits.replay):
                    batch = self._numbered(await connection.receive())
                if batch is None:
                    continue
                if batch.sequence == END_OF_REPLAY:
                    return same_engine
                if not same_engine and batch.sequence == self._feed.last:
                    if not self._feed.is_last(batch):
                        return False
                    same_engine = True
                    continue
                same_engine = True  # or so many were missed that the last one is not kept any more
                self._feed.apply_after_gap(batch)
        except TimeoutError as error:
            self._metrics.replayed(Replay.UNANSWERED)
            raise NodeFault(Fault.STALL, f"no end of a replay from port {port} in {self._waits.replay:g} s") from error
        finally:
            connection.close()

    async def _open(self, port: int, kind: SocketType) -> ZmtpConnection:
        return await ZmtpConnection.open(self._source.host, port, kind, self._waits.connect, self._longest)
