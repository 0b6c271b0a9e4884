"""Troubles of the nodes of a soak, until it is cancelled."""

import asyncio
import random

from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode
from tests.orchestration.loopback_cluster import LoopbackCluster
from tests.soak.tally import Tally

FAULT_KINDS = (
    FaultKind.RESET,
    FaultKind.STATUS,
    FaultKind.GARBAGE,
    FaultKind.NO_TICKET,
    FaultKind.ERROR_EVENT,
    FaultKind.ABORT,
    FaultKind.SHORT,
    FaultKind.STALL,
    FaultKind.HANG,
)


async def kill(cluster: LoopbackCluster, dice: random.Random, tally: Tally, *, pauses: tuple[float, float]) -> None:
    """Again and again one node is killed and restarted, or gets a fault for one request.

    ``pauses``: between two of these, in seconds, at least and at most.
    """
    while True:
        await asyncio.sleep(dice.uniform(*pauses))
        node = dice.choice(cluster.nodes)
        if dice.random() < 0.5:
            ill = InjectedFault(
                dice.choice(FAULT_KINDS), at=dice.randint(-1, 6), status=dice.choice((429, 500, 503)), times=1
            )
            node.node.fault = ill
        else:
            tally.kills += 1
            await _restart(node, dice.uniform(0.01, 0.3))


async def hold_up(cluster: LoopbackCluster, dice: random.Random, tally: Tally) -> None:
    """Again and again one engine stands still for longer than silence may last, several at the same time."""
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(dice.uniform(0.2, 1.5))
            node = dice.choice(cluster.nodes).node
            if node.stepping.is_set():
                tally.pauses += 1
                node.stepping.clear()
                group.create_task(_go_on(node, dice.uniform(1.0, 3.0)))


async def _go_on(node: FakeNode, seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        node.stepping.set()


async def _restart(node: LoopbackNode, pause: float) -> None:
    await node.kill()
    try:
        await asyncio.sleep(pause)
    finally:
        await node.start()
