"""Clients that send requests without pause, and check every answer."""

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
CLIENTS = 6
ENDPOINTS = (Endpoint.COMPLETIONS, Endpoint.CHAT)


class Load:
    """Streams of two endpoints, CLIENTS at a time.

    Attributes:
        ended: how many answers were "right"; of the others, how many of each description.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._turns = itertools.count()
        self.ended: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The clients run while inside; the block ends when their last requests have."""
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._run_client(stopping))
            try:
                yield
            finally:
                stopping.set()

    async def more(self, count: int) -> None:
        """Wait until so many more answers were right."""
        enough = self.ended["right"] + count
        while self.ended["right"] < enough:  # noqa: ASYNC110 - the caller bounds it
            await asyncio.sleep(0.02)

    async def _run_client(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            self.ended[await self._ask(ENDPOINTS[next(self._turns) % len(ENDPOINTS)])] += 1

    async def _ask(self, endpoint: Endpoint) -> str:
        body = {"model": MODEL, **body_for(endpoint, stream=True, tokens=TOKENS)}
        got = await self._client.post(endpoint, json=body)
        if got.status_code != 200:
            return f"{got.status_code} {got.text[:200]}"
        answer = read_answer(endpoint, got.content)
        return "right" if answer.ended and answer.texts == {0: right(endpoint, TOKENS)} else f"wrong: {answer}"
