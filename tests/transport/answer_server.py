"""A server on loopback that plays scripted answers, whatever connection they are asked for on."""

import asyncio
import contextlib
from collections.abc import Sequence

from tests.transport.answers import Answer

STUCK = 0.03
"""Seconds until the server closes the connection of a client that waits for more; no result depends on the number."""


class AnswerServer:
    """Plays the answers in their order."""

    def __init__(self, plays: Sequence[Answer]) -> None:
        self._plays = plays
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked = 0
        self.connections: list[int] = []
        """On which connection each request came."""
        self.read = [asyncio.Event() for _ in plays]
        """To be set when the client is done with an answer."""
        self.ready = [asyncio.Event() for _ in plays]
        """The connection is closed, or waits for the next request."""

    async def __aenter__(self) -> "AnswerServer":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(self._serve(reader, writer, len(self._tasks))))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        goes_on = True
        try:
            while goes_on:
                await reader.readuntil(b"\r\n\r\n")
                self.connections.append(number)
                at, self.asked = self.asked, self.asked + 1
                with contextlib.suppress(ConnectionError):
                    goes_on = await self._play(at, writer)
                if not goes_on:
                    writer.transport.close()
                await asyncio.sleep(0)
                self.ready[at].set()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _play(self, at: int, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays."""
        for piece in self._plays[at].pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if not self._plays[at].closes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STUCK):
                    await self.read[at].wait()
        return self.read[at].is_set() and not self._plays[at].closes
