"""The cost of a plan does not grow with the nodes, but for the interpreter's own loops; and it stays the same plan."""

import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.bench.calls import Counted, counting
from deploy.bench.plan_cost import CachedPrompts, pool_of, requests
from pdproxy.nodes.load import Load, Work
from pdproxy.nodes.node import Bars, Binding, Capacity, Footprint, Node, NodeView, PoolState, Role, State
from pdproxy.planning.allowed_pairs import lightest_allowed_pair
from pdproxy.planning.cache_aware import FIRST_TURN, ITL_BUDGET, CacheAware, Comparison
from pdproxy.planning.cost import Cost, LocalCost, with_agents
from pdproxy.planning.plan import LEAST_LOADED, Candidates, PlanPolicy
from pdproxy.planning.plan_types import NextTurn, PlanInput
from pdproxy.planning.prefix import Hit, HitSource, Place, PromptHits
from tests.fakes.calls import calls
from tests.fakes.views import view_of
from tests.planning.hits import hit_places

MOST_CALLS = 120
"""Python functions that one request's plan and its two legs call."""


def calls_of_a_plan(nodes: int) -> int:
    steps: Iterator[None] = requests(pool_of(nodes), PlanPolicy(LEAST_LOADED), lambda _: PlanInput("m"))
    for _ in range(3 * nodes):
        next(steps)
    return calls(lambda: next(steps))


def test_a_plan_of_many_nodes_calls_no_more_functions_than_one_of_few() -> None:
    few, many = calls_of_a_plan(100), calls_of_a_plan(800)
    assert few == many
    assert many <= MOST_CALLS


def bytecodes_of_a_plan(nodes: int, cached_on: int, itl_budget: float = 0.0) -> int:
    """The fewest of some plans by what is cached on so many places of each role; some meet a rare step of learning."""
    pool, found = pool_of(nodes), list[int]()
    steps = requests(pool, PlanPolicy(CacheAware(itl_budget)), CachedPrompts(pool, cached_on))
    for _ in range(3 * nodes):
        next(steps)
    for _ in range(8):
        with counting(counted := Counted()):
            next(steps)
        found.append(counted.bytecodes.total())
    return min(found)


@pytest.mark.parametrize(("cached_on", "most"), [(0, 30), (4, 13), (1000, 30)])
def test_a_plan_by_what_is_cached_takes_few_steps_for_each_further_node(cached_on: int, most: int) -> None:
    """Bytecodes; a whole request takes 12,000 and more."""
    few, many = bytecodes_of_a_plan(20, cached_on), bytecodes_of_a_plan(120, cached_on)
    assert many - few < most * 100


@pytest.mark.parametrize(("itl_budget", "most"), [(0.001, 30), (0.5, 65)], ids=["never", "everywhere"])
def test_a_plan_where_decode_nodes_may_resume_takes_few_steps_for_each_further_node(
    itl_budget: float, most: int
) -> None:
    """The prompt is cached everywhere. Where no node may compute the rest within the budget, none is looked at."""
    few, many = (bytecodes_of_a_plan(nodes, 1000, itl_budget) for nodes in (20, 120))
    assert many - few < most * 100


def bytecodes_of_charging(nodes: int, home: Place | None) -> int:
    capacity = Capacity(1000, None, 10, Binding.ATTENTION)
    views = [
        view_of(Node(f"p{n}", f"http://p{n}", (Role.PREFILL,), "m", capacity=capacity), State.UP) for n in range(nodes)
    ]
    spots = {(each.name, 0): each.spot for each in views}
    turn = NextTurn(30.0, 8000.0, home=home, others={Place("p0"): 1.0})
    with counting(counted := Counted()):
        charged = with_agents({}, turn, 4000, spots)
    assert any(charged.values())
    return counted.bytecodes.total()


@pytest.mark.parametrize(("home", "most"), [(None, 0), (Place("p0"), 70)], ids=["begins", "goes on"])
def test_a_large_prompt_is_charged_in_few_steps_for_each_node(home: Place | None, most: int) -> None:
    """Bytecodes: for each place of other agents as one begins, for each node where it may move. A conversation that is
    charged nothing takes none: `Comparison` does not ask."""
    assert bytecodes_of_charging(120, home) - bytecodes_of_charging(20, home) <= most * 100


def test_to_find_silent_nodes_calls_no_function_for_each_node() -> None:
    few, many = pool_of(2), pool_of(200)
    assert calls(lambda: few.silent(0.0)) == calls(lambda: many.silent(0.0))


def view(name: str, active: int, weight: float = 1.0) -> NodeView:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return view_of(Node(name, f"http://{name}", (role,), "m", weight=weight), State.UP, active)


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
    entered = calls(lambda: lightest_allowed_pair(prefills, decodes, bars, 7))
    assert entered < 10 * len(prefills), "of 90,000 pairs"


class Unbounded:
    """A cost that says nothing of what nodes cost at least which have cached nothing: all of them are looked at."""

    def __init__(self, cost: Cost) -> None:
        self.scores, self.seconds, self.role = cost.scores, cost.seconds, cost.role

    def least_fresh(self, views: Sequence[NodeView], heaviest: float) -> float:
        """Less than any."""
        return -math.inf


def loaded(name: str, role: Role, draw: st.DrawFn) -> NodeView:
    """A node with legs, tokens that wait, and slow start."""
    legs, capacity = draw(st.integers(2, 4)), draw(st.sampled_from([None, Capacity(1000, 8, 4, Binding.STATE)]))
    node = Node(name, f"http://{name}", (role,), "m", weight=draw(st.sampled_from([1.0, 1.0, 0.3])), capacity=capacity)
    queued, held = draw(st.integers(0, 4000)), Footprint(draw(st.integers(0, 1200)), legs)
    share = draw(st.sampled_from([1.0, 1.0, 0.3]))
    return view_of(node, State.UP, legs, share, legs=(legs,), queued=(queued,), held=(held,))


@st.composite
def comparisons(draw: st.DrawFn) -> Comparison:
    """A prompt of which some nodes have a part, before nodes of different pace."""
    views = [loaded(f"{role}{index}", role, draw) for role in Role for index in range(draw(st.integers(1, 6)))]
    book, tokens = Load(), draw(st.integers(1, 4000))
    names, seconds = st.sampled_from([view.name for view in views]), st.floats(0.001, 0.1)
    learning = st.tuples(st.sampled_from(views), st.sampled_from(Work), seconds)
    for learned, work, took in draw(st.lists(learning, max_size=8)):
        book.learn(work, learned.lightest, tokens, took)
        book.prefilled(learned.lightest, 1, took, 1.0, 1.0 + took)
    cached = draw(st.dictionaries(names, st.integers(1, tokens), max_size=4))
    hits = {Place(name): Hit(part, draw(st.integers(0, part))) for name, part in cached.items()}
    places = st.sampled_from([Place(view.name) for view in views])
    home, agents = draw(st.none() | places), draw(st.dictionaries(places, st.floats(0.1, 5.0)))
    turn = draw(st.none() | st.just(NextTurn(30.0, tokens, home=home, others=agents)))
    needs = PlanInput("m", prefix=PromptHits(tokens, HitSource.EVENTS, hit_places(hits)), next_turn=turn)
    return Comparison(CacheAware(), Candidates(PoolState(tuple(views), load=book), needs))


@settings(max_examples=200)  # few of them have nodes that cost nearly the same
@given(comparisons(), st.integers(0, 20))
def test_nodes_that_are_not_looked_at_could_not_have_been_chosen(compared: Comparison, turn: int) -> None:
    costs: list[tuple[Cost, Role]] = [
        (compared.prefill, Role.PREFILL), (compared.hand_over, Role.DECODE), (compared.local(), Role.DECODE)
    ]  # fmt: skip
    for cost, role in costs:
        views, hits = compared.candidates.open(role), compared.hits(role)
        assert compared.best(cost, views, hits, turn) == compared.best(Unbounded(cost), views, hits, turn)


@settings(max_examples=200)
@given(comparisons())
def test_the_decode_node_that_resumes_is_the_cheapest_whose_streams_wait_within_the_budget(
    compared: Comparison,
) -> None:
    cost = LocalCost(compared.tokens, compared.candidates.book)
    resuming = [each for each in compared.hits(Role.DECODE) if each[0].resume]
    furthest = compared.furthest(Role.PREFILL)
    fitting = [
        each
        for each in compared.all_estimates(cost, (), resuming)
        if cost.stall(each.hit, each.place) <= ITL_BUDGET * (1.0 if each.hit.resume > furthest else FIRST_TURN)
    ]
    assert compared.best_resuming() == min(fitting, key=lambda each: each.score, default=None)
