"""Several uvicorn servers on one event loop, ended together."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence

import uvicorn

from pdproxy.errors import SettingsError

_LOG = logging.getLogger("pdproxy.server")


class Server(uvicorn.Server):
    """A uvicorn server on a bound socket, without signal handlers: `serve` has them."""

    def __init__(self, config: uvicorn.Config, bound: socket.socket) -> None:
        super().__init__(config)
        self.bound = bound

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

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


async def serve(ports: Sequence[Server], leaving: asyncio.Event) -> None:
    """Serve until a signal (SIGTERM, SIGINT) or until a port ends; running requests get their time to finish.

    ``leaving``: set when the shutdown begins, so that /ready shows it.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave, ports, leaving)
    try:
        async with asyncio.TaskGroup() as group:
            for port in ports:
                group.create_task(_run(port, ports, leaving))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def leave(ports: Sequence[Server], leaving: asyncio.Event) -> None:
    """Begin the shutdown; a second call ends at once."""
    if leaving.is_set():
        _LOG.warning("ending at once: running requests are cut")
        for port in ports:
            port.force_exit = True
    leaving.set()
    for port in ports:
        port.should_exit = True


async def _run(port: Server, ports: Sequence[Server], leaving: asyncio.Event) -> None:
    await port.serve(sockets=[port.bound])
    if not leaving.is_set():
        leave(ports, leaving)
