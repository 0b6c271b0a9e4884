"""For how long one large request keeps all others from the event loop: `python -m deploy.bench.blocked`.

Before fake nodes that are processes of their own, a proxy answers one large request after the other; of each kind it
tells the CPU time of the longest callback, which is the least time that every other stream waited. See `metered`.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from deploy.bench.node import addresses
from deploy.bench.peers import PDPROXY, Peer, Ports
from deploy.bench.script import MODEL
from deploy.local.paths import ROOT
from deploy.local.ports import free_ports

SOON = 120.0
"""Seconds that nothing here should need."""
MB = 1_000_000
TOKENS = 5
METERED = Peer("metered", lambda ports: [sys.executable, "-m", "deploy.bench.metered", *PDPROXY.command(ports)[3:]])
"""This project's proxy with meters; `PDPROXY` is the same without them."""
WORDS = ("the", "quick", "brown", "fox\n", "jumps", "over", '"lazy"', "dogs,", "und", "größer")


@dataclasses.dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes behind a proxy.

    Attributes:
        each: how many of each role.
        prefill_ms, decode_ms: milliseconds between two steps of theirs.
        batches: of KV events that each node publishes in a second, beside its answers; 0 for nodes without events.
    """

    each: int = 1
    prefill_ms: float = 1.0
    decode_ms: float = 1.0
    batches: float = 0.0

    def command(self, port: int, step_ms: float) -> tuple[str, ...]:
        """The module that runs those of one role, and its arguments."""
        words = (f"{port}", f"{step_ms}", f"{self.each}")
        return ("deploy.bench.event_node", *words, f"{self.batches}") if self.batches else ("deploy.bench.node", *words)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """CPU milliseconds of one request: its longest callback, and all of them."""

    longest: float
    total: float
    callback: str


def prose(size: int) -> str:
    """A text of about so many bytes, with what JSON escapes."""
    dice = random.Random(size)
    return " ".join(dice.choices(WORDS, k=size // 6))


def text_body(size: int) -> dict[str, Any]:
    """A completion of one long text."""
    return {"prompt": prose(size)}


def chat_body(size: int) -> dict[str, Any]:
    """A chat of messages of 500 bytes."""
    text = prose(size)
    return {"messages": [{"role": "user", "content": text[at : at + 500]} for at in range(0, len(text), 500)]}


def ids_body(size: int) -> dict[str, Any]:
    """A completion of token ids, of which one takes about 6 bytes."""
    dice = random.Random(size)
    return {"prompt": [dice.randrange(150_000) for _ in range(size // 6)]}


BODIES = {"text": text_body, "chat": chat_body, "ids": ids_body}


def request(body: Mapping[str, Any], *, stream: bool = True) -> bytes:
    """As HTTP/1.1."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    whole = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "stream": stream, **body}
    sent = json.dumps(whole, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(sent)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + sent


class MeteredProxy:
    """A running proxy (`deploy.bench.metered`), its ports for clients and operators, and the processes of its nodes."""

    def __init__(self, process: asyncio.subprocess.Process, ports: Ports, nodes: Sequence[asyncio.subprocess.Process]):
        self.process = process
        self.port = ports.clients
        self.nodes = nodes
        self._operators = ports.operators

    async def ask(self, sent: bytes) -> bytes:
        """The answer to a request that closes its connection."""
        return await _answer(self.port, sent)

    async def metrics(self) -> dict[str, float]:
        """The values of its series, by name and labels as they are exported."""
        sent = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        lines = (await _answer(self._operators, sent)).decode().partition("\r\n\r\n")[2].splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    async def report(self) -> Measured:
        """The measurements since the last report."""
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGUSR1)
        async with asyncio.timeout(SOON):
            return Measured(**json.loads(await self.process.stdout.readline()))

    async def measure(self, sent: bytes, times: int) -> Measured:
        """The least of some times: what is in the way of one only (the first of a kind, a collector's pause) is not
        the request's own."""
        found = []
        for _ in range(times):
            await self.report()
            answer = await self.ask(sent)
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise AssertionError(f"an answer was wrong: {answer[:300]!r} … {answer[-300:]!r}")
            found.append(await self.report())
        return min(found, key=lambda each: each.longest)


async def _answer(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        async with asyncio.timeout(SOON):
            return await reader.read()
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def running_proxy(peer: Peer, nodes: Nodes, *flags: str) -> AsyncIterator[MeteredProxy]:
    """Ready. `METERED` alone reports measurements."""
    prefill, decode, clients, operators = free_ports(4)
    ports, fakes = Ports(clients, operators, prefill, decode), []
    async with contextlib.AsyncExitStack() as stack:
        for port, step in ((prefill, nodes.prefill_ms), (decode, nodes.decode_ms)):
            module, *words = nodes.command(port, step)
            fakes.append(await stack.enter_async_context(_process(sys.executable, "-m", module, *words)))
            await _listens(port)  # or the proxy's first probe fails, and the next one is ten seconds later
        command = peer.command(ports)
        for address in addresses(nodes.each)[1:]:
            command += ["--prefill", f"http://{address}:{prefill}", "--decode", f"http://{address}:{decode}"]
        process = await stack.enter_async_context(_process(*command, *flags))
        proxy = MeteredProxy(process, ports, fakes)
        async with asyncio.timeout(SOON):
            while not await _is_ready(proxy):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        yield proxy


def metered_proxy(*flags: str) -> contextlib.AbstractAsyncContextManager[MeteredProxy]:
    """One before a prefill node and a decode node."""
    return running_proxy(METERED, Nodes(), *flags)


async def _listens(port: int) -> None:
    async with asyncio.timeout(SOON):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


async def _is_ready(proxy: MeteredProxy) -> bool:
    try:
        return (await proxy.ask(request({"prompt": "Are you there?", "stream": False}))).startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False


@contextlib.asynccontextmanager
async def _process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=nowhere)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def run(sizes: Sequence[int], times: int) -> None:
    """Print a line for each kind and size."""
    async with metered_proxy() as proxy:
        print(f"{'prompt':12} {'MB':>6} {'longest callback':>17} {'all callbacks':>14}  ms of CPU time", flush=True)
        for kind, make in BODIES.items():
            for size in sizes:
                found = await proxy.measure(request(make(size)), times)
                print(f"{kind:12} {size / MB:6.1f} {found.longest:17.1f} {found.total:14.1f}  {found.callback[:100]}")


if __name__ == "__main__":
    asyncio.run(run([int(float(word) * MB) for word in sys.argv[1:]] or [MB // 8, MB, 8 * MB], 3))
