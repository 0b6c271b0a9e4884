"""Asks prefill nodes, off the engine's thread, whether the blocks of a finished read were still held.

All the questions that one engine step has for one prefill node travel in one exchange.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from connector.open_batches import Address, Judged, OpenBatches
from connector.peers import Peers
from connector.question import Question

LONGEST_NAP = 1.0


class Verifier:
    """The thread. `ask` and `answers` are for one other thread, the engine's, which waits only where it says so."""

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._batches = OpenBatches(timeout)
        self._clock = clock
        self._asked: queue.SimpleQueue[tuple[Address, tuple[Question, ...]] | None] = queue.SimpleQueue()
        self._judged: queue.SimpleQueue[Judged] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread: threading.Thread | None = None

    def ask(self, questions: Mapping[Address, Sequence[Question]]) -> None:
        """Put one step's questions on their way; the thread starts with the first of them."""
        for address, asked in questions.items():
            self._asked.put((address, tuple(asked)))
        if questions:
            self._start()
            self._nudge()

    def answers(self, patience: float = 0.0) -> list[Judged]:
        """Every answer that came since the last call; waits up to `patience` seconds for the first of them."""
        found = []
        with contextlib.suppress(queue.Empty):
            if patience:
                found.append(self._judged.get(timeout=patience))
            while True:
                found.append(self._judged.get_nowait())
        return found

    def close(self) -> None:
        """End the thread and close its sockets. May be called twice."""
        if self._thread is not None:
            self._asked.put(None)
            self._nudge()
            self._thread.join()
            self._thread = None
        self._wake.close()
        self._woken.close()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pdproxy_verifier", daemon=True)
            self._thread.start()

    def _nudge(self) -> None:
        # A full pipe has nudges enough in it.
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"?")

    def _run(self) -> None:
        with contextlib.closing(Peers()) as peers:
            peers.watch(self._woken)
            while self._send(peers):
                ready = peers.wait(self._nap())
                if self._woken.fileno() in ready:
                    self._drain_wake()
                for address, message in peers.receive(ready):
                    self._tell(self._batches.answer(address, message))
                self._give_up(peers, peers.lost(ready))

    def _send(self, peers: Peers) -> bool:
        """Send what was asked; False when the end was asked for."""
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._asked.get_nowait()
                if order is None:
                    return False
                for message in self._batches.ask(*order, self._clock()):
                    peers.send(order[0], message)
        return True

    def _give_up(self, peers: Peers, lost: Iterable[Address]) -> None:
        judged, silent = self._batches.overdue(self._clock())
        self._tell(judged)
        for address in silent | set(lost):
            peers.drop(address)
            self._tell(self._batches.lost(address))

    def _nap(self) -> float:
        due = self._batches.next_due()
        return LONGEST_NAP if due is None else min(LONGEST_NAP, max(0.0, due - self._clock()))

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _tell(self, judged: Iterable[Judged]) -> None:
        for one in judged:
            self._judged.put(one)
