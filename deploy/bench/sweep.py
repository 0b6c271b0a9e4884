"""How the proxy's cost grows with what it is given: `python -m deploy.bench.sweep [PART …]`.

Parts: prompts (128 KB to 8 MB), concurrency (1 to 512 streams at once), nodes (2 to 1,000), idle (streams that say
nothing: memory of each), hang-ups (memory after clients that leave, cycle by cycle). CPU time is that of the proxy's
process, the kernel's part of it included; memory is its resident set. Nodes are fakes, in processes of their own.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.bench.blocked import BODIES, MB, MeteredProxy, Nodes, metered_proxy, request, running_proxy
from deploy.bench.load import load
from deploy.bench.node import HELD_TOKENS
from deploy.bench.peers import PDPROXY, VLLM_ROUTER, make_environment
from deploy.bench.script import Line

PROMPTS = (MB // 8, MB // 2, 2 * MB, 8 * MB)
STREAMS = (1, 8, 64, 256, 512)
REQUESTS = 1024
FLEETS = ((VLLM_ROUTER, Nodes(1)), (VLLM_ROUTER, Nodes(50)), (PDPROXY, Nodes(1)), (PDPROXY, Nodes(50)),
          (PDPROXY, Nodes(500)), (PDPROXY, Nodes(1, batches=10.0)), (PDPROXY, Nodes(50, batches=10.0)))  # fmt: skip
NODES_REQUESTS = 2048
AT_ONCE = 64
"""Streams that are being opened."""
NO_SLOW_START = ("--health-slow-start", "0")
"""Nodes that start slowly are looked at again each second for half a minute."""
ROOMY = ("--limits-concurrency", "20000")


class Size(NamedTuple):
    """How many streams are idle; how many leave in one of how many cycles."""

    idle: int
    leavers: int
    cycles: int


class Row(NamedTuple):
    """A line of a table: what was swept, and what came of it."""

    what: str
    figures: tuple[str, ...]


class Table(NamedTuple):
    """A part's result."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Row]

    def __str__(self) -> str:
        head = f"| {self.title} | {' | '.join(self.columns)} |\n|{'---|' * (len(self.columns) + 1)}\n"
        return head + "\n".join(f"| {row.what} | {' | '.join(row.figures)} |" for row in self.rows)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process's threads, to a millionth."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text(encoding="ascii").split()[0]) for each in tasks) / 1e9


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def show(row: Row) -> Row:
    """Progress."""
    print(f"  {row.what:24} {'  '.join(row.figures)}", flush=True)
    return row


async def prompts(_: Size) -> Table:
    """CPU time by the prompt's length and kind."""
    rows = []
    async with metered_proxy() as proxy:
        for kind, make in BODIES.items():
            for length in PROMPTS:
                found = await proxy.measure(request(make(length)), 3)
                figures = (f"{found.longest:.1f}", f"{found.total:.1f}", f"{found.total * MB / length:.1f}")
                rows.append(show(Row(f"{kind}, {length / MB:g} MB", figures)))
    return Table("prompt", ("longest callback, ms", "all callbacks, ms", "ms for each MB"), rows)


async def concurrency(_: Size) -> Table:
    """CPU time of a request by how many run at once."""
    rows = []
    async with running_proxy(PDPROXY, Nodes(decode_ms=20.0)) as proxy:
        await load(proxy.port, Line.COMPLETIONS, AT_ONCE, AT_ONCE)
        for streams in STREAMS:
            requests = min(REQUESTS, 32 * streams)
            cost = await _cost(proxy, requests, streams)
            rows.append(show(Row(f"{streams}", (f"{cost:.2f}",))))
    return Table("streams at once", ("ms of CPU a request",), rows)


async def nodes(_: Size) -> Table:
    """CPU time of a request, and of a second without one, by the number of nodes, some of which publish KV events."""
    await asyncio.to_thread(make_environment)
    rows = []
    for peer, fleet in FLEETS:
        flags = NO_SLOW_START if peer is PDPROXY else ()
        async with running_proxy(peer, dataclasses.replace(fleet, decode_ms=20.0), *flags) as proxy:
            await asyncio.sleep(15 if fleet.each > 1 else 1)  # until all were looked at
            events = f", {fleet.batches:g} batches of events a second each" if fleet.batches else ""
            rows.append(show(Row(f"{peer.name}, {2 * fleet.each}{events}", await _nodes_figures(proxy))))
    own = "without what the proxy does by itself"
    return Table("nodes", ("ms of CPU a request", own, "of a core, without requests", "memory, MB"), rows)


async def _nodes_figures(proxy: MeteredProxy) -> tuple[str, ...]:
    """A request's cost, with and without what the proxy does by itself meanwhile; that of an idle second; memory."""
    began = cpu_seconds(proxy.process.pid)
    await asyncio.sleep(10)
    idle = (cpu_seconds(proxy.process.pid) - began) / 10
    await _cost(proxy, REQUESTS, AT_ONCE)
    began = time.monotonic()
    cost = await _cost(proxy, NODES_REQUESTS, AT_ONCE)
    without = cost - 1000 * idle * (time.monotonic() - began) / NODES_REQUESTS
    return f"{cost:.2f}", f"{without:.2f}", f"{100 * idle:.1f} %", f"{resident(proxy.process.pid) / MB:.0f}"


async def _cost(proxy: MeteredProxy, requests: int, streams: int) -> float:
    """Milliseconds of CPU time of one request."""
    before = cpu_seconds(proxy.process.pid)
    loaded = await load(proxy.port, Line.COMPLETIONS, requests, streams)
    if loaded.failed or loaded.complete != requests:
        raise AssertionError(f"answers were wrong: {loaded.flaws}")
    return 1000 * (cpu_seconds(proxy.process.pid) - before) / requests


class Idler(asyncio.Protocol):
    """A client that reads its stream; ``begun`` is done with the first byte of a body."""

    def __init__(self) -> None:
        self.begun = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(_HELD)

    def data_received(self, data: bytes) -> None:
        if self.begun.done():
            return
        if data.startswith(b"HTTP/1.1 200 "):
            self.begun.set_result(None)
        else:
            self.begun.set_exception(AssertionError(f"an answer was wrong: {data[:300]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.begun.done():
            self.begun.set_exception(exc or ConnectionResetError("the stream ended before it began"))


_HELD = request({"prompt": "Say nothing.", "max_tokens": HELD_TOKENS})


@contextlib.asynccontextmanager
async def held(proxy: MeteredProxy, streams: int) -> AsyncIterator[None]:
    """Streams that have begun, and say nothing; their clients hang up at the end."""
    loop, idlers, gate = asyncio.get_running_loop(), list[Idler](), asyncio.Semaphore(AT_ONCE)

    async def hold_one() -> None:
        async with gate:
            _, idler = await loop.create_connection(Idler, "127.0.0.1", proxy.port)
            idlers.append(idler)

    try:
        await asyncio.gather(*(hold_one() for _ in range(streams)))
        await asyncio.gather(*(idler.begun for idler in idlers))
        yield
    finally:
        for idler in idlers:
            idler.transport.abort()


async def idle(size: Size) -> Table:
    """Memory of a stream that has begun and says nothing."""
    most = (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1000) // 2
    rows = []
    for streams in sorted({min(each, most) for each in (size.idle // 10, size.idle)}):
        async with running_proxy(PDPROXY, Nodes(), *ROOMY) as proxy:
            before = resident(proxy.process.pid)
            async with held(proxy, streams):
                await asyncio.sleep(2)
                each = (resident(proxy.process.pid) - before) / streams / 1000
            rows.append(show(Row(f"{streams}", (f"{each:.1f}",))))
    return Table("idle streams", ("KB of memory each",), rows)


async def hang_ups(size: Size) -> Table:
    """Memory after each cycle of streams whose clients leave."""
    rows = []
    async with running_proxy(PDPROXY, Nodes(), *ROOMY) as proxy:
        for cycle in range(size.cycles):
            async with held(proxy, size.leavers):
                top = resident(proxy.process.pid) / MB
            await asyncio.sleep(3)
            left = resident(proxy.process.pid) / MB
            rows.append(show(Row(f"{cycle + 1}", (f"{top:.1f}", f"{left:.1f}"))))
    return Table("cycle of hang-ups", (f"memory with {size.leavers} streams, MB", "after they left, MB"), rows)


PARTS: Mapping[str, Callable[[Size], Awaitable[Table]]] = {
    "prompts": prompts, "concurrency": concurrency, "nodes": nodes, "idle": idle, "hang-ups": hang_ups,
}  # fmt: skip


async def main(asked: argparse.Namespace) -> None:
    """A signal ends it with all that it has started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    tables = []
    for name in asked.parts or PARTS:
        print(f"{name} …", flush=True)
        tables.append(await PARTS[name](Size(asked.idle, asked.leavers, asked.cycles)))
    print("\n" + "\n\n".join(map(str, tables)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--idle", type=int, default=10_000, help="idle streams (default %(default)s)")
    parser.add_argument("--leavers", type=int, default=2_000, help="streams of a cycle (default %(default)s)")
    parser.add_argument("--cycles", type=int, default=12, help="of hang-ups (default %(default)s)")
    return parser


if __name__ == "__main__":
    asyncio.run(main(_parser().parse_args()))
