"""The book of what was asked of prefill nodes and not yet answered. Pure: time is passed in.

Asking a prefill node for the NIXL metadata of its workers, before vLLM's handshake with it. Pure: time is passed in.

vLLM's own handshake waits for the node in a thread that all handshakes share. Here the waiting is done beside it: only
what has come in full is handed to vLLM.


Talks to prefill nodes off the engine's thread: are the blocks of a finished read still held, and who are you?

All the questions that one engine step has for one prefill node travel in one exchange. Nobody waits for anybody else:
an address that does not answer costs those alone who asked for it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from connector.messages import (
    MOST_QUESTIONS,
    MetadataQuestion,
    Question,
    QuestionRefusal,
    Reply,
    Verdict,
    write_batch,
    write_metadata_question,
)
from connector.peers import Address, Peers


@dataclass(frozen=True, slots=True)
class ReadVerdict:
    """The answer to one question; `verdict` is None when none came in time, or none that made sense.

    `incarnation`: which run of the prefill node gave the verdict.
    """

    nonce: str
    verdict: Verdict | None
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class _OpenBatch:
    address: Address
    nonces: tuple[str, ...]
    due: float


class OpenBatches:
    """Batches on the wire, by number. Times are seconds on one monotonic clock; `numbers` grow on every connection."""

    def __init__(self, timeout: float, numbers: Iterator[int] | None = None) -> None:
        self._timeout = timeout
        self._open: dict[int, _OpenBatch] = {}
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
            self._open[number] = _OpenBatch(address, nonces, now + self._timeout)
            messages.append(write_batch(number, part))
        return messages

    def answer(self, address: Address, answer: Reply) -> list[ReadVerdict] | None:
        """What an answer from `address` settles; None when it answers no open question of that address."""
        asked = self._open.get(answer.number)
        if asked is None or asked.address != address:
            return None
        del self._open[answer.number]
        if not isinstance(answer.body, tuple) or len(answer.body) != len(asked.nonces):
            return [ReadVerdict(nonce, None) for nonce in asked.nonces]
        return [
            ReadVerdict(nonce, verdict, answer.incarnation)
            for nonce, verdict in zip(asked.nonces, answer.body, strict=True)
        ]

    def lost(self, address: Address) -> list[ReadVerdict]:
        """The peer at `address` has gone: nothing that it was asked will be answered."""
        gone = [number for number, asked in self._open.items() if asked.address == address]
        return [ReadVerdict(nonce, None) for number in gone for nonce in self._open.pop(number).nonces]

    def overdue(self, now: float) -> tuple[list[ReadVerdict], set[Address]]:
        """Questions that nobody answered in time, and the addresses that were silent."""
        late = [number for number, asked in self._open.items() if asked.due <= now]
        gone = [self._open.pop(number) for number in late]
        return [ReadVerdict(nonce, None) for asked in gone for nonce in asked.nonces], {asked.address for asked in gone}

    def next_due(self) -> float | None:
        """When the next batch is overdue; None when nothing is open."""
        return min((asked.due for asked in self._open.values()), default=None)


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
    QuestionRefusal.UNSIGNED: WRONG_KEYS,
    QuestionRefusal.BAD_SIGNATURE: WRONG_KEYS,
    QuestionRefusal.ANOTHER_ENGINE: "another engine answers there ({}): the one that the ticket names has gone",
    QuestionRefusal.NO_SUCH_RANK: "it has fewer ranks than the ticket says ({})",
}


@dataclass(frozen=True, slots=True)
class MetadataRequest:
    """Which workers of which engine, where."""

    engine_id: str
    address: Address
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class EngineMetadata:
    """What an engine said: msgpack of vLLM's `NixlHandshakePayload` by rank, all from one run of the node."""

    incarnation: str
    payloads: Mapping[Rank, bytes]


@dataclass(frozen=True, slots=True)
class EngineUnreachable:
    """Nothing usable came; `why` continues "The prefill node cannot be reached: "."""

    why: str


@dataclass(slots=True)
class _OpenRequest:
    asked: MetadataRequest
    ranks: dict[int, Rank]
    due: float
    settled: bool = False
    incarnation: str = ""
    payloads: dict[Rank, bytes] = field(default_factory=dict)


MetadataResult = tuple[MetadataRequest, EngineMetadata | EngineUnreachable]


class OpenMetadataRequests:
    """Introductions that were asked for and have not come; each is settled once. `numbers` grow on every connection."""

    def __init__(self, timeout: float, numbers: Iterator[int] | None = None) -> None:
        self._timeout = timeout
        self._numbers = numbers or itertools.count(1)
        self._open: dict[MetadataRequest, _OpenRequest] = {}
        self._by_number: dict[int, _OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, asked: MetadataRequest, now: float) -> list[bytes]:
        """The messages to send, one a rank; none where the same is on its way."""
        if asked in self._open:
            return []
        numbered = {next(self._numbers): rank for rank in asked.ranks}
        self._open[asked] = opened = _OpenRequest(asked, numbered, now + self._timeout)
        self._by_number.update(dict.fromkeys(numbered, opened))
        return [
            write_metadata_question(MetadataQuestion(number, asked.engine_id, *rank))
            for number, rank in numbered.items()
        ]

    def answer(self, address: Address, answer: Reply) -> list[MetadataResult] | None:
        """What an answer settles; None where it answers nothing that was asked of that address."""
        opened = self._by_number.get(answer.number)
        if opened is None or opened.asked.address != address:
            return None
        if opened.settled:  # by another rank's answer, or by the lack of one
            del self._by_number[answer.number]
            return []
        if not isinstance(answer.body, bytes):
            reason = answer.body if isinstance(answer.body, str) else "verdicts"
            return [
                self._settle(opened, EngineUnreachable(SENTENCES.get(reason, "it refused: {}").format(reason[:40])))
            ]
        return self._take(opened, answer, answer.body)

    def lost(self, address: Address, why: str) -> list[MetadataResult]:
        """The connection to `address` has gone."""
        gone = [opened for opened in self._open.values() if opened.asked.address == address]
        settled = [self._settle(opened, EngineUnreachable(why)) for opened in gone]
        for number in [number for number, opened in self._by_number.items() if opened.asked.address == address]:
            del self._by_number[number]
        return settled

    def overdue(self, now: float) -> list[MetadataResult]:
        """What did not come in time."""
        late = [opened for opened in self._open.values() if opened.due <= now]
        return [self._settle(opened, EngineUnreachable(f"no answer within {self._timeout:g} s")) for opened in late]

    def next_due(self) -> float | None:
        """When the next one is overdue; None when nothing is open."""
        return min((opened.due for opened in self._open.values()), default=None)

    def _take(self, opened: _OpenRequest, answer: Reply, payload: bytes) -> list[MetadataResult]:
        del self._by_number[answer.number]
        if opened.incarnation not in ("", answer.incarnation):
            return [self._settle(opened, EngineUnreachable("it restarted meanwhile"))]
        opened.incarnation = answer.incarnation
        opened.payloads[opened.ranks.pop(answer.number)] = payload
        if sum(map(len, opened.payloads.values())) > MOST_BYTES:
            return [self._settle(opened, EngineUnreachable("its metadata is too long"))]
        if opened.ranks:
            return []
        return [self._settle(opened, EngineMetadata(opened.incarnation, opened.payloads))]

    def _settle(self, opened: _OpenRequest, how: EngineMetadata | EngineUnreachable) -> MetadataResult:
        del self._open[opened.asked]
        opened.settled, opened.payloads = True, {}
        return opened.asked, how


LONGEST_NAP = 1.0

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class _Questions:
    address: Address
    questions: tuple[Question, ...]


class Verifier:
    """The thread. Everything but `close` is for one other thread, the engine's, which waits only where it says so.

    Args: `timeout` of a question, `introduced_within` of an introduction, name look-up included, seconds; `keys`,
    ticket keys; `peers`, what holds the connections, made when the first question comes.
    """

    def __init__(
        self,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        introduced_within: float | None = None,
        keys: Sequence[bytes] = (),
        peers: Callable[[], Peers] | None = None,
    ) -> None:
        numbers = itertools.count(1)
        self._batches = OpenBatches(timeout, numbers)
        self._introductions = OpenMetadataRequests(introduced_within or timeout, numbers)
        self._clock = clock
        self._make_peers = peers or (lambda: Peers(keys, clock))
        self._peers: Peers | None = None
        self._orders: queue.SimpleQueue[_Questions | MetadataRequest | None] = queue.SimpleQueue()
        self._judged: queue.SimpleQueue[ReadVerdict] = queue.SimpleQueue()
        self._introduced: queue.SimpleQueue[MetadataResult] = queue.SimpleQueue()
        self._lost: queue.SimpleQueue[Address] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, questions: Mapping[Address, Sequence[Question]]) -> None:
        """Put one step's questions on their way; the thread starts with the first order."""
        for address, asked in questions.items():
            self._order(_Questions(address, tuple(asked)))

    def answers(self, patience: float = 0.0) -> list[ReadVerdict]:
        """Every answer that came since the last call; waits up to `patience` seconds for the first of them."""
        found = []
        with contextlib.suppress(queue.Empty):
            if patience:
                found.append(self._judged.get(timeout=patience))
            while True:
                found.append(self._judged.get_nowait())
        return found

    def introduce(self, asked: MetadataRequest) -> None:
        """Ask an engine for the metadata of its workers."""
        self._order(asked)

    def introductions(self) -> list[MetadataResult]:
        """What became of introductions since the last call."""
        return _drain(self._introduced)

    def lost(self) -> list[Address]:
        """Addresses whose connection has gone since the last call: another process may answer there now."""
        return _drain(self._lost)

    def close(self) -> None:
        """End the thread and close its sockets. May be called twice."""
        if self._thread is not None and self._peers is not None:
            self._orders.put(None)
            self._peers.wake()
            self._thread.join()
            self._thread = None

    def _order(self, order: _Questions | MetadataRequest) -> None:
        if self._peers is None:
            self._peers = self._make_peers()
        self._orders.put(order)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._peers,), name="pdproxy_verifier", daemon=True)
            self._thread.start()
        self._peers.wake()

    def _run(self, peers: Peers) -> None:
        with contextlib.closing(peers):
            while self._send(peers):
                peers.wait(self._nap())
                self._receive(peers)
                self._give_up(peers)

    def _send(self, peers: Peers) -> bool:
        """Send what was ordered; False when the end was asked for."""
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                if order is None:
                    return False
                if isinstance(order, _Questions):
                    messages = self._batches.ask(order.address, order.questions, self._clock())
                else:
                    messages = self._introductions.ask(order, self._clock())
                for message in messages:
                    peers.send(order.address, message)
        return True

    def _receive(self, peers: Peers) -> None:
        for address, answer in peers.received():
            judged = self._batches.answer(address, answer)
            settled = self._introductions.answer(address, answer) if judged is None else []
            if judged is None and settled is None:
                peers.drop(address)  # nobody asked: it may go on for ever
                self._end(address, "it answers what nobody asked")
            self._tell(judged or (), settled or ())

    def _give_up(self, peers: Peers) -> None:
        now = self._clock()
        judged, silent = self._batches.overdue(now)
        settled = self._introductions.overdue(now)
        self._tell(judged, settled)
        for address in silent | {asked.address for asked, _ in settled}:
            peers.drop(address)
            self._end(address, "it did not answer in time")
        for address, why in peers.lost().items():
            self._end(address, why)

    def _end(self, address: Address, why: str) -> None:
        self._tell(self._batches.lost(address), self._introductions.lost(address, why))
        self._lost.put(address)

    def _nap(self) -> float:
        dues = [due for due in (self._batches.next_due(), self._introductions.next_due()) if due is not None]
        return min([LONGEST_NAP, *(max(0.0, due - self._clock()) for due in dues)])

    def _tell(self, judged: Iterable[ReadVerdict], settled: Iterable[MetadataResult]) -> None:
        for one in judged:
            self._judged.put(one)
        for introduced in settled:
            self._introduced.put(introduced)


def _drain(source: queue.SimpleQueue[_Item]) -> list[_Item]:
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(source.get_nowait())
    return found
