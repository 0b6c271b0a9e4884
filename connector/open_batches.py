"""The book of what was asked of prefill nodes and not yet answered. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connector.lease import Verdict
from connector.question import MOST_QUESTIONS, Question, read_answer, write_batch

Address = tuple[str, int]
"""Host and side-channel port of a prefill node."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer to one question; `verdict` is None when none came in time, or none that made sense."""

    nonce: str
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class _Open:
    address: Address
    nonces: tuple[str, ...]
    due: float


class OpenBatches:
    """Batches on the wire, by number. Times are seconds on one monotonic clock."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._open: dict[int, _Open] = {}
        self._last = 0

    def __len__(self) -> int:
        """How many batches wait for their answer."""
        return len(self._open)

    def ask(self, address: Address, questions: Sequence[Question], now: float) -> list[bytes]:
        """The messages to send to `address`, each with at most `MOST_QUESTIONS` questions."""
        messages = []
        for start in range(0, len(questions), MOST_QUESTIONS):
            part = questions[start : start + MOST_QUESTIONS]
            self._last += 1
            nonces = tuple(question.nonce for question in part)
            self._open[self._last] = _Open(address, nonces, now + self._timeout)
            messages.append(write_batch(self._last, part))
        return messages

    def answer(self, address: Address, message: bytes) -> list[Judged]:
        """What `message` from `address` settles; nothing when it answers no open question of that address."""
        read = read_answer(message)
        if read is None or (asked := self._open.get(read[0])) is None or asked.address != address:
            return []
        del self._open[read[0]]
        if len(read[1]) != len(asked.nonces):
            return [Judged(nonce, None) for nonce in asked.nonces]
        return [Judged(nonce, verdict) for nonce, verdict in zip(asked.nonces, read[1], strict=True)]

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
