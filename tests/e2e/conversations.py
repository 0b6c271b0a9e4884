"""Conversations of several turns through a proxy, and the cost of each turn.

A turn is sent when the last answer is whole, as a client does. Conversations share no prefix with each other.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.local.model.quiz import Quiz
from deploy.local.node import SERVED_NAME, Node
from deploy.local.stack import Proxy
from tests.e2e.asking import Way
from tests.e2e.conftest import REQUEST_TIMEOUT_S

DATA = "data: {"
REMOTE = "disaggregated"


@dataclass(frozen=True)
class Turn:
    """One answered turn.

    Attributes:
        number: 1 is the first.
        name: its `x-request-id`.
        route: its `x-pdproxy-route`.
        first_token: seconds until the client got it.
        question, way: the question, and the API that it went to.
        text: the answer.
    """

    number: int
    name: str
    route: str
    first_token: float
    question: Quiz
    way: Way
    text: str

    @property
    def remote(self) -> bool:
        """Whether a prefill node computed it."""
        return self.route.startswith(REMOTE)


async def hold_all(proxy: Proxy, talks: Mapping[str, Quiz], turns: Sequence[int], at_once: int, way: Way) -> list[Turn]:
    """Hold these turns of all conversations, ``at_once`` of them at a time. Raises httpx.HTTPError.

    ``way``: an API that streams.
    """
    places = asyncio.Semaphore(at_once)

    async def hold(client: httpx.AsyncClient, name: str, talk: Quiz) -> list[Turn]:
        async with places:
            return [await _ask(client, proxy, f"{name}-{turn}", talk.at_turn(turn), turn, way) for turn in turns]

    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        held = await asyncio.gather(*(hold(client, name, talk) for name, talk in talks.items()))
    return [turn for turns in held for turn in turns]


async def _ask(client: httpx.AsyncClient, proxy: Proxy, name: str, question: Quiz, number: int, way: Way) -> Turn:
    path, body = _request(question, way)
    began, first, text = time.monotonic(), 0.0, ""
    async with client.stream(
        "POST", proxy.url + path, json={**body, "stream": True}, headers={"x-request-id": name}
    ) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            piece = _content(json.loads(line.removeprefix("data: "))) if line.startswith(DATA) else ""
            first = first or (time.monotonic() if piece else 0.0)
            text += piece
    return Turn(number, name, response.headers["x-pdproxy-route"], first - began, question, way, text)


def _request(question: Quiz, way: Way) -> tuple[str, dict[str, object]]:
    """Path and body of a question."""
    fixed = {"model": SERVED_NAME, "max_tokens": 8, "temperature": 0}
    if way is Way.CHAT_STREAM:
        return "/v1/chat/completions", {**fixed, "messages": question.messages()}
    return "/v1/completions", {**fixed, "prompt": question.prompt()}


def _content(answer: Mapping[str, Any]) -> str:
    """The text of an answer, or of one event of a stream."""
    said = (choice.get("delta") or choice.get("message") or choice for choice in answer["choices"])
    return "".join(each.get("content") or each.get("text") or "" for each in said)


def wrong(turns: Iterable[Turn], engine: Node) -> list[str]:
    """Answers that differ from one engine's, which computes the whole prompt. Raises httpx.HTTPError.

    The model is wrong in about one question of a thousand, so that the engine is asked where an answer is wrong.
    """
    found = []
    for turn in turns:
        if turn.text == turn.question.answer:
            continue
        path, body = _request(turn.question, turn.way)
        body["cache_salt"] = f"alone-{turn.name}"
        answer = httpx.post(engine.url + path, json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
        alone = _content(answer.raise_for_status().json())
        if turn.text != alone:
            found.append(f"{turn.name}, {turn.route}: {turn.text!r} instead of {alone!r}")
    return found


def remote_share(turns: Sequence[Turn]) -> float:
    """The share of turns that a prefill node computed."""
    return statistics.fmean(turn.remote for turn in turns)


def mean_first_token(turns: Sequence[Turn]) -> float:
    """The mean, in seconds."""
    return statistics.fmean(turn.first_token for turn in turns)
