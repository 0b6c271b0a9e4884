"""vLLM's KV events as they are on the wire, and what the prefix index needs of them. Pure.

A message has three frames: topic, sequence number (8 bytes), and a batch in msgpack, `[time, [event, …], rank]`, of
which each event is a map with its `type` (0.32, `vllm/distributed/kv_events.py`). Token ids, which make up most of a
batch, are passed over without being decoded. Unknown fields are, too, and unknown types of events are counted.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import chain, groupby

import msgspec

from pdproxy.errors import PdproxyError
from pdproxy.observe.labels import CacheEventKind
from pdproxy.planning.block_hashes import event_hashes
from pdproxy.planning.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, group_kind

GPU = "GPU"
"""The medium of the cache that a node computes with; those that it offloads to are not looked up by the rules here."""
END_OF_REPLAY = -1
"""The sequence number behind the last batch of a replay."""
_SEQUENCE_BYTES = 8


class InvalidBatch(PdproxyError):
    """A message that is no batch of KV events."""


class _Event(msgspec.Struct, gc=False):
    """Every field of any event that is used here."""

    type: str
    block_hashes: list[int | bytes] = []
    block_size: int = 0
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Batch(msgspec.Struct, array_like=True, gc=False):
    time: float
    events: list[_Event]
    rank: int | None = None


class EventBatch(msgspec.Struct, frozen=True):
    """The events of one engine step.

    Attributes:
        time: when it was published, by the node's own clock, in seconds since 1970.
        rank: the data-parallel rank that published it, by its own word; None where it does not say.
        events: removals that follow each other in a group are one.
        counts: of the events as they were published, by kind.
    """

    time: float
    rank: int | None
    events: Sequence[CacheEvent]
    counts: Mapping[CacheEventKind, int]


class NumberedBatch(msgspec.Struct, frozen=True, gc=False):
    """A batch as it was sent; ``payload`` is for a `BatchDecoder`."""

    sequence: int
    payload: bytes


def numbered(frames: tuple[bytes, ...]) -> NumberedBatch:
    """A message of a publisher, or of a replay, whose first frame is empty.

    Raises:
        InvalidBatch: it has other frames.
    """
    frames = frames[1:] if len(frames) == 4 else frames
    if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES:
        raise InvalidBatch(f"a message of {len(frames)} frames, not of a topic, a sequence number and a batch")
    sequence = int.from_bytes(frames[1], signed=True)
    if sequence < END_OF_REPLAY:
        raise InvalidBatch(f"a message with the sequence number {sequence}")
    return NumberedBatch(sequence, frames[2])


def replay_request(first: int) -> tuple[bytes, ...]:
    """The question for all batches from this sequence number on."""
    return b"", first.to_bytes(_SEQUENCE_BYTES)


class BatchDecoder:
    """Decodes batches; it is made once, for that takes longer than decoding a batch."""

    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(_Batch).decode

    def __call__(self, payload: bytes) -> EventBatch:
        """The batch.

        Raises:
            InvalidBatch: it is none.
        """
        try:
            batch = self._decode(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidBatch(f"a batch that cannot be read: {error}") from error
        if not math.isfinite(batch.time):
            raise InvalidBatch(f"a batch of the time {batch.time}")  # no restart could be told from a duplicate
        events: list[CacheEvent] = []
        counts = _NO_EVENTS.copy()
        for (name, medium, group), alike in groupby(batch.events, _LIKE):
            run = list(alike)
            kind = _kind(name, medium)
            counts[kind] += len(run)
            events += _cache_events(kind, group, run)
        return EventBatch(batch.time, batch.rank, events, counts)


_LIKE, _HASHES = operator.attrgetter("type", "medium", "group_idx"), operator.attrgetter("block_hashes")
_NO_EVENTS = dict.fromkeys(CacheEventKind, 0)
_KINDS = {"BlockStored": CacheEventKind.STORED, "BlockRemoved": CacheEventKind.REMOVED}


def _kind(name: str, medium: str | None) -> CacheEventKind:
    if name == "AllBlocksCleared":
        return CacheEventKind.CLEARED
    return _KINDS.get(name, CacheEventKind.IGNORED) if medium in (GPU, None) else CacheEventKind.IGNORED


def _cache_events(kind: CacheEventKind, group: int | None, run: list[_Event]) -> list[CacheEvent]:
    """Events of a run that have one kind and one group."""
    if kind is CacheEventKind.REMOVED:
        return [BlocksRemoved(group, event_hashes(chain.from_iterable(map(_HASHES, run))))]
    if kind is CacheEventKind.STORED:
        return [
            BlocksStored(
                group or 0, group_kind(each.kv_cache_spec_kind), event_hashes(each.block_hashes), each.block_size
            )
            for each in run
        ]
    return [CacheCleared()] if kind is CacheEventKind.CLEARED else []
