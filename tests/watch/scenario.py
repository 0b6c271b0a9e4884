"""The run that all tests here look at: load, a decode node that is killed in mid-stream, and its return."""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from tests.admin.browser import CHROMIUM, chromium
from tests.app.running_proxy import plain_client
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
MOST_REQUESTS = SETTINGS["limits"]["concurrency"] + SETTINGS["limits"]["queue"]
"""Requests that may run and wait; more are rejected."""
DEAD = 'pdproxy_node_up{node="decode-0",role="decode",state="down"} 1.0'
BACK = 'pdproxy_node_up{node="decode-0",role="decode",state="up"} 1.0'
SCRAPES = 15
"""Scrapes while the node is down, and after; each stands for the scrape interval of prometheus.yml."""


@dataclasses.dataclass(slots=True)
class Observed:
    """What operators could see during the run.

    Attributes:
        scrapes: the `/metrics` pages, a tenth of a second apart.
        killed, returned: number of the first scrape with the killed node down, and of the first with it up again.
        state: the live page's data while the node was down.
        page: the live page as Chromium rendered it then; empty without Chromium.
        complaints: what Chromium wrote to stderr.
        ended: what the clients got, see `Load.ended`.
        after: right answers between the kill and the return.
    """

    scrapes: list[str] = dataclasses.field(default_factory=list)
    killed: int = 0
    returned: int = 0
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    page: str = ""
    complaints: str = ""
    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    after: int = 0


async def observe(folder: Path) -> Observed:
    """Run it once."""
    fabric, seen = FakeKvTransfer(), Observed()
    nodes = [LoopbackNode(FakeNode(name, fabric), pace=0.04) for name in ("prefill", "decode", "decode")]
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
        entries = [{"url": node.url, "role": node.node.name, "model": MODEL} for node in nodes]
        proxy = await stack.enter_async_context(serving(folder, {**SETTINGS, "nodes": entries}))
        client = await stack.enter_async_context(plain_client(proxy.clients))
        await stack.enter_async_context(_scraping(proxy, seen))
        await _until(lambda: seen.scrapes[-1:] != [] and seen.scrapes[-1].count('state="up"} 1.0') == len(nodes))
        await _odd_requests(client)
        load = Load(client)
        async with load.running():
            await _kill_and_restart(load, nodes[1], proxy, seen)
        seen.ended = load.ended
    assert fabric.wrong == []
    return seen


async def _kill_and_restart(load: Load, victim: LoopbackNode, proxy: Process, seen: Observed) -> None:
    await _within(load.more(12))
    await _until(lambda: victim.node.running >= 3)
    await victim.kill()
    right = load.ended["right"]
    await _until(lambda: DEAD in seen.scrapes[-1])
    seen.killed = next(number for number, page in enumerate(seen.scrapes) if DEAD in page)
    await _within(load.more(12))
    async with plain_client(proxy.operators) as operator:
        seen.state = (await operator.get("/ui/state")).json()
    if CHROMIUM:
        seen.page, seen.complaints = await chromium(f"{proxy.operators}/ui", "--dump-dom")
    await _until(lambda: len(seen.scrapes) >= seen.killed + SCRAPES)
    seen.after = load.ended["right"] - right
    await victim.start()
    await _until(lambda: BACK in seen.scrapes[-1])
    seen.returned = next(n for n, page in enumerate(seen.scrapes) if n > seen.killed and BACK in page)
    await _until(lambda: len(seen.scrapes) >= seen.returned + SCRAPES)


async def _odd_requests(client: httpx.AsyncClient) -> None:
    """Requests that the load does not send: one that a single node computes, an invalid one, too many at a time."""
    body = {"model": MODEL, "prompt": WORDS, "max_tokens": TOKENS, "stream": True}
    alone = await client.post("/v1/completions", json={**body, "prompt": [7]})
    wrong = await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    crowd = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(MOST_REQUESTS + 10)))
    assert (alone.status_code, wrong.status_code) == (200, 400)
    assert {each.status_code for each in crowd} == {200, 429}


@contextlib.asynccontextmanager
async def _scraping(proxy: Process, seen: Observed) -> AsyncIterator[None]:
    async def scrape() -> None:
        async with plain_client(proxy.operators) as client:
            while True:
                seen.scrapes.append((await client.get("/metrics")).text)
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
