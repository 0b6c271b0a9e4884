"""Clients that ask without pause, and judge every answer."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator

import httpx

from pdproxy.request import Endpoint
from tests.orchestration.answers import read_answer
from tests.orchestration.prompts import body_for, right

MODEL = "m"
TOKENS = 24
ASKERS = 6
ENDPOINTS = (Endpoint.COMPLETIONS, Endpoint.CHAT)


class Load:
    """Streams of two endpoints, ASKERS at a time.

    Attributes:
        ended: how many answers were right; what else came, by what it was.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._turns = itertools.count()
        self.ended: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While inside, they ask; on leaving, they get their last answers."""
        leave = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(ASKERS):
                group.create_task(self._ask_on(leave))
            try:
                yield
            finally:
                leave.set()

    async def more(self, count: int) -> None:
        """Wait for so many right answers from now on."""
        enough = self.ended["right"] + count
        while self.ended["right"] < enough:  # noqa: ASYNC110 - the caller bounds it
            await asyncio.sleep(0.02)

    async def _ask_on(self, leave: asyncio.Event) -> None:
        while not leave.is_set():
            self.ended[await self._ask(ENDPOINTS[next(self._turns) % len(ENDPOINTS)])] += 1

    async def _ask(self, endpoint: Endpoint) -> str:
        body = {"model": MODEL, **body_for(endpoint, stream=True, tokens=TOKENS)}
        got = await self._client.post(endpoint, json=body)
        if got.status_code != 200:
            return f"{got.status_code} {got.text[:200]}"
        told = read_answer(endpoint, got.content)
        return "right" if told.ended and told.texts == {0: right(endpoint, TOKENS)} else f"wrong: {told}"
