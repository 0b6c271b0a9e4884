"""The figures of a bench, put together: pure."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.bench.script import Line


class Figure(NamedTuple):
    """What one round found.

    Attributes:
        cost: CPU milliseconds per request.
        pieces: reads of its answer per request, as the client saw them.
    """

    line: Line
    peer: str
    cost: float
    pieces: float


class Sums(NamedTuple):
    """Of the rounds of one peer on one line."""

    least: float
    median: float
    pieces: float


def summed(figures: Iterable[Figure], line: Line, peer: str) -> Sums:
    """The figures of all rounds.

    Raises:
        ValueError: there are none.
    """
    own = [figure for figure in figures if figure.line is line and figure.peer == peer]
    if not own:
        raise ValueError(f"no figures of {peer} for {line}")
    costs = [figure.cost for figure in own]
    return Sums(min(costs), statistics.median(costs), statistics.median(figure.pieces for figure in own))


def ratio(figures: Sequence[Figure], line: Line, ours: str, theirs: str) -> float:
    """How many times what ``theirs`` costs ``ours`` costs, by the medians."""
    return summed(figures, line, ours).median / summed(figures, line, theirs).median


def table(figures: Sequence[Figure], peers: Sequence[str]) -> str:
    """A Markdown table: a row for each line and peer; ratios are to the last peer."""
    rows = [
        "| CPU ms per request | proxy | least | median | ratio | reads per answer |",
        "|---|---|---|---|---|---|",
    ]
    for line in dict.fromkeys(figure.line for figure in figures):
        for peer in peers:
            sums = summed(figures, line, peer)
            times = ratio(figures, line, peer, peers[-1])
            rows.append(
                f"| {line} | {peer} | {sums.least:.2f} | {sums.median:.2f} | {times:.2f}x | {sums.pieces:.1f} |"
            )
    return "\n".join(rows)
