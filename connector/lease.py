"""Who holds which prefilled blocks on this node, and how each hold ended. Pure: time is passed in.

A lease is opened when a prefill ends with a ticket. It ends when the scheduler is about to free the blocks,
never later: `LeaseTable.end` is called before the free, so that whoever hears *held* after a read has read
blocks that had not been reused (a seqlock reader's check).

All times are seconds on one monotonic clock. Ended leases are remembered for `memory` seconds, at most
`capacity` of them, the oldest forgotten first. `judge` may be called from another thread than the rest: it
reads one immutable value out of one dict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Verdict(StrEnum):
    """The answer to "may I use what I read?"; the values go over the wire."""

    HELD = "held"
    RELEASED_BY_YOU = "released_by_you"
    RELEASED_BY_ANOTHER = "released_by_another"
    EXPIRED = "expired"
    UNKNOWN = "unknown"

    @property
    def good(self) -> bool:
        """Whether the bytes read are certainly the ticket's."""
        return self in (Verdict.HELD, Verdict.RELEASED_BY_YOU)


class Ending(StrEnum):
    """How a lease ended, for the accounts."""

    READ = "read"
    EXPIRED = "expired"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class Lease:
    """One request's blocks. `reads` counts, per nonce, the worker ranks that saw that read completed."""

    readers: int
    opened_at: float
    reads: Mapping[str, int] = field(default_factory=dict)
    release_asked: bool = False
    ended_at: float | None = None
    ending: Ending | None = None

    def complete(self, ranks: int) -> frozenset[str]:
        """The nonces whose completion every one of `ranks` worker ranks has seen."""
        return frozenset(nonce for nonce, seen in self.reads.items() if seen >= ranks)


@dataclass(frozen=True, slots=True)
class Ended:
    """What `LeaseTable.end` tells the accounts: how it ended and how long it was held, in seconds."""

    ending: Ending
    held_for: float


class LeaseTable:
    """Every lease of this node, keyed by the alias that tickets name.

    `ranks` is the number of worker ranks that report each read (tensor times pipeline parallel).
    """

    def __init__(self, *, ranks: int, memory: float, capacity: int) -> None:
        self._ranks = ranks
        self._memory = memory
        self._capacity = capacity
        self._held: dict[str, Lease] = {}
        self._ended: dict[str, Lease] = {}

    def __len__(self) -> int:
        """How many leases are held."""
        return len(self._held)

    @property
    def remembered(self) -> int:
        """How many ended leases are still known."""
        return len(self._ended)

    def open(self, alias: str, *, readers: int, now: float) -> None:
        """Hold the blocks of `alias` for `readers` reads, or until the lease runs out."""
        self._ended.pop(alias, None)
        self._held[alias] = Lease(readers=readers, opened_at=now)

    def holds(self, alias: str) -> bool:
        """Whether the blocks of `alias` are held."""
        return alias in self._held

    def note_reads(self, alias: str, reads: Mapping[str, int]) -> None:
        """Add the number of ranks that saw each nonce's read completed; unknown aliases are ignored."""
        lease = self._held.get(alias)
        if lease is None:
            return
        merged = dict(lease.reads)
        for nonce, seen in reads.items():
            merged[nonce] = merged.get(nonce, 0) + seen
        self._held[alias] = replace(lease, reads=merged)

    def ask_release(self, alias: str) -> bool:
        """Mark a held lease for release on demand; False when nothing is held or it was asked before."""
        lease = self._held.get(alias)
        if lease is None or lease.release_asked:
            return False
        self._held[alias] = replace(lease, release_asked=True)
        return True

    def end(self, alias: str, now: float) -> Ended | None:
        """The blocks are about to be freed. None when no such lease was held."""
        lease = self._held.get(alias)
        if lease is None:
            return None
        ending = self._how(lease)
        self._ended[alias] = replace(lease, ended_at=now, ending=ending)
        del self._held[alias]
        self._forget(now)
        return Ended(ending, now - lease.opened_at)

    def judge(self, alias: str, nonce: str) -> Verdict:
        """Whether a read that carried `nonce` and has ended by now is good. Safe from any thread."""
        if alias in self._held:
            return Verdict.HELD
        lease = self._ended.get(alias)
        if lease is None:
            return Verdict.UNKNOWN
        if nonce in lease.complete(self._ranks):
            return Verdict.RELEASED_BY_YOU
        return Verdict.EXPIRED if lease.ending is Ending.EXPIRED else Verdict.RELEASED_BY_ANOTHER

    def _how(self, lease: Lease) -> Ending:
        if len(lease.complete(self._ranks)) >= lease.readers:
            return Ending.READ
        return Ending.RELEASED if lease.release_asked else Ending.EXPIRED

    def _forget(self, now: float) -> None:
        """Drop the ended leases that are too old or too many; insertion order is the order of ending."""
        while self._ended:
            oldest = next(iter(self._ended))
            ended_at = self._ended[oldest].ended_at or 0.0
            if len(self._ended) <= self._capacity and now - ended_at <= self._memory:
                return
            del self._ended[oldest]
