"""Run many clients at once, each with one stream, and time every piece.

They read the wire themselves: a client library takes longer for a piece than the engines do.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import httpx
from openai import AsyncOpenAI

from deploy.local.model.quiz import Quiz, recite
from deploy.local.node import SERVED_NAME
from tests.e2e.asking import Way

PATIENCE_S = 300.0
"""Seconds for all streams; a busy machine is slow without being wrong."""
TOKENS = 400
LINES = 48
MOST_TOKENS = 260
DECISIVE = 0.5
"""A lead in nats that rounding cannot change."""
DATA = "data: "
STREAMED = (Way.COMPLETION_STREAM, Way.CHAT_STREAM)


@dataclass(frozen=True)
class UndisturbedAnswer:
    """The answer of a single engine, undisturbed. `margin`: the smallest lead of a best token, in nats."""

    text: str
    finish: str
    margin: float


@dataclass
class Stream:
    """One client's stream so far. `asked`, `at`: monotonic seconds of the request and of each piece."""

    way: Way
    question: Quiz
    expected: UndisturbedAnswer
    text: str = ""
    finish: str = ""
    failure: str = ""
    asked: float = 0.0
    at: list[float] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether it ended properly with the tokens of a single engine."""
        return not self.failure and (self.text, self.finish) == (self.expected.text, self.expected.finish)

    @property
    def longest_stall(self) -> float:
        """The longest pause in seconds between two pieces, or before the first one."""
        return max((after - before for before, after in pairwise((self.asked, *self.at))), default=0.0)

    def __str__(self) -> str:
        got = f"{self.way}: {self.failure or self.finish} after {len(self.at)} pieces: {self.text!r}"
        return f"{got}\n    instead of {self.expected.finish}: {self.expected.text!r}"


class StreamLoad:
    """All streams of a test; they run inside `start_stream_load`."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams
        self._news = asyncio.Event()

    def begun(self, pieces: int = 1) -> int:
        """How many streams have this many pieces."""
        return sum(len(stream.at) >= pieces for stream in self.streams)

    def under_way(self) -> bool:
        """Whether more than half of the streams have begun, so that each of two nodes is in the middle of some."""
        return 2 * self.begun(4) > len(self.streams)

    def heard(self, stream: Stream, line: str) -> None:
        """Take a line of a stream's body."""
        if not line.startswith(DATA + "{"):
            return
        event = json.loads(line.removeprefix(DATA))
        if "error" in event:
            self.failed(stream, line)
        for choice in event.get("choices", []):
            stream.at.append(time.monotonic())
            stream.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            stream.finish = choice["finish_reason"] or stream.finish
        self._news.set()

    def failed(self, stream: Stream, failure: str) -> None:
        """Note that an error ended a stream."""
        stream.failure = failure
        self._news.set()

    async def until(self, reached: Callable[["StreamLoad"], bool]) -> None:
        """Wait until the streams have got this far, or one has failed.

        Raises TimeoutError after PATIENCE_S.
        """
        async with asyncio.timeout(PATIENCE_S):
            while not (reached(self) or any(stream.failure for stream in self.streams)):
                self._news.clear()
                await self._news.wait()

    def verdict(self) -> str:
        """The errors, one line a stream; empty where there are none."""
        return "\n".join(str(stream) for stream in self.streams if not stream.right)

    def longest_stall(self) -> float:
        """The longest pause of any stream, in seconds."""
        return max(stream.longest_stall for stream in self.streams)


@asynccontextmanager
async def start_stream_load(url: str, streams: list[Stream]) -> AsyncIterator[StreamLoad]:
    """Send all requests to a proxy at once; leaving the block waits for the end of each.

    Raises TimeoutError after PATIENCE_S.
    """
    all_of_them = StreamLoad(streams)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_follow(url, all_of_them, stream)) for stream in streams]
        try:
            yield all_of_them
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()


async def reciters(alone: AsyncOpenAI, first_seed: int, count: int = 16) -> list[Stream]:
    """Streams of about 240 tokens over different lists, alternately completions and chats.

    Args:
        alone: a single engine, which is asked first, for more answers than needed. Those with the largest leads are
            taken, so that rounding cannot change them.
        first_seed: of the lists.
        count: how many streams.
    """
    asked = [(STREAMED[at % 2], recite(first_seed + at, TOKENS, LINES)) for at in range(2 * count)]
    told = await asyncio.gather(*(_undisturbed(alone, way, question) for way, question in asked))
    streams = [Stream(way, question, answer) for (way, question), answer in zip(asked, told, strict=True)]
    streams.sort(key=lambda stream: stream.expected.margin, reverse=True)
    assert streams[count - 1].expected.margin > DECISIVE, "the model is not certain enough of its answers"
    return streams[:count]


async def _undisturbed(alone: AsyncOpenAI, way: Way, question: Quiz) -> UndisturbedAnswer:
    fixed: dict[str, Any] = {"model": SERVED_NAME, "temperature": 0, "max_tokens": MOST_TOKENS}
    if way is Way.COMPLETION_STREAM:
        whole = (await alone.completions.create(prompt=question.prompt(), logprobs=2, **fixed)).choices[0]
        best = [sorted(top.values()) for top in cast(Any, whole.logprobs).top_logprobs]
        return UndisturbedAnswer(whole.text, str(whole.finish_reason), _margin(best))
    messages = cast(Any, question.messages())
    said = await alone.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **fixed)
    choice = said.choices[0]
    best = [sorted(one.logprob for one in token.top_logprobs) for token in cast(Any, choice.logprobs).content]
    return UndisturbedAnswer(choice.message.content or "", choice.finish_reason, _margin(best))


def _margin(best: list[list[float]]) -> float:
    return min(two[-1] - two[-2] for two in best)


async def _follow(url: str, all_of_them: StreamLoad, stream: Stream) -> None:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
            path, body = _asked(stream)
            stream.asked = time.monotonic()
            async with client.stream("POST", url + path, json=body) as answer:
                if answer.is_error:
                    all_of_them.failed(stream, (await answer.aread()).decode(errors="replace"))
                async for line in answer.aiter_lines():
                    all_of_them.heard(stream, line)
    except httpx.HTTPError as failure:
        all_of_them.failed(stream, f"{type(failure).__name__}: {failure}")


def _asked(stream: Stream) -> tuple[str, dict[str, object]]:
    body = {"model": SERVED_NAME, "temperature": 0, "max_tokens": MOST_TOKENS, "stream": True}
    if stream.way is Way.COMPLETION_STREAM:
        return "/v1/completions", {**body, "prompt": stream.question.prompt()}
    return "/v1/chat/completions", {**body, "messages": stream.question.messages()}
