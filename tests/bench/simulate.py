"""A trace on simulated nodes, in one process on a clock that is set; pool, plans and policies are the proxy's own.

The nodes are arithmetic. A prefill node computes one prompt after the other, at a rate, from where its caches let it
resume. A decode node reads what it has not cached, at a rate, and gives a token in each step; a prompt that it computes
itself stops its streams for as long. The planner is told exactly what is cached where, with all that was sent before.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.node import NO_FOOTPRINT, Footprint, Node, Role, hash64
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import LegLoad, Slot
from pdproxy.planning.plan import PlanPolicy, plan
from pdproxy.planning.plan_types import Decision, Plan, PlanInput
from pdproxy.planning.policies import policy_named
from pdproxy.planning.prefix import HitSource, Place, PromptHits
from pdproxy.planning.rates import Rates, Work
from pdproxy.settings.types import Routing
from tests.bench.hybrid_cache import CacheShape, HashedPrompt, HybridCache
from tests.bench.outcome import Outcome
from tests.bench.traces import Trace, hashed
from tests.fakes.clock import FakeClock

MODEL = "m"


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """The simulated nodes: how many, their caches, and how fast they are.

    Attributes:
        prefill_rate: tokens that a node computes in a second.
        overhead: seconds that each prompt takes besides.
        transfer_rate: tokens whose attention a decode node reads in a second; ``hand_over`` seconds besides.
        step: seconds between two tokens of a stream.
    """

    prefills: int = 3
    decodes: int = 2
    shape: CacheShape = dataclasses.field(default_factory=CacheShape)
    prefill_rate: float = 8000.0
    overhead: float = 0.01
    transfer_rate: float = 200_000.0
    hand_over: float = 0.01
    step: float = 0.02

    def roles(self) -> Mapping[str, Role]:
        """Of all nodes, by name."""
        counts = ((Role.PREFILL, self.prefills), (Role.DECODE, self.decodes))
        return {f"{role}-{index}": role for role, count in counts for index in range(count)}


class SimulatedNode:
    """Caches, and until when it computes."""

    def __init__(self, fleet: Fleet) -> None:
        self.cache = HybridCache(fleet.shape)
        self.free_at = 0.0
        self.stalled = 0.0
        """Seconds that its streams had to wait for prompts until now."""
        self._fleet = fleet

    def compute(self, prompt: HashedPrompt, now: float) -> int:
        """Take a prompt in at the end of the queue; how many of its tokens are computed. It is done at ``free_at``."""
        computed = self.cache.compute(prompt)
        self.cache.take_events()
        self._busy(self._fleet.overhead + computed / self._fleet.prefill_rate, now)
        return computed

    def pull(self, prompt: HashedPrompt, now: float) -> tuple[int, int, float]:
        """Read a ticket: tokens moved, tokens computed here, and the seconds until it is done."""
        pulled = self.cache.pull(prompt)
        self.cache.take_events()
        self._busy(pulled.computed / self._fleet.prefill_rate, now)
        seconds = self._fleet.hand_over + pulled.moved / self._fleet.transfer_rate
        return pulled.moved, pulled.computed, seconds + self.free_at - now

    def _busy(self, seconds: float, now: float) -> None:
        self.free_at = max(now, self.free_at) + seconds
        self.stalled += seconds


class Simulation:
    """One run of a policy."""

    def __init__(self, routing: Routing, fleet: Fleet) -> None:
        self.fleet = fleet
        self.clock = FakeClock()
        self.pool = Pool(self.clock, CircuitBreakerConfig(slow_start=0))
        self.nodes = {name: SimulatedNode(fleet) for name in fleet.roles()}
        self._policy = PlanPolicy(routing=policy_named(routing))
        self._turns = itertools.count()
        self._rates = Rates()
        self._outcome = Outcome(routing, fleet.roles())
        for name, role in fleet.roles().items():
            node = dataclasses.replace(Node(name, f"http://{name}", role, MODEL), **_published(fleet.shape))
            self.pool.add(node)
            self.pool.admit(node)

    def run(self, trace: Trace) -> Outcome:
        """All requests, to their ends."""
        began, order, followers = self.clock.now(), itertools.count(), trace.followers()
        due = [
            (request.at, next(order), self._request(trace, number), number)
            for number, request in enumerate(trace.requests)
            if request.after is None
        ]
        heapq.heapify(due)
        while due:
            at, _, steps, number = heapq.heappop(due)
            self.clock.advance(began + at - self.clock.now())
            wait = next(steps, None)
            if wait is not None:
                heapq.heappush(due, (at + wait, next(order), steps, number))
                continue
            for follower in followers.get(number, ()):
                begins = at + trace.requests[follower].at
                heapq.heappush(due, (begins, next(order), self._request(trace, follower), follower))
        return self._outcome

    def hits(self, prompt: HashedPrompt) -> PromptHits:
        """What every place has cached of a prompt, what is in its queue included."""
        found = {Place(name): node.cache.hit(prompt) for name, node in self.nodes.items()}
        return PromptHits(
            prompt.tokens, HitSource.EVENTS, {place: hit for place, hit in found.items() if hit.attention}
        )

    def _request(self, trace: Trace, number: int) -> Iterator[float]:
        """One request from its arrival to its last token; yields the seconds until it goes on."""
        request = trace.requests[number]
        prompt, arrived = hashed(request.prompt, self.fleet.shape.step), self.clock.now()
        session = None if request.session is None else hash64(f"session {request.session}")
        chosen = self._plan(prompt, session, self.hits(prompt))
        with self._slot(chosen.decode, chosen, prompt, request.output) as slot:
            yield from self._first_token(chosen, prompt, slot)
            yield self.fleet.step
            self._outcome.answered(prompt.tokens, self.clock.now() - arrived)
            yield from self._stream(self.nodes[chosen.decode.name], request.output - 1)

    def _first_token(self, chosen: Plan, prompt: HashedPrompt, slot: Slot) -> Iterator[float]:
        """The prompt is computed, by either node, and handed over."""
        if chosen.prefill is None:
            yield from self._compute(chosen.decode, Work.LOCAL, prompt, chosen.decision)
            slot.prompt_computed()
            return
        with self._slot(chosen.prefill, chosen, prompt, 0):
            yield from self._compute(chosen.prefill, Work.PREFILL, prompt, chosen.decision)
        moved, computed, seconds = self.nodes[chosen.decode.name].pull(prompt, self.clock.now())
        self._outcome.computed[chosen.decode.name] += computed
        self._outcome.moved += moved
        yield seconds
        self._rates.took(Work.HAND_OVER, chosen.decode.name, moved, seconds + self.fleet.step)

    def _compute(self, node: Node, work: Work, prompt: HashedPrompt, decision: Decision | None) -> Iterator[float]:
        """Until the node is done with it, what waits there before it included."""
        began, simulated = self.clock.now(), self.nodes[node.name]
        computed = simulated.compute(prompt, began)
        self._outcome.computed[node.name] += computed
        if decision is not None:
            self._outcome.planned += decision.tokens - decision.computed
            self._outcome.resumed += prompt.tokens - computed
        yield simulated.free_at - began
        self._rates.computed(work, Place(node.name), computed, began, self.clock.now())

    def _slot(self, node: Node, chosen: Plan, prompt: HashedPrompt, output: int) -> Slot:
        """The leg's place in the proxy's pool, with what the plan says that it will compute there."""
        computes = node.role is Role.PREFILL or chosen.prefill is None
        expected = chosen.decision.computed if chosen.decision is not None else prompt.tokens
        held = Footprint(prompt.tokens + output, 1) if node.role is Role.DECODE else NO_FOOTPRINT
        return self.pool.acquire(node.name, LegLoad(0, expected if computes else 0, held))

    def _stream(self, decode: SimulatedNode, steps: int) -> Iterator[float]:
        """The tokens after the first; prompts that the node computes meanwhile delay them."""
        ends, stalled = self.clock.now() + steps * self.fleet.step, decode.stalled
        while self.clock.now() < ends:
            yield ends - self.clock.now()
            ends += decode.stalled - stalled
            stalled = decode.stalled

    def _plan(self, prompt: HashedPrompt, session: int | None, hits: PromptHits) -> Plan:
        needs = PlanInput(
            MODEL, session=session, prompt_tokens=prompt.tokens, prefix=hits, tokens=prompt.tokens, rates=self._rates
        )
        return plan(self.pool.snapshot(), needs, self._policy, next(self._turns))


def _published(shape: CacheShape) -> dict[str, Any]:
    """What a preflight would find out about such a node."""
    return {"capacity": shape.capacity, "block_size": shape.block_size, "prefix_match_unit": shape.unit}
