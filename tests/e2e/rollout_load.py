"""Clients that send requests while nodes and proxies are replaced. Every answer must come, whole and right."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from deploy.local.model.quiz import Quiz, recite
from deploy.local.node import SERVED_NAME
from tests.e2e.asking import Way

CLIENTS = 4
PATIENCE_S = 120.0
LINES = (4, 30)
"""Lines of the recited list: an answer has five tokens for each."""
PROMPT_TOKENS = 400
PAUSE_S = 0.05
"""Seconds after a failure, so that an outage does not cause thousands of requests."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Asked:
    """One request: when it was sent, in monotonic seconds, and its result. `failure`: empty for a right answer.

    `wrong`: a question whose answer was wrong, and the answer.
    """

    way: Way
    began: float
    wrong: tuple[Quiz, object] | None = None
    ended: float = 0.0
    status: int = 0
    failure: str = ""


@dataclass
class Load:
    """All requests so far. `url` and `key` are called for each request."""

    url: Callable[[], str]
    key: Callable[[], str]
    asked: list[Asked] = field(default_factory=list)

    def failures(self) -> list[Asked]:
        """The failures of requests that have ended."""
        return [each for each in self.asked if each.failure]

    async def forgive_the_model(self) -> None:
        """Ask wrong questions again once nothing changes. Drop those with the same answer, computed anew: the tiny
        model is wrong.

        It recites about one list of some thousands wrongly, also on one plain engine.
        """
        for number, one in enumerate(each for each in self.asked if each.wrong):
            assert one.wrong is not None
            question, said = one.wrong
            path, body = _request(one.way, question)
            fresh = {**body, "stream": False, "cache_salt": f"again-{number}"}
            headers = {"authorization": f"Bearer {self.key()}"}
            async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
                answer = await client.post(self.url() + path, json=fresh, headers=headers)
            if answer.is_success and _whole(answer.json()) == said:
                one.failure = ""

    def summary(self) -> str:
        """Counts for each API, and the failures."""
        ways = Counter(each.way.value for each in self.asked)
        longest = max((each.ended - each.began for each in self.asked), default=0.0)
        failed = Counter(each.failure[:200] for each in self.failures())
        told = "".join(f"\n    {count} x {failure}" for failure, count in failed.items())
        return f"{len(self.asked)} requests {dict(ways)}, the longest {longest:.1f} s; failed: {failed.total()}{told}"


@asynccontextmanager
async def under_load(url: Callable[[], str], key: Callable[[], str], seed: int) -> AsyncIterator[Load]:
    """Run clients while inside. Leaving the block waits for each client's last request."""
    load, enough, source = Load(url, key), asyncio.Event(), random.Random(seed)
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(_client(load, random.Random(source.random()), enough))
        try:
            yield load
        finally:
            enough.set()


async def _client(load: Load, source: random.Random, enough: asyncio.Event) -> None:
    """Send one request after the other, each on a connection of its own, as a service would spread them."""
    while not enough.is_set():
        one = Asked(source.choice(list(Way)), time.monotonic())
        load.asked.append(one)
        question = recite(source.randrange(10**6), PROMPT_TOKENS, source.randint(*LINES))
        try:
            one.failure = await _ask(load, one, question)
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            one.failure = f"{type(error).__name__}: {error}"
        one.ended = time.monotonic()
        if one.failure:
            await asyncio.sleep(PAUSE_S)


async def _ask(load: Load, one: Asked, question: Quiz) -> str:
    """The error in the answer; empty where it is right."""
    path, body = _request(one.way, question)
    headers = {"authorization": f"Bearer {load.key()}"}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client,
        client.stream("POST", load.url() + path, json=body, headers=headers) as answer,
    ):
        one.status = answer.status_code
        text = (await answer.aread()).decode()
    if answer.is_error:
        return f"{answer.status_code}: {text}"
    said = _streamed(text) if body["stream"] else _whole(json.loads(text))
    if said == question.answer:
        return ""
    one.wrong = question, said
    return f"said {said!r} instead of {question.answer!r}"


def _request(way: Way, question: Quiz) -> tuple[str, dict[str, object]]:
    stream = way in (Way.COMPLETION_STREAM, Way.CHAT_STREAM)
    body: dict[str, object] = {"model": SERVED_NAME, "temperature": 0, "max_tokens": 200, "stream": stream}
    if way in (Way.CHAT, Way.CHAT_STREAM):
        return CHAT, {**body, "messages": question.messages()}
    return COMPLETIONS, {**body, "prompt": question.prompt()}


def _whole(answer: dict[str, list[dict[str, object]]]) -> object:
    choice = answer["choices"][0]
    message = choice.get("message")
    return message["content"] if isinstance(message, dict) else choice["text"]


def _streamed(text: str) -> str:
    """The text of a whole stream. Raises ValueError for a stream that was cut or has an error event."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]" or any('"error"' in event for event in events):
        raise ValueError(f"the stream ends with {events[-1:]}")
    said, finish = "", None
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            said += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
    if finish is None:
        raise ValueError("the stream has no finish_reason")
    return said
