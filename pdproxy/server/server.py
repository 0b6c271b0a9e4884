"""Several uvicorn servers on one event loop, ended together."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn

from pdproxy.errors import SettingsError

_LOG = logging.getLogger("pdproxy.server")

LAST_WORDS_SECONDS = 5.0
"""For clients to take the error that their request ends with at the end of the grace."""


class Server(uvicorn.Server):
    """A uvicorn server on a bound socket, without signal handlers: `serve` has them."""

    def __init__(self, config: uvicorn.Config, bound: socket.socket) -> None:
        super().__init__(config)
        self.bound = bound

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which cancels what outlives the grace and goes on: the errors that these requests end with must
        still be written.
        """
        await super().shutdown(sockets)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_tasks_to_complete(), LAST_WORDS_SECONDS)

    @property
    def address(self) -> str:
        """``host:port`` as bound."""
        host, port = self.bound.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A socket bound to an address.

    Raises:
        SettingsError: it is taken, or not this machine's; names the setting.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise SettingsError(f"{setting}: {host}:{port} cannot be listened on: {error.strerror}.") from error
    return bound


async def serve(clients: Server, operators: Server, leaving: asyncio.Event) -> None:
    """Serve until a signal (SIGTERM, SIGINT) or until a port ends; running requests get their time to finish.

    The operators' port stays open until they have: an hour of streams is an hour in which somebody looks.

    ``leaving``: set when the shutdown begins, so that /ready shows it.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave, clients, operators, leaving)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_run(operators, clients, leaving))
            group.create_task(_run(clients, operators, leaving))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def leave(clients: Server, operators: Server, leaving: asyncio.Event) -> None:
    """Begin the shutdown; a second call ends at once."""
    if leaving.is_set():
        _LOG.warning("ending at once: running requests are cut")
        clients.force_exit = operators.force_exit = operators.should_exit = True
    leaving.set()
    clients.should_exit = True


async def _run(port: Server, other: Server, leaving: asyncio.Event) -> None:
    """When one port has ended, for whatever reason, the other one has to."""
    await port.serve(sockets=[port.bound])
    leaving.set()
    other.should_exit = True
