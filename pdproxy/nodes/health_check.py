"""Active health: probes every node in turn, has new ones join, gives silent ones up and takes them back."""

import asyncio
import dataclasses

from pdproxy.clock import Clock, first_of
from pdproxy.credential import OwnHeaders, no_headers
from pdproxy.errors import Fault, NodeFault
from pdproxy.failures import PROBE_BLAME, Blame
from pdproxy.nodes.join import Joiner
from pdproxy.nodes.node import Node, NodeView, State
from pdproxy.nodes.node_info import read_model_card
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import cause, exchange, symptom
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
ALIVE = "/v1/pdproxy/alive"
"""Answered by nodes whose processes all run (`connector/liveness.py`); others than ours answer it with a 404."""
JOINING_INTERVAL = 1.0
"""Seconds between two tries to have a node join that is not reachable yet; and between two probes of a node whose host
has just refused a connection, until it is given up."""
STUCK_SECONDS = 60.0
"""An engine with requests that makes no step for so long misses its probes, whatever its HTTP server says."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineProgress:
    """A cheap sign of whether an engine still steps: its HTTP server may answer without it.

    Attributes:
        running: requests that the engine is computing.
        series: change whenever the engine makes a step.
        since: monotonic seconds of the first of equal readings in a row.
    """

    running: float
    series: tuple[str, ...]
    since: float

    def still_seconds(self, now: float) -> float:
        """How long it has stood still; 0 for an engine that has nothing to do."""
        return now - self.since if self.running > 0 else 0.0


def read_engine_progress(body: bytes, before: EngineProgress | None, now: float) -> EngineProgress | None:
    """The progress by a ``/metrics`` answer and the reading before; None where the engine's statistics are off."""
    series = tuple(line for line in body.decode("utf-8", "replace").splitlines() if line.startswith(_MOVING))
    running = [line for line in series if line.startswith((_RUNNING + "{", _RUNNING + " "))]
    if not running:
        return None
    if before is not None and before.series == series:
        return before
    try:
        return EngineProgress(sum(float(line.rpartition(" ")[2]) for line in running), series, now)
    except ValueError:
        return None


class HealthCheck:
    """Visits nodes, each at its own pace: a slow one delays no other.

    Args:
        headers: of each probe, such as a credential.
        interval: seconds between two probes of a node.
        timeout: seconds for one probe's answer.
    """

    def __init__(
        self,
        pool: Pool,
        joiner: Joiner,
        transport: Transport,
        clock: Clock,
        headers: OwnHeaders = no_headers,
        interval: float = 5.0,
        timeout: float = 5.0,
    ) -> None:
        self._pool = pool
        self._joiner = joiner
        self._transport = transport
        self._clock = clock
        self._headers = headers
        self._interval = interval
        self._timeouts = Timeouts(connect=timeout, headers=timeout, stall=timeout, whole=timeout)
        self._visiting: set[str] = set()
        self._visited: dict[str, float] = {}
        self._refused_connection: set[str] = set()
        """Nodes whose host refused a connection: another process may answer there next, which has to join anew."""
        self._progress: dict[str, EngineProgress] = {}

    async def run(self) -> None:
        """Visit every node each interval, joining ones more often, new ones at once, until cancelled.

        Nodes that serve and are due together are visited one after the other, until the next look for nodes that are
        due. Those that joined together would else be visited together, and a thousand visits would keep the event loop
        from all streams for a tenth of a second.
        """
        look = min(JOINING_INTERVAL, self._interval)
        async with asyncio.TaskGroup() as group:
            while True:
                self._pool.changed.clear()
                now, due = self._clock.now(), self._due()
                later = [view.name for view in due if self._may_wait(view)]
                after = {name: look * at / len(later) for at, name in enumerate(later)}
                for view in due:
                    self._visiting.add(view.name)
                    self._visited[view.name] = now
                    group.create_task(self._visit(view.name, after.get(view.name, 0.0)))
                await first_of(self._pool.changed.wait(), self._clock.sleep(look))

    def _due(self) -> list[NodeView]:
        now = self._clock.now()
        views = self._pool.state().nodes
        self._visited = {view.node.name: self._visited.get(view.node.name, float("-inf")) for view in views}
        self._joiner.outages.retain(self._visited)
        return [view for view in views if view.node.name not in self._visiting and self._is_due(view, now)]

    def _is_due(self, view: NodeView, now: float) -> bool:
        joins = view.state is State.JOINING or self._pool.joins_anew(view.name)
        doubtful = view.name in self._refused_connection and not self._pool.is_given_up(view.name)
        interval = JOINING_INTERVAL if joins or doubtful else self._interval
        return now - self._visited[view.node.name] >= interval

    def _may_wait(self, view: NodeView) -> bool:
        """Whether nothing says that its state may change."""
        return view.state is State.UP and view.name not in self._refused_connection

    async def _visit(self, name: str, after: float) -> None:
        try:
            if after:
                await self._clock.sleep(after)
            if self._is_there(name):
                await self.visit(self._pool.view(name))
        finally:
            self._visiting.discard(name)

    async def visit(self, view: NodeView) -> None:
        """Join, probe or take back one node, as its state asks for."""
        node, name = view.node, view.node.name
        if not self._is_there(name):
            return
        if view.state in (State.JOINING, State.REFUSED):
            await self._joiner.attempt(name)
            return
        if self._pool.joins_anew(name):
            await self._joiner.attempt(name)
            if not self._is_there(name) or not self._pool.joins_anew(name):
                self._refused_connection.discard(name)
                return
        began = self._clock.now()
        failure = await self._probe(node) or await self._stuck(node, began)
        if not self._is_there(name) or (failure is not None and PROBE_BLAME[failure.fault] is Blame.NO):
            return
        self._pool.note_silence(name, failure)
        if failure is None and (name in self._refused_connection or self._pool.is_given_up(name)):
            self._refused_connection.discard(name)  # it may have come back as something else: another version, say
            await self._joiner.attempt(name)
            return
        if failure is not None and failure.fault is Fault.REFUSED:
            self._refused_connection.add(name)
        if failure is None:
            self._pool.probed(name, None, began)
            await self._look_at_models(name)
            return
        self._pool.probed(name, failure.fault, began, f"{symptom(failure)}: {cause(failure)}")
        if self._pool.is_given_up(name):
            self._joiner.outages.down(node, failure)

    async def _look_at_models(self, name: str) -> None:
        """Adapters are loaded and unloaded while a node runs: within two visits clients can ask for them, or not."""
        node = self._pool.view(name).node
        try:
            status, body = await self._get(node, "/v1/models")
        except NodeFault:
            return  # its health was answered just now: the next visit looks again
        models = read_model_card(body)
        if status != 200 or not models.names or not self._is_there(name):
            return
        current = self._pool.view(name).node
        served = models.on(self._pool.configured(name), current)
        if served != current:
            self._pool.serve_models(served)

    async def _probe(self, node: Node) -> NodeFault | None:
        """The fault of a health probe; None for well. A node that was given up must show that its engines run too."""
        paths = ("/health", ALIVE) if self._pool.is_given_up(node.name) else ("/health",)
        for path in paths:
            try:
                status, _ = await self._get(node, path)
            except NodeFault as fault:
                return fault
            if status >= 500:
                return NodeFault(Fault.SERVER_ERROR, f"{path} answers {status}", status=status)
        return None

    async def _stuck(self, node: Node, now: float) -> NodeFault | None:
        """STALL for an engine that stands still. Only nodes whose legs have been silent for an interval are asked.

        One that was given up is asked too: its legs have left, and it must have moved before it may come back.
        """
        if self._pool.silent_since(node.name) >= now - self._interval and not self._pool.is_given_up(node.name):
            self._progress.pop(node.name, None)
            return None
        try:
            _, body = await self._get(node, "/metrics")
        except NodeFault:
            return None  # its health was answered just now: a slow /metrics alone proves nothing
        progress = read_engine_progress(body, self._progress.get(node.name), now)
        if progress is None:
            return None
        self._progress[node.name] = progress
        still = progress.still_seconds(now)
        if still < STUCK_SECONDS:
            return None
        return NodeFault(Fault.STALL, f"its engine has requests and has made no step for {still:.0f} s")

    async def _get(self, node: Node, path: str) -> tuple[int, bytes]:
        return await exchange(self._transport, HttpRequest("GET", node.url + path, self._headers()), self._timeouts)

    def _is_there(self, name: str) -> bool:
        if name in self._pool:
            return True
        self._refused_connection.discard(name)
        self._progress.pop(name, None)
        return False
