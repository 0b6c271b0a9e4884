"""Who holds which prefilled blocks on this node, and how each hold ended. Pure: time is passed in.

A lease is opened when a prefill ends with a ticket. It ends when the scheduler is about to free the blocks,
never later: `LeaseTable.end` is called before the free, so that whoever hears *held* after a read has read
blocks that had not been reused (a seqlock reader's check).

All times are seconds on one monotonic clock. Ended leases are remembered for `memory` seconds, at most
`capacity` of them, the oldest forgotten first. `judge` may be called from another thread than the rest: it
reads one immutable value out of one dict.


The names that tickets give to this engine's requests, in the scheduler's process and in every worker. Pure.

A ticket goes to clients and to other nodes, so it must not name the engine's own request id: who knows the id of a
living request can send a second one under it. An alias is random, made when the prefill leg arrives, and means nothing
to vLLM. Notices, heartbeats, leases and questions after a read name aliases; only this table turns one into a request.

The table is as large as the number of prefill legs that run or hold blocks.


Which reads of its leased blocks one prefill rank has seen completed. Pure.

A lease wants a number of *reads*; each read has a nonce and, on this rank, a number of *readers*: the decode ranks
that read from this very rank (more than one when the two nodes' tensor-parallel sizes differ). A nonce is complete
when all of its readers gave notice; a lease is done when enough nonces are complete.

A notice can come before the lease is known here, since the scheduler tells of it a step later than it answers the
client: such notices wait, for requests that this rank is working on, and are forgotten for all others. So a forged
notice can never end a request that is still running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from connector.messages import ReadDone, Verdict
from connector.transfer_params import MOST_READERS


class LeaseEnd(StrEnum):
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
    ending: LeaseEnd | None = None

    def complete(self, ranks: int) -> frozenset[str]:
        """The nonces whose completion every one of `ranks` worker ranks has seen."""
        return frozenset(nonce for nonce, seen in self.reads.items() if seen >= ranks)


@dataclass(frozen=True, slots=True)
class EndedLease:
    """What `LeaseTable.end` tells the accounts: how it ended and how long it was held, in seconds."""

    ending: LeaseEnd
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

    def end(self, alias: str, now: float) -> EndedLease | None:
        """The blocks are about to be freed. None when no such lease was held."""
        lease = self._held.get(alias)
        if lease is None:
            return None
        ending = self._how(lease)
        self._ended[alias] = replace(lease, ended_at=now, ending=ending)
        del self._held[alias]
        self._forget(now)
        return EndedLease(ending, now - lease.opened_at)

    def judge(self, alias: str, nonce: str) -> Verdict:
        """Whether a read that carried `nonce` and has ended by now is good. Safe from any thread."""
        if alias in self._held:
            return Verdict.HELD
        lease = self._ended.get(alias)
        if lease is None:
            return Verdict.UNKNOWN
        if nonce in lease.complete(self._ranks):
            return Verdict.RELEASED_BY_YOU
        return Verdict.EXPIRED if lease.ending is LeaseEnd.EXPIRED else Verdict.RELEASED_BY_ANOTHER

    def _how(self, lease: Lease) -> LeaseEnd:
        if len(lease.complete(self._ranks)) >= lease.readers:
            return LeaseEnd.READ
        return LeaseEnd.RELEASED if lease.release_asked else LeaseEnd.EXPIRED

    def _forget(self, now: float) -> None:
        """Drop the ended leases that are too old or too many; insertion order is the order of ending."""
        while self._ended:
            oldest = next(iter(self._ended))
            ended_at = self._ended[oldest].ended_at or 0.0
            if len(self._ended) <= self._capacity and now - ended_at <= self._memory:
                return
            del self._ended[oldest]


class Aliases:
    """Both ways, one alias a request."""

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
        """The request that `alias` names; None for what nobody knows."""
        return self._request_ids.get(alias)

    def alias(self, request_id: str) -> str | None:
        """What tickets call this request; None for a request that has no alias."""
        return self._aliases.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request holds nothing any more."""
        alias = self._aliases.pop(request_id, None)
        if alias is not None:
            del self._request_ids[alias]


MOST_NONCES = 4 * MOST_READERS
"""Nonces remembered a request: room for every reader that it may be declared for, with the reads that they try again.
A lease that is read more often is under attack."""


@dataclass(slots=True)
class _Reads:
    wanted: int | None = None
    readers: dict[str, int] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    untold: set[str] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return self.wanted is not None and len(self.complete) >= self.wanted


class LeaseReads:
    """Per request id of this engine: notices counted, and what of it the scheduler has not heard yet."""

    def __init__(self) -> None:
        self._reads: dict[str, _Reads] = {}

    def __len__(self) -> int:
        """How many requests are followed."""
        return len(self._reads)

    def lease(self, request_id: str, readers: int) -> None:
        """From now on this rank holds the request's blocks for `readers` reads (at least one)."""
        self._reads.setdefault(request_id, _Reads()).wanted = max(1, readers)

    def notice(self, request_id: str, done: ReadDone) -> None:
        """Count one notice for the request that its alias names.

        The caller has checked that this rank works on the request, or holds it.
        """
        reads = self._reads.setdefault(request_id, _Reads())
        if done.nonce in reads.complete or (done.nonce not in reads.readers and len(reads.readers) >= MOST_NONCES):
            return
        reads.readers[done.nonce] = reads.readers.get(done.nonce, 0) + 1
        if reads.readers[done.nonce] >= done.readers:
            reads.complete.add(done.nonce)
            reads.untold.add(done.nonce)

    def take_done(self) -> set[str]:
        """Leases that have had all of their reads; they stay followed until `forget`."""
        return {request_id for request_id, reads in self._reads.items() if reads.done}

    def take_report(self) -> dict[str, dict[str, int]]:
        """Completed nonces of leased requests, each told once, with a 1 for this rank (`WorkerReport.reads_seen`)."""
        report = {}
        for request_id, reads in self._reads.items():
            if reads.wanted is not None and reads.untold:
                report[request_id] = dict.fromkeys(sorted(reads.untold), 1)
                reads.untold = set()
        return report

    def forget(self, request_id: str) -> None:
        """The request's blocks are let go, or never were held."""
        self._reads.pop(request_id, None)
