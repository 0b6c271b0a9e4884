"""Active health: probes every node in turn, has new ones join, gives silent ones up and takes them back."""

import asyncio
import dataclasses

from pdproxy.clock import Clock, first_of
from pdproxy.errors import Fault, NodeFault
from pdproxy.failures import PROBE_BLAME, Blame
from pdproxy.nodes.join import Joiner
from pdproxy.nodes.node import Node, NodeView, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import exchange
from pdproxy.request import Headers
from pdproxy.transport.port import HttpRequest, Timeouts, Transport

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
    """A cheap sign of whether an engine still steps: its HTTP server may answer without it.

    Attributes:
        running: requests that the engine is computing.
        series: change whenever the engine makes a step.
    """

    running: float
    series: tuple[str, ...]


def read_engine_progress(body: bytes) -> EngineProgress | None:
    """The engine's progress by a ``/metrics`` answer; None where the engine's statistics are off."""
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
    """Since when (monotonic seconds) an engine has shown the same progress."""

    progress: EngineProgress
    since: float

    def seconds(self, now: float) -> float:
        """How long it has stood still; 0 for one that has nothing to do."""
        return now - self.since if self.progress.running > 0 else 0.0


def update_progress(before: NoProgressSince | None, progress: EngineProgress, now: float) -> NoProgressSince:
    """What follows from a new reading."""
    return before if before is not None and before.progress == progress else NoProgressSince(progress, now)


@dataclasses.dataclass(frozen=True, slots=True)
class HealthCheckConfig:
    """Times in seconds. How many misses in a row give a node up is `CircuitBreakerConfig.failures`.

    Attributes:
        interval: between two probes of a node.
        timeout: for one probe's answer.
        joining: between two tries to have a node join that is not reachable yet.
        stuck: an engine with requests that makes no step for so long misses its probes, whatever its HTTP server says.
    """

    interval: float = 5.0
    timeout: float = 5.0
    joining: float = 1.0
    stuck: float = 60.0


class HealthCheck:
    """Visits nodes, each at its own pace: a slow one delays no other.

    Args:
        headers: of each probe, such as a credential.
    """

    def __init__(
        self,
        pool: Pool,
        joiner: Joiner,
        transport: Transport,
        clock: Clock,
        config: HealthCheckConfig | None = None,
        headers: Headers = (),
    ) -> None:
        self._pool = pool
        self._joiner = joiner
        self._transport = transport
        self._clock = clock
        self._config = config or HealthCheckConfig()
        self._headers = headers
        self._visiting: set[str] = set()
        self._visited: dict[str, float] = {}
        self._refused: set[str] = set()
        self._still: dict[str, NoProgressSince] = {}

    async def run(self) -> None:
        """Visit every node each interval, joining ones more often, new ones at once, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._pool.changed.clear()
                for view in self._due():
                    self._visiting.add(view.node.name)
                    group.create_task(self._visit(view))
                pause = min(self._config.joining, self._config.interval)
                await first_of(self._pool.changed.wait(), self._clock.sleep(pause))

    def _due(self) -> list[NodeView]:
        now = self._clock.now()
        views = self._pool.snapshot().nodes
        self._visited = {view.node.name: self._visited.get(view.node.name, float("-inf")) for view in views}
        self._joiner.outages.keep(self._visited)
        return [view for view in views if view.node.name not in self._visiting and self._is_due(view, now)]

    def _is_due(self, view: NodeView, now: float) -> bool:
        interval = self._config.joining if view.state is State.JOINING else self._config.interval
        return now - self._visited[view.node.name] >= interval

    async def _visit(self, view: NodeView) -> None:
        self._visited[view.node.name] = self._clock.now()
        try:
            await self.visit(view)
        finally:
            self._visiting.discard(view.node.name)

    async def visit(self, view: NodeView) -> None:
        """Join, probe or take back one node, as its state asks for."""
        node, name = view.node, view.node.name
        if not self._is_there(name):
            return
        if view.state in (State.JOINING, State.REFUSED):
            await self._joiner.attempt(name)
            return
        began = self._clock.now()
        failure = await self._probe(node) or await self._stuck(node, began)
        if not self._is_there(name) or (failure is not None and PROBE_BLAME[failure.fault] is Blame.NO):
            return
        if failure is None and (name in self._refused or self._pool.lost(name)):
            self._refused.discard(name)  # it may have come back as something else: another version, say
            await self._joiner.attempt(name)
            return
        if failure is not None and failure.fault is Fault.REFUSED:
            self._refused.add(name)
        self._pool.probed(name, None if failure is None else failure.fault, began)
        if failure is not None and self._pool.lost(name):
            self._joiner.outages.failed(node, failure)

    async def _probe(self, node: Node) -> NodeFault | None:
        try:
            status, _ = await self._get(node, "/health")
        except NodeFault as fault:
            return fault
        return NodeFault(Fault.SERVER_ERROR, f"/health answers {status}", status=status) if status >= 500 else None

    async def _stuck(self, node: Node, now: float) -> NodeFault | None:
        """STALL for an engine that stands still. Only nodes whose legs have been silent for an interval are asked.

        One that was given up is asked too: its legs have left, and it must have moved before it may come back.
        """
        if not self._pool.silent(node.name, now - self._config.interval) and not self._pool.lost(node.name):
            self._still.pop(node.name, None)
            return None
        try:
            _, body = await self._get(node, "/metrics")
        except NodeFault:
            return None  # its health was answered just now: a slow /metrics alone proves nothing
        progress = read_engine_progress(body)
        if progress is None:
            return None
        still = self._still[node.name] = update_progress(self._still.get(node.name), progress, now)
        if still.seconds(now) < self._config.stuck:
            return None
        return NodeFault(Fault.STALL, f"its engine has requests and has made no step for {still.seconds(now):.0f} s")

    async def _get(self, node: Node, path: str) -> tuple[int, bytes]:
        timeout = self._config.timeout
        timeouts = Timeouts(connect=timeout, headers=timeout, stall=timeout, whole=timeout)
        return await exchange(self._transport, HttpRequest("GET", node.url + path, self._headers), timeouts)

    def _is_there(self, name: str) -> bool:
        there = any(view.node.name == name for view in self._pool.snapshot().nodes)
        if not there:
            self._refused.discard(name)
            self._still.pop(name, None)
        return there
