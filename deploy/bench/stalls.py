"""How long streams stall when their decode node dies or freezes: `python -m deploy.bench.stalls [--kills 200]`.

Fake nodes and the proxy are processes of their own. While clients stream without pause, one decode node after another
gets a SIGKILL (or a SIGSTOP) at a random moment, and is started again (or goes on) once its streams have moved. Of each
time, the longest that any client waited for its next byte is taken, the first byte included, less the time that the
surviving prefill node takes for the prompt. Every answer must be whole and right.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import math
import random
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from pdproxy.request import Endpoint
from tests.orchestration.answers import read_answer
from tests.orchestration.prompts import body_for, right
from tests.watch.process import ROOT, SOON, serving

MODEL = "m"
PREFILLS, DECODES, CLIENTS = 2, 3, 6
TOKENS, PACE = 100, 0.02
PROMPT = 0.25
"""Seconds that a prefill leg takes."""
SETTINGS: dict[str, Any] = {"health": {"interval": 0.5, "slow_start": 0.0, "first_hand_over": "warm_up"}}
"""Settings by which a node comes back soon; how it is given up is left as it is."""
TICK, QUIET = 0.05, 0.1
SETTLED = {signal.SIGKILL: 1.0, signal.SIGSTOP: 3.5}
"""Seconds after the signal until the node comes back: by then its streams must have moved, or it shows in the gaps."""


class NodeProcess:
    """A fake node (`tests.fakes.node_process`)."""

    def __init__(self) -> None:
        self.port = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """At the port that it had before, if there was one."""
        line = (sys.executable, "-m", "tests.fakes.node_process", str(self.port), str(PACE), str(PROMPT))
        self._process = await asyncio.create_subprocess_exec(*line, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        async with asyncio.timeout(SOON):
            self.port = int(await self._process.stdout.readline())

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def come_back(self, after: signal.Signals) -> None:
        """Go on after a SIGSTOP; be started anew after a SIGKILL."""
        if after is signal.SIGSTOP:
            self.send(signal.SIGCONT)
        else:
            await self.end()
            await self.start()

    async def end(self) -> None:
        """Kill it."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()


@dataclasses.dataclass(slots=True)
class Gap:
    """A client waited from ``began`` for ``seconds``."""

    began: float
    seconds: float


@dataclasses.dataclass(slots=True)
class Streams:
    """The clients' view: how their answers ended, and where they waited for longer than ten tokens take."""

    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    gaps: list[Gap] = dataclasses.field(default_factory=list)

    async def ask(self, client: httpx.AsyncClient) -> None:
        """One request after the other."""
        body = {"model": MODEL, **body_for(Endpoint.COMPLETIONS, stream=True, tokens=TOKENS)}
        while True:
            self.ended[await self._stream(client, body)] += 1

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        loop, pieces = asyncio.get_running_loop(), []
        last = loop.time()
        async with client.stream("POST", Endpoint.COMPLETIONS, json=body) as response:
            async for piece in response.aiter_raw():
                now = loop.time()
                if now - last > 10 * PACE:
                    self.gaps.append(Gap(last, now - last))
                last = now
                pieces.append(piece)
        return _judged(response.status_code, b"".join(pieces))


def _judged(status: int, answer: bytes) -> str:
    """``right``, or what is wrong with it."""
    if status != 200:
        return f"{status} {answer[:200]!r}"
    try:
        seen = read_answer(Endpoint.COMPLETIONS, answer)
    except AssertionError as error:
        return f"broken: {error}: {answer[-900:]!r}"
    whole = seen.ended and seen.error is None and seen.texts == {0: right(Endpoint.COMPLETIONS, TOKENS)}
    return "right" if whole else f"wrong: {seen.error or seen.texts}"


class Lateness:
    """How late this process itself was: on a machine that is busy elsewhere, so are the nodes and the proxy."""

    def __init__(self) -> None:
        self.most = 0.0

    async def watch(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK
            await asyncio.sleep(TICK)
            self.most = max(self.most, loop.time() - due)


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """The longest of one time: in seconds, less the prompt's; and how late this process was then."""

    seconds: float
    late: float


@dataclasses.dataclass(slots=True)
class Measured:
    """The waits after one kind of signal.

    Attributes:
        stalls: one for each time that a stream had to move.
        missed: how often none had to.
        ended: what clients got.
        probes: `pdproxy_silence_probes_total` of decode nodes, by outcome.
    """

    stalls: list[Stall]
    missed: int
    ended: Counter[str]
    probes: dict[str, float]

    def __str__(self) -> str:
        every = [stall.seconds for stall in self.stalls]
        quiet = [stall.seconds for stall in self.stalls if stall.late < QUIET]
        return (
            f"{_figures(every)}; while this process was never late by {QUIET} s: {_figures(quiet)} (each and "
            f"{PROMPT} s for the prompt); {self.missed} more without a stream; answers {dict(self.ended)}; "
            f"probes {self.probes}"
        )


def _figures(stalls: Sequence[float]) -> str:
    ranked = sorted(stalls)
    if not ranked:
        return "0 times"
    p50, p99 = (ranked[min(len(ranked) - 1, math.ceil(share * len(ranked)) - 1)] for share in (0.5, 0.99))
    return f"{len(ranked)} times, p50 {p50:.2f} s, p99 {p99:.2f} s, most {ranked[-1]:.2f} s"


async def measure(number: signal.Signals, times: int, seed: int) -> Measured:
    """Send the signal ``times`` times to a decode node that has streams."""
    dice, streams, lateness = random.Random(seed), Streams(), Lateness()
    async with _cluster() as (nodes, clients, operators):
        asking = [asyncio.create_task(streams.ask(clients)) for _ in range(CLIENTS)]
        asking.append(asyncio.create_task(lateness.watch()))
        stalls: list[Stall] = []
        missed = 0
        while len(stalls) < times:
            lateness.most = 0.0
            found = await _strike(number, dice, nodes, streams, operators)
            stalls += [] if found is None else [Stall(found, lateness.most)]
            missed += found is None
            _fail_if_ended(asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        return Measured(stalls, missed, streams.ended, await _probes(operators))


async def _strike(
    number: signal.Signals,
    dice: random.Random,
    nodes: Sequence[NodeProcess],
    streams: Streams,
    operators: httpx.AsyncClient,
) -> float | None:
    """The longest stall; None where no stream had to move."""
    index = dice.randrange(DECODES)
    victim, loop = nodes[PREFILLS + index], asyncio.get_running_loop()
    await asyncio.sleep(dice.uniform(0.2, 1.0))
    moved, began = await _moved(operators), loop.time()
    victim.send(number)
    await asyncio.sleep(SETTLED[number])
    hit = await _moved(operators) > moved
    await victim.come_back(number)
    async with asyncio.timeout(SOON):
        while f'{{node="decode-{index}",role="decode",state="up"}} 1.0' not in await _page(operators):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    longest = max((gap.seconds for gap in streams.gaps if gap.began > began - 10 * PACE), default=0.0)
    streams.gaps.clear()
    return max(0.0, longest - PROMPT) if hit else None


@contextlib.asynccontextmanager
async def _cluster() -> AsyncIterator[tuple[list[NodeProcess], httpx.AsyncClient, httpx.AsyncClient]]:
    """The nodes, and clients of both ports of the proxy; every node serves."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = [NodeProcess() for _ in range(PREFILLS + DECODES)]
        for node in nodes:
            await node.start()
            stack.push_async_callback(node.end)
        roles = ["prefill"] * PREFILLS + ["decode"] * DECODES
        entries = [
            {"url": f"http://127.0.0.1:{node.port}", "role": role, "model": MODEL}
            for node, role in zip(nodes, roles, strict=True)
        ]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy = await stack.enter_async_context(serving(folder, {**SETTINGS, "nodes": entries}))
        timeouts = httpx.Timeout(SOON)
        clients = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.clients, timeout=timeouts))
        operators = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.operators, timeout=timeouts))
        async with asyncio.timeout(SOON):
            while (await _page(operators)).count('state="up"} 1.0') < len(nodes):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield nodes, clients, operators


def _fail_if_ended(asking: Sequence[asyncio.Task[None]]) -> None:
    for task in asking:
        if task.done():
            task.result()


async def _page(operators: httpx.AsyncClient) -> str:
    return (await operators.get("/metrics")).text


async def _moved(operators: httpx.AsyncClient) -> float:
    """How many streams and legs have left a decode node for another one."""
    page = await _page(operators)
    steps = re.findall(r'pdproxy_steps_total\{[^}]*leg="decode"[^}]*\} (\S+)', page)
    return sum(map(float, steps + re.findall(r"pdproxy_migrations_total\{[^}]*\} (\S+)", page)))


async def _probes(operators: httpx.AsyncClient) -> dict[str, float]:
    line = re.compile(r'pdproxy_silence_probes_total\{outcome="(\w+)",role="decode"\} (\S+)')
    return {outcome: float(count) for outcome, count in line.findall(await _page(operators))}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how often each signal is sent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signals", nargs="+", default=["SIGKILL", "SIGSTOP"], choices=["SIGKILL", "SIGSTOP"])
    asked = parser.parse_args(arguments)
    for name in asked.signals:
        print(name, asyncio.run(measure(signal.Signals[name], asked.kills, asked.seed)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
