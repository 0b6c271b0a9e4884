"""A mixed load while nodes are killed at random; in one scenario what is known of their caches is wrong as well, and in
one nothing dies, but engines stand still. No node may be given up for its silence in any of them.

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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from pdproxy.errors import ClientError
from pdproxy.nodes.join import OutageLog
from pdproxy.nodes.node import Binding, Capacity
from pdproxy.nodes.silence import SilenceConfig, SilenceWatch
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.fanout import FanOut
from pdproxy.orchestration.relay import Relay
from pdproxy.orchestration.request_queue import QueueLimits
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.request import SubRequest
from tests.fakes.reading import follow
from tests.orchestration.loopback_cluster import LoopbackCluster, loopback_cluster
from tests.soak.asking import PATIENT, Asking, asking, words
from tests.soak.cached_cluster import cached_cluster
from tests.soak.caller import Caller
from tests.soak.conversations import Conversations
from tests.soak.server import serving
from tests.soak.tally import Tally
from tests.soak.trouble import hold_up, kill

WORKERS = 16
SAMPLES = 30
REMEMBERED = 4.0
"""Seconds for which fakes remember at least what was released: legs come late."""
TERMS = OrchestrationConfig(
    connect=5.0,
    prefill_headers=1.0,
    decode_headers=1.0,
    stall=1.0,
    release=60.0,
    queue=QueueLimits(concurrency=12, queue=1000, queue_seconds=PATIENT),
)
"""Short deadlines: a slow machine may pass them, which costs a retry and nothing else. Fewer run at once than there are
clients: some wait in the queue, and leave it."""

PATIENT_TERMS = dataclasses.replace(TERMS, prefill_headers=PATIENT, decode_headers=PATIENT, stall=PATIENT)
"""Deadlines that no engine passes by standing still for a while."""
OF_A_REQUEST = frozenset({UpstreamRequest, Relay, FanOut, SubRequest})
OF_A_LOOK_UP = frozenset({"_Prompt", "_Asked"})
"""Names of types of which the prefix sources keep some for a while."""
SMALL = Capacity(150, 4, 1, Binding.ATTENTION)
"""The capacity of each decode node: two or three requests have room, so that others wait for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The requests, and the cluster that they go to.

    Attributes:
        trouble: what happens to its nodes meanwhile, until cancelled.
    """

    cluster: contextlib.AbstractAsyncContextManager[LoopbackCluster]
    prompt: Callable[[random.Random], str]
    trouble: Callable[[LoopbackCluster, random.Random, Tally], Awaitable[None]]


class Scenario(enum.Enum):
    """The troubles besides nodes that die."""

    NODES = "nodes"
    """Nothing: short prompts, planned by load. Two of three decode nodes write journals."""
    EVENTS = "events"
    """KV events, by which the prompts of long conversations are planned."""
    SILENCE = "silence"
    """Nothing dies, but engines stand still for seconds, as in long steps, while their API servers answer."""

    def load(self, seed: int) -> Load:
        """For one run."""
        if self is Scenario.NODES:
            cluster = loopback_cluster(prefills=3, decodes=3, config=TERMS, capacity=SMALL, journaling=2)
            return Load(cluster, words, functools.partial(kill, pauses=(0.02, 0.2)))
        if self is Scenario.SILENCE:
            cluster = loopback_cluster(prefills=3, decodes=3, config=PATIENT_TERMS, capacity=SMALL)
            return Load(cluster, words, hold_up)
        trouble = functools.partial(kill, pauses=(0.1, 1.0))
        return Load(cached_cluster(TERMS), Conversations(seed).prompt, trouble)


async def soak(scenario: Scenario, seconds: float, seed: int) -> Tally:
    """Run for ``seconds``; everything is checked."""
    tally, load = Tally(), scenario.load(seed)
    async with load.cluster as cluster:
        tally.registry = cluster.registry
        cluster.fabric.copies_allowed = True  # a kill breaks kept-alive connections: their requests go out again
        until = asyncio.get_running_loop().time() + seconds
        beside = [
            asyncio.ensure_future(load.trouble(cluster, random.Random(seed), tally)),
            asyncio.create_task(_watch(cluster).run()),
        ]
        async with serving(cluster) as caller, asyncio.TaskGroup() as workers:
            workers.create_task(_weigh(cluster, tally, seconds / SAMPLES))
            ways = (functools.partial(_ask, cluster), functools.partial(_call, caller))
            for number, way in zip(range(WORKERS), itertools.cycle(ways), strict=False):
                asked = _asked(random.Random(seed + 1 + number), load.prompt)
                workers.create_task(_work(way, asked, until, tally, f"w{number}"))
        await _end(beside)
        await cluster.close()
    _check_nothing_left()
    return tally


def _watch(cluster: LoopbackCluster) -> SilenceWatch:
    """As it is unless set otherwise. Nodes that it gives up stay away."""
    outages, metrics = OutageLog(cluster.clock), cluster.context.metrics
    return SilenceWatch(cluster.pool, cluster.transport, cluster.clock, outages, metrics, SilenceConfig())


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        assert not task.done(), task
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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


def _check_nothing_left() -> None:
    """No task but this one, and none of the objects that a request is made of."""
    assert len(asyncio.all_tasks()) == 1
    gc.collect()
    # By exact type: isinstance would ask every object in the process for its class, and some answer with a warning.
    kinds = Counter(map(type, gc.get_objects()))
    left = {kind.__name__ for kind in kinds if kind in OF_A_REQUEST or kind.__name__ in OF_A_LOOK_UP}
    assert left == set()
