"""Conversations of several turns through a proxy, and what each turn cost.

Each conversation goes on when its last answer is whole, as a client's does; its text is its own, so that it shares no
prefix with another one.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from deploy.local.model.quiz import Quiz
from deploy.local.node import SERVED_NAME, Node
from deploy.local.stack import Proxy
from tests.e2e.conftest import REQUEST_TIMEOUT_S

DATA = "data: {"
REMOTE = "disaggregated"


@dataclass(frozen=True)
class Turn:
    """One answered turn.

    Attributes:
        number: 1 is the first.
        name: its `x-request-id`.
        route: `x-pdproxy-route`.
        first_token: seconds until the client got it.
        question: what was asked.
        text: what was answered.
    """

    number: int
    name: str
    route: str
    first_token: float
    question: Quiz
    text: str

    @property
    def remote(self) -> bool:
        """Whether a prefill node computed it."""
        return self.route.startswith(REMOTE)


async def hold(client: httpx.AsyncClient, proxy: Proxy, talk: Quiz, turns: Iterable[int], name: str) -> list[Turn]:
    """The given turns of a conversation, one after the other. Raises httpx.HTTPError."""
    return [await _ask(client, proxy, talk.at_turn(turn), turn, f"{name}-{turn}") for turn in turns]


async def hold_all(proxy: Proxy, talks: Mapping[str, Quiz], turns: Sequence[int], at_once: int) -> list[Turn]:
    """The given turns of all conversations, by their names; ``at_once`` of these at a time. Raises httpx.HTTPError."""
    places = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, name: str, talk: Quiz) -> list[Turn]:
        async with places:
            return await hold(client, proxy, talk, turns, name)

    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        held = await asyncio.gather(*(one(client, name, talk) for name, talk in talks.items()))
    return [turn for turns in held for turn in turns]


async def _ask(client: httpx.AsyncClient, proxy: Proxy, question: Quiz, number: int, name: str) -> Turn:
    body = {**_asking(question), "stream": True}
    began, first, text = time.monotonic(), 0.0, ""
    async with client.stream(
        "POST", f"{proxy.url}/v1/chat/completions", json=body, headers={"x-request-id": name}
    ) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            piece = _content(line)
            first = first or (time.monotonic() if piece else 0.0)
            text += piece
    return Turn(number, name, response.headers["x-pdproxy-route"], first - began, question, text)


def _content(line: str) -> str:
    """What an event of a chat's stream adds to the answer."""
    choices = json.loads(line.removeprefix("data: "))["choices"] if line.startswith(DATA) else []
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _asking(question: Quiz) -> dict[str, object]:
    return {"model": SERVED_NAME, "messages": question.messages(), "max_tokens": 8, "temperature": 0}


def wrong(turns: Iterable[Turn], engine: Node) -> list[str]:
    """The answers that are not those of one engine that computes the whole prompt. Raises httpx.HTTPError.

    The model errs in about one question of a thousand: only where an answer is not the question's is the engine asked.
    """
    found = []
    for turn in turns:
        if turn.text == turn.question.answer:
            continue
        body = {**_asking(turn.question), "cache_salt": f"alone-{turn.name}"}
        answer = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
        alone = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        if turn.text != alone:
            found.append(f"{turn.name}, {turn.route}: {turn.text!r} instead of {alone!r}")
    return found


def remote_share(turns: Sequence[Turn]) -> float:
    """Of all turns, those that a prefill node computed."""
    return statistics.fmean(turn.remote for turn in turns)


def mean_first_token(turns: Sequence[Turn]) -> float:
    """Seconds."""
    return statistics.fmean(turn.first_token for turn in turns)
