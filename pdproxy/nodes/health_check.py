"""Waiting for whichever comes first.

A cheap sign of progress: whether an engine that has requests still steps. Its HTTP server may answer without it.

Active health: asks every node in turn, brings new ones in, gives silent ones up and takes them back."""

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

from pdproxy.clock import Clock
from pdproxy.errors import Fault, NodeFault
from pdproxy.failures import PROBE_BLAME, Blame
from pdproxy.nodes.join import Joiner
from pdproxy.nodes.node import Node, NodeView, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import get
from pdproxy.nodes.reachability import OutageLog
from pdproxy.request import Headers
from pdproxy.transport.port import Timeouts, Transport


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of them is done; the others are cancelled, and their end is awaited. Errors are raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


_RUNNING = "vllm:num_requests_running"

_MOVING = (
    _RUNNING,
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:iteration_tokens_total_count",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
)
"""Series that the engine core's own reports move (vLLM 0.32, `v1/metrics/loggers.py`): with every step of a decode,
and, by the cache usage, with every chunk of a long prefill."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineProgress:
    """One reading.

    Attributes:
        running: requests that the engine is computing.
        trace: changes whenever the engine makes a step that counts.
    """

    running: float
    trace: tuple[str, ...]


def read_engine_progress(body: bytes) -> EngineProgress | None:
    """What a ``/metrics`` answer says; None where the engine's statistics are off."""
    lines = [line for line in body.decode("utf-8", "replace").splitlines() if line.startswith(_MOVING)]
    running = [line for line in lines if line.startswith((_RUNNING + "{", _RUNNING + " "))]
    if not running:
        return None
    try:
        return EngineProgress(sum(float(line.rpartition(" ")[2]) for line in running), tuple(lines))
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class NoProgressSince:
    """Since when (monotonic seconds) an engine has shown the same reading with requests running."""

    vitals: EngineProgress
    since: float

    def seconds(self, now: float) -> float:
        """How long it has been still; 0 for one that has nothing to do."""
        return now - self.since if self.vitals.running > 0 else 0.0


def update_progress(before: NoProgressSince | None, vitals: EngineProgress, now: float) -> NoProgressSince:
    """What a new reading makes of the one before."""
    return before if before is not None and before.vitals == vitals else NoProgressSince(vitals, now)


@dataclasses.dataclass(frozen=True, slots=True)
class HealthCheckConfig:
    """Times in seconds. How many misses in a row give a node up is `CircuitRules.failures`.

    Attributes:
        interval: between two probes of a node.
        timeout: for one probe's answer.
        joining: between two tries to bring a node in that is not reachable yet.
        stuck: an engine with requests that makes no step for so long misses its probes, whatever its HTTP server says.
    """

    interval: float = 5.0
    timeout: float = 5.0
    joining: float = 1.0
    stuck: float = 60.0


class HealthCheck:
    """Visits nodes, each at its own pace: a slow one delays no other.

    Args:
        pool: what is told.
        joiner: brings nodes in.
        transport: the way to the nodes.
        headers: sent with each probe.
        outages: what is logged of nodes that were given up; None logs nothing.
    """

    def __init__(
        self,
        pool: Pool,
        joiner: Joiner,
        transport: Transport,
        clock: Clock,
        rules: HealthCheckConfig | None = None,
        headers: Headers = (),
        outages: OutageLog | None = None,
    ) -> None:
        self._pool = pool
        self._joiner = joiner
        self._transport = transport
        self._clock = clock
        self._rules = rules or HealthCheckConfig()
        self._headers = headers
        self._outages = outages
        self._visiting: set[str] = set()
        self._visited: dict[str, float] = {}
        self._unreachable: set[str] = set()
        self._still: dict[str, NoProgressSince] = {}

    async def run(self) -> None:
        """Visit every node each interval, joining ones more often, new ones at once, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._pool.changed.clear()
                for view in self._due():
                    self._visiting.add(view.node.name)
                    group.create_task(self._visit(view))
                pause = min(self._rules.joining, self._rules.interval)
                await first_of(self._pool.changed.wait(), self._clock.sleep(pause))

    def _due(self) -> list[NodeView]:
        now = self._clock.now()
        views = self._pool.snapshot().nodes
        self._visited = {view.node.name: self._visited.get(view.node.name, float("-inf")) for view in views}
        if self._outages:
            self._outages.keep(self._visited)
        return [view for view in views if view.node.name not in self._visiting and self._is_due(view, now)]

    def _is_due(self, view: NodeView, now: float) -> bool:
        interval = self._rules.joining if view.state is State.JOINING else self._rules.interval
        return now - self._visited[view.node.name] >= interval

    async def visit_all(self) -> None:
        """One visit to each node, and its end: for a start that wants to know the nodes before it takes requests."""
        await asyncio.gather(*(self.visit(view) for view in self._pool.snapshot().nodes))

    async def _visit(self, view: NodeView) -> None:
        self._visited[view.node.name] = self._clock.now()
        try:
            await self.visit(view)
        finally:
            self._visiting.discard(view.node.name)

    async def visit(self, view: NodeView) -> None:
        """Join, probe or take back one node, as its state asks for."""
        if not self._is_there(view.node):
            return
        if view.state in (State.JOINING, State.REFUSED):
            await self._joiner.attempt(view.node.name)
            return
        began = self._clock.now()
        failure = await self._probe(view.node) or await self._stuck(view.node, began)
        fault = None if failure is None else failure.fault
        if not self._is_there(view.node) or (fault is not None and PROBE_BLAME[fault] is Blame.NO):
            return
        if fault is None and self._was_away(view.node.name):
            self._unreachable.discard(view.node.name)
            await self._joiner.attempt(view.node.name)
            return
        if fault is Fault.REFUSED:
            self._unreachable.add(view.node.name)
        self._pool.probed(view.node.name, fault, began)
        if self._outages and failure is not None and self._pool.lost(view.node.name):
            self._outages.failed(view.node, failure)

    def _was_away(self, name: str) -> bool:
        """Whether it may have come back as something else: another version behind the same address."""
        return name in self._unreachable or self._pool.lost(name)

    async def _probe(self, node: Node) -> NodeFault | None:
        try:
            status, _ = await get(self._transport, f"{node.url}/health", self._headers, self._timeouts())
        except NodeFault as fault:
            return fault
        return NodeFault(Fault.SERVER_ERROR, f"/health answers {status}", status=status) if status >= 500 else None

    async def _stuck(self, node: Node, now: float) -> NodeFault | None:
        """STALL for an engine that stands still. Only asked of nodes whose legs have been silent for an interval.

        One that was given up is asked too: its legs have left, and it must have moved before it may come back.
        """
        if not self._pool.silent(node.name, now - self._rules.interval) and not self._pool.lost(node.name):
            self._still.pop(node.name, None)
            return None
        try:
            _, body = await get(self._transport, f"{node.url}/metrics", self._headers, self._timeouts())
        except NodeFault:
            return None  # its health was answered just now: a slow /metrics alone proves nothing
        vitals = read_engine_progress(body)
        if vitals is None:
            return None
        still = update_progress(self._still.get(node.name), vitals, now)
        self._still[node.name] = still
        if still.seconds(now) < self._rules.stuck:
            return None
        return NodeFault(Fault.STALL, f"its engine has requests and has made no step for {still.seconds(now):.0f} s")

    def _timeouts(self) -> Timeouts:
        timeout = self._rules.timeout
        return Timeouts(connect=timeout, headers=timeout, stall=timeout, whole=timeout)

    def _is_there(self, node: Node) -> bool:
        there = any(view.node.name == node.name for view in self._pool.snapshot().nodes)
        if not there:
            self._unreachable.discard(node.name)
            self._still.pop(node.name, None)
        return there
