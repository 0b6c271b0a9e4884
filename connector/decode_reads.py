"""The decode node's reads, in its scheduler's process: started, given up; tickets returned; tokens counted.

    accept ─► start ─► on_worker_report ─► on_reads_finished: verified, or failed

A failed read is not repeated: the prompt is computed. A second read would need the blocks that vLLM still reserves for
the first one (`admission`), and a connection that broke must be made anew before anything can be read over it.
A ticket whose read failed is *returned*: the prefill node gets a notification without a read, under the nonce of the
failed read, so that a read whose own notification did arrive is not counted twice. So is the ticket of a request that
ended before its read. If the read was given up while its
transfer was live, the end of the transfer is awaited first: one that ends well has given notice itself.

`ConnectorScheduler` calls this and carries out what it decides. `Quarantine` keeps blocks under a live transfer out of
vLLM's pool; `TokenAccounting` counts where each prompt's tokens came from.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from .counters import Counters, ReadOutcome
from .kv_groups import Group
from .metadata import ReadEnd, ReadOrder, WorkerReport
from .ticket import Ticket


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Where one prompt's tokens come from; blocks by kind of group as (hit, pulled). `loaded`: by another connector."""

    hit: int
    pulled: int
    computed: int
    blocks: Mapping[Group, tuple[int, int]] = field(default_factory=dict)
    loaded: int = 0

    def with_loaded_up_to(self, tokens: int) -> "PromptTokens":
        """The same where another connector's load brought only what is missing of the prompt's first `tokens`."""
        lost = min(self.loaded, max(0, self.hit + self.loaded - tokens))
        return replace(self, loaded=self.loaded - lost, computed=self.computed + lost)


class TokenAccounting:
    """Counts each prompt's tokens once, when their source is certain; an entry waits while its read or load runs.

    vLLM's own counters count a load when it is planned, and a failed load twice.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._waiting: dict[str, PromptTokens] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, request_id: str, entry: PromptTokens) -> None:
        """Keep the tokens that are right if the read or load succeeds; without either they are counted at once."""
        if entry.pulled or entry.loaded:
            self._waiting[request_id] = entry
        else:
            self._waiting.pop(request_id, None)
            self._count(entry)

    def on_read_verified(self, request_id: str) -> None:
        """The read succeeded."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._count(entry)

    def on_loaded(self, request_id: str, tokens: int) -> None:
        """Another connector's load has ended, if there was one; the prompt's first `tokens` are in the cache."""
        entry = self._waiting.get(request_id)
        if entry is not None and entry.loaded:
            del self._waiting[request_id]
            self._count(entry.with_loaded_up_to(tokens))

    def forget(self, request_id: str) -> None:
        """The read failed, so that another plan follows, or the request has ended."""
        self._waiting.pop(request_id, None)

    def _count(self, entry: PromptTokens) -> None:
        self._counters.prompt_tokens(hit=entry.hit, pulled=entry.pulled, loaded=entry.loaded, computed=entry.computed)
        for group, (hit, pulled) in entry.blocks.items():
            self._counters.blocks(group, hit=hit, pulled=pulled)


class BlockPool(Protocol):
    """The part of vLLM's `BlockPool` that counts references."""

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...


@dataclass(slots=True)
class _QuarantinedRead:
    blocks: list[Any]
    ranks: int


class Quarantine:
    """Blocks of reads that were given up while their transfer was live, by nonce: it may still write to them.

    References to them are taken in vLLM's block pool, so that they stay allocated whatever vLLM frees. vLLM binds its
    pool before the first step.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[str, _QuarantinedRead] = {}

    def bind(self, pool: BlockPool) -> None:
        """vLLM's block pool."""
        self._pool = pool

    def __len__(self) -> int:
        """How many reads' transfers have not ended."""
        return len(self._held)

    def __contains__(self, nonce: str) -> bool:
        return nonce in self._held

    @property
    def blocks(self) -> int:
        """How many blocks are kept out of the pool."""
        return sum(len(read.blocks) for read in self._held.values())

    def add(self, nonce: str, blocks: Sequence[Any], ranks: int) -> None:
        """`ranks` more ranks have a live transfer into `blocks`. Must be called before vLLM frees them.

        Blocks of the prefix cache are the request's local hit, which no transfer writes to: others may use them.
        """
        held = self._held.get(nonce)
        if held is not None:
            held.ranks += ranks
            return
        if self._pool is None:
            return
        kept = [block for block in blocks if not block.is_null and block.block_hash is None]
        self._pool.touch(kept)
        self._held[nonce] = _QuarantinedRead(kept, ranks)

    def on_transfers_ended(self, ended: Mapping[str, int]) -> list[str]:
        """Live transfers ended: nonce → number of ranks. Frees the blocks of, and returns, the nonces with none
        left."""
        freed = []
        for nonce, ranks in ended.items():
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
    """An accepted ticket, at `since` (monotonic seconds). `nonce`: of its read; empty until vLLM has planned it."""

    request: Any
    issued_at: float
    since: float
    nonce: str = ""
    blocks: list[Any] = field(default_factory=list)
    end: ReadEnd | None = None


@dataclass(frozen=True, slots=True)
class TicketToReturn:
    """A ticket to give back: its request, and the nonce that the notification carries."""

    request: Any
    nonce: str


class ReadTracker:
    """Every accepted ticket, until its read has ended and every notification is sent.

    `ranks` is the number of worker ranks; each reads, and each gives notice. `make_nonce` returns a short unguessable
    name.
    """

    def __init__(self, counters: Counters, quarantine: Quarantine, ranks: int, make_nonce: Callable[[], str]) -> None:
        self._counters = counters
        self._quarantine = quarantine
        self._ranks = ranks
        self._make_nonce = make_nonce
        self._await_transfer: dict[str, TicketToReturn] = {}
        self._broken: set[str] = set()
        self._returning: dict[str, int] = {}
        self._reads: dict[str, _Read] = {}
        self._orders: dict[str, ReadOrder] = {}

    @property
    def has_pending_orders(self) -> bool:
        """Whether orders wait for the next step, or a rank has not yet returned a ticket that it was ordered to."""
        return bool(self._orders or self._returning)

    @property
    def under_way(self) -> bool:
        """Whether a read is ordered or running."""
        return any(read.nonce for read in self._reads.values())

    def accept(self, request: Any, ticket: Ticket, now: float) -> None:
        """The request has a valid ticket."""
        self._reads[request.request_id] = _Read(request, ticket.issued_at, now)

    def waiting_since(self, before: float) -> list[Any]:
        """The requests that vLLM has not admitted, and whose tickets were accepted before this time."""
        return [read.request for read in self._reads.values() if not read.nonce and read.since < before]

    def start(self, request_id: str, *, blocks: Sequence[Any], hit: int, pull: int) -> None:
        """Blocks are allocated, into which vLLM reads in the next step. With `pull` 0 it only gives notice.

        `hit`, `pull`: tokens that the local cache has, and that the read brings.
        """
        read = self._reads[request_id]
        read.nonce, read.blocks, read.end = self._make_nonce(), list(blocks), None
        self._orders[request_id] = ReadOrder(read.nonce, read.issued_at, hit, pull)
        if not pull:
            self._counters.ticket_unused()
            del self._reads[request_id]

    def return_ticket(self, ticket: TicketToReturn) -> None:
        """vLLM gives notice for this request's ticket in the next step, without a read."""
        self._orders[ticket.request.request_id] = ReadOrder(ticket.nonce)

    def pop_orders(self, request_ids: Iterable[str]) -> dict[str, ReadOrder]:
        """The order for each of vLLM's own entries in `reqs_to_recv`."""
        orders, self._orders = self._orders, {}
        popped = {name: orders.get(name) or ReadOrder(self._make_nonce()) for name in request_ids}
        self._returning.update((order.nonce, self._ranks) for order in popped.values() if not order.pull_tokens)
        return popped

    def on_worker_report(self, report: WorkerReport) -> list[TicketToReturn]:
        """Must precede `on_reads_finished` of the same step, and vLLM's freeing of blocks.

        Returns the tickets to give back now: of reads that were given up, and whose transfer has failed since.
        """
        for request_id, end in report.reads_ended.items():
            read = self._reads.get(request_id)
            if read is not None and read.nonce == end.nonce:
                read.end = end if read.end is None else read.end.merged(end)
        by_nonce = {read.nonce: read for read in self._reads.values()} if report.stalled else {}
        for nonce, ranks in report.stalled.items():
            if nonce in by_nonce:
                self._quarantine.add(nonce, by_nonce[nonce].blocks, ranks)
        self._count_returned(report.returned)
        self._broken |= report.broken.keys()
        ended = self._quarantine.on_transfers_ended(report.drained)
        return [ticket for nonce in ended if (ticket := self._on_transfer_ended(nonce))]

    def _count_returned(self, returned: Mapping[str, int]) -> None:
        for nonce, ranks in returned.items():
            if nonce in self._returning:
                self._returning[nonce] -= ranks
                if self._returning[nonce] <= 0:
                    del self._returning[nonce]

    def _on_transfer_ended(self, nonce: str) -> TicketToReturn | None:
        ticket, broken = self._await_transfer.pop(nonce, None), nonce in self._broken
        self._broken.discard(nonce)
        return ticket if broken else None

    def on_reads_finished(self, finished: Iterable[str], failed: Collection[str]) -> list[TicketToReturn]:
        """Reads ended on all ranks. Returns the tickets of failed ones that are to be given back now."""
        to_return = []
        for request_id in finished:
            read = self._reads.pop(request_id, None)
            if read is not None and request_id in failed and self._end(read).outcome.leaves_lease:
                to_return.append(TicketToReturn(read.request, read.nonce))
        return [ticket for ticket in to_return if not self._awaits_transfer(ticket)]

    def ends(self, finished: Iterable[str], failed: Collection[str]) -> list[tuple[Any, ReadEnd]]:
        """The requests of reads that have ended on all ranks, and how; must precede `on_reads_finished`."""
        reads = ((name, self._reads[name]) for name in finished if name in self._reads)
        return [
            (read.request, self._end(read) if name in failed else ReadEnd(read.nonce, ReadOutcome.VERIFIED))
            for name, read in reads
        ]

    def _awaits_transfer(self, ticket: TicketToReturn) -> bool:
        """Whether a transfer of this read is live; its end decides whether the ticket must be given back."""
        if ticket.nonce in self._quarantine:
            self._await_transfer[ticket.nonce] = ticket
        return ticket.nonce in self._quarantine

    def on_request_finished(self, request: Any) -> None:
        """The request has ended. A ticket that was not read is returned; of a running read the blocks stay known."""
        read = self._reads.get(request.request_id)
        if read is not None and not read.nonce:
            del self._reads[request.request_id]
            self.return_ticket(TicketToReturn(request, self._make_nonce()))

    def _end(self, read: _Read) -> ReadEnd:
        """The ranks' report; a failure without one is a transfer that failed."""
        return ReadEnd(read.nonce, ReadOutcome.TRANSFER_FAILED) if read.end is None else read.end
