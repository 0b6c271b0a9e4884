"""A mixed load while nodes are killed at random, and in one scenario what is known of their caches is wrong as well.

Every answer is judged, and in the end nothing may be left.
"""

import asyncio
import contextlib
import dataclasses
import enum
import functools
import gc
import itertools
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError
from pdproxy.nodes.capacity import Binding, Capacity
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.fanout import FanOut
from pdproxy.orchestration.relay import Relay
from pdproxy.orchestration.request_queue import QueueLimits
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.request import SubRequest
from pdproxy.settings.types import Legs
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.loopback import LoopbackNode
from tests.fakes.reading import follow
from tests.orchestration.loopback_cluster import LoopbackCluster, loopback_cluster
from tests.soak.asking import PATIENT, Asking, asking, words
from tests.soak.cached_cluster import cached_cluster
from tests.soak.caller import Caller
from tests.soak.conversations import Conversations
from tests.soak.server import serving

WORKERS = 16
SAMPLES = 30
FAULT_KINDS = (
    FaultKind.RESET,
    FaultKind.STATUS,
    FaultKind.GARBAGE,
    FaultKind.NO_TICKET,
    FaultKind.ERROR_EVENT,
    FaultKind.SHORT,
    FaultKind.STALL,
    FaultKind.HANG,
)
REMEMBERED = 4.0
"""Seconds for which fakes remember at least what was released, and who waits no longer: legs and tickets come late."""
TERMS = OrchestrationConfig(
    connect=5.0,
    prefill_headers=1.0,
    decode_headers=1.0,
    stall=1.0,
    release=60.0,
    legs=Legs.TOGETHER,
    queue=QueueLimits(concurrency=12, queue=1000, queue_seconds=PATIENT),
)
"""Short deadlines: a slow machine may pass them, which costs a retry and nothing else. Fewer run at once than there are
clients: some wait in the queue, and leave it."""

OF_A_REQUEST = frozenset({UpstreamRequest, Relay, FanOut, SubRequest})
OF_A_LOOK_UP = frozenset({"_Prompt", "_Asked"})
"""Names of types of which the prefix sources keep some for a while."""
SMALL = Capacity(150, 4, 1, Binding.ATTENTION)
"""Of each decode node: two or three requests have room, so that others wait for it."""


@dataclasses.dataclass(slots=True)
class Tally:
    """What came of the requests: complete, broken (cleanly), refused (cleanly), left."""

    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    kills: int = 0
    registry: CollectorRegistry = dataclasses.field(default_factory=CollectorRegistry, repr=False)
    """What the proxy counted."""
    objects: list[int] = dataclasses.field(default_factory=list)
    """Blocks of memory that Python's objects had, at equal distances of time."""
    resident: list[float] = dataclasses.field(default_factory=list)
    """MiB that the process had then; what the allocator keeps of freed memory is in it, and grows with scatter."""

    def count(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self.registry.get_sample_value(f"pdproxy_{name}", labels) or 0.0

    def by(self, name: str) -> dict[str, float]:
        """The values of a metric of one label that are not 0."""
        samples = (each for family in self.registry.collect() for each in family.samples)
        return {"".join(each.labels.values()): each.value for each in samples if each.name == name and each.value}


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What is asked of which cluster.

    Attributes:
        pauses: between two kills or faults of nodes, in seconds: at least and at most.
    """

    cluster: contextlib.AbstractAsyncContextManager[LoopbackCluster]
    prompt: Callable[[random.Random], str]
    pauses: tuple[float, float]


class Scenario(enum.Enum):
    """What goes wrong besides nodes that die."""

    NODES = "nodes"
    """Nothing: short prompts, planned by load. Two of three decode nodes write journals."""
    EVENTS = "events"
    """KV events, by which the prompts of long conversations are planned."""

    def load(self, seed: int) -> Load:
        """For one run."""
        if self is Scenario.NODES:
            cluster = loopback_cluster(prefills=3, decodes=3, config=TERMS, capacity=SMALL, journaling=2)
            return Load(cluster, words, (0.02, 0.2))
        return Load(cached_cluster(TERMS), Conversations(seed).prompt, (0.1, 1.0))


async def soak(scenario: Scenario, seconds: float, seed: int) -> Tally:
    """Run for ``seconds``; everything is checked."""
    tally, load = Tally(), scenario.load(seed)
    async with load.cluster as cluster:
        tally.registry = cluster.registry
        until = asyncio.get_running_loop().time() + seconds
        killer = asyncio.create_task(_kill(cluster, random.Random(seed), tally, load.pauses))
        async with serving(cluster) as caller, asyncio.TaskGroup() as workers:
            workers.create_task(_weigh(cluster, tally, seconds / SAMPLES))
            ways = (functools.partial(_ask, cluster), functools.partial(_call, caller))
            for number, way in zip(range(WORKERS), itertools.cycle(ways), strict=False):
                asked = _asked(random.Random(seed + 1 + number), load.prompt)
                workers.create_task(_work(way, asked, until, tally, f"w{number}"))
        killer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killer
        await cluster.close()
    _check_nothing_left()
    return tally


async def _weigh(cluster: LoopbackCluster, tally: Tally, pause: float) -> None:
    """The fakes' own memory is not what is weighed."""
    since_forgotten = 0.0
    for _ in range(SAMPLES):
        await asyncio.sleep(pause)
        since_forgotten += pause
        if since_forgotten >= REMEMBERED:
            since_forgotten = 0.0
            _forget(cluster)
        gc.collect()
        tally.objects.append(sys.getallocatedblocks())
        tally.resident.append(_resident())


def _forget(cluster: LoopbackCluster) -> None:
    cluster.fabric.forget()
    for node in cluster.nodes:
        node.node.seen.clear()
        node.node.waiting.forget()


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20, 1)


Way = Callable[[Asking, str], Awaitable[str]]


def _asked(dice: random.Random, prompt: Callable[[random.Random], str]) -> Iterator[Asking]:
    while True:
        yield asking(dice, prompt)


async def _work(way: Way, requests: Iterator[Asking], until: float, tally: Tally, name: str) -> None:
    loop, number = asyncio.get_running_loop(), 0
    while loop.time() < until:
        number += 1
        async with asyncio.timeout(PATIENT):
            tally.ended[await way(next(requests), f"{name}-{number}")] += 1
        await asyncio.sleep(0)


async def _call(caller: Caller, asked: Asking, name: str) -> str:
    """By HTTP. Who leaves does so after some time, wherever its request is then."""
    seconds = None if asked.leaves is None else asked.leaves * 0.005
    try:
        async with asyncio.timeout(seconds):
            status, body = await caller.post(asked.endpoint, json.dumps(asked.body).encode(), name)
    except TimeoutError:
        return "left"
    assert b"internal_error" not in body
    return _judged(asked, body) if status == 200 else _refused(status)


async def _ask(cluster: LoopbackCluster, asked: Asking, name: str) -> str:
    request = asked.request(name, asyncio.get_running_loop().time())
    try:
        reply = await cluster.orchestrator.answer(request)
    except ClientError as error:
        return _refused(error.status)
    if isinstance(reply.body, bytes):
        return _judged(asked, reply.body) if reply.status == 200 else _refused(reply.status)
    leaves = sys.maxsize if asked.leaves is None else asked.leaves
    pieces = await follow(reply.body, leaves)
    if len(pieces) > leaves:
        return "left"
    return _judged(asked, b"".join(pieces))


def _judged(asked: Asking, body: bytes) -> str:
    return "complete" if asked.judge(body) else "broken"


def _refused(status: int) -> str:
    assert status in (429, 500, 502, 503, 504), status
    return "refused"


async def _kill(cluster: LoopbackCluster, dice: random.Random, tally: Tally, pauses: tuple[float, float]) -> None:
    """Again and again one node is killed and restarted, or gets a fault for one request."""
    while True:
        await asyncio.sleep(dice.uniform(*pauses))
        node = dice.choice(cluster.nodes)
        if dice.random() < 0.5:
            ill = InjectedFault(
                dice.choice(FAULT_KINDS), at=dice.randint(-1, 6), status=dice.choice((404, 429, 500, 503)), times=1
            )
            node.node.waiting.most = dice.choice((0, 1024, 1024, 1024))
            if dice.random() < 0.3:
                node.node.delivery_fault = ill
            else:
                node.node.fault = dataclasses.replace(ill, status=max(ill.status, 429))
        else:
            tally.kills += 1
            await _restart(node, dice.uniform(0.01, 0.3))


async def _restart(node: LoopbackNode, pause: float) -> None:
    await node.kill()
    try:
        await asyncio.sleep(pause)
    finally:
        await node.start()


def _check_nothing_left() -> None:
    """No task but this one, and none of the objects that a request is made of."""
    assert len(asyncio.all_tasks()) == 1
    gc.collect()
    # By exact type: isinstance would ask every object in the process for its class, and some answer with a warning.
    kinds = Counter(map(type, gc.get_objects()))
    left = {kind.__name__ for kind in kinds if kind in OF_A_REQUEST or kind.__name__ in OF_A_LOOK_UP}
    assert left == set()
