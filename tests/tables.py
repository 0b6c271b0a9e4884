"""Large tables of cases: in `make test` each value beside each other one, in `make test-long` the whole table."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Row = tuple[Any, ...]
Pair = tuple[tuple[int, int], ...]
"""Two axes, each with the place of a value on it; one, where there is no other."""


def spread(*axes: Iterable[Any]) -> list[ParameterSet]:
    """Every combination of the axes' values, as parameters of a test, in the order of `itertools.product`.

    Those that `covering` leaves out are marked `long`. Where more than two axes decide together, make one axis of
    their combinations.
    """
    values = [tuple(axis) for axis in axes]
    kept = covering([len(axis) for axis in values])
    return [
        pytest.param(*row, marks=() if places in kept else pytest.mark.long)
        for places, row in zip(_places([len(axis) for axis in values]), itertools.product(*values), strict=True)
    ]


def covering(sizes: Sequence[int]) -> frozenset[Row]:
    """Combinations, as places on axes of these sizes, in which any two values of different axes meet at least once.

    The same ones every time: the first of those that bring most pairs together that have not met, until all have.
    All values of an axis that is alone.
    """
    rows = {row: frozenset(_pairs(row)) for row in _places(sizes)}
    apart = set[Pair]().union(*rows.values())
    kept: list[Row] = []
    while apart:
        best = max(rows, key=lambda row: len(rows[row] & apart))
        apart -= rows.pop(best)
        kept.append(best)
    return frozenset(kept)


def _places(sizes: Sequence[int]) -> Iterator[Row]:
    return itertools.product(*(range(size) for size in sizes))


def _pairs(row: Row) -> Iterator[Pair]:
    return itertools.combinations(enumerate(row), min(2, len(row)))
