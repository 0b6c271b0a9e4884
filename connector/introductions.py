"""Asking a prefill node for the NIXL metadata of its workers, before vLLM's handshake with it. Pure: time is passed in.

vLLM's own handshake waits for the node in a thread that all handshakes share. Here the waiting is done beside it: only
what has come in full is handed to vLLM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from connector.open_batches import Address
from connector.question import Answer, Introduce, Refused, write_introduce

Rank = tuple[int, int]
"""Pipeline rank, tensor rank."""

MOST_RANKS = 256
"""Workers of a prefill node that one of ours may have to read from."""
MOST_BYTES = 16 * 1024 * 1024
"""Of the metadata of all of them."""
WRONG_KEYS = (
    "it refused the question ({}): give both nodes the same ticket keys (pdproxy_key_file, PDPROXY_TICKET_KEYS)"
)
SENTENCES: Mapping[str, str] = {
    Refused.UNSIGNED: WRONG_KEYS,
    Refused.BAD_SIGNATURE: WRONG_KEYS,
    Refused.ANOTHER_ENGINE: "another engine answers there ({}): the one that the ticket names has gone",
    Refused.NO_SUCH_RANK: "it has fewer ranks than the ticket says ({})",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """Which workers of which engine, where."""

    engine_id: str
    address: Address
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Introduction:
    """What an engine said: msgpack of vLLM's `NixlHandshakePayload` by rank, all from one run of the node."""

    incarnation: str
    payloads: Mapping[Rank, bytes]


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Nothing usable came; `why` continues "The prefill node cannot be reached: "."""

    why: str


@dataclass(slots=True)
class _Open:
    asked: Asked
    ranks: dict[int, Rank]
    due: float
    settled: bool = False
    incarnation: str = ""
    payloads: dict[Rank, bytes] = field(default_factory=dict)


Settled = tuple[Asked, Introduction | Unreachable]


class OpenIntroductions:
    """Introductions that were asked for and have not come; each is settled once. `numbers` grow on every connection."""

    def __init__(self, timeout: float, numbers: Iterator[int] | None = None) -> None:
        self._timeout = timeout
        self._numbers = numbers or itertools.count(1)
        self._open: dict[Asked, _Open] = {}
        self._by_number: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, asked: Asked, now: float) -> list[bytes]:
        """The messages to send, one a rank; none where the same is on its way."""
        if asked in self._open:
            return []
        numbered = {next(self._numbers): rank for rank in asked.ranks}
        self._open[asked] = opened = _Open(asked, numbered, now + self._timeout)
        self._by_number.update(dict.fromkeys(numbered, opened))
        return [write_introduce(Introduce(number, asked.engine_id, *rank)) for number, rank in numbered.items()]

    def answer(self, address: Address, answer: Answer) -> list[Settled] | None:
        """What an answer settles; None where it answers nothing that was asked of that address."""
        opened = self._by_number.get(answer.number)
        if opened is None or opened.asked.address != address:
            return None
        if opened.settled:  # by another rank's answer, or by the lack of one
            del self._by_number[answer.number]
            return []
        if not isinstance(answer.body, bytes):
            reason = answer.body if isinstance(answer.body, str) else "verdicts"
            return [self._settle(opened, Unreachable(SENTENCES.get(reason, "it refused: {}").format(reason[:40])))]
        return self._take(opened, answer, answer.body)

    def lost(self, address: Address, why: str) -> list[Settled]:
        """The connection to `address` has gone."""
        gone = [opened for opened in self._open.values() if opened.asked.address == address]
        settled = [self._settle(opened, Unreachable(why)) for opened in gone]
        for number in [number for number, opened in self._by_number.items() if opened.asked.address == address]:
            del self._by_number[number]
        return settled

    def overdue(self, now: float) -> list[Settled]:
        """What did not come in time."""
        late = [opened for opened in self._open.values() if opened.due <= now]
        return [self._settle(opened, Unreachable(f"no answer within {self._timeout:g} s")) for opened in late]

    def next_due(self) -> float | None:
        """When the next one is overdue; None when nothing is open."""
        return min((opened.due for opened in self._open.values()), default=None)

    def _take(self, opened: _Open, answer: Answer, payload: bytes) -> list[Settled]:
        del self._by_number[answer.number]
        if opened.incarnation not in ("", answer.incarnation):
            return [self._settle(opened, Unreachable("it restarted meanwhile"))]
        opened.incarnation = answer.incarnation
        opened.payloads[opened.ranks.pop(answer.number)] = payload
        if sum(map(len, opened.payloads.values())) > MOST_BYTES:
            return [self._settle(opened, Unreachable("its metadata is too long"))]
        if opened.ranks:
            return []
        return [self._settle(opened, Introduction(opened.incarnation, opened.payloads))]

    def _settle(self, opened: _Open, how: Introduction | Unreachable) -> Settled:
        del self._open[opened.asked]
        opened.settled, opened.payloads = True, {}
        return opened.asked, how
