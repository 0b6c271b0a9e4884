"""A flood of one API key beside the quiet requests of others, on fake nodes that take time: how long those wait for
their first token, with the flood and without it, in turns.

``python -m tests.orchestration.flood`` prints the figures, also of a proxy without shares.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pdproxy.errors import ClientError
from pdproxy.nodes.capacity import Binding, Capacity
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.request_queue import QueueLimits
from pdproxy.request import ClientRequest, Endpoint
from pdproxy.response import ResponseStream
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.timed import TimedLoopbackNode, TimedNode
from tests.orchestration.cluster import MODEL
from tests.orchestration.loopback_cluster import LoopbackCluster, until

TOKEN_SECONDS = 0.001
"""Of a prompt, on a prefill node."""
PACE = 0.05
"""Seconds for a token of an answer."""
PREFILLS, DECODES = 2, 2
CAPACITY = Capacity(6000, None, 8, Binding.ATTENTION)
"""Of each decode node: room for some forty of these requests."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Requests of one key.

    Attributes:
        prompt: in tokens.
        answer: in tokens.
        callers: how many ask at once, each again when it has its answer.
        pause: seconds between an answer and a caller's next request.
    """

    key: str
    prompt: int
    answer: int
    callers: int
    pause: float = 0.0


QUIET = (Load("alice", 80, 2, 1, 0.1), Load("bob", 120, 2, 1, 0.1))
FLOODS = {
    "short prompts, long answers": Load("flood", 40, 20, 100),
    "long prompts, short answers": Load("flood", 160, 2, 100),
}


@dataclasses.dataclass(slots=True)
class Waits:
    """Seconds from a quiet request to its first token."""

    alone: list[float] = dataclasses.field(default_factory=list)
    flooded: list[float] = dataclasses.field(default_factory=list)
    flood_answers: int = 0
    flood_seconds: float = 0.0

    def ratio(self, part: float) -> float:
        """Of the quantiles with and without the flood."""
        return quantile(self.flooded, part) / quantile(self.alone, part)


def quantile(values: list[float], part: float) -> float:
    """The value below which this part lies."""
    return statistics.quantiles(values, n=100, method="inclusive")[round(part * 100) - 1]


class FloodSetup:
    """A cluster, and the callers of its keys."""

    def __init__(self, cluster: LoopbackCluster) -> None:
        self._cluster = cluster
        self._names = itertools.count()
        self.answered = 0

    async def drained(self) -> None:
        """Nothing runs any more."""
        await until(lambda: not any(node.node.running for node in self._cluster.nodes))

    async def ask(self, load: Load) -> float:
        """One request, to its end: seconds to its first token."""
        began = time.monotonic()
        try:
            response = await self._cluster.orchestrator.answer(self._request(load))
        except ClientError as error:
            raise AssertionError(error.message) from error
        first = time.monotonic() - began
        assert isinstance(response.body, ResponseStream)
        try:
            async for _ in response.body:
                pass
        finally:
            await response.body.aclose()
        self.answered += 1
        return first

    @contextlib.asynccontextmanager
    async def flooded(self, load: Load) -> AsyncIterator[None]:
        """While inside, all callers of a load ask; at its end those that wait leave."""
        tasks = [asyncio.create_task(self._again_and_again(load)) for _ in range(load.callers)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def quiet(self, seconds: float) -> list[float]:
        """What the quiet keys see for so long."""
        parts = await asyncio.gather(*(self._quiet(load, seconds) for load in QUIET))
        return [wait for part in parts for wait in part]

    async def _quiet(self, load: Load, seconds: float) -> list[float]:
        end, waits = time.monotonic() + seconds, []
        while time.monotonic() < end:
            waits.append(await self.ask(load))
            await asyncio.sleep(load.pause)
        return waits

    async def _again_and_again(self, load: Load) -> None:
        while True:
            await self.ask(load)

    def _request(self, load: Load) -> ClientRequest:
        now = self._cluster.clock.now()
        number = next(self._names)
        prompt = f"{number:04} ".ljust(load.prompt * 4, "x")
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": load.answer, "stream": True}
        body |= {"temperature": 0}
        return ClientRequest(
            f"r-{number}", Endpoint.COMPLETIONS, body, (), MODEL, True, 0, now, now + 60, lambda: True,
            api_key=load.key,
        )  # fmt: skip


@contextlib.asynccontextmanager
async def flood_setup(reserve: float) -> AsyncIterator[FloodSetup]:
    """Everything is given back in the end."""
    fabric = FakeKvTransfer()
    names = [*(f"p{index}" for index in range(PREFILLS)), *(f"d{index}" for index in range(DECODES))]
    config = OrchestrationConfig(queue=QueueLimits(reserve=reserve))
    async with contextlib.AsyncExitStack() as stack:
        fakes = [TimedLoopbackNode(TimedNode(name, fabric, TOKEN_SECONDS), PACE) for name in names]
        nodes = [await stack.enter_async_context(node) for node in fakes]
        cluster = LoopbackCluster(fabric, list(nodes), config, CAPACITY)
        yield FloodSetup(cluster)
        await cluster.close()


async def measure(flood: Load, reserve: float, rounds: int, seconds: float) -> Waits:
    """In turns without the flood and with it, so many seconds each."""
    waits = Waits()
    async with flood_setup(reserve) as setup:
        await setup.quiet(seconds / 4)
        for _ in range(rounds):
            waits.alone += await setup.quiet(seconds)
            before, began = setup.answered, time.monotonic()
            async with setup.flooded(flood):
                await asyncio.sleep(seconds / 2)
                waits.flooded += (fewer := await setup.quiet(seconds))
                waits.flood_answers += setup.answered - before - len(fewer)
                waits.flood_seconds += time.monotonic() - began
            await setup.drained()
    return waits


def lines(flood: str, reserve: float, waits: Waits) -> Iterator[str]:
    """The figures, for people."""
    yield f"{flood}; limits.reserve = {reserve:g}:"
    for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        alone, flooded = quantile(waits.alone, part) * 1000, quantile(waits.flooded, part) * 1000
        ratio = waits.ratio(part)
        yield f"  first token {name}: {alone:5.0f} ms alone, {flooded:5.0f} ms with the flood: {ratio:.2f} x"
    quiet, rate = (
        f"{len(waits.alone)} and {len(waits.flooded)} quiet requests",
        waits.flood_answers / waits.flood_seconds,
    )
    yield f"  {quiet}, {rate:.1f} answers a second to the flood"


def main() -> int:
    """Print all figures."""
    for flood, load in FLOODS.items():
        for reserve in (QueueLimits().reserve, 0.5, 0.0):
            print(*lines(flood, reserve, asyncio.run(measure(load, reserve, 3, 4.0))), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
