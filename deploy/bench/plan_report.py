"""Tables and plots of outcomes: pure, but for the plots' files."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from deploy.bench.outcome import Outcome
from deploy.bench.svg import Bar, bars

WAYS: Mapping[str, str] = MappingProxyType(
    {
        "simulated": "in one process, on a clock that is set",
        "large": "in one process, 64 + 64 nodes, a hybrid model",
        "attention": "in one process, 64 + 64 nodes, a model of plain attention",
        "http": "over HTTP, on loopback",
    }
)
PLOTTED = "http"
"""The way of the plots on `docs/planning.md`."""
Bounds = Mapping[tuple[str, str], tuple[float, float]]
"""By way and trace: the least possible share of computed tokens, and the greedy plan's."""


LATE = 0.005
"""Seconds; where nodes were later than that on average, a table says so."""


class Row(NamedTuple):
    """One outcome. ``way``: one of `WAYS`."""

    way: str
    trace: str
    outcome: Outcome


def write_report(rows: Sequence[Row], bounds: Bounds, docs: Path | None) -> str:
    """A table for each way and trace that has bounds; the two plots are written where ``docs`` is given."""
    parts = list[str]()
    for way, said in WAYS.items():
        here = [row for row in rows if row.way == way and (way, row.trace) in bounds]
        parts += [f"\n## {said[0].upper()}{said[1:]}"] * bool(here)
        parts += [_table(here, trace, bounds[way, trace]) for trace in _traces(here)]
        if docs is not None and here and way == PLOTTED:
            least = {trace: bounds[way, trace][0] * 100 for trace in _traces(here)}
            for name, plot in _plots(here, least).items():
                (docs / f"planning-{way}-{name}.svg").write_text(plot, encoding="utf-8")
    return "\n".join(parts)


TABLES_BEGIN = "## In one process, on a clock that is set"
"""The mark in `docs/planning.md`: from this line to its end stand the report's tables."""


def write_tables(page: Path, report: str) -> None:
    """Put a report's tables in the place of those on the page. Raises ValueError where the page has none."""
    text, begin, _ = page.read_text(encoding="utf-8").partition(f"\n{TABLES_BEGIN}\n")
    if not begin:
        raise ValueError(f"{page} has no line {TABLES_BEGIN!r}")
    page.write_text(f"{text.rstrip()}\n\n{report.strip()}\n", encoding="utf-8")


def _traces(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.trace for row in rows))


def _table(rows: Sequence[Row], trace: str, bound: tuple[float, float]) -> str:
    lines = [
        f"\n{trace}: at least {bound[0]:.1%} must be computed; greedily, with all caches known, {bound[1]:.1%}\n",
        "| | computed | by decode nodes | first token: mean s | p50 | p90 | p99 | moved | spread | planned hits kept |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    outcomes = sorted((row.outcome for row in rows if row.trace == trace), key=lambda each: each.share)
    return "\n".join([*lines, *map(_line, outcomes)])


def _line(outcome: Outcome) -> str:
    times = " | ".join(f"{outcome.percentile(share):.3f}" for share in (0.5, 0.9, 0.99))
    right = "" if math.isnan(outcome.kept_promise) else f"{outcome.kept_promise:.1%}"
    failed = f" ({outcome.failed} failed)" if outcome.failed else ""
    failed += f" (nodes {outcome.late * 1000:.0f} ms late)" if outcome.late > LATE else ""
    return (
        f"| {outcome.name}{failed} | {outcome.share:.1%} | {outcome.local:.1%} | {outcome.mean:.3f} | {times} "
        f"| {outcome.moved:,} | {outcome.spread:.2f} | {right} |"
    )


def _plots(rows: Sequence[Row], least: Mapping[str, float]) -> dict[str, str]:
    traces = _traces(rows)
    computed = {
        trace: [Bar(row.outcome.name, row.outcome.share * 100) for row in rows if row.trace == trace]
        for trace in traces
    }
    waited = {
        trace: [Bar(row.outcome.name, row.outcome.mean * 1000) for row in rows if row.trace == trace]
        for trace in traces
    }
    return {
        "computed": bars("Prompt tokens that were computed, %", computed, least),
        "first-token": bars("Mean time to the first token, ms", waited, {}),
    }
