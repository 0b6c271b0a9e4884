"""vLLM's KV events as they are on the wire, and what the prefix index needs of them. Pure.

A message has three frames: topic, sequence number (8 bytes), and a batch in msgpack, `[time, [event, …], rank]`, of
which each event is a map with its `type` (0.32, `vllm/distributed/kv_events.py`). Token ids, which make up most of a
batch, are passed over without being decoded. Unknown fields are, too, and unknown types of events are counted.
"""

import dataclasses
import math
from collections.abc import Iterator

import msgspec

from pdproxy.errors import PdproxyError
from pdproxy.planning.block_hashes import event_hash
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


@dataclasses.dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one engine step.

    Attributes:
        time: when it was published, by the node's own clock, in seconds since 1970.
        rank: the data-parallel rank that published it, by its own word; None where it does not say.
        ignored: events of a type that is not known, or of another cache than the GPU's.
    """

    time: float
    rank: int | None
    events: tuple[CacheEvent, ...]
    ignored: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class NumberedBatch:
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
        events = tuple(_cache_events(batch.events))
        return EventBatch(batch.time, batch.rank, events, len(batch.events) - len(events))


def _cache_events(events: list[_Event]) -> Iterator[CacheEvent]:
    for event in events:
        if event.type == "AllBlocksCleared":
            yield CacheCleared()
        elif event.medium not in (GPU, None):
            continue
        elif event.type == "BlockStored":
            kind = group_kind(event.kv_cache_spec_kind)
            yield BlocksStored(event.group_idx or 0, kind, _hashes(event), event.block_size)
        elif event.type == "BlockRemoved":
            yield BlocksRemoved(event.group_idx, _hashes(event))


def _hashes(event: _Event) -> tuple[int, ...]:
    return tuple(map(event_hash, event.block_hashes))
