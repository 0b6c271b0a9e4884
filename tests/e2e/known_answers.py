"""Run the proxy's known-answer test on real nodes, and count its results."""

import importlib
import importlib.util
import json
import statistics
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from deploy.local.node import SERVED_NAME, NodeSpec
from deploy.local.node import Node as LocalNode
from pdproxy.clock import SystemClock
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight
from pdproxy.nodes.proof import Prover
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.answers_agree import AnswerDistance
from pdproxy.orchestration.context import OrchestrationConfig, OrchestrationContext
from pdproxy.orchestration.known_answer import KnownAnswer, Unreadable
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.request import ClientRequest, Endpoint, HeldBody, Json, header
from pdproxy.response import ProxyResponse
from pdproxy.transport.h1_client import H1Transport
from tests.e2e.conftest import REQUEST_TIMEOUT_S

TRUSTING = "tests.e2e.trusting"
"""The connector without its comparison of fingerprints. The known-answer test must find what this lets through."""


def trusting(spec: NodeSpec) -> NodeSpec:
    """The same node, which reads tickets with any fingerprint."""
    if importlib.util.find_spec(TRUSTING) is None:
        return spec  # this connector has no fingerprints to compare
    module: Any = importlib.import_module(TRUSTING)
    changed: NodeSpec = module.trusting(spec)
    return changed


@dataclass(frozen=True)
class Bench:
    """A pool, metrics and the known-answer test, for real nodes."""

    means: OrchestrationContext
    test: KnownAnswer

    async def node(self, local: LocalNode, role: Role) -> Node:
        """The node as the proxy knows it after its preflight, without its cohort: here any two nodes are paired."""
        found = await Preflight(self.means.transport).inspect(Node(local.spec.name, local.url, (role,)))
        joined = found.joined()
        return Node(
            joined.name, joined.url, (role,), joined.model,
            block_size=joined.block_size, max_model_len=joined.max_model_len,
            prefix_match_unit=joined.prefix_match_unit,
        )  # fmt: skip

    async def join(self, *nodes: Node) -> None:
        """Test each node with those before it, and let it serve."""
        prover = Prover(self.means.pool, self.test, self.means.clock)
        for node in nodes:
            self.means.pool.add(node)
            await prover.join(node)
            self.means.pool.bring_up(node)

    async def answer(self, prompt: str) -> tuple[str, str]:
        """The text that a client of these nodes gets, and its route."""
        orchestrator, now = Orchestrator(self.means), self.means.clock.now()
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = ClientRequest(
            "r",
            Endpoint.COMPLETIONS,
            HeldBody[Json](body),
            (),
            SERVED_NAME,
            False,
            0,
            now,
            now + REQUEST_TIMEOUT_S,
            lambda: True,
        )
        reply = await orchestrator.answer(request)
        await self.means.background.aclose()
        assert isinstance(reply, ProxyResponse)
        assert isinstance(reply.body, bytes)
        return json.loads(reply.body)["choices"][0]["text"], str(header(reply.headers, "x-pdproxy-route")).partition(
            ";"
        )[0]


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    """A bench; its connections are closed at the end."""
    clock, metrics = SystemClock(), Metrics(CollectorRegistry())
    transport = H1Transport(clock)
    means = OrchestrationContext(transport, Pool(clock), metrics, clock, OrchestrationConfig())
    try:
        yield Bench(means, KnownAnswer(means))
    finally:
        await means.background.aclose()
        await transport.aclose()


@dataclass(frozen=True)
class Row:
    """The tests of one pair."""

    name: str
    comparisons: tuple[AnswerDistance, ...]
    unreadable: int

    def caught(self) -> int:
        """How many of them failed."""
        return self.unreadable + sum(not each.agrees() and not each.undecided() for each in self.comparisons)

    def __str__(self) -> str:
        nats = sorted(each.distance.nats for each in self.comparisons)
        allowed = sorted(each.allowed for each in self.comparisons)
        figures = f"{nats[0]:6.3f} {statistics.median(nats):6.3f} {nats[-1]:6.3f}" if nats else 20 * " "
        most = f"{allowed[-1]:.2f}" if allowed else ""
        total = len(self.comparisons) + self.unreadable
        return f"{self.name:42} {figures}  {most:>4}  {self.unreadable:3}  {self.caught():3} of {total}"


HEAD = f"{'decode node against prefill node':42}  least median    most  allowed NaN  failed"


async def ask(name: str, give: LocalNode, take: LocalNode, seeds: Iterable[int]) -> Row:
    """Run known-answer tests of one pair, one after the other."""
    async with bench() as made:
        prefill, decode = await made.node(give, Role.PREFILL), await made.node(take, Role.DECODE)
        comparisons, unreadable = [], 0
        for seed in seeds:
            try:
                comparisons.append(await made.test.compare(prefill, decode, seed))
            except Unreadable:
                unreadable += 1
    return Row(name, tuple(comparisons), unreadable)
