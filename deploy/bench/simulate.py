"""A trace on simulated nodes, in one process on a clock that is set; pool, plans and policies are the proxy's own.

The nodes are arithmetic. A prefill node computes one prompt after the other, at a rate, from where its caches let it
resume when its turn comes: what waits before it may evict what it would have found. A decode node reads what it has not
cached, at a rate, and gives a token in each step; a prompt that it computes itself stops its streams for as long. The
planner is told what is cached by the proxy's own index, from the events of the caches, which come without delay.
"""

import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from deploy.bench.hybrid_cache import CacheEvent, CacheShape, HashedPrompt, HybridCache, Kind, Removed
from deploy.bench.kv_events import ROOT
from deploy.bench.outcome import Outcome
from deploy.bench.traces import Trace, hashed
from pdproxy.events.prefix_source import EXPECTED_SECONDS
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.load import Work
from pdproxy.nodes.node import NO_FOOTPRINT, Footprint, Node, Role, hash64
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import LegLoad, Slot
from pdproxy.planning.block_hashes import HashAlgorithm, HashScheme
from pdproxy.planning.cache_aware import ITL_BUDGET
from pdproxy.planning.cache_events import BlocksRemoved, BlocksStored, GroupKind
from pdproxy.planning.plan import PlanPolicy, plan
from pdproxy.planning.plan_types import Plan, PlanInput
from pdproxy.planning.policies import policy_named
from pdproxy.planning.prefix import HitSource, Place, PromptHits
from pdproxy.planning.prefix_index import PrefixIndex
from pdproxy.settings.types import Routing
from tests.fakes.clock import FakeClock

MODEL = "m"
LEAST_WAIT = 1e-6
"""Seconds: a prompt whose turn comes at this very moment looks again a little later."""


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
        """The roles of all nodes, by name."""
        counts = ((Role.PREFILL, self.prefills), (Role.DECODE, self.decodes))
        return {f"{role}-{index}": role for role, count in counts for index in range(count)}


class SimulatedNode:
    """Caches, what waits to be computed, and until when it computes.

    Attributes:
        told: what the caches say of themselves goes there.
    """

    def __init__(self, fleet: Fleet, told: Callable[[CacheEvent], None]) -> None:
        self.cache = HybridCache(fleet.shape)
        self.told = told
        self.queue: deque[HashedPrompt] = deque()
        """In turn; the first is being computed."""
        self.free_at = 0.0
        self.stalled = 0.0
        """Seconds that its streams had to wait for prompts until now."""
        self._fleet = fleet

    def compute(self, prompt: HashedPrompt, clock: FakeClock) -> Generator[float, None, int]:
        """Wait for the prompt's turn and compute it: how many of its tokens were. Yields the seconds to wait."""
        self.queue.append(prompt)
        while self.queue[0] is not prompt or self.free_at > clock.now():
            yield max(LEAST_WAIT, self.free_at - clock.now())
        computed = self.cache.compute(prompt)
        self._busy(self._fleet.overhead + computed / self._fleet.prefill_rate, clock.now())
        yield self.free_at - clock.now()
        self.queue.popleft()
        self._tell()
        return computed

    def pull(self, prompt: HashedPrompt, now: float) -> tuple[int, int, float]:
        """Read a ticket: tokens moved, tokens computed here, and the seconds until it is done."""
        pulled = self.cache.pull(prompt)
        self._tell()
        self._busy(pulled.computed / self._fleet.prefill_rate, now)
        seconds = self._fleet.hand_over + pulled.moved / self._fleet.transfer_rate
        return pulled.moved, pulled.computed, seconds + self.free_at - now

    def _tell(self) -> None:
        for event in self.cache.take_events():
            self.told(event)

    def _busy(self, seconds: float, now: float) -> None:
        self.free_at = max(now, self.free_at) + seconds
        self.stalled += seconds


class Simulation:
    """One run of a policy; ``itl_budget`` as in `CacheAware`, for `cache`."""

    def __init__(self, routing: Routing, fleet: Fleet, itl_budget: float = ITL_BUDGET) -> None:
        self.fleet = fleet
        self.clock = FakeClock()
        self.pool = Pool(self.clock, CircuitBreakerConfig(slow_start=0))
        self.index = PrefixIndex(_scheme(fleet.shape))
        self.nodes = {name: SimulatedNode(fleet, self._telling(Place(name))) for name in fleet.roles()}
        self._policy = PlanPolicy(policy_named(routing, itl_budget))
        self._turns = itertools.count()
        self._outcome = Outcome(routing, fleet.roles())
        for name, role in fleet.roles().items():
            node = dataclasses.replace(Node(name, f"http://{name}", (role,), MODEL), **_published(fleet.shape))
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
        """The cached part of a prompt at every place, as far as it is known, with what was just sent there."""
        found = self.index.look_up(prompt.hashes, prompt.tokens, self.clock.now())
        return PromptHits(prompt.tokens, HitSource.EVENTS, found)

    def _request(self, trace: Trace, number: int) -> Iterator[float]:
        """One request from its arrival to its last token; yields the seconds until it goes on."""
        request = trace.requests[number]
        prompt, arrived = hashed(request.prompt, self.fleet.shape.step), self.clock.now()
        session = None if request.session is None else hash64(f"session {request.session}")
        chosen = self._plan(prompt, session, self.hits(prompt))
        self._expect(chosen, prompt)
        with self._slot(chosen.decode, chosen, prompt, request.output) as slot:
            yield from self._first_token(chosen, prompt, slot)
            yield self.fleet.step
            self._outcome.answered(prompt.tokens, self.clock.now() - arrived)
            yield from self._stream(self.nodes[chosen.decode.name], request.output - 1)

    def _expect(self, chosen: Plan, prompt: HashedPrompt) -> None:
        """As `EventPrefixSource.routed` does."""
        hit, until = self.index.after_prefill(prompt.tokens), self.clock.now() + EXPECTED_SECONDS
        computing = chosen.prefill or chosen.decode
        self.index.expect(Place(computing.name), prompt.hashes, hit, until)

    def _telling(self, place: Place) -> Callable[[CacheEvent], None]:
        return lambda event: self.index.apply(place, _as_read(event, self.fleet.shape))

    def _first_token(self, chosen: Plan, prompt: HashedPrompt, slot: Slot) -> Iterator[float]:
        """The prompt is computed, by either node, and handed over."""
        if chosen.prefill is None:
            yield from self._compute(chosen.decode, slot, prompt, chosen)
            return
        with self._slot(chosen.prefill, chosen, prompt, 0) as prefilling:
            yield from self._compute(chosen.prefill, prefilling, prompt, chosen)
        began = self.clock.now()
        moved, computed, seconds = self.nodes[chosen.decode.name].pull(prompt, began)
        self._outcome.computed[chosen.decode.name] += computed
        self._outcome.moved += moved
        yield seconds
        place = self.pool.view(chosen.decode.name).lightest
        seconds = place.seconds_alone(began, self.clock.now() + self.fleet.step)
        self.pool.load.learn(Work.HAND_OVER, place, moved, seconds)

    def _compute(self, node: Node, slot: Slot, prompt: HashedPrompt, chosen: Plan) -> Iterator[float]:
        """Until the node is done with it, what waits there before it included."""
        computed = yield from self.nodes[node.name].compute(prompt, self.clock)
        self._outcome.computed[node.name] += computed
        if chosen.reason is not None:
            self._outcome.planned += chosen.tokens - chosen.computed
            self._outcome.resumed += prompt.tokens - computed
        slot.computed(computed)

    def _slot(self, node: Node, chosen: Plan, prompt: HashedPrompt, output: int) -> Slot:
        """The leg's place in the proxy's pool, with what the plan says that it will compute there."""
        computes = Role.PREFILL in node.roles or chosen.prefill is None
        expected = prompt.tokens if chosen.reason is None else chosen.computed
        held = Footprint(prompt.tokens + output, 1) if Role.DECODE in node.roles else NO_FOOTPRINT
        return self.pool.acquire(node.name, LegLoad(0, expected if computes else None, held))

    def _stream(self, decode: SimulatedNode, steps: int) -> Iterator[float]:
        """The tokens after the first; prompts that the node computes meanwhile delay them."""
        ends, stalled = self.clock.now() + steps * self.fleet.step, decode.stalled
        while self.clock.now() < ends:
            yield ends - self.clock.now()
            ends += decode.stalled - stalled
            stalled = decode.stalled

    def _plan(self, prompt: HashedPrompt, session: int | None, hits: PromptHits) -> Plan:
        needs = PlanInput(MODEL, session=session, prefix=hits, tokens=prompt.tokens)
        return plan(self.pool.snapshot(), needs, self._policy, next(self._turns))


def _published(shape: CacheShape) -> dict[str, Any]:
    """The facts that a preflight would find out about such a node."""
    return {"capacity": shape.capacity, "block_size": shape.block_size, "prefix_match_unit": shape.unit}


def _scheme(shape: CacheShape) -> HashScheme:
    return HashScheme(HashAlgorithm.SHA256_CBOR, shape.step, shape.block_size, ROOT, states=shape.state_groups > 0)


def _as_read(event: CacheEvent, shape: CacheShape) -> BlocksStored | BlocksRemoved:
    """An event as the proxy reads it; one state group stands for all, which hold the same."""
    kind = GroupKind.STATE if event.kind is Kind.STATE else GroupKind.ATTENTION
    group = list(GroupKind).index(kind)
    if isinstance(event, Removed):
        return BlocksRemoved(group, (event.hash,))
    return BlocksStored(group, kind, event.hashes, shape.step)
