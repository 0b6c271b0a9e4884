"""The leases of a prefill node: which blocks are held for which reads, and how each lease ended. Pure: time is passed
in, seconds on one monotonic clock.

    LeaseTable   scheduler's process   every lease, by the alias that tickets name
    Aliases      every process         alias ↔ request id of this engine
    LeaseReads   each worker rank      which reads of its leased blocks this rank has seen completed

A lease is opened when a prefill ends with a ticket. It ends just before the scheduler frees the blocks, never later, so
a decode node that is answered *held* after its read has read blocks that had not been reused (a seqlock reader's
check).

A lease waits for a number of *reads*. Each read has a nonce and, on each rank, a number of *readers*: the decode ranks
that read from this very rank (more than one when the two nodes' tensor-parallel sizes differ). A nonce is complete when
all of its readers gave notice; a lease is done when enough nonces are complete.

A notification can arrive before the lease is known on a rank, since the scheduler sends leases a step after the client
has the ticket: it is kept for requests that the rank is working on, and ignored for all others. So a forged one can
never end a request that is still running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .messages import Verdict
from .notifs import ReadDone
from .transfer_params import MOST_READERS

REMEMBERED_FOR = 600.0
"""Seconds for which an ended lease and a released hand-over id are remembered: longer than any read may take."""
MOST_REMEMBERED = 65536
"""The most ended leases that are remembered, and the most hand-over ids."""


class LeaseEnd(StrEnum):
    """How a lease ended; the values are labels of a metric."""

    READ = "read"
    EXPIRED = "expired"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class Lease:
    """One request's blocks. `reads` counts, per nonce, the worker ranks that saw that read completed."""

    readers: int
    opened_at: float
    reads: Mapping[str, int] = field(default_factory=dict)
    release_requested: bool = False
    ended_at: float | None = None
    ending: LeaseEnd | None = None

    def complete(self, ranks: int) -> frozenset[str]:
        """The nonces whose completion every one of `ranks` worker ranks has seen."""
        return frozenset(nonce for nonce, seen in self.reads.items() if seen >= ranks)


@dataclass(frozen=True, slots=True)
class EndedLease:
    """How a lease ended, and for how many seconds it was held."""

    ending: LeaseEnd
    held_for: float


class LeaseTable:
    """Every lease of this node, keyed by the alias that tickets name.

    `ranks` is the number of worker ranks that report each read (tensor times pipeline parallel). Ended leases are
    remembered for `memory` seconds, at most `capacity` of them, the oldest forgotten first. `verify` may be called from
    another thread than the rest: it reads one immutable value out of one dict.
    """

    def __init__(self, *, ranks: int, memory: float = REMEMBERED_FOR, capacity: int = MOST_REMEMBERED) -> None:
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

    def record_reads(self, alias: str, reads: Mapping[str, int]) -> None:
        """Add the number of ranks that saw each nonce's read completed; unknown aliases are ignored."""
        lease = self._held.get(alias)
        if lease is None:
            return
        merged = dict(lease.reads)
        for nonce, seen in reads.items():
            merged[nonce] = merged.get(nonce, 0) + seen
        self._held[alias] = replace(lease, reads=merged)

    def request_release(self, alias: str) -> bool:
        """Mark a held lease for release on demand; False when nothing is held or it is marked already."""
        lease = self._held.get(alias)
        if lease is None or lease.release_requested:
            return False
        self._held[alias] = replace(lease, release_requested=True)
        return True

    def end(self, alias: str, now: float) -> EndedLease | None:
        """The blocks are about to be freed. None when no such lease was held."""
        lease = self._held.get(alias)
        if lease is None:
            return None
        ending = self._ending(lease)
        self._ended[alias] = replace(lease, ended_at=now, ending=ending)
        del self._held[alias]
        self._forget(now)
        return EndedLease(ending, now - lease.opened_at)

    def verify(self, alias: str, nonce: str) -> Verdict:
        """Whether the blocks were held while a read with this nonce, which has ended by now, ran. Safe from any
        thread."""
        if alias in self._held:
            return Verdict.HELD
        lease = self._ended.get(alias)
        if lease is None:
            return Verdict.UNKNOWN
        if nonce in lease.complete(self._ranks):
            return Verdict.RELEASED_BY_YOU
        return Verdict.EXPIRED if lease.ending is LeaseEnd.EXPIRED else Verdict.RELEASED_BY_ANOTHER

    def _ending(self, lease: Lease) -> LeaseEnd:
        if len(lease.complete(self._ranks)) >= lease.readers:
            return LeaseEnd.READ
        return LeaseEnd.RELEASED if lease.release_requested else LeaseEnd.EXPIRED

    def _forget(self, now: float) -> None:
        """Drop the ended leases that are too old or too many; insertion order is the order of ending."""
        while self._ended:
            oldest = next(iter(self._ended))
            ended_at = self._ended[oldest].ended_at or 0.0
            if len(self._ended) <= self._capacity and now - ended_at <= self._memory:
                return
            del self._ended[oldest]


class Aliases:
    """The names that tickets give to this engine's requests, one alias for each, looked up both ways.

    A ticket goes to clients and to other nodes, so it must not name the engine's own request id: with the id of a
    running request a second one could be sent under it. An alias is random, made when the prefill leg arrives, and
    means nothing to vLLM. Notifications, heartbeats, leases and questions after a read name aliases; only this table
    maps one to a request. It is as large as the number of prefill legs that run or hold blocks.
    """

    def __init__(self) -> None:
        self._request_ids: dict[str, str] = {}
        self._aliases: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._aliases)

    def bind(self, alias: str, request_id: str) -> None:
        """From now on `alias` names this request; an earlier alias of it is forgotten."""
        self.forget(request_id)
        self._request_ids[alias] = request_id
        self._aliases[request_id] = alias

    def request_id(self, alias: str) -> str | None:
        """The request that `alias` names; None for an unknown alias."""
        return self._request_ids.get(alias)

    def alias(self, request_id: str) -> str | None:
        """The alias of this request, or None."""
        return self._aliases.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request holds nothing any more."""
        alias = self._aliases.pop(request_id, None)
        if alias is not None:
            del self._request_ids[alias]


MOST_NONCES = 4 * MOST_READERS
"""Nonces remembered for each request: four times as many as readers that it may be declared for. A lease that is
read more often is under attack."""


@dataclass(slots=True)
class _ReadsOfLease:
    wanted: int | None = None
    readers: dict[str, int] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    unreported: set[str] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return self.wanted is not None and len(self.complete) >= self.wanted


class LeaseReads:
    """On one worker rank: notifications counted by request id, and complete nonces not yet reported to the
    scheduler."""

    def __init__(self) -> None:
        self._reads: dict[str, _ReadsOfLease] = {}

    def __len__(self) -> int:
        """How many requests have an entry."""
        return len(self._reads)

    def hold(self, request_id: str, readers: int) -> None:
        """From now on this rank holds the request's blocks for `readers` reads (at least one)."""
        self._reads.setdefault(request_id, _ReadsOfLease()).wanted = max(1, readers)

    def record(self, request_id: str, done: ReadDone) -> None:
        """Count one notification of a completed read.

        The caller has checked that this rank works on the request, or holds its blocks.
        """
        reads = self._reads.setdefault(request_id, _ReadsOfLease())
        if done.nonce in reads.complete or (done.nonce not in reads.readers and len(reads.readers) >= MOST_NONCES):
            return
        reads.readers[done.nonce] = reads.readers.get(done.nonce, 0) + 1
        if reads.readers[done.nonce] >= done.readers:
            reads.complete.add(done.nonce)
            reads.unreported.add(done.nonce)

    def give_back(self, request_id: str, nonces: Iterable[str]) -> None:
        """The reads with these nonces will not be made, or not any more: they count as complete."""
        for nonce in nonces:
            self.record(request_id, ReadDone("", nonce, 1))

    def done(self) -> set[str]:
        """Requests whose leases have had all of their reads; they stay here until `forget`."""
        return {request_id for request_id, reads in self._reads.items() if reads.done}

    def pop_report(self) -> dict[str, dict[str, int]]:
        """Complete nonces of leased requests, each reported once, with a 1 for this rank
        (`WorkerReport.reads_seen`)."""
        report = {}
        for request_id, reads in self._reads.items():
            if reads.wanted is not None and reads.unreported:
                report[request_id] = dict.fromkeys(sorted(reads.unreported), 1)
                reads.unreported = set()
        return report

    def forget(self, request_id: str) -> None:
        """The request's blocks are freed, or never were held."""
        self._reads.pop(request_id, None)
