"""`python -m deploy.bench.engines`: real engines, alone and behind two proxies, asked by guidellm in turn.

Status 1 where a request failed, an answer was wrong that the model gives right, or something did not start.
"""

import argparse
import http.client
import itertools
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import httpx

from deploy.bench.engines import guidellm, legs, report
from deploy.bench.engines.environment import make_guidellm
from deploy.bench.engines.figures import Round, percentile
from deploy.bench.engines.legs import Connection
from deploy.bench.engines.loads import LOADS, Load, questions
from deploy.bench.engines.results import Results, machine
from deploy.bench.engines.targets import BEHIND_PROXIES, TARGETS, WARM_RUN, Targets, start, warm
from deploy.bench.peers import make_environment
from deploy.bench.rounds import BenchError
from deploy.local.bootstrap import BootstrapError
from deploy.local.paths import RUNS
from deploy.local.ports import PortTakenError
from deploy.local.readiness import NotReadyError
from deploy.local.supervise import PartEndedError, Stopped, Supervisor, stop_signals
from deploy.local.wait_joined import NodeRefusedError

FOLDER = RUNS / "engines"
KEPT = FOLDER / "results.json"
FIRST_TOKENS_SEED = 10**7
"""Far from the seeds of any run."""
COUNTED_WITHIN_S = 3.0
"""A node tells of a read a moment after the answer."""
FAILURES = (BenchError, BootstrapError, PortTakenError, PartEndedError, NotReadyError, NodeRefusedError, Stopped)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench and report; the process's exit status."""
    asked = _parser().parse_args(arguments)
    try:
        results = Results.load(KEPT) if asked.report_only else _run(asked)
    except (*FAILURES, httpx.HTTPError, http.client.HTTPException, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{report.text(results)}")
    if asked.docs is not None:
        report.write(results, asked.docs)
    wrong = results.wrong()
    print("\n".join(f"error: {each}" for each in wrong), file=sys.stderr)
    return 1 if wrong else 0


def _run(asked: argparse.Namespace) -> Results:
    make_environment()
    make_guidellm()
    shutil.rmtree(FOLDER, ignore_errors=True)
    results, began = Results(machine(asked.threads)), time.monotonic()
    loads = [LOADS[name].sized(asked.share) for name in asked.loads]
    with stop_signals(), Supervisor(FOLDER / "logs") as supervisor:
        print(f"starting three engines and two proxies (logs: {FOLDER / 'logs'}):", flush=True)
        targets = start(supervisor, asked.threads, lambda line: print(f"  {line}", flush=True))
        warm(targets, [shape for load in loads for shape in load.shapes])
        for number, found in enumerate(_rounds(targets, loads, asked.rounds), 1):
            supervisor.require_all_alive()
            results.rounds.append(found)
            total = asked.rounds * len(loads) * len(TARGETS)
            print(f"  [{number}/{total}, {time.monotonic() - began:.0f} s] {_told(found)}", flush=True)
        results.firsts = _first_tokens(targets, asked.turns, asked.rounds)
    print(f"  all of it took {time.monotonic() - began:.0f} s", flush=True)
    results.save(KEPT)
    return results


def _rounds(targets: Targets, loads: Sequence[Load], rounds: int) -> Iterator[Round]:
    """Each round asks every target with every load, another target first each time."""
    runs = itertools.count(WARM_RUN + 1)
    for number in range(rounds):
        for load in loads:
            for place in range(len(TARGETS)):
                target = TARGETS[(number + place) % len(TARGETS)]
                attempt = partial(_round, targets, load, target, number, runs)
                yield guidellm.until_reported(attempt, lambda line: print(f"  {line}", flush=True))


def _round(targets: Targets, load: Load, target: str, number: int, runs: Iterator[int]) -> Round:
    asked, before = questions(load, next(runs)), targets.verified()
    folder = FOLDER / f"{number}-{load.name}-{target.replace(' ', '-')}"
    try:
        answers = guidellm.ask(targets.urls[target], load, asked, folder)
    except BenchError as error:
        raise type(error)(f"{target}, {load.name}, round {number + 1}: {error}") from error
    wanted = len(asked) if target in BEHIND_PROXIES else 0
    return Round(load.name, target, number, answers, _counted(targets, before, wanted), len(asked))


def _counted(targets: Targets, before: float, wanted: int) -> float:
    until = time.monotonic() + COUNTED_WITHIN_S
    while (grown := targets.verified() - before) < wanted and time.monotonic() < until:
        time.sleep(0.1)
    return grown


def _told(found: Round) -> str:
    first = percentile([each.first_token for each in found.answers], 0.5)
    between = percentile([each.inter_token for each in found.answers], 0.5)
    right = sum(each.right for each in found.answers)
    return (
        f"round {found.number + 1}, {found.load}, {found.target}: first token {first:.1f} ms, then one every "
        f"{between:.2f} ms; {right} of {len(found.answers)} right, {found.reads:.0f} of {found.requests} handed over"
    )


def _first_tokens(targets: Targets, turns: int, rounds: int) -> dict[str, list[float]]:
    """So many turns for each round."""
    print(f"first tokens, one at a time: {turns * rounds} turns …", flush=True)
    with ExitStack() as stack:

        def connect(url: str) -> Connection:
            return stack.enter_context(closing(Connection(url)))

        ways = {legs.DIRECT: legs.by_hand(connect(targets.prefill.url), connect(targets.decode.url))}
        ways |= {name: legs.through(connect(targets.urls[name])) for name in BEHIND_PROXIES}
        return legs.compare(ways, turns * rounds, FIRST_TOKENS_SEED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.bench.engines", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each load and target (default %(default)s)")
    parser.add_argument("--share", type=float, default=1.0, help="of each load's requests (default %(default)g)")
    parser.add_argument("--turns", type=int, default=40, help="of first tokens, for each round (default %(default)s)")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS), metavar="LOAD")
    parser.add_argument("--threads", type=int, default=1, help="of the one engine (default %(default)s)")
    parser.add_argument("--docs", type=Path, default=None, help="where to write the page's figures and the plots")
    parser.add_argument("--report-only", action="store_true", help=f"of what the last run left in {KEPT.name}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
