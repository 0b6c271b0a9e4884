"""What a plan costs does not grow with the nodes, but for the interpreter's own loops; and it stays the same plan."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.nodes.node import Bars, Node, NodeView, Role, State
from pdproxy.planning.allowed_pairs import lightest_allowed_pair
from pdproxy.planning.plan import PlanPolicy
from pdproxy.planning.plan_types import PlanInput
from tests.bench.plan_cost import pool_of, requests

MOST_CALLS = 120
"""Python functions that one request's plan and its two legs call."""


def calls(step: Callable[[], None]) -> int:
    """How many Python functions a step enters."""
    entered = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return entered


def calls_of_a_plan(nodes: int) -> int:
    steps: Iterator[None] = requests(pool_of(nodes), PlanPolicy(), lambda _: PlanInput("m"))
    for _ in range(3 * nodes):
        next(steps)
    return calls(lambda: next(steps))


def test_a_plan_of_many_nodes_calls_no_more_functions_than_one_of_few() -> None:
    few, many = calls_of_a_plan(100), calls_of_a_plan(800)
    assert few == many
    assert many <= MOST_CALLS


def view(name: str, active: int, weight: float = 1.0) -> NodeView:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return NodeView(Node(name, f"http://{name}", role, "m", weight=weight), State.UP, active)


def every_lightest_pair(prefills: list[NodeView], decodes: list[NodeView], bars: Bars) -> list[tuple[str, str]]:
    """The allowed pairs of the lowest load together, by trying all of them."""
    allowed = [(p, d) for p in prefills for d in decodes if bars.allow(p.node.name, d.node.name)]
    lowest = min((p.load + d.load for p, d in allowed), default=0.0)
    return [(p.node.name, d.node.name) for p, d in allowed if p.load + d.load == lowest]


@st.composite
def nodes_and_bars(draw: st.DrawFn) -> tuple[list[NodeView], list[NodeView], Bars]:
    loads = st.tuples(st.integers(0, 3), st.sampled_from([1.0, 2.0]))
    names = {role: [f"{role}{index}" for index in range(draw(st.integers(1, 5)))] for role in "pd"}
    prefills, decodes = ([view(name, *draw(loads)) for name in names[role]] for role in "pd")
    pairs = draw(st.sets(st.tuples(st.sampled_from(names["p"]), st.sampled_from(names["d"]))))
    alone = draw(st.sets(st.sampled_from([*names["p"], *names["d"]]), max_size=2))
    return prefills, decodes, Bars(dict.fromkeys(pairs, ""), dict.fromkeys(alone, ""))


@given(nodes_and_bars())
def test_the_lightest_allowed_pair_is_found_without_trying_all(
    made: tuple[list[NodeView], list[NodeView], Bars],
) -> None:
    prefills, decodes, bars = made
    wanted = every_lightest_pair(*made)
    found = [lightest_allowed_pair(prefills, decodes, bars, turn) for turn in range(max(1, len(wanted)))]
    assert sorted((p.node.name, d.node.name) for p, d in filter(None, found)) == sorted(wanted)


@pytest.mark.parametrize("barred", [1, 300])
def test_bars_do_not_make_a_plan_try_all_pairs(barred: int) -> None:
    prefills, decodes = ([view(f"{role}{index}", 0) for index in range(300)] for role in "pd")
    bars = Bars({(f"p{index}", "d0"): "" for index in range(barred)})
    entered = calls(lambda: lightest_allowed_pair(prefills, decodes, bars, 7) and None)
    assert entered < 10 * len(prefills), "of 90,000 pairs"
