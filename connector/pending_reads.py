"""The reads of one decode rank from order to verdict, and the tickets it gives back. Pure: time is passed in, seconds.

`PendingReads`:
    ordered ──► posted ──► completed ──► verified, unverified, not held
       │           └──────► failed                    (the transfer reported it; late, for want of any progress)
       └──────────────────► failed                    (the peer could not be reached)
    ordered, posted ──► given up, at the deadline, or when the peer of a posted read is silent ──► failed

A verdict that does not come in time is asked for once more, with the same nonce, before the read counts for nothing:
the read's own notif may have ended the lease, so nothing could be read again, but the prefill node remembers how it
ended. Late, a good answer is as good: blocks that were held then, or released by this very read, held the bytes.

While a read is under way, its peer is asked now and then, with nonces of no meaning (*probes*): any answer is a sign
of life, and none in time means that a stopped or vanished peer will never send the rest.
A read that is given up after it was posted is *stalled*: its transfer may still write, so its local blocks must
outlive the request. Its handle is never released while it is live, since a release does not prove that the network
card has stopped; it is polled until the transfer reports its end, and only then are the blocks let go.

`TicketReturns`, for tickets that are not read, or not any more. They go back over the side channel, so that neither a
handshake nor the path of the reads is needed.
    ordered ──► given back ──► answered: sent, or the lease was not held any more
                    └── no answer: given back again, every `ASK_EVERY` seconds
    not answered within `within` seconds ──► unreachable
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

from .counters import ReadOutcome
from .kv_groups import ReadSize
from .messages import Question, Verdict
from .metadata import ReadEnd
from .peers import Address
from .verifier import ReadVerdict

PROBE_EVERY = 1.0
"""Seconds without news of a read. Most reads are over sooner."""
ASK_EVERY = 1.0
"""Seconds after which a ticket is given back again to a node that did not answer."""
LATE_FAILURE = 3.0
"""A transfer that fails so many seconds after it was posted, or later, was given up by the network card or by UCX for
want of any answer (`config.TCP_LIMITS`), which is `no_progress` to an operator."""
MOST_RETURNS = 4096
"""Tickets to give back at a time; of more, the oldest is left to its expiry."""


class _Stage(Enum):
    ORDERED = auto()
    POSTED = auto()
    COMPLETED = auto()


@dataclass(slots=True)
class _PendingRead:
    question: Question
    address: Address
    size: ReadSize
    since: float
    stage: _Stage = _Stage.ORDERED
    given_up: bool = False
    probes: int = 0
    posted_at: float = 0.0
    last_sign: float = 0.0
    probing: bool = False
    silent: bool = False
    asked_again: bool = False


@dataclass(frozen=True, slots=True)
class OverdueRead:
    """A read to give up."""

    request_id: str
    engine_id: str
    nonce: str


@dataclass(frozen=True, slots=True)
class ReadResult:
    """`verify_seconds`: from the last byte to the verdict; `spared`: bytes that were in the local cache."""

    request_id: str
    end: ReadEnd
    verify_seconds: float
    spared: int


class PendingReads:
    """Every read that this rank was ordered to do and has not reported. `deadline`: from the order to the last byte."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._reads: dict[str, _PendingRead] = {}
        self._by_nonce: dict[str, str] = {}
        self._probes: dict[str, str] = {}
        self._to_repeat: dict[Address, list[Question]] = {}

    def __len__(self) -> int:
        """How many reads are not over."""
        return len(self._reads)

    def on_ordered(self, request_id: str, question: Question, address: Address, size: ReadSize, now: float) -> None:
        """A read is ordered; an earlier one of the same request must be over."""
        self._reads[request_id] = _PendingRead(question, address, size, now)
        self._by_nonce[question.nonce] = request_id

    def on_posted(self, request_id: str, now: float) -> None:
        """The transfer is under way."""
        read = self._reads[request_id]
        read.stage, read.posted_at, read.last_sign = _Stage.POSTED, now, now

    def probes(self, now: float) -> dict[Address, list[Question]]:
        """Questions for a sign of life, by address, for reads that take long; the answer goes to `on_verdict`."""
        asked: dict[Address, list[Question]] = {}
        for request_id, read in self._reads.items():
            under_way = read.stage is _Stage.POSTED and not read.given_up
            if under_way and not read.probing and now - read.last_sign >= PROBE_EVERY:
                asked.setdefault(read.address, []).append(self._probe(request_id, read))
        return asked

    def overdue(self, now: float) -> list[OverdueRead]:
        """Reads whose last byte has not come in time, or never will, each once; `on_failed` must follow."""
        late = []
        for request_id, read in self._reads.items():
            waiting = read.stage is not _Stage.COMPLETED and not read.given_up
            if waiting and (read.silent or now - read.since >= self._deadline):
                read.given_up = True
                late.append(OverdueRead(request_id, read.question.engine_id, read.question.nonce))
        return late

    def on_failed(self, request_id: str, now: float) -> ReadEnd:
        """The read is over without its bytes."""
        read = self._remove(request_id)
        if read.stage is _Stage.ORDERED:
            outcome = ReadOutcome.PEER_UNREACHABLE
        else:
            waited = read.given_up or now - read.posted_at >= LATE_FAILURE
            outcome = ReadOutcome.NO_PROGRESS if waited else ReadOutcome.TRANSFER_FAILED
        return ReadEnd(read.question.nonce, outcome)

    def on_completed(self, request_ids: Iterable[str], now: float) -> dict[Address, list[Question]]:
        """The last byte is here: what must be asked, and where, before the requests may run."""
        asked: dict[Address, list[Question]] = {}
        for request_id in request_ids:
            read = self._reads[request_id]
            read.stage, read.since = _Stage.COMPLETED, now
            asked.setdefault(read.address, []).append(read.question)
        return asked

    def awaits_verdict(self) -> bool:
        """Whether any read has completed and has no verdict."""
        return any(read.stage is _Stage.COMPLETED for read in self._reads.values())

    def on_verdict(self, answer: ReadVerdict, now: float) -> ReadResult | None:
        """How the read ended. None when no read waits for this verdict, as for the answer to a probe, or when it is to
        be asked for again (see `repeat_questions`)."""
        if (probed := self._probes.pop(answer.nonce, None)) is not None:
            self._on_probe_answer(probed, answer, now)
            return None
        request_id = self._by_nonce.get(answer.nonce)
        if request_id is None or self._reads[request_id].stage is not _Stage.COMPLETED:
            return None
        read = self._reads[request_id]
        if answer.verdict is None and not read.asked_again:
            read.asked_again = True
            self._to_repeat.setdefault(read.address, []).append(read.question)
            return None
        self._remove(request_id)
        outcome = _outcome(answer.verdict)
        size = read.size if outcome is ReadOutcome.VERIFIED else ReadSize()
        end = ReadEnd(answer.nonce, outcome, size.attention, size.state)
        return ReadResult(request_id, end, now - read.since, size.spared)

    def repeat_questions(self) -> dict[Address, list[Question]]:
        """Questions to repeat, each once; the answers go to `on_verdict`."""
        asked, self._to_repeat = self._to_repeat, {}
        return asked

    def _probe(self, request_id: str, read: _PendingRead) -> Question:
        read.probing, read.probes = True, read.probes + 1
        probe = replace(read.question, nonce=f"{read.question.nonce}?{read.probes}")
        self._probes[probe.nonce] = request_id
        return probe

    def _on_probe_answer(self, request_id: str, answer: ReadVerdict, now: float) -> None:
        read = self._reads.get(request_id)
        if read is not None and answer.nonce == f"{read.question.nonce}?{read.probes}":
            read.probing, read.last_sign, read.silent = False, now, answer.verdict is None

    def _remove(self, request_id: str) -> _PendingRead:
        read = self._reads.pop(request_id)
        del self._by_nonce[read.question.nonce]
        return read


def _outcome(verdict: Verdict | None) -> ReadOutcome:
    if verdict is None:
        return ReadOutcome.UNVERIFIED
    return ReadOutcome.VERIFIED if verdict.good else ReadOutcome.NOT_HELD


class ReturnOutcome(StrEnum):
    """How giving a ticket back ended; the values are the metric's labels."""

    SENT = "sent"
    NOT_HELD = "not_held"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class TicketReturn:
    """One ticket to give back."""

    question: Question
    address: Address

    @property
    def nonce(self) -> str:
        """Names the return, on every rank."""
        return self.question.nonce


@dataclass(slots=True)
class _Return:
    ticket: TicketReturn
    since: float
    due: float
    asking: bool = False


class TicketReturns:
    """Every ticket that this rank was ordered to give back. `within`: how long is tried."""

    def __init__(self, within: float) -> None:
        self._within = within
        self._open: dict[str, _Return] = {}

    def __len__(self) -> int:
        """How many are not over."""
        return len(self._open)

    def add(self, ticket: TicketReturn, now: float) -> None:
        """A ticket is to be given back, and due at once."""
        self._open[ticket.nonce] = _Return(ticket, now, now)

    def overdue(self, now: float) -> list[TicketReturn]:
        """Tickets whose node was silent for too long, and the oldest of too many; they are over."""
        excess = len(self._open) - MOST_RETURNS
        late = [
            each.ticket
            for at, each in enumerate(self._open.values())
            if at < excess or now - each.since >= self._within
        ]
        for ticket in late:
            del self._open[ticket.nonce]
        return late

    def due(self, now: float) -> dict[Address, list[Question]]:
        """Tickets to give back now, by address; the answers go to `on_verdict`."""
        found: dict[Address, list[Question]] = {}
        for each in self._open.values():
            if each.due <= now and not each.asking:
                each.asking = True
                found.setdefault(each.ticket.address, []).append(each.ticket.question)
        return found

    def on_verdict(self, answer: ReadVerdict, now: float) -> ReturnOutcome | None:
        """How the return ended that was answered; None for every other answer, and for one to be sent again."""
        each = self._open.get(answer.nonce)
        if each is None or not each.asking:
            return None
        if answer.verdict is None:
            each.asking, each.due = False, now + ASK_EVERY
            return None
        del self._open[answer.nonce]
        return ReturnOutcome.SENT if answer.verdict.good else ReturnOutcome.NOT_HELD
