"""How long nodes take, as it is learned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.planning.prefix import Place
from pdproxy.planning.rates import LEAST_PER_TOKEN, MOST_NODES, MOST_PER_TOKEN, START, Rates, Work


def learned(fixed: float, per_token: float, sizes: list[int], node: str = "p0") -> Rates:
    rates = Rates()
    for tokens in sizes:
        rates.took(Work.PREFILL, node, tokens, fixed + per_token * tokens)
    return rates


def test_a_node_that_nobody_knows_has_the_start_values() -> None:
    assert Rates().pace(Work.PREFILL, "p0") == START[Work.PREFILL]
    assert Rates().factors(Work.PREFILL) == {}


@pytest.mark.parametrize(("fixed", "per_token"), [(0.01, 1 / 1000), (0.0, 1 / 50_000), (0.3, 1 / 8000)])
def test_a_line_is_found(fixed: float, per_token: float) -> None:
    pace = learned(fixed, per_token, [100, 4000, 900, 2000, 10_000, 300] * 10).pace(Work.PREFILL, "p0")
    assert pace.per_token == pytest.approx(per_token, rel=0.15)
    assert pace.seconds(3000) == pytest.approx(fixed + per_token * 3000, rel=0.15)


def test_prompts_of_one_size_tell_what_that_size_takes() -> None:
    assert learned(0, 1 / 2000, [450] * 40).pace(Work.PREFILL, "p0").seconds(450) == pytest.approx(0.225, rel=0.2)


@pytest.mark.parametrize("per_token", [1 / 2000, 1 / 8000, 1 / 100_000])
def test_prompts_of_one_size_do_not_change_what_is_fixed(per_token: float) -> None:
    """Whether the nodes are slower than `START` says, or quicker: a short rest of a prompt takes its fixed part."""
    fixed = START[Work.PREFILL].fixed
    pace = learned(fixed, per_token, [1500] * 40).pace(Work.PREFILL, "p0")
    assert pace.fixed == pytest.approx(fixed, rel=0.3)
    assert pace.seconds(30) == pytest.approx(fixed + 30 * per_token, rel=0.3)


def test_short_rests_of_prompts_do_not_tell_what_a_token_takes() -> None:
    pace = learned(0.025, 0, [17, 25, 33] * 20).pace(Work.PREFILL, "p0")
    assert pace.seconds(25) == pytest.approx(0.025, rel=0.1)
    assert pace.per_token == pytest.approx(START[Work.PREFILL].per_token, rel=0.3)


def test_a_node_that_was_slow_for_once_is_not_avoided_for_ever() -> None:
    rates = learned(0.01, 1 / 8000, [1500, 1500] * 5, "p1")
    rates.took(Work.PREFILL, "p0", 1500, 1.0)
    avoided = rates.factors(Work.PREFILL)["p0"]
    assert avoided > 1.5
    for number in range(300):
        rates.took(Work.PREFILL, f"p{1 + number % 3}", 1500, 0.2)
    assert rates.factors(Work.PREFILL).get("p0", 1.0) == pytest.approx(1.0, abs=0.05)


def test_a_node_that_works_is_known_as_before_whatever_others_do() -> None:
    rates = Rates()
    for number in range(400):
        slow = number % 4 == 0
        rates.took(Work.PREFILL, f"p{number % 4}", 1500, 0.8 if slow else 0.2)
    factors = rates.factors(Work.PREFILL)
    assert factors["p0"] / factors["p1"] == pytest.approx(4, rel=0.15)


def test_a_way_that_was_slow_for_once_is_not_avoided_for_ever() -> None:
    rates = Rates()
    for _ in range(3):
        rates.took(Work.LOCAL, "d0", 25, 0.5)
    before = rates.pace(Work.LOCAL, "d0").seconds(25)
    for _ in range(100):
        rates.passed_over(Work.LOCAL, "d0")
    start = START[Work.LOCAL].seconds(25)
    assert before > 5 * start
    assert start <= rates.pace(Work.LOCAL, "d0").seconds(25) < 1.5 * start


def test_a_way_that_was_never_taken_can_be_passed_over() -> None:
    rates = Rates()
    rates.passed_over(Work.LOCAL, "d0")
    assert rates.pace(Work.LOCAL, "d0").seconds(25) == pytest.approx(START[Work.LOCAL].seconds(25))


def test_a_node_without_samples_has_the_mean_of_its_role_and_of_no_other() -> None:
    rates = learned(0, 1 / 1000, [1000, 5000] * 20)
    assert rates.pace(Work.PREFILL, "p9") == rates.role(Work.PREFILL)
    assert rates.role(Work.PREFILL).per_token == pytest.approx(1 / 1000, rel=0.2)
    assert rates.pace(Work.LOCAL, "d0") == START[Work.LOCAL]


def test_a_slow_node_is_told_from_a_quick_one() -> None:
    rates = Rates()
    for _ in range(30):
        rates.took(Work.PREFILL, "quick", 2000, 0.2)
        rates.took(Work.PREFILL, "slow", 2000, 0.8)
    assert rates.factors(Work.PREFILL)["quick"] < 0.6
    assert rates.factors(Work.PREFILL)["slow"] > 1.4
    assert rates.pace(Work.PREFILL, "slow").seconds(2000) == pytest.approx(0.8, rel=0.1)


def test_one_stall_does_not_make_a_node_slow() -> None:
    rates = learned(0, 1 / 8000, [2000] * 30)
    before = rates.pace(Work.PREFILL, "p0").seconds(2000)
    rates.took(Work.PREFILL, "p0", 2000, 600.0)
    assert rates.pace(Work.PREFILL, "p0").seconds(2000) < 2 * before


def test_the_time_for_which_a_prompt_waits_for_another_is_not_its_own() -> None:
    rates, place = Rates(), Place("p0")
    for second in range(0, 60, 2):  # two at once, a second each
        rates.computed(Work.PREFILL, place, 4000, second, second + 1)
        rates.computed(Work.PREFILL, place, 4000, second, second + 2)
    assert rates.pace(Work.PREFILL, "p0").seconds(4000) == pytest.approx(1.0, rel=0.1)


def test_what_a_decode_node_computes_itself_is_no_part_of_how_long_it_reads() -> None:
    rates, place = Rates(), Place("d0")
    for second in range(40):
        rates.taken_over(Place("d1"), 1000, second, second + 0.04)
        rates.computed(Work.LOCAL, place, 2000, second, second + 0.25)
        rates.taken_over(place, 1000, second + 0.1, second + 0.29)
    assert rates.factors(Work.HAND_OVER)["d0"] == pytest.approx(1.0, abs=0.1)


def test_nodes_that_left_are_forgotten_in_the_end() -> None:
    rates = Rates()
    for number in range(MOST_NODES + 1):
        rates.took(Work.HAND_OVER, f"d{number}", 100, 1.0)
    assert rates.pace(Work.HAND_OVER, "d0") == rates.role(Work.HAND_OVER)
    assert 0 < len(rates.factors(Work.HAND_OVER)) <= MOST_NODES


def test_a_node_that_left_does_not_stand_in_the_way_of_one_that_is_avoided() -> None:
    rates = Rates()
    for node in ("left", "p0"):
        rates.took(Work.PREFILL, node, 1500, 1.0)
    for _ in range(300):
        rates.took(Work.PREFILL, "p1", 1500, 0.2)
    assert "left" not in rates.factors(Work.PREFILL)
    assert "left" not in rates.recent
    assert rates.factors(Work.PREFILL).get("p0", 1.0) == pytest.approx(1.0, abs=0.05)


def test_a_node_that_does_other_work_still_did_it_lately() -> None:
    rates = Rates()
    rates.took(Work.LOCAL, "d0", 1500, 0.2)
    rates.took(Work.HAND_OVER, "d0", 1500, 0.2)
    for _ in range(300):
        rates.passed_over(Work.LOCAL, "d0")
    assert "d0" not in rates.factors(Work.LOCAL)
    assert rates.recent["d0"] > 0


def test_what_many_nodes_left_behind_is_forgotten() -> None:
    """Also where each of them worked a little at a time."""
    rates = Rates()
    for number in range(5000):
        rates.took(Work.PREFILL, f"p{number // 10}", 1500, 0.2)
    assert len(rates.factors(Work.PREFILL)) == len(rates.recent) < 500


def test_what_nodes_did_lately_weighs_more_than_what_they_did_long_ago() -> None:
    rates = Rates()
    for number in range(40_000):
        rates.took(Work.PREFILL, "early" if number < 39_000 else "late", 100, 0.01)
    assert 0 <= rates.recent.get("early", 0.0) < 0.01 * rates.recent["late"] < float("inf")


@given(st.lists(st.tuples(st.integers(0, 200_000), st.floats(0, 1e4)), max_size=30))
def test_whatever_is_seen_a_pace_is_positive_and_finite(samples: list[tuple[int, float]]) -> None:
    rates = Rates()
    for tokens, seconds in samples:
        rates.took(Work.PREFILL, "p0", tokens, seconds)
    for pace in (rates.pace(Work.PREFILL, "p0"), rates.role(Work.PREFILL)):
        assert LEAST_PER_TOKEN / 50 <= pace.per_token <= MOST_PER_TOKEN * 50
        assert 0 < pace.fixed < 1000
