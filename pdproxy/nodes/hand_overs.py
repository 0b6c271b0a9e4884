"""Which pairs of nodes hand prompts over in vain: the decode node gets a ticket, and computes the prompt all the same.

Fingerprints and the known-answer test keep most of such pairs apart before they serve. Whatever else makes tickets
useless, such as two tokenizers that differ in some words, shows in what became of them. Pure: times are arguments.

    of the last `LAST` tickets of a pair 9 in 10 were of no use ──► barred
    barred for 30 s, then 60 s, … 10 min ──► the known-answer test
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
from pdproxy.nodes.outlier import LATELY, Source

LAST = 50
"""Tickets of a pair that are looked at."""
LAST_ON_TRIAL = 10
USELESS = 0.9
"""The part of them that bars the pair."""


@dataclasses.dataclass(frozen=True, slots=True)
class _InVain:
    """A ticket that was of no use: whose it was, and a name of its prompt."""

    client: str
    prompt: str


@dataclasses.dataclass(slots=True)
class _Tickets:
    """The last ones of a pair.

    Attributes:
        last: None for each that was of use.
        barred: why; kept while the pair is on trial.
    """

    last: collections.deque[_InVain | None] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=LAST))
    barred: Unpassed | None = None
    on_trial: bool = False


class HandOvers:
    """What became of tickets, by pair.

    Attributes:
        changed: other pairs than before are barred, since whoever bars them set this to False.
    """

    def __init__(self) -> None:
        self._tickets: dict[Pair, _Tickets] = {}
        self._served: dict[str, float] = {}
        """Clients with names, and when a ticket of each was last of use, in monotonic seconds."""
        self.changed = False

    def used(self, pair: Pair, client: str, now: float) -> None:
        """The decode node used a ticket."""
        tickets = self._of(pair)
        tickets.last.append(None)
        if client:
            self._served[client] = now
        if tickets.on_trial and len(tickets.last) == LAST:
            tickets.barred, tickets.on_trial = None, False

    def in_vain(self, pair: Pair, source: Source, prompt: str, now: float) -> None:
        """The decode node computed the prompt though it had a ticket; ``prompt``: equal for equal prompts, or ""."""
        tickets = self._of(pair)
        ticket = _InVain(source.client, prompt or f"{source.session or source.request}")
        if ticket in tickets.last:
            return
        tickets.last.append(ticket)
        if (tickets.barred is None or tickets.on_trial) and (why := self._why_useless(pair, tickets, now)):
            tickets.barred, tickets.on_trial = next_try(tickets.barred, why, now), False
            self.changed = True

    def due(self, now: float) -> list[Pair]:
        """Barred pairs that are to be tested now."""
        return [pair for pair, why in self._barred().items() if why.due <= now]

    def passed(self, pair: Pair) -> None:
        """The pair passed the known-answer test."""
        tickets = self._tickets.get(pair)
        if tickets is not None and tickets.barred is not None and not tickets.on_trial:
            tickets.on_trial = True
            tickets.last.clear()

    def not_passed(self, pair: Pair, now: float) -> None:
        """It did not, or could not be asked."""
        tickets = self._tickets.get(pair)
        if tickets is not None and tickets.barred is not None and not tickets.on_trial:
            tickets.barred = next_try(tickets.barred, tickets.barred.why, now)

    def restart(self, name: str) -> None:
        """The node joins, and may be another one than before."""
        self._tickets = {pair: tickets for pair, tickets in self._tickets.items() if name not in pair}

    def keep_only(self, names: frozenset[str]) -> None:
        """Forget nodes that have left."""
        self._tickets = {pair: tickets for pair, tickets in self._tickets.items() if names.issuperset(pair)}

    def bars(self) -> Mapping[Pair, str]:
        """The pairs that exchange no tickets, and why."""
        return {pair: unpassed.why for pair, unpassed in self._barred().items()}

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
            f"{pair[1]} computed the prompts of {len(in_vain)} of the last {most} tickets of {pair[0]} itself: the log"
            f" of {pair[1]}, and its pdproxy_connector_refused_total and pdproxy_connector_reads_total, say why"
        )
