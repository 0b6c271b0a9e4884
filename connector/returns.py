"""Tickets that a decode rank gives back: notices without a read, until the prefill node has them. Pure: time passed in.

A notice can be sent only to a node with which a handshake was made. To one that is not known, or was silent when its
read was given up, it is not forced: the node is asked, off the engine's thread, whether it still holds the lease.

    ordered ──► sent                                  (the node is known)
    ordered ──► asked ──► held ──► handshake ──► sent
                  │         └── not held: nothing to give back
                  └── no answer: asked again, every `ASK_EVERY` seconds, for at most `within` seconds
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from connector.lease import Verdict
from connector.open_batches import Address, Judged
from connector.question import Question

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
class Return:
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
    given: Return
    since: float
    due: float
    questions: int = 0
    asking: bool = False


class Returns:
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

    def begin(self, given: Return, now: float) -> None:
        """A notice is ordered, and due at once."""
        self._open[given.nonce] = _Open(given, now, now)

    def overdue(self, now: float) -> list[Return]:
        """Those whose node was silent for too long, and the oldest of too many; `over` must follow."""
        excess = len(self._open) - MOST_OPEN
        return [
            each.given for at, each in enumerate(self._open.values()) if at < excess or now - each.since >= self._within
        ]

    def due(self, now: float) -> list[Return]:
        """Those to send or to ask for now; each comes again after `ASK_EVERY`, if it is not over by then."""
        found = [each for each in self._open.values() if each.due <= now and not each.asking]
        for each in found:
            each.due = now + ASK_EVERY
        return [each.given for each in found]

    def ask(self, given: Return) -> dict[Address, list[Question]]:
        """The question whether the lease is held, and whom to ask; the answer comes to `answered`."""
        each = self._open[given.nonce]
        each.questions, each.asking = each.questions + 1, True
        asked = replace(given.question, nonce=f"{given.nonce}!{each.questions}")
        self._asked[asked.nonce] = given.nonce
        return {given.address: [asked]}

    def answered(self, judged: Judged, now: float) -> tuple[Return, Verdict | None] | None:
        """Which ticket a question of `ask` was about, and what the node says; None for every other answer."""
        each = self._open.get(self._asked.pop(judged.nonce, ""))
        if each is None:
            return None
        each.asking, each.due = False, now + ASK_EVERY
        return each.given, judged.verdict

    def over(self, nonce: str) -> None:
        """Sent, needless, or given up."""
        self._open.pop(nonce, None)
