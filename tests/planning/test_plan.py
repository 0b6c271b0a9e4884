"""Plans: pure decisions from the state of the pool."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.nodes.node import Bars, Node, NodeView, PoolState, Role, State
from pdproxy.planning.plan import LEAST_LOADED, PlanPolicy, choose, plan
from pdproxy.planning.plan_types import NoNode, Plan, PlanInput, UnknownModel
from pdproxy.reasons import LocalReason, NoNodeReason
from pdproxy.settings.types import OnNoDecode, OnPrefillFailure
from tests.fakes.views import view_of

POLICY = PlanPolicy(LEAST_LOADED)
FAIL = PlanPolicy(LEAST_LOADED, OnPrefillFailure.FAIL)
LAST_RESORT = PlanPolicy(LEAST_LOADED, on_no_decode=OnNoDecode.PREFILL)
NEEDS = PlanInput("tiny")
NO_BARS = Bars()


def view(name: str, active: int = 0, state: State = State.UP, **more: object) -> NodeView:
    """A node whose role is its first letter."""
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    of_view = {key: more.pop(key) for key in ("share", "trials") if key in more}
    node = Node(name, f"http://{name}", (role,), **{"model": "tiny", **more})  # type: ignore[arg-type]
    return view_of(node, state, active, **of_view)  # type: ignore[arg-type]


def make(
    *views: NodeView, needs: PlanInput = NEEDS, policy: PlanPolicy = POLICY, turn: int = 0, bars: Bars = NO_BARS
) -> Plan:
    return plan(PoolState(views, bars=bars), needs, policy, turn)


def barred(*pairs: str) -> Bars:
    """Bars of pairs such as "p1 d1", and of nodes such as "d1"."""
    split = [tuple(pair.split()) for pair in pairs]
    return Bars({pair: "" for pair in split if len(pair) == 2}, {pair[0]: "" for pair in split if len(pair) == 1})


def names(made: Plan) -> tuple[str | None, str]:
    return (made.prefill.name if made.prefill else None), made.decode.name


def test_the_least_loaded_pair_gets_the_request() -> None:
    made = make(view("p1", 3), view("p2", 1), view("d1", 0), view("d2", 5))
    assert names(made) == ("p2", "d1")
    assert made.local is None


def test_equally_loaded_nodes_take_turns() -> None:
    views = [view(name) for name in ("p1", "p2", "p3", "d1", "d2", "d3")]
    made = [make(*views, turn=turn) for turn in range(9)]
    assert collections.Counter(each.prefill.name for each in made if each.prefill) == {"p1": 3, "p2": 3, "p3": 3}
    assert collections.Counter(each.decode.name for each in made) == {"d1": 3, "d2": 3, "d3": 3}


def test_the_same_turn_gives_the_same_plan() -> None:
    views = [view(name) for name in ("p1", "p2", "d1", "d2")]
    assert make(*views, turn=7) == make(*views, turn=7)


def test_weight_and_slow_start_bound_what_a_node_gets() -> None:
    assert names(make(view("p1"), view("d1", 5, weight=3.0), view("d2", 2)))[1] == "d1"
    assert names(make(view("p1"), view("d1", 0, share=0.1), view("d2", 8)))[1] == "d2"
    assert names(make(view("p1"), view("d1", 0, share=0.1), view("d2", 10)))[1] == "d1"


def test_a_node_on_trial_gets_one_request() -> None:
    assert names(make(view("p1"), view("d1", 0, State.PROBING), view("d2", 4)))[1] == "d1"
    assert names(make(view("p1"), view("d1", 0, State.PROBING, trials=1), view("d2", 4)))[1] == "d2"


@pytest.mark.parametrize("state", [State.JOINING, State.DOWN, State.DRAINING, State.REFUSED])
def test_nodes_that_do_not_serve_get_nothing(state: State) -> None:
    made = make(view("p1", 0, state), view("d1", 0, state), view("d2", 9))
    assert names(made) == (None, "d2")
    assert made.local is LocalReason.NO_PREFILL
    with pytest.raises(NoNode) as caught:
        make(view("p1"), view("d1", 0, state))
    assert caught.value.reason is NoNodeReason.NO_DECODE


def test_without_prefill_the_policy_may_forbid_to_go_on() -> None:
    with pytest.raises(NoNode) as caught:
        make(view("d1"), policy=FAIL)
    assert caught.value.reason is NoNodeReason.NO_PREFILL


@pytest.mark.parametrize("local", [None, LocalReason.BEAM_SEARCH])
def test_without_decode_the_policy_may_let_a_prefill_node_serve(local: LocalReason | None) -> None:
    needs = PlanInput("tiny", local=local, excluded=frozenset({"d2", "p3"}))
    views = view("p1", 4), view("p2", 1), view("p3"), view("d1", 0, State.DOWN), view("d2")
    assert make(*views, needs=needs, policy=LAST_RESORT) == Plan(None, views[1].node, LocalReason.NO_DECODE)
    assert choose(PoolState(views), Role.DECODE, needs, LAST_RESORT, 0).name == "p2"
    for policy, nodes in (POLICY, views), (LAST_RESORT, views[2:]):
        with pytest.raises(NoNode) as caught:
            make(*nodes, needs=needs, policy=policy)
        assert caught.value.reason is NoNodeReason.EXCLUDED


def test_a_prefill_node_is_the_last_resort_alone() -> None:
    assert names(make(view("p1"), view("d1", 99), policy=LAST_RESORT)) == ("p1", "d1")
    partner = view("p1").node
    with pytest.raises(NoNode):  # nothing reads the ticket of one prefill node at another
        choose(PoolState((view("p1"), view("p2"))), Role.DECODE, PlanInput("tiny", partner=partner), LAST_RESORT, 0)


def test_what_cannot_be_disaggregated_is_planned_locally() -> None:
    made = make(view("p1"), view("d1"), needs=PlanInput("tiny", local=LocalReason.PROMPT_LOGPROBS))
    assert made == Plan(None, view("d1").node, LocalReason.PROMPT_LOGPROBS)


def test_an_unknown_model_is_not_the_same_as_one_that_is_down() -> None:
    views = (view("p1"), view("d1", 0, State.DOWN, aliases=("lora",)))
    with pytest.raises(UnknownModel) as unknown:
        make(*views, needs=PlanInput("huge"))
    assert unknown.value.known == ("lora", "tiny")
    with pytest.raises(NoNode):
        make(*views, needs=PlanInput("lora"))


def test_a_node_whose_model_is_not_known_yet_may_be_the_one() -> None:
    with pytest.raises(NoNode):
        make(view("d1", 0, State.JOINING, model=""), needs=PlanInput("huge"))
    with pytest.raises(NoNode):
        make(needs=PlanInput("huge"))


def test_models_live_apart() -> None:
    views = (view("p1"), view("d1"), view("p2", model="big"), view("d2", model="big"))
    assert names(make(*views, needs=PlanInput("big"))) == ("p2", "d2")
    assert PoolState(views).models == ("big", "tiny")


def test_an_adapter_pairs_where_both_nodes_have_it() -> None:
    views = (view("p1"), view("p2", 5, aliases=("lora",)), view("d1", 5, aliases=("lora",)), view("d2"))
    assert names(make(*views, needs=PlanInput("lora"))) == ("p2", "d1")


def test_pairs_stay_within_a_cohort() -> None:
    views = (view("p1", 9, cohort="a"), view("p2", 0, cohort="b"), view("d1", 0, cohort="a"), view("d2", 9, cohort="a"))
    assert names(make(*views)) == ("p1", "d1")


def test_the_less_loaded_cohort_gets_the_request() -> None:
    of_a = (view("p1", 4, cohort="a"), view("d1", 4, cohort="a"))
    of_b = (view("p2", 1, cohort="b"), view("d2", 5, cohort="b"))
    views = (*of_a, *of_b)
    assert names(make(*views)) == ("p2", "d2")


def test_no_pair_in_any_cohort_means_local_or_nothing() -> None:
    views = (view("p1", cohort="a"), view("d1", cohort="b"))
    assert make(*views).local is LocalReason.NO_PAIR
    with pytest.raises(NoNode) as caught:
        make(*views, policy=FAIL)
    assert caught.value.reason is NoNodeReason.NO_PAIR


def test_a_node_of_unknown_cohort_pairs_with_any() -> None:
    assert names(make(view("p1"), view("d1", cohort="b"))) == ("p1", "d1")
    assert names(make(view("p1", cohort="b"), view("d1"))) == ("p1", "d1")


def test_a_barred_pair_is_never_made() -> None:
    views = (view("p1"), view("p2", 9), view("d1"), view("d2", 9))
    assert names(make(*views, bars=barred("p1 d1"))) == ("p1", "d2")
    assert names(make(*views, bars=barred("p1 d1", "p1 d2"))) == ("p2", "d1")
    assert names(make(*views, bars=barred("p1"))) == ("p2", "d1")
    assert names(make(*views, bars=barred("d1"))) == ("p1", "d2")


def test_equally_loaded_pairs_that_are_allowed_take_turns() -> None:
    views = [view(name) for name in ("p1", "p2", "d1", "d2")]
    made = [names(make(*views, turn=turn, bars=barred("p1 d1"))) for turn in range(9)]
    assert collections.Counter(made) == {("p1", "d2"): 3, ("p2", "d1"): 3, ("p2", "d2"): 3}


def test_where_all_pairs_are_barred_the_decode_node_serves_alone() -> None:
    views = (view("p1"), view("d1"), view("p2", cohort="b"))
    made = make(*views[:2], bars=barred("p1 d1"))
    assert (names(made), made.local) == ((None, "d1"), LocalReason.BARRED_PAIR)
    with pytest.raises(NoNode) as caught:
        make(*views[:2], policy=FAIL, bars=barred("d1"))
    assert caught.value.reason is NoNodeReason.BARRED_PAIR
    unpaired = make(view("d1", cohort="a"), views[2], bars=barred("p1 d1"))
    assert unpaired.local is LocalReason.NO_PAIR


def test_a_ticket_goes_to_no_node_that_is_barred_from_where_it_comes() -> None:
    pool_state = PoolState((view("d1"), view("d2", 9)), bars=barred("p1 d1"))
    assert choose(pool_state, Role.DECODE, PlanInput("tiny", partner=view("p1").node), POLICY, 0).name == "d2"
    assert choose(pool_state, Role.DECODE, PlanInput("tiny", partner=view("p2").node), POLICY, 0).name == "d1"
    assert choose(pool_state, Role.DECODE, PlanInput("tiny"), POLICY, 0).name == "d1", "without a ticket it serves"
    with pytest.raises(NoNode):
        choose(
            pool_state, Role.DECODE, PlanInput("tiny", partner=view("p1").node, excluded=frozenset({"d2"})), POLICY, 0
        )


def test_excluded_nodes_are_left_alone() -> None:
    views = (view("p1"), view("p2", 9), view("d1"), view("d2", 9))
    assert names(make(*views, needs=PlanInput("tiny", excluded=frozenset({"p1", "d1"})))) == ("p2", "d2")
    with pytest.raises(NoNode) as caught:
        make(*views, needs=PlanInput("tiny", excluded=frozenset({"d1", "d2"})))
    assert caught.value.reason is NoNodeReason.EXCLUDED


def test_another_decode_node_for_a_ticket_is_of_its_cohort() -> None:
    pool_state = PoolState((view("d1", cohort="a"), view("d2", 9, cohort="b"), view("d3", 7, cohort="b")))
    needs = PlanInput("tiny", partner=view("p1", cohort="b").node, excluded=frozenset({"d3"}))
    assert choose(pool_state, Role.DECODE, needs, POLICY, 0).name == "d2"
    with pytest.raises(NoNode) as caught:
        choose(pool_state, Role.PREFILL, needs, POLICY, 0)
    assert caught.value.reason is NoNodeReason.NO_PREFILL


_VIEWS = st.builds(
    lambda role, index, active, state, cohort, weight: view(
        f"{role}{index}", active, state, cohort=cohort, weight=weight
    ),
    st.sampled_from("pd"),
    st.integers(0, 9),
    st.integers(0, 5),
    st.sampled_from(State),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([0.5, 1.0, 4.0]),
)


_NAMES = {role: [f"{role}{index}" for index in range(10)] for role in "pd"}
_BARS = st.builds(
    Bars,
    st.dictionaries(st.tuples(st.sampled_from(_NAMES["p"]), st.sampled_from(_NAMES["d"])), st.just(""), max_size=40),
    st.dictionaries(st.sampled_from(_NAMES["p"] + _NAMES["d"]), st.just(""), max_size=3),
)


def serving_names(views: list[NodeView]) -> set[str]:
    """The nodes that take requests, and those that go away and are needed. These go where the others make no pair."""
    serving = [each.node for each in views if each.takes_requests()]
    going = {each.node.name for each in views if each.is_last_resort()}
    served = {view.name for view in PoolState(tuple(views)).served("tiny").by_name.values()}
    taking = {node.name for node in serving}
    assert taking <= served <= taking | going
    if any(one.is_partner(other) for one in serving for other in serving):
        assert served == taking
    return served


@given(st.lists(_VIEWS, max_size=12, unique_by=lambda each: each.node.name), st.integers(0, 100), _BARS)
def test_a_plan_is_always_allowed(views: list[NodeView], turn: int, bars: Bars) -> None:
    serving = serving_names(views)
    prefills = [each.node for each in views if each.node.name in serving and Role.PREFILL in each.node.roles]
    decodes = [each.node for each in views if each.node.name in serving and Role.DECODE in each.node.roles]
    pairs = [(one, other) for one in prefills for other in decodes if one.pairs_with(other.cohort)]
    try:
        made = make(*views, turn=turn, bars=bars)
    except NoNode:
        assert not any(name.startswith("d") for name in serving)
        return
    assert made.decode.name in serving
    if made.prefill is None:
        assert not any(bars.allow(one.name, other.name) for one, other in pairs)
        assert (made.local is LocalReason.BARRED_PAIR) == bool(pairs)
    else:
        assert made.prefill.name in serving
        assert made.prefill.pairs_with(made.decode.cohort)
        assert bars.allow(made.prefill.name, made.decode.name)


@given(st.lists(_VIEWS, max_size=12, unique_by=lambda each: each.node.name), st.integers(0, 100), _BARS)
def test_another_decode_node_for_a_ticket_is_always_allowed(views: list[NodeView], turn: int, bars: Bars) -> None:
    for prefill in (each.node for each in views if Role.PREFILL in each.node.roles):
        try:
            found = choose(
                PoolState(tuple(views), bars=bars), Role.DECODE, PlanInput("tiny", partner=prefill), POLICY, turn
            )
        except NoNode:
            continue
        assert bars.allow(prefill.name, found.name)
        assert found.pairs_with(prefill.cohort)
