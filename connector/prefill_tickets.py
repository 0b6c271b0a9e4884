"""Which requests a hand-over id names, and which ids were released: before, during or after the prefill.

Pure: time is passed in, in seconds. What is not held by a living request is remembered for `memory` seconds, and at
most `capacity` ids, the oldest forgotten first.


The prefill node's side of hand-overs, in its scheduler's process: tickets given out, leases, releases.

It decides; `scheduler_side` carries out. Times come from the two clocks passed in: `now` is monotonic, for leases;
`wall` is unix seconds, for what a ticket says to another machine.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from connector.fingerprint import Fingerprint
from connector.leases import Aliases, LeaseTable
from connector.stats import Counters
from connector.ticket import Ticket, wire
from connector.transfer_params import IssueTicket


@dataclass(slots=True)
class _HandOver:
    """One id: the requests that carry it, and whether it was released."""

    requests: set[str] = field(default_factory=set)
    released_at: float | None = None


class HandOvers:
    """The hand-overs that one prefill node knows."""

    def __init__(self, *, memory: float, capacity: int) -> None:
        self._memory = memory
        self._capacity = capacity
        self._by_id: OrderedDict[str, _HandOver] = OrderedDict()
        self._of_request: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def arrive(self, hand_over: str, request_id: str) -> bool:
        """A prefill with this id has come. True when it was released already: then it need not be held."""
        entry = self._by_id.setdefault(hand_over, _HandOver())
        if entry.released_at is not None:
            return True
        entry.requests.add(request_id)
        self._of_request[request_id] = hand_over
        return False

    def release(self, hand_over: str, now: float) -> frozenset[str]:
        """Release the id. Returns the requests that carry it and have not left; a later one will be told."""
        entry = self._by_id.setdefault(hand_over, _HandOver())
        if entry.released_at is None:
            entry.released_at = now
        self._by_id.move_to_end(hand_over)
        self._forget(now)
        return frozenset(entry.requests)

    def released(self, request_id: str) -> bool:
        """Whether this request's id was released while it ran."""
        entry = self._by_id.get(self._of_request.get(request_id, ""))
        return entry is not None and entry.released_at is not None

    def leave(self, request_id: str) -> None:
        """Nothing of this request is held any more."""
        hand_over = self._of_request.pop(request_id, None)
        entry = self._by_id.get(hand_over) if hand_over is not None else None
        if entry is None or hand_over is None:
            return
        entry.requests.discard(request_id)
        if not entry.requests and entry.released_at is None:
            del self._by_id[hand_over]

    def _forget(self, now: float) -> None:
        """Drop released ids that are too old or too many, oldest first; ids that living requests carry stay."""
        excess = len(self._by_id) - self._capacity
        dead: list[str] = []
        for hand_over, entry in self._by_id.items():
            if entry.requests:
                continue
            old = entry.released_at is not None and now - entry.released_at > self._memory
            if not old and len(dead) >= excess:
                break
            dead.append(hand_over)
        for hand_over in dead:
            del self._by_id[hand_over]


@dataclass(frozen=True, slots=True)
class LeaseOrders:
    """For the workers: new leases with their number of readers, leases to end now, and what aliases mean.

    `aliases`: alias → request id, of prefill legs that have arrived. `retired`: request ids whose alias is over.
    """

    readers: dict[str, int]
    releases: frozenset[str]
    aliases: dict[str, str]
    retired: frozenset[str]


class TicketIssuer:
    """Every request that was asked for a ticket, from its arrival until its blocks are free.

    `make_alias` gives unguessable names of 16 letters or more, digits, - and _.
    """

    def __init__(
        self,
        *,
        leases: LeaseTable,
        hand_overs: HandOvers,
        accounts: Counters,
        keys: tuple[bytes, ...],
        block_sizes: tuple[int, ...],
        make_alias: Callable[[], str],
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._leases = leases
        self._hand_overs = hand_overs
        self._accounts = accounts
        self._keys = keys
        self._block_sizes = block_sizes
        self._make_alias = make_alias
        self.fingerprint = Fingerprint()
        """Of this node; into every ticket."""

        self._now = now
        self._wall = wall
        self._aliases = Aliases()
        self._new_aliases: dict[str, str] = {}
        self._retired: set[str] = set()
        self._readers: dict[str, int] = {}
        self._new: dict[str, int] = {}
        self._releases: set[str] = set()

    def arrive(self, request_id: str, order: IssueTicket) -> bool:
        """A prefill leg has come. False when its hand-over was released before: compute, but hold nothing."""
        if order.hand_over is not None and self._hand_overs.arrive(order.hand_over, request_id):
            return False
        self._readers[request_id] = order.readers
        self._name(request_id)
        return True

    def _name(self, request_id: str) -> None:
        """Give it its alias; the workers learn it with the step that first computes the request, or before."""
        alias = self._make_alias()
        self._aliases.bind(alias, request_id)
        self._new_aliases[alias] = request_id

    def release(self, hand_over: str) -> None:
        """Let go of everything under this id: leases now, running requests at their end, later ones on arrival."""
        for request_id in self._hand_overs.release(hand_over, self._now()):
            alias = self._aliases.alias(request_id)
            if alias is not None and self._leases.ask_release(alias):
                self._releases.add(request_id)

    def wanted(self, request_id: str) -> bool:
        """Whether the request, now ending, still has a taker."""
        return request_id in self._readers and not self._hand_overs.released(request_id)

    def issue(self, request_id: str, stock: Mapping[str, Any], digest: str) -> dict[str, Any]:
        """Open a lease and make the ticket out of what vLLM's own connector would answer."""
        readers, alias = self._readers[request_id], self._aliases.alias(request_id)
        if alias is None:
            raise KeyError(request_id)
        self._leases.open(alias, readers=readers, now=self._now())
        self._new[request_id] = readers
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
        self._readers.pop(request_id, None)
        self._hand_overs.leave(request_id)
        alias = self._aliases.alias(request_id)
        if alias is not None:
            self._aliases.forget(request_id)
            self._new_aliases.pop(alias, None)
            self._retired.add(request_id)

    def hear(self, reads_seen: Mapping[str, Mapping[str, int]]) -> None:
        """The workers' news of completed reads; before `sent` of the same step."""
        for request_id, reads in reads_seen.items():
            alias = self._aliases.alias(request_id)
            if alias is not None:
                self._leases.note_reads(alias, reads)

    def sent(self, request_ids: Iterable[str]) -> None:
        """vLLM is about to free these requests' blocks."""
        for request_id in request_ids:
            alias = self._aliases.alias(request_id)
            ended = None if alias is None else self._leases.end(alias, self._now())
            self.drop(request_id)
            if ended is not None:
                self._accounts.lease_ended(ended.ending)
                self._accounts.lease_age_seconds(ended.held_for)

    def take_orders(self) -> LeaseOrders:
        """What the workers must hear with the next step; handed out once."""
        orders = LeaseOrders(self._new, frozenset(self._releases), self._new_aliases, frozenset(self._retired))
        self._new, self._releases, self._new_aliases, self._retired = {}, set(), {}, set()
        return orders
