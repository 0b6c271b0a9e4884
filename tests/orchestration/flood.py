"""A flood of one API key beside the quiet requests of others, on fake nodes that take time: how long those wait for
their first token, with the flood and without it, in turns.

``python -m tests.orchestration.flood`` prints the figures, also of a proxy without shares. Time is virtual: they are
those of the proxy's decisions alone, and the same on every machine.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import statistics
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError
from pdproxy.nodes.node import Binding, Capacity, Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.context import OrchestrationConfig, OrchestrationContext
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.orchestration.request_queue import QueueLimits
from pdproxy.request import ClientRequest, Endpoint, HeldBody
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.node import FakeNode
from tests.fakes.timed import LoopClock, Pace, TimedTransport, VirtualTimeLoop
from tests.orchestration.cluster import MODEL

CAPACITY = Capacity(6000, None, 8, Binding.ATTENTION)
"""The capacity of each decode node: room for some forty of these requests."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Requests of one key.

    Attributes:
        prompt: in tokens, on the mean; by up to half more or less.
        answer: in tokens.
        callers: how many ask at once, each again when it has its answer.
        pause: seconds between an answer and a caller's next request, on the mean (exponential).
    """

    key: str
    prompt: int
    answer: int
    callers: int
    pause: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """Nodes, and the requests to them.

    Attributes:
        prefills, decodes: how many nodes of each role.
        pace: how fast they are.
        quiet: the load of each quiet key.
        flood: that of the key that floods.
    """

    prefills: int
    decodes: int
    pace: Pace
    quiet: tuple[Load, ...]
    flood: Load


QUIET = tuple(Load(key, 100, 4, 1, 1.5) for key in ("alice", "bob", "carol"))
PACE = Pace(prompt=0.001, token=0.02)
SHORTER = Scene(2, 2, PACE, QUIET, Load("flood", 40, 20, 100))
LONGER = Scene(2, 2, PACE, QUIET, Load("flood", 160, 2, 100))
LIKE_ENGINES = Scene(
    1,
    1,
    Pace(prompt=0.0006, token=0.02, step=204, leg=0.005),
    (Load("alice", 100, 3, 1, 0.005),),
    Load("flood", 100, 3, 24),
)
"""As in `tests/e2e/test_flood.py`: a node of each role, whose steps have room for two prompts, and one quiet caller."""
ONE_CALLER = dataclasses.replace(LIKE_ENGINES, flood=dataclasses.replace(LIKE_ENGINES.flood, callers=1))
SCENES = {
    "short prompts, long answers": SHORTER,
    "long prompts, short answers": LONGER,
    "one prefill node, equal prompts": LIKE_ENGINES,
    "one prefill node, equal prompts, a flood of one caller": ONE_CALLER,
}


@dataclasses.dataclass(slots=True)
class Waits:
    """Seconds from a quiet request to its first token."""

    alone: list[float] = dataclasses.field(default_factory=list)
    flooded: list[float] = dataclasses.field(default_factory=list)
    flood_answers: int = 0
    flood_seconds: float = 0.0

    def ratio(self, part: float) -> float:
        """The ratio of the quantiles with and without the flood."""
        return quantile(self.flooded, part) / quantile(self.alone, part)


def quantile(values: list[float], part: float) -> float:
    """The value below which this part lies."""
    return statistics.quantiles(values, n=100, method="inclusive")[round(part * 100) - 1]


class FloodSetup:
    """Nodes that take time, a proxy's parts, and the callers of its keys."""

    def __init__(self, scene: Scene, reserve: float) -> None:
        self._scene = scene
        fabric, clock = FakeKvTransfer(), LoopClock()
        roles = [(f"p{index}", Role.PREFILL) for index in range(scene.prefills)]
        roles += [(f"d{index}", Role.DECODE) for index in range(scene.decodes)]
        self.nodes = [FakeNode(name, fabric) for name, _ in roles]
        metrics = Metrics(CollectorRegistry())
        pool = Pool(clock, metrics=metrics)
        for fake, (name, role) in zip(self.nodes, roles, strict=True):
            node = Node(name, fake.url, (role,), MODEL, capacity=CAPACITY)
            pool.add(node)
            pool.bring_up(node)
        config = OrchestrationConfig(queue=QueueLimits(reserve=reserve))
        self._context = OrchestrationContext(TimedTransport(self.nodes, scene.pace), pool, metrics, clock, config)
        self._orchestrator = Orchestrator(self._context)
        self._names = itertools.count()
        self._dice = random.Random(1)
        self._now = clock.now
        self.answered = 0

    async def drained(self) -> None:
        """Nothing runs any more, and nothing is held."""
        for _ in range(100):
            await asyncio.sleep(0.1)
        assert not any(node.running for node in self.nodes)
        assert self._context.background.errands == 0
        assert self._context.queue.status().running == self._context.queue.status().waiting == 0

    async def ask(self, load: Load) -> float:
        """One request, to its end: seconds to its first token."""
        began = self._now()
        try:
            response = await self._orchestrator.answer(self._request(load))
        except ClientError as error:
            raise AssertionError(error.message) from error
        first = self._now() - began
        assert not isinstance(response.body, bytes)
        try:
            while await response.body.read():
                pass
        finally:
            await response.body.aclose()
        self.answered += 1
        return first

    @contextlib.asynccontextmanager
    async def flooded(self) -> AsyncIterator[None]:
        """While inside, all callers of the flood ask; at its end those that wait leave."""
        load = self._scene.flood
        tasks = [asyncio.create_task(self._again_and_again(load)) for _ in range(load.callers)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def quiet(self, seconds: float) -> list[float]:
        """Times to first token that the quiet keys see for so long."""
        parts = await asyncio.gather(*(self._quiet(load, seconds) for load in self._scene.quiet))
        return [wait for part in parts for wait in part]

    async def _quiet(self, load: Load, seconds: float) -> list[float]:
        end, waits = self._now() + seconds, []
        while self._now() < end:
            waits.append(await self.ask(load))
            await asyncio.sleep(self._dice.expovariate(1 / load.pause))
        return waits

    async def _again_and_again(self, load: Load) -> None:
        while True:
            await self.ask(load)

    def _request(self, load: Load) -> ClientRequest:
        now = self._now()
        number = next(self._names)
        prompt = f"{number:04} ".ljust(round(load.prompt * 4 * self._dice.uniform(0.5, 1.5)), "x")
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": load.answer, "stream": True}
        body |= {"temperature": 0}
        return ClientRequest(
            f"r-{number}", Endpoint.COMPLETIONS, HeldBody(body), (), MODEL, True, 0, now, now + 60, lambda: True,
            api_key=load.key,
        )  # fmt: skip


async def _measured(scene: Scene, reserve: float, rounds: int, seconds: float) -> Waits:
    waits, setup, now = Waits(), FloodSetup(scene, reserve), asyncio.get_running_loop().time
    await setup.quiet(seconds / 4)
    for _ in range(rounds):
        waits.alone += await setup.quiet(seconds)
        before, began = setup.answered, now()
        async with setup.flooded():
            await asyncio.sleep(seconds / 2)
            waits.flooded += (fewer := await setup.quiet(seconds))
            waits.flood_answers += setup.answered - before - len(fewer)
            waits.flood_seconds += now() - began
        await setup.drained()
    return waits


def measure(scene: Scene, reserve: float, rounds: int, seconds: float) -> Waits:
    """In turns without the flood and with it, so many seconds each, which do not take that long."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_measured(scene, reserve, rounds, seconds))


def lines(scene: str, reserve: float, waits: Waits) -> Iterator[str]:
    """The figures, for people."""
    yield f"{scene}; limits.reserve = {reserve:g}:"
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
    for name, scene in SCENES.items():
        for reserve in (QueueLimits().reserve, 0.0):
            print(*lines(name, reserve, measure(scene, reserve, 1, 40.0 if reserve else 20.0)), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
