"""The figures of a bench, put together: pure."""

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deploy.bench.latency import Timed
from deploy.bench.script import Line

RESAMPLED = 1000
"""How often the samples are drawn anew for a confidence interval (bootstrap)."""


class Figure(NamedTuple):
    """The figures of one round.

    Attributes:
        cost: CPU milliseconds per request.
        pieces: reads of its answer per request, as the client saw them.
        instructions: millions per request; None where they cannot be counted.
    """

    line: Line
    peer: str
    cost: float
    pieces: float
    instructions: float | None = None


class Sums(NamedTuple):
    """The figures of one peer on one line, over all rounds. ``instructions``: the least."""

    least: float
    median: float
    pieces: float
    instructions: float | None


def summed(figures: Iterable[Figure], line: Line, peer: str) -> Sums:
    """The figures of all rounds.

    Raises:
        ValueError: there are none.
    """
    own = [figure for figure in figures if figure.line is line and figure.peer == peer]
    if not own:
        raise ValueError(f"no figures of {peer} for {line}")
    costs = [figure.cost for figure in own]
    counts = [figure.instructions for figure in own if figure.instructions is not None]
    pieces = statistics.median(figure.pieces for figure in own)
    return Sums(min(costs), statistics.median(costs), pieces, min(counts, default=None))


def ratio(figures: Sequence[Figure], line: Line, ours: str, theirs: str) -> float:
    """How many times what ``theirs`` costs ``ours`` costs, by the least of the rounds: noise only ever adds."""
    return summed(figures, line, ours).least / summed(figures, line, theirs).least


def table(figures: Sequence[Figure], peers: Sequence[str], base: str) -> str:
    """A Markdown table: a row for each line and peer; ratios are to the peer ``base``."""
    rows = [
        "| CPU ms per request | proxy | least | median | ratio of least | million instructions | reads per answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in dict.fromkeys(figure.line for figure in figures):
        for peer in peers:
            sums = summed(figures, line, peer)
            count = "" if sums.instructions is None else f"{sums.instructions:.2f}"
            cells = [line, peer, f"{sums.least:.3f}", f"{sums.median:.3f}"]
            cells += [f"{ratio(figures, line, peer, base):.2f}x", count, f"{sums.pieces:.1f}"]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


class Added(NamedTuple):
    """The milliseconds that a way adds to the direct one: the difference of the medians, and its 95 % interval."""

    median: float
    low: float
    high: float


def added(way: Timed, direct: Timed, seed: int = 1) -> Added:
    """To the time to the first token."""
    dice = random.Random(seed)
    draws = sorted(_median(dice, way.first) - _median(dice, direct.first) for _ in range(RESAMPLED))
    found = statistics.median(way.first) - statistics.median(direct.first)
    return Added(found, draws[RESAMPLED // 40], draws[-1 - RESAMPLED // 40])


def _median(dice: random.Random, samples: Sequence[float]) -> float:
    return statistics.median(dice.choices(samples, k=len(samples)))


def first_tokens(ways: Mapping[str, Timed], line: Line) -> str:
    """A Markdown table of the times to the first token; the first way is the direct one."""
    rows = ["| ms to the first token, one at a time | way | p50 | p90 | added to p50 (95 %) |", "|---|---|---|---|---|"]
    direct = next(iter(ways.values()))
    for name, way in ways.items():
        plus = added(way, direct)
        more = "" if way is direct else f"{plus.median:+.3f} ({plus.low:+.3f} to {plus.high:+.3f})"
        p50, p90 = statistics.median(way.first), statistics.quantiles(way.first, n=10)[-1]
        rows.append(f"| {line} | {name} | {p50:.3f} | {p90:.3f} | {more} |")
    return "\n".join(rows)


def chunks(ways: Mapping[str, Timed], line: Line) -> str:
    """A Markdown table of how tokens arrive."""
    rows = ["| tokens of one stream | way | merged | gap p50 | gap p99 |", "|---|---|---|---|---|"]
    for name, way in ways.items():
        p50, p99 = statistics.median(way.gaps), statistics.quantiles(way.gaps, n=100)[-1]
        rows.append(f"| {line} | {name} | {way.merged} | {p50:.2f} | {p99:.2f} |")
    return "\n".join(rows)
