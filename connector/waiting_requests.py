"""Requests on a decode node that wait for their ticket, and deliveries that came before their request. Pure: times are
passed in, monotonic seconds.

    begin ──► its ticket is there already (it may overtake the request: a long prompt takes time to tokenize)
          ├── too many wait: the request computes
          └── waits ──► deliver      the ticket, or that there is none
                    ├── must_wait    the deadline is over: it computes
                    └── end          the client is gone, or another connector had as much

A ticket comes by two ways: from the prefill node directly, and from the proxy. The first one counts. What comes
directly can only give a request its ticket: what is wrong with it, too late or for nobody has no consequence, since the
proxy's delivery follows. That one alone tells a request to compute, and has tickets given back.

A delivery is kept for `KEEP` seconds, also one that was for a waiting request: the samples of one request all wait
under one id, and some may arrive after it. Of waits that ended otherwise the id is remembered, so that a ticket that
comes too late is given back at once, and not when its lease ends.

vLLM looks a request up in its prefix cache in every step before it asks whether the request may run: 0.1 ms for 3,500
tokens in blocks of 16, in which nobody's token is computed. So a waiting request is marked as one that is not looked up
(`skip_reading_prefix_cache`), but for the moment in which vLLM asks, since it would run one that is marked.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from connector.counters import Counters, WaitEnd
from connector.ticket import Ticket
from connector.ticket_fields import Refusal
from connector.transfer_params import AwaitTicket, ComputeLocally, DeliverTicket, DeliveryWay, ReadTicket

KEEP = 30.0
"""Seconds that a delivery is kept: as long as the lease of a ticket that nobody renews."""

MOST_BLOCKS = 1 << 20
"""In all tickets that came directly and are kept: without keys anybody who reaches the side channel can send some."""

Settled = ReadTicket | Refusal | ComputeLocally
"""What a request does that waits no longer."""
_ENDS = {ReadTicket: WaitEnd.TICKET, Refusal: WaitEnd.REFUSED, ComputeLocally: WaitEnd.NO_TICKET}


@dataclass(frozen=True, slots=True)
class Delivered:
    """The requests that a delivery is for, with what each does now; `too_late`: how many will not read its ticket."""

    requests: tuple[tuple[Any, Settled], ...] = ()
    too_late: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Any
    wait: str
    since: float
    deadline: float


@dataclass(frozen=True, slots=True)
class _Kept:
    delivery: DeliverTicket
    until: float


@dataclass(slots=True)
class _Direct:
    """A ticket that came directly, and how many requests have it."""

    ticket: Ticket
    until: float
    taken: int = 0

    @property
    def blocks(self) -> int:
        """How many blocks the ticket names."""
        return sum(map(len, self.ticket.block_ids))

    def is_another(self, ticket: Ticket) -> bool:
        """Whether they name different blocks: the proxy had the prompt prefilled a second time."""
        mine = (self.ticket.engine_id, self.ticket.request_id)
        return mine != (ticket.engine_id, ticket.request_id)


@dataclass(slots=True)
class WaitingRequests:
    """The waits of one engine. `most` bounds waiting requests, kept deliveries of each way and remembered ids;
    `longest`: a wait, in seconds. `fit` says whether a ticket is for a request."""

    most: int
    longest: float
    fit: Callable[[Any, Ticket | Refusal], ReadTicket | Refusal]
    counters: Counters
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _by_wait: dict[str, dict[str, _Waiting]] = field(default_factory=dict)
    _kept: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)
    _direct: OrderedDict[str, _Direct] = field(default_factory=OrderedDict)
    _direct_blocks: int = 0
    _missed: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counters.waiting_requests(0)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def remembered(self) -> int:
        """How many deliveries and ids are kept."""
        return len(self._kept) + len(self._direct) + len(self._missed)

    def begin(self, request: Any, order: AwaitTicket, now: float) -> AwaitTicket | Settled:
        """The order itself if the request waits; else what it does at once."""
        self._drop_old(now)
        kept = self._kept.get(order.wait)
        if kept is not None:
            return self._settle(request, kept.delivery, 0.0)
        if (read := self._take_direct(order.wait, request, 0.0)) is not None:
            return read
        if len(self) >= self.most:
            self._miss(order.wait)
            self.counters.ticket_wait_ended(WaitEnd.TOO_MANY, 0.0)
            return ComputeLocally()
        waiting = _Waiting(request, order.wait, now, now + min(order.seconds, self.longest))
        self._waiting[request.request_id] = waiting
        self._by_wait.setdefault(order.wait, {})[request.request_id] = waiting
        request.skip_reading_prefix_cache = True
        self.counters.waiting_requests(len(self))
        return order

    def deliver(self, delivery: DeliverTicket, now: float) -> Delivered:
        """The proxy's: every request that waits under this id is settled. Another one changes nothing."""
        self._drop_old(now)
        known = delivery.wait in self._kept
        self.counters.ticket_delivered(DeliveryWay.PROXY, first=not known and delivery.wait not in self._direct)
        if known:
            return Delivered()
        self._kept[delivery.wait] = _Kept(delivery, now + KEEP)
        if len(self._kept) > self.most:
            self._kept.popitem(last=False)
        found = list(self._by_wait.get(delivery.wait, {}).values())
        for waiting in found:
            self._remove(waiting)
        settled = [(each.request, self._settle(each.request, delivery, now - each.since)) for each in found]
        missed, ticket = self._missed.pop(delivery.wait, 0), delivery.ticket
        if not isinstance(ticket, Ticket):
            return Delivered(tuple(settled))
        return Delivered(tuple(settled), missed + self._have_another(delivery.wait, ticket))

    def deliver_directly(self, wait: str, ticket: Ticket, now: float) -> tuple[tuple[Any, ReadTicket], ...]:
        """The prefill node's: the requests that wait under this id, and that the ticket fits, with what they do now."""
        self._drop_old(now)
        first = wait not in self._kept and wait not in self._direct
        self.counters.ticket_delivered(DeliveryWay.DIRECT, first=first)
        if not first:
            return ()
        self._keep_direct(wait, _Direct(ticket, now + KEEP))
        reads = [(each, self._end_directly(each, now)) for each in tuple(self._by_wait.get(wait, {}).values())]
        return tuple((each.request, read) for each, read in reads if read is not None)

    def must_wait(self, request_id: str, now: float) -> bool:
        """Whether vLLM shall ask again in the next step. So it shall at the deadline, which ends the wait: then it has
        looked the request up."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        waiting.request.skip_reading_prefix_cache = False
        self._asked.append(request_id)
        if now >= waiting.deadline:
            self.end(request_id, WaitEnd.DEADLINE, now)
        return True

    def on_step_planned(self) -> None:
        """vLLM has asked for whom it wanted to; in the next step it shall not look up those that still wait."""
        for request_id in self._asked:
            if request_id in self._waiting:
                self._waiting[request_id].request.skip_reading_prefix_cache = True
        self._asked.clear()

    def end(self, request_id: str, how: WaitEnd, now: float) -> bool:
        """End a wait without a ticket, if there is one; whether there was."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        self._remove(waiting)
        self._miss(waiting.wait)
        self.counters.ticket_wait_ended(how, now - waiting.since)
        return True

    def _end_directly(self, waiting: _Waiting, now: float) -> ReadTicket | None:
        """The mark is ours: no ticket fits a request that has it from its client."""
        request, marked = waiting.request, waiting.request.skip_reading_prefix_cache
        request.skip_reading_prefix_cache = False
        read = self._take_direct(waiting.wait, request, now - waiting.since)
        if read is None:
            request.skip_reading_prefix_cache = marked
        else:
            self._remove(waiting)
        return read

    def _take_direct(self, wait: str, request: Any, waited: float) -> ReadTicket | None:
        direct = self._direct.get(wait)
        read = None if direct is None else self.fit(request, direct.ticket)
        if direct is None or not isinstance(read, ReadTicket):
            return None
        direct.taken += 1
        self.counters.ticket_wait_ended(WaitEnd.TICKET, waited)
        return read

    def _have_another(self, wait: str, ticket: Ticket) -> int:
        """How many requests under this id have another ticket, which came directly, so that they will not read this."""
        direct = self._direct.get(wait)
        return direct.taken if direct is not None and direct.is_another(ticket) else 0

    def _keep_direct(self, wait: str, direct: _Direct) -> None:
        self._direct[wait] = direct
        self._direct_blocks += direct.blocks
        while len(self._direct) > max(1, self.most) or self._direct_blocks > max(MOST_BLOCKS, direct.blocks):
            self._drop_direct()

    def _drop_direct(self) -> None:
        _, dropped = self._direct.popitem(last=False)
        self._direct_blocks -= dropped.blocks

    def _settle(self, request: Any, delivery: DeliverTicket, waited: float) -> Settled:
        settled = ComputeLocally() if delivery.ticket is None else self.fit(request, delivery.ticket)
        self.counters.ticket_wait_ended(_ENDS[type(settled)], waited)
        return settled

    def _remove(self, waiting: _Waiting) -> None:
        request_id = waiting.request.request_id
        waiting.request.skip_reading_prefix_cache = False
        del self._waiting[request_id]
        del self._by_wait[waiting.wait][request_id]
        if not self._by_wait[waiting.wait]:
            del self._by_wait[waiting.wait]
        self.counters.waiting_requests(len(self))

    def _miss(self, wait: str) -> None:
        self._missed[wait] = self._missed.get(wait, 0) + 1
        if len(self._missed) > self.most:
            self._missed.popitem(last=False)

    def _drop_old(self, now: float) -> None:
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._kept.popitem(last=False)
        while self._direct and next(iter(self._direct.values())).until <= now:
            self._drop_direct()
