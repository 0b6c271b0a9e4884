"""Policies on traces, in the simulation, and how few tokens could be computed at all."""

import dataclasses

import pytest

from deploy.bench.bounds import greedy, least_computed
from deploy.bench.generators import Agents, Chat, Documents, Single, agents, chat, documents, single
from deploy.bench.hybrid_cache import CacheShape
from deploy.bench.outcome import Outcome
from deploy.bench.recorded import rescaled
from deploy.bench.simulate import Fleet, Simulation
from deploy.bench.sticky import Sticky
from deploy.bench.traces import Request, Segment, Trace, without_sessions
from pdproxy.nodes.node import Footprint
from pdproxy.settings.types import Routing
from tests.tables import spread

SMALL = {
    "chat": chat(Chat(conversations=12, turns=4)),
    "agents": agents(Agents(agents=3, calls=4, system=1500, sub_agents=0.3)),
    "documents": documents(Documents(documents=4, document=2000, questions=4)),
    "hot": single(Single(2000, 20, 400)),
    "none": single(Single(0, 20, 900)),
}
SHAPES = [CacheShape(), CacheShape(unit=64), CacheShape(blocks=50), CacheShape(state_groups=0)]
SEEDS = [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]


def run(routing: Routing, trace: Trace, fleet: Fleet = Fleet()) -> Outcome:  # noqa: B008 - a frozen value
    return Simulation(routing, fleet).run(trace)


@pytest.mark.parametrize(("trace", "shape", "routing"), spread(SMALL, SHAPES, Routing))
def test_nothing_beats_the_bound(trace: str, shape: CacheShape, routing: Routing) -> None:
    least = least_computed(SMALL[trace], shape)
    assert least <= greedy(SMALL[trace], shape, 3)
    outcome = run(routing, SMALL[trace], Fleet(shape=shape))
    assert least <= outcome.computed.total()
    assert len(outcome.first_tokens) == len(SMALL[trace].requests)


def test_the_bound_counts_a_block_that_ends_a_prompt_as_computed_by_it() -> None:
    """A prompt of 512 tokens needs its second block computed, whoever had it before; a longer one then need not."""
    lengths = (512, 600, 512)
    trace = Trace("t", tuple(Request(at, None, None, (Segment(1, tokens),), 1) for at, tokens in enumerate(lengths)))
    assert least_computed(trace, CacheShape()) == 256 + 2 * 256 + 88
    assert (
        run(Routing.LEAST_LOADED, trace, Fleet(1, 1, CacheShape(state_groups=0))).computed["prefill-0"]
        == 512 + 88 + 256
    )


def test_one_node_that_forgets_nothing_is_near_the_bound() -> None:
    """The shared system prompts are computed a second time, until the node keeps a state at their ends."""
    trace, shape = SMALL["chat"], CacheShape(blocks=4096)
    assert greedy(trace, shape, 1) <= least_computed(trace, shape) + 4 * 1536
    assert greedy(trace, dataclasses.replace(shape, blocks=60), 1) > 1.4 * greedy(trace, shape, 1)


@pytest.mark.parametrize("routing", list(Routing))
def test_a_simulation_can_be_repeated(routing: Routing) -> None:
    one, other = Simulation(routing, Fleet()), Simulation(routing, Fleet())
    assert one.run(SMALL["agents"]) == other.run(SMALL["agents"])
    assert {(view.active, view.lightest.queued) for view in one.pool.state().nodes} == {(0, 0)}


@pytest.mark.parametrize("seed", SEEDS)
def test_sessions_reach_the_node_that_has_their_prefix(seed: int) -> None:
    """A little more than half of the tokens are computed, and less is waited."""
    trace = chat(seed=seed)
    by_load, by_session = run(Routing.LEAST_LOADED, trace), run(Routing.SESSION, trace)
    assert by_session.share <= 0.65 * by_load.share
    assert by_session.mean <= 0.85 * by_load.mean


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_cached_is_found_without_sessions(seed: int) -> None:
    trace = chat(seed=seed)
    assert run(Routing.CACHE, without_sessions(trace)).share <= 0.95 * run(Routing.SESSION, trace).share


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), 9])
def test_agents_with_one_system_prompt_do_not_gather_on_one_node(seed: int) -> None:
    """Seeds at which a prompt in a hundred waited for two seconds and more where only the queue of the moment counted:
    eight conversations of each kind were on one of three nodes, whose cache then lost their states."""
    by_cache = run(Routing.CACHE, agents(seed=seed))
    assert by_cache.mean <= 0.3
    assert by_cache.percentile(0.99) <= 1.2


def test_what_a_node_evicted_is_not_taken_to_be_there_because_it_was_sent_there() -> None:
    """A seed at which nine conversations were on a node that can keep eight, each renewing what was expected of its
    node before that was given up: prompts planned for 1,000 tokens were computed whole, and 12 % of all tokens."""
    twice = Fleet(prefill_rate=16_000.0, overhead=0.005, transfer_rate=400_000.0, hand_over=0.005, step=0.01)
    by_cache = run(Routing.CACHE, rescaled(agents(seed=1), 2.0), twice)
    assert by_cache.share <= 0.105
    assert by_cache.percentile(0.99) <= 0.6


def test_what_waits_on_a_node_finds_there_what_is_left_when_its_turn_comes() -> None:
    """The second of two prompts whose caches exclude each other, and then the first once more."""
    fleet = Fleet(1, 1, CacheShape(blocks=10), prefill_rate=1000.0, overhead=0.0, keep_share=0.0)
    names = (1, 2, 1)
    trace = Trace("t", tuple(Request(at * 0.1, None, None, (Segment(n, 1500),), 1) for at, n in enumerate(names)))
    assert run(Routing.CACHE, trace, fleet).computed["prefill-0"] == 3 * 1500


def test_what_waits_on_a_node_that_keeps_is_not_evicted_by_what_stands_before_it() -> None:
    """The first prompt once more comes while the second one waits."""
    fleet = Fleet(1, 1, CacheShape(blocks=10), prefill_rate=1000.0, overhead=0.0)
    trace = Trace("t", tuple(Request(n * 0.1, None, None, (Segment(n % 2, 1500),), 1) for n in range(3)))
    assert run(Routing.CACHE, trace, fleet).computed["prefill-0"] == 2 * 1500 + 1500 - 1280


@pytest.mark.parametrize("seed", SEEDS)
def test_without_states_decode_nodes_compute_little_that_prefill_nodes_compute_again(seed: int) -> None:
    trace, dense = chat(seed=seed), Fleet(shape=CacheShape(state_groups=0))
    alone, never = run(Routing.CACHE, trace, dense), Simulation(Routing.CACHE, dense, itl_budget=0).run(trace)
    assert alone.share <= 1.03 * never.share
    assert alone.mean <= never.mean


def test_without_states_busy_decode_nodes_do_not_turn_away_what_only_they_have() -> None:
    """A prefill node computes turns that it never saw for a prompt that another one on its decode node turned away."""
    trace, dense = chat(Chat(200, systems=12, within=60.0), 1, "chat-busy"), Fleet(shape=CacheShape(state_groups=0))
    alone, never = run(Routing.CACHE, trace, dense), Simulation(Routing.CACHE, dense, itl_budget=0).run(trace)
    assert alone.share <= 1.06 * never.share
    assert alone.percentile(0.99) <= never.percentile(0.99)


def test_a_first_token_comes_after_all_that_it_takes() -> None:
    """Alone on idle nodes: the prompt is computed and read, and then there is a step."""
    fleet = Fleet(1, 1, prefill_rate=1000.0, overhead=0.5, transfer_rate=2000.0, hand_over=0.25, step=0.125)
    trace = Trace("t", (Request(3.0, None, None, (Segment(1, 1001),), 5),))
    outcome = run(Routing.LEAST_LOADED, trace, fleet)
    assert outcome.mean == pytest.approx(0.5 + 1.001 + 0.25 + 0.5 + 0.001 + 0.125)
    assert (outcome.moved, outcome.tokens, outcome.computed.total()) == (1000, 1001, 1002)


def test_prompts_wait_for_each_other_on_a_prefill_node() -> None:
    fleet = Fleet(1, 1, prefill_rate=1000.0, overhead=0.0, transfer_rate=1e9, hand_over=0.0, step=0.0)
    trace = Trace("t", tuple(Request(0.0, None, None, (Segment(name, 1000),), 1) for name in range(3)))
    assert run(Routing.LEAST_LOADED, trace, fleet).first_tokens == pytest.approx([1.0, 2.0, 3.0], abs=0.01)


def test_a_request_comes_after_the_one_before_has_ended() -> None:
    fleet = Fleet(1, 1, prefill_rate=1000.0, overhead=0.0, transfer_rate=1e9, hand_over=0.0, step=1.0)
    turns = (Request(0.0, None, 1, (Segment(1, 1000),), 5), Request(2.0, 0, 1, (Segment(2, 1000),), 1))
    simulation = Simulation(Routing.LEAST_LOADED, fleet)
    began = simulation.clock.now()
    simulation.run(Trace("t", turns))
    assert simulation.clock.now() - began == pytest.approx(1 + 5 + 2 + 1 + 1, abs=0.01)


# -- nodes that compute beside their streams, chunk by chunk

CHUNKED = Fleet(0, 0, CacheShape(blocks=4096), 1000.0, 0.0, 1e9, hand_over=0.0, step=0.1, chunk=500, boths=1)


def asked(*requests: tuple[float, int, int]) -> Trace:
    """Requests at these seconds, of so many tokens in prompt and answer; no two have anything in common."""
    return Trace(
        "t", tuple(Request(at, None, None, (Segment(n, tokens),), out) for n, (at, tokens, out) in enumerate(requests))
    )


def test_a_chunk_of_a_prompt_gives_each_stream_a_token() -> None:
    """Two chunks of half a second and the step that each is in; without chunks a stream waits for the whole prompt."""
    trace = asked((0.0, 100, 21), (1.0, 1000, 1))
    stream = run(Routing.CACHE, trace, CHUNKED).streams[-1]
    assert stream.tokens == 20
    assert stream.first_token == pytest.approx(0.2)
    assert stream.seconds == pytest.approx(20 * 0.1 + 2 * 0.5, abs=0.01)
    assert stream.longest == pytest.approx(0.6)
    whole = run(Routing.CACHE, trace, dataclasses.replace(CHUNKED, chunk=0)).streams[-1]
    assert whole.seconds == pytest.approx(20 * 0.1 + 1.0, abs=0.01)
    assert whole.longest == pytest.approx(1.0)


def test_streams_make_each_other_slower() -> None:
    """One alone for a second, then both: a step of 0.15 s instead of 0.125."""
    fleet = dataclasses.replace(CHUNKED, per_stream=0.025, prefill_rate=1e9)
    first, second = run(Routing.CACHE, asked((0.0, 100, 41), (1.0, 100, 11)), fleet).streams[::-1]
    assert second.seconds == pytest.approx(10 * 0.15, abs=0.02)
    assert first.seconds == pytest.approx(1.0 + 1.5 + (40 - 1.0 / 0.125 - 10) * 0.125, abs=0.1)


def test_a_ticket_is_used_once_the_prompt_before_it_is_computed() -> None:
    """One of two equal nodes computes a long prompt; an answer that is handed to it begins after that."""
    fleet = dataclasses.replace(CHUNKED, boths=2)
    streams = run(Routing.LEAST_LOADED, asked((0.0, 3000, 1), (0.1, 300, 1)), fleet).streams
    assert min(each.first_token for each in streams) > 3.0


def test_equal_nodes_answer_all_and_hold_nothing_after_it() -> None:
    simulation = Simulation(Routing.CACHE, dataclasses.replace(CHUNKED, boths=3, prefill_rate=20_000.0))
    outcome = simulation.run(SMALL["agents"])
    assert len(outcome.streams) == len(SMALL["agents"].requests)
    assert {(view.active, view.lightest.queued, view.footprint) for view in simulation.pool.state().nodes} == {
        (0, 0, Footprint())
    }
    assert {node.streams for node in simulation.nodes.values()} == {0}


def test_sticky_sessions_stay_where_they_began() -> None:
    """Two of four sessions begin on each prefill node, and a session's next turn finds what it has there."""
    fleet = Fleet(2, 2, keep_share=0.0)
    first = [Request(number * 5.0, None, number, (Segment(number, 2000),), 1) for number in range(4)]
    second = [Request(1.0, number, number, (Segment(number, 2000), Segment(9, 200)), 1) for number in range(4)]
    outcome = Simulation(Routing.SESSION, fleet, policy=Sticky()).run(Trace("t", (*first, *second)))
    assert {outcome.computed[f"prefill-{index}"] for index in range(2)} == {2 * (2000 + 2200 - 1792)}


def test_a_prompt_that_is_handed_over_waits_on_no_decode_node() -> None:
    """A prompt is queued where it is computed, and nowhere while its answer runs."""
    simulation, trace = Simulation(Routing.LEAST_LOADED, dataclasses.replace(CHUNKED, boths=2)), asked((0.0, 1000, 40))
    seen = set[tuple[int, ...]]()
    for wait in simulation._request(trace, 0):
        views = simulation.pool.state().nodes
        seen.add((sum(view.active for view in views), sum(view.lightest.prompts for view in views)))
        simulation.clock.advance(wait)
    assert seen == {(2, 1), (1, 0)}
