"""A publisher of KV events on real ZMQ sockets that loses, delays, repeats, reorders and invents them."""

import enum
import random
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec
import zmq

from tests.events.publisher import Event, Publisher, removed, stored

MOST_KEPT = 200
"""Batches for replays. A busy node sends more within seconds."""
OTHER_RANK, OTHER_GROUP = 7, 9


class EventFault(enum.Enum):
    """The fate of a batch."""

    NONE = enum.auto()
    LOST = enum.auto()
    """A replay brings it."""
    GONE = enum.auto()
    """No replay brings it."""
    DELAYED = enum.auto()
    """The batch comes by seconds too late, when a replay may have brought it."""
    HELD = enum.auto()
    """The batch and all that follow it come by seconds too late."""
    TWICE = enum.auto()
    SWAPPED = enum.auto()
    """The batch comes after the next one."""
    LIE = enum.auto()
    """The batch says more than happened."""
    JUNK = enum.auto()
    """Messages that are no batches."""
    RESTART = enum.auto()
    """The numbers begin again at 0, and the clock is set, forward or back."""
    MUTE = enum.auto()
    """No replay is answered for a while."""
    FLOOD = enum.auto()
    DEAD = enum.auto()
    """The publisher cannot be reached for seconds, though the node goes on."""


WEIGHTS = {
    EventFault.NONE: 300, EventFault.LOST: 6, EventFault.GONE: 2, EventFault.DELAYED: 6, EventFault.HELD: 2,
    EventFault.TWICE: 6, EventFault.SWAPPED: 6, EventFault.LIE: 30, EventFault.JUNK: 2, EventFault.RESTART: 1,
    EventFault.MUTE: 2, EventFault.FLOOD: 1, EventFault.DEAD: 1,
}  # fmt: skip
"""How often each comes about."""
RECOVERABLE = {
    EventFault.NONE: 10, EventFault.LOST: 2, EventFault.DELAYED: 2, EventFault.TWICE: 2, EventFault.SWAPPED: 2
}  # fmt: skip
"""After these the index has to be as if nothing had been."""
HONEST = {EventFault.NONE: 1}


class Lies:
    """Events that tell of what did not happen.

    Args:
        elsewhere: the hashes of a prompt that some node was sent lately.
        cached: group and hash of a block that this node has.
    """

    def __init__(
        self,
        dice: random.Random,
        elsewhere: Callable[[], list[int]],
        cached: Callable[[], tuple[int, int] | None],
    ) -> None:
        self._dice = dice
        self._elsewhere = elsewhere
        self._cached = cached

    def events(self) -> list[Event]:
        """Some."""
        return self._dice.choice((self._phantoms, self._phantoms, self._phantoms, self._vanished, self._odd))()

    def flood(self) -> Iterator[list[Event]]:
        """Batches of blocks that nobody asks for."""
        for _ in range(20):
            yield [stored(*(self._dice.getrandbits(64) for _ in range(100)), size=8)]

    def _phantoms(self) -> list[Event]:
        hashes = self._elsewhere()
        return [stored(*hashes, size=8), stored(*hashes, group=1, kind="mamba", size=8)]

    def _vanished(self) -> list[Event]:
        cached = self._cached()
        return [] if cached is None else [removed(cached[1], group=cached[0])]

    def _odd(self) -> list[Event]:
        """Events of another group, kind or block size; hashes of other forms; everything cleared; unknown types."""
        hashes = self._elsewhere()
        return self._dice.choice(
            (
                [stored(*hashes, group=OTHER_GROUP, size=8)],
                [stored(*hashes, group=0, kind="mamba", size=8)],
                [stored(*hashes, size=3), removed(*hashes, group=OTHER_GROUP)],
                [stored(-1, -(2**63), size=8), removed(-1)],
                [{**stored(size=8), "block_hashes": [b"", bytes(32), *hashes]}],
                [{"type": "AllBlocksCleared"}],
                [{"type": "BlockMoved", "block_hashes": None}, {**stored(*hashes, size=8), "medium": "CPU"}],
                [{**removed(*hashes), "group_idx": None}],
            )
        )


class FaultyPublisher:
    """A node's; it opens its sockets anew, at other ports, when the node was restarted: others may have taken its own.

    Attributes:
        weights: how often each fault is to come about.
    """

    def __init__(self, dice: random.Random, lies: Lies) -> None:
        self.weights: Mapping[EventFault, int] = WEIGHTS
        self._dice = dice
        self._lies = lies
        self._ports = (0, 0)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publisher: Publisher | None = None
        self._later: list[tuple[float, tuple[bytes, ...]]] = []
        self._next: list[tuple[bytes, ...]] = []
        """Frames that go out behind the next batch."""
        self._dead_until = self._held_until = self._mute_until = 0.0
        self._shift = 0.0

    def open(self) -> tuple[int, int]:
        """Its ports, or its last ones while it is dead; else it is open then."""
        if self._publisher is None and self._dead_until < time.monotonic():
            self._context = zmq.Context()
            self._publisher = Publisher(self._context, most_kept=MOST_KEPT)
            self._ports = self._publisher.ports
        return self._ports

    def close(self) -> None:
        """The process ended."""
        if self._context is not None and self._publisher is not None:
            self._publisher.close()
            self._context.destroy(linger=0)
        self._context = self._publisher = None
        self._later.clear()
        self._next.clear()
        self._dead_until = self._held_until = self._mute_until = 0.0

    def tell(self, events: list[Event]) -> None:
        """Publish a batch, or do otherwise."""
        self.open()
        [fault] = self._dice.choices(list(self.weights), list(self.weights.values()))
        if fault is EventFault.DEAD:
            self.close()
            self._dead_until = time.monotonic() + self._dice.uniform(1.5, 4)
        elif self._publisher is not None:
            self._fail(fault, events)

    @property
    def lies(self) -> bool:
        """Whether what this node says may be wrong."""
        return self.weights is WEIGHTS

    def turn(self) -> None:
        """Send what is due, and answer questions."""
        publisher, now = self._publisher, time.monotonic()
        if publisher is None:
            return
        due = [frames for at, frames in self._later if at <= now]
        self._later = [each for each in self._later if each[0] > now]
        for frames in due:
            publisher.send(*frames)
        publisher.mute = self._mute_until > now
        publisher.questions.clear()
        publisher.answer()

    def _fail(self, fault: EventFault, events: list[Event]) -> None:
        now = time.monotonic()
        match fault:
            case EventFault.LOST:
                self._publish(events, lost=True)
            case EventFault.GONE:
                self._publish(events, lost=True, kept=False)
            case EventFault.DELAYED:
                self._later.append((now + self._dice.uniform(0.1, 3), self._publish(events, lost=True)))
            case EventFault.HELD:
                self._held_until = now + self._dice.uniform(0.1, 3)
                self._send(events)
            case EventFault.TWICE:
                self._later.append((now, self._publish(events)))
            case EventFault.SWAPPED:
                self._next.append(self._publish(events, lost=True))
            case EventFault.LIE:
                rank = OTHER_RANK if self._dice.random() < 0.03 else 0
                self._send([*events, *self._lies.events()], rank)
            case _:
                self._fail_further(fault, events)

    def _fail_further(self, fault: EventFault, events: list[Event]) -> None:
        match fault:
            case EventFault.JUNK:
                self._junk()
            case EventFault.RESTART:
                self._shift += self._dice.choice((5.0, 60.0, -60.0))
                self._opened.begin_again()
            case EventFault.MUTE:
                self._mute_until = time.monotonic() + self._dice.uniform(0.1, 1.0)
            case EventFault.FLOOD:
                for flood in self._lies.flood():
                    self._send(flood)
        self._send(events)

    def _junk(self) -> None:
        junk = self._dice.randbytes(30)
        frames = self._dice.choice(
            ((junk,), (b"", junk[:7], junk), (b"", junk[:8], junk), (b"",) * 5, (b"", b"\xff" * 8))
        )
        self._opened.send(*frames)
        if self._dice.random() < 0.5:
            self._opened.publish(payload=junk)

    def _send(self, events: list[Event], rank: int = 0) -> None:
        """The next batch, unless all are held; and what waited for it."""
        held = self._held_until > time.monotonic()
        frames = self._publish(events, rank, lost=held)
        if held:
            self._later.append((self._held_until, frames))
        while self._next:
            self._opened.send(*self._next.pop())

    def _publish(
        self, events: list[Event], rank: int = 0, *, lost: bool = False, kept: bool = True
    ) -> tuple[bytes, ...]:
        payload = msgspec.msgpack.encode([time.time() + self._shift, events, rank])
        return self._opened.publish(payload=payload, lost=lost, kept=kept)

    @property
    def _opened(self) -> Publisher:
        assert self._publisher is not None
        return self._publisher
