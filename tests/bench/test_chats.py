"""What the policies make of conversations, in the simulation."""

import pytest

from pdproxy.nodes.node import Role
from pdproxy.observe.labels import Affinity
from pdproxy.settings.types import Routing
from tests.bench.chats import Result, Simulation, Traffic


def run(routing: Routing, traffic: Traffic, nodes: int = 3, seed: int = 1) -> Result:
    return Simulation(routing, nodes, nodes).run(traffic, seed)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("traffic", [Traffic(36), Traffic(200, within=60)])
def test_sessions_reach_the_node_that_has_their_prefix(traffic: Traffic, seed: int) -> None:
    """A little less than two thirds of the tokens are computed, and less than two thirds of the time is waited."""
    by_load, by_session = (run(routing, traffic, seed=seed) for routing in (Routing.LEAST_LOADED, Routing.SESSION))
    assert by_session.computed <= 0.65 * by_load.computed
    assert by_session.mean_wait <= 0.65 * by_load.mean_wait


@pytest.mark.parametrize(("traffic", "nodes"), [(Traffic(36), 3), (Traffic(300, within=60), 3), (Traffic(300), 8)])
def test_what_is_cached_is_a_better_guide_than_sessions(traffic: Traffic, nodes: int) -> None:
    """Without keys; and no more than a tenth above the least that any plan could compute."""
    by_session, by_cache = (run(routing, traffic, nodes) for routing in (Routing.SESSION, Routing.HYBRID))
    least = 2 * traffic.systems * traffic.system + traffic.conversations * (
        traffic.turns * (traffic.question + traffic.answer) - traffic.answer
    )
    assert by_cache.computed <= min(0.97 * by_session.computed, 1.1 * least)
    assert by_cache.mean_wait <= by_session.mean_wait


def test_attention_alone_misleads_on_a_hybrid_model() -> None:
    by_attention, by_state = (run(routing, Traffic(300)) for routing in (Routing.PREFIX, Routing.HYBRID))
    assert by_state.computed < 0.9 * by_attention.computed


def test_the_next_turn_goes_to_the_node_of_the_last() -> None:
    made = run(Routing.SESSION, Traffic(36))
    assert made.affinity[Affinity.OWN] / made.affinity.total() > 0.95


def test_a_system_prompt_alone_does_not_draw_conversations_together() -> None:
    """Its limit: each prefill node computes each shared system prompt for itself."""
    made = run(Routing.SESSION, Traffic(64, turns=1, systems=1), nodes=8)
    assert made.computed == 64 * 1600 - (64 - 2 * len(made.prompts)) * 1300


def test_a_simulation_can_be_repeated() -> None:
    one, other = (Simulation(Routing.SESSION, 3, 2) for _ in range(2))
    assert one.run(Traffic(20)) == other.run(Traffic(20))
    assert {view.active for view in one.pool.snapshot().nodes} == {0}
    assert {view.node.role for view in one.pool.snapshot().nodes} == set(Role)
