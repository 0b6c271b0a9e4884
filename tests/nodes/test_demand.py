"""How many nodes the last hour needed, from what was measured."""

import pytest

from pdproxy.nodes.demand import KEPT, MINUTE, Advice, Demand, Limit, Wanted, streams_each

WANTED = Wanted(prefill_busy=0.5, cache_fill=0.8, token_seconds=0.05)


def prefills(demand: Demand, minutes: range, seconds: float, *, delay: float = 0.0) -> None:
    """A prompt each minute, which takes one node so long, and begins to be computed so late."""
    for minute in minutes:
        arrived = minute * MINUTE
        demand.prefilled(arrived, seconds, arrived + delay + seconds)


def test_nothing_was_asked() -> None:
    assert Demand().advice(1000.0, WANTED) == Advice()


def test_prefill_nodes_by_the_seconds_that_prompts_take() -> None:
    demand = Demand()
    prefills(demand, range(10), 45.0)
    advice = demand.advice(10 * MINUTE - 1, WANTED)
    assert advice.prefill == pytest.approx(45 / 60 / 0.5)
    assert (advice.decode, advice.minutes) == (0.0, 10)


def test_the_busiest_five_minutes_of_the_hour_count() -> None:
    demand = Demand()
    prefills(demand, range(20), 6.0)
    prefills(demand, range(20, 25), 54.0)
    prefills(demand, range(25, 40), 6.0)
    advice = demand.advice(39 * MINUTE, WANTED)
    assert advice.prefill == pytest.approx(54 / 60 / 0.5)


def test_what_an_overloaded_node_computes_late_counts_when_it_was_asked() -> None:
    """Ten prompts of half a minute, all in one minute: five minutes of one node, one minute of five."""
    demand = Demand()
    for number in range(10):
        demand.prefilled(0.0, 30.0, 30.0 * (number + 1))
    late = demand.advice(5 * MINUTE - 1, WANTED)
    assert late.prefill == pytest.approx(300 / (5 * 60) / 0.5)
    again = Demand()
    for _ in range(10):
        again.prefilled(0.0, 30.0, 30.0)
    assert again.advice(5 * MINUTE - 1, WANTED).prefill == pytest.approx(late.prefill)


def test_what_is_older_than_an_hour_is_forgotten() -> None:
    demand = Demand()
    prefills(demand, range(1), 60.0)
    assert demand.advice((KEPT - 1) * MINUTE, WANTED).prefill > 0
    assert demand.advice(KEPT * MINUTE, WANTED) == Advice()
    prefills(demand, range(KEPT, KEPT + 200), 6.0)
    advice = demand.advice((KEPT + 199) * MINUTE, WANTED)
    assert advice.minutes == KEPT
    assert advice.prefill == pytest.approx(0.2)


def test_decode_nodes_by_what_fills_their_caches() -> None:
    demand = Demand()
    for second in range(0, 300, 5):
        demand.observed(float(second), streams=40, waiting=0, caches=2.0)
    advice = demand.advice(299.0, WANTED)
    assert advice.decode == pytest.approx(2.0 / 0.8)
    assert advice.limit is Limit.CACHE


def test_what_waits_for_room_counts_as_what_runs() -> None:
    demand = Demand()
    demand.observed(0.0, streams=10, waiting=5, caches=1.0)
    assert demand.advice(1.0, WANTED).decode == pytest.approx(1.5 / 0.8)


def test_decode_nodes_by_how_quickly_tokens_come() -> None:
    demand = Demand()
    for streams, pace in ((8, 0.02), (16, 0.04), (32, 0.08)):
        demand.decoded(streams, 100, 100 * pace)
    demand.observed(0.0, streams=48, waiting=0, caches=1.0)
    advice = demand.advice(1.0, WANTED)
    assert advice.decode == pytest.approx(48 / 16)
    assert (advice.limit, advice.streams_each) == (Limit.SPEED, 16)


def test_tokens_that_always_came_quickly_enough_limit_nothing() -> None:
    demand = Demand()
    demand.decoded(3, 100, 1.0)
    demand.observed(0.0, streams=3, waiting=0, caches=0.0)
    advice = demand.advice(1.0, WANTED)
    assert (advice.decode, advice.limit, advice.streams_each) == (0.0, Limit.NOTHING, None)


@pytest.mark.parametrize(
    ("pace", "each"),
    [
        ({}, None),
        ({1: 0.01, 2: 0.02}, None),
        ({1: 0.01, 8: 0.06}, 1),
        ({1: 0.01, 8: 0.06, 16: 0.03}, 1),  # the quick one beyond a slow one was luck
        ({4: 0.06, 8: 0.09}, None),  # too slow in any case: more nodes would not help
    ],
)
def test_how_many_streams_a_node_carries(pace: dict[int, float], each: int | None) -> None:
    assert streams_each(pace, 0.05) == each


def test_the_newest_samples_of_a_pace_count() -> None:
    """Nodes that became slow carry fewer streams; an answer of three tokens tells nothing."""
    demand = Demand()
    demand.decoded(2, 100, 1.0)
    demand.decoded(4, 100, 1.0)
    demand.decoded(8, 100, 9.0)
    assert demand.advice(0.0, WANTED).streams_each is None  # nothing was observed yet
    demand.observed(0.0, 8, 0, 0.0)
    assert demand.advice(0.0, WANTED).streams_each == 4
    demand.decoded(4, 3, 9.0)
    assert demand.advice(0.0, WANTED).streams_each == 4
    for _ in range(100):
        demand.decoded(4, 100, 9.0)
    assert demand.advice(0.0, WANTED).streams_each == 2
