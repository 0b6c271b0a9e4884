"""Plans among nodes of both roles: two nodes or one, never a hand-over of a node to itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.nodes.load import Load, PlaceLoad
from pdproxy.nodes.node import (
    BOTH,
    DECODE,
    PREFILL,
    Bars,
    Binding,
    Capacity,
    Footprint,
    Node,
    NodeView,
    PoolState,
    Role,
    Roles,
    State,
)
from pdproxy.planning.cache_aware import CacheAware
from pdproxy.planning.cost import SharedHandOverCost, SharedLocalCost
from pdproxy.planning.plan import LEAST_LOADED, PlanPolicy, RoutingPolicy, choose, plan
from pdproxy.planning.plan_types import NoNode, Plan, PlanInput
from pdproxy.planning.prefix import NO_HIT, Hit, HitSource, Place, PromptHits
from pdproxy.planning.session import Session
from pdproxy.reasons import LocalReason, RouteReason
from pdproxy.settings.types import OnPrefillFailure
from tests.fakes.views import view_of
from tests.planning.hits import hit_places

POLICIES: list[RoutingPolicy] = [CacheAware(), Session(), LEAST_LOADED]
ROLES = {"p": PREFILL, "d": DECODE, "n": BOTH}
TOKENS = 4000


def view(
    name: str, queued: int = 0, streams: int = 0, roles: Roles = BOTH, cohort: str = "", ranks: int = 1
) -> NodeView:
    """A node on whose first rank so many tokens wait in one prompt, and so many streams run."""
    node = Node(name, f"http://{name}", roles, "m", cohort=cohort, ranks=ranks)
    made = view_of(node, State.UP, 0, queued=(queued, *(0 for _ in range(1, ranks))))
    place = made.places[0]
    place.prompts = int(queued > 0)
    place.legs = place.prompts + streams
    made.active = place.legs
    made.changed(place)
    return made


def make(*views: NodeView, hits: dict[str, tuple[int, int]] | None = None, **needs: object) -> Plan:
    places = {Place(name): Hit(*hit) for name, hit in (hits or {}).items()}
    prefix = None if hits is None else PromptHits(TOKENS, HitSource.EVENTS, hit_places(places))
    asked = PlanInput("m", prefix=prefix, tokens=TOKENS, **needs)  # type: ignore[arg-type]
    return plan(PoolState(views), asked, PlanPolicy(CacheAware()), 0)


def names(made: Plan) -> tuple[str | None, str]:
    return (made.prefill.name if made.prefill else None), made.decode.name


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("on_failure", OnPrefillFailure)
def test_one_node_serves_alone_by_every_policy(policy: RoutingPolicy, on_failure: OnPrefillFailure) -> None:
    made = plan(PoolState((view("n1"),)), PlanInput("m", session=5), PlanPolicy(policy, on_failure), 0)
    assert (names(made), made.local) == ((None, "n1"), LocalReason.ONLY_NODE)


_VIEWS = st.builds(
    lambda kind, number, queued, streams, cohort, ranks: view(
        f"{kind}{number}", queued, streams, ROLES[kind], cohort, ranks
    ),
    st.sampled_from("pdnnn"), st.integers(0, 5), st.sampled_from([0, 100, 9000]), st.sampled_from([0, 1, 40]),
    st.sampled_from(["", "a", "b"]), st.integers(1, 2),
)  # fmt: skip
_NAMES = st.builds(lambda kind, number: f"{kind}{number}", st.sampled_from("pdn"), st.integers(0, 5))
_BARS = st.builds(
    Bars,
    st.dictionaries(st.tuples(_NAMES, _NAMES), st.just(""), max_size=20),
    st.dictionaries(_NAMES, st.just(""), max_size=2),
)
_HITS = st.none() | st.dictionaries(_NAMES, st.sampled_from([(900, 0), (900, 900), (3900, 3900)]), max_size=6)


@given(
    st.lists(_VIEWS, max_size=8, unique_by=lambda each: each.name), _BARS, _HITS, st.sampled_from(POLICIES),
    st.integers(0, 50), st.none() | st.integers(0, 2**64 - 1), st.frozensets(_NAMES, max_size=2),
)  # fmt: skip
def test_a_plan_is_always_allowed_and_never_of_a_node_with_itself(
    views: list[NodeView],
    bars: Bars,
    hits: dict[str, tuple[int, int]] | None,
    policy: RoutingPolicy,
    turn: int,
    session: int | None,
    excluded: frozenset[str],
) -> None:
    places = {Place(name): Hit(*hit) for name, hit in (hits or {}).items()}
    prefix = None if hits is None else PromptHits(TOKENS, HitSource.EVENTS, hit_places(places))
    needs = PlanInput("m", excluded=excluded, prefix=prefix, tokens=TOKENS, session=session)
    here = [each.node for each in views if each.name not in excluded]
    pairs = [
        (one, other)
        for one in here
        for other in here
        if Role.PREFILL in one.roles and Role.DECODE in other.roles and one is not other
        if one.pairs_with(other.cohort) and bars.allow(one.name, other.name)
    ]
    try:
        made = plan(PoolState(tuple(views), bars), needs, PlanPolicy(policy), turn)
    except NoNode:
        assert not any(Role.DECODE in node.roles for node in here)
        return
    assert made.decode in here
    assert Role.DECODE in made.decode.roles
    if made.prefill is not None:
        assert (made.prefill, made.decode) in pairs
    elif made.local is LocalReason.ALONE:
        assert made.decode.roles == BOTH
    elif made.local is not LocalReason.CACHED:
        assert not pairs
    for prefill in (node for node in here if Role.PREFILL in node.roles):
        try:
            needs = PlanInput("m", excluded=excluded, partner=prefill)
            other = choose(PoolState(tuple(views), bars), Role.DECODE, needs, PlanPolicy(policy), turn)
        except NoNode:
            continue
        assert (prefill, other) in pairs


def test_ranks_of_one_node_hand_nothing_over_to_each_other() -> None:
    """The first rank has the prompt and many streams, the second one neither; the other node has a long queue."""
    full = Capacity(10_000, None, 1, Binding.ATTENTION)
    node = Node("n1", "http://n1", BOTH, "m", ranks=2, capacity=full)
    one = view_of(node, State.UP, 0, legs=(1, 0), held=(Footprint(4900, 1), Footprint()))
    made = make(one, view("n2", 9_000), hits={"n1": (3900, 3900)})
    assert (made.prefill, made.decode.name) == (None, "n1")


def test_idle_equal_nodes_hand_nothing_over() -> None:
    made = make(view("n1"), view("n2"))
    assert (made.prefill, made.local) == (None, LocalReason.ALONE)


def make_after(answer_seconds: float, *views: NodeView) -> Plan:
    """A plan where prompts took half a second, and answers so long."""
    pool_state = PoolState(views)
    for second in range(300):
        pool_state.load.prefilled(PlaceLoad(), 1, 0.5, second, second)
        pool_state.load.streamed(1, 100, answer_seconds)
    return plan(pool_state, PlanInput("m", tokens=TOKENS), PlanPolicy(CacheAware()), 0)


def test_a_prompt_is_computed_where_fewer_streams_run() -> None:
    assert make_after(5.0, view("n1", streams=20), view("n2", streams=10)).computing.name == "n2"


def test_streams_weigh_less_the_longer_answers_are() -> None:
    """The other node's queue takes a second, and each stream is slower for half a second."""
    views = view("n1", streams=10), view("n2", queued=8000)
    assert make_after(1.0, *views).computing.name == "n2"
    assert make_after(50.0, *views).computing.name == "n1"


def test_an_answer_is_generated_where_few_streams_run() -> None:
    """n2 has the prompt cached, and 40 streams: each step there is longer by as many."""
    made = make(view("n1"), view("n2", streams=40), hits={"n2": (3900, 3900)})
    assert names(made) == ("n2", "n1")


@pytest.mark.parametrize("cost", ["hand over", "alone"])
def test_an_answer_costs_more_where_prompts_were_computed_lately(cost: str) -> None:
    book, idle, busy = Load(), view("n1"), view("n2")
    for second in range(60):
        book.prefilled(busy.lightest, 1, 0.5, second, second)
        book.streamed(1, 100, 3.0)
    costs = SharedHandOverCost(TOKENS, book) if cost == "hand over" else SharedLocalCost(TOKENS, book, 0, cached=False)
    less, score = costs.scores(NO_HIT, [(each, each.lightest) for each in (idle, busy)])
    more = score - less
    assert more == pytest.approx(book.answer_stalls(busy.lightest))
    assert more > 0.1


def test_who_has_the_prompt_goes_on_with_it() -> None:
    made = make(view("n1"), view("n2"), hits={"n2": (3900, 3900)})
    assert (names(made), made.reason, made.computed) == ((None, "n2"), RouteReason.CACHED, 100)


def test_beside_fixed_nodes_a_node_of_both_roles_is_one_of_each() -> None:
    fixed = view("p1", roles=PREFILL), view("d1", roles=DECODE)
    assert names(make(*fixed, view("n1", streams=50))) == ("p1", "d1")
    assert names(make(fixed[1], view("n1", streams=50))) == ("n1", "d1")
    assert names(make(view("p1", 90_000, roles=PREFILL), fixed[1], view("n1"))) == (None, "n1")
