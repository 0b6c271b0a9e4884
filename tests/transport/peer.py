"""A scripted server on loopback: a test sets byte for byte what it sends, and when."""

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

GENEROUS = 30.0
"""Seconds that a test waits for what should come at once, on a machine that is busy with other things."""


@dataclasses.dataclass
class Visit:
    """One connection that the peer accepted."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heads: list[bytes] = dataclasses.field(default_factory=list)
    bodies: list[bytes] = dataclasses.field(default_factory=list)
    over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def request(self) -> None:
        """Read one request, body included."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        self.bodies.append(await self.reader.readexactly(length))

    async def say(self, *parts: bytes) -> None:
        """Send the parts, each for itself."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def until_gone(self) -> None:
        """Return when the other side has closed."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Script = Callable[[Visit], Awaitable[None]]


@dataclasses.dataclass
class Peer:
    """A server that plays one script per connection; ``scripts`` are used in order, the last for all that follow."""

    port: int
    visits: list[Visit]
    scheme: str = "http"
    server: asyncio.Server | None = None

    def stop_listening(self) -> None:
        """Refuse new connections; those that are open stay."""
        if self.server is not None:
            self.server.close()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def all_gone(self) -> None:
        """Return when every connection is closed."""
        async with asyncio.timeout(GENEROUS):
            for visit in self.visits:
                await visit.over.wait()


@contextlib.asynccontextmanager
async def peer(*scripts: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    """Serve for the length of the block."""
    visits: list[Visit] = []
    running: set[asyncio.Task[None]] = set()

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = Visit(reader, writer)
        script = scripts[min(len(visits), len(scripts) - 1)]
        visits.append(visit)
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await script(visit)
        finally:
            running.discard(task)
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            visit.over.set()

    server = await asyncio.start_server(visited, "127.0.0.1", 0, ssl=tls, limit=2**20)
    try:
        port = server.sockets[0].getsockname()[1]
        yield Peer(port, visits, "https" if tls else "http", server)
    finally:
        server.close()
        ending = tuple(running)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next turn


def answer(body: bytes, *fields: bytes, status: bytes = b"200 OK") -> bytes:
    """A whole answer with a content-length."""
    lines = [b"HTTP/1.1 " + status, *fields, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def always(body: bytes, *fields: bytes, status: bytes = b"200 OK") -> Script:
    """Answer every request on a connection in the same way."""

    async def script(visit: Visit) -> None:
        while True:
            await visit.request()
            await visit.say(answer(body, *fields, status=status))

    return script


def saying(*parts: bytes) -> Script:
    """Read one request, send the parts, wait until the client closes."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(*parts)
        await visit.until_gone()

    return script


def hanging_up_after(*parts: bytes) -> Script:
    """Read one request, send the parts, close."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(*parts)

    return script
