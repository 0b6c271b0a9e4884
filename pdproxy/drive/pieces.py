"""Handing out a stream piece by piece: what every `ReplyStream` has in common."""

import abc
from typing import Self

from pdproxy.sink import Sink


class Pieces(abc.ABC):
    """A `ReplyStream` that is read by iterating; leaving the iteration in any way but with a piece closes it."""

    def __init__(self) -> None:
        self._ready = b""
        """What goes out next."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            while not self._ready:
                self._ready = await self._advance()
        except BaseException:
            await self.aclose()
            raise
        ready, self._ready = self._ready, b""
        return ready

    async def pipe_to(self, sink: Sink) -> None:  # noqa: B027  # nothing is what most streams can do
        """See `ReplyStream`."""

    @abc.abstractmethod
    async def _advance(self) -> bytes:
        """What comes next; may be empty.

        Raises:
            StopAsyncIteration: nothing more does.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """See `ReplyStream`."""
