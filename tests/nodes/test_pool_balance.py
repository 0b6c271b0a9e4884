"""A pool's counts balance, whatever happens to it."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.errors import Fault
from pdproxy.nodes.node import Footprint, Node, Role, State
from pdproxy.nodes.pool import Pool, UnknownNode
from pdproxy.nodes.pool_entry import LegLoad, Slot
from tests.fakes.clock import FakeClock
from tests.fakes.refused import refuse, serve

LEG = Footprint(10, 1)
NODES = {name: Node(name, f"http://{name}", (Role.DECODE,), "tiny") for name in ("a", "b")}
MOVES = st.tuples(
    st.sampled_from(
        ["occupy", "release", "good", "bad", "miss", "seen", "wait", "up", "drain", "terminate", "rejoin", "renew"]
    ),
    st.sampled_from(sorted(NODES)),
)


def play(pool: Pool, clock: FakeClock, legs: list[Slot], move: str, name: str) -> None:
    """One thing that happens."""
    moves: dict[str, Callable[[], object]] = {
        "occupy": lambda: (
            legs.append(pool.acquire(name, LegLoad(footprint=LEG))) if pool.view(name).takes_requests() else None
        ),
        "release": lambda: legs.pop(0).release() if legs else None,
        "good": lambda: serve(pool, name),
        "bad": lambda: refuse(pool, name, requests=1),
        "miss": lambda: pool.probed(name, Fault.REFUSED, clock.now()),
        "seen": lambda: pool.probed(name, None, clock.now()),
        "wait": lambda: clock.advance(7),
        "up": lambda: pool.bring_up(NODES[name]),
        "drain": lambda: pool.drain(name),
        "terminate": lambda: pool.terminate(name),
        "rejoin": lambda: pool.rejoin(name),
        "renew": lambda: (pool.remove(name), pool.add(NODES[name])),  # type: ignore[func-returns-value]
    }
    moves[move]()


@given(st.lists(MOVES, max_size=80))
def test_counts_balance_and_trials_stay_single(moves: list[tuple[str, str]]) -> None:
    clock = FakeClock()
    pool, legs = Pool(clock), list[Slot]()
    for node in NODES.values():
        pool.add(node)
        pool.bring_up(node)
    for move, name in moves:
        play(pool, clock, legs, move, name)
        for view in pool.state().nodes:
            assert view.active >= 0
            assert view.footprint == Footprint(10 * view.active, view.active)
            assert 0 <= view.trials <= (1 if view.state is State.PROBING else view.active)
    for leg in legs:
        leg.release()
    for view in pool.state().nodes:
        assert (view.active, view.trials) == (0, 0)
        assert pool.idle(view.node.name).is_set()


@pytest.mark.parametrize("ask", ["view", "acquire", "leaving", "drain", "terminate", "rejoin", "configured", "idle"])
def test_a_pool_without_the_node_raises(ask: str) -> None:
    with pytest.raises(UnknownNode) as caught:
        getattr(Pool(FakeClock()), ask)("absent")
    assert caught.value.name == "absent"
