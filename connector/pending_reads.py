"""The reads of one decode rank, from the order to the verdict. Pure: time is passed in, seconds, monotonic.

    ordered ──► posted ──► landed ──► judged          (verified, unverified, not held)
       │           └──────► failed                    (the transfer said so)
       └──────────────────► failed                    (the peer could not be reached)
    ordered, posted ──► given up, at the deadline ──► failed
    posted ──► given up, when the peer shows no sign of life ──► failed

A verdict that does not come in time is asked for once more, with the same nonce, before the read counts for nothing:
the read's own notice may have ended the lease, so nothing could be read again, but the prefill node remembers how it
ended. A good answer is as good as in time: blocks that were held then, or released by this very read, held the bytes.

While a read is under way, its peer is asked now and then, with nonces of no meaning (*probes*): any answer is a sign
of life, and none in time means that a stopped or vanished peer will never send the rest.
A read that is given up after it was posted is *stalled*: its transfer may still write, so its local blocks must
outlive the request. Its handle is never released while it is live, since a release does not prove that the
network card has stopped; it is polled until the transfer reports its end, and only then are the blocks let go.


Tickets that a decode rank gives back: notices without a read, until the prefill node has them. Pure: time passed in.

A notice can be sent only to a node with which a handshake was made. To one that is not known, or was silent when its
read was given up, it is not forced: the node is asked, off the engine's thread, whether it still holds the lease.

    ordered ──► sent                                  (the node is known)
    ordered ──► asked ──► held ──► handshake ──► sent
                  │         └── not held: nothing to give back
                  └── no answer: asked again, every `ASK_EVERY` seconds, for at most `within` seconds
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from typing import Any

from connector.kv_groups import ReadSize
from connector.messages import Question, Verdict
from connector.metadata import ReadEnd, ReadOutcome
from connector.peers import Address
from connector.verifier import ReadVerdict

PROBE_EVERY = 1.0
"""Seconds without news of a read. Most reads are over sooner."""


class _Stage(Enum):
    ORDERED = auto()
    POSTED = auto()
    LANDED = auto()


@dataclass(slots=True)
class _PendingRead:
    question: Question
    address: Address
    size: ReadSize
    since: float
    stage: _Stage = _Stage.ORDERED
    given_up: bool = False
    probes: int = 0
    heard: float = 0.0
    probing: bool = False
    silent: bool = False
    asked_again: bool = False


@dataclass(frozen=True, slots=True)
class OverdueRead:
    """A read to give up. `live`: it was posted, so that its transfer may go on."""

    request_id: str
    engine_id: str
    nonce: str
    live: bool


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The end of one read, the seconds from its last byte to its verdict, and the bytes that a local hit spared it."""

    request_id: str
    end: ReadEnd
    verify_seconds: float
    spared: int


class PendingReads:
    """Every read that this rank was ordered to do and has not reported. `deadline`: from the order to the last byte."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._flights: dict[str, _PendingRead] = {}
        self._by_nonce: dict[str, str] = {}
        self._probes: dict[str, str] = {}
        self._unanswered: dict[Address, list[Question]] = {}

    def __len__(self) -> int:
        """How many reads are not over."""
        return len(self._flights)

    def begin(self, request_id: str, question: Question, address: Address, size: ReadSize, now: float) -> None:
        """A read is ordered; an earlier one of the same request must be over."""
        self._flights[request_id] = _PendingRead(question, address, size, now)
        self._by_nonce[question.nonce] = request_id

    def posted(self, request_id: str, now: float) -> None:
        """The transfer is under way."""
        flight = self._flights[request_id]
        flight.stage, flight.heard = _Stage.POSTED, now

    def probes(self, now: float) -> dict[Address, list[Question]]:
        """Whom to ask for a sign of life, for reads that take long; the answer comes to `judged`."""
        asked: dict[Address, list[Question]] = {}
        for request_id, flight in self._flights.items():
            under_way = flight.stage is _Stage.POSTED and not flight.given_up
            if under_way and not flight.probing and now - flight.heard >= PROBE_EVERY:
                asked.setdefault(flight.address, []).append(self._probe(request_id, flight))
        return asked

    def overdue(self, now: float) -> list[OverdueRead]:
        """Reads whose last byte has not come in time, or never will, each told once; `failed` must follow."""
        late = []
        for request_id, flight in self._flights.items():
            waiting = flight.stage is not _Stage.LANDED and not flight.given_up
            if waiting and (flight.silent or now - flight.since >= self._deadline):
                flight.given_up = True
                asked = flight.question
                late.append(OverdueRead(request_id, asked.engine_id, asked.nonce, flight.stage is _Stage.POSTED))
        return late

    def failed(self, request_id: str) -> ReadEnd:
        """The read is over without its bytes."""
        flight = self._over(request_id)
        if flight.stage is _Stage.ORDERED:
            outcome = ReadOutcome.PEER_UNREACHABLE
        else:
            outcome = ReadOutcome.NO_PROGRESS if flight.given_up else ReadOutcome.TRANSFER_FAILED
        return ReadEnd(flight.question.nonce, outcome)

    def landed(self, request_ids: Iterable[str], now: float) -> dict[Address, list[Question]]:
        """The last byte is here: what must be asked, and whom, before the requests may run."""
        asked: dict[Address, list[Question]] = {}
        for request_id in request_ids:
            flight = self._flights[request_id]
            flight.stage, flight.since = _Stage.LANDED, now
            asked.setdefault(flight.address, []).append(flight.question)
        return asked

    def awaits_verdict(self) -> bool:
        """Whether any read has landed and is not judged."""
        return any(flight.stage is _Stage.LANDED for flight in self._flights.values())

    def judged(self, judged: ReadVerdict, now: float) -> ReadResult | None:
        """The verdict is here. None when no read waits for it, as for the answer to a probe, or when it is to be asked
        for again (see `unanswered`)."""
        if (probed := self._probes.pop(judged.nonce, None)) is not None:
            self._probed(probed, judged, now)
            return None
        request_id = self._by_nonce.get(judged.nonce)
        if request_id is None or self._flights[request_id].stage is not _Stage.LANDED:
            return None
        if judged.verdict is None and not self._flights[request_id].asked_again:
            self._ask_again(self._flights[request_id])
            return None
        flight = self._over(request_id)
        outcome = _outcome(judged.verdict)
        size = flight.size if outcome is ReadOutcome.VERIFIED else ReadSize()
        end = ReadEnd(judged.nonce, outcome, size.attention, size.state)
        return ReadResult(request_id, end, now - flight.since, size.spared)

    def unanswered(self) -> dict[Address, list[Question]]:
        """What to ask once more, each told once; the answers come to `judged`."""
        asked, self._unanswered = self._unanswered, {}
        return asked

    def _ask_again(self, flight: _PendingRead) -> None:
        flight.asked_again = True
        self._unanswered.setdefault(flight.address, []).append(flight.question)

    def _probe(self, request_id: str, flight: _PendingRead) -> Question:
        flight.probing, flight.probes = True, flight.probes + 1
        probe = replace(flight.question, nonce=f"{flight.question.nonce}?{flight.probes}")
        self._probes[probe.nonce] = request_id
        return probe

    def _probed(self, request_id: str, judged: ReadVerdict, now: float) -> None:
        flight = self._flights.get(request_id)
        if flight is not None and judged.nonce == f"{flight.question.nonce}?{flight.probes}":
            flight.probing, flight.heard, flight.silent = False, now, judged.verdict is None

    def _over(self, request_id: str) -> _PendingRead:
        flight = self._flights.pop(request_id)
        del self._by_nonce[flight.question.nonce]
        return flight


def _outcome(verdict: Verdict | None) -> ReadOutcome:
    if verdict is None:
        return ReadOutcome.UNVERIFIED
    return ReadOutcome.VERIFIED if verdict.good else ReadOutcome.NOT_HELD


ASK_EVERY = 1.0
"""Seconds between two questions to a silent node, and before a handshake is begun again."""
MOST_OPEN = 4096
"""Tickets to give back at a time; of more, the oldest is left to its expiry."""


class ReturnOutcome(StrEnum):
    """How giving a ticket back ended; the values are the metric's labels."""

    SENT = "sent"
    NOT_HELD = "not_held"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class TicketReturn:
    """One ticket to give back. `order` is opaque: what the caller needs to send the notice."""

    question: Question
    address: Address
    order: Any

    @property
    def nonce(self) -> str:
        """Names it, on every rank."""
        return self.question.nonce


@dataclass(slots=True)
class _Open:
    given: TicketReturn
    since: float
    due: float
    questions: int = 0
    asking: bool = False


class TicketReturns:
    """Every notice without a read that this rank was ordered to send. `within`: how long a silent node is asked."""

    def __init__(self, within: float) -> None:
        self._within = within
        self._open: dict[str, _Open] = {}
        self._asked: dict[str, str] = {}

    def __len__(self) -> int:
        """How many are not over."""
        return len(self._open)

    def __contains__(self, nonce: str) -> bool:
        return nonce in self._open

    def begin(self, given: TicketReturn, now: float) -> None:
        """A notice is ordered, and due at once."""
        self._open[given.nonce] = _Open(given, now, now)

    def overdue(self, now: float) -> list[TicketReturn]:
        """Those whose node was silent for too long, and the oldest of too many; `over` must follow."""
        excess = len(self._open) - MOST_OPEN
        return [
            each.given for at, each in enumerate(self._open.values()) if at < excess or now - each.since >= self._within
        ]

    def due(self, now: float) -> list[TicketReturn]:
        """Those to send or to ask for now; each comes again after `ASK_EVERY`, if it is not over by then."""
        found = [each for each in self._open.values() if each.due <= now and not each.asking]
        for each in found:
            each.due = now + ASK_EVERY
        return [each.given for each in found]

    def ask(self, given: TicketReturn) -> dict[Address, list[Question]]:
        """The question whether the lease is held, and whom to ask; the answer comes to `answered`."""
        each = self._open[given.nonce]
        each.questions, each.asking = each.questions + 1, True
        asked = replace(given.question, nonce=f"{given.nonce}!{each.questions}")
        self._asked[asked.nonce] = given.nonce
        return {given.address: [asked]}

    def answered(self, judged: ReadVerdict, now: float) -> tuple[TicketReturn, Verdict | None] | None:
        """Which ticket a question of `ask` was about, and what the node says; None for every other answer."""
        each = self._open.get(self._asked.pop(judged.nonce, ""))
        if each is None:
            return None
        each.asking, each.due = False, now + ASK_EVERY
        return each.given, judged.verdict

    def over(self, nonce: str) -> None:
        """Sent, needless, or given up."""
        self._open.pop(nonce, None)
