"""Which pairs of nodes hand prompts over in vain: the decode node gets a ticket, and computes the prompt all the same.

The known-answer test finds most of them before they serve, and says why (`no_hand_over`): a decode node that cannot
reach the prefill node's address, a network that lets no reads pass. Whatever makes tickets useless later, or only some,
such as two tokenizers that differ in some words, shows in what became of them. Pure: times are arguments.

    the known-answer test, or a warm-up, handed nothing over ──────► barred, and it is known why
    of the last `LAST` tickets of a pair 9 in 10 were of no use ──► barred; the test is made at once to learn why
    barred for 30 s, then 60 s, … 10 min (`LONGEST` where nothing is handed over at all) ──► the known-answer test
        passed ──► on trial: of its next `LAST_ON_TRIAL` tickets 9 in 10 were of no use ──► barred, for twice as long
                             of `LAST` fewer ──► as if it had never been barred
        else   ──► barred, for twice as long

A client can have its own prompts recomputed on a good pair, so a ticket counts only where nothing that the client asked
for explains it (`UpstreamRequest`), and each prompt once. Where the tickets of another client were of use lately, those
of one client count up to half of what is needed: one client alone bars no pair.
"""

import collections
import dataclasses
from collections.abc import Mapping

from pdproxy.nodes.evidence import Pair, Unpassed, next_try
from pdproxy.nodes.outlier import LATELY, LegOrigin

LAST = 50
"""Tickets of a pair that are looked at."""
LAST_ON_TRIAL = 10
USELESS = 0.9
"""The part of them that bars the pair."""
LONGEST = 120.0
"""Seconds until a pair is tested again that hands nothing over: soon after its network is mended it is to be used."""
RECENT = 5
"""Minutes for which it is counted how many tickets were of use."""
ENOUGH, MANY = 20, 0.5
"""So many tickets of which such a part was of no use say that something is wrong, whichever pairs they were of."""


@dataclasses.dataclass(frozen=True, slots=True)
class _InVain:
    """A ticket that was of no use: whose it was, and a name of its prompt."""

    client: str
    prompt: str


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """How many tickets there were, and how many were of no use: the decode node computed their prompts."""

    tickets: int = 0
    in_vain: int = 0

    def plus(self, other: "Used") -> "Used":
        """Both together."""
        return Used(self.tickets + other.tickets, self.in_vain + other.in_vain)

    @property
    def share(self) -> float:
        """The part that was of no use."""
        return self.in_vain / self.tickets if self.tickets else 0.0

    @property
    def mostly_in_vain(self) -> bool:
        """Whether so many were of no use that something is wrong."""
        return self.tickets >= ENOUGH and self.share >= MANY


@dataclasses.dataclass(slots=True)
class _Tickets:
    """The last ones of a pair.

    Attributes:
        last: None for each that was of use.
        barred: why; kept while the pair is on trial.
        explained: a test was made since it was barred.
        minutes: how many tickets were of use, and of no use, in the last ones.
    """

    last: collections.deque[_InVain | None] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=LAST))
    barred: Unpassed | None = None
    on_trial: bool = False
    explained: bool = False
    minutes: dict[int, "Used"] = dataclasses.field(default_factory=dict)

    def count(self, useful: int, now: float) -> None:
        """One more ticket, and 1 where it was of use."""
        minute = int(now // 60)
        before = self.minutes.get(minute)
        if before is None:
            self.minutes = {each: used for each, used in self.minutes.items() if minute - each < RECENT}
            before = Used()
        self.minutes[minute] = Used(before.tickets + 1, before.in_vain + 1 - useful)


class HandOverResults:
    """Results of tickets, by pair of nodes.

    Attributes:
        changed: other pairs than before are barred, since whoever bars them set this to False.
    """

    def __init__(self) -> None:
        self._tickets: dict[Pair, _Tickets] = {}
        self._served: dict[str, float] = {}
        """Clients with names, and when a ticket of each was last of use, in monotonic seconds."""
        self.changed = False

    def ticket_used(self, pair: Pair, client: str, now: float) -> None:
        """The decode node used a ticket."""
        tickets = self._of(pair)
        tickets.last.append(None)
        tickets.count(1, now)
        if client:
            self._served[client] = now
        if tickets.on_trial and len(tickets.last) == LAST:
            tickets.barred, tickets.on_trial = None, False

    def ticket_in_vain(self, pair: Pair, origin: LegOrigin, prompt: str, now: float) -> None:
        """The decode node computed the prompt though it had a ticket; ``prompt``: equal for equal prompts, or ""."""
        tickets = self._of(pair)
        ticket = _InVain(origin.client, prompt or f"{origin.session or origin.request}")
        if ticket in tickets.last:
            return
        tickets.last.append(ticket)
        tickets.count(0, now)
        if (tickets.barred is None or tickets.on_trial) and (why := self._why_useless(pair, tickets, now)):
            tickets.barred, tickets.on_trial, tickets.explained = next_try(tickets.barred, why, now), False, False
            self.changed = True

    def not_handed_over(self, pair: Pair, why: str, now: float) -> None:
        """A prompt of the proxy's own was not handed over, and it is known why."""
        tickets = self._of(pair)
        if tickets.barred is not None and not tickets.explained:
            tickets.barred, self.changed = dataclasses.replace(tickets.barred, why=why), True
        else:
            tickets.barred, tickets.on_trial = next_try(tickets.barred, why, now, LONGEST), False
            self.changed = True
        tickets.explained = True

    def due(self, now: float) -> list[Pair]:
        """Barred pairs that are to be tested now."""
        return [pair for pair, why in self._barred().items() if why.due <= now or not self._tickets[pair].explained]

    def passed(self, pair: Pair) -> None:
        """The pair passed the known-answer test. Where that was to show why its tickets are of no use, it stays barred
        until the next test."""
        tickets = self._tickets.get(pair)
        if tickets is None or tickets.barred is None or tickets.on_trial:
            return
        if tickets.explained:
            tickets.on_trial = True
            tickets.last.clear()
            tickets.minutes.clear()
        tickets.explained = True

    def not_passed(self, pair: Pair, now: float) -> None:
        """The pair did not pass, or could not be asked."""
        tickets = self._tickets.get(pair)
        if tickets is None or tickets.barred is None or tickets.on_trial:
            return
        if tickets.explained:
            tickets.barred = next_try(tickets.barred, tickets.barred.why, now)
        tickets.explained = True

    def node_joins(self, name: str) -> None:
        """The node joins, and may be another one than before."""
        self._tickets = {pair: tickets for pair, tickets in self._tickets.items() if name not in pair}

    def keep_only(self, names: frozenset[str]) -> None:
        """Forget nodes that have left."""
        self._tickets = {pair: tickets for pair, tickets in self._tickets.items() if names.issuperset(pair)}

    def bars(self) -> Mapping[Pair, str]:
        """The pairs that exchange no tickets, and why."""
        return {pair: unpassed.why for pair, unpassed in self._barred().items()}

    def recent(self, now: float) -> Used:
        """Results of the tickets of the last `RECENT` minutes, of all pairs."""
        oldest, found = int(now // 60) - RECENT, Used()
        for tickets in self._tickets.values():
            for minute, used in tickets.minutes.items():
                found = found.plus(used) if minute > oldest else found
        return found

    def _of(self, pair: Pair) -> _Tickets:
        found = self._tickets.get(pair)
        if found is None:
            found = self._tickets[pair] = _Tickets()
        return found

    def _barred(self) -> dict[Pair, Unpassed]:
        return {
            pair: tickets.barred
            for pair, tickets in self._tickets.items()
            if tickets.barred is not None and not tickets.on_trial
        }

    def _why_useless(self, pair: Pair, tickets: _Tickets, now: float) -> str:
        """A sentence with the figures; "" where the pair is good."""
        most = LAST_ON_TRIAL if tickets.on_trial else LAST
        if len(tickets.last) < most:
            return ""
        in_vain = [ticket for ticket in list(tickets.last)[-most:] if ticket is not None]
        needed, by_client = USELESS * most, collections.Counter(ticket.client for ticket in in_vain)
        others = {client for client, at in self._served.items() if now - at <= LATELY}
        counted = sum(
            min(count, needed / 2) if client and others - {client} else count for client, count in by_client.items()
        )
        if counted < needed:
            return ""
        return (
            f"{pair[1]} computed the prompts of {len(in_vain)} of the last {most} tickets of {pair[0]} itself; the log"
            f" of {pair[1]}, and its pdproxy_connector_refused_total and pdproxy_connector_reads_total, say why"
        )
