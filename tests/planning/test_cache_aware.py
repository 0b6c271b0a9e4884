"""Plans by what is cached: the policy `cache`."""

import collections
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.nodes.load import Load, Work
from pdproxy.nodes.node import BOTH, Bars, Binding, Capacity, Footprint, Node, NodeView, PoolState, Role, State
from pdproxy.planning.cache_aware import CacheAware, best_allowed_pair
from pdproxy.planning.cost import Estimate
from pdproxy.planning.plan import PlanPolicy, choose, plan
from pdproxy.planning.plan_types import NextTurn, Plan, PlanInput
from pdproxy.planning.prefix import NO_HIT, Hit, HitSource, Place, PromptHits
from pdproxy.reasons import LocalReason, RouteReason
from tests.fakes.views import view_of
from tests.planning.hits import hit_places

BY_CACHE = PlanPolicy(CacheAware())
TOKENS = 4000
NO_BARS = Bars()


def view(name: str, queued: int | tuple[int, ...] = 0, state: State = State.UP, **more: object) -> NodeView:
    """A node whose role is its first letter, with so many tokens to compute on its ranks."""
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    of_view: dict[str, object] = {key: more.pop(key) for key in ("legs", "held") if key in more}
    of_view["queued"] = queued if isinstance(queued, tuple) else (queued,)
    node = Node(name, f"http://{name}", (role,), "m", **more)  # type: ignore[arg-type]
    return view_of(node, state, 0, **of_view)  # type: ignore[arg-type]


def make(
    *views: NodeView,
    hits: Mapping[str, tuple[int, int]] | None = None,
    policy: PlanPolicy = BY_CACHE,
    turn: int = 0,
    bars: Bars = NO_BARS,
    tokens: int = TOKENS,
    source: HitSource = HitSource.EVENTS,
    book: Load | None = None,
    stays: Mapping[str, float] = MappingProxyType({}),
    **needs: object,
) -> Plan:
    """``hits``: attention and resume by place, as in "p1" or "p1/2"."""
    places = {
        Place(name.split("/")[0], int([*name.split("/"), "0"][1])): Hit(*hit) for name, hit in (hits or {}).items()
    }
    remain = {Place(name): seconds for name, seconds in stays.items()}
    prefix = None if hits is None else PromptHits(tokens, source, hit_places(places), remain)
    return plan(PoolState(views, bars, book), PlanInput("m", prefix=prefix, tokens=tokens, **needs), policy, turn)  # type: ignore[arg-type]


def names(made: Plan) -> tuple[str | None, str]:
    return (made.prefill.name if made.prefill else None), made.decode.name


def reason(made: Plan) -> RouteReason:
    assert made.reason is not None
    return made.reason


PAIRS = (view("p1"), view("p2"), view("d1"), view("d2"))
"""Their places are as fast as any: no test lets them learn."""


@pytest.mark.parametrize("turn", [0, 1])
def test_a_prompt_goes_where_it_is_cached(turn: int) -> None:
    made = make(*PAIRS, hits={"p2": (3584, 3584), "d1": (3584, 0)}, turn=turn)
    assert names(made) == ("p2", "d1") if turn == 0 else ("p2", made.decode.name)
    assert reason(made) is RouteReason.CACHED
    assert made.computed == TOKENS - 3584


def test_attention_without_a_state_is_no_use_to_a_hybrid_prefill_node() -> None:
    made = make(view("p1"), view("p2"), view("d1"), hits={"p1": (1280, 0), "p2": (1024, 1024)})
    assert names(made)[0] == "p2"


def test_a_decode_node_with_a_ticket_needs_attention_alone() -> None:
    book, slow = Load(), view("d1")
    for _ in range(20):
        book.learn(Work.HAND_OVER, slow.lightest, 1000, 0.5)
    made = make(view("p1"), slow, view("d2"), hits={"d2": (3584, 0)}, book=book)
    assert names(made)[1] == "d2"


def test_a_long_queue_outweighs_a_hit() -> None:
    hits = {"p1": (2048, 2048)}
    assert names(make(view("p1", 1000), view("p2"), view("d1"), hits=hits))[0] == "p1"
    made = make(view("p1", 9000), view("p2"), view("d1"), hits=hits)
    assert names(made)[0] == "p2"
    assert reason(made) is RouteReason.LOAD


def test_a_shared_prefix_stays_until_the_queue_costs_more_than_a_second_copy_computed_twice() -> None:
    hits = {"p1": (1280, 1280)}
    where = [names(make(view("p1", queued), view("p2"), view("d1"), hits=hits))[0] for queued in (1200, 2300, 3200)]
    assert where == ["p1", "p1", "p2"]


def test_without_states_a_copy_costs_no_second_computing() -> None:
    dense = Capacity(100_000, None, 10, Binding.ATTENTION)
    views = (view("p1", 2300, capacity=dense), view("p2", capacity=dense), view("d1", capacity=dense))
    assert names(make(*views, hits={"p1": (1280, 1280)}))[0] == "p2"


def test_the_second_meeting_of_a_prefix_is_where_the_first_was() -> None:
    for turn in range(2):
        made = make(*PAIRS, hits={"p2": (1280, 0)}, turn=turn)
        assert names(made)[0] == "p2"
        assert reason(made) is RouteReason.BRANCH


def test_where_nothing_is_cached_idle_nodes_take_turns_and_busy_ones_wait() -> None:
    made = [make(*PAIRS, hits={}, turn=turn) for turn in range(4)]
    assert collections.Counter(each.prefill.name for each in made if each.prefill) == {"p1": 2, "p2": 2}
    assert reason(made[0]) is RouteReason.NOTHING_CACHED
    assert names(make(view("p1", 5000), view("p2", 100), view("d1"), hits={}))[0] == "p2"


def test_of_idle_nodes_the_one_that_did_least_lately_gets_a_new_prompt() -> None:
    book, views = Load(), [view(name) for name in ("p1", "p2", "p3", "d1")]
    for each, tokens in zip(views, (3000, 1000, 2000), strict=False):
        book.learn(Work.PREFILL, each.lightest, tokens, 0.01 + tokens / 8000)
    assert {names(make(*views, hits={}, book=book, turn=turn))[0] for turn in range(6)} == {"p2"}


def prefill(book: Load, node: NodeView, tokens: int, began: float, now: float) -> None:
    """A prefill leg ran on a node from then until now."""
    seconds = book.computed(Work.PREFILL, node.lightest, tokens, began, now)
    book.prefilled(node.lightest, node.node.ranks, seconds, began, now)


def busy(*shares: tuple[NodeView, float]) -> Load:
    """For a minute prefill nodes computed prompts for such shares of their time, none of them slower than others."""
    book = Load()
    for second in range(60):
        for node, share in shares:
            prefill(book, node, int(8000 * (share - 0.01)), second, second + share)
    return book


SYSTEM = {"p1": (1280, 1280), "p2": (1280, 1280)}


def test_of_two_places_that_have_a_system_prompt_the_one_that_is_less_busy_gets_a_conversation() -> None:
    views = (view("p1"), view("p2", 4000), view("d1"))
    assert names(make(*views, hits=SYSTEM))[0] == "p1"
    assert names(make(*views, hits=SYSTEM, book=busy((views[0], 0.6), (views[1], 0.1))))[0] == "p2"


def test_a_conversation_does_not_leave_its_place_for_being_busy_there_itself() -> None:
    home = view("p1")
    made = make(home, view("p2"), view("d1"), hits={"p1": (3584, 3584)}, book=busy((home, 0.15)))
    assert names(made)[0] == "p1"


def test_a_prompt_that_must_be_computed_whole_leaves_a_busy_place_to_those_that_hit_there() -> None:
    """Its state was evicted: no place can resume it, and what it would leave here, it leaves elsewhere too."""
    views, hits, book = (view("p1"), view("p2"), view("d1")), {"p1": (3584, 0), "p2": (1280, 0)}, Load()
    assert names(make(*views, hits=hits))[0] == "p1"
    for number in range(1500):  # many of few tokens, to which half a second is long
        prefill(book, views[0], 1, number * 0.02, number * 0.02 + 0.01)
    assert names(make(*views, hits=hits, book=book))[0] == "p2"


def test_a_prompt_that_no_place_has_cached_goes_by_queues_alone() -> None:
    views = (view("p1"), view("p2", 500), view("d1"))
    book = busy((views[0], 0.8))
    assert names(make(*views, hits={}, book=book))[0] == "p1"
    assert names(make(*views, book=book))[0] == "p1"


def test_a_quick_node_gets_more() -> None:
    book, slow, quick = Load(), view("p1"), view("p2", 4000)
    for _ in range(30):
        book.learn(Work.PREFILL, slow.lightest, 2000, 1.0)
        book.learn(Work.PREFILL, quick.lightest, 2000, 0.2)
    assert names(make(slow, quick, view("d1"), hits={}, book=book))[0] == "p2"


def test_weight_and_slow_start_count() -> None:
    assert names(make(view("p1", 4000, weight=4.0), view("p2"), view("d1"), hits={}))[0] == "p1"


def test_nodes_that_may_not_take_it_are_no_hits() -> None:
    hits = {"p1": (3584, 3584), "d1": (3584, 3584), "gone": (3584, 3584), "p1/9": (3584, 3584)}
    down = make(view("p1", 0, State.DOWN), view("p2"), view("d1", 0, State.DRAINING), view("d2"), hits=hits)
    assert names(down) == ("p2", "d2")
    assert names(make(*PAIRS, hits=hits, excluded=frozenset({"p1", "d1"}))) == ("p2", "d2")


def test_a_barred_pair_is_not_planned() -> None:
    hits = {"p1": (3584, 3584), "d1": (3584, 0)}
    assert names(make(*PAIRS, hits=hits, bars=Bars({("p1", "d1"): ""}))) == ("p1", "d2")
    assert names(make(*PAIRS, hits=hits, bars=Bars({}, {"p1": ""})))[0] == "p2"
    barred = Bars({("p1", "d1"): "", ("p1", "d2"): "", ("p2", "d1"): ""})
    assert names(make(*PAIRS, hits=hits, bars=barred)) == ("p2", "d2")


def test_pairs_stay_within_a_cohort() -> None:
    views = (view("p1", cohort="a"), view("p2", cohort="b"), view("d1", cohort="b"), view("d2", 0, cohort="a"))
    assert names(make(*views, hits={"p1": (3584, 3584), "d1": (3584, 0)})) == ("p1", "d2")


def test_ranks_are_places_of_their_own() -> None:
    views = (view("p1", ranks=2, legs=(0, 0), queued=(0, 0)), view("d1", ranks=2, legs=(3, 1), queued=(0, 0)))
    made = make(*views, hits={"p1/1": (3584, 3584)})
    assert (made.prefill_rank, made.decode_rank) == (1, 1)
    busy = (view("p1", ranks=2, legs=(0, 1), queued=(0, 30_000)), views[1])
    assert make(*busy, hits={"p1/1": (3584, 3584)}).prefill_rank == 0


def test_where_vllm_heeds_no_rank_none_is_named() -> None:
    views = (view("p1", ranks=2, legs=(0, 0), queued=(0, 0)), view("p2"), view("d1"))
    made = make(*views, hits={"p1/1": (3584, 3584), "p1/0": (3584, 3584)}, names_rank=False)
    assert (names(made)[0], made.prefill_rank) == ("p1", None)
    half = make(*views, hits={"p1/1": (2000, 2000), "p2": (1500, 1500)}, names_rank=False)
    assert names(half)[0] == "p2", "one of two ranks has it: it is met half of the time"


def test_a_node_of_one_rank_is_not_told_which() -> None:
    made = make(*PAIRS, hits={"p1": (3584, 3584)})
    assert (made.prefill_rank, made.decode_rank) == (None, None)


RESUMING = {"p1": (3584, 3584), "d1": (3968, 3968)}


def test_a_decode_node_that_resumes_computes_the_rest_itself() -> None:
    made = make(*PAIRS, hits=RESUMING)
    assert names(made) == (None, "d1")
    assert made.local is LocalReason.CACHED
    assert reason(made) is RouteReason.RESUMES
    assert made.computed == 32


@pytest.mark.parametrize(("tokens", "local"), [(120, True), (450, False)])
def test_what_a_decode_node_computes_is_charged_twice_for_a_prefill_node_may_have_to_compute_it_again(
    tokens: int, local: bool
) -> None:
    """A hand-over takes 20 ms, and so long takes a prefill node for 160 tokens."""
    cached = TOKENS - tokens
    made = make(*PAIRS, hits={"p1": (cached, cached), "d1": (cached, cached)})
    assert (made.prefill is None) is local


@pytest.mark.parametrize(
    ("hits", "views"),
    [
        ({**RESUMING, "d1": (3968, 0)}, PAIRS),  # it cannot resume
        ({**RESUMING, "d1": (2000, 2000)}, PAIRS),  # longer than the streams may wait
        (RESUMING, (view("p1"), view("d1", 1500), view("d2"))),  # others compute there already
    ],
)
def test_a_decode_node_computes_nothing_where_that_is_dearer(
    hits: Mapping[str, tuple[int, int]], views: tuple[NodeView, ...]
) -> None:
    assert make(*views, hits=hits).prefill is not None


def test_a_move_to_another_prefill_node_is_not_put_off() -> None:
    """The next turn would have to be moved too, and is longer: the place that has it all is busy."""
    hits = {"p1": (3600, 3600), "p2": (2560, 2560), "d1": (3600, 3600)}
    assert names(make(view("p1", 1500), view("p2", 1500), view("d1"), hits=hits)) == (None, "d1")
    assert names(make(view("p1", 9000), view("p2"), view("d1"), hits=hits))[0] == "p2"


@pytest.mark.parametrize(("tokens", "first"), [(450, None), (600, "p1")])
def test_the_first_turn_that_a_decode_node_computes_has_a_part_of_the_budget(tokens: int, first: str | None) -> None:
    cached, views = TOKENS - tokens, (view("p1", 4000), view("d1"))
    assert names(make(*views, hits={"p1": (cached, cached), "d1": (cached, cached)}))[0] == first
    assert names(make(*views, hits={"p1": (2000, 2000), "d1": (cached, cached)}))[0] is None


@pytest.mark.parametrize("weight", [1.0, 8.0])
def test_a_node_that_has_nothing_is_compared_where_it_is_quick_or_heavy_enough(weight: float) -> None:
    book, views = Load(), (view("p1"), view("p2", weight=weight), view("d1"))
    for _ in range(30 if weight == 1 else 0):
        book.learn(Work.PREFILL, views[0].lightest, 2000, 1.6)
        book.learn(Work.PREFILL, views[1].lightest, 2000, 0.05)
    assert names(make(*views, hits={"p1": (1280, 1280)}, book=book))[0] == "p2"


def test_streams_are_not_held_up_for_longer_than_the_budget_whatever_it_saves() -> None:
    views = (view("p1", 50_000), view("d1"))
    hits = {"d1": (2000, 2000)}
    assert make(*views, hits=hits).prefill is not None
    patient = PlanPolicy(CacheAware(0.3))
    assert make(*views, hits=hits, policy=patient).local is LocalReason.CACHED


def test_what_a_decode_node_computes_already_does_not_count_against_the_budget_once_more() -> None:
    """Streams get a token between two prompts: 500 tokens take 63 ms, and both together more than the budget."""
    hits = {"d1": (TOKENS - 500, TOKENS - 500)}
    assert names(make(view("p1"), view("d1", 500), hits=hits)) == (None, "d1")
    assert make(view("p1"), view("d1", 900), hits=hits).prefill is not None


def test_a_rank_that_is_no_longer_there_is_no_hit() -> None:
    made = make(view("p1"), view("d1"), hits={"p1/9": (3584, 3584)})
    assert reason(made) is RouteReason.NOTHING_CACHED


def test_a_place_that_has_a_little_pays_for_the_rest_of_a_copy_too() -> None:
    hits = {"p1": (2560, 2560), "p2": (256, 256)}
    assert names(make(view("p1", 4000), view("p2"), view("d1"), hits=hits))[0] == "p1"


def test_without_a_budget_nothing_is_computed_on_decode_nodes() -> None:
    never = PlanPolicy(CacheAware(0.0))
    assert make(*PAIRS, hits=RESUMING, policy=never).prefill is not None


def test_a_decode_node_whose_cache_is_full_gets_less() -> None:
    capacity = Capacity(10_000, 10, 2, Binding.ATTENTION)
    full = view("d1", capacity=capacity, held=(Footprint(9_900, 1),), legs=(1,))
    free = view("d2", capacity=capacity, held=(Footprint(100, 4),), legs=(4,))
    assert names(make(view("p1"), full, free, hits={"d1": (3584, 0)}))[1] == "d2"


def test_without_knowledge_a_session_finds_its_place_again_and_leaves_it_when_it_is_busy() -> None:
    views = [view(f"{role}{number}") for role in "pd" for number in range(4)]
    made = make(*views, session=12345)
    assert reason(made) is RouteReason.SESSION
    assert {names(make(*views, session=12345, turn=turn)) for turn in range(5)} == {names(made)}
    assert len({names(make(*views, session=hash(str(number)))) for number in range(40)}) > 8
    assert made.prefill is not None
    busy = [view(each.node.name, 20_000) if each.node == made.prefill else each for each in views]
    assert names(make(*busy, session=12345))[0] != made.prefill.name


@pytest.mark.parametrize(("source", "chosen"), [(HitSource.APPROXIMATION, 1), (HitSource.EVENTS, 4)])
def test_among_equal_places_the_session_decides_where_what_is_cached_is_an_estimate(
    source: HitSource, chosen: int
) -> None:
    hits = {f"p{number}": (3584, 3584) for number in range(4)}
    views = [view(f"{role}{number}") for role in "pd" for number in range(4)]
    made = [names(make(*views, hits=hits, source=source, session=7, turn=turn)) for turn in range(8)]
    assert len({prefill for prefill, _ in made}) == chosen
    assert len({names(make(*views, hits=hits, turn=turn))[0] for turn in range(8)}) == 4


def many(prefix: str, *, idle_every: int = 1) -> list[NodeView]:
    """Fifty nodes. Every ``idle_every``-th one is idle, and all others have a queue."""
    return [view(f"{prefix}{index}", 9000 if index % idle_every else 0) for index in range(50)]


@pytest.mark.parametrize("cached", [True, False], ids=["cached on all", "cached nowhere"])
def test_many_equal_nodes_get_as_many_prompts(cached: bool) -> None:
    nodes = many("p")
    hits = {node.name: (2048, 2048) for node in nodes} if cached else {}
    counts = collections.Counter(names(make(*nodes, view("d1"), hits=hits, turn=turn))[0] for turn in range(1000))
    assert set(counts.values()) == {1000 // 50}


@pytest.mark.parametrize("cached", [True, False], ids=["cached on all", "cached nowhere"])
def test_of_many_nodes_one_that_has_nothing_to_do_is_found(cached: bool) -> None:
    nodes = many("p", idle_every=8)
    hits = {node.name: (2048, 2048) for node in nodes} if cached else {}
    found = {names(make(*nodes, view("d1"), hits=hits, turn=turn))[0] for turn in range(200)}
    assert found == {node.name for node in nodes if not node.lightest.queued}


def test_a_session_finds_its_place_among_many_whatever_the_turn() -> None:
    nodes = many("p")
    hits = {node.name: (2048, 2048) for node in nodes}
    asked = {"hits": hits, "source": HitSource.APPROXIMATION, "session": 7}
    assert len({names(make(*nodes, view("d1"), turn=turn, **asked))[0] for turn in range(100)}) == 1  # type: ignore[arg-type]
    assert len({names(make(*nodes, view("d1"), turn=turn, session=7))[0] for turn in range(100)}) == 1


def test_one_hot_prefix_loads_no_node_much_more_than_the_mean() -> None:
    """Requests of 1,600 tokens that share 1,300, more than four nodes can compute at once."""
    met, queued = collections.Counter[str](), collections.Counter[str]()
    for turn in range(200):
        hits = {name: (1280, 1280 if count > 1 else 0) for name, count in met.items()}
        views = [view(f"p{number}", queued[f"p{number}"]) for number in range(4)]
        made = make(*views, view("d0"), hits=hits, tokens=1600, turn=turn)
        assert made.prefill is not None
        met[made.prefill.name] += 1
        queued[made.prefill.name] += made.computed
    assert max(met.values()) <= 1.3 * met.total() / 4


def test_one_node_is_chosen_by_what_it_will_do() -> None:
    prefix = PromptHits(
        TOKENS, HitSource.EVENTS, hit_places({Place("d1"): Hit(3584, 3584), Place("p1"): Hit(3584, 3584)})
    )
    pool_state, needs = PoolState(PAIRS), PlanInput("m", prefix=prefix)
    assert [choose(pool_state, role, needs, BY_CACHE, 1).name for role in Role] == ["p1", "d1"]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=6, unique_by=lambda each: each[0]),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=6, unique_by=lambda each: each[0]),
    st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))),
    st.sets(st.integers(0, 4), max_size=2),
)
def test_the_best_allowed_pair_is_that_of_all(
    prefills: list[tuple[int, int]], decodes: list[tuple[int, int]], barred: set[tuple[int, int]], alone: set[int]
) -> None:
    bars = Bars({(f"p{p}", f"d{d}"): "" for p, d in barred}, {f"d{each}": "" for each in alone})
    costs = [
        [Estimate(score, score, each := view(f"{role}{n}"), each.lightest, NO_HIT) for n, score in side]
        for role, side in (("p", prefills), ("d", decodes))
    ]
    allowed = [p.score + d.score for p in costs[0] for d in costs[1] if bars.allow(p.view.node.name, d.view.node.name)]
    found = best_allowed_pair(costs[0], costs[1], bars)
    assert (None if found is None else found[0].score + found[1].score) == min(allowed, default=None)


THIRTY_SECONDS = NextTurn(30.0, 8000.0)


@pytest.mark.parametrize(("stays", "chosen"), [(20.0, "p2"), (30.0, "p2"), (300.0, "p1")])
def test_a_conversation_begins_where_its_next_turn_will_find_it(stays: float, chosen: str) -> None:
    """A cached beginning is not worth a place that evicts it before the conversation comes back."""
    made = make(*PAIRS, hits={"p1": (1280, 1280)}, stays={"p1": stays}, next_turn=THIRTY_SECONDS)
    assert names(made)[0] == chosen


def test_where_a_conversation_is_kept_nothing_of_it_is_evicted() -> None:
    kept = NextTurn(30.0, 8000.0, (Place("p1"),))
    assert names(make(*PAIRS, hits={"p1": (1280, 1280)}, stays={"p1": 20.0}, next_turn=kept))[0] == "p1"


def test_places_that_all_evict_it_are_compared_as_if_none_did() -> None:
    made = make(*PAIRS, hits={"p1": (1280, 1280)}, stays={"p1": 20.0, "p2": 20.0}, next_turn=THIRTY_SECONDS)
    assert names(made)[0] == "p1"


def test_a_prompt_of_which_nothing_is_expected_goes_where_it_is_cached() -> None:
    assert names(make(*PAIRS, hits={"p1": (1280, 1280)}, stays={"p1": 1.0}))[0] == "p1"


def test_nodes_of_both_roles_are_priced_for_what_they_evict_too() -> None:
    both = [view_of(Node(name, f"http://{name}", BOTH, "m"), State.UP, 0) for name in ("n1", "n2")]
    hits = {Place("n1"): Hit(1280, 1280)}
    for seconds, chosen in ((20.0, "n2"), (900.0, "n1")):
        prefix = PromptHits(TOKENS, HitSource.EVENTS, hit_places(hits), {Place("n1"): seconds})
        needs = PlanInput("m", prefix=prefix, tokens=TOKENS, next_turn=THIRTY_SECONDS)
        made = plan(PoolState(tuple(both), NO_BARS, None), needs, BY_CACHE, 0)
        assert made.computing.name == chosen


def of_capacity(name: str, queued: int = 0, capacity: int = 160_000) -> NodeView:
    return view(name, queued, capacity=Capacity(capacity, None, 100, Binding.ATTENTION))


AGENTS_AT_P1 = NextTurn(30.0, 8000.0, others={Place("p1"): 1.0, Place("d1"): 9.0})
AT_HOME_ON_P1 = NextTurn(30.0, 8000.0, home=Place("p1"))


def test_a_large_conversation_begins_where_the_fewest_agents_live() -> None:
    nodes = (of_capacity("p1"), of_capacity("p2", queued=1500), of_capacity("d1"))
    hits = {"p1": (1280, 1280), "d1": (1280, 0)}
    assert names(make(*nodes, hits=hits)) == ("p1", "d1")
    assert names(make(*nodes, hits=hits, next_turn=NextTurn(30.0, 8000.0))) == ("p1", "d1")
    assert names(make(*nodes, hits=hits, next_turn=AGENTS_AT_P1)) == ("p2", "d1")
    nodes = (of_capacity("p1"), of_capacity("p2", queued=3000), of_capacity("d1"))
    assert names(make(*nodes, hits=hits, next_turn=AGENTS_AT_P1)) == ("p1", "d1"), "an agent costs the prompt, no more"


@pytest.mark.parametrize("cached", [True, False], ids=["cached on all", "cached nowhere"])
def test_of_many_nodes_the_only_one_without_agents_is_found(cached: bool) -> None:
    nodes = [of_capacity(f"p{index}") for index in range(50)]
    hits = {node.name: (1280, 1280) for node in nodes} if cached else {}
    agents = NextTurn(30.0, 8000.0, others={Place(node.name): 1.0 for node in nodes if node.name != "p33"})
    found = {names(make(*nodes, view("d1"), hits=hits, next_turn=agents, turn=turn))[0] for turn in range(50)}
    assert found == {"p33"}


def test_places_that_take_over_are_not_charged_for_agents() -> None:
    nodes = (of_capacity("p1"), of_capacity("d1"), of_capacity("d2"))
    assert names(make(*nodes, hits={"d1": (1280, 0)}, next_turn=AGENTS_AT_P1)) == ("p1", "d1")


@pytest.mark.parametrize(("capacity", "chosen"), [(TOKENS * 48 - 1, "p2"), (TOKENS * 48, "p1")])
def test_only_prompts_that_are_large_beside_the_cache_are_charged(capacity: int, chosen: str) -> None:
    nodes = (of_capacity("p1", 0, capacity), of_capacity("p2", 1000, capacity), view("d1"))
    assert names(make(*nodes, hits={}, next_turn=AGENTS_AT_P1))[0] == chosen
    unknown = (view("p1"), view("p2", queued=1000), view("d1"))
    assert names(make(*unknown, hits={}, next_turn=AGENTS_AT_P1))[0] == "p1"


def test_each_rank_has_its_part_of_the_cache() -> None:
    capacity = Capacity(TOKENS * 48, None, 100, Binding.ATTENTION)
    ranks = view("p1", queued=(0, 1000), legs=(0, 0), ranks=2, capacity=capacity)
    made = make(ranks, view("d1"), hits={"p1/1": (10, 10), "p1": (10, 10)}, next_turn=AGENTS_AT_P1)
    assert (made.prefill_rank, names(made)[0]) == (1, "p1")


@pytest.mark.parametrize(("queued", "chosen"), [(350, "p1"), (800, "p2")])
def test_a_large_conversation_does_not_move_for_little(queued: int, chosen: str) -> None:
    nodes = (of_capacity("p1", queued), of_capacity("p2"), of_capacity("d1"))
    assert names(make(*nodes, hits={}))[0] == "p2"
    assert names(make(*nodes, hits={}, next_turn=AT_HOME_ON_P1))[0] == chosen


def test_an_agent_at_home_pays_nothing_for_what_may_be_evicted_there() -> None:
    """To move is to compute it anew for certain."""
    nodes = (of_capacity("p1"), of_capacity("p2"), of_capacity("d1"))
    hits, stays = {"p1": (1280, 1280)}, {"p1": 20.0}
    assert names(make(*nodes, hits=hits, stays=stays, next_turn=THIRTY_SECONDS))[0] == "p2"
    assert names(make(*nodes, hits=hits, stays=stays, next_turn=AT_HOME_ON_P1))[0] == "p1"


def test_where_its_home_is_gone_all_places_are_equal_for_it() -> None:
    nodes = (of_capacity("p2", 350), of_capacity("p3"), of_capacity("d1"))
    assert names(make(*nodes, hits={}, next_turn=AT_HOME_ON_P1))[0] == "p3"


def test_agents_spread_over_nodes_of_both_roles_too() -> None:
    capacity = Capacity(160_000, None, 100, Binding.ATTENTION)
    both = [
        view_of(Node(name, f"http://{name}", BOTH, "m", capacity=capacity), State.UP, 0, queued=(queued,))
        for name, queued in (("n1", 0), ("n2", 1000))
    ]
    for agents, chosen in (({}, "n1"), ({Place("n1"): 2.0}, "n2")):
        turn = NextTurn(30.0, 8000.0, others=agents)
        needs = PlanInput("m", prefix=PromptHits(TOKENS, HitSource.EVENTS, ()), tokens=TOKENS, next_turn=turn)
        assert plan(PoolState(tuple(both), NO_BARS, None), needs, BY_CACHE, 0).computing.name == chosen
