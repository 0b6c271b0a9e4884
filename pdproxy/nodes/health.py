"""Active health: asks every node in turn, brings new ones in, gives silent ones up and takes them back."""

import asyncio
import dataclasses

from pdproxy.clock import Clock
from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.ask import get
from pdproxy.nodes.join import Joiner
from pdproxy.nodes.node import Node, NodeView, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.race import first_of
from pdproxy.nodes.reachability import OutageLog
from pdproxy.nodes.vitals import Stillness, observed, read_vitals
from pdproxy.request import Headers
from pdproxy.transport.port import Patience, Transport


@dataclasses.dataclass(frozen=True, slots=True)
class HealthRules:
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


class Health:
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
        rules: HealthRules | None = None,
        headers: Headers = (),
        outages: OutageLog | None = None,
    ) -> None:
        self._pool = pool
        self._joiner = joiner
        self._transport = transport
        self._clock = clock
        self._rules = rules or HealthRules()
        self._headers = headers
        self._outages = outages
        self._visiting: set[str] = set()
        self._visited: dict[str, float] = {}
        self._unreachable: set[str] = set()
        self._still: dict[str, Stillness] = {}

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
        if not self._is_there(view.node) or fault is Fault.BUSY:
            return  # busy are we, with no socket left: that says nothing of the node
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
            status, _ = await get(self._transport, f"{node.url}/health", self._headers, self._patience())
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
            _, body = await get(self._transport, f"{node.url}/metrics", self._headers, self._patience())
        except NodeFault:
            return None  # its health was answered just now: a slow /metrics alone proves nothing
        vitals = read_vitals(body)
        if vitals is None:
            return None
        still = observed(self._still.get(node.name), vitals, now)
        self._still[node.name] = still
        if still.seconds(now) < self._rules.stuck:
            return None
        return NodeFault(Fault.STALL, f"its engine has requests and has made no step for {still.seconds(now):.0f} s")

    def _patience(self) -> Patience:
        timeout = self._rules.timeout
        return Patience(connect=timeout, headers=timeout, stall=timeout, whole=timeout)

    def _is_there(self, node: Node) -> bool:
        there = any(view.node.name == node.name for view in self._pool.snapshot().nodes)
        if not there:
            self._unreachable.discard(node.name)
            self._still.pop(node.name, None)
        return there
