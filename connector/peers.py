"""The sockets to prefill nodes' side channels, for one thread."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

import zmq

from connector.open_batches import Address
from connector.question import LONGEST_MESSAGE
from connector.side_channel import tcp

LOST = zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED
"""What ZMQ reports of a peer that closed its side, and of one that refused the connection."""


class Peers:
    """One DEALER socket an address, watched: a peer that dies is known at once, not when the time is up."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[Address, zmq.Socket[bytes]] = {}
        self._monitors: dict[Address, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()

    def send(self, address: Address, message: bytes) -> None:
        """Send to `address`; one that cannot be dialled, or a peer that reads nothing, will simply not answer."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket(address).send_multipart([b"", message], flags=zmq.NOBLOCK)

    def watch(self, readable: socket.socket) -> None:
        """Let `wait` return when `readable` can be read, too."""
        self._poller.register(readable, zmq.POLLIN)

    def wait(self, seconds: float) -> dict[Any, int]:
        """What can be read, after at most `seconds`; file descriptors and sockets are the keys."""
        return dict(self._poller.poll(int(seconds * 1000) + 1))

    def receive(self, ready: Mapping[Any, int]) -> list[tuple[Address, bytes]]:
        """Every message that has come in from the peers in `ready`."""
        found = []
        for address, peer in self._sockets.items():
            if peer in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        found.append((address, peer.recv_multipart(flags=zmq.NOBLOCK)[-1]))
        return found

    def lost(self, ready: Mapping[Any, int]) -> list[Address]:
        """Addresses whose peer has gone or refuses; `drop` them."""
        return [address for address, monitor in self._monitors.items() if monitor in ready]

    def drop(self, address: Address) -> None:
        """Close the socket to `address`, with whatever still waits in it; the next `send` opens a new one."""
        if address in self._sockets:
            peer, monitor = self._sockets.pop(address), self._monitors.pop(address)
            self._poller.unregister(peer)
            self._poller.unregister(monitor)
            peer.disable_monitor()
            monitor.close(linger=0)
            peer.close(linger=0)

    def close(self) -> None:
        """Close everything."""
        self._context.destroy(linger=0)

    def _socket(self, address: Address) -> zmq.Socket[bytes]:
        if address not in self._sockets:
            peer = self._context.socket(zmq.DEALER)
            peer.linger = 0
            peer.maxmsgsize = LONGEST_MESSAGE
            peer.ipv6 = ":" in address[0]
            self._sockets[address], self._monitors[address] = peer, peer.get_monitor_socket(LOST)
            for watched in (peer, self._monitors[address]):
                self._poller.register(watched, zmq.POLLIN)
            peer.connect(tcp(*address))
        return self._sockets[address]
