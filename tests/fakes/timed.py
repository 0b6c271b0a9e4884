"""Fake nodes that take time as engines do, in memory, on a loop whose time passes by itself: however busy the machine
is, the same happens at the same times."""

import asyncio
import dataclasses
import itertools
import selectors
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pdproxy.request import Headers
from pdproxy.response import ChunkSink, Sink
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts
from tests.fakes.clock import FakeClock
from tests.fakes.memory_transport import MemoryTransport
from tests.fakes.node import FakeNode


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Where every task waits for time, it is the next one's time at once. For tasks without sockets and threads."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_NoWait(self))

    def time(self) -> float:
        """Seconds since the loop began."""
        return self._now

    def pass_time(self, seconds: float) -> None:
        """Nothing is ready before that."""
        self._now += seconds


class _NoWait(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "every task waits, and none for time"
            self._loop.pass_time(timeout)
        return ready


class LoopClock:
    """The clock of the running loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How fast nodes are.

    Attributes:
        prompt: seconds for each 4 bytes of a prompt; a prefill node computes them in steps.
        token: seconds between two tokens of an answer; a decode node generates any number of answers side by side.
        step: a step takes the prompt that came first, and of those that wait as many more as have 4 times so many bytes
            with it. They all end with the step.
        leg: seconds until a prompt has come to its prefill node's engine, and again for its answer.
    """

    prompt: float
    token: float
    step: int = 0
    leg: float = 0.0


class _PrefillEngine:
    """The node computes prompts in the order in which they come, as vLLM does where it is not told otherwise."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._waiting: dict[object, float] = {}
        """Tokens of the prompts that are not computed, in order."""
        self._busy = asyncio.Lock()

    async def compute(self, tokens: float) -> None:
        """Return when a prompt is computed."""
        prompt = object()
        self._waiting[prompt] = tokens
        try:
            async with self._busy:
                if prompt in self._waiting:  # else it was part of a step
                    step = self._step()
                    await asyncio.sleep(self._pace.prompt * sum(self._waiting[each] for each in step))
                    for each in step:
                        self._waiting.pop(each, None)
        finally:
            self._waiting.pop(prompt, None)

    def _step(self) -> list[object]:
        sums = zip(self._waiting, itertools.accumulate(self._waiting.values()), strict=True)
        return [prompt for index, (prompt, tokens) in enumerate(sums) if not index or tokens <= self._pace.step]


class TimedTransport(MemoryTransport):
    """To nodes that take time."""

    def __init__(self, nodes: list[FakeNode], pace: Pace) -> None:
        super().__init__(nodes, FakeClock())
        self._pace = pace
        self._engines = {node.url: _PrefillEngine(pace) for node in nodes}

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        """See the port. A prefill leg's head comes with its answer."""
        node = next(node for url, node in self._nodes.items() if request.url.startswith(url))
        response = await super().send(request, timeouts)
        body = node.seen[-1].body
        if not _is_prefill(body):
            return _PacedResponse(response, self._pace.token)
        try:
            await asyncio.sleep(self._pace.leg)
            await self._engines[node.url].compute(len(str(body["prompt"])) / 4)
            await asyncio.sleep(self._pace.leg)
        except BaseException:
            await response.aclose()
            raise
        return response


class _PacedResponse:
    """A token at a time."""

    def __init__(self, inner: HttpResponse, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    @property
    def status(self) -> int:
        return self._inner.status

    @property
    def headers(self) -> Headers:
        return self._inner.headers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """See the port."""
        async for piece in self._inner:
            await asyncio.sleep(self._seconds)
            yield piece

    def take_whole(self) -> bytes | None:
        """See the port."""
        return None

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        """See the port. All pieces are left to be read."""

    async def aclose(self) -> None:
        """See the port."""
        await self._inner.aclose()


def _is_prefill(body: Mapping[str, Any]) -> bool:
    return bool((body.get("kv_transfer_params") or {}).get("do_remote_decode"))
