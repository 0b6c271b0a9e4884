"""Talks to prefill nodes off the engine's thread: are the blocks of a finished read still held, and who are you?

All the questions that one engine step has for one prefill node travel in one exchange. Nobody waits for anybody else:
an address that does not answer costs those alone who asked for it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from connector.introductions import Asked, OpenIntroductions, Settled
from connector.open_batches import Address, Judged, OpenBatches
from connector.peers import Peers
from connector.question import Question

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
        self._introductions = OpenIntroductions(introduced_within or timeout, numbers)
        self._clock = clock
        self._make_peers = peers or (lambda: Peers(keys, clock))
        self._peers: Peers | None = None
        self._orders: queue.SimpleQueue[_Questions | Asked | None] = queue.SimpleQueue()
        self._judged: queue.SimpleQueue[Judged] = queue.SimpleQueue()
        self._introduced: queue.SimpleQueue[Settled] = queue.SimpleQueue()
        self._lost: queue.SimpleQueue[Address] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, questions: Mapping[Address, Sequence[Question]]) -> None:
        """Put one step's questions on their way; the thread starts with the first order."""
        for address, asked in questions.items():
            self._order(_Questions(address, tuple(asked)))

    def answers(self, patience: float = 0.0) -> list[Judged]:
        """Every answer that came since the last call; waits up to `patience` seconds for the first of them."""
        found = []
        with contextlib.suppress(queue.Empty):
            if patience:
                found.append(self._judged.get(timeout=patience))
            while True:
                found.append(self._judged.get_nowait())
        return found

    def introduce(self, asked: Asked) -> None:
        """Ask an engine for the metadata of its workers."""
        self._order(asked)

    def introductions(self) -> list[Settled]:
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

    def _order(self, order: _Questions | Asked) -> None:
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

    def _tell(self, judged: Iterable[Judged], settled: Iterable[Settled]) -> None:
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
