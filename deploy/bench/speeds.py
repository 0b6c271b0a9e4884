"""`python -m deploy.bench.speeds`: `cache` beside sessions that stay where they began, simulated at several speeds.

A rule that is better at a trace's own speed may be worse at another one, and one seed says little of a p99. So this
gives means over seeds, of each trace as it is, on nodes that are twice as busy, and as a replay over HTTP has it.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from deploy.bench import generators
from deploy.bench.recorded import rescaled
from deploy.bench.simulate import Fleet, Simulation
from deploy.bench.sticky import Sticky
from deploy.bench.traces import Trace, without_sessions
from pdproxy.settings.types import Routing


class Speed(NamedTuple):
    """How many times faster requests come and nodes work; ``late``: as `Fleet.late`, in seconds of the trace."""

    requests: float = 1.0
    nodes: float = 1.0
    late: float = 0.0


SPEEDS = {"as it is": Speed(), "twice as busy": Speed(2.0), "as over HTTP": Speed(2.0, 2.0, 0.0125)}
"""Over HTTP all is twice as fast but the proxy's own times, and each first token comes about 25 ms later."""


class Figures(NamedTuple):
    """The share of prompt tokens that are computed; the mean first token and its p99, in seconds of the trace."""

    computed: float
    mean: float
    p99: float


def sticky(trace: Trace, speed: Speed, fleet: Fleet) -> Figures:
    """Sessions that stay, on nodes that keep nothing."""
    stock = dataclasses.replace(fleet, keep_share=0.0)
    return _run(Simulation(Routing.SESSION, stock.faster(speed.nodes, speed.late), policy=Sticky()), trace, speed)


def cache(trace: Trace, speed: Speed, fleet: Fleet) -> Figures:
    """Plans by what is cached."""
    return _run(Simulation(Routing.CACHE, fleet.faster(speed.nodes, speed.late)), trace, speed)


def bare(trace: Trace, speed: Speed, fleet: Fleet) -> Figures:
    """The same, of clients that name no session."""
    return cache(without_sessions(trace), speed, fleet)


def _run(simulation: Simulation, trace: Trace, speed: Speed) -> Figures:
    outcome = simulation.run(rescaled(trace, speed.requests))
    return Figures(outcome.share, outcome.mean * speed.nodes, outcome.percentile(0.99) * speed.nodes)


def means(
    run: Callable[[Trace, Speed, Fleet], Figures], traces: Iterable[Trace], speed: Speed, fleet: Fleet
) -> Figures:
    """Over traces."""
    return Figures(*map(statistics.fmean, zip(*(run(trace, speed, fleet) for trace in traces), strict=True)))


def row(name: str, traces: Sequence[Trace], speed: Speed, fleet: Fleet) -> str:
    """A line of the table."""
    others = means(sticky, traces, speed, fleet)
    ours = [means(run, traces, speed, fleet) for run in (cache, bare)]
    ratios = [", ".join(f"{a / b:.2f}" for a, b in zip(each, others, strict=True)) for each in ours]
    return f"| {name} | {others.computed:.1%}, {others.mean:.3f}, {others.p99:.2f} | {' | '.join(ratios)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.bench.speeds", description=__doc__)
    parser.add_argument("--traces", nargs="*", default=["agents", "agents-tools"], choices=list(generators.ALL))
    parser.add_argument("--seeds", type=int, default=16, help="how many: from 1 on (default %(default)s)")
    asked = parser.parse_args(arguments)
    print("| | sticky: computed, mean and p99 in seconds | cache, in multiples | without sessions |\n|---|---|---|---|")
    for name in asked.traces:
        traces = [generators.ALL[name](seed) for seed in range(1, asked.seeds + 1)]
        for words, speed in SPEEDS.items():
            print(row(f"{name}, {words}", traces, speed, Fleet()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
