"""Events of a place's cache: vLLM's KV events without what the index needs not. Pure values.

The field each one is made from is a field of vLLM's event of the same name (`vllm/distributed/kv_events.py`):
`BlockStored`, `BlockRemoved`, `AllBlocksCleared`. Hashes are the low 64 bits of a block's hash
(`block_hashes.event_hashes`).
"""

import enum
from typing import TypeAlias

import msgspec


class GroupKind(enum.StrEnum):
    """Kinds of KV-cache groups."""

    ATTENTION = "attention"
    """Keys and values of every token: a prefix is there when each of its blocks is."""
    STATE = "state"
    """A recurrent state (mamba, GDN): a prefix is there when the state at its end is."""


def group_kind(spec_kind: str | None) -> GroupKind:
    """The kind of a group, from `kv_cache_spec_kind` of vLLM's events.

    Anything but mamba is attention. That holds for sliding windows and chunked attention too: every block is asked for,
    although vLLM needs those inside of the window alone, so hits are found too short, never too long.
    """
    return GroupKind.STATE if spec_kind == "mamba" else GroupKind.ATTENTION


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """A group now holds one more copy of each of these blocks.

    vLLM publishes a state group's event with no hash where it computed blocks and kept no state. Such an event is to be
    applied as well: it tells that the place has that group.

    Attributes:
        group: `group_idx`; 0 where the event names none.
        hashes: of the prefixes that end with these blocks.
        tokens: of one block; of one unit of the hashes, where the event is of a part of a block.
    """

    group: int
    kind: GroupKind
    hashes: tuple[int, ...]
    tokens: int


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    """A group holds one copy less of each of these blocks; `group` None: all groups, for a node that does not say."""

    group: int | None
    hashes: tuple[int, ...]


class CacheCleared(msgspec.Struct, frozen=True, gc=False):
    """Nothing is cached. Also what is known of a place before its very first event, the one with sequence number 0."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | CacheCleared
