"""How figures become a table."""

import pytest

from deploy.bench.latency import Timed
from deploy.bench.report import Figure, Sums, added, chunks, first_tokens, ratio, summed, table
from deploy.bench.script import Line

FIGURES = [
    *(Figure(Line.COMPLETIONS, "ours", cost, 30.0, cost - 0.5) for cost in (3.0, 2.0, 9.0)),
    *(Figure(Line.COMPLETIONS, "theirs", cost, 32.0) for cost in (1.5, 1.0, 0.5)),
    Figure(Line.WHOLE, "ours", 1.0, 1.0),
    Figure(Line.WHOLE, "theirs", 4.0, 1.0),
]


def test_one_slow_round_spoils_neither_least_nor_median() -> None:
    assert summed(FIGURES, Line.COMPLETIONS, "ours") == Sums(2.0, 3.0, pieces=30.0, instructions=1.5)


def test_the_ratio_is_of_the_least_of_one_line() -> None:
    assert ratio(FIGURES, Line.COMPLETIONS, "ours", "theirs") == 4.0
    assert ratio(FIGURES, Line.WHOLE, "ours", "theirs") == 0.25


def test_the_table_has_a_row_for_each_line_and_peer() -> None:
    rows = table(FIGURES, ["ours", "theirs"], "theirs").splitlines()
    assert len(rows) == 2 + 4
    assert rows[2] == "| completions, streamed | ours | 2.000 | 3.000 | 4.00x | 1.50 | 30.0 |"
    assert rows[5] == "| completions, whole | theirs | 4.000 | 4.000 | 1.00x |  | 1.0 |"


def test_missing_figures_are_not_shown_as_zero() -> None:
    with pytest.raises(ValueError, match="no figures of theirs"):
        summed(FIGURES[:3], Line.COMPLETIONS, "theirs")


def test_what_a_way_adds_to_the_first_token_has_an_interval_around_it() -> None:
    direct, way = Timed([1.0, 1.1, 0.9, 1.0] * 8), Timed([1.5, 1.6, 1.4, 1.5] * 8)
    found = added(way, direct)
    assert found.median == 0.5
    assert 0.3 < found.low <= 0.5 <= found.high < 0.7
    rows = first_tokens({"direct": direct, "ours": way}, Line.CHAT).splitlines()
    assert rows[2].endswith("| 1.000 | 1.100 |  |")
    assert "| chat, streamed | ours | 1.500 |" in rows[3]


def test_merged_tokens_and_late_ones_are_shown() -> None:
    rows = chunks({"ours": Timed([1.0], [20.0] * 98 + [40.0] * 2, merged=3)}, Line.CHAT).splitlines()
    assert rows[2] == "| chat, streamed | ours | 3 | 20.00 | 40.00 |"
