"""Whether the client is still there while its answer is made."""

import asyncio
from types import TracebackType
from typing import Self

from pdproxy.intake.asgi import ClientGone, Receive


class Presence:
    """Cancels the task it was entered in when the client leaves.

    Used as an async context manager after the body was read; leaving the context ends the watch. A cancellation that
    the client caused comes out as `ClientGone`; any other stays what it is.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._watch: asyncio.Task[None] | None = None

    def left(self) -> bool:
        """The client has gone."""
        return self._gone

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._watch = asyncio.create_task(self._wait_for_leave(task), name="presence")
        return self

    async def _wait_for_leave(self, task: asyncio.Task[object]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watch is not None
        self._watch.cancel()
        if self._gone and kind is asyncio.CancelledError:
            task = asyncio.current_task()
            # Somebody else (shutdown) may have cancelled as well: then the cancellation stays.
            if task is not None and task.uncancel() == 0:
                raise ClientGone from None
