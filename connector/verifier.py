"""Asks prefill nodes, off the engine's thread: were a read's blocks still held, and what is your NIXL metadata?

    verdicts   the questions of one engine step for one node travel in batches, one answer a batch
    returns    the same of tickets that are given back: the answer says whether their blocks were held
    metadata   one message for each worker of the node that this rank reads from; complete when all have answered

An address that does not answer delays no other address. `worker_base` says why vLLM's own handshake does not ask.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from .messages import (
    MOST_QUESTIONS,
    MetadataQuestion,
    Question,
    QuestionRefusal,
    Reply,
    Verdict,
    write_batch,
    write_metadata_question,
    write_returns,
)
from .peer_engines import EngineMetadata, EngineUnreachable, MetadataRequest, Rank
from .peers import Address, Peers

MOST_BYTES = 16 * 1024 * 1024
"""The most bytes of metadata of all ranks of an engine."""
LONGEST_POLL = 1.0
"""Seconds that the thread waits for sockets at a time."""

_WRONG_KEYS = "it refused ({}): give both nodes the same ticket keys (pdproxy_key_file, PDPROXY_TICKET_KEYS)"
_REFUSALS: Mapping[str, str] = {
    QuestionRefusal.UNSIGNED: _WRONG_KEYS,
    QuestionRefusal.BAD_SIGNATURE: _WRONG_KEYS,
    QuestionRefusal.ANOTHER_ENGINE: "another engine answers there ({}): the one that the ticket names has gone",
    QuestionRefusal.NO_SUCH_RANK: "it has fewer ranks than the ticket says ({})",
}


@dataclass(frozen=True, slots=True)
class ReadVerdict:
    """One run's answer to one question. `verdict`: None when none came in time, or none that made sense."""

    nonce: str
    verdict: Verdict | None
    incarnation: str = ""


MetadataResult = tuple[MetadataRequest, EngineMetadata | EngineUnreachable]
Result = ReadVerdict | MetadataResult

WriteBatch = Callable[[int, Sequence[Question]], bytes]
_Questions = tuple[WriteBatch, Address, Sequence[Question]]
_Item = TypeVar("_Item")


@dataclass(eq=False, slots=True)
class _Batch:
    """Questions that travel in one message."""

    address: Address
    due: float
    nonces: tuple[str, ...]

    def on_reply(self, reply: Reply) -> list[Result]:
        if not isinstance(reply.body, tuple) or len(reply.body) != len(self.nonces):
            return self.on_failure("")
        return [ReadVerdict(*each, reply.incarnation) for each in zip(self.nonces, reply.body, strict=True)]

    def on_failure(self, _why: str) -> list[Result]:
        return [ReadVerdict(nonce, None) for nonce in self.nonces]


@dataclass(eq=False, slots=True)
class _MetadataExchange:
    """One message for each rank. `missing`: the ranks that have not answered, by number."""

    address: Address
    due: float
    request: MetadataRequest
    missing: dict[int, Rank]
    incarnation: str = ""
    payloads: dict[Rank, bytes] = field(default_factory=dict)

    def on_reply(self, reply: Reply) -> list[Result]:
        """Empty while other ranks have not answered."""
        if not isinstance(reply.body, bytes):
            reason = reply.body if isinstance(reply.body, str) else "verdicts"
            return self.on_failure(_REFUSALS.get(reason, "it refused: {}").format(reason[:40]))
        if self.incarnation not in ("", reply.incarnation):
            return self.on_failure("it restarted meanwhile")
        self.incarnation = reply.incarnation
        self.payloads[self.missing.pop(reply.number)] = reply.body
        if sum(map(len, self.payloads.values())) > MOST_BYTES:
            return self.on_failure("its metadata is too long")
        return [] if self.missing else [(self.request, EngineMetadata(self.incarnation, self.payloads))]

    def on_failure(self, why: str) -> list[Result]:
        return [(self.request, EngineUnreachable(why))]


class OpenExchanges:
    """Questions that were asked and not yet answered. Pure: time is passed in, seconds on one monotonic clock.

    Numbers of messages grow on every connection. Those of a settled metadata request stay known until they are
    answered, or their address is lost: what its other ranks answer late was asked for.
    """

    def __init__(self, timeout: float, metadata_timeout: float) -> None:
        self._timeout = timeout
        self._metadata_timeout = metadata_timeout
        self._numbers = itertools.count(1)
        self._open: dict[_Batch | _MetadataExchange, None] = {}
        self._by_number: dict[int, _Batch | _MetadataExchange] = {}

    def __len__(self) -> int:
        """How many exchanges are not settled."""
        return len(self._open)

    def ask(
        self, address: Address, questions: Sequence[Question], now: float, write: WriteBatch = write_batch
    ) -> list[bytes]:
        """The messages to send to `address`, each with at most `MOST_QUESTIONS` questions."""
        messages = []
        for start in range(0, len(questions), MOST_QUESTIONS):
            part = questions[start : start + MOST_QUESTIONS]
            number = next(self._numbers)
            nonces = tuple(question.nonce for question in part)
            self._begin(_Batch(address, now + self._timeout, nonces), [number])
            messages.append(write(number, part))
        return messages

    def fetch_metadata(self, request: MetadataRequest, now: float) -> list[bytes]:
        """The messages to send, one a rank; none where the same request is on its way."""
        if any(isinstance(one, _MetadataExchange) and one.request == request for one in self._open):
            return []
        ranks = {next(self._numbers): rank for rank in request.ranks}
        due = now + self._metadata_timeout
        self._begin(_MetadataExchange(request.address, due, request, dict(ranks)), ranks)
        questions = (MetadataQuestion(number, request.engine_id, *rank) for number, rank in ranks.items())
        return [write_metadata_question(question) for question in questions]

    def on_reply(self, address: Address, reply: Reply) -> list[Result] | None:
        """The results that a reply settles; None where it answers nothing that was asked of that address."""
        exchange = self._by_number.get(reply.number)
        if exchange is None or exchange.address != address:
            return None
        del self._by_number[reply.number]
        results = exchange.on_reply(reply) if exchange in self._open else []
        if results:
            del self._open[exchange]
        return results

    def on_lost(self, address: Address, why: str) -> list[Result]:
        """The connection to `address` has gone: nothing that it was asked will be answered."""
        self._by_number = {number: each for number, each in self._by_number.items() if each.address != address}
        gone = [exchange for exchange in self._open if exchange.address == address]
        return [result for exchange in gone for result in self._fail(exchange, why)]

    def overdue(self, now: float) -> tuple[list[Result], set[Address]]:
        """Results of questions that were not answered in time, and the addresses that were silent."""
        late = [exchange for exchange in self._open if exchange.due <= now]
        why = f"no answer within {self._metadata_timeout:g} s"
        return [result for each in late for result in self._fail(each, why)], {each.address for each in late}

    def next_due(self) -> float | None:
        """When the next exchange is overdue; None when nothing is open."""
        return min((exchange.due for exchange in self._open), default=None)

    def _begin(self, exchange: _Batch | _MetadataExchange, numbers: Iterable[int]) -> None:
        self._open[exchange] = None
        self._by_number.update(dict.fromkeys(numbers, exchange))

    def _fail(self, exchange: _Batch | _MetadataExchange, why: str) -> list[Result]:
        del self._open[exchange]
        return exchange.on_failure(why)


class Verifier:
    """The thread. Everything but `close` is for one other thread, the engine's; only `verdicts` may wait.

    Seconds: `timeout` of a question, `metadata_timeout` of a metadata request, name look-up included.
    """

    def __init__(
        self,
        timeout: float,
        *,
        metadata_timeout: float | None = None,
        keys: Sequence[bytes] = (),
        peers: Callable[[], Peers] | None = None,
    ) -> None:
        self._exchanges = OpenExchanges(timeout, metadata_timeout or timeout)
        self._make_peers = peers or (lambda: Peers(keys, time.monotonic))
        self._peers: Peers | None = None
        self._orders: queue.SimpleQueue[_Questions | MetadataRequest | None] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[ReadVerdict] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[MetadataResult] = queue.SimpleQueue()
        self._lost: queue.SimpleQueue[Address] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, questions: Mapping[Address, Sequence[Question]]) -> None:
        """Send one step's questions; the thread starts with the first order."""
        for address, asked in questions.items():
            self._order((write_batch, address, tuple(asked)))

    def give_back(self, tickets: Mapping[Address, Sequence[Question]]) -> None:
        """Give tickets back; what comes of it is among the verdicts."""
        for address, given in tickets.items():
            self._order((write_returns, address, tuple(given)))

    def verdicts(self, wait_seconds: float = 0.0) -> list[ReadVerdict]:
        """Every verdict that came since the last call; waits at most `wait_seconds` for the first of them."""
        first = []
        if wait_seconds:
            with contextlib.suppress(queue.Empty):
                first.append(self._verdicts.get(timeout=wait_seconds))
        return first + _drain(self._verdicts)

    def fetch_metadata(self, request: MetadataRequest) -> None:
        """Ask an engine for the NIXL metadata of its workers."""
        self._order(request)

    def metadata_results(self) -> list[MetadataResult]:
        """The metadata requests that were settled since the last call."""
        return _drain(self._results)

    def lost_addresses(self) -> list[Address]:
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
        self._orders.put(order)
        if self._peers is None:
            self._peers = self._make_peers()
            self._thread = threading.Thread(target=self._run, args=(self._peers,), name="pdproxy_verifier", daemon=True)
            self._thread.start()
        self._peers.wake()

    def _run(self, peers: Peers) -> None:
        with contextlib.closing(peers):
            while self._send(peers):
                due = self._exchanges.next_due()
                peers.wait(LONGEST_POLL if due is None else min(LONGEST_POLL, max(0.0, due - time.monotonic())))
                self._receive(peers)
                self._give_up(peers)

    def _send(self, peers: Peers) -> bool:
        """Send what was ordered; False when the end was asked for."""
        for order in _drain(self._orders):
            if order is None:
                return False
            if isinstance(order, MetadataRequest):
                address, messages = order.address, self._exchanges.fetch_metadata(order, time.monotonic())
            else:
                write, address, questions = order
                messages = self._exchanges.ask(address, questions, time.monotonic(), write)
            for message in messages:
                peers.send(address, message)
        return True

    def _receive(self, peers: Peers) -> None:
        for address, reply in peers.received():
            results = self._exchanges.on_reply(address, reply)
            if results is None:  # kept open, it could send such answers for ever
                peers.drop(address)
                self._end(address, "it answers what nobody asked")
            self._publish(results or ())

    def _give_up(self, peers: Peers) -> None:
        results, silent = self._exchanges.overdue(time.monotonic())
        self._publish(results)
        for address in silent:
            peers.drop(address)
            self._end(address, "it did not answer in time")
        for address, why in peers.pop_lost().items():
            self._end(address, why)

    def _end(self, address: Address, why: str) -> None:
        self._publish(self._exchanges.on_lost(address, why))
        self._lost.put(address)

    def _publish(self, results: Iterable[Result]) -> None:
        for result in results:
            if isinstance(result, ReadVerdict):
                self._verdicts.put(result)
            else:
                self._results.put(result)


def _drain(source: queue.SimpleQueue[_Item]) -> list[_Item]:
    """Only one thread takes from `source`, so what it counts is there."""
    return [source.get_nowait() for _ in range(source.qsize())]
