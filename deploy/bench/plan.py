"""`python -m deploy.bench.plan`: what the policies make of traces, simulated; with ``--rivals`` over HTTP, others too.

Every outcome is kept as a file of its own, so that a long comparison can be made in parts; the tables are of all that
are there, and ``--kept`` makes them without another run. ``--write`` puts them, and plots of them, into the
documentation.
"""

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.bench import generators
from deploy.bench.bounds import greedy, least_computed
from deploy.bench.hybrid_cache import CacheShape
from deploy.bench.outcome import Outcome
from deploy.bench.plan_report import FIGURES, GUIDE, Row, against_others, make_report, write_tables
from deploy.bench.recorded import mooncake, rescaled, weka
from deploy.bench.replay import ReplayError, run
from deploy.bench.routers import RIVALS, Router, make_environments, pdproxy
from deploy.bench.simulate import Fleet, Simulation
from deploy.bench.sticky import Sticky
from deploy.bench.traces import Trace, without_sessions
from deploy.local.bootstrap import BootstrapError
from deploy.local.paths import RUNS
from deploy.local.supervise import PartEndedError, Stopped, Supervisor, stop_signals
from pdproxy.nodes.node import Role
from pdproxy.settings.types import Routing

KEPT = RUNS / "plan"
FASTER = 2.0
"""Times that a replay over HTTP is faster than life: what the machine adds to a first token counts twice."""
NO_SESSIONS = "without sessions"
LARGE_FLEETS = {"large": Fleet(64, 64), "attention": Fleet(64, 64, CacheShape(state_groups=0))}


class Store:
    """Outcomes as files: of how it was run (``simulated`` or ``http``), a trace and a proxy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, way: str, trace: str, outcome: Outcome) -> None:
        """Write one; it replaces an earlier one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        told = {"way": way, "trace": trace, "name": outcome.name, "roles": dict(outcome.roles)}
        counted = {"tokens": outcome.tokens, "computed": outcome.computed, "moved": outcome.moved}
        planned = {"planned": outcome.planned, "resumed": outcome.resumed}
        whole = {
            **told,
            **counted,
            **planned,
            "failed": outcome.failed,
            "late": outcome.late,
            "first_tokens": outcome.first_tokens,
        }
        name = f"{way} {trace} {outcome.name}.json".replace(" ", "_")
        (self._folder / name).write_text(json.dumps(whole), encoding="utf-8")

    def rows(self) -> Iterator[Row]:
        """All that are there."""
        for path in sorted(self._folder.glob("*.json")):
            read = json.loads(path.read_text(encoding="utf-8"))
            roles = {name: tuple(map(Role, its)) for name, its in read["roles"].items()}
            counted = {
                key: read[key] for key in ("tokens", "moved", "planned", "resumed", "failed", "late", "first_tokens")
            }
            outcome = Outcome(read["name"], roles, computed=Counter(read["computed"]), **counted)
            yield Row(read["way"], read["trace"], outcome)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, and write the report; the process's exit status."""
    asked = _parser().parse_args(arguments)
    store, fleet = Store(asked.keep), Fleet()
    traces = [*(generators.ALL[name](asked.seed) for name in asked.traces), *_recorded(asked)]
    cases = [("simulated", fleet, trace) for trace in traces]
    if asked.large:
        larger = [make(asked.seed) for make in generators.LARGE.values()]
        cases += [(way, fleet, trace) for way, fleet in LARGE_FLEETS.items() for trace in larger]
    if not asked.kept:
        for way, nodes, trace in cases:
            _simulate(way, trace, nodes, store)
    status = _replay(traces, fleet, store, asked) if asked.rivals and not asked.kept else 0
    bounds = {(way, trace.name): _bounds(trace, nodes) for way, nodes, trace in cases}
    bounds |= {("http", trace.name): bounds["simulated", trace.name] for trace in traces}
    rows = list(store.rows())
    report, ratios = make_report(rows, bounds), against_others(rows, bounds)
    print(report)
    print(f"\n{ratios}")
    if asked.write:
        write_tables(asked.docs, report, ratios)
    return status


def _recorded(asked: argparse.Namespace) -> Iterator[Trace]:
    """From files."""
    for path in asked.mooncake:
        lines = path.read_text(encoding="utf-8").splitlines()
        yield rescaled(mooncake(path.stem, lines, asked.limit), asked.faster)
    for path in asked.weka:
        yield weka(path.stem, path.read_text(encoding="utf-8").splitlines()[: asked.limit], faster=asked.faster)


def _simulate(way: str, trace: Trace, fleet: Fleet, store: Store) -> None:
    for routing in Routing:
        store.keep(way, trace.name, Simulation(routing, fleet).run(trace))
    if all(request.session is not None for request in trace.requests):
        stock = dataclasses.replace(fleet, keep_share=0.0)
        sticky = Simulation(Routing.SESSION, stock, policy=Sticky()).run(trace)
        sticky.name = "sticky, as vllm-router's"
        store.keep(way, trace.name, sticky)
    bare = Simulation(Routing.CACHE, fleet).run(without_sessions(trace))
    bare.name = f"{Routing.CACHE} {NO_SESSIONS}"
    store.keep(way, trace.name, bare)


def _replay(traces: Sequence[Trace], fleet: Fleet, store: Store, asked: argparse.Namespace) -> int:
    wanted = [router for router in (*_ours(), *RIVALS) if not asked.only or any(w in router.name for w in asked.only)]
    stock = dataclasses.replace(fleet, keep_share=0.0)  # other routers ask for no keeps: their nodes are vLLM's own
    try:
        make_environments()
        with stop_signals():
            for trace in traces:
                for router in wanted:
                    _replay_one(trace, router, stock if router in RIVALS else fleet, store)
    except (BootstrapError, PartEndedError, ReplayError, Stopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _ours() -> list[Router]:
    bare = pdproxy(Routing.CACHE)._replace(name=f"pdproxy {Routing.CACHE} {NO_SESSIONS}")
    return [*(pdproxy(routing) for routing in Routing), bare]


def _replay_one(trace: Trace, router: Router, fleet: Fleet, store: Store) -> None:
    print(f"  {trace.name}: {router.name} …", flush=True)
    with Supervisor(KEPT / f"{trace.name} {router.name}".replace(" ", "_")) as supervisor:
        asked = without_sessions(trace) if NO_SESSIONS in router.name else trace
        store.keep("http", trace.name, run(asked, router, fleet, FASTER, supervisor))


def _bounds(trace: Trace, fleet: Fleet) -> tuple[float, float]:
    """The least that must be computed, and what the greedy plan computes, as shares of all prompt tokens."""
    least, plan = least_computed(trace, fleet.shape), greedy(trace, fleet.shape, fleet.prefills)
    return least / trace.tokens, plan / trace.tokens


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.bench.plan", description=__doc__)
    parser.add_argument("--rivals", action="store_true", help="replay over HTTP, against other routers too (an hour)")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="proxies whose names have one of these")
    parser.add_argument("--traces", nargs="*", default=list(generators.ALL), choices=list(generators.ALL), metavar="T")
    parser.add_argument("--large", action="store_true", help="64 + 64 nodes too (a minute)")
    parser.add_argument("--mooncake", nargs="*", default=[], type=Path, metavar="FILE", help="traces in that form")
    parser.add_argument("--weka", nargs="*", default=[], type=Path, metavar="FILE", help="traces in that form")
    parser.add_argument("--kept", action="store_true", help="run nothing: report the outcomes of earlier runs")
    parser.add_argument("--limit", type=int, default=None, help="lines that are read of a file")
    parser.add_argument("--faster", type=float, default=1.0, help="times that recorded requests come faster")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=KEPT, help="where outcomes are kept (default %(default)s)")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the pages are (default %(default)s)")
    parser.add_argument(
        "--write", action="store_true", help=f"write the tables of these traces into {FIGURES} and {GUIDE} there"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
