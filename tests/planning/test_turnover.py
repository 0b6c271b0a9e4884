"""How long an unused block stays in a place's cache, by what the place stores."""

import pytest

from pdproxy.planning.prefix import Place
from pdproxy.planning.turnover import LOOK_SECONDS, REMEMBERED_SECONDS, Turnover

ONE, OTHER = Place("p0"), Place("p1")


def looked(*counts: int, every: float = 1.0, most: int = 600) -> Turnover:
    """One place, which has stored so many blocks at each look."""
    turnover = Turnover()
    for number, count in enumerate(counts):
        turnover.note_stored([(ONE, count, most)], number * every)
    return turnover


def test_a_cache_that_stores_a_hundredth_of_itself_each_second_keeps_a_block_for_a_hundred_seconds() -> None:
    turnover = looked(*(6 * number for number in range(600)))
    assert turnover.stays[ONE] == pytest.approx(100.0, rel=0.02)


def test_nothing_is_said_of_a_place_that_stores_next_to_nothing() -> None:
    assert looked(0, 0, 0).stays == {}
    assert looked(100, 100, 100).stays == {}, "what it had before the first look was not stored now"


def test_what_a_place_stored_long_ago_counts_little() -> None:
    turnover = looked(0, 600)
    busy = turnover.stays[ONE]
    turnover.note_stored([(ONE, 600, 600)], 1.0 + 3 * REMEMBERED_SECONDS)
    assert turnover.stays[ONE] > 15 * busy


def test_a_place_that_has_begun_anew_or_left_starts_from_nothing() -> None:
    turnover = looked(0, 600)
    turnover.note_stored([(ONE, 5, 600)], 2.0)
    assert turnover.stays[ONE] > 0, "fewer than before: its events were lost, and nothing is taken away"
    turnover.note_stored([(OTHER, 5, 600)], 3.0)
    turnover.note_stored([(ONE, 1000, 600), (OTHER, 5, 600)], 4.0)
    assert turnover.stays == {}


def test_it_looks_once_in_a_while() -> None:
    turnover = Turnover()
    assert turnover.is_due(0.0)
    turnover.note_stored([], 0.0)
    assert (turnover.is_due(LOOK_SECONDS / 2), turnover.is_due(LOOK_SECONDS)) == (False, True)
