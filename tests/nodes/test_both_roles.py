"""Nodes of both roles in the pool: what is tested, what is counted, and how their roles change while they serve."""

import dataclasses

import pytest

from pdproxy.nodes.cohorts import Cohorts
from pdproxy.nodes.compatibility import check_compatibility, differences_from_partners
from pdproxy.nodes.hand_over_verdict import verdict
from pdproxy.nodes.hand_overs import Used
from pdproxy.nodes.node import BOTH, DECODE, PREFILL, Bars, Node, Role, Roles, State
from pdproxy.nodes.node_info import ModelCard, NodeInfo
from pdproxy.nodes.pool_entry import LegLoad
from tests.nodes.fake_pool import LABELS
from tests.nodes.proved_pool import ProvedPool


def node_of(name: str, roles: Roles = BOTH) -> Node:
    return Node(name, f"http://{name}", roles, "tiny", cohort="a")


async def join(made: ProvedPool, *names: str, roles: Roles = BOTH) -> list[tuple[str, str]]:
    before = len(made.test.asked)
    for name in names:
        node = node_of(name, roles)
        made.pool.add(node)
        await made.prover.join(node)
        made.pool.bring_up(node)
    return made.test.asked[before:]


@pytest.fixture
def made() -> ProvedPool:
    return ProvedPool()


async def test_two_nodes_are_tested_both_ways(made: ProvedPool) -> None:
    assert await join(made, "n1", "n2") == [("n2", "n1"), ("n1", "n2")]
    assert made.prover.proved("n1")
    assert made.prover.proved("n2")
    assert ("n1", "n1") not in made.test.asked


async def test_many_nodes_cost_two_tests_each(made: ProvedPool) -> None:
    tests = await join(made, *(f"n{number}" for number in range(30)))
    assert len(tests) == 2 * 29
    assert len(set(tests)) == len(tests)


async def test_one_way_that_fails_is_barred_and_the_other_is_not(made: ProvedPool) -> None:
    made.test.failing_pairs.add(("n1", "n2"))
    await join(made, "n1", "n2")
    assert not made.allowed("n1", "n2")
    assert made.allowed("n2", "n1")


async def test_beside_fixed_nodes_each_is_tested_with_a_witness(made: ProvedPool) -> None:
    await join(made, "p1", roles=PREFILL)
    await join(made, "d1", roles=DECODE)
    tests = await join(made, "n1")
    assert tests
    assert all("n1" in pair for pair in tests)
    assert made.prover.proved("n1")


def up(made: ProvedPool, name: str, role: Role) -> float | None:
    labels = {"node": name, "role": role.value, "state": "up"}
    return made.registry.get_sample_value("pdproxy_node_up", labels)


def active(made: ProvedPool, name: str) -> list[float | None]:
    value = made.registry.get_sample_value
    return [value("pdproxy_node_active", {"node": name, "role": role.value}) for role in Role]


async def test_it_has_a_series_for_each_role(made: ProvedPool) -> None:
    await join(made, "n1")
    with made.pool.acquire("n1", LegLoad(queued=10)), made.pool.acquire("n1"), made.pool.acquire("n1"):
        assert [up(made, "n1", role) for role in Role] == [1, 1]
        assert active(made, "n1") == [1, 2]
    made.pool.change_roles("n1", DECODE)
    assert [up(made, "n1", role) for role in Role] == [None, 1]
    assert active(made, "n1") == [None, 0]
    made.pool.remove("n1")
    assert [up(made, "n1", role) for role in Role] == [None, None]


async def test_a_role_goes_at_once_and_comes_after_its_tests(made: ProvedPool) -> None:
    await join(made, "n1", "n2")
    made.pool.change_roles("n1", DECODE)
    view = made.pool.view("n1")
    assert (view.state, view.node.roles, made.pool.joins_anew("n1")) == (State.UP, DECODE, False)
    made.pool.change_roles("n1", PREFILL)
    view = made.pool.view("n1")
    assert (view.state, view.node.roles, made.pool.joins_anew("n1")) == (State.UP, DECODE, True)
    made.pool.bring_up(node_of("n1", PREFILL))
    assert (made.pool.view("n1").node.roles, made.pool.joins_anew("n1")) == (PREFILL, False)


async def test_settings_that_differ_in_roles_alone_do_not_take_a_node_out(made: ProvedPool) -> None:
    await join(made, "n1")
    made.pool.amend(node_of("n1", DECODE))
    assert made.pool.view("n1").state is State.UP
    made.pool.amend(dataclasses.replace(node_of("n1", BOTH), weight=2.0))
    assert made.pool.view("n1").state is State.JOINING
    assert made.pool.view("n1").node.roles == BOTH


async def test_a_node_that_is_barred_from_all_is_so_in_each_role(made: ProvedPool) -> None:
    await join(made, "n1")
    made.pool.bar(Bars(nodes={"n1": "wrong"}))
    assert (made.gauge("n1", "*"), made.gauge("*", "n1")) == (1, 1)
    made.pool.change_roles("n1", DECODE)
    assert (made.gauge("n1", "*"), made.gauge("*", "n1")) == (None, 1)


async def test_one_node_alone_lacks_no_hand_overs(made: ProvedPool) -> None:
    await join(made, "n1")
    assert verdict(made.pool.state(), Used()).why == ()
    assert not verdict(made.pool.state(), Used()).fail
    (cohort,) = Cohorts(made.pool, made.prover.proved).report()
    assert (cohort.prefill.serving, cohort.decode.serving, cohort.complete) == (1, 1, False)


async def test_an_old_node_may_go_once_two_new_ones_make_a_pair(made: ProvedPool) -> None:
    await join(made, "n1", "n2")
    assert not Cohorts(made.pool, made.prover.proved).is_needed("n1"), "n2 does all that it does"
    (cohort,) = Cohorts(made.pool, made.prover.proved).report()
    assert cohort.complete


def info(name: str, runs_as: str, roles: Roles = BOTH) -> NodeInfo:
    return NodeInfo(node_of(name, roles), ModelCard(("tiny",), "/m"), "0.32.0", {**LABELS, "role": runs_as})


@pytest.mark.parametrize(
    ("runs_as", "roles", "cannot"),
    [
        ("kv_both", BOTH, []),
        ("kv_consumer", BOTH, ["prefill"]),
        ("kv_producer", BOTH, ["decode"]),
        ("kv_consumer", DECODE, []),
        ("kv_producer", DECODE, ["decode"]),
    ],
)
def test_a_connector_of_one_role_does_one_thing(runs_as: str, roles: Roles, cannot: list[str]) -> None:
    refusals = [str(each) for each in check_compatibility(info("n1", runs_as, roles), ()).refusals]
    assert refusals == [f"kv_role: the node runs as {runs_as} and cannot be a {role} node" for role in cannot]


def test_equal_nodes_are_compared_with_each_other() -> None:
    mine, other = info("n1", "kv_both"), info("n2", "kv_both")
    assert differences_from_partners(mine, [other]) == ()
    newer = dataclasses.replace(other, labels={**LABELS, "role": "kv_both", "vllm_version": "0.33.0"})
    assert [each.setting for each in differences_from_partners(mine, [newer])] == ["vllm_version"]
