"""Tables and plots of what a run found, and the page that they stand on: pure, but for the files."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.bench.engines.figures import (
    Estimate,
    Metric,
    absolute,
    median_estimate,
    of_rounds,
    percentile,
    ratio,
    right_share,
)
from deploy.bench.engines.legs import DIRECT
from deploy.bench.engines.loads import LOADS, Load, Shape
from deploy.bench.engines.results import Results
from deploy.bench.engines.targets import AGGREGATED, BEHIND_PROXIES, PDPROXY, ROUTER, TARGETS
from deploy.bench.svg import Bar, bars

PAGE = Path("decisions/real-engines.md")
"""In the folder of the documentation."""
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""Marks in the page: a run writes what is between them."""
PLOTS: Mapping[str, str] = {
    "first token": "Milliseconds to the first token (line: 95 %)",
    "between tokens": "Milliseconds between tokens, the mean of each answer (line: 95 %)",
    "throughput": "Tokens of all answers in a second (line: 95 %)",
}
COMPARED = ((ROUTER, AGGREGATED), (PDPROXY, AGGREGATED), (PDPROXY, ROUTER))


class Case(NamedTuple):
    """One table: the requests of one shape, of one load."""

    load: Load
    shape: Shape

    @property
    def title(self) -> str:
        return f"{self.load.title}: {self.shape.name}" if len(self.load.shapes) > 1 else self.load.title


class Ratio(NamedTuple):
    """How many times another target's figure pdproxy's is."""

    case: Case
    metric: Metric
    other: str
    found: Estimate


def cases(results: Results) -> list[Case]:
    """In the order of the rounds."""
    names = dict.fromkeys(each.load for each in results.rounds)
    return [Case(LOADS[name], shape) for name in names for shape in LOADS[name].shapes]


def text(results: Results) -> str:
    """The whole report, in Markdown."""
    parts = [_where(results)]
    parts += [_table(results, case) for case in cases(results)]
    parts += [_service(results)]
    if results.firsts:
        parts += [_added(results.firsts)]
    return "\n\n".join([*parts, _losses(results)])


def _where(results: Results) -> str:
    rounds = 1 + max((each.number for each in results.rounds), default=0)
    told = "; ".join(f"{what}: {value}" for what, value in results.machine.items())
    return f"{told}. Rounds: {rounds}."


def _of(results: Results, case: Case, target: str) -> list[dict[Metric, float]]:
    return of_rounds(results.rounds, case.load.name, target, case.shape.name)


def _table(results: Results, case: Case) -> str:
    heads = " | ".join(f"{ours} ÷ {theirs}" for ours, theirs in COMPARED)
    about = f"{case.shape.prompt} tokens in, {case.shape.answer} out"
    lines = [f"**{case.title}** ({about})\n", f"| | {AGGREGATED} | {heads} |", "|---|" + "---|" * (1 + len(COMPARED))]
    alone = _of(results, case, AGGREGATED)
    for metric in alone[0]:
        times = " | ".join(str(_ratio(results, case, pair, metric)) for pair in COMPARED)
        lines.append(f"| {metric.name} | {absolute(alone, metric)} {metric.unit} | {times} |")
    return "\n".join(lines)


def _ratio(results: Results, case: Case, pair: tuple[str, str], metric: Metric) -> Estimate:
    ours, theirs = (_of(results, case, target) for target in pair)
    return ratio(ours, theirs, metric)


def _service(results: Results) -> str:
    """A sentence that shows that the right thing was measured: the share of right answers, and hand-overs."""
    right = ", ".join(f"{target} {right_share(results.answers(target)):.1%}" for target in TARGETS)
    handed = list[str]()
    for target in BEHIND_PROXIES:
        own = [each for each in results.rounds if each.target == target]
        handed.append(f"{target} {sum(each.reads for each in own) / sum(each.requests for each in own):.1%}")
    return (
        f"No request failed. Answers that were right, word for word: {right}. Requests whose caches the decode node "
        f"read from the prefill node, verified: {', '.join(handed)}."
    )


def _added(firsts: Mapping[str, Sequence[float]]) -> str:
    lines = [
        f"**Added to the first token, one request at a time** ({len(firsts[DIRECT])} turns)\n",
        f"| | first token, p50 | added to {DIRECT} |",
        "|---|---|---|",
    ]
    for way, taken in firsts.items():
        own = [mine - direct for mine, direct in zip(taken, firsts[DIRECT], strict=True)]
        added = "" if way == DIRECT else f"{median_estimate(own)} ms"
        lines.append(f"| {way} | {percentile(taken, 0.5):.1f} ms | {added} |")
    return "\n".join(lines)


def _losses(results: Results) -> str:
    all_of_them = list(_to_others(results))
    lost = [f"{case.title}, {metric.name}: {found} times {other}" for case, metric, other, found in losses(results)]
    open_ = sum(not behind(metric, found) and not ahead(metric, found) for _, metric, _, found in all_of_them)
    told = (
        f"**Where pdproxy is behind**: in {len(lost)} of {len(all_of_them)} ratios to the other two with all of the "
        f"interval; {open_} have 1 within the interval, and decide nothing."
    )
    return "\n".join([told, "", *(f"- {each}" for each in lost)]).rstrip()


def losses(results: Results) -> list[Ratio]:
    """The cells in which pdproxy is worse, and whose interval says so."""
    return [each for each in _to_others(results) if behind(each.metric, each.found)]


def _to_others(results: Results) -> Iterator[Ratio]:
    """All ratios of pdproxy's figures to another target's."""
    for case in cases(results):
        for metric in _of(results, case, PDPROXY)[0]:
            for other in (ROUTER, AGGREGATED):
                yield Ratio(case, metric, other, _ratio(results, case, (PDPROXY, other), metric))


def ahead(metric: Metric, found: Estimate) -> bool:
    """Whether a ratio is on the right side of 1 with all of its interval; not where there is no interval."""
    return behind(metric._replace(more_is_better=not metric.more_is_better), found)


def behind(metric: Metric, found: Estimate) -> bool:
    """Whether a ratio is on the wrong side of 1 with all of its interval; not where there is no interval."""
    # what is not a number is neither more nor less than 1
    return found.value + found.spread < 1 if metric.more_is_better else found.value - found.spread > 1


def plots(results: Results) -> dict[str, str]:
    """SVG by the file's name."""
    drawn = dict[str, str]()
    for kind, title in PLOTS.items():
        groups = {
            f"{case.title}{metric.name.removeprefix(kind)}": [
                _bar(target, absolute(_of(results, case, target), metric)) for target in TARGETS
            ]
            for case in cases(results)
            for metric in _of(results, case, AGGREGATED)[0]
            if metric.name.startswith(kind)
        }
        drawn[f"bench-engines-{kind.replace(' ', '-')}.svg"] = bars(title, groups, {})
    return drawn


def _bar(target: str, found: Estimate) -> Bar:
    return Bar(target, found.value, 0.0 if math.isnan(found.spread) else found.spread)


def write(results: Results, docs: Path) -> None:
    """The plots, and the figures' part of `PAGE`. Raises ValueError where the page has no place for them."""
    page = docs / PAGE
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for figures: {BEGIN} … {END}")
    drawn = plots(results)
    shown = "\n".join(f"![{PLOTS[kind]}](../{name})" for kind, name in zip(PLOTS, drawn, strict=True))
    page.write_text(f"{before}{BEGIN}\n\n{text(results)}\n\n{shown}\n\n{END}{after}", encoding="utf-8")
    for name, plot in drawn.items():
        (docs / name).write_text(plot, encoding="utf-8")
