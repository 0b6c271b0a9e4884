"""The cost of one plan in a pool of many nodes: ``python -m deploy.bench.plan_cost``.

Each round does what one request does: the state of the pool, a plan, a leg on each of the two nodes, and the end of
the oldest request's legs. With `cache` every prompt is cached on four places of each role, or on all, as one that
begins with a system prompt is; its legs carry their tokens, and the paces of half of the nodes are known, and how
busy they were. "May resume": decode nodes may compute the rest of a prompt themselves. CPU time, the best of several
runs.
"""

import collections
import itertools
import time
from collections.abc import Callable, Iterator

from pdproxy.clock import SystemClock
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.load import Work
from pdproxy.nodes.node import Footprint, Node, PlaceSet, Role, hash64
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import NO_LOAD, LegLoad, Slot
from pdproxy.planning.cache_aware import ITL_BUDGET
from pdproxy.planning.plan import PlanPolicy, plan
from pdproxy.planning.plan_types import PlanInput
from pdproxy.planning.policies import policy_named
from pdproxy.planning.prefix import Hit, HitSource, Place, PromptHits
from pdproxy.settings.types import Routing

NODES = (10, 100, 1000)
IN_FLIGHT = 4
"""Requests that run at once, for each pair of nodes."""
ROUNDS, RUNS = 500, 5
TOKENS, CACHED_ON = 4000, 4
"""Tokens of a prompt, and the places of each role that have it cached."""


def pool_of(nodes: int, slow_start: float = 0.0) -> Pool:
    """A pool of so many nodes, half of each role, all up."""
    pool = Pool(SystemClock(), CircuitBreakerConfig(slow_start=slow_start))
    for number, role in itertools.product(range(nodes // 2), Role):
        node = Node(f"{role}-{number}", f"http://10.0.0.1:{number}", (role,), "m", cohort="c")
        pool.add(node)
        pool.bring_up(node)
    return pool


def requests(pool: Pool, policy: PlanPolicy, needs: Callable[[int], PlanInput]) -> Iterator[None]:
    """One request for each step, without an end."""
    held = collections.deque[list[Slot]]()
    most = IN_FLIGHT * len(pool.state().nodes) // 2
    for turn in itertools.count():
        chosen = plan(pool.state(), needs(turn), policy, turn)
        queued, legs = chosen.computed, []
        if chosen.prefill is not None:
            legs.append(pool.acquire(chosen.prefill.name, LegLoad(chosen.prefill_rank, queued) if queued else NO_LOAD))
        alone = queued if chosen.prefill is None else None
        legs.append(
            pool.acquire(
                chosen.decode.name, LegLoad(chosen.decode_rank, alone, Footprint(TOKENS, 1)) if queued else NO_LOAD
            )
        )
        held.append(legs)
        if len(held) > most:
            for slot in held.popleft():
                slot.release()
        yield


def microseconds(steps: Iterator[None]) -> float:
    """CPU time of a step."""
    best = float("inf")
    for _ in range(RUNS):
        began = time.process_time()
        collections.deque(itertools.islice(steps, ROUNDS), maxlen=0)
        best = min(best, time.process_time() - began)
    return best / ROUNDS * 1e6


def a_session(turn: int) -> PlanInput:
    """A request of one of as many sessions as there are requests."""
    return PlanInput("m", session=hash64(str(turn)))


class CachedPrompts:
    """Requests whose prompts are cached on some places of a pool, of which half were seen to work."""

    def __init__(self, pool: Pool, cached_on: int = CACHED_ON) -> None:
        self._cached_on = cached_on
        book, half = pool.load, len(pool.state().nodes) // 2
        for number in range(0, half, 2):
            seconds = 0.4 + 0.001 * (number % 7)
            prefill = pool.view(f"prefill-{number}").lightest
            book.computed(Work.PREFILL, prefill, TOKENS, number, number + seconds)
            book.prefilled(prefill, 1, seconds, number, number + seconds)
            book.learn(Work.HAND_OVER, pool.view(f"decode-{number}").lightest, TOKENS, 0.02)
        self._needs = [self._one(turn, half) for turn in range(2 * half + 1)]

    def __call__(self, turn: int) -> PlanInput:
        """One of them."""
        return self._needs[turn % len(self._needs)]

    def _one(self, turn: int, half: int) -> PlanInput:
        homes = [(turn * 7 + place) % half for place in range(min(self._cached_on, half))]
        places = PlaceSet([Place(f"{role}-{home}") for role in Role for home in homes])
        prefix = PromptHits(TOKENS, HitSource.EVENTS, [(Hit(TOKENS - 400, TOKENS - 500), places)])
        return PlanInput("m", session=hash64(str(turn)), prefix=prefix)


def main() -> None:
    """Print a line for each policy and size of pool."""
    for routing, nodes in itertools.product(Routing, NODES):
        if routing is not Routing.CACHE:
            print_cost(f"{routing}", pool_of(nodes), routing, a_session)
            continue
        for where, cached_on in (("", CACHED_ON), (", everywhere", nodes)):
            for resuming, itl_budget in (("", 0.0), (", may resume", ITL_BUDGET)):
                pool = pool_of(nodes)
                print_cost(f"{routing}{where}{resuming}", pool, routing, CachedPrompts(pool, cached_on), itl_budget)


def print_cost(
    what: str, pool: Pool, routing: Routing, needs: Callable[[int], PlanInput], itl_budget: float = 0.0
) -> None:
    """Print a line, when the pool has had some requests. ``itl_budget``: see `CacheAware`."""
    nodes = len(pool.state().nodes)
    steps = requests(pool, PlanPolicy(policy_named(routing, itl_budget)), needs)
    collections.deque(itertools.islice(steps, 3 * nodes), maxlen=0)
    print(f"{what:29} {nodes:5} nodes: {microseconds(steps):7.1f} us", flush=True)


if __name__ == "__main__":
    main()
