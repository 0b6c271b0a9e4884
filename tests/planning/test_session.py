"""The policy `session`: which nodes a key gets, and what moves when nodes come, go, fill up or fail."""

import collections
import dataclasses
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdproxy.nodes.node import Bars, Node, NodeView, PoolState, Role, State, hash64
from pdproxy.observe.labels import Affinity
from pdproxy.planning.plan import PlanPolicy, choose, plan
from pdproxy.planning.plan_types import Plan, PlanInput
from pdproxy.planning.session import MOST_OF_MEAN, SPARE, Session
from tests.fakes.views import view_of

POLICY = PlanPolicy(Session())
KEYS = [hash64(f"conversation {number}") for number in range(3000)]
OWN = (Affinity.OWN, Affinity.OWN)


def view(name: str, active: int = 0, state: State = State.UP, share: float = 1.0, **more: object) -> NodeView:
    """A node whose role is its first letter."""
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    node = Node(name, f"http://{name}", (role,), "m", **more)  # type: ignore[arg-type]
    return view_of(node, state, active, share)


def fleet(prefills: int, decodes: int) -> list[NodeView]:
    return [view(f"p{index}") for index in range(prefills)] + [view(f"d{index}") for index in range(decodes)]


def made(views: Sequence[NodeView], key: int | None, bars: Bars | None = None, excluded: str = "") -> Plan:
    return planned(PoolState(tuple(views), bars or Bars()), key, excluded)


def planned(nodes: PoolState, key: int | None, excluded: str = "") -> Plan:
    """Where thousands of keys meet the same nodes, those are sorted once, as a pool does."""
    return plan(nodes, PlanInput("m", session=key, excluded=frozenset(excluded.split())), POLICY, 0)


def names(chosen: Plan) -> tuple[str, str]:
    assert chosen.prefill is not None
    return chosen.prefill.name, chosen.decode.name


def affinities(chosen: Plan) -> tuple[Affinity | None, Affinity | None]:
    return chosen.prefill_affinity, chosen.decode_affinity


def changed(views: Sequence[NodeView], name: str, **fields: object) -> list[NodeView]:
    """The same nodes, one of them otherwise."""
    return [dataclasses.replace(each, **fields) if each.node.name == name else each for each in views]  # type: ignore[arg-type]


_FLEETS = st.lists(
    st.builds(
        view,
        st.builds("{}{}".format, st.sampled_from("pd"), st.integers(0, 99)),
        share=st.sampled_from([0.1, 1.0]),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
    ),
    min_size=2,
    max_size=12,
    unique_by=lambda each: each.node.name,
)
_KEYS = st.integers(0, 2**64 - 1)


def has_both(views: Sequence[NodeView]) -> bool:
    return {role for each in views for role in each.node.roles} == set(Role)


@given(_FLEETS, _KEYS, st.randoms(use_true_random=False))
def test_every_proxy_finds_the_same_nodes(views: list[NodeView], key: int, dice: object) -> None:
    """In whatever order they joined, and though slow start differs."""
    assume(has_both(views))
    shuffled = [dataclasses.replace(each, share=1.0) for each in views]
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    assert names(made(views, key)) == names(made(shuffled, key))
    assert affinities(made(views, key)) == OWN


def test_the_nodes_of_a_key_are_the_same_in_every_release() -> None:
    """Proxies of two releases stand side by side during an upgrade; written down once."""
    found = [names(made(fleet(5, 5), key)) for key in KEYS[:6]]
    assert found == PINNED


PINNED = [("p1", "d0"), ("p2", "d4"), ("p4", "d1"), ("p4", "d3"), ("p1", "d4"), ("p3", "d2")]


@given(_FLEETS, _KEYS, st.data())
def test_a_node_that_leaves_moves_its_own_sessions_alone(views: list[NodeView], key: int, data: st.DataObject) -> None:
    """The other way round: one that joins gets sessions, and no others move."""
    gone = data.draw(st.sampled_from(views))
    left = [each for each in views if each is not gone]
    assume(has_both(left))
    before, after = names(made(views, key)), names(made(left, key))
    assert all(one == other or one == gone.node.name for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("nodes", [2, pytest.param(5, marks=pytest.mark.long), 20])
def test_one_node_more_moves_its_share_of_the_sessions(nodes: int) -> None:
    smaller, larger = (PoolState(tuple(fleet(number, number))) for number in (nodes - 1, nodes))
    moved = collections.Counter[int]()
    for key in KEYS:
        pairs = zip(names(planned(smaller, key)), names(planned(larger, key)), strict=True)
        moved.update(place for place, (before, after) in enumerate(pairs) if before != after)
    for place in (0, 1):
        assert moved[place] / len(KEYS) == pytest.approx(1 / nodes, rel=0.25)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (1.0, 2.0, 0.5, 4.0)])
def test_sessions_are_shared_out_by_weight(weights: tuple[float, ...]) -> None:
    nodes = PoolState((*(view(f"p{index}", weight=weight) for index, weight in enumerate(weights)), *fleet(0, 2)))
    got = collections.Counter(names(planned(nodes, key))[0] for key in KEYS)
    for index, weight in enumerate(weights):
        assert got[f"p{index}"] / len(KEYS) == pytest.approx(weight / sum(weights), abs=0.03)


def test_which_prefill_node_a_session_has_says_nothing_of_its_decode_node() -> None:
    nodes = PoolState(tuple(fleet(3, 3)))
    pairs = collections.Counter(names(planned(nodes, key)) for key in KEYS)
    assert len(pairs) == 9
    assert min(pairs.values()) > len(KEYS) / 9 * 0.8


def order(views: Sequence[NodeView], key: int) -> list[str]:
    """The prefill nodes in the key's order: each where those before it have gone."""
    left, found = list(views), list[str]()
    while any(Role.PREFILL in each.node.roles for each in left):
        found.append(names(made(left, key))[0])
        left = [each for each in left if each.node.name != found[-1]]
    return found


@pytest.mark.parametrize("key", KEYS[:20])
def test_a_node_that_cannot_take_it_is_skipped_for_the_next_of_the_keys_order(key: int) -> None:
    views = fleet(4, 2)
    first, second, third, _ = order(views, key)
    decode = names(made(views, key))[1]
    busy = changed(views, first, active=9)
    assert names(made(busy, key)) == (second, decode)
    assert affinities(made(busy, key)) == (Affinity.NEXT, Affinity.OWN)
    assert names(made(changed(busy, second, active=9), key)) == (third, decode)
    for state in (State.DRAINING, State.DOWN, State.REFUSED):
        assert names(made(changed(views, first, state=state), key)) == (second, decode)
    assert names(made(views, key, excluded=first)) == (second, decode)
    assert affinities(made(views, key, excluded=first)) == (Affinity.NEXT, Affinity.OWN)
    assert names(made(views, key, Bars({}, {first: "differs"}))) == (second, decode)


def test_a_node_on_trial_gets_one_of_its_sessions() -> None:
    views = fleet(3, 1)
    [first, second, _] = order(views, KEYS[0])
    assert names(made(changed(views, first, state=State.PROBING), KEYS[0]))[0] == first
    assert names(made(changed(views, first, state=State.PROBING, trials=1, active=1), KEYS[0]))[0] == second


def test_slow_start_leaves_a_node_its_sessions_and_takes_its_room() -> None:
    views = [dataclasses.replace(each, active=8) for each in fleet(4, 1)]
    first, second, *_ = order(views, KEYS[0])
    assert names(made(changed(views, first, active=2, share=0.1), KEYS[0]))[0] == first
    assert names(made(changed(views, first, active=3, share=0.1), KEYS[0]))[0] == second


@pytest.mark.parametrize("key", KEYS[:50])
def test_a_barred_pair_keeps_the_prefill_node(key: int) -> None:
    views = fleet(3, 3)
    prefill, decode = names(made(views, key))
    other = made(views, key, Bars({(prefill, decode): "differs"}))
    assert names(other)[0] == prefill
    assert affinities(other) == (Affinity.OWN, Affinity.NEXT)


@given(st.lists(st.sampled_from(["", "a", "b"]), min_size=6, max_size=6), _KEYS)
def test_both_nodes_are_of_one_cohort(cohorts: list[str], key: int) -> None:
    views = [view(f"p{i}", cohort=each) for i, each in enumerate(cohorts[:3])]
    views += [view(f"d{i}", cohort=each) for i, each in enumerate(cohorts[3:])]
    pairs = [(p, d) for p in views[:3] for d in views[3:] if p.node.pairs_with(d.node.cohort)]
    chosen = made(views, key)
    assert (chosen.prefill is not None) == bool(pairs)
    assert chosen.prefill is None or chosen.prefill.pairs_with(chosen.decode.cohort)


def test_a_cohort_without_room_on_its_decode_node_loses_the_session_to_the_other() -> None:
    of_a = [view(f"p{index}", cohort="a") for index in range(8)] + [view("d0", 9, cohort="a")]
    of_b = [view("p9", cohort="b"), *(view(f"d{index}", 0, cohort="b") for index in range(1, 9))]
    for key in KEYS[:50]:
        assert names(made(of_a + of_b, key)) == names(made(of_b, key))


@given(st.lists(st.sampled_from(KEYS[:5]), max_size=80), st.sampled_from([(1.0, 1.0, 1.0), (1.0, 2.0, 4.0)]))
def test_no_node_carries_more_than_the_bound(keys: list[int], weights: tuple[float, ...]) -> None:
    """Though a few sessions ask for everything at once."""
    views = [view(f"p{index}", weight=weight) for index, weight in enumerate(weights)] + [view("d0")]
    for sent, key in enumerate(keys, 1):
        name = names(made(views, key))[0]
        [before] = [each for each in views if each.node.name == name]
        views = changed(views, name, active=before.active + 1)
        fair = sent * before.node.weight / sum(weights)
        assert before.active + 1 <= MOST_OF_MEAN * fair + 1 + SPARE


def test_a_request_without_a_key_goes_to_the_least_loaded() -> None:
    views = changed(changed(fleet(2, 2), "p0", active=1), "d1", active=1)
    chosen = made(views, None)
    assert (names(chosen), affinities(chosen)) == (("p1", "d0"), (Affinity.NONE, Affinity.NONE))


@pytest.mark.parametrize("key", KEYS[:20])
def test_where_no_node_has_room_the_least_loaded_pair_gets_it(key: int) -> None:
    """Room is counted over all nodes, and the only ones that exchange tickets are the fullest."""
    pairs = {(p, d): "" for p in ("p0", "p1", "p2", "p3") for d in ("d0", "d1", "d2", "d3")}
    allowed = {pair: why for pair, why in pairs.items() if pair not in (("p0", "d0"), ("p0", "d1"))}
    views = changed(changed(changed(fleet(4, 4), "p0", active=30), "d0", active=30), "d1", active=29)
    assert names(made(views, key, Bars(allowed))) == ("p0", "d1")
    needs = PlanInput("m", session=key, partner=views[0].node)
    assert choose(PoolState(tuple(views), Bars(allowed)), Role.DECODE, needs, POLICY, 0).name == "d1"


@pytest.mark.parametrize("key", KEYS[:20])
def test_a_ticket_that_is_tried_again_stays_with_the_session(key: int) -> None:
    views = fleet(3, 4)
    own = names(made(views, key))[1]
    needs = PlanInput("m", session=key, partner=views[0].node)
    assert choose(PoolState(tuple(views)), Role.DECODE, needs, POLICY, 0).name == own
    without = [each for each in views if each.node.name != own]
    needs = msgspec.structs.replace(needs, excluded=frozenset({own}))
    found = choose(PoolState(tuple(views)), Role.DECODE, needs, POLICY, 0).name
    assert found == names(made(without, key))[1]


def test_what_one_node_computes_alone_goes_to_the_sessions_decode_node() -> None:
    views = fleet(2, 5)
    for key in KEYS[:20]:
        alone = made([each for each in views if Role.DECODE in each.node.roles], key)
        assert (alone.prefill, alone.decode.name) == (None, names(made(views, key))[1])
        assert affinities(alone) == (None, Affinity.OWN)
