"""A decode rank's connections to prefill nodes' side channels. For one thread, the verifier's; nothing here blocks.

`Peers`: one connection an address, at most `most` of them. For one more, the connection is dropped that has waited for
its first answer for longest, else the one idle for longest. So a prefill node that answers is reached whatever other
addresses lead nowhere.

`Resolver`: host names to addresses; `getaddrinfo` may hang for as long as a name server is silent. Addresses written as
numbers need no look-up. A name is looked up in a thread of its own, at most one a name and `MOST_THREADS` in all, and
its address is kept; an old one is used while the name is looked up anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .messages import CHALLENGE_BYTES, LONGEST_REPLY, PROPERTY, QuestionSigner, Reply, read_reply
from .tcp_server import keep_alive
from .zmtp import Zmtp

MOST_THREADS = 128
"""A look-up cannot be ended. So many names whose server is silent, and further new names fail at once."""
MOST_NAMES = 1024
FRESH_FOR = 60.0
MOST_PEERS = 256
CHUNK = 65536
MOST_WAITING = 4096
"""Messages that wait for one connection to be made; what is beyond is dropped, and then not answered in time."""
MOST_BUFFERED = 64 * 1024 * 1024
"""Bytes of unfinished answers, in all."""

Address = tuple[str, int]
"""Host and side-channel port of a prefill node."""
SocketAddress = tuple[Any, ...]
LookUp = Callable[[str, int], tuple[socket.AddressFamily, SocketAddress]]
"""(host, port) → family and address; raises OSError."""


@dataclass(frozen=True, slots=True)
class ResolvedAddress:
    """A socket family, and an address in its form."""

    family: socket.AddressFamily
    address: SocketAddress


def resolve_by_system(host: str, port: int) -> tuple[socket.AddressFamily, SocketAddress]:
    """The system's resolver: IPv4 before IPv6, as the listener binds. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, address


class Resolver:
    """For one thread. `wake` is called in another one when a look-up has ended; `resolve` may block there."""

    def __init__(
        self, wake: Callable[[], None], clock: Callable[[], float], resolve: LookUp = resolve_by_system
    ) -> None:
        self._wake = wake
        self._clock = clock
        self._look_up = resolve
        self._lock = threading.Lock()
        self._running: set[tuple[str, int]] = set()
        self._found: OrderedDict[tuple[str, int], tuple[ResolvedAddress, float]] = OrderedDict()
        self._failed: dict[tuple[str, int], OSError] = {}

    def find(self, host: str, port: int) -> ResolvedAddress | None:
        """The address of `host:port`; None while it is looked up. Raises OSError for a name that has none."""
        with contextlib.suppress(OSError, UnicodeError):
            literal = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
            return ResolvedAddress(literal[0], literal[4])
        with self._lock:
            known = self._found.get((host, port))
            failed = self._failed.pop((host, port), None)
        if known is not None and self._clock() - known[1] < FRESH_FOR:
            return known[0]
        if failed is not None and known is None:
            raise failed
        self._start(host, port, optional=known is not None)
        return None if known is None else known[0]

    def _start(self, host: str, port: int, *, optional: bool) -> None:
        with self._lock:
            if (host, port) in self._running:
                return
            if len(self._running) >= MOST_THREADS:
                if optional:
                    return
                raise OSError(f"{MOST_THREADS} names are being looked up already")
            self._running.add((host, port))
        threading.Thread(target=self._run, args=(host, port), name="pdproxy_resolver", daemon=True).start()

    def _run(self, host: str, port: int) -> None:
        try:
            result: ResolvedAddress | OSError = ResolvedAddress(*self._look_up(host, port))
        except (OSError, UnicodeError) as error:
            result = OSError(str(error))
        with self._lock:
            self._running.discard((host, port))
            if isinstance(result, ResolvedAddress):
                self._found[host, port] = (result, self._clock())
                self._found.move_to_end((host, port))
            elif len(self._failed) < MOST_NAMES:
                self._failed[host, port] = result
            while len(self._found) > MOST_NAMES:
                self._found.popitem(last=False)
        self._wake()


@dataclass(eq=False, slots=True)
class _Peer:
    """One address. `socket` is None while its name is looked up; `signer` until the other end has sent READY."""

    address: Address
    zmtp: Zmtp
    challenge: bytes
    socket: socket.socket | None = None
    signer: QuestionSigner | None = None
    waiting: deque[bytes] = field(default_factory=deque)
    unsent: bytearray = field(default_factory=bytearray)
    answered: bool = False

    def on_ready(self, keys: Sequence[bytes]) -> QuestionSigner | None:
        """The signer of our messages on this connection; None before the other end's READY."""
        if self.signer is None and self.zmtp.peer is not None:
            self.signer = QuestionSigner(keys, self.zmtp.peer.get(PROPERTY, b""), self.challenge)
        return self.signer


class Peers:
    """One connection an address, made with the first message. `keys`: ticket keys; without any, nothing is signed."""

    def __init__(
        self,
        keys: Sequence[bytes],
        clock: Callable[[], float],
        most: int = MOST_PEERS,
        resolver: Resolver | None = None,
    ) -> None:
        self._keys = keys
        self._most = most
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._resolver = resolver or Resolver(self.wake, clock)
        self._peers: OrderedDict[Address, _Peer] = OrderedDict()
        self._replies: list[tuple[Address, Reply]] = []
        self._lost: dict[Address, str] = {}
        self._chunk = memoryview(bytearray(CHUNK))

    def __len__(self) -> int:
        return len(self._peers)

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        with contextlib.suppress(OSError):  # a full pipe wakes it anyway; at a closed one nothing waits
            self._wake.send(b"?")

    def send(self, address: Address, message: bytes) -> None:
        """Send to `address`, once it is connected; one that cannot be reached is reported by `pop_lost`."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._open(address)
        self._peers.move_to_end(address)
        if len(peer.waiting) < MOST_WAITING:
            peer.waiting.append(message)
        self._advance(peer)

    def wait(self, seconds: float) -> None:
        """Receive and send what there is on the connections; waits for that at most `seconds`."""
        for key, _ in self._selector.select(seconds):
            peer: _Peer | None = key.data
            if peer is None:
                with contextlib.suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
            elif self._peers.get(peer.address) is peer:  # else it was dropped in this very round
                self._on_ready_socket(peer)
        for peer in [peer for peer in self._peers.values() if peer.socket is None]:
            self._advance(peer)

    def received(self) -> list[tuple[Address, Reply]]:
        """Every reply that came in since the last call; where there are keys, only genuine ones."""
        replies, self._replies = self._replies, []
        return replies

    def pop_lost(self) -> dict[Address, str]:
        """Addresses whose connection has gone, or could not be made, since the last call, each with a reason."""
        lost, self._lost = self._lost, {}
        return lost

    def drop(self, address: Address) -> None:
        """Close the connection, with the messages that still wait in it; the next `send` opens a new one."""
        peer = self._peers.pop(address, None)
        if peer is not None and peer.socket is not None:
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def close(self) -> None:
        """Close everything."""
        for address in list(self._peers):
            self.drop(address)
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _open(self, address: Address) -> _Peer:
        if len(self._peers) >= self._most:
            pending = (one for one, peer in self._peers.items() if not peer.answered)
            self._lose(next(pending, next(iter(self._peers))), "too many other prefill addresses were asked since")
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        zmtp = Zmtp(b"DEALER", LONGEST_REPLY, {PROPERTY: challenge} if self._keys else None)
        self._peers[address] = peer = _Peer(address, zmtp, challenge)
        return peer

    def _lose(self, address: Address, why: str) -> None:
        self.drop(address)
        self._lost[address] = why

    def _advance(self, peer: _Peer) -> None:
        """Connect and send, as far as it goes without waiting."""
        try:
            if peer.socket is None:
                self._dial(peer)
            if peer.socket is not None:
                self._send(peer, peer.socket)
        except OSError as error:
            self._lose(peer.address, str(error))

    def _on_ready_socket(self, peer: _Peer) -> None:
        assert peer.socket is not None
        try:
            self._receive(peer, peer.socket)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._lose(peer.address, str(error))
        if peer.zmtp.fault is not None:
            self._lose(peer.address, f"what answers there is no side channel ({peer.zmtp.fault.value})")
        elif peer.address in self._peers:
            self._advance(peer)

    def _dial(self, peer: _Peer) -> None:
        found = self._resolver.find(*peer.address)
        if found is None:
            return
        peer.socket = socket.socket(found.family, socket.SOCK_STREAM)
        self._selector.register(peer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
        peer.socket.setblocking(False)
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(peer.socket)
        code = peer.socket.connect_ex(found.address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))

    def _send(self, peer: _Peer, connection: socket.socket) -> None:
        while peer.signer is not None and peer.waiting:
            peer.zmtp.send([b"", *peer.signer.sign(peer.waiting.popleft())])
        peer.unsent += b"".join(peer.zmtp.pieces)
        peer.zmtp.pieces.clear()
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while peer.unsent:
                del peer.unsent[: connection.send(peer.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(connection, events, peer)

    def _receive(self, peer: _Peer, connection: socket.socket) -> None:
        """Raises OSError when the connection cannot be made or has ended."""
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        count = connection.recv_into(self._chunk)
        if not count:
            raise ConnectionError("the other end closed the connection")
        peer.zmtp.receive(self._chunk[:count])
        while (frames := peer.zmtp.next_message()) is not None:
            self._on_message(frames, peer)
        peer.on_ready(self._keys)
        buffered = sum(one.zmtp.buffered for one in self._peers.values()) if peer.zmtp.buffered > CHUNK else 0
        if buffered > MOST_BUFFERED or len(peer.unsent) > LONGEST_REPLY:
            raise ConnectionError("the other end sends more than an answer may be")

    def _on_message(self, frames: tuple[bytes, ...], peer: _Peer) -> None:
        """Keep a genuine reply; a refusal needs no signature, since it grants nothing. Raises ConnectionError."""
        reply = read_reply(frames[1]) if len(frames) in (2, 3) and not frames[0] else None
        signer = peer.on_ready(self._keys)
        if reply is None or signer is None or not (isinstance(reply.body, str) or signer.genuine(frames[1:])):
            raise ConnectionError("what answers there is no side channel of ours, or has none of our ticket keys")
        peer.answered = True
        self._replies.append((peer.address, reply))
