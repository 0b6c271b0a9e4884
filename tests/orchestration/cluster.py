"""A cluster in memory: fake nodes, a pool, metrics, an orchestrator. No sockets, no wall time."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError
from pdproxy.nodes.node import BOTH, DECODE, NO_FOOTPRINT, PREFILL, Capacity, Node, Roles
from pdproxy.nodes.pool import Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.context import OrchestrationConfig, OrchestrationContext
from pdproxy.orchestration.forward import ForwardRequest
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.orchestration.request_queue import QueueStatus
from pdproxy.request import ClientRequest, Endpoint, HeldBody
from pdproxy.response import ProxyResponse
from tests.fakes.clock import FakeClock, PassingClock
from tests.fakes.faults import FaultKind
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.memory_transport import MemoryTransport
from tests.fakes.node import FakeNode
from tests.fakes.reading import follow

MODEL = "tiny"


@dataclasses.dataclass(frozen=True, slots=True)
class Got:
    """The answer that a client got: a status and the bytes, whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def route(self) -> str:
        """`disaggregated` or `local`, without the reason of the plan."""
        return self.headers["x-pdproxy-route"].split(";")[0]


class FakeCluster:
    """Prefill nodes p0…, decode nodes d0…, nodes of both roles n0…, all up.

    Args:
        prefills: how many prefill nodes.
        decodes: how many decode nodes.
        config: the operator's.
        burst: tokens that an event carries.
        capacity: of each decode node, and of each node of both roles; None where they do not publish it.
        journaling: how many of the decode nodes, the first ones, write journals; all unless it is given.
        shared: how many nodes of both roles.
        clock: one whose time a test lets pass; unless it is given, time passes where somebody sleeps.
    """

    def __init__(
        self,
        prefills: int = 2,
        decodes: int = 2,
        config: OrchestrationConfig | None = None,
        burst: int = 1,
        capacity: Capacity | None = None,
        journaling: int | None = None,
        shared: int = 0,
        clock: FakeClock | None = None,
    ) -> None:
        self.fabric = FakeKvTransfer()
        self.clock = clock or PassingClock(self.look_after_nodes)
        self.registry = CollectorRegistry()
        self.prefills = [FakeNode(f"p{index}", self.fabric, burst) for index in range(prefills)]
        self.decodes = [FakeNode(f"d{index}", self.fabric, burst) for index in range(decodes)]
        self.shared = [FakeNode(f"n{index}", self.fabric, burst) for index in range(shared)]
        self.transport = MemoryTransport(self.nodes, self.clock)
        metrics = Metrics(self.registry)
        self.pool = Pool(self.clock, metrics=metrics)
        for node in self.prefills:
            self.join(node, PREFILL)
        for index, node in enumerate(self.decodes):
            node.can_resume = journaling is None or index < journaling
            self.join(node, DECODE, capacity)
        for node in self.shared:
            self.join(node, BOTH, capacity)
        self.context = OrchestrationContext(
            self.transport,
            self.pool,
            metrics,
            self.clock,
            config or OrchestrationConfig(),
        )
        self.orchestrator = Orchestrator(self.context)

    @property
    def nodes(self) -> list[FakeNode]:
        return [*self.prefills, *self.decodes, *self.shared]

    def join(self, fake: FakeNode, roles: Roles, capacity: Capacity | None = None) -> None:
        """A node joins, and serves."""
        node = Node(
            fake.name,
            fake.url,
            roles,
            MODEL,
            can_resume=fake.can_resume,
            capacity=capacity,
        )
        self.pool.add(node)
        self.pool.bring_up(node)

    def look_after_nodes(self) -> None:
        """As active health does: all nodes are well, but for those that refuse connections."""
        for node in self.nodes:
            if node.name in self.pool and (node.fault is None or node.fault.kind is not FaultKind.REFUSE):
                self.pool.probed(node.name, None, self.clock.now())

    def amend(self, name: str, **found: Any) -> None:
        """Something else is found out about a node."""
        self.pool.bring_up(dataclasses.replace(self.pool.view(name).node, **found))

    async def forward(self, path: str, *, name: str = "r-1") -> ProxyResponse:
        """The answer of one node to what the proxy does not understand."""
        deadline = self.clock.now() + 3600
        return await self.orchestrator.forward(
            ForwardRequest(name, "POST", path, (), HeldBody(b"{}"), MODEL, deadline, lambda: True)
        )

    def request(
        self, endpoint: Endpoint, body: Mapping[str, object], *, name: str = "r-1", priority: int = 0, api_key: str = ""
    ) -> ClientRequest:
        """A client's request; the model is put in."""
        whole = {"model": MODEL, **body}
        now = self.clock.now()
        return ClientRequest(
            request_id=name,
            endpoint=endpoint,
            held=HeldBody(whole),
            headers=(("authorization", "Bearer k"),),
            model=str(whole["model"]),
            stream=bool(body.get("stream")),
            priority=priority,
            arrived=now,
            deadline=now + 3600,
            left=lambda: True,
            api_key=api_key,
        )

    async def ask(self, endpoint: Endpoint, body: Mapping[str, object], *, name: str = "r-1") -> Got:
        """The whole way of a request, to the last byte; an error of ours as its status and body."""
        try:
            reply = await self.orchestrator.answer(self.request(endpoint, body, name=name))
        except ClientError as error:
            return Got(error.status, dict(error.headers), error.body())
        return Got(reply.status, dict(reply.headers), await read(reply))

    def count(self, name: str, **labels: str) -> float:
        """A counter's value, over all series that have these labels; 0 where it was never touched. (The registry's own
        lookup collects all metrics.)"""
        families = self.registry.restricted_registry([name]).collect()
        samples = (sample for family in families for sample in family.samples)
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())

    async def settle(self) -> None:
        """Let releases finish, and check that nothing is held any more."""
        for _ in range(50):
            if not self.context.background.errands:
                break
            await asyncio.sleep(0)
        assert self.context.background.errands == 0
        assert not self.transport.open
        assert {view.node.name: view.active for view in self.pool.state().nodes if view.active} == {}
        assert {view.footprint for view in self.pool.state().nodes} == {NO_FOOTPRINT}
        assert self.context.queue.status() == QueueStatus(seconds=self.context.queue.status().seconds)
        assert {node.name: node.running for node in self.nodes if node.running} == {}
        assert self.count("pdproxy_prefill_pending_tokens_estimate", model=MODEL) == 0
        assert self.fabric.held == {}
        assert self.fabric.wrong == []


async def read(reply: ProxyResponse) -> bytes:
    """The body of a reply, to its end."""
    if isinstance(reply.body, bytes):
        return reply.body
    return b"".join(await follow(reply.body))
