"""TCP keep-alive: a peer whose machine is gone, or a firewall that forgot the connection, is noticed in two minutes."""

import socket

_IDLE, _BETWEEN, _PROBES = 60, 15, 4
"""Seconds of idling until the first probe, seconds between two, probes until the connection is given up."""


def keep_alive(connection: socket.socket) -> None:
    """Have the system probe a connection that idles; a listening socket passes this on to what it accepts (Linux)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _IDLE), ("TCP_KEEPINTVL", _BETWEEN), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, option):  # macOS names the first one otherwise
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
