"""`policy.on_no_decode: prefill` on real engines: the only decode node leaves, and no stream is lost."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from openai import AsyncOpenAI

from deploy.local.model.quiz import quiz, recite
from deploy.local.node import SERVED_NAME
from deploy.local.stack import Proxy, ProxySpec, logs_of, start_proxy
from deploy.local.supervise import Supervisor
from pdproxy.observe.labels import Move
from tests.e2e.asking import Way, answer
from tests.e2e.conftest import Pair, async_client
from tests.e2e.metrics_reader import read

pytestmark = pytest.mark.e2e

LINES, TOKENS = 24, 160
BEGUN = 5
"""Pieces of each stream before the decode node is drained."""
REST_TAKES_S = 120.0


@pytest.fixture(scope="module")
def front(pair: Pair) -> Iterator[Proxy]:
    """A proxy of its own before the shared nodes. Logs: `.run/e2e-last-resort`."""
    with Supervisor(logs_of("e2e-last-resort")) as supervisor:
        spec = ProxySpec(more_environment={"PDPROXY_POLICY_ON_NO_DECODE": "prefill"})
        yield start_proxy(supervisor, spec, [pair.prefill, pair.decode], print)


async def stream_of(client: AsyncOpenAI, prompt: str, begun: asyncio.Barrier | None = None) -> str:
    pieces = list[str]()
    stream = await client.completions.create(
        model=SERVED_NAME, prompt=prompt, temperature=0, max_tokens=TOKENS, stream=True
    )
    async for event in stream:
        pieces += [choice.text for choice in event.choices]
        if begun is not None and len(pieces) == BEGUN:
            await begun.wait()
    return "".join(pieces)


async def test_streams_and_requests_go_to_the_prefill_node(front: Proxy) -> None:
    prompts = [recite(seed, lines=LINES).prompt() for seed in range(4)]
    node = f"{front.admin_url}/nodes/decode-0"
    async with (
        async_client(front.url) as client,
        httpx.AsyncClient(trust_env=False) as operator,
        asyncio.timeout(REST_TAKES_S),
    ):
        whole = [await stream_of(client, prompt) for prompt in prompts]
        begun = asyncio.Barrier(len(prompts) + 1)
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(stream_of(client, prompt, begun)) for prompt in prompts]
            await begun.wait()
            (await operator.post(f"{node}/drain", params={"seconds": 0})).raise_for_status()
            asked = [await answer(client, way, quiz(seed, 300)) for seed, way in enumerate(Way)]
        (await operator.post(f"{node}/rejoin")).raise_for_status()
    assert [stream.result() for stream in streams] == whole
    assert asked == [quiz(seed, 300).answer for seed in range(len(asked))]
    moves = (read(front.admin_url, "pdproxy_stream_stall_seconds_count", move=move) for move in Move)
    assert sum(moves) == len(streams)
    assert read(front.admin_url, "pdproxy_local_total", reason="no_decode") >= len(asked)
