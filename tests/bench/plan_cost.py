"""What one plan costs in a pool of many nodes: ``python -m tests.bench.plan_cost``.

Each round does what one request does: a snapshot, a plan, a leg on each of the two nodes, and the end of the oldest
request's legs. CPU time, the best of several runs.
"""

import collections
import itertools
import time
from collections.abc import Callable, Iterator

from pdproxy.clock import SystemClock
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.node import Node, Role, hash64
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import Slot
from pdproxy.planning.plan import PlanPolicy, plan
from pdproxy.planning.plan_types import PlanInput
from pdproxy.planning.policies import policy_named
from pdproxy.settings.types import Routing

NODES = (10, 100, 1000)
IN_FLIGHT = 4
"""Requests that run at once, for each pair of nodes."""
ROUNDS, RUNS = 500, 5


def pool_of(nodes: int, slow_start: float = 0.0) -> Pool:
    """A pool of so many nodes, half of each role, all up."""
    pool = Pool(SystemClock(), CircuitBreakerConfig(slow_start=slow_start))
    for number, role in itertools.product(range(nodes // 2), Role):
        node = Node(f"{role}-{number}", f"http://10.0.0.1:{number}", role, "m", cohort="c")
        pool.add(node)
        pool.admit(node)
    return pool


def requests(pool: Pool, policy: PlanPolicy, needs: Callable[[int], PlanInput]) -> Iterator[None]:
    """One request for each step, without an end."""
    held = collections.deque[tuple[Slot, Slot]]()
    most = IN_FLIGHT * len(pool.snapshot().nodes) // 2
    for turn in itertools.count():
        chosen = plan(pool.snapshot(), needs(turn), policy, turn)
        assert chosen.prefill is not None
        held.append((pool.acquire(chosen.prefill.name), pool.acquire(chosen.decode.name)))
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


def main() -> None:
    """Print a line for each policy and size of pool."""
    for routing, nodes in itertools.product(Routing, NODES):
        steps = requests(pool_of(nodes), PlanPolicy(routing=policy_named(routing)), a_session)
        collections.deque(itertools.islice(steps, 3 * nodes), maxlen=0)
        print(f"{routing:13} {nodes:5} nodes: {microseconds(steps):7.1f} us")


if __name__ == "__main__":
    main()
