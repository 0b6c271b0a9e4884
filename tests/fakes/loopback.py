"""A fake node on a real loopback socket, with asyncio streams: for the few checks that need sockets."""

import asyncio
import contextlib
from collections.abc import Callable

from tests.fakes.faults import FaultKind
from tests.fakes.node import FakeNode, Script


class LoopbackNode:
    """Serves a `FakeNode` over HTTP/1.1; also an async context manager.

    Args:
        node: what it serves.
        pace: seconds between two pieces of a body.
        idle: seconds after an answer when it closes its connection, asked for each answer, whatever has arrived by
            then; None: never.
        loses: asked with the path and body of each request: True: it is processed, and instead of an answer the
            connection ends.
        host: the address that it listens on: for nodes on hosts of their own, another one of 127.0.0.0/8.
    """

    def __init__(
        self,
        node: FakeNode,
        pace: float = 0.0,
        idle: Callable[[], float] | None = None,
        loses: Callable[[str, bytes], bool] = lambda *_: False,
        host: str = "127.0.0.1",
    ) -> None:
        self.node = node
        self._pace = pace
        self._idle = idle
        self._loses = loses
        self._host = host
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.scheduled = asyncio.Event()
        """Cleared while the process gets no CPU, as after SIGSTOP: connections stand, nothing is read or written."""
        self.scheduled.set()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    async def start(self) -> None:
        """Listen; on the port it had before, if there was one."""
        self._server = await asyncio.start_server(self._accept, self._host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Stop listening, cut every connection, forget what is held: as SIGKILL does."""
        self.node.die()
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def connections(self) -> int:
        """Open connections."""
        return len(self._tasks)

    async def __aenter__(self) -> "LoopbackNode":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # it came in while the node was killed
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also where it was cancelled before it began

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        idle = None
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, TimeoutError):
            while await self._exchange(reader, writer, idle):
                idle = None if self._idle is None else self._idle()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: float | None) -> bool:
        async with asyncio.timeout(idle):
            head = await reader.readuntil(b"\r\n\r\n")
        await self.scheduled.wait()
        lines = head.decode("latin-1").split("\r\n")
        headers = tuple(
            (name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:-2])
        )
        length = int(dict(headers).get("content-length", "0"))
        path = lines[0].split(" ")[1]
        body = await reader.readexactly(length)
        script = self.node.respond(path, body, headers)
        if self._loses(path, body):
            return False
        self.node.running += 1
        try:
            _write_head(script, writer)
            return await self._play(script, reader, writer)
        finally:
            self.node.running -= 1

    async def _play(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for piece in script.pieces:
            if script.computed:
                await self.node.stepping.wait()
            await self.scheduled.wait()
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if _is_chunked(script) else piece)
            await writer.drain()
            await asyncio.sleep(self._pace)
        match script.kind:
            case FaultKind.RESET:
                return False
            case FaultKind.STALL | FaultKind.HANG:
                await reader.read(1)
                return False
            case _:
                writer.write(b"0\r\n\r\n" if _is_chunked(script) else b"")
                await writer.drain()
                return True


def _write_head(script: Script, writer: asyncio.StreamWriter) -> None:
    if script.status:
        head = "".join(f"{name}: {value}\r\n" for name, value in script.headers)
        framing = "transfer-encoding: chunked\r\n" if _is_chunked(script) else ""
        writer.write(f"HTTP/1.1 {script.status} X\r\n{head}{framing}\r\n".encode())


def _is_chunked(script: Script) -> bool:
    """A script that tells its length is written as it is."""
    return all(name != "content-length" for name, _ in script.headers)
