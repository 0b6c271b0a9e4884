"""Tickets that go from the prefill node to the decode node directly, beside the way by the proxy, which is longer.

    decode node     publishes where its side channel takes tickets (`write_address`), as a label of a metric
    proxy           names this address, and the id of the wait, in the prefill leg; it does not look into the address
    prefill node    `TicketSender`: sends the ticket there when the prefill has ended, in a thread of its own
    decode node     `TicketInbox`: from the side channel's thread to the engine's, which settles the wait

Nothing depends on it. What is lost, late, refused or sent to the wrong node has no consequence: the proxy delivers the
same ticket, and the first one counts (`waiting_requests`).

A prefill node connects to no address that anybody makes up. With ticket keys an address is signed by the node that
listens there: who asks for a prefill can have the node connect to decode nodes with the same keys alone. Without keys
`pdproxy_allowed_hosts` bounds it, as it bounds where a decode node connects to for an unsigned ticket.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from connector import ticket_fields
from connector.counters import Counters
from connector.messages import LONGEST_QUESTION, SentTicket, TicketSend, decode_ticket, encode_ticket, write_ticket
from connector.peers import Address, Peers
from connector.ticket import Ticket
from connector.ticket_fields import Refusal
from connector.transfer_params import Waiter, is_id

NOWHERE = frozenset({"", "localhost", "0.0.0.0", "::"})
"""Hosts that say nothing to another node. vLLM's side channel is at the second unless it is told otherwise."""
REPLY_SECONDS = 2.0
SHUT_SECONDS = 10.0
"""For so long nothing is sent to an address that could not be reached, did not answer, or took no tickets."""
MOST_SHUT = 1024
MOST_QUEUED = 1024
"""Tickets that wait for the thread."""
LONGEST_TICKET = LONGEST_QUESTION - 4096
MOST_INBOX_BLOCKS = 1 << 20
"""Of the tickets that wait for the engine's thread, in all."""

_DOMAIN = b"pdproxy ticket address\n"


def write_address(host: str, port: int, keys: Sequence[bytes]) -> str | None:
    """The address as a node publishes it, signed if there is a key; None for one that says nothing to other nodes."""
    if host in NOWHERE:
        return None
    place = f"{port} {host}"
    return f"{place} {_mac(keys[0], place)}" if keys else place


def read_address(address: str, keys: Sequence[bytes], hosts: frozenset[str]) -> Address | None:
    """Where to connect to; None for what is no address, has no signature by one of our keys, or is not among `hosts`
    (where those are given)."""
    port, _, rest = address.partition(" ")
    host, _, mac = rest.partition(" ")
    made = [hmac.compare_digest(_mac(key, f"{port} {host}").encode(), mac.encode(errors="replace")) for key in keys]
    if made and not any(made):
        return None
    try:
        ticket_fields.host({"remote_host": host})
    except ticket_fields.RefusedError:
        return None
    if not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536):
        return None
    return (host, int(port)) if not hosts or host in hosts else None


def _mac(key: bytes, place: str) -> str:
    return hmac.digest(key, _DOMAIN + place.encode(errors="replace"), "sha256").hex()


class TicketInbox:
    """Tickets for waits, from the side channel's thread to the engine's. `parse` says whether one is good; `on_arrival`
    is called when there is one to take."""

    def __init__(
        self, parse: Callable[[Any], Ticket | Refusal], most: int, on_arrival: Callable[[], None] = lambda: None
    ) -> None:
        self._parse = parse
        self._most = most
        self._on_arrival = on_arrival
        self._lock = threading.Lock()
        self._tickets: deque[tuple[str, Ticket]] = deque()
        self._blocks = 0

    def put(self, wait: str, encoded: bytes) -> bool:
        """Whether it is a good ticket, and there is room for it. In the side channel's thread, whose time for each peer
        is bounded."""
        ticket = self._parse(decode_ticket(encoded)) if is_id(wait) else None
        if not isinstance(ticket, Ticket):
            return False
        blocks = sum(map(len, ticket.block_ids))
        with self._lock:
            if len(self._tickets) >= self._most or self._blocks + blocks > MOST_INBOX_BLOCKS:
                return False
            self._tickets.append((wait, ticket))
            self._blocks += blocks
        self._on_arrival()
        return True

    def take(self) -> Sequence[tuple[str, Ticket]]:
        """Everything that came since the last call, in order. In the engine's thread."""
        if not self._tickets:
            return ()
        with self._lock:
            taken, self._tickets, self._blocks = self._tickets, deque(), 0
        return taken


class TicketSender:
    """The thread. `send` and `close` are for one other thread, the engine's, and do not wait for anybody's answer.

    `keys`, `hosts`: as `read_address` takes them; the keys may change.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        hosts: frozenset[str],
        counters: Counters,
        peers: Callable[[], Peers] | None = None,
    ) -> None:
        self._keys = keys
        self._hosts = hosts
        self._counters = counters
        self._make_peers = peers or (lambda: Peers(keys, time.monotonic))
        self._peers: Peers | None = None
        self._thread: threading.Thread | None = None
        self._orders: queue.SimpleQueue[tuple[Waiter, bytes] | None] = queue.SimpleQueue()
        self._numbers = count(1)
        self._open: OrderedDict[int, tuple[Address, float]] = OrderedDict()
        self._shut: OrderedDict[Address, float] = OrderedDict()

    def send(self, waiter: Waiter, ticket: Mapping[str, Any]) -> None:
        """Have a ticket sent to each address; the thread starts with the first one. It is encoded here: vLLM puts a
        field of its own into this very map as soon as it has it."""
        if self._orders.qsize() >= MOST_QUEUED:
            self._counters.ticket_sent(TicketSend.NOT_SENT)
            return
        self._orders.put((waiter, encode_ticket(ticket)))
        if self._peers is None:
            self._peers = self._make_peers()
            run = threading.Thread(target=self._run, args=(self._peers,), name="pdproxy_ticket_sender", daemon=True)
            run.start()
            self._thread = run
        self._peers.wake()

    def close(self) -> None:
        """End the thread and close its sockets. May be called twice."""
        if self._thread is not None and self._peers is not None:
            self._orders.put(None)
            self._peers.wake()
            self._thread.join()
            self._thread = None

    def _run(self, peers: Peers) -> None:
        with contextlib.closing(peers):
            while self._send_ordered(peers):
                peers.wait(self._next_due(time.monotonic()))
                self._on_replies(peers)
                self._give_up(peers, time.monotonic())

    def _send_ordered(self, peers: Peers) -> bool:
        """False when the end was asked for."""
        for _ in range(self._orders.qsize()):
            order = self._orders.get_nowait()
            if order is None:
                return False
            self._send_one(peers, *order)
        return True

    def _send_one(self, peers: Peers, waiter: Waiter, encoded: bytes) -> None:
        now = time.monotonic()
        for written in waiter.addresses:
            address = read_address(written, self._keys, self._hosts)
            if address is None:
                self._counters.ticket_sent(TicketSend.BAD_ADDRESS)
            elif len(encoded) > LONGEST_TICKET or self._shut.get(address, now) > now:
                self._counters.ticket_sent(TicketSend.NOT_SENT)
            else:
                number = next(self._numbers)
                self._open[number] = (address, now + REPLY_SECONDS)
                peers.send(address, write_ticket(SentTicket(number, waiter.wait, encoded)))

    def _on_replies(self, peers: Peers) -> None:
        for address, reply in peers.received():
            sent = self._open.pop(reply.number, None)
            if sent is None or sent[0] != address:
                peers.drop(address)
                self._end(address, TicketSend.REFUSED)
            elif reply.body == ():
                self._counters.ticket_sent(TicketSend.TAKEN)
            else:
                self._counters.ticket_sent(TicketSend.REFUSED)
                self._close(address)

    def _give_up(self, peers: Peers, now: float) -> None:
        for address in {address for address, due in self._open.values() if due <= now}:
            peers.drop(address)
            self._end(address, TicketSend.UNREACHABLE)
        for address in peers.lost():
            self._end(address, TicketSend.UNREACHABLE)

    def _end(self, address: Address, outcome: TicketSend) -> None:
        """What was sent to this address will not be answered. A connection that ends while nothing is asked of it may
        be made again at once: its node may have restarted."""
        unanswered = [number for number, sent in self._open.items() if sent[0] == address]
        for number in unanswered:
            del self._open[number]
            self._counters.ticket_sent(outcome)
        if unanswered:
            self._close(address)

    def _close(self, address: Address) -> None:
        self._shut[address] = time.monotonic() + SHUT_SECONDS
        self._shut.move_to_end(address)
        if len(self._shut) > MOST_SHUT:
            self._shut.popitem(last=False)

    def _next_due(self, now: float) -> float:
        """Numbers are given out in order, and so are the times."""
        first = next(iter(self._open.values()), None)
        return 1.0 if first is None else max(0.0, min(1.0, first[1] - now))
