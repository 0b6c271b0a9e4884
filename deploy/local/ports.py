"""Ports on the loopback address."""

import socket
from contextlib import ExitStack

HOST = "127.0.0.1"


class PortTakenError(Exception):
    """Somebody listens there already; the message says who needed the port and why it matters."""


def bind(port: int) -> socket.socket:
    """Bind as a server would, connections in TIME_WAIT notwithstanding. Raises OSError when somebody listens there."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HOST, port))
    except OSError:
        bound.close()
        raise
    return bound


def free_ports(count: int) -> list[int]:
    """Return `count` different ports that were free a moment ago (all were held at once)."""
    with ExitStack() as held:
        return [held.enter_context(bind(0)).getsockname()[1] for _ in range(count)]


def require_free(port: int, purpose: str, consequence: str) -> None:
    """Raise PortTakenError if `port` is taken."""
    try:
        bind(port).close()
    except OSError as error:
        raise PortTakenError(f"port {port} ({purpose}) is in use on {HOST}: {consequence}") from error
