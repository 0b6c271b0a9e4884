"""The load generator, in a process of its own: `python -m deploy.bench.load PORT LINE REQUESTS STREAMS`.

Every answer is checked. What came of it is printed as one line of JSON.
"""

import asyncio
import dataclasses
import json
import sys
import time

import httptools
import uvloop

from deploy.bench.script import Line, expected, flaw, request

PATIENCE = 120.0
"""Seconds for one run: far more than any that is worth reading."""
KEPT_FLAWS = 3


@dataclasses.dataclass(slots=True)
class Loaded:
    """The outcome of a run.

    Attributes:
        complete: requests whose answers were right.
        failed: requests that ended otherwise; ``flaws`` are the first of the reasons.
        pieces: reads: fewer than tokens where a busy machine joined them.
        seconds: on the clock.
    """

    complete: int = 0
    failed: int = 0
    pieces: int = 0
    seconds: float = 0.0
    flaws: list[str] = dataclasses.field(default_factory=list)

    def count(self, wrong: str | None) -> None:
        """One request has ended."""
        if wrong is None:
            self.complete += 1
            return
        self.failed += 1
        if len(self.flaws) < KEPT_FLAWS:
            self.flaws.append(wrong)


@dataclasses.dataclass(slots=True)
class Plan:
    """The requests that all connections together have still to send."""

    line: Line
    wanted: str
    sent: bytes
    left: int


class Client(asyncio.Protocol):
    """One connection, which asks again as soon as it has its answer."""

    def __init__(self, plan: Plan, loaded: Loaded) -> None:
        self._plan = plan
        self._loaded = loaded
        self._waiting = False
        self._answer: list[bytes] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]  # a client's can write
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._loaded.pieces += 1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._count(f"not HTTP: {error}")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting:
            self._count(f"the connection was lost: {exc}")
        if not self.ended.done():
            self.ended.set_result(None)

    def on_body(self, body: bytes) -> None:
        self._answer.append(body)

    def on_message_complete(self) -> None:
        answer = b"".join(self._answer)
        self._count(flaw(self._plan.line, self._plan.wanted, self._parser.get_status_code(), answer))
        self._ask()

    def _ask(self) -> None:
        if self._plan.left <= 0:
            self._transport.close()
            return
        self._plan.left -= 1
        self._waiting, self._answer = True, []
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(self._plan.sent)

    def _count(self, wrong: str | None) -> None:
        self._waiting = False
        self._loaded.count(wrong)


async def load(port: int, line: Line, requests: int, streams: int) -> Loaded:
    """Ask ``requests`` times over ``streams`` connections.

    Raises:
        OSError: the connection was refused.
        TimeoutError: it took beyond all reason.
    """
    plan, loaded, began = Plan(line, expected(line), request(line), requests), Loaded(), time.perf_counter()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE):
        opened = [
            await loop.create_connection(lambda: Client(plan, loaded), "127.0.0.1", port)
            for _ in range(min(streams, requests))
        ]
        await asyncio.gather(*(client.ended for _, client in opened))
    if plan.left > 0:
        loaded.count(f"{plan.left} requests were not even sent")
    loaded.seconds = time.perf_counter() - began
    return loaded


if __name__ == "__main__":
    print(
        json.dumps(dataclasses.asdict(uvloop.run(load(int(sys.argv[1]), Line(sys.argv[2]), *map(int, sys.argv[3:])))))
    )
