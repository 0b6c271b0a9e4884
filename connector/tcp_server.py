"""A TCP server for untrusted peers, in one thread, with bounded memory, descriptors and CPU time whatever they send.

    more connections than may be        the longest idle one of the peer with the most is closed
    more than one peer may have         the longest idle one of that peer is closed
    no descriptor left to accept with   the same as the first; without any connection to close, accepting pauses
    more bytes than may be buffered     the connection with the most of the peer with the most is closed
    a greeting, a message or an answer  that is not finished in time: the connection is closed
    an answer that is not received      nothing more is read from that connection until it is
    more CPU time than one peer may use nothing more is read from that peer until the next window

So a new peer always gets in, and an honest peer with few connections keeps them while another holds all the rest.
A peer is an IPv4 address or the /64 network of an IPv6 address, which one host may have to itself. Peers that have
authenticated themselves (`ConnectionHandler.trusted`) are closed only after all others.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import resource
import selectors
import socket
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Protocol

from .zmtp import Zmtp

log = logging.getLogger("vllm.pdproxy.side_channel")

NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
PAUSE = 0.5
"""Seconds without accepting, where there is no descriptor for a connection and none of ours to close."""
TICK = 1.0
"""Seconds between two searches for slow connections."""
WINDOW = 0.1
"""Seconds over which a peer's CPU time is limited."""
SHARE = 0.25
"""The share of a window that the thread works for one peer: it takes its time from the engine, in the same process."""
CHUNK = 16384
BACKLOG = 512
MOST_ACCEPTED = 64
"""Connections accepted before the open ones are served again."""
MOST_PIECES = 64
LOG_EVERY = 60.0

Peer = tuple[bool, str]
"""Whether it has authenticated itself, and its address or network."""


class CloseReason(StrEnum):
    """Why the server closed a connection; labels of its metric."""

    CROWDED = "crowded"
    NO_DESCRIPTORS = "no_descriptors"
    MEMORY = "memory"
    SLOW = "slow"
    NOT_ZMTP = "not_zmtp"
    TOO_LONG = "too_long"


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Connections in all and of one peer; bytes buffered in all; seconds for the greeting, and for a message."""

    connections: int = 2048
    peer_connections: int = 1024
    buffered: int = 16 * 1024 * 1024
    opening: float = 5.0
    message: float = 10.0

    def within_descriptors(self) -> ServerLimits:
        """The same, with at most half of the descriptors that this process may have."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = self.connections if soft == resource.RLIM_INFINITY else min(self.connections, max(8, soft // 2))
        return ServerLimits(most, min(self.peer_connections, most), self.buffered, self.opening, self.message)


class ConnectionHandler(Protocol):
    """The protocol on one connection: its bytes, and the answers to its messages."""

    @property
    def zmtp(self) -> Zmtp:
        """The connection's end here."""

    @property
    def trusted(self) -> bool:
        """Whether the peer has authenticated itself."""

    def answer(self, frames: tuple[bytes, ...]) -> None:
        """Answer one message, through `zmtp.send`."""


@dataclass(eq=False, slots=True)
class _Connection:
    """One accepted connection. `pending`: answers not sent in full. `counted`: its bytes in the server's `buffered`.

    `resting`: its peer has used up its CPU time, and nothing is read until the next window.
    """

    socket: socket.socket
    peer: Peer
    handler: ConnectionHandler
    opened: float
    active: float
    pending: deque[memoryview] = field(default_factory=deque)
    counted: int = 0
    unfinished_since: float | None = None
    closed: bool = False
    resting: bool = False

    def flush(self) -> bool:
        """Send what the socket takes; True when nothing is left. Raises OSError when the connection is broken."""
        self.pending.extend(memoryview(piece) for piece in self.handler.zmtp.pieces)
        self.handler.zmtp.pieces.clear()
        while self.pending:
            try:
                sent = self.socket.sendmsg(list(islice(self.pending, MOST_PIECES)))
            except (BlockingIOError, InterruptedError):
                return False
            while self.pending and sent >= len(self.pending[0]):
                sent -= len(self.pending.popleft())
            if sent:
                self.pending[0] = self.pending[0][sent:]
        return True

    def is_slow(self, now: float, limits: ServerLimits) -> bool:
        """Whether it took too long over its greeting, or over a message or an answer."""
        if self.handler.zmtp.peer is None:
            return now - self.opened >= limits.opening
        return self.unfinished_since is not None and now - self.unfinished_since >= limits.message


class TcpServer:
    """Serves `listening`, an open socket, from `start` to `stop`.

    Args: `make_handler`, for a new connection; `on_closed` is called for each connection closed for a reason.
    """

    def __init__(
        self,
        listening: socket.socket,
        make_handler: Callable[[], ConnectionHandler],
        on_closed: Callable[[CloseReason], None],
        limits: ServerLimits,
    ) -> None:
        self._listening = listening
        self._make_handler = make_handler
        self._on_closed = on_closed
        self._limits = limits.within_descriptors()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._peers: dict[Peer, OrderedDict[_Connection, None]] = {}
        self._size = 0
        self._buffered = 0
        self._cpu_seconds: defaultdict[str, float] = defaultdict(float)
        self._resting: list[_Connection] = []
        self._window_start = 0.0
        self._paused_until: float | None = None
        self._last_slow_check = 0.0
        self._last_warning = -LOG_EVERY
        self._chunk = memoryview(bytearray(CHUNK))
        self._thread = threading.Thread(target=self._serve, name="pdproxy_side_channel", daemon=True)

    @property
    def size(self) -> int:
        """How many connections are open."""
        return self._size

    @property
    def buffered(self) -> int:
        """Bytes of unfinished messages in all."""
        return self._buffered

    def start(self) -> None:
        """Begin to serve, in a thread."""
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and close everything, the listening socket too."""
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._serve_ready():
                pass
        finally:
            for connection in [one for peer in self._peers.values() for one in peer]:
                self._close(connection)
            for closing in (self._selector, self._listening, self._woken):
                closing.close()

    def _serve_ready(self) -> bool:
        """One round over everything that is ready; False when the end was asked for."""
        wait_seconds = WINDOW if self._resting else TICK if self._paused_until is None else PAUSE
        for key, events in self._selector.select(wait_seconds):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listening:
                self._accept()
            elif not key.data.closed:  # it may have been, in this very round
                self._handle(key.data, events)
        now = time.monotonic()
        if now - self._window_start >= WINDOW:
            self._window_start = now
            self._begin_window()
        if now - self._last_slow_check >= TICK:
            self._last_slow_check = now
            self._close_slow(now)
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listening, selectors.EVENT_READ)
        return True

    # ---- connections open

    def _accept(self) -> None:
        for _ in range(MOST_ACCEPTED):
            try:
                accepted, address = self._listening.accept()
            except OSError as error:
                if error.errno in NO_DESCRIPTORS:
                    self._free_descriptor(error)
                return
            self._admit(accepted, network_of(address[0]))

    def _admit(self, accepted: socket.socket, network: str) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(accepted)
        peer = (False, network)
        if len(self._peers.get(peer, ())) >= self._limits.peer_connections:
            self._close_idle(peer, CloseReason.CROWDED)
        elif self._size >= self._limits.connections:
            self._close_idle(self._largest(), CloseReason.CROWDED)
        now = time.monotonic()
        connection = _Connection(accepted, peer, self._make_handler(), now, now)
        self._peers.setdefault(peer, OrderedDict())[connection] = None
        self._size += 1
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._handle(connection, selectors.EVENT_WRITE)

    def _free_descriptor(self, error: OSError) -> None:
        if self._size:
            self._close_idle(self._largest(), CloseReason.NO_DESCRIPTORS)
            return
        self._on_closed(CloseReason.NO_DESCRIPTORS)
        self._warn(f"no connection can be accepted: {error}; raise the limit of open files (ulimit -n)")
        self._selector.unregister(self._listening)
        self._paused_until = time.monotonic() + PAUSE

    # ---- bytes in and out

    def _begin_window(self) -> None:
        """Every peer has its CPU time again."""
        self._cpu_seconds.clear()
        resting, self._resting = self._resting, []
        for connection in resting:
            if not connection.closed:
                connection.resting = False
                events = selectors.EVENT_WRITE if connection.pending else selectors.EVENT_READ
                self._selector.register(connection.socket, events, connection)

    def _handle(self, connection: _Connection, events: int) -> None:
        network = connection.peer[1]
        if self._cpu_seconds[network] > WINDOW * SHARE and not connection.handler.trusted:
            self._selector.unregister(connection.socket)
            connection.resting = True
            self._resting.append(connection)
            return
        begun = time.thread_time()
        self._serve_one(connection, events)
        self._cpu_seconds[network] += time.thread_time() - begun

    def _serve_one(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not self._read(connection):
                self._close(connection)
                return
            self._answer(connection)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._close(connection)

    def _read(self, connection: _Connection) -> bool:
        """Read once; False when the peer has closed."""
        count = connection.socket.recv_into(self._chunk)
        connection.handler.zmtp.receive(self._chunk[:count])
        return count > 0

    def _answer(self, connection: _Connection) -> None:
        """Answer message after message, as long as the answers can be sent."""
        zmtp = connection.handler.zmtp
        sent = connection.flush()
        while sent and (message := zmtp.next_message()) is not None:
            connection.handler.answer(message)
            self._mark_active(connection)
            sent = connection.flush()
        if zmtp.fault is not None:
            self._close(connection, CloseReason(zmtp.fault.value))
            return
        sent = sent and connection.flush()
        self._selector.modify(connection.socket, selectors.EVENT_READ if sent else selectors.EVENT_WRITE, connection)
        self._account(connection, unfinished=not sent or zmtp.buffered > 0)

    def _mark_active(self, connection: _Connection) -> None:
        """A message was answered: it is the least idle connection of its peer, which may be trusted from now on."""
        connection.active, connection.unfinished_since = time.monotonic(), None
        self._remove(connection)
        connection.peer = (connection.handler.trusted, connection.peer[1])
        self._peers.setdefault(connection.peer, OrderedDict())[connection] = None

    def _account(self, connection: _Connection, *, unfinished: bool) -> None:
        """Count what stays buffered, and make room where it is too much."""
        if not unfinished:
            connection.unfinished_since = None
        elif connection.unfinished_since is None:
            connection.unfinished_since = time.monotonic()
        self._count_buffered(connection, connection.handler.zmtp.buffered)
        while self._buffered > self._limits.buffered:
            heaviest = max(self._peers.values(), key=lambda peer: sum(one.counted for one in peer))
            self._close(max(heaviest, key=lambda one: one.counted), CloseReason.MEMORY)

    def _count_buffered(self, connection: _Connection, size: int) -> None:
        self._buffered += size - connection.counted
        connection.counted = size

    # ---- connections close

    def _close_slow(self, now: float) -> None:
        slow = [one for peer in self._peers.values() for one in peer if one.is_slow(now, self._limits)]
        for connection in slow:
            self._close(connection, CloseReason.SLOW)

    def _largest(self) -> Peer:
        """The peer with the most connections, of those that are not trusted if there are any."""

        def weight(peer: Peer) -> tuple[bool, int, float]:
            connections = self._peers[peer]
            return not peer[0], len(connections), -next(iter(connections)).active

        return max(self._peers, key=weight)

    def _close_idle(self, peer: Peer, reason: CloseReason) -> None:
        self._close(next(iter(self._peers[peer])), reason)

    def _close(self, connection: _Connection, reason: CloseReason | None = None) -> None:
        if reason is not None:
            self._on_closed(reason)
            self._warn(f"a connection from {connection.peer[1]} was closed: {reason.value}")
        connection.closed = True
        if not connection.resting:
            self._selector.unregister(connection.socket)
        connection.socket.close()
        self._count_buffered(connection, 0)
        self._remove(connection)
        self._size -= 1

    def _remove(self, connection: _Connection) -> None:
        connections = self._peers[connection.peer]
        del connections[connection]
        if not connections:
            del self._peers[connection.peer]

    def _warn(self, what: str) -> None:
        """Log, once in a while; the metrics count every case."""
        now = time.monotonic()
        if now - self._last_warning >= LOG_EVERY:
            self._last_warning = now
            log.warning("KV side channel: %s (further cases within %.0f s are only counted).", what, LOG_EVERY)


def network_of(address: str) -> str:
    """An IPv4 address as it is; of an IPv6 address its /64 network, or the IPv4 address that is mapped into it."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))


def keep_alive(connection: socket.socket) -> None:
    """Have the system find out within two minutes when the other machine is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
