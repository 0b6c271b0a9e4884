"""A decode node gets SIGTERM without a drain: its last responses are not taken for answers.

vLLM lets running requests end for `--shutdown-timeout`, and listens meanwhile. Requests with text that arrive then get
a 500 (its renderer has been shut down). Requests with token ids, and those just about to enter the engine, get a 200
without output. `docker compose up` with a new image stops a node like this.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from deploy.local.watchdog import descendants
from pdproxy.errors import Fault, NodeFault
from pdproxy.finish_reasons import is_aborted
from pdproxy.legs.shape import shape
from pdproxy.request import Endpoint
from pdproxy.stream.sse import Framer, event_of
from pdproxy.stream.transcript import Transcript
from tests.e2e.asking import Way, answer
from tests.e2e.conftest import async_client
from tests.e2e.fleet import SLOW, Fleet, running_fleet
from tests.e2e.metrics_reader import read
from tests.e2e.stream_load import reciters, start_stream_load

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(600)]

SHUTDOWN_S = 60
"""Longer than the streams take; the node ends with the last of them."""
SETTINGS = {
    "PDPROXY_POLICY_RETRIES": "1",
    "PDPROXY_HEALTH_FAILURES": "1000",
    "PDPROXY_POLICY_ROUTING": "least-loaded",
}
"""The node's 500s do not open its circuit, so that requests go on to get its empty answers, of which one does. Policy
`least-loaded`, for by what is cached all of them may go to the node that answered first."""
LONG_TOKENS = 3000
"""Generated tokens of a stream that keeps the node from ending."""
QUESTIONS = 2 * len(Way)
"""Questions while the node stops."""
BY_IDS = 32
"""Requests at once. With fewer, none might go to the stopping node, where streams still run."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three nodes and a proxy. Logs: `.run/e2e-undrained`."""
    decode = (*SLOW, "--shutdown-timeout", str(SHUTDOWN_S))
    with running_fleet("e2e-undrained", SETTINGS, decode=decode) as fleet:
        yield fleet


async def test_requests_that_come_while_a_node_stops_are_served_elsewhere(whole: Fleet) -> None:
    node = whole.nodes["decode-0"]
    async with async_client(whole.nodes["prefill"].url) as alone:
        streams = await reciters(alone, next(whole.seeds))
        ids = await prompt_ids(whole.nodes["prefill"].url)
        right = await of_ids(alone, ids)
    async with start_stream_load(whole.proxy.url, streams) as running, async_client(whole.proxy.url) as client:
        await running.until(lambda now: now.begun() > 0)
        async with generating(node.url, ids):
            os.kill(min(descendants(node.part.process.pid)), signal.SIGTERM)
            await until_it_gives_up(node.url, ids)
            streamed = await fault_of_stream(node.url, ids)
            by_ids = await asyncio.gather(*(of_ids(client, ids) for _ in range(BY_IDS)))
            questions = [
                (way, quiz(seed, 300)) for seed, way in enumerate(itertools.islice(itertools.cycle(Way), QUESTIONS))
            ]
            told = await asyncio.gather(*(answer(client, way, question) for way, question in questions))
    print(f"\n{sum(stream.right for stream in streams)} of {len(streams)} streams right")
    assert by_ids == [right] * len(by_ids)
    assert told == [question.answer for _, question in questions]
    assert not running.verdict()
    assert streamed is Fault.ABORTED
    assert read(whole.proxy.admin_url, "pdproxy_leg_faults_total", leg="decode", fault="aborted") > 0


async def prompt_ids(url: str) -> list[int]:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as node:
        said = await node.post("/tokenize", json={"model": SERVED_NAME, "prompt": quiz(7, 300).prompt()})
    ids: list[int] = said.raise_for_status().json()["tokens"]
    return ids


async def of_ids(client: AsyncOpenAI, ids: list[int]) -> str:
    whole = await client.completions.create(model=SERVED_NAME, prompt=ids, temperature=0, max_tokens=8)
    return whole.choices[0].text


@asynccontextmanager
async def generating(url: str, ids: list[int]) -> AsyncIterator[None]:
    """While inside, a stream of our own keeps the node from ending."""
    body = {"model": SERVED_NAME, "prompt": ids, "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=SHUTDOWN_S) as node,
        node.stream("POST", "/v1/completions", json=body) as answer,
    ):
        pieces = answer.aiter_bytes()  # held: a generator that is collected closes the connection
        await anext(pieces)
        yield


async def until_it_gives_up(url: str, ids: list[int]) -> None:
    """Ask until an answer is recognized as one that the node gave up."""
    body = {"model": SERVED_NAME, "prompt": ids, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=url, trust_env=False) as node, asyncio.timeout(SHUTDOWN_S):
        said: dict[str, Any] = {}
        while not is_aborted(Endpoint.COMPLETIONS, said):
            said = (await node.post("/v1/completions", json=body)).raise_for_status().json()


async def fault_of_stream(url: str, ids: list[int]) -> Fault | None:
    """The fault in a stream of the node, read as the proxy reads it."""
    body = {"model": SERVED_NAME, "prompt": ids, "max_tokens": 8, "stream": True}
    transcript = Transcript(Endpoint.COMPLETIONS, shape(Endpoint.COMPLETIONS, body))
    async with httpx.AsyncClient(base_url=url, trust_env=False) as node:
        said = (await node.post("/v1/completions", json=body)).raise_for_status()
    try:
        for raw in Framer().feed(said.content):
            transcript.take(event_of(raw))
    except NodeFault as fault:
        return fault.fault
    return None
