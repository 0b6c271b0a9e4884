"""Which reads of its leased blocks one prefill rank has seen completed. Pure.

A lease wants a number of *reads*; each read has a nonce and, on this rank, a number of *readers*: the decode ranks
that read from this very rank (more than one when the two nodes' tensor-parallel sizes differ). A nonce is complete
when all of its readers gave notice; a lease is done when enough nonces are complete.

A notice can come before the lease is known here, since the scheduler tells of it a step later than it answers the
client: such notices wait, for requests that this rank is working on, and are forgotten for all others. So a forged
notice can never end a request that is still running.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from connector.admission import MOST_READERS
from connector.notices import Done

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


class ReadsSeen:
    """Per request id of this engine: notices counted, and what of it the scheduler has not heard yet."""

    def __init__(self) -> None:
        self._reads: dict[str, _Reads] = {}

    def __len__(self) -> int:
        """How many requests are followed."""
        return len(self._reads)

    def lease(self, request_id: str, readers: int) -> None:
        """From now on this rank holds the request's blocks for `readers` reads (at least one)."""
        self._reads.setdefault(request_id, _Reads()).wanted = max(1, readers)

    def notice(self, request_id: str, done: Done) -> None:
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
