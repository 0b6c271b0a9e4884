"""The circuit: its moves, with times as arguments."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.nodes.circuit_breaker import SMALLEST_SHARE, CircuitBreaker, CircuitBreakerConfig, CircuitState

RULES = CircuitBreakerConfig(failures=3, cool_down=10, longest_cool_down=60, slow_start=20)


def opened(now: float = 100.0) -> CircuitBreaker:
    return CircuitBreaker(RULES).opened(now)


def test_it_is_open_for_the_cool_down_and_then_half_open() -> None:
    circuit = opened(100)
    assert circuit.at(109.9).state is CircuitState.OPEN
    assert circuit.at(110).state is CircuitState.HALF_OPEN


def test_while_open_requests_from_before_change_nothing() -> None:
    circuit = opened(100)
    assert circuit.succeeded(101) == circuit


def test_a_good_trial_closes_it_and_starts_slowly() -> None:
    circuit = opened(100).at(110).succeeded(111)
    assert circuit.state is CircuitState.CLOSED
    assert circuit.share(111) == SMALLEST_SHARE
    assert circuit.share(121) == pytest.approx(0.5)
    assert circuit.share(131) == 1.0


def test_a_bad_trial_opens_it_for_twice_as_long_up_to_the_longest() -> None:
    circuit, now, seen = opened(100), 100.0, []
    for _ in range(5):
        seen.append(circuit.cool_down())
        now += circuit.cool_down()
        circuit = circuit.at(now).opened(now)
    assert seen == [10, 20, 40, 60, 60]


def test_openings_are_forgotten_only_after_a_calm_time() -> None:
    back = opened(100).at(110).succeeded(110)
    assert back.succeeded(111).openings == 1
    assert back.succeeded(130).openings == 0


def test_a_new_node_has_its_full_share_and_slow_start_can_be_off() -> None:
    assert CircuitBreaker(RULES).share(0) == 1.0
    assert CircuitBreaker(CircuitBreakerConfig(slow_start=0), changed_at=5).share(5) == 1.0


@given(st.lists(st.tuples(st.sampled_from(["opened", "succeeded", "at"]), st.floats(0, 30)), max_size=60))
def test_whatever_happens_its_values_stay_in_range(moves: list[tuple[str, float]]) -> None:
    circuit, now = CircuitBreaker(RULES), 0.0
    for move, passed in moves:
        now += passed
        circuit = getattr(circuit, move)(now)
        assert SMALLEST_SHARE <= circuit.share(now) <= 1
        assert RULES.cool_down <= circuit.cool_down() <= RULES.longest_cool_down


@given(
    st.floats(0, 2),
    st.floats(0, 1) | st.just(1.0),
    st.sampled_from([0.0, 0.3, 20.0, 3600.0]),
    st.sampled_from(CircuitState),
)
def test_nothing_changes_by_time_alone_before_it_is_said_to(
    age: float, part: float, slow_start: float, state: CircuitState
) -> None:
    config = CircuitBreakerConfig(cool_down=10, slow_start=slow_start)
    now = 1000.0 + age * (slow_start if state is CircuitState.CLOSED else config.cool_down)
    circuit = CircuitBreaker(config, state, changed_at=1000.0, openings=1).at(now)
    later = now + part * (min(circuit.constant_until(now), now + 4000) - now)
    if later > now:
        assert (circuit.at(later), circuit.share(later)) == (circuit, circuit.share(now))


def test_slow_start_goes_on_in_small_steps() -> None:
    circuit = CircuitBreaker(CircuitBreakerConfig(slow_start=20), changed_at=1000.0)
    now, shares = 1000.0, list[float]()
    while circuit.constant_until(now) < math.inf:
        now = circuit.constant_until(now) + 0.001
        shares.append(circuit.share(now))
    assert shares == sorted(shares)
    assert len(shares) == 100
    assert shares[-1] == 1.0
    assert max(later - earlier for earlier, later in itertools.pairwise(shares)) < 0.011
