"""The part of a large table that is in `make test`."""

import itertools
from collections.abc import Sequence

import pytest

from tests.tables import covering, spread

SIZES = [(2, 2), (12, 6, 4, 2), (4, 5, 6, 2), (2, 12, 3, 3), (1, 7), (3, 3, 3, 3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_two_values_meet(sizes: Sequence[int]) -> None:
    kept = covering(sizes)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        met = {(row[one], row[other]) for row in kept}
        assert met == set(itertools.product(range(sizes[one]), range(sizes[other])))


def test_far_fewer_than_all_are_kept() -> None:
    assert len(covering((12, 6, 4, 2))) <= 80


def test_no_combination_is_lost_and_the_rest_is_long() -> None:
    axes = ("abc", (1, 2), (True, False))
    table = spread(*axes)
    assert [each.values for each in table] == list(itertools.product(*axes))
    kept = [each.values for each in table if not each.marks]
    assert 6 <= len(kept) < 12
    assert all([mark.name for mark in each.marks] in ([], ["long"]) for each in table)


def test_one_axis_is_kept_whole() -> None:
    assert len(covering((5,))) == 5
