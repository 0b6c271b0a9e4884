"""Several uvicorn servers on one event loop, ended together, each on a port of its own."""

import asyncio
import contextlib
import gc
import logging
import math
import resource
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn

from pdproxy.errors import SettingsError
from pdproxy.observe.labels import ConnectionRefusal
from pdproxy.observe.refused_connections import OnRefused, uncounted
from pdproxy.server.listener import BACKLOG, Listener
from pdproxy.server.protocol import ConnectionLimits, GuardedProtocol, guarded
from pdproxy.settings.model import Settings
from pdproxy.settings.types import ReusePort
from pdproxy.sockets import keep_alive

_LOG = logging.getLogger("pdproxy.server")

HEAD_SECONDS = 30.0
"""For a request's head: what a slow mobile client may need, and no more."""
LAST_WORDS_SECONDS = 5.0
"""For clients to take the error that their request ends with at the end of the grace."""


MAX_OPEN_FILES = 1 << 20
GC_THRESHOLD = 10_000
"""New objects between two collections: a request makes hundreds, and nearly all are freed without the collector."""
OPERATORS_GRACE = 2.0
"""Seconds for an operator's request to end, once those of clients have."""

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


def http_config(settings: Settings, app: AsgiApp, grace: float, on_refused: OnRefused, **tls: object) -> uvicorn.Config:
    """The configuration of a port, with the limits of the settings.

    ``grace``: seconds for running requests to end. ``on_refused``: told of connections that come to nothing.
    """
    limits = ConnectionLimits(settings.limits.header_bytes, HEAD_SECONDS, settings.deadlines.stall, on_refused)
    return uvicorn.Config(
        app,
        http=guarded(limits),
        ws="none",
        interface="asgi3",  # uvicorn would look for a coroutine function
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the client's address is not used
        timeout_keep_alive=settings.listen.keep_alive,  # type: ignore[arg-type] # a loop's timer takes any number
        timeout_graceful_shutdown=math.ceil(grace),
        **tls,  # type: ignore[arg-type]
    )


class Server(uvicorn.Server):
    """A uvicorn server without signal handlers, for `serve` has them, which accepts its connections by `Listener`.

    ``bound``: the socket that it accepts them from.
    """

    def __init__(self, config: uvicorn.Config, bound: socket.socket) -> None:
        super().__init__(config)
        self.bound = bound
        self._listeners: list[Listener] = []
        self._connecting: set[asyncio.Task[None]] = set()

    async def run_port(self) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[self.bound])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, but for who accepts."""
        await super().startup([])
        self._listeners = [Listener(each, self._take, self._on_refused) for each in sockets or ()]
        for listener in self._listeners:
            listener.open()

    def _take(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted."""
        task = asyncio.get_running_loop().create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    @property
    def _on_refused(self) -> OnRefused:
        http = self.config.http
        return http.limits.on_refused if isinstance(http, type) and issubclass(http, GuardedProtocol) else uncounted

    async def _connect(self, connection: socket.socket) -> None:
        """Give the connection to a protocol, after its TLS handshake."""
        loop = asyncio.get_running_loop()
        if self.should_exit:
            connection.close()
            return
        try:
            await loop.connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl)
        except OSError as error:  # TLS errors are such, too
            connection.close()
            if isinstance(error, (ssl.SSLError, ConnectionAbortedError)):  # else it has gone, as probes of a port do
                self._on_refused(ConnectionRefusal.TLS, str(error))

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state={}
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which cancels what outlives the grace and goes on: the errors that these requests end with must
        still be written.
        """
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets)
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, GuardedProtocol):
                connection.end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_tasks_to_complete(), LAST_WORDS_SECONDS)

    def cut(self) -> None:
        """Wait for no request any more, and cut all connections: from Python 3.12 on, a server ends after the last."""
        self.force_exit = True
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()

    @property
    def address(self) -> str:
        """``host:port`` as bound."""
        host, port = self.bound.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, setting: str, reuse: ReusePort = ReusePort.OFF) -> socket.socket:
    """A socket that listens at an address: from now on clients' connections wait in its queue.

    With ``reuse``, other processes of this user may listen there too, if they also ask for it.

    Raises:
        SettingsError: the address is taken, or not this machine's; names the setting.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse is ReusePort.ON:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    keep_alive(bound)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)  # of two that bind at once, this is refused to the second
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
        operators.should_exit = True
        for server in (clients, operators):
            server.cut()
    leaving.set()
    clients.should_exit = True


async def _run(port: Server, other: Server, leaving: asyncio.Event) -> None:
    """When one port has ended, for whatever reason, the other one has to."""
    await port.run_port()
    leaving.set()
    other.should_exit = True


def raise_file_limit() -> None:
    """Raise the limit of open files: a stream takes up to three sockets, and 1,024 is the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    with contextlib.suppress(OSError, ValueError):  # a kernel with a lower limit of its own: then it stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def tune_collector() -> None:
    """Take whatever was built by now out of the collector's scans: it lives as long as the process (`make bench`).

    Of a hundred thousand objects some hundred could be freed: to look for them would take a tenth of the start.
    """
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    gc.enable()
