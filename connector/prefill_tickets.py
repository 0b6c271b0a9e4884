"""The prefill node's hand-overs, in its scheduler's process: tickets issued, leases opened, hand-over ids released.

    prefill leg arrives ──► on_new_request: an alias, and its hand-over id if it names one
    prefill ends ──► issue: a lease is opened, the signed ticket is the leg's answer
                └──► drop: it failed, was aborted, or its hand-over was released; nothing is held
    workers saw reads ──► on_reads_seen ──► on_finished_sending: the lease ends, then vLLM frees the blocks
    release(hand-over id) ──► its leases end now, running requests hold nothing at their end, later ones on arrival

`ConnectorScheduler` calls this and carries out what it decides. Two clocks are passed in: `now` is monotonic, for
leases; `wall` is unix seconds, for what a ticket says to another machine.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .counters import Counters
from .fingerprint import Fingerprint
from .leases import MOST_REMEMBERED, REMEMBERED_FOR, Aliases, LeaseTable
from .ticket import Ticket, wire
from .transfer_params import IssueTicket


@dataclass(slots=True)
class _HandOver:
    """One hand-over id: the requests that carry it and have not left, and when it was released, if it was."""

    requests: set[str] = field(default_factory=set)
    released_at: float | None = None


class HandOverIds:
    """Which requests a hand-over id names, and which ids were released: before, during or after the prefill. Pure.

    An id that no unfinished request carries is remembered for `memory` seconds after its release, and at most
    `capacity` ids in all, the oldest forgotten first.
    """

    def __init__(self, *, memory: float = REMEMBERED_FOR, capacity: int = MOST_REMEMBERED) -> None:
        self._memory = memory
        self._capacity = capacity
        self._by_id: OrderedDict[str, _HandOver] = OrderedDict()
        self._of_request: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, hand_over: str, request_id: str) -> bool:
        """A prefill leg with this id has arrived. True when the id was released already: then nothing need be held."""
        entry = self._by_id.setdefault(hand_over, _HandOver())
        if entry.released_at is not None:
            return True
        entry.requests.add(request_id)
        self._of_request[request_id] = hand_over
        return False

    def release(self, hand_over: str, now: float) -> frozenset[str]:
        """Release the id, also for requests that arrive later. The requests that carry it and were not removed."""
        entry = self._by_id.setdefault(hand_over, _HandOver())
        if entry.released_at is None:
            entry.released_at = now
        self._by_id.move_to_end(hand_over)
        self._forget(now)
        return frozenset(entry.requests)

    def is_released(self, request_id: str) -> bool:
        """Whether this request's id was released while it ran."""
        entry = self._by_id.get(self._of_request.get(request_id, ""))
        return entry is not None and entry.released_at is not None

    def remove(self, request_id: str) -> None:
        """The request holds nothing any more."""
        hand_over = self._of_request.pop(request_id, None)
        entry = self._by_id.get(hand_over) if hand_over is not None else None
        if entry is None or hand_over is None:
            return
        entry.requests.discard(request_id)
        if not entry.requests and entry.released_at is None:
            del self._by_id[hand_over]

    def _forget(self, now: float) -> None:
        """Drop released ids that are too old or too many, oldest first; ids that unfinished requests carry stay."""
        excess = len(self._by_id) - self._capacity
        forgotten: list[str] = []
        for hand_over, entry in self._by_id.items():
            if entry.requests:
                continue
            old = entry.released_at is not None and now - entry.released_at > self._memory
            if not old and len(forgotten) >= excess:
                break
            forgotten.append(hand_over)
        for hand_over in forgotten:
            del self._by_id[hand_over]


@dataclass(frozen=True, slots=True)
class LeaseOrders:
    """For the workers, with the next step.

    readers: new leases, by request id, with their number of readers. releases: leases to end now.
    aliases: alias → request id, of prefill legs that have arrived. retired: request ids whose alias is no longer valid.
    dropped: requests that ended without a ticket. returned: nonces of tickets that were given back, by request id.
    """

    readers: dict[str, int]
    releases: frozenset[str]
    aliases: dict[str, str]
    retired: frozenset[str]
    dropped: frozenset[str]
    returned: dict[str, set[str]]


class TicketIssuer:
    """Every prefill leg that asked for a ticket, from its arrival until its blocks are free.

    `make_alias` returns an unguessable name of at least 16 letters, digits, `-` and `_`.
    """

    def __init__(
        self,
        *,
        leases: LeaseTable,
        hand_overs: HandOverIds,
        counters: Counters,
        keys: Sequence[bytes],
        block_sizes: tuple[int, ...],
        make_alias: Callable[[], str],
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._leases = leases
        self._hand_overs = hand_overs
        self._counters = counters
        self._keys = keys
        self._block_sizes = block_sizes
        self._make_alias = make_alias
        self._now = now
        self._wall = wall
        self.fingerprint = Fingerprint()
        """This node's; it goes into every ticket."""
        self._aliases = Aliases()
        self._new_aliases: dict[str, str] = {}
        self._retired: set[str] = set()
        self._dropped: set[str] = set()
        self._readers: dict[str, int] = {}
        self._new_leases: dict[str, int] = {}
        self._releases: set[str] = set()
        self._returned: dict[str, set[str]] = {}

    def on_new_request(self, request_id: str, action: IssueTicket) -> bool:
        """A prefill leg has arrived. False when its hand-over was released before: compute, but hold nothing."""
        if action.hand_over is not None and self._hand_overs.add(action.hand_over, request_id):
            return False
        self._readers[request_id] = action.readers
        # The workers get the alias with the step that first computes the request, or before.
        alias = self._make_alias()
        self._aliases.bind(alias, request_id)
        self._new_aliases[alias] = request_id
        return True

    def release(self, hand_over: str) -> None:
        """End everything under this id: leases in the next step, running requests at their end, later ones on arrival.

        The order goes to the workers with the step's metadata (`pop_orders`). They end the lease
        (`worker.ConnectorWorker._get_new_notifs`), and vLLM's scheduler then frees the blocks.
        """
        for request_id in self._hand_overs.release(hand_over, self._now()):
            alias = self._aliases.alias(request_id)
            if alias is not None and self._leases.request_release(alias):
                self._releases.add(request_id)

    def take_back(self, alias: str, nonce: str) -> None:
        """A decode node gives the ticket back: the workers count it as read."""
        request_id = self._aliases.request_id(alias)
        if request_id is not None and self._leases.holds(alias):
            self._returned.setdefault(request_id, set()).add(nonce)

    def is_wanted(self, request_id: str) -> bool:
        """Whether the request, now ending, asked for a ticket, and its hand-over was not released."""
        return request_id in self._readers and not self._hand_overs.is_released(request_id)

    def issue(self, request_id: str, stock: Mapping[str, Any], digest: str) -> dict[str, Any]:
        """Open a lease. The signed ticket, made from `stock`, which is what vLLM's own connector would answer."""
        readers, alias = self._readers[request_id], self._aliases.alias(request_id)
        if alias is None:
            raise KeyError(request_id)
        self._leases.open(alias, readers=readers, now=self._now())
        self._new_leases[request_id] = readers
        ticket = Ticket(
            engine_id=stock["remote_engine_id"],
            request_id=alias,
            host=stock["remote_host"],
            port=stock["remote_port"],
            tp_size=stock["tp_size"],
            dcp_size=stock["dcp_size"],
            pp_size=stock["pp_size"],
            num_tokens=stock["remote_num_tokens"],
            block_ids=tuple(tuple(ids) for ids in stock["remote_block_ids"]),
            block_sizes=self._block_sizes,
            registration=stock.get("remote_registration_generation"),
            readers=readers,
            issued_at=round(self._wall(), 3),
            digest=digest,
            fingerprint=self.fingerprint,
        )
        return wire(ticket, self._keys)

    def drop(self, request_id: str) -> None:
        """The request ended without a ticket; nothing is held."""
        self._dropped.add(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._readers.pop(request_id, None)
        self._hand_overs.remove(request_id)
        alias = self._aliases.alias(request_id)
        if alias is not None:
            self._aliases.forget(request_id)
            self._new_aliases.pop(alias, None)
            self._retired.add(request_id)

    def on_reads_seen(self, reads_seen: Mapping[str, Mapping[str, int]]) -> None:
        """Completed reads that the workers report; before `on_finished_sending` of the same step."""
        for request_id, reads in reads_seen.items():
            alias = self._aliases.alias(request_id)
            if alias is not None:
                self._leases.record_reads(alias, reads)

    def on_finished_sending(self, request_ids: Iterable[str]) -> None:
        """Record that these requests' leases have ended. vLLM frees the blocks next (`Scheduler._free_blocks`).

        The workers say which have ended: all readers have read, a release was ordered, or nobody has read within
        `kv_lease_duration` (`_reap_expired_send_leases` of vLLM's NIXL worker).
        """
        for request_id in request_ids:
            alias = self._aliases.alias(request_id)
            ended = None if alias is None else self._leases.end(alias, self._now())
            self._forget(request_id)
            if ended is not None:
                self._counters.lease_ended(ended.ending, ended.held_for)

    def pop_orders(self) -> LeaseOrders:
        """Everything for the workers since the last call."""
        orders = LeaseOrders(
            self._new_leases,
            frozenset(self._releases),
            self._new_aliases,
            frozenset(self._retired),
            frozenset(self._dropped),
            self._returned,
        )
        self._new_leases, self._releases, self._new_aliases = {}, set(), {}
        self._retired, self._dropped, self._returned = set(), set(), {}
        return orders
