"""The whole proxy, as a process, among hostile requests and failing nodes; honest requests must lose nothing by it.

One request in twenty is hostile, nodes are killed and frozen, their connections close when they are idle, and the data
path between two of them is cut.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import httpx

from pdproxy.nodes.node import State
from tests.app.running_proxy import plain_client
from tests.orchestration.cluster import MODEL
from tests.soak.asking import PATIENT, Asking, asking
from tests.soak.hostile_nodes import CutKvTransfer, HostileWorldNode, PoisonableNode, Trouble
from tests.soak.hostile_requests import Hostile, hostile
from tests.watch.process import Process, serving

CLIENTS = 8
PACE = 0.005
"""Seconds between two tokens."""
HOSTILE = 1 / 20
"""Part of all requests."""
GRACE = 6.0
"""Seconds for a node that serves again to be found well: the circuit's cool-down, a probe, the preflight."""
DISTINCT = 200
"""Requests of one client before it repeats them. What the proxy remembers of prompts is bounded, at more than a soak
can fill: with new prompts until the end it would grow until the end. With these it has met all within two minutes."""
LOOK = 0.2
"""Seconds between two looks at the nodes' states and at the process's memory."""
SERVING = frozenset({State.UP, State.PROBING})
KEYS = {"honest": "sk-honest-0123456789", "hostile": "sk-hostile-0123456789"}
SETTINGS: dict[str, Any] = {
    "health": {"interval": 0.5, "timeout": 2.0, "failures": 2, "cool_down": 1.0, "slow_start": 0.0},
    "deadlines": {"connect": 2.0, "prefill_headers": 5.0, "decode_headers": 5.0, "stall": 5.0, "request": PATIENT},
    "limits": {"concurrency": 24, "queue": 16},
}


@dataclasses.dataclass(slots=True)
class Seen:
    """The results of the run.

    Attributes:
        honest: how honest requests ended: "complete", or a description of what went wrong.
        hostile: statuses of the hostile requests' answers.
        accused: nodes that were taken out though nothing was wrong with them, with the proxy's reason.
        resident: MiB of the proxy's process, with the seconds at which it was looked at.
    """

    honest: Counter[str] = dataclasses.field(default_factory=Counter)
    hostile: Counter[str] = dataclasses.field(default_factory=Counter)
    accused: list[str] = dataclasses.field(default_factory=list)
    resident: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    kills: int = 0
    freezes: int = 0
    cuts: int = 0
    log: list[str] = dataclasses.field(default_factory=list)
    metrics: str = ""


async def hostile_soak(folder: Path, seconds: float, seed: int) -> Seen:
    """Run it once."""
    fabric, seen, trouble, dice = CutKvTransfer(), Seen(), Trouble(), random.Random(seed)
    names = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(3)]
    nodes = {name: HostileWorldNode(PoisonableNode(name, fabric), PACE, random.Random(name)) for name in names}
    keys = folder / "keys"
    keys.write_text("".join(f"{key} {name}\n" for name, key in KEYS.items()))
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes.values():
            await stack.enter_async_context(node)
        entries = [{"url": node.url, "role": name.partition("-")[0], "model": MODEL} for name, node in nodes.items()]
        settings = {**SETTINGS, "nodes": entries, "keys": {"file": str(keys)}}
        proxy = await stack.enter_async_context(serving(folder, settings))
        await _all_up(proxy)
        seen.log = proxy.log
        async with _beside(_make_trouble(nodes, fabric, trouble, dice, seen), _look(proxy, nodes, trouble, seen)):
            await _ask_until(proxy, time.monotonic() + seconds, seed, seen)
        async with plain_client(proxy.operators) as operator:
            seen.metrics = (await operator.get("/metrics")).text
    assert fabric.wrong == [], fabric.wrong[:5]
    return seen


async def _all_up(proxy: Process) -> None:
    async with asyncio.timeout(60), plain_client(proxy.operators) as operator:
        while {node["state"] for node in (await operator.get("/nodes")).json()["nodes"]} != {State.UP}:  # noqa: ASYNC110
            await asyncio.sleep(LOOK)


@contextlib.asynccontextmanager
async def _beside(*work: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _make_trouble(
    nodes: dict[str, HostileWorldNode], fabric: CutKvTransfer, trouble: Trouble, dice: random.Random, seen: Seen
) -> None:
    """One node at a time is killed or frozen; beside that one pair is cut for a while."""
    cutting = asyncio.create_task(_cut(nodes, fabric, dice, seen))
    try:
        while True:
            await asyncio.sleep(dice.uniform(GRACE, 1.5 * GRACE))
            name, kills = dice.choice(list(nodes)), dice.random() < 0.5
            trouble.strike(name, time.monotonic())
            if kills:
                seen.kills += 1
                await nodes[name].kill()
                await asyncio.sleep(dice.uniform(0.5, 3.0))
                await nodes[name].start()
            else:
                seen.freezes += 1
                nodes[name].freeze()
                await asyncio.sleep(dice.uniform(1.0, 6.0))
                nodes[name].thaw()
            trouble.end(name, time.monotonic())
    finally:
        cutting.cancel()
        for node in nodes.values():
            node.thaw()
        await asyncio.gather(cutting, return_exceptions=True)


async def _cut(nodes: dict[str, HostileWorldNode], fabric: CutKvTransfer, dice: random.Random, seen: Seen) -> None:
    while True:
        await asyncio.sleep(dice.uniform(2.0, 8.0))
        seen.cuts += 1
        fabric.cut = {(f"prefill-{dice.randrange(3)}", f"decode-{dice.randrange(3)}")}
        await asyncio.sleep(dice.uniform(2.0, 8.0))
        fabric.cut = set()


async def _look(proxy: Process, nodes: dict[str, HostileWorldNode], trouble: Trouble, seen: Seen) -> None:
    names, began = {node.url: name for name, node in nodes.items()}, time.monotonic()
    out = set[str]()
    async with plain_client(proxy.operators) as operator:
        while True:
            seen.resident.append((time.monotonic() - began, _resident(proxy.pid)))
            for node in (await operator.get("/nodes")).json()["nodes"]:
                name, is_out = names[node["url"]], node["state"] not in SERVING
                if is_out and name not in out and not trouble.excuses(name, time.monotonic(), GRACE):
                    seen.accused.append(f"{name} {node['state']}: {node['reason']}")
                (out.add if is_out else out.discard)(name)
            await asyncio.sleep(LOOK)


def _resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def _ask_until(proxy: Process, until: float, seed: int, seen: Seen) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    client = httpx.AsyncClient(base_url=proxy.clients, timeout=PATIENT, limits=limits)
    async with client, asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(_client(client, f"{seed}-{number}", until, seen))


async def _client(client: httpx.AsyncClient, seed: str, until: float, seen: Seen) -> None:
    numbers = itertools.cycle(range(DISTINCT))
    while time.monotonic() < until:
        dice = random.Random(f"{seed}-{next(numbers)}")
        if dice.random() < HOSTILE:
            await _be_hostile(client, hostile(dice, MODEL), seen)
        else:
            seen.honest[await _ask(client, asking(dice), until)] += 1


async def _ask(client: httpx.AsyncClient, asked: Asking, until: float) -> str:
    """One honest request. A 429 is obeyed, as the official clients do."""
    headers = {"authorization": f"Bearer {KEYS['honest']}"}
    while True:
        try:
            got = await client.post(asked.endpoint, json=asked.body, headers=headers)
        except httpx.HTTPError as error:
            return f"{type(error).__name__} {error}"
        if got.status_code != 429:
            break
        await asyncio.sleep(min(2.0, float(got.headers["retry-after"])))
    if got.status_code != 200:
        return f"{got.status_code} {got.text[:300]}"
    return "complete" if asked.judge(got.content) else f"broken: {got.text[-300:]}"


async def _be_hostile(client: httpx.AsyncClient, request: Hostile, seen: Seen) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(request.at_once):
            group.create_task(_send(client, request, seen))


async def _send(client: httpx.AsyncClient, request: Hostile, seen: Seen) -> None:
    headers = {"content-type": request.content_type, "authorization": f"Bearer {KEYS['hostile']}", **request.headers}
    try:
        async with asyncio.timeout(request.leaves):
            got = await client.post(request.path, content=request.body, headers=headers)
    except TimeoutError:
        seen.hostile["left"] += 1
    except httpx.HTTPError as error:
        seen.hostile[type(error).__name__] += 1
    else:
        seen.hostile[str(got.status_code)] += 1
        assert b"Traceback" not in got.content
