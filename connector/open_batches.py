"""The book of what was asked of prefill nodes and not yet answered. Pure: time is passed in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from connector.lease import Verdict
from connector.question import MOST_QUESTIONS, Answer, Question, write_batch

Address = tuple[str, int]
"""Host and side-channel port of a prefill node."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer to one question; `verdict` is None when none came in time, or none that made sense.

    `incarnation`: which run of the prefill node gave the verdict.
    """

    nonce: str
    verdict: Verdict | None
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class _Open:
    address: Address
    nonces: tuple[str, ...]
    due: float


class OpenBatches:
    """Batches on the wire, by number. Times are seconds on one monotonic clock; `numbers` grow on every connection."""

    def __init__(self, timeout: float, numbers: Iterator[int] | None = None) -> None:
        self._timeout = timeout
        self._open: dict[int, _Open] = {}
        self._numbers = numbers or itertools.count(1)

    def __len__(self) -> int:
        """How many batches wait for their answer."""
        return len(self._open)

    def ask(self, address: Address, questions: Sequence[Question], now: float) -> list[bytes]:
        """The messages to send to `address`, each with at most `MOST_QUESTIONS` questions."""
        messages = []
        for start in range(0, len(questions), MOST_QUESTIONS):
            part = questions[start : start + MOST_QUESTIONS]
            number = next(self._numbers)
            nonces = tuple(question.nonce for question in part)
            self._open[number] = _Open(address, nonces, now + self._timeout)
            messages.append(write_batch(number, part))
        return messages

    def answer(self, address: Address, answer: Answer) -> list[Judged] | None:
        """What an answer from `address` settles; None when it answers no open question of that address."""
        asked = self._open.get(answer.number)
        if asked is None or asked.address != address:
            return None
        del self._open[answer.number]
        if not isinstance(answer.body, tuple) or len(answer.body) != len(asked.nonces):
            return [Judged(nonce, None) for nonce in asked.nonces]
        return [
            Judged(nonce, verdict, answer.incarnation) for nonce, verdict in zip(asked.nonces, answer.body, strict=True)
        ]

    def lost(self, address: Address) -> list[Judged]:
        """The peer at `address` has gone: nothing that it was asked will be answered."""
        gone = [number for number, asked in self._open.items() if asked.address == address]
        return [Judged(nonce, None) for number in gone for nonce in self._open.pop(number).nonces]

    def overdue(self, now: float) -> tuple[list[Judged], set[Address]]:
        """Questions that nobody answered in time, and the addresses that were silent."""
        late = [number for number, asked in self._open.items() if asked.due <= now]
        gone = [self._open.pop(number) for number in late]
        return [Judged(nonce, None) for asked in gone for nonce in asked.nonces], {asked.address for asked in gone}

    def next_due(self) -> float | None:
        """When the next batch is overdue; None when nothing is open."""
        return min((asked.due for asked in self._open.values()), default=None)
