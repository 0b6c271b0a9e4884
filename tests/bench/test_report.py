"""How figures become a table."""

import pytest

from tests.bench.report import Figure, Sums, ratio, summed, table
from tests.bench.script import Line

FIGURES = [
    *(Figure(Line.COMPLETIONS, "ours", cost, 30.0) for cost in (3.0, 2.0, 9.0)),
    *(Figure(Line.COMPLETIONS, "theirs", cost, 32.0) for cost in (1.5, 1.0, 0.5)),
    Figure(Line.WHOLE, "ours", 1.0, 1.0),
    Figure(Line.WHOLE, "theirs", 4.0, 1.0),
]


def test_one_slow_round_does_not_spoil_the_median() -> None:
    assert summed(FIGURES, Line.COMPLETIONS, "ours") == Sums(least=2.0, median=3.0, pieces=30.0)


def test_the_ratio_is_of_one_line() -> None:
    assert ratio(FIGURES, Line.COMPLETIONS, "ours", "theirs") == 3.0
    assert ratio(FIGURES, Line.WHOLE, "ours", "theirs") == 0.25


def test_the_table_has_a_row_for_each_line_and_peer() -> None:
    rows = table(FIGURES, ["ours", "theirs"]).splitlines()
    assert len(rows) == 2 + 4
    assert rows[2] == "| completions, streamed | ours | 2.00 | 3.00 | 3.00x | 30.0 |"
    assert rows[5] == "| completions, whole | theirs | 4.00 | 4.00 | 1.00x | 1.0 |"


def test_missing_figures_are_not_shown_as_zero() -> None:
    with pytest.raises(ValueError, match="no figures of theirs"):
        summed(FIGURES[:3], Line.COMPLETIONS, "theirs")
