"""Ports on the loopback address."""

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path

HOST = "127.0.0.1"
LOWEST = 10000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_BEGIN = 32768
FEWEST = 2000


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
    """Return `count` different ports that were free a moment ago (all were held at once).

    None that the system itself gives away: an engine needs a minute until it binds its port, and by then any outgoing
    connection might have it. Raises PortTakenError where there are not so many.
    """
    with ExitStack() as held:
        ports = islice((port for port in _from_anywhere(end_of_ours()) if _hold(held, port)), count)
        found = list(ports)
    if len(found) < count:
        raise PortTakenError(f"there are no {count} free ports from {LOWEST} on")
    return found


def free_row(count: int) -> list[int]:
    """The same for ports in a row, as data-parallel ranks take them. Raises PortTakenError where there is no row."""
    for start in _from_anywhere(end_of_ours() - count):
        row = list(range(start, start + count))
        with ExitStack() as held:
            if all(_hold(held, port) for port in row):
                return row
    raise PortTakenError(f"there are no {count} free ports in a row from {LOWEST} on")


def end_of_ours() -> int:
    """Where the ports begin that the system picks from for sockets that ask for none; a few are ours in any case."""
    try:
        begin = int(EPHEMERAL.read_text(encoding="ascii").split()[0])
    except FileNotFoundError:
        begin = USUAL_BEGIN
    return max(begin, LOWEST + FEWEST)


def _from_anywhere(end: int) -> Iterator[int]:
    """All ports from LOWEST to `end`, from one that chance names: two that look at once should not meet."""
    first = random.SystemRandom().randrange(LOWEST, end)
    return chain(range(first, end), range(LOWEST, first))


def _hold(held: ExitStack, port: int) -> bool:
    try:
        held.enter_context(bind(port))
    except OSError:
        return False
    return True


def require_free(port: int, purpose: str, consequence: str) -> None:
    """Raise PortTakenError if `port` is taken."""
    try:
        bind(port).close()
    except OSError as error:
        raise PortTakenError(f"port {port} ({purpose}) is in use on {HOST}: {consequence}") from error
