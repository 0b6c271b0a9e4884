"""Many streams at once, each piece timed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from deploy.gpu.asking import texts

PATIENCE_S = 900.0
"""For all streams of one load."""


@dataclass(eq=False)
class Stream:
    """One client's stream so far. Times are monotonic seconds: of its request, and of each piece."""

    prompt: str
    text: str = ""
    failure: str = ""
    asked: float = 0.0
    at: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.at[0] - self.asked if self.at else float("nan")

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in pairwise(self.at)]

    @property
    def longest_stall(self) -> float:
        """Seconds without a piece, at most."""
        return max((after - before for before, after in pairwise((self.asked, *self.at))), default=0.0)

    def heard(self, line: str) -> None:
        """A line of the body came. Raises ValueError for an error event."""
        for text in texts(line):
            self.at.append(time.monotonic())
            self.text += text
        if line.startswith("data: {") and (usage := json.loads(line.removeprefix("data: ")).get("usage")):
            self.output_tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


class Load:
    """Streams that run while inside `running`."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Something came, or failed."""
        self._news.set()

    async def until(self, reached: Callable[["Load"], bool]) -> None:
        """Until they have got so far, or one has failed. Raises TimeoutError after PATIENCE_S."""
        async with asyncio.timeout(PATIENCE_S):
            while not (reached(self) or any(stream.failure for stream in self.streams)):
                self._news.clear()
                await self._news.wait()

    def under_way(self) -> bool:
        """More than half have begun: every decode node is in the middle of some."""
        return 2 * sum(len(stream.at) > 3 for stream in self.streams) > len(self.streams)

    def begun(self) -> bool:
        """The first has begun: of the others, prefills are under way."""
        return any(stream.at for stream in self.streams)


def body(model: str, prompt: str, max_tokens: int, **more: object) -> dict[str, Any]:
    """A streamed completion at temperature 0, with its usage."""
    asked = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return {**asked, "stream_options": {"include_usage": True}, **more}


@asynccontextmanager
async def running(url: str, streams: list[Stream], bodies: Sequence[dict[str, Any]]) -> AsyncIterator[Load]:
    """Send all at once; when the block is left, wait for their ends. Raises TimeoutError after PATIENCE_S."""
    load = Load(streams)
    async with asyncio.timeout(PATIENCE_S), client_of_many() as client, asyncio.TaskGroup() as group:
        for stream, each in zip(streams, bodies, strict=True):
            group.create_task(follow(client, url, load, stream, each))
        yield load


def client_of_many() -> httpx.AsyncClient:
    """An HTTP client without a limit for connections."""
    return httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None))


async def follow(client: httpx.AsyncClient, url: str, load: Load, stream: Stream, asked: dict[str, Any]) -> None:
    """One stream to its end; what goes wrong stands in it."""
    stream.asked = time.monotonic()
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=asked) as answer:
            if answer.is_error:
                stream.failure = f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}"
            else:
                async for line in answer.aiter_lines():
                    stream.heard(line)
                    load.tell()
    except (httpx.HTTPError, ValueError) as error:
        stream.failure = f"{type(error).__name__}: {error}"
    load.tell()
