"""`python -m deploy.bench`: measure the proxy beside other routers; status 1 where it costs too much."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.bench.interpreters import Interpreter, environment, interpreter
from deploy.bench.peers import (
    PDPROXY,
    SMG_ROUTER,
    VLLM_ROUTER,
    Peer,
    make_environment,
    make_smg_environment,
    variants,
)
from deploy.bench.perf import is_allowed
from deploy.bench.report import Figure, chunks, first_tokens, ratio, table
from deploy.bench.rounds import BenchError, Effort, measure, one_at_a_time, start
from deploy.bench.script import TOKENS, Line
from deploy.local.bootstrap import BootstrapError
from deploy.local.paths import RUNS, VENV
from deploy.local.supervise import PartEndedError, Stopped, Supervisor, stop_signals
from pdproxy.stream.scan import BEST

MOST = 3.0
"""How many times the CPU time of vllm-router a streamed completion may cost, as the proxy comes."""
PACED = 6
"""Streams of each way whose chunks are looked at, one after the other."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the process's exit status."""
    asked = _parser().parse_args(arguments)
    effort = Effort(asked.rounds, asked.requests, asked.streams, asked.step_ms)
    try:
        pythons = [interpreter(environment(each)) for each in asked.python] or [interpreter(VENV / "bin" / "python")]
        ours = [PDPROXY] if asked.alone else _ours(pythons)
        others = [] if asked.alone else _others()
        for line in _machine(pythons):
            print(line, flush=True)
        figures = _rounds([*ours, *others], asked.lines, effort)
        names = [peer.name for peer in (*ours, *others)]
        print(f"\n{effort.streams} streams of {TOKENS} tokens at once; every answer was right.\n")
        print(table(figures, names, names[-1] if asked.alone else VLLM_ROUTER.name))
        _one_by_one([*ours, *others], [line for line in asked.lines if line.streamed], asked.first_tokens)
    except (BenchError, BootstrapError, PartEndedError, Stopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if asked.alone else _verdict(figures, ours[1].name)


def _ours(pythons: Sequence[Interpreter]) -> list[Peer]:
    """The variants of ours; named by their Python where there are several."""
    several = len(pythons) > 1
    return [peer for each in pythons for peer in variants(each.python, f" on {each.version}" if several else "")]


def _others() -> list[Peer]:
    make_environment()
    make_smg_environment()
    return [SMG_ROUTER, VLLM_ROUTER]


def _machine(pythons: Sequence[Interpreter]) -> list[str]:
    counted = "are counted" if is_allowed() else "cannot be counted (perf is not there, or not allowed)"
    machine = f"{len(os.sched_getaffinity(0))} cores; load {os.getloadavg()[0]:.1f}; instructions {counted}"
    scan = f"the proxy scans streams in {BEST.language}"
    return [machine, scan, *(each.describe() for each in pythons)]


def _rounds(peers: Sequence[Peer], lines: Sequence[Line], effort: Effort) -> list[Figure]:
    figures: list[Figure] = []
    with stop_signals(), Supervisor(RUNS / "bench") as supervisor:
        print("starting mock nodes and proxies …", flush=True)
        running = start(supervisor, peers, effort)
        total = len(lines) * len(peers) * effort.rounds
        for figure in measure(running, lines, effort):
            figures.append(figure)
            print(f"  [{len(figures)}/{total}] {figure.line}: {figure.peer} {figure.cost:.2f} ms", flush=True)
        for line in lines:
            if line.streamed:
                tokens = chunks(one_at_a_time(running, line, PACED), line)
                print(f"\nA token every {effort.step_ms:g} ms:\n\n{tokens}", flush=True)
    return figures


def _one_by_one(peers: Sequence[Peer], lines: Sequence[Line], requests: int) -> None:
    """Print what each proxy adds to the first token where nodes answer at once."""
    with stop_signals(), Supervisor(RUNS / "bench") as supervisor:
        running = start(supervisor, peers, Effort(1, requests, 1, 0.0))
        for line in lines:
            first = first_tokens(one_at_a_time(running, line, requests), line)
            print(f"\nNodes that answer at once, {requests} requests:\n\n{first}", flush=True)


def _verdict(figures: Sequence[Figure], ours: str) -> int:
    line = figures[0].line
    times = ratio(figures, line, ours, VLLM_ROUTER.name)
    kept = times <= MOST
    print(f"\n{line}: {times:.2f} times {VLLM_ROUTER.name}; the bar is {MOST:g}: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each proxy and line (default %(default)s)")
    parser.add_argument("--requests", type=int, default=320, help="in one round (default %(default)s)")
    parser.add_argument("--streams", type=int, default=64, help="at once (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="between two tokens (default %(default)g)")
    parser.add_argument("--first-tokens", type=int, default=300, help="requests one by one (default %(default)s)")
    parser.add_argument("--lines", type=Line, nargs="+", choices=list(Line), default=list(Line), metavar="LINE")
    parser.add_argument("--alone", action="store_true", help="pdproxy alone, no other router")
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="interpreter for the proxy, in an environment of its own; repeatable (default: the project's)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
