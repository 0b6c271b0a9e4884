"""Every policy makes allowed plans, and makes one where there is one."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from pdproxy.nodes.node import Bars, Node, NodeView, PoolState, Role, State
from pdproxy.planning.plan import LEAST_LOADED, PlanPolicy, choose, plan
from pdproxy.planning.plan_types import NoNode, Plan, PlanInput
from pdproxy.planning.policies import policy_named
from pdproxy.settings.types import Routing
from tests.fakes.views import view_of


def view(name: str, active: int = 0, state: State = State.UP, **more: object) -> NodeView:
    """A node whose role is its first letter."""
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return view_of(Node(name, f"http://{name}", (role,), "m", **more), state, active)  # type: ignore[arg-type]


_VIEWS = st.lists(
    st.builds(
        lambda role, index, active, state, cohort, weight: view(
            f"{role}{index}", active, state, cohort=cohort, weight=weight
        ),
        st.sampled_from("pd"),
        st.integers(0, 5),
        st.integers(0, 5),
        st.sampled_from([State.UP, State.UP, State.PROBING, State.DRAINING]),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from([0.5, 1.0, 4.0]),
    ),
    max_size=12,
    unique_by=lambda each: each.node.name,
)
_NAMES = {role: [f"{role}{index}" for index in range(6)] for role in "pd"}
_BARS = st.builds(
    Bars,
    st.dictionaries(st.tuples(st.sampled_from(_NAMES["p"]), st.sampled_from(_NAMES["d"])), st.just(""), max_size=20),
    st.dictionaries(st.sampled_from(_NAMES["p"] + _NAMES["d"]), st.just(""), max_size=2),
)
_NEEDS = st.builds(
    PlanInput,
    st.just("m"),
    excluded=st.frozensets(st.sampled_from(_NAMES["p"] + _NAMES["d"]), max_size=3),
    session=st.none() | st.integers(0, 2**64 - 1),
)


@given(_VIEWS, _BARS, _NEEDS, st.integers(0, 100), st.sampled_from(Routing))
def test_a_plan_is_allowed_and_there_is_one_wherever_there_is_one_by_load(
    views: list[NodeView], bars: Bars, needs: PlanInput, turn: int, routing: Routing
) -> None:
    pool_state = PoolState(tuple(views), bars)
    made = planned(pool_state, needs, PlanPolicy(policy_named(routing)), turn)
    by_load = planned(pool_state, needs, PlanPolicy(LEAST_LOADED), turn)
    if made is None or by_load is None:
        assert made is by_load
        return
    assert made.local is by_load.local
    serving = {each.node.name for each in views if each.takes_requests()} - needs.excluded
    assert made.decode.name in serving
    if made.prefill is not None:
        assert made.prefill.name in serving
        assert made.prefill.pairs_with(made.decode.cohort)
        assert bars.allow(made.prefill.name, made.decode.name)


@given(_VIEWS, _BARS, _NEEDS, st.sampled_from(Routing), st.sampled_from(Role))
def test_one_node_is_open_and_found_wherever_there_is_one(
    views: list[NodeView], bars: Bars, needs: PlanInput, routing: Routing, role: Role
) -> None:
    open_nodes = {
        each.node.name for each in views if each.takes_requests() and role in each.node.roles
    } - needs.excluded
    found = None
    with contextlib.suppress(NoNode):
        found = choose(PoolState(tuple(views), bars), role, needs, PlanPolicy(policy_named(routing)), 3).name
    assert (found in open_nodes) if open_nodes else found is None


def planned(pool_state: PoolState, needs: PlanInput, policy: PlanPolicy, turn: int) -> Plan | None:
    with contextlib.suppress(NoNode):
        return plan(pool_state, needs, policy, turn)
    return None
