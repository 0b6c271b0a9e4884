"""The book of load: what places have to do, how fast they were and how busy, as it is learned."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.nodes.load import LEAST_PER_TOKEN, MEMORY, MOST_PER_TOKEN, START, STEADY, Load, PlaceLoad, Work


def learned(fixed: float, per_token: float, sizes: list[int], place: PlaceLoad | None = None) -> Load:
    """A book that has learned from prompts of these sizes, at a place that takes so long."""
    book, place = Load(), place or PlaceLoad()
    for tokens in sizes:
        book.learn(Work.PREFILL, place, tokens, fixed + per_token * tokens)
    return book


def places(count: int) -> list[PlaceLoad]:
    return [PlaceLoad() for _ in range(count)]


def test_a_place_that_nobody_knows_has_the_start_values() -> None:
    assert Load().pace_at(Work.PREFILL, PlaceLoad()) == START[Work.PREFILL]


@pytest.mark.parametrize(("fixed", "per_token"), [(0.01, 1 / 1000), (0.0, 1 / 50_000), (0.3, 1 / 8000)])
def test_a_line_is_found(fixed: float, per_token: float) -> None:
    place = PlaceLoad()
    pace = learned(fixed, per_token, [100, 4000, 900, 2000, 10_000, 300] * 10, place).pace_at(Work.PREFILL, place)
    assert pace.per_token == pytest.approx(per_token, rel=0.15)
    assert pace.seconds(3000) == pytest.approx(fixed + per_token * 3000, rel=0.15)


def test_prompts_of_one_size_tell_what_that_size_takes() -> None:
    place = PlaceLoad()
    book = learned(0, 1 / 2000, [450] * 40, place)
    assert book.pace_at(Work.PREFILL, place).seconds(450) == pytest.approx(0.225, rel=0.2)


@pytest.mark.parametrize("per_token", [1 / 2000, 1 / 8000, 1 / 100_000])
def test_prompts_of_one_size_do_not_change_what_is_fixed(per_token: float) -> None:
    """Whether the places are slower than `START` says, or quicker: a short rest of a prompt takes its fixed part."""
    fixed, place = START[Work.PREFILL].fixed, PlaceLoad()
    pace = learned(fixed, per_token, [1500] * 40, place).pace_at(Work.PREFILL, place)
    assert pace.fixed == pytest.approx(fixed, rel=0.3)
    assert pace.seconds(30) == pytest.approx(fixed + 30 * per_token, rel=0.3)


def test_short_rests_of_prompts_do_not_tell_what_a_token_takes() -> None:
    place = PlaceLoad()
    pace = learned(0.025, 0, [17, 25, 33] * 20, place).pace_at(Work.PREFILL, place)
    assert pace.seconds(25) == pytest.approx(0.025, rel=0.1)
    assert pace.per_token == pytest.approx(START[Work.PREFILL].per_token, rel=0.3)


def test_a_place_that_was_slow_for_once_is_not_avoided_for_ever() -> None:
    slow, *others = places(4)
    book = learned(0.01, 1 / 8000, [1500, 1500] * 5, others[0])
    book.learn(Work.PREFILL, slow, 1500, 1.0)
    assert slow.prefill > 1.5
    for number in range(300):
        book.learn(Work.PREFILL, others[number % 3], 1500, 0.2)
    assert slow.prefill == pytest.approx(1.0, abs=0.05)


def test_a_place_that_works_is_known_as_before_whatever_others_do() -> None:
    book, four = Load(), places(4)
    for number in range(400):
        book.learn(Work.PREFILL, four[number % 4], 1500, 0.2 if number % 4 else 0.8)
    assert four[0].prefill / four[1].prefill == pytest.approx(4, rel=0.15)


def test_a_way_that_was_slow_for_once_is_not_avoided_for_ever() -> None:
    book, place = Load(), PlaceLoad()
    for _ in range(3):
        book.learn(Work.LOCAL, place, 25, 0.5)
    before = book.pace_at(Work.LOCAL, place).seconds(25)
    for _ in range(100):
        book.passed_over(Work.LOCAL, place)
    start = START[Work.LOCAL].seconds(25)
    assert before > 5 * start
    assert start <= book.pace_at(Work.LOCAL, place).seconds(25) < 1.5 * start


def test_a_way_that_was_never_taken_can_be_passed_over() -> None:
    book, place = Load(), PlaceLoad()
    book.passed_over(Work.LOCAL, place)
    assert book.pace_at(Work.LOCAL, place).seconds(25) == pytest.approx(START[Work.LOCAL].seconds(25))


def test_a_place_without_samples_is_as_fast_as_all_that_do_such_work_and_as_no_others() -> None:
    book = learned(0, 1 / 1000, [1000, 5000] * 20)
    assert book.pace_at(Work.PREFILL, PlaceLoad()) == book.pace(Work.PREFILL)
    assert book.pace(Work.PREFILL).per_token == pytest.approx(1 / 1000, rel=0.2)
    assert book.pace(Work.LOCAL) == START[Work.LOCAL]


def test_a_slow_place_is_told_from_a_quick_one() -> None:
    book, (quick, slow) = Load(), places(2)
    for _ in range(30):
        book.learn(Work.PREFILL, quick, 2000, 0.2)
        book.learn(Work.PREFILL, slow, 2000, 0.8)
    assert quick.prefill < 0.6
    assert slow.prefill > 1.4
    assert book.least_factor(Work.PREFILL) == quick.prefill
    assert book.pace_at(Work.PREFILL, slow).seconds(2000) == pytest.approx(0.8, rel=0.1)


def test_the_quickest_place_is_known_though_places_become_slower_and_leave() -> None:
    book, some = Load(), places(3)
    for seconds, place in [(0.1, 0), (0.2, 1), (0.8, 0), (0.8, 0), (0.05, 2), (0.05, 2), (0.9, 2), (0.9, 2), (0.1, 1)]:
        book.learn(Work.PREFILL, some[place], 2000, seconds)
        assert book.least_factor(Work.PREFILL) == min(1.0, *(each.prefill for each in some))
    book.drop_place(some[1])
    assert book.least_factor(Work.PREFILL) == min(1.0, some[0].prefill, some[2].prefill)


def test_one_stall_does_not_make_a_place_slow() -> None:
    place = PlaceLoad()
    book = learned(0, 1 / 8000, [2000] * 30, place)
    before = book.pace_at(Work.PREFILL, place).seconds(2000)
    book.learn(Work.PREFILL, place, 2000, 600.0)
    assert book.pace_at(Work.PREFILL, place).seconds(2000) < 2 * before


def test_the_time_for_which_a_prompt_waits_for_another_is_not_its_own() -> None:
    book, place = Load(), PlaceLoad()
    for second in range(0, 60, 2):  # two at once, a second each
        assert book.computed(Work.PREFILL, place, 4000, second, second + 1) == 1.0
        assert book.computed(Work.PREFILL, place, 4000, second, second + 2) == 1.0
    assert book.pace_at(Work.PREFILL, place).seconds(4000) == pytest.approx(1.0, rel=0.1)


def test_what_a_decode_place_computes_itself_is_no_part_of_how_long_it_reads() -> None:
    book, (place, other) = Load(), places(2)
    for second in range(40):
        book.learn(Work.HAND_OVER, other, 1000, other.seconds_alone(second, second + 0.04))
        book.computed(Work.LOCAL, place, 2000, second, second + 0.25)
        book.learn(Work.HAND_OVER, place, 1000, place.seconds_alone(second + 0.1, second + 0.29))
    assert place.hand_over == pytest.approx(1.0, abs=0.1)


def test_places_that_left_are_forgotten_at_once() -> None:
    book, (left, stays) = Load(), places(2)
    for place in (left, stays):
        book.learn(Work.PREFILL, place, 1500, 1.0)
    book.drop_place(left)
    for _ in range(300):
        book.learn(Work.PREFILL, stays, 1500, 0.2)
    assert stays.prefill == pytest.approx(1.0, abs=0.05)
    assert list(book._samples[Work.PREFILL]) == list(book._worked) == [stays]


def test_a_place_that_is_avoided_is_as_any_other_in_the_end() -> None:
    book, (avoided, chosen) = Load(), places(2)
    book.learn(Work.PREFILL, avoided, 1500, 1.0)
    for _ in range(300):
        book.learn(Work.PREFILL, chosen, 1500, 0.2)
    assert avoided.prefill == 1.0
    assert list(book._samples[Work.PREFILL]) == [chosen]


def test_what_places_did_lately_weighs_more_than_what_they_did_long_ago() -> None:
    book, (early, late) = Load(), places(2)
    for number in range(40_000):
        book.learn(Work.PREFILL, early if number < 39_000 else late, 100, 0.01)
    assert 0 <= early.recent < 0.01 * late.recent < float("inf")


@given(st.lists(st.tuples(st.integers(0, 200_000), st.floats(0, 1e4)), max_size=30))
def test_whatever_is_seen_a_pace_is_positive_and_finite(samples: list[tuple[int, float]]) -> None:
    book, place = Load(), PlaceLoad()
    for tokens, seconds in samples:
        book.learn(Work.PREFILL, place, tokens, seconds)
    for pace in (book.pace_at(Work.PREFILL, place), book.pace(Work.PREFILL)):
        assert LEAST_PER_TOKEN / 50 <= pace.per_token <= MOST_PER_TOKEN * 50
        assert 0 < pace.fixed < 1000


# -- how busy places were


def worked(book: Load, shares: dict[PlaceLoad, float], seconds: int, begin: int = 0) -> None:
    """Each place computes a prompt every second, which takes such a share of it."""
    for second in range(begin, begin + seconds):
        for place, share in shares.items():
            book.prefilled(place, 1, share, second, second + share)


def share(book: Load, place: PlaceLoad) -> float:
    return place.busy * book.busy_weight


def test_a_share_is_that_of_the_time() -> None:
    book, (half, tenth, idle) = Load(), places(3)
    worked(book, {half: 0.5, tenth: 0.1}, 300)
    assert share(book, half) == pytest.approx(0.5, rel=0.15)
    assert share(book, tenth) == pytest.approx(0.1, rel=0.15)
    assert share(book, idle) == 0.0
    assert book.usual == pytest.approx(0.3, rel=0.3)


def test_a_rank_is_a_part_of_its_node() -> None:
    book, place = Load(), PlaceLoad()
    for second in range(300):
        book.prefilled(place, 2, 0.5, second, second + 0.5)
    assert share(book, place) == pytest.approx(0.25, rel=0.15)


@pytest.mark.parametrize(("seconds", "least", "most"), [(10, 0.35, 0.5), (1, 0.0, 0.2)])
def test_a_young_record_is_not_taken_for_idle_places_nor_one_prompt_for_a_busy_one(
    seconds: int, least: float, most: float
) -> None:
    book, place = Load(), PlaceLoad()
    worked(book, {place: 0.5}, seconds)
    assert least < share(book, place) < most


def test_what_was_long_ago_counts_little() -> None:
    book, (busy, other) = Load(), places(2)
    worked(book, {busy: 0.8}, 100)
    before = share(book, busy)
    worked(book, {other: 0.1}, int(MEMORY), 100)
    assert share(book, busy) == pytest.approx(before / math.e, rel=0.1)


def test_days_go_by_and_no_number_grows_for_ever() -> None:
    book, (once, place) = Load(), places(2)
    worked(book, {once: 0.9}, 10)
    for hour in range(1, 200):
        worked(book, {place: 0.5}, 120, hour * 3600)
    assert share(book, once) < 1e-6
    assert share(book, place) == pytest.approx(0.5, rel=0.15)
    assert place.busy < 1e200


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 600), st.floats(0, 1e6)), max_size=40))
def test_whatever_is_added_shares_are_finite_and_not_negative(added: list[tuple[int, float, float]]) -> None:
    """Also where one that ended earlier is told later."""
    book, three = Load(), places(3)
    for index, seconds, ended in added:
        book.prefilled(three[index], 1, seconds, ended, ended)
    assert all(0 <= share(book, place) < math.inf for place in three)
    assert 0 <= book.usual < math.inf


# -- what a prompt costs streams


def test_a_second_weighs_less_for_streams_as_answers_take_longer_than_prompts() -> None:
    book, place = Load(), PlaceLoad()
    assert (book.stall_weight, book.answer_stalls(place)) == (0.0, 0.0)
    worked(book, {place: 0.5}, 300)
    assert book.stall_weight == 0.0, "no answer was seen yet"
    for _ in range(300):
        book.streamed(1, 100, 50.0)
    assert book.stall_weight == pytest.approx(STEADY * book.usual / 50.0)
    assert book.answer_stalls(place) == pytest.approx(STEADY * share(book, place) * STEADY * book.usual)
    alone, place.legs = book.answer_stalls(place), 3
    assert book.answer_stalls(place) == pytest.approx(alone / 4), "three streams keep prompts off already"
    for _ in range(1000):
        book.streamed(1, 2, 0.01)
    assert book.stall_weight == 1.0, "and never more than a first token's second"


@given(st.lists(st.tuples(st.floats(0, 600), st.floats(0, 1e6)), max_size=40))
def test_whatever_took_how_long_the_weight_of_streams_is_a_share(seen: list[tuple[float, float]]) -> None:
    book, place = Load(), PlaceLoad()
    for second, (prompt, answer) in enumerate(seen):
        book.prefilled(place, 1, prompt, second, second + prompt)
        book.streamed(1, 10, answer)
        assert 0 <= book.stall_weight <= 1
        assert 0 <= book.answer_stalls(place) < math.inf


# -- what places still have to do


def compute(book: Load, place: PlaceLoad, tokens: int, began: float, now: float) -> None:
    """A prompt that was given to the place then is computed now."""
    place.drop_prompt("k", tokens)
    book.computed(Work.PREFILL, place, tokens, began, now)


def test_how_long_a_place_still_needs_is_known_once_it_has_computed_a_prompt() -> None:
    book, place = Load(), PlaceLoad()
    assert book.seconds_left(Work.PREFILL, place, 0.0) == 0.0
    place.take_prompt("k", 1000, 0.0)
    assert book.seconds_left(Work.PREFILL, place, 0.5) == math.inf
    compute(book, place, 1000, 0.0, 0.2)
    assert book.seconds_left(Work.PREFILL, place, 0.2) == 0.0
    place.take_prompt("k", 1000, 1.0)
    assert 0.1 < book.seconds_left(Work.PREFILL, place, 1.0) < 0.3


def test_how_long_a_place_still_needs_is_what_its_prompts_take_but_for_what_is_done() -> None:
    book, place, now = Load(), PlaceLoad(), 0.0
    for tokens in (500, 1000, 2000) * 40:
        place.take_prompt("k", tokens, now)
        compute(book, place, tokens, now, now + tokens / 1000)
        now += tokens / 1000
    for _ in range(2):
        place.take_prompt("k", 1000, now)
    assert book.seconds_left(Work.PREFILL, place, now) == pytest.approx(2.0, rel=0.05)
    assert book.seconds_left(Work.PREFILL, place, now + 0.4) == pytest.approx(1.6, rel=0.05)
    late = book.seconds_left(Work.PREFILL, place, now + 9.0)
    assert late == pytest.approx(1.0, rel=0.05), "what comes after the one that it computes is still whole"
    place.drop_prompt("k", 1000)
    assert book.seconds_left(Work.PREFILL, place, now + 9.0) == pytest.approx(0.0, abs=0.05)


def test_the_keys_whose_prompts_a_place_has_are_known() -> None:
    place = PlaceLoad()
    for key in ("a", "a", "b"):
        place.take_prompt(key, 10, 0.0)
    place.drop_prompt("a", 10)
    assert set(place.keys) == {"a", "b"}
    place.drop_prompt("a", 10)
    assert set(place.keys) == {"b"}
    assert (place.prompts, place.queued) == (1, 10)
