"""One API key floods real nodes: how long another key waits for its first token.

Nodes and clients share this machine's cores. So the quiet key's wait is compared with three others: with no other
requests, with one request at a time of the other key, and with the same flood at a proxy without a reserve
(`limits.reserve: 0`).
"""

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import httpx
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from deploy.local.stack import Proxy, ProxySpec, logs_of, start_proxy
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.metrics_reader import read

pytestmark = pytest.mark.e2e

CALLERS = 24
"""Callers in the flood, each with one request at a time."""
LENGTH = 1000
"""Tokens of every prompt."""
KEYS = "sk-flood flood\nsk-quiet quiet\n"
SEEDS = itertools.count(810_000)
"""No two prompts are the same."""


class Moment(StrEnum):
    """The other key's load while the quiet key asks."""

    ALONE = "alone"
    ONE = "with one caller of the other key"
    SHARED = "with the flood"
    UNSHARED = "with the flood, and no shares of what runs"


@dataclass
class Seen:
    """Seconds to the first token of the quiet key's requests; answers in the flood, and its seconds."""

    waits: dict[Moment, list[float]] = field(default_factory=lambda: {moment: [] for moment in Moment})
    flood: dict[Moment, list[float]] = field(default_factory=lambda: {moment: [0.0, 0.0] for moment in Moment})

    def median(self, moment: Moment) -> float:
        return statistics.median(self.waits[moment])

    def show(self) -> None:
        """Print the figures."""
        for moment, waits in self.waits.items():
            if waits:
                ratio, worst = (part(waits) / part(self.waits[Moment.ALONE]) for part in (statistics.median, max))
                answers, seconds = self.flood[moment]
                print(f"{moment}: first token after {statistics.median(waits):.2f} s ({ratio:.2f} x),")
                print(f"    at most {max(waits):.2f} s ({worst:.2f} x), of {len(waits)};")
                print(f"    {answers / seconds if seconds else 0:.1f} answers a second to the other key")


@pytest.fixture(scope="module")
def proxies(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Moment, Proxy]]:
    """One proxy with shares and one without, before the same nodes. Logs: `.run/e2e-flood`."""
    keys = tmp_path_factory.mktemp("keys") / "api.keys"
    keys.write_text(KEYS)
    nodes = [pair.prefill, pair.decode]
    with Supervisor(logs_of("e2e-flood")) as supervisor:
        shared = start_proxy(supervisor, _spec(keys), nodes, print)
        unshared = start_proxy(supervisor, _spec(keys, PDPROXY_LIMITS_RESERVE="0"), nodes, print)
        yield {**dict.fromkeys(Moment, shared), Moment.UNSHARED: unshared}


def _spec(keys: Path, **more: str) -> ProxySpec:
    return ProxySpec(more_environment={"PDPROXY_KEYS_FILE": str(keys), **more})


async def ask(client: httpx.AsyncClient, key: str) -> float:
    """Read one stream to its end; it must be right. Returns the seconds to its first token."""
    asked = quiz(next(SEEDS), LENGTH)
    body = {"model": SERVED_NAME, "prompt": asked.prompt(), "max_tokens": 8, "temperature": 0, "stream": True}
    began, first = time.monotonic(), 0.0
    headers = {"authorization": f"Bearer sk-{key}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic()
    assert first, "an empty stream"
    return first - began


@contextlib.asynccontextmanager
async def flood(client: httpx.AsyncClient, seen: Seen, moment: Moment) -> AsyncIterator[None]:
    """Run the flood's callers while inside."""

    async def again_and_again() -> None:
        while True:
            await ask(client, "flood")
            seen.flood[moment][0] += 1

    began = time.monotonic()
    callers = 1 if moment is Moment.ONE else CALLERS
    tasks = [asyncio.create_task(again_and_again()) for _ in range(callers)]
    try:
        await asyncio.sleep(1.0)
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        seen.flood[moment][1] += time.monotonic() - began
    assert [each for each in ended if not isinstance(each, asyncio.CancelledError)] == []


async def measured(proxies: dict[Moment, Proxy], requests: dict[Moment, int], rounds: int) -> Seen:
    """Send so many quiet requests under each load, by turns."""
    seen = Seen()
    for _ in range(rounds):
        for moment, count in requests.items():
            proxy = proxies[moment]
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=proxy.url, timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=limits
            ) as client:
                await ask(client, "quiet")  # the key is known to ask, and connections are open
                async with contextlib.AsyncExitStack() as stack:
                    if moment is not Moment.ALONE:
                        await stack.enter_async_context(flood(client, seen, moment))
                    for _ in range(count):
                        seen.waits[moment].append(await ask(client, "quiet"))
            idle(proxy)
    return seen


def idle(proxy: Proxy) -> None:
    """Wait until nothing runs."""
    end = time.monotonic() + REQUEST_TIMEOUT_S
    while read(proxy.admin_url, "pdproxy_requests_active"):
        assert time.monotonic() < end
        time.sleep(0.1)


async def test_another_key_hardly_waits_for_a_flood(proxies: dict[Moment, Proxy]) -> None:
    seen = await measured(proxies, {Moment.ALONE: 5, Moment.SHARED: 5, Moment.UNSHARED: 1}, rounds=1)
    seen.show()
    assert seen.median(Moment.SHARED) < seen.median(Moment.UNSHARED) / 2
    for key, outcome in (("flood", "client_gone"), ("quiet", "ok")):
        assert read(proxies[Moment.SHARED].admin_url, "pdproxy_key_requests_total", key=key, outcome=outcome) > 0
    assert read(proxies[Moment.SHARED].admin_url, "pdproxy_key_queue_seconds_total", key="flood") > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_how_long_another_key_waits_for_a_flood(proxies: dict[Moment, Proxy]) -> None:
    seen = await measured(proxies, {Moment.ALONE: 10, Moment.ONE: 10, Moment.SHARED: 10, Moment.UNSHARED: 2}, rounds=3)
    seen.show()
    assert seen.median(Moment.SHARED) < seen.median(Moment.UNSHARED) / 2
