"""Ten incidents: what the page of a real proxy says of each, while fake nodes die, freeze, are out of reach or full.

``python -m tests.watch.incidents docs`` runs them one after the other, makes a picture of each page, and prints its
sentences.
"""

import asyncio
import contextlib
import itertools
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx

from tests.admin.browser import chromium
from tests.app.running_proxy import plain_client
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode
from tests.orchestration.prompts import WORDS
from tests.watch.load import MODEL, Load
from tests.watch.process import SOON, Process, serving

SETTINGS: Mapping[str, Any] = {"health": {"interval": 1.0, "slow_start": 0.0}}
HOSTS = {"prefill-0": "127.0.0.1", "decode-0": "127.0.0.2", "decode-1": "127.0.0.3"}
"""Each node is on a host of its own, for some sentences are of hosts."""
WIDTH, HEIGHT = 1000, 700
"""Pixels of a picture: the page's first section."""


class Fleet:
    """A prefill and two decode nodes, the proxy in front of them, and clients that ask without pause.

    Attributes:
        nodes: by name, as in `HOSTS`.
        fabric: by which the nodes exchange the blocks of tickets.
    """

    def __init__(self) -> None:
        self.fabric = FakeKvTransfer()
        self.nodes = {
            name: LoopbackNode(FakeNode(name, self.fabric), pace=0.04, host=host) for name, host in HOSTS.items()
        }
        self.proxy: Process
        self.clients: httpx.AsyncClient
        self.operator: httpx.AsyncClient

    @contextlib.asynccontextmanager
    async def running(self, folder: Path, incident: "Incident") -> AsyncIterator[None]:
        """All of it, while inside."""
        async with contextlib.AsyncExitStack() as stack:
            for node in self.nodes.values():
                await stack.enter_async_context(node)
            await incident.before(self)
            entries = [
                {"url": node.url, "role": name.partition("-")[0], "model": MODEL} for name, node in self.nodes.items()
            ]
            whole = {**SETTINGS, "nodes": entries, **incident.settings}
            self.proxy = await stack.enter_async_context(serving(folder, whole))
            self.clients = await stack.enter_async_context(plain_client(self.proxy.clients))
            self.operator = await stack.enter_async_context(plain_client(self.proxy.operators))
            yield

    async def ask(self, prompt: str) -> None:
        """One request of few tokens, whatever becomes of it."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        await self.clients.post("/v1/completions", json=body)

    async def state(self) -> dict[str, Any]:
        """The state that the page shows."""
        found: dict[str, Any] = (await self.operator.get("/ui/state")).json()
        return found

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the page is so."""
        async with asyncio.timeout(SOON):
            while not holds(state := await self.state()):  # noqa: ASYNC110 - another process has no event of ours
                await asyncio.sleep(0.05)
        return state

    async def all_serve(self) -> None:
        """Wait until every node is up."""
        await self.until(lambda state: [node["state"] for node in state["nodes"]].count("up") == len(self.nodes))

    async def is_down(self, *names: str) -> None:
        """Wait until the proxy has found these nodes to be down."""
        await self.until(
            lambda state: set(names) <= {each["name"] for each in state["nodes"] if each["state"] == "down"}
        )


class Incident:
    """One incident, that of a decode node that is killed; the others are made of it.

    Attributes:
        settings: of the proxy, beside `SETTINGS`.
    """

    settings: ClassVar[Mapping[str, Any]] = {}

    async def before(self, fleet: Fleet) -> None:
        """Done to nodes that listen, before there is a proxy."""

    async def start(self, fleet: Fleet) -> None:
        """Wait for what is there before the incident."""
        await fleet.all_serve()

    async def happen(self, fleet: Fleet) -> None:
        """Make it happen, while clients ask; return once the page knows."""
        await fleet.nodes["decode-0"].kill()
        await fleet.is_down("decode-0")

    async def end(self, fleet: Fleet) -> None:
        """End the faults that clients wait for, so that their last requests end."""


class PrefillKilled(Incident):
    """The only prefill node is killed."""

    async def happen(self, fleet: Fleet) -> None:
        await fleet.nodes["prefill-0"].kill()
        await fleet.is_down("prefill-0")


class BothDecodesKilled(Incident):
    """Both decode nodes are killed, ``apart`` seconds from each other."""

    def __init__(self, apart: float) -> None:
        self._apart = apart

    async def happen(self, fleet: Fleet) -> None:
        await fleet.nodes["decode-0"].kill()
        await asyncio.sleep(self._apart)
        await fleet.nodes["decode-1"].kill()
        await fleet.is_down("decode-0", "decode-1")

    async def end(self, fleet: Fleet) -> None:
        """The streams that ran wait for a decode node."""
        await fleet.nodes["decode-0"].start()


class DecodeFrozen(Incident):
    """A decode node gets no CPU any more, as after SIGSTOP."""

    async def happen(self, fleet: Fleet) -> None:
        fleet.nodes["decode-0"].scheduled.clear()
        await fleet.is_down("decode-0")


class PortClosed(Incident):
    """At the address of a decode node nothing listens."""

    async def before(self, fleet: Fleet) -> None:
        await fleet.nodes["decode-1"].kill()

    async def start(self, fleet: Fleet) -> None:
        await fleet.until(lambda state: [node["state"] for node in state["nodes"]].count("up") == len(HOSTS) - 1)

    async def happen(self, fleet: Fleet) -> None:
        await fleet.until(lambda state: any("refused" in each["what"] for each in state["incident"]["now"]))


class DataPathCut(Incident):
    """Decode nodes reach the prefill node's side channel, and no bytes come to their reads."""

    async def happen(self, fleet: Fleet) -> None:
        fleet.fabric.deaf, fleet.fabric.told = True, {"cause": "no_progress", "why": ""}
        numbers = itertools.count()
        while (await fleet.state())["ready"] != "degraded":
            await asyncio.gather(*(fleet.ask(f"{next(numbers)} {WORDS}") for _ in range(20)))
        await fleet.until(lambda state: "no bytes" in state["incident"]["hand_overs"])


class Drained(Incident):
    """An operator drains a decode node."""

    async def happen(self, fleet: Fleet) -> None:
        (await fleet.operator.post("/nodes/decode-0/drain")).raise_for_status()
        await fleet.until(lambda state: bool(state["incident"]["now"]))


class Recovered(Incident):
    """A decode node is killed, and started again."""

    async def happen(self, fleet: Fleet) -> None:
        await super().happen(fleet)
        await fleet.nodes["decode-0"].start()
        await fleet.all_serve()
        await fleet.until(lambda state: not state["incident"]["now"])


class QueueFull(Incident):
    """More requests come than may run and wait."""

    settings: ClassVar[Mapping[str, Any]] = {"limits": {"concurrency": 4, "queue": 4}}

    async def happen(self, fleet: Fleet) -> None:
        await asyncio.gather(*(fleet.ask(WORDS) for _ in range(30)))


class AddressForgotten(Incident):
    """The prefill node's tickets name 127.0.0.1, and the decode nodes are on other hosts."""

    async def before(self, fleet: Fleet) -> None:
        fleet.fabric.deaf, fleet.fabric.address = True, "127.0.0.1"
        fleet.fabric.told = {"cause": "peer_unreachable", "why": "[Errno 111] Connection refused"}

    async def happen(self, fleet: Fleet) -> None:
        await fleet.until(lambda state: state["ready"] == "degraded")


INCIDENTS: Mapping[str, Incident] = {
    "decode-killed": Incident(),
    "prefill-killed": PrefillKilled(),
    "both-decodes-killed": BothDecodesKilled(22.0),
    "decode-frozen": DecodeFrozen(),
    "port-closed": PortClosed(),
    "data-path-cut": DataPathCut(),
    "drained": Drained(),
    "recovered": Recovered(),
    "queue-full": QueueFull(),
    "address-forgotten": AddressForgotten(),
}
"""By the name of their pictures."""


@contextlib.asynccontextmanager
async def happened(incident: Incident, folder: Path) -> AsyncIterator[Fleet]:
    """The incident, while inside; clients ask all the time."""
    fleet = Fleet()
    async with fleet.running(folder, incident):
        await incident.start(fleet)
        load = Load(fleet.clients)
        async with load.running():
            await load.more(1)
            await incident.happen(fleet)
            yield fleet
            await incident.end(fleet)


def told(state: Mapping[str, Any]) -> str:
    """The first section of the page, as text."""
    found = state["incident"]
    lines = [f"cause: {found['cause']} {', '.join(found['nodes'])}", f"loss: {found['loss'] or 'nothing'}"]
    lines += [f"{when}: {each['what']}" for when in ("now", "earlier") for each in found[when]]
    lines += [f"ready: {state['ready']}; {found['hand_overs']}"]
    if step := found["next"]:
        lines += [f"next: {step['what']}", *(f"  {each}" for each in step["commands"]), f"then: {step['then']}"]
        lines += [f"  {step['docs']}"]
    return "\n".join(lines)


async def _show(folder: Path, names: Sequence[str]) -> None:
    for name in names or INCIDENTS:
        with tempfile.TemporaryDirectory() as made:
            async with happened(INCIDENTS[name], Path(made)) as fleet:
                print(f"== {name}\n{told(await fleet.state())}", flush=True)
                page, size = f"{fleet.proxy.operators}/ui", f"--window-size={WIDTH},{HEIGHT}"
                await chromium(page, size, f"--screenshot={folder / f'incident-{name}.png'}")


if __name__ == "__main__":
    asyncio.run(_show(Path(sys.argv[1]).absolute(), sys.argv[2:]))
