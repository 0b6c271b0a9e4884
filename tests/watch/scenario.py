"""The story that all tests here look at: load, a decode node that is killed in mid-stream, and its return."""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from tests.admin.browser import CHROMIUM, chromium
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode
from tests.orchestration.prompts import WORDS
from tests.watch.load import MODEL, TOKENS, Load
from tests.watch.process import SOON, Process, serving

SETTINGS: dict[str, Any] = {
    "health": {"interval": 0.2, "timeout": 5.0, "failures": 2, "slow_start": 0.0},
    "limits": {"concurrency": 8, "queue": 2},
}
PLACES = 10
"""As the limits say; who comes beside them is turned away."""
DEAD = 'pdproxy_node_up{node="decode-0",role="decode",state="down"} 1.0'
BACK = 'pdproxy_node_up{node="decode-0",role="decode",state="up"} 1.0'
ENOUGH = 20
"""Scrapes in each part of the story; one stands for the ten seconds of prometheus.yml."""


@dataclasses.dataclass(slots=True)
class Told:
    """What operators could see.

    Attributes:
        scrapes: `/metrics`, again and again.
        killed, returned: the first scrape that showed the dead node down, and the first that showed it serving again.
        state: of the live page, while the node was dead.
        page: the live page as Chromium showed it then; empty without Chromium.
        complaints: Chromium's.
        ended: what the clients got.
        after: of that, what was right and was asked after the kill.
    """

    scrapes: list[str] = dataclasses.field(default_factory=list)
    killed: int = 0
    returned: int = 0
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    page: str = ""
    complaints: str = ""
    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    after: int = 0


async def tell(folder: Path) -> Told:
    """Live through it once."""
    fabric, told = FakeKvTransfer(), Told()
    nodes = [LoopbackNode(FakeNode(name, fabric), pace=0.02) for name in ("prefill", "decode", "decode")]
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
        entries = [{"url": node.url, "role": node.node.name, "model": MODEL} for node in nodes]
        proxy = await stack.enter_async_context(serving(folder, {**SETTINGS, "nodes": entries}))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=proxy.clients, trust_env=False, timeout=SOON)
        )
        await stack.enter_async_context(_scraping(proxy, told))
        await _until(lambda: told.scrapes[-1:] != [] and told.scrapes[-1].count('state="up"} 1.0') == len(nodes))
        await _odd_requests(client)
        load = Load(client)
        async with load.running():
            await _live(load, nodes[1], proxy, told)
        told.ended = load.ended
    assert fabric.wrong == []
    return told


async def _live(load: Load, doomed: LoopbackNode, proxy: Process, told: Told) -> None:
    await _within(load.more(12))
    await _until(lambda: doomed.node.running >= 3)
    await doomed.kill()
    right = load.ended["right"]
    await _until(lambda: DEAD in told.scrapes[-1])
    told.killed = next(number for number, page in enumerate(told.scrapes) if DEAD in page)
    await _within(load.more(12))
    async with httpx.AsyncClient(base_url=proxy.operators, trust_env=False) as operator:
        told.state = (await operator.get("/ui/state")).json()
    if CHROMIUM:
        told.page, told.complaints = await chromium(f"{proxy.operators}/ui", "--dump-dom")
    await _until(lambda: len(told.scrapes) >= told.killed + ENOUGH)
    told.after = load.ended["right"] - right
    await doomed.start()
    await _until(lambda: BACK in told.scrapes[-1])
    told.returned = next(n for n, page in enumerate(told.scrapes) if n > told.killed and BACK in page)
    await _until(lambda: len(told.scrapes) >= told.returned + ENOUGH)


async def _odd_requests(client: httpx.AsyncClient) -> None:
    """Kinds of requests that the load has not: computed on one node, a client's mistake, too many at a time."""
    body = {"model": MODEL, "prompt": WORDS, "max_tokens": TOKENS, "stream": True}
    alone = await client.post("/v1/completions", json={**body, "prompt": [7]})
    wrong = await client.post("/v1/completions", content=b"{")
    crowd = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(PLACES + 10)))
    assert (alone.status_code, wrong.status_code) == (200, 400)
    assert {each.status_code for each in crowd} == {200, 429}


@contextlib.asynccontextmanager
async def _scraping(proxy: Process, told: Told) -> AsyncIterator[None]:
    async def scrape() -> None:
        async with httpx.AsyncClient(base_url=proxy.operators, trust_env=False, timeout=SOON) as client:
            while True:
                told.scrapes.append((await client.get("/metrics")).text)
                await asyncio.sleep(0.1)

    task = asyncio.create_task(scrape())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not holds():  # noqa: ASYNC110 - the condition has no event of its own
            await asyncio.sleep(0.01)


async def _within(work: Awaitable[None]) -> None:
    async with asyncio.timeout(SOON):
        await work
