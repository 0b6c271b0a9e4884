"""Either node dies or freezes at any moment, under sixteen streams: clients notice only a pause. A request that no node
can answer takes no node from the others."""

import asyncio
import enum
import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from tests.e2e.asking import Way, answer
from tests.e2e.conftest import async_client
from tests.e2e.fleet import Fleet, running_fleet
from tests.e2e.metrics_reader import read
from tests.e2e.process_faults import ProcessFault, strike
from tests.e2e.stream_load import StreamLoad, reciters, start_stream_load

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(1500)]

IMPATIENT = {
    "PDPROXY_HEALTH_INTERVAL": "1",
    "PDPROXY_HEALTH_COOL_DOWN": "1",
    "PDPROXY_HEALTH_SLOW_START": "0",
}
"""A frozen node is given up after three health checks, 18 s. The deadlines of the legs are the defaults, far longer."""


class Moment(enum.StrEnum):
    """The moment of the fault."""

    OPENING = "opening"
    """The first stream has begun; prefill legs of others are under way, and decode legs open."""
    STREAMING = "streaming"
    """More than half of the streams have begun; both decode nodes are in the middle of some."""

    def reached(self, now: StreamLoad) -> bool:
        """Whether the moment has come."""
        return now.begun() > 0 if self is Moment.OPENING else now.under_way()


CASES = (
    ("decode-0", Moment.STREAMING, ProcessFault.KILLED),
    ("prefill", Moment.OPENING, ProcessFault.KILLED),
    ("prefill", Moment.STREAMING, ProcessFault.STOPPED),
    pytest.param("decode-0", Moment.STREAMING, ProcessFault.STOPPED, marks=pytest.mark.long),
    pytest.param("decode-0", Moment.OPENING, ProcessFault.KILLED, marks=pytest.mark.long),
    pytest.param("decode-0", Moment.OPENING, ProcessFault.STOPPED, marks=pytest.mark.long),
    pytest.param("prefill", Moment.OPENING, ProcessFault.STOPPED, marks=pytest.mark.long),
    pytest.param("prefill", Moment.STREAMING, ProcessFault.KILLED, marks=pytest.mark.long),
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three nodes and a proxy, for all tests here. Logs: `.run/e2e-deaths`."""
    with running_fleet("e2e-deaths", IMPATIENT) as fleet:
        yield fleet


BEAM_SEARCH = {"use_beam_search": True, "stream": True, "max_tokens": 30, "temperature": 0, "model": SERVED_NAME}
"""vLLM 0.32 ends such a chat stream without a finish reason if the best beam is empty: its first token is the end."""
ROUNDS = 12


async def test_a_stream_that_every_node_gives_up_takes_none_of_them_out(whole: Fleet) -> None:
    async with (
        async_client(whole.proxy.url) as client,
        httpx.AsyncClient(trust_env=False, timeout=60) as hostile,
    ):
        body = await beam_search_without_end(hostile, whole.nodes["decode-0"].url)
        for seed in itertools.islice(itertools.count(next(whole.seeds)), ROUNDS):
            said = await hostile.post(f"{whole.proxy.url}/v1/chat/completions", json=body)
            assert b'"code": "stream_broken"' in said.content, said.text
            question = quiz(seed, 300)
            assert await answer(client, Way.CHAT_STREAM, question) == question.answer
        nodes = (await hostile.get(f"{whole.proxy.admin_url}/nodes")).json()["nodes"]
    given_up = read(whole.proxy.admin_url, "pdproxy_leg_faults_total", leg="decode", fault="aborted")
    print(f"\n{given_up:.0f} legs were given up; the last answer: {said.status_code} {said.text[:200]}")
    assert {node["name"]: node["state"] for node in nodes} == dict.fromkeys((node["name"] for node in nodes), "up")
    assert ROUNDS <= given_up <= 4 * ROUNDS, "each is asked of four nodes in a row at most (`policy.migrations`)"


async def beam_search_without_end(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """A body that the node answers without a finish reason."""
    lists = [quiz(seed, 60).prompt() for seed in range(10)]
    parts = ["hello", "", *(text[:length] for text in lists for length in range(1, 60, 4))]
    for content, penalty in itertools.product(parts, (1.0, -8.0)):
        message = {"role": "user", "content": content}
        body = {**BEAM_SEARCH, "length_penalty": penalty, "messages": [message]}
        said = await client.post(f"{url}/v1/chat/completions", json=body)
        if said.status_code == 200 and b'"finish_reason":"' not in said.content:
            return body
    pytest.fail(f"every stream had a finish reason, the last one's was {said.text[-300:]}")


@pytest.mark.parametrize(("name", "moment", "fate"), CASES)
async def test_no_stream_is_lost_and_no_token_is_wrong(
    whole: Fleet, name: str, moment: Moment, fate: ProcessFault
) -> None:
    async with async_client(whole.nodes["prefill"].url) as alone:
        streams = await reciters(alone, next(whole.seeds))
    whole.forget()
    moved = read(whole.proxy.admin_url, "pdproxy_migrations_total", outcome="done")
    async with start_stream_load(whole.proxy.url, streams) as running:
        await running.until(moment.reached)
        begun, undisturbed = running.begun(), running.longest_stall()
        await asyncio.to_thread(strike, whole.nodes[name].part, fate)
    print(f"\n{name} {fate.name} {moment}: {begun} of {len(streams)} streams had begun, longest stall", end=" ")
    print(f"{running.longest_stall():.1f} s, before that {undisturbed:.1f} s")
    assert not running.verdict()
    moved = read(whole.proxy.admin_url, "pdproxy_migrations_total", outcome="done") - moved
    assert moved == 0 or name == "decode-0"
    assert moved > 0 or name == "prefill" or moment is Moment.OPENING
