"""The decode node's side of hand-overs, in its scheduler's process: reads ordered, retried, given up.

It decides; `scheduler_side` carries out.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from connector.accounts import Accounts
from connector.metadata import ReadEnd, ReadOrder, ReadOutcome, WorkerReport
from connector.quarantine import Quarantine
from connector.ticket import Ticket

_LEASED = frozenset({ReadOutcome.TRANSFER_FAILED, ReadOutcome.UNVERIFIED})
"""After these the prefill node probably still holds the blocks, and can be told to let them go."""


@dataclass(slots=True)
class _Read:
    """A ticket on its way; `nonce` is the running attempt's, empty while none runs."""

    request: Any
    issued_at: float
    attempt: int = -1
    nonce: str = ""
    blocks: list[Any] = field(default_factory=list)
    end: ReadEnd | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of failed reads. `again`: requests to arm once more; `give_back`: tickets to release."""

    again: tuple[Any, ...]
    give_back: tuple[Any, ...]


class DecodeDesk:
    """Every ticket that was accepted, until its read is over. `make_nonce` gives unguessable short names."""

    def __init__(self, *, accounts: Accounts, retries: int, make_nonce: Callable[[], str]) -> None:
        self._accounts = accounts
        self._retries = retries
        self._make_nonce = make_nonce
        self._reads: dict[str, _Read] = {}
        self._orders: dict[str, ReadOrder] = {}

    def __len__(self) -> int:
        """How many tickets are being dealt with."""
        return len(self._reads)

    def accept(self, request: Any, ticket: Ticket) -> None:
        """A good ticket has come with this request."""
        self._reads[request.request_id] = _Read(request, ticket.issued_at)

    def order(self, request_id: str, *, blocks: Sequence[Any], hit: int, pull: int) -> None:
        """Blocks are allocated and vLLM will read into them in the next step; with `pull` 0 it only gives notice."""
        read = self._reads[request_id]
        read.attempt += 1
        read.nonce, read.blocks, read.end = self._make_nonce(), list(blocks), None
        self._orders[request_id] = ReadOrder(read.nonce, read.attempt, read.issued_at, hit, pull)
        if not pull:
            self._accounts.ticket_unused()
            del self._reads[request_id]

    def give_back(self, request_id: str) -> None:
        """vLLM will give notice for this request's ticket, without a read."""
        read = self._reads.pop(request_id, None)
        issued_at = 0.0 if read is None else read.issued_at
        self._orders[request_id] = ReadOrder(self._make_nonce(), 0, issued_at)

    def take_orders(self, request_ids: Iterable[str]) -> dict[str, ReadOrder]:
        """The orders that belong to what vLLM tells the workers to receive; every entry gets one."""
        orders, self._orders = self._orders, {}
        return {name: orders.get(name) or ReadOrder(self._make_nonce(), 0) for name in request_ids}

    def hear(self, report: WorkerReport, quarantine: Quarantine) -> None:
        """The workers' news; before `settle` of the same step, and before vLLM frees anything."""
        for request_id, end in report.reads_ended.items():
            read = self._reads.get(request_id)
            if read is not None and read.nonce == end.nonce:
                read.end = end if read.end is None else read.end.merged(end)
        by_nonce = {read.nonce: read for read in self._reads.values()} if report.stalled else {}
        for nonce, ranks in report.stalled.items():
            if nonce in by_nonce:
                quarantine.stall(nonce, by_nonce[nonce].blocks, ranks)
        quarantine.drain(report.drained)

    def settle(self, finished: Iterable[str], failed: Collection[str]) -> Settled:
        """Reads that ended on all ranks. Good ones are done with; failed ones are tried again or given up."""
        again, give_back = [], []
        for request_id in finished:
            read = self._reads.get(request_id)
            if read is None:
                continue
            if request_id in failed and self._worth_another(read):
                self._accounts.read("retried")
                read.nonce = ""
                again.append(read.request)
                continue
            del self._reads[request_id]
            if request_id in failed and self._outcome(read) in _LEASED:
                give_back.append(read.request)
        return Settled(tuple(again), tuple(give_back))

    def leave(self, request_id: str) -> None:
        """The request is over; if its read is not, its blocks stay known until `settle`."""
        read = self._reads.get(request_id)
        if read is not None and not read.nonce:
            del self._reads[request_id]

    def _worth_another(self, read: _Read) -> bool:
        return not read.request.is_finished() and read.attempt < self._retries and self._outcome(read).retryable

    def _outcome(self, read: _Read) -> ReadOutcome:
        """What the ranks said; a failure without a word is a transfer that failed."""
        return ReadOutcome.TRANSFER_FAILED if read.end is None else read.end.outcome
