"""Where each prompt's tokens came from, counted once a request, when it is certain. Adds up after failures too.

vLLM's own counters count a load when it is planned, and a failed load twice; this one waits for the verdict.


Local blocks under a transfer that was given up on but may still write: kept out of the pool until it has ended.

References are taken in vLLM's block pool, so that whatever vLLM frees meanwhile stays allocated here.


The decode node's side of hand-overs, in its scheduler's process: reads ordered, retried, given up, given back.

It decides; `scheduler_side` carries out. A ticket whose read failed is *given back*: the prefill node gets a notice
without a read, under the nonce of the failed one, so that a read whose own notice did arrive is not counted twice. A
read that was given up while its transfer was live is waited for first; a transfer that then ends well has given notice.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from connector.metadata import ReadEnd, ReadOrder, ReadOutcome, WorkerReport
from connector.stats import Counters, Group
from connector.ticket import Ticket


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens by source, and blocks by kind of group as (hit, pulled). `loaded`: by another connector."""

    hit: int
    pulled: int
    computed: int
    blocks: Mapping[Group, tuple[int, int]] = field(default_factory=dict)
    loaded: int = 0

    def reaching(self, tokens: int) -> "PromptTokens":
        """As it turned out where only the prompt's first `tokens` were there after another connector's load."""
        lost = min(self.loaded, max(0, self.hit + self.loaded - tokens))
        return replace(self, loaded=self.loaded - lost, computed=self.computed + lost)


class TokenAccounting:
    """Entries wait here while their read, or another connector's load, is on its way."""

    def __init__(self, accounts: Counters) -> None:
        self._accounts = accounts
        self._waiting: dict[str, PromptTokens] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def plan(self, request_id: str, entry: PromptTokens) -> None:
        """What will be true if the read is good; without a read or a load it is true at once."""
        if entry.pulled or entry.loaded:
            self._waiting[request_id] = entry
        else:
            self._waiting.pop(request_id, None)
            self._count(entry)

    def good(self, request_id: str) -> None:
        """The read was good."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._count(entry)

    def loaded(self, request_id: str, tokens: int) -> None:
        """Another connector's load is over, if there was one, and the prompt's first `tokens` are there."""
        entry = self._waiting.get(request_id)
        if entry is not None and entry.loaded:
            del self._waiting[request_id]
            self._count(entry.reaching(tokens))

    def forget(self, request_id: str) -> None:
        """The read failed, and another plan will follow, or the request is gone."""
        self._waiting.pop(request_id, None)

    def _count(self, entry: PromptTokens) -> None:
        self._accounts.prompt_tokens(hit=entry.hit, pulled=entry.pulled, loaded=entry.loaded, computed=entry.computed)
        for group, (hit, pulled) in entry.blocks.items():
            self._accounts.blocks(group, hit=hit, pulled=pulled)


class BlockPool(Protocol):
    """The part of vLLM's `BlockPool` that counts references."""

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...


@dataclass(slots=True)
class _Held:
    blocks: list[Any]
    ranks: int


class Quarantine:
    """Blocks by the nonce of the read that may still write to them. vLLM binds its pool before the first step."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[str, _Held] = {}

    def bind(self, pool: BlockPool) -> None:
        """The pool whose references count."""
        self._pool = pool

    def __len__(self) -> int:
        """How many reads are waited for."""
        return len(self._held)

    def __contains__(self, nonce: str) -> bool:
        return nonce in self._held

    def stall(self, nonce: str, blocks: Sequence[Any], ranks: int) -> None:
        """`ranks` more ranks have a live transfer into `blocks`. Must come before vLLM frees them."""
        held = self._held.get(nonce)
        if held is not None:
            held.ranks += ranks
            return
        if self._pool is None:
            return
        kept = [block for block in blocks if not block.is_null]
        self._pool.touch(kept)
        self._held[nonce] = _Held(kept, ranks)

    def drain(self, drained: Mapping[str, int]) -> list[str]:
        """Live transfers that have ended, by nonce, in ranks; the last one frees the blocks. Which nonces that were."""
        freed = []
        for nonce, ranks in drained.items():
            held = self._held.get(nonce)
            if held is None or self._pool is None:
                continue
            held.ranks -= ranks
            if held.ranks <= 0:
                del self._held[nonce]
                self._pool.free_blocks(held.blocks)
                freed.append(nonce)
        return freed


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
class TicketToReturn:
    """A ticket to give back: its request, and the nonce that the notice bears."""

    request: Any
    nonce: str


@dataclass(frozen=True, slots=True)
class ReadFollowUp:
    """What became of failed reads. `again`: requests to arm once more; `give_back`: tickets to give back."""

    again: tuple[Any, ...]
    give_back: tuple[TicketToReturn, ...]


class ReadTracker:
    """Every ticket that was accepted, until its read is over and no notice is owed.

    `ranks` is the number of worker ranks, each of which reads, and gives notice. `make_nonce` gives unguessable short
    names.
    """

    def __init__(
        self,
        *,
        accounts: Counters,
        quarantine: Quarantine,
        ranks: int,
        retries: int,
        make_nonce: Callable[[], str],
    ) -> None:
        self._accounts = accounts
        self._quarantine = quarantine
        self._ranks = ranks
        self._retries = retries
        self._make_nonce = make_nonce
        self._live: dict[str, TicketToReturn] = {}
        self._broken: set[str] = set()
        self._notices: dict[str, int] = {}
        self._reads: dict[str, _Read] = {}
        self._orders: dict[str, ReadOrder] = {}

    def __len__(self) -> int:
        """How many tickets are being dealt with."""
        return len(self._reads)

    @property
    def owes_notice(self) -> bool:
        """Whether a rank has not yet given a notice that it was ordered to give."""
        return bool(self._notices)

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

    def give_back(self, given: TicketToReturn) -> None:
        """vLLM will give notice for this request's ticket, without a read."""
        self._orders[given.request.request_id] = ReadOrder(given.nonce, 0)

    def take_orders(self, request_ids: Iterable[str]) -> dict[str, ReadOrder]:
        """The orders that belong to what vLLM tells the workers to receive; every entry gets one."""
        orders, self._orders = self._orders, {}
        taken = {name: orders.get(name) or ReadOrder(self._make_nonce(), 0) for name in request_ids}
        self._notices.update((order.nonce, self._ranks) for order in taken.values() if not order.pull_tokens)
        return taken

    def hear(self, report: WorkerReport) -> list[TicketToReturn]:
        """The workers' news; before `settle` of the same step, and before vLLM frees anything. What to give back now:
        tickets of reads that were given up, and have ended in an error since."""
        for request_id, end in report.reads_ended.items():
            read = self._reads.get(request_id)
            if read is not None and read.nonce == end.nonce:
                read.end = end if read.end is None else read.end.merged(end)
        by_nonce = {read.nonce: read for read in self._reads.values()} if report.stalled else {}
        for nonce, ranks in report.stalled.items():
            if nonce in by_nonce:
                self._quarantine.stall(nonce, by_nonce[nonce].blocks, ranks)
        self._count_notices(report.returned)
        self._broken |= report.broken.keys()
        return [given for nonce in self._quarantine.drain(report.drained) if (given := self._drained(nonce))]

    def _count_notices(self, returned: Mapping[str, int]) -> None:
        for nonce, ranks in returned.items():
            if nonce in self._notices:
                self._notices[nonce] -= ranks
                if self._notices[nonce] <= 0:
                    del self._notices[nonce]

    def _drained(self, nonce: str) -> TicketToReturn | None:
        given, broken = self._live.pop(nonce, None), nonce in self._broken
        self._broken.discard(nonce)
        return given if broken else None

    def settle(self, finished: Iterable[str], failed: Collection[str]) -> ReadFollowUp:
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
            if request_id in failed and self._outcome(read).leaves_lease:
                give_back.append(TicketToReturn(read.request, read.nonce))
        return ReadFollowUp(tuple(again), tuple(given for given in give_back if not self._is_live(given)))

    def _is_live(self, given: TicketToReturn) -> bool:
        """Whether a transfer of this read goes on; its end decides whether the ticket must be given back."""
        if given.nonce in self._quarantine:
            self._live[given.nonce] = given
        return given.nonce in self._quarantine

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
