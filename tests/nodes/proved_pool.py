"""A pool whose nodes are proved by a fake hand-over test."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from pdproxy.background import Background
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.proof import NothingCompared, ProofResult, Prover
from pdproxy.observe.labels import Proof
from pdproxy.observe.metrics import Metrics
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import settle

CANNOT = "one cannot reach the other"


@dataclasses.dataclass
class FakeHandOverTest:
    """Two nodes pass where they have the same format, and neither is silent."""

    formats: dict[str, int] = dataclasses.field(default_factory=dict)
    silent: set[str] = dataclasses.field(default_factory=set)
    deaf: set[str] = dataclasses.field(default_factory=set)
    """Nodes between which nothing is handed over."""
    failing_pairs: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Pairs that fail though each of them is right with others."""
    asked: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    warmed_up: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    held: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.held.set()

    async def ask(self, prefill: Node, decode: Node) -> ProofResult:
        pair = prefill.name, decode.name
        self.asked.append(pair)
        result = self._result(pair)
        await self.held.wait()
        await asyncio.sleep(0)
        return result

    def _result(self, pair: tuple[str, str]) -> ProofResult:
        if self.silent & set(pair):
            return ProofResult(Proof.UNANSWERED, "no ticket")
        if self.deaf & set(pair):
            return ProofResult(Proof.NOT_HANDED_OVER, CANNOT)
        right = self.formats.get(pair[0], 0) == self.formats.get(pair[1], 0) and pair not in self.failing_pairs
        return ProofResult(Proof.PASSED) if right else ProofResult(Proof.FAILED, "far apart")

    async def warm(self, prefill: Node, decode: Node) -> ProofResult:
        pair = prefill.name, decode.name
        self.warmed_up.append(pair)
        return ProofResult(Proof.NOT_HANDED_OVER, CANNOT) if self.deaf & set(pair) else ProofResult(Proof.PASSED)


class ProvedPool:
    """A pool, its prover, and nodes that join."""

    def __init__(self, *, compares: bool = True) -> None:
        self.clock, self.registry, self.test = FakeClock(), CollectorRegistry(), FakeHandOverTest()
        self.pool = Pool(self.clock, metrics=Metrics(self.registry))
        self.prover = Prover(self.pool, self.test if compares else NothingCompared(self.test), self.clock)

    async def join(self, *names: str, cohort: str = "a") -> list[tuple[str, str]]:
        """Join one after the other, as the joiner does; the pairs that were tested meanwhile."""
        before = len(self.test.asked)
        for name in names:
            node = node_of(name, cohort)
            if name not in {view.node.name for view in self.pool.state().nodes}:
                self.pool.add(node)
            await self.prover.join(node)
            self.pool.bring_up(node)
        return self.test.asked[before:]

    def allowed(self, prefill: str, decode: str) -> bool:
        return self.pool.state().bars.allow(prefill, decode)

    def gauge(self, prefill: str, decode: str) -> float | None:
        return self.registry.get_sample_value("pdproxy_pair_barred", {"prefill": prefill, "decode": decode})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        background = Background(self.clock)
        background.every("proof", 1.0, self.prover.look)
        try:
            await settle()
            yield
        finally:
            await background.aclose()

    async def after(self, seconds: int) -> list[tuple[str, str]]:
        """Let time pass, second by second; the pairs that were tested meanwhile."""
        before = len(self.test.asked)
        for _ in range(seconds):
            self.clock.advance(1)
            await self._settle()
        return self.test.asked[before:]

    async def _settle(self) -> None:
        """As `settle`, but no longer than until the prover sleeps again: nobody else waits for this clock."""
        for _ in range(100):
            if self.clock.sleepers:
                return
            await asyncio.sleep(0)


def node_of(name: str, cohort: str = "a") -> Node:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return Node(name, f"http://{name}", (role,), "tiny", cohort=cohort)
