"""One request at a time, by several ways in turn: `python -m deploy.bench.latency LINE REQUESTS PREFILL DECODE PORT…`.

The ways are the two legs called directly, and each proxy. Every answer is checked. What came of each way is printed as
one line of JSON: the times to the first token, the gaps between tokens, and how many tokens came in one read with the
token before. In one process and in turns, whatever else the machine does meets all ways alike.
"""

import asyncio
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence

import httptools
import uvloop

from deploy.bench.node import TICKET
from deploy.bench.script import Line, body, expected, flaw, post, request

PATIENCE = 30.0
"""Seconds for one answer."""


class WrongAnswerError(Exception):
    """An answer was not what it has to be."""


@dataclasses.dataclass(slots=True)
class Timed:
    """The times of one way, in milliseconds.

    Attributes:
        first: times to the first token.
        gaps: between two reads of tokens of one answer.
        merged: tokens that came in one read with the token before, the last one aside: what ends a stream may come
            with it.
    """

    first: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    merged: int = 0


class Caller(asyncio.Protocol):
    """One connection, which is kept until `aclose`."""

    def __init__(self) -> None:
        self.asking = False
        self._lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]  # a client's can write

    def data_received(self, data: bytes) -> None:
        self._read = b""
        self._parser.feed_data(data)
        if self._read:
            self.reads.append((time.perf_counter(), self._read))
        if self._complete:
            self._answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        if self.asking:
            self._answered.set_exception(WrongAnswerError(f"the connection was lost: {exc}"))

    def on_body(self, body: bytes) -> None:
        self._read += body

    def on_message_complete(self) -> None:
        self._complete = True

    async def ask(self, sent: bytes) -> tuple[int, bytes]:
        """Status and body; ``reads`` has the times and contents of its reads."""
        self.reads: list[tuple[float, bytes]] = []
        self._parser, self._complete = httptools.HttpResponseParser(self), False
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(sent)
        self.asking = True
        async with asyncio.timeout(PATIENCE):
            await self._answered
        self.asking = False
        return self._parser.get_status_code(), b"".join(read for _, read in self.reads)

    async def aclose(self) -> None:
        """Close the connection."""
        self._transport.close()
        await self._lost.wait()


class Way:
    """Requests that are to be sent one after the other, each by its own caller; the last one's answer is looked at."""

    def __init__(self, line: Line, calls: Sequence[tuple[Caller, bytes]]) -> None:
        self._line = line
        self._calls = calls
        self._wanted = expected(line)
        self.timed = Timed()

    async def ask(self) -> None:
        """Once more.

        Raises:
            WrongAnswerError: something else was answered.
        """
        began = time.perf_counter()
        for caller, sent in self._calls:
            status, answer = await caller.ask(sent)
        if wrong := flaw(self._line, self._wanted, status, answer):
            raise WrongAnswerError(wrong)
        times, tokens = zip(*((at, _tokens(read)) for at, read in caller.reads if _tokens(read)), strict=True)
        self.timed.first.append(1000 * (times[0] - began))
        self.timed.gaps += [1000 * (later - at) for at, later in itertools.pairwise(times)]
        self.timed.merged += sum(number - 1 for number in tokens)


def _tokens(read: bytes) -> int:
    """Events with a token in a read; the one that only names the role has none, nor has what follows the last."""
    return read.count(b'"text":"') + read.count(b'"delta":{"content":"')


async def measure(line: Line, requests: int, prefill: int, decode: int, proxies: Sequence[int]) -> list[Timed]:
    """The times of the direct way, and of each proxy."""
    loop = asyncio.get_running_loop()
    opened = [(await loop.create_connection(Caller, "127.0.0.1", port))[1] for port in (prefill, decode, *proxies)]
    try:
        return await _in_turns(_ways(line, opened), requests)
    finally:
        for caller in opened:
            await caller.aclose()


def _ways(line: Line, callers: Sequence[Caller]) -> list[Way]:
    prefill, decode, *proxies = callers
    order = {"do_remote_decode": True, "do_remote_prefill": False}
    asked = {**body(line), "max_tokens": 1, "stream": False, "kv_transfer_params": order}
    first = post(line.path, json.dumps(asked).encode())
    second = post(line.path, json.dumps({**body(line), "kv_transfer_params": TICKET}).encode())
    return [Way(line, [(prefill, first), (decode, second)]), *(Way(line, [(each, request(line))]) for each in proxies)]


async def _in_turns(ways: Sequence[Way], requests: int) -> list[Timed]:
    for way in ways:
        await way.ask()
        way.timed = Timed()  # the first one warms everything up
    for turn in range(requests):
        for place in range(len(ways)):
            await ways[(turn + place) % len(ways)].ask()
    return [way.timed for way in ways]


if __name__ == "__main__":
    requests, prefill, decode, *proxies = map(int, sys.argv[2:])
    found = uvloop.run(measure(Line(sys.argv[1]), requests, prefill, decode, proxies))
    print(json.dumps([dataclasses.asdict(timed) for timed in found]))
