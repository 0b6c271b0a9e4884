"""Tables and plots of outcomes: pure, but for `write_tables`, which writes them into the documentation."""

import math
import re
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
HTTP = "http"
"""The way of the plots, and of comparisons with other proxies."""
GUIDE, FIGURES = Path("planning.md"), Path("decisions/planning-figures.md")
"""The pages in the folder of the documentation: one with the plots and the comparison, one with all tables."""
Bounds = Mapping[tuple[str, str], tuple[float, float]]
"""By way and trace: the least possible share of computed tokens, and the greedy plan's."""


LATE = 0.005
"""Seconds; where nodes were later than that on average, a table says so."""


class Row(NamedTuple):
    """One outcome. ``way``: one of `WAYS`."""

    way: str
    trace: str
    outcome: Outcome


def make_report(rows: Sequence[Row], bounds: Bounds) -> str:
    """A table for each way and trace that has bounds."""
    parts = list[str]()
    for way in WAYS:
        here = [row for row in rows if row.way == way and (way, row.trace) in bounds]
        parts += [f"\n{_heading(way)}"] * bool(here)
        parts += [_table(here, trace, bounds[way, trace]) for trace in _traces(here)]
    return "\n".join(parts)


def _heading(way: str) -> str:
    return f"## {WAYS[way][0].upper()}{WAYS[way][1:]}"


TIMES = "\N{MULTIPLICATION SIGN}"
OURS = "pdproxy cache"
"""The name of this project's proxy with its own policy; with more words after it, of clients that say less."""


def against_others(rows: Sequence[Row], bounds: Bounds) -> str:
    """Over HTTP: this project's proxy in multiples of the best other one in each column; "" where none ran."""
    lines = list[str]()
    here = [row for row in rows if row.way == HTTP and (HTTP, row.trace) in bounds]
    for trace in _traces(here):
        outcomes = [row.outcome for row in here if row.trace == trace]
        others = [each for each in outcomes if not each.name.startswith("pdproxy ")]
        ours = [each for each in outcomes if each.name.startswith(OURS)]
        lines += [_ratios(trace, each, others, bounds[HTTP, trace][0]) for each in ours if others]
    head = ["| | computed | of the least possible | mean first token | p99 |", "|---|---|---|---|---|"]
    return "\n".join([*head, *lines]) if lines else ""


def _ratios(trace: str, ours: Outcome, others: Sequence[Outcome], least: float) -> str:
    said = ours.name.removeprefix(OURS).strip() or "with sessions"
    best = min(each.share for each in others), min(each.mean for each in others)
    p99 = ours.percentile(0.99) / min(each.percentile(0.99) for each in others)
    return (
        f"| {trace}, {said} | {ours.share / best[0]:.2f} {TIMES} | {ours.share / least:.2f} {TIMES} "
        f"| {ours.mean / best[1]:.2f} {TIMES} | {p99:.2f} {TIMES} |"
    )


TABLES_BEGIN = "## In one process, on a clock that is set"
"""The mark in `FIGURES`: from this line to the page's end stand the report's tables."""
RATIOS_BEGIN, RATIOS_END = "<!-- against others -->", "<!-- end -->"
"""The lines in `GUIDE` between which `against_others` stands."""


def write_tables(docs: Path, report: str, ratios: str = "") -> None:
    """Put a report's tables in the place of those of the same ways and traces; ``ratios`` likewise; draw the plots.

    The plots show what the page of figures then has, so that they and its tables agree whichever traces were run.

    Raises:
        ValueError: a page has no place for them.
    """
    guide, figures = docs / GUIDE, docs / FIGURES
    text, begin, written = figures.read_text(encoding="utf-8").partition(f"\n{TABLES_BEGIN}\n")
    if not begin:
        raise ValueError(f"{figures} has no line {TABLES_BEGIN!r}")
    if ratios:
        guide.write_text(_with_ratios(guide, ratios), encoding="utf-8")
    tables = _by_heading(f"\n{TABLES_BEGIN}\n{written}")
    for heading, newer in _by_heading(f"\n{report}").items():
        tables[heading] = {**tables.get(heading, {}), **newer}
    parts = [f"{heading}\n\n" + "\n\n".join(each.values()) for heading, each in tables.items()]
    figures.write_text("\n\n".join([text.rstrip(), *parts]) + "\n", encoding="utf-8")
    for name, plot in _plots(tables.get(_heading(HTTP), {})).items():
        (docs / f"planning-{HTTP}-{name}.svg").write_text(plot, encoding="utf-8")


def _with_ratios(page: Path, ratios: str) -> str:
    before, first, rest = page.read_text(encoding="utf-8").partition(RATIOS_BEGIN)
    between, last, after = rest.partition(RATIOS_END)
    if not first or not last:
        raise ValueError(f"{page} has no lines {RATIOS_BEGIN!r} and {RATIOS_END!r}")
    return f"{before}{first}\n{_with_newer_lines(between, ratios)}\n{last}{after}"


def _with_newer_lines(table: str, newer: str) -> str:
    """All lines of two tables of the same head; the newer one of those that begin alike."""
    lines = {line.split("|")[1]: line for text in (table, newer) for line in text.strip().splitlines()}
    return "\n".join(lines.values())


def _by_heading(text: str) -> dict[str, dict[str, str]]:
    """The tables below each heading, by the names of their traces."""
    found = dict[str, dict[str, str]]()
    for part in text.split("\n## ")[1:]:
        heading, _, rest = part.partition("\n")
        tables = re.split(r"\n\n(?=\S+: at least )", rest.strip())
        found[f"## {heading}"] = {table.partition(":")[0]: table.strip() for table in tables if table.strip()}
    return found


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


_LEAST = re.compile(r": at least ([\d.]+)% must be computed")
_BARS = re.compile(r"^\| ([^|(]+?)(?: \([^|]*\))? \| ([\d.]+)% \| [\d.]+% \| ([\d.]+) \|", re.MULTILINE)
"""By line of a table: the proxy's name, the computed percentage, the mean first token in seconds."""


def _plots(tables: Mapping[str, str]) -> dict[str, str]:
    """The plots of the tables of one way, by trace; none without tables."""
    computed, waited, least = dict[str, list[Bar]](), dict[str, list[Bar]](), dict[str, float]()
    for trace, table in tables.items():
        (least[trace],) = map(float, _LEAST.findall(table))
        found = sorted(_BARS.findall(table))
        computed[trace] = [Bar(name, float(share)) for name, share, _ in found]
        waited[trace] = [Bar(name, float(mean) * 1000) for name, _, mean in found]
    if not tables:
        return {}
    return {
        "computed": bars("Prompt tokens that were computed, %; dashed: the least possible", computed, least),
        "first-token": bars("Mean time to the first token, ms", waited, {}),
    }
