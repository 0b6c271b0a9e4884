"""The known part of each place's cache: its batches in order, into the index of its hash scheme. No I/O.

Unknown is not absent: of a place whose first batch was missed, or some in between, only a part is known until those
blocks are evicted. Where batches are lost for good, or the engine is another one, all that is known of the place is
forgotten.
"""

import dataclasses
import functools
import logging
import zlib
from collections.abc import Callable

from pdproxy.clock import Clock
from pdproxy.events.batch_order import BatchOrder, Position
from pdproxy.events.wire import BatchDecoder, EventBatch, InvalidBatch, NumberedBatch
from pdproxy.nodes.hashing import Hashing
from pdproxy.observe.event_metrics import EventMetrics
from pdproxy.observe.labels import BatchOutcome, Forgotten, Known
from pdproxy.planning.block_hashes import HashAlgorithm, HashScheme, PromptHasher, root_hash
from pdproxy.planning.cache_events import CacheCleared, GroupKind
from pdproxy.planning.prefix import Place
from pdproxy.planning.prefix_index import PrefixIndex

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class PlaceStatus:
    """For operators. `seconds`: for how long so much has been known; `blocks`: of attention groups, known to be
    cached."""

    rank: int
    known: Known
    seconds: float
    blocks: int


@dataclasses.dataclass(frozen=True, slots=True)
class SchemeIndex:
    """All places that hash by one scheme, and how their prompts are hashed."""

    index: PrefixIndex
    hasher: PromptHasher


def scheme_of(hashing: Hashing) -> HashScheme | None:
    """The scheme of a node; None where its hashes cannot be computed here.

    A node that does not tell its root is taken to have that of an environment without PYTHONHASHSEED.
    """
    try:
        algorithm = HashAlgorithm(hashing.algorithm)
        root = hashing.root or root_hash(algorithm)
        return HashScheme(algorithm, hashing.unit, hashing.block_size, root, hashing.drops_unit, hashing.states)
    except ValueError:
        return None


class PlaceFeed:
    """Takes the batches of one place.

    Args:
        publisher: the rank that the batches must name, or none.
        on_change: called when anything is known of the place where nothing was, and the other way round.
    """

    def __init__(
        self,
        place: Place,
        publisher: int,
        scheme: SchemeIndex,
        decode: BatchDecoder,
        clock: Clock,
        metrics: EventMetrics,
        on_change: Callable[[], None],
    ) -> None:
        self.place = place
        self.publisher = publisher
        self.scheme = scheme
        self._decode = decode
        self._clock = clock
        self._metrics = metrics
        self._order = BatchOrder()
        self._junk = 0
        self._since = clock.now()
        self._on_change = on_change
        self._was_known = False

    @property
    def last(self) -> int:
        """The sequence number of the last batch that was taken; -1 before the first."""
        return self._order.last

    def apply_next(self, batch: NumberedBatch) -> Position:
        """Apply a batch if it is the next. GAP, and it is not applied, where others are missing before it."""
        read = self._read(batch)
        time = self._order.time if isinstance(read, InvalidBatch) else read.time
        position = self._order.position(batch.sequence, time)
        if position is Position.RESTARTED:
            self.restarted()
            position = self._order.position(batch.sequence, time)
        if position is Position.DUPLICATE:
            self._metrics.batch(BatchOutcome.DUPLICATE)
        elif position is Position.NEXT:
            if isinstance(read, InvalidBatch):
                self.on_junk(read)
            else:
                self._apply(batch.sequence, read)
            self._order.applied(batch.sequence, time, _fingerprint(batch, read))
        self._note_change()
        return position

    def apply_after_gap(self, batch: NumberedBatch) -> None:
        """Apply a batch though others before it are lost for good: what was known is forgotten."""
        if self.apply_next(batch) is Position.GAP:
            if self._order.begun:
                self._forget(Forgotten.GAP, "batches of its KV events are lost")
            self._order = BatchOrder(batch.sequence - 1)
            self.apply_next(batch)

    def nothing_yet(self) -> None:
        """The engine has published nothing since its start: it has nothing cached."""
        if self.last < 0:
            self.scheme.index.apply(self.place, CacheCleared())
            self._note_change()

    def is_last(self, batch: NumberedBatch) -> bool:
        """Whether this very batch was the last that was taken: the engine is the same as before."""
        return self._order.is_last(batch.sequence, _fingerprint(batch, self._read(batch)))

    def restarted(self) -> None:
        """The publisher is another engine: nothing that was known holds."""
        self._forget(Forgotten.RESTART, "its engine was restarted")
        self._order = BatchOrder()
        self._note_change()

    def unreachable(self) -> None:
        """The publisher was out of reach, and what it published meanwhile is not known."""
        if self.known is not Known.NOTHING:
            self._forget(Forgotten.UNREACHABLE, "its KV events cannot be read")
            self._order = BatchOrder()
            self._note_change()

    def left(self) -> None:
        """The place is no more."""
        self.scheme.index.drop_place(self.place)
        self._metrics.forgotten(Forgotten.LEFT)

    @property
    def known(self) -> Known:
        """How much is known of it."""
        if self.scheme.index.knows_all_of(self.place):
            return Known.ALL
        return Known.PART if self._order.begun else Known.NOTHING

    def status(self) -> PlaceStatus:
        """For operators."""
        return PlaceStatus(self.place.rank, self.known, self._clock.now() - self._since, self.blocks)

    @property
    def blocks(self) -> int:
        """Blocks of attention groups that it is known to have cached."""
        return self.scheme.index.blocks(self.place, GroupKind.ATTENTION)

    def on_junk(self, error: InvalidBatch) -> None:
        """A message that makes no sense: whatever it was to say is not known."""
        self._metrics.batch(BatchOutcome.JUNK)
        self._junk += 1
        if self._junk.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, …
            text = "node %s, rank %d: %s (%d so far). What is known of its cache is forgotten each time"
            _LOG.warning(text, *self.place, error, self._junk)
        self.scheme.index.drop_place(self.place)
        self._metrics.forgotten(Forgotten.JUNK)
        self._note_change()

    def _note_change(self) -> None:
        known = self.known is not Known.NOTHING
        if known is not self._was_known:
            self._was_known = known
            self._on_change()

    def _read(self, batch: NumberedBatch) -> EventBatch | InvalidBatch:
        try:
            read = self._decode(batch.payload)
        except InvalidBatch as error:
            return error
        if read.rank in (self.publisher, None):
            return read
        return InvalidBatch(f"a batch of rank {read.rank}, not of rank {self.publisher}")

    def _apply(self, sequence: int, batch: EventBatch) -> None:
        index = self.scheme.index
        if sequence == 0 and not index.knows_all_of(self.place):
            index.apply(self.place, CacheCleared())  # so it is known from its start
        if not self._order.begun:
            self._since = self._clock.now()
        for event in batch.events:
            index.apply(self.place, event)
        self._metrics.batch(BatchOutcome.APPLIED)
        self._metrics.events(batch.counts)
        self._metrics.published(batch.time)

    def _forget(self, why: Forgotten, reason: str) -> None:
        _LOG.info("node %s, rank %d: what is known of its cache is forgotten: %s", *self.place, reason)
        self.scheme.index.drop_place(self.place)
        self._metrics.forgotten(why)
        self._since = self._clock.now()


def _fingerprint(batch: NumberedBatch, read: EventBatch | InvalidBatch) -> float:
    """Tells a batch from another engine's of the same number: its time, or of one that cannot be read a checksum."""
    return zlib.crc32(batch.payload) if isinstance(read, InvalidBatch) else read.time


class PlaceCaches:
    """All places whose KV events are read.

    Attributes:
        known: by node, the scheme of its first place of which anything is known; nodes of which nothing is known are
            left out. Another mapping whenever that changes.
    """

    def __init__(self, clock: Clock, metrics: EventMetrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._decode = BatchDecoder()
        self._schemes: dict[HashScheme, SchemeIndex] = {}
        self._feeds: dict[Place, PlaceFeed] = {}
        self._by_node: dict[str, tuple[PlaceFeed, ...]] = {}
        self.known: dict[str, SchemeIndex] = {}
        metrics.watch_index(lambda: sum(feed.blocks for feed in self._feeds.values()), self._count)

    def feed_of(self, place: Place, publisher: int, scheme: HashScheme) -> PlaceFeed:
        """The feed of a place: the one that it has, unless its scheme is another now."""
        feed = self._feeds.get(place)
        if feed is not None and (feed.scheme.index.scheme, feed.publisher) == (scheme, publisher):
            return feed
        self._drop([place])
        if scheme not in self._schemes:
            self._schemes[scheme] = SchemeIndex(PrefixIndex(scheme), PromptHasher(scheme))
        index, on_change = self._schemes[scheme], functools.partial(self._note_known, place.node)
        made = PlaceFeed(place, publisher, index, self._decode, self._clock, self._metrics, on_change)
        self._feeds[place] = made
        self._group()
        return made

    def leave(self, node: str, but: frozenset[int] = frozenset()) -> None:
        """The node's places are no more, but for some ranks."""
        self._drop([place for place in self._feeds if place.node == node and place.rank not in but])

    @property
    def empty(self) -> bool:
        """Whether no place's events are read."""
        return not self._feeds

    def has(self, place: Place) -> bool:
        """Whether the place's events are read."""
        return place in self._feeds

    def of_node(self, node: str) -> tuple[PlaceFeed, ...]:
        """The feeds of its places."""
        return self._by_node.get(node, ())

    def scheme(self, hashing: Hashing | None) -> SchemeIndex | None:
        """The index of places that hash so; None where nothing is known of them."""
        wanted = None if hashing is None else scheme_of(hashing)
        return None if wanted is None else self._schemes.get(wanted)

    def _drop(self, places: list[Place]) -> None:
        for place in places:
            feed = self._feeds.pop(place, None)
            if feed is not None:
                feed.left()
        self._group()
        used = {feed.scheme.index.scheme for feed in self._feeds.values()}
        self._schemes = {scheme: index for scheme, index in self._schemes.items() if scheme in used}

    def _group(self) -> None:
        nodes = dict.fromkeys(place.node for place in self._feeds)
        grouped = {node: [feed for place, feed in self._feeds.items() if place.node == node] for node in nodes}
        self._by_node = {node: tuple(feeds) for node, feeds in grouped.items()}
        for node in {*self.known, *nodes}:
            self._note_known(node)

    def _note_known(self, node: str) -> None:
        known = next((feed.scheme for feed in self.of_node(node) if feed.known is not Known.NOTHING), None)
        if known is not self.known.get(node):
            others = {name: scheme for name, scheme in self.known.items() if name != node}
            self.known = others if known is None else {**others, node: known}

    def _count(self, known: Known) -> int:
        return sum(feed.known is known for feed in self._feeds.values())
