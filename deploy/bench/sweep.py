"""How the proxy's cost grows with what it is given: `python -m deploy.bench.sweep [PART …]`.

Parts: prompts (128 KB to 8 MB), concurrency (1 to 512 streams at once), nodes (2 to 1,000), idle (streams that say
nothing: memory of each), hang-ups (memory after clients that leave, cycle by cycle). CPU time is that of the proxy's
process, the kernel's part of it included; memory is its resident set. Nodes are fakes, in processes of their own.

A machine's speed differs from minute to minute by more than the rows of `nodes` do. So a proxy before many nodes runs
beside one before 2, and no others: they are asked in turns, and compared with each other's turn of the same round.
While either is asked, the nodes of both publish KV events, if any: so the machine is as busy for each. The proxy that
is asked has a core to itself, as one whose nodes are other machines: else its caches are filled by their work.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import resource
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.bench.blocked import BODIES, MB, SOON, MeteredProxy, Nodes, metered_proxy, request, running_proxy
from deploy.bench.event_node import HELD, PROMPT
from deploy.bench.hybrid_cache import CacheShape
from deploy.bench.load import load
from deploy.bench.node import HELD_TOKENS
from deploy.bench.peers import PDPROXY, VLLM_ROUTER, Peer, make_environment
from deploy.bench.script import Line

PROMPTS = (MB // 8, MB // 2, 2 * MB, 8 * MB)
STREAMS = (1, 8, 64, 256, 512)
REQUESTS = 1024
TURN_REQUESTS = 512
IDLE_SECONDS = 5.0
"""Seconds of a turn before its requests in which nothing is asked: each node's health is probed once."""
FEWEST_BATCHES = 0.9
"""The part of the batches of KV events due in a turn that the proxy must have read."""
AT_ONCE = 64
"""Streams that are being opened."""
NO_SLOW_START = ("--health-slow-start", "0")
"""Nodes that start slowly are looked at again each second for half a minute."""
ROOMY = ("--limits-concurrency", "20000")


class Size(NamedTuple):
    """How many streams are idle; how many leave in one of how many cycles; how many rounds `nodes` takes."""

    idle: int
    leavers: int
    cycles: int
    rounds: int


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


class Fleet(NamedTuple):
    """A proxy and its nodes: a row of `nodes`."""

    peer: Peer
    nodes: Nodes

    def __str__(self) -> str:
        events = f", {self.nodes.batches:g} batches of events a second each" if self.nodes.batches else ""
        return f"{self.peer.name}, {2 * self.nodes.each}{events}"

    def running(self) -> contextlib.AbstractAsyncContextManager[MeteredProxy]:
        """The proxy, ready."""
        flags = NO_SLOW_START if self.peer is PDPROXY else ()
        return running_proxy(self.peer, dataclasses.replace(self.nodes, decode_ms=20.0), *flags)


class Turn(NamedTuple):
    """Milliseconds of CPU time of a request; the same without what the proxy does by itself; that, of a core."""

    request: float
    own: float
    idle: float


PAIRS = (
    (Fleet(VLLM_ROUTER, Nodes(1)), Fleet(VLLM_ROUTER, Nodes(50))),
    (Fleet(PDPROXY, Nodes(1)), Fleet(PDPROXY, Nodes(50))),
    (Fleet(PDPROXY, Nodes(1)), Fleet(PDPROXY, Nodes(500))),
    (Fleet(PDPROXY, Nodes(1, batches=10.0)), Fleet(PDPROXY, Nodes(50, batches=10.0))),
)
"""One before 2 nodes, and one before more."""


async def nodes(size: Size) -> Table:
    """CPU time of a request, and of a second without one, by the number of nodes, some of which publish KV events."""
    await asyncio.to_thread(make_environment)
    rows = [row for pair in PAIRS for row in await _compared(pair, size.rounds)]
    own = "without what the proxy does by itself"
    columns = ("ms of CPU a request", own, "times 2 nodes (quartiles)", "of a core, without requests", "memory, MB")
    return Table("nodes", columns, rows)


async def _compared(pair: tuple[Fleet, Fleet], rounds: int) -> list[Row]:
    """A row of each of two fleets, which are asked in turns."""
    turns: dict[Fleet, list[Turn]] = {fleet: [] for fleet in pair}
    async with contextlib.AsyncExitStack() as stack:
        proxies = {fleet: await stack.enter_async_context(fleet.running()) for fleet in pair}
        for fleet, proxy in proxies.items():
            await settled(fleet, proxy)
            await _cost(proxy, 2 * TURN_REQUESTS, AT_ONCE)
            await _tell_publishers({fleet: proxy}, signal.SIGUSR1)
        for number in range(rounds):
            for fleet in pair if number % 2 else pair[::-1]:
                with own_core(proxies[fleet], proxies.values()):
                    turns[fleet].append(await take_turn(fleet, proxies))
            print(f"  round {number + 1}: {'  '.join(f'{turns[each][-1].own:.2f}' for each in pair)}", flush=True)
        sizes = {fleet: resident(proxy.process.pid) for fleet, proxy in proxies.items()}
    return [show(_nodes_row(fleet, turns[fleet], turns[pair[0]], sizes[fleet])) for fleet in pair]


def _nodes_row(fleet: Fleet, turns: Sequence[Turn], before_two: Sequence[Turn], size: int) -> Row:
    """Medians of a fleet's turns, and of their ratios to the same rounds' turns before 2 nodes."""
    cost, own, idle = (statistics.median(each) for each in zip(*turns, strict=True))
    low, times, high = statistics.quantiles(
        [turn.own / other.own for turn, other in zip(turns, before_two, strict=True)], method="inclusive"
    )
    ratio = f"{times:.2f} ({low:.2f} to {high:.2f})"
    return Row(str(fleet), (f"{cost:.2f}", f"{own:.2f}", ratio, f"{100 * idle:.1f} %", f"{size / MB:.0f}"))


async def settled(fleet: Fleet, proxy: MeteredProxy) -> None:
    """Wait until all nodes serve, and what those with events have cached is known whole."""
    if fleet.peer is not PDPROXY:
        return
    wanted, blocks = 2 * fleet.nodes.each, HELD * PROMPT // CacheShape().block_size if fleet.nodes.batches else 0
    async with asyncio.timeout(SOON):
        while True:
            series = await proxy.metrics()
            up = sum(value for name, value in series.items() if name.startswith("pdproxy_node_up{") and '"up"' in name)
            if up >= wanted and series["pdproxy_prefix_index_blocks"] >= wanted * blocks:
                return
            await asyncio.sleep(1)


async def take_turn(fleet: Fleet, proxies: Mapping[Fleet, MeteredProxy]) -> Turn:
    """Measure one of these fleets; nodes with events publish them meanwhile, and at no other time.

    Raises:
        AssertionError: an answer was wrong, or events were not read.
    """
    proxy = proxies[fleet]
    await _tell_publishers(proxies, signal.SIGUSR2)
    events, since = await _events_read(fleet, proxy), time.monotonic()
    idle = await _idle(proxy)
    began = time.monotonic()
    cost = await _cost(proxy, TURN_REQUESTS, AT_ONCE)
    seconds = time.monotonic() - began
    read, wanted = await _events_read(fleet, proxy) - events, 2 * fleet.nodes.each * fleet.nodes.batches
    if read < FEWEST_BATCHES * wanted * (time.monotonic() - since):
        raise AssertionError(f"{fleet}: {read:.0f} batches were read in {time.monotonic() - since:.1f} s")
    await _tell_publishers(proxies, signal.SIGUSR1)
    return Turn(cost, cost - 1000 * idle * seconds / TURN_REQUESTS, idle)


@contextlib.contextmanager
def own_core(proxy: MeteredProxy, proxies: Iterable[MeteredProxy]) -> Iterator[None]:
    """A core is this proxy's alone: this process, all nodes and the other proxies run on the rest, if there is any."""
    cores = os.sched_getaffinity(0)
    own, others = {min(cores)}, cores - {min(cores)} or cores
    _run_on(others, os.getpid())
    try:
        for each in proxies:
            _run_on(own if each is proxy else others, each.process.pid)
            for node in each.nodes:
                _run_on(others, node.pid)
        yield
    finally:
        _run_on(cores, os.getpid())


def _run_on(cores: Collection[int], pid: int) -> None:
    """All threads of a process, and those that it will begin."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


async def _idle(proxy: MeteredProxy) -> float:
    """The part of a core that the proxy takes without requests."""
    began, used = time.monotonic(), cpu_seconds(proxy.process.pid)
    await asyncio.sleep(IDLE_SECONDS)
    return (cpu_seconds(proxy.process.pid) - used) / (time.monotonic() - began)


async def _tell_publishers(proxies: Mapping[Fleet, MeteredProxy], number: signal.Signals) -> None:
    """Nodes with events begin to publish, or cease to (`event_node`)."""
    for process in [each for fleet, proxy in proxies.items() if fleet.nodes.batches for each in proxy.nodes]:
        process.send_signal(number)
    await asyncio.sleep(0.3)  # of two signals at once the second one may be taken first


async def _events_read(fleet: Fleet, proxy: MeteredProxy) -> float:
    """Batches that the proxy has applied; raises AssertionError where others were lost or made no sense."""
    if not fleet.nodes.batches:
        return 0
    series = await proxy.metrics()
    batches, gaps = "pdproxy_kv_event_batches_total", series["pdproxy_kv_event_gaps_total"]
    unread = series['pdproxy_prefix_index_places{known="nothing"}'] + series[f'{batches}{{outcome="junk"}}'] + gaps
    if unread:
        raise AssertionError(f"{fleet}: KV events are not read, or not all of them: {series}")
    return series[f'{batches}{{outcome="applied"}}']


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
        tables.append(await PARTS[name](Size(asked.idle, asked.leavers, asked.cycles, asked.rounds)))
    print("\n" + "\n\n".join(map(str, tables)))


def _rounds(word: str) -> int:
    if not word.isdecimal() or int(word) < 2:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of rounds: quartiles need 2 or more")
    return int(word)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--idle", type=int, default=10_000, help="idle streams (default %(default)s)")
    parser.add_argument("--leavers", type=int, default=2_000, help="streams of a cycle (default %(default)s)")
    parser.add_argument("--cycles", type=int, default=12, help="of hang-ups (default %(default)s)")
    parser.add_argument("--rounds", type=_rounds, default=5, help="of nodes, 2 or more (default %(default)s)")
    return parser


if __name__ == "__main__":
    asyncio.run(main(_parser().parse_args()))
