"""`python -m tests.bench`: measure the proxy beside vllm-router; status 1 where it costs too much."""

import argparse
import sys
from collections.abc import Sequence

from deploy.local.bootstrap import BootstrapError
from deploy.local.paths import RUNS
from deploy.local.supervise import PartEndedError, Stopped, Supervisor, stop_signals
from tests.bench.peers import PDPROXY, TOGETHER, VLLM_ROUTER, Peer, make_environment
from tests.bench.report import Figure, ratio, table
from tests.bench.rounds import BenchError, Effort, measure, start
from tests.bench.script import TOKENS, Line

MOST = 3.0
"""How many times the CPU time of vllm-router a streamed completion may cost."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the process's exit status."""
    asked = _parser().parse_args(arguments)
    effort = Effort(asked.rounds, asked.requests, asked.streams, asked.step_ms)
    peers = [PDPROXY, TOGETHER] if asked.alone else [PDPROXY, VLLM_ROUTER]
    try:
        figures = _run(peers, asked.lines, effort)
    except (BenchError, BootstrapError, PartEndedError, Stopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{effort.streams} streams of {TOKENS} tokens at once; every answer was right.\n")
    print(table(figures, [peer.name for peer in peers]))
    return 0 if asked.alone else _verdict(figures)


def _run(peers: Sequence[Peer], lines: Sequence[Line], effort: Effort) -> list[Figure]:
    if VLLM_ROUTER in peers:
        make_environment()
    figures: list[Figure] = []
    with stop_signals(), Supervisor(RUNS / "bench") as supervisor:
        print("starting mock nodes and proxies …", flush=True)
        running = start(supervisor, peers, effort)
        total = len(lines) * len(peers) * effort.rounds
        for figure in measure(running, lines, effort):
            figures.append(figure)
            print(f"  [{len(figures)}/{total}] {figure.line}: {figure.peer} {figure.cost:.2f} ms", flush=True)
    return figures


def _verdict(figures: Sequence[Figure]) -> int:
    line = figures[0].line
    times = ratio(figures, line, PDPROXY.name, VLLM_ROUTER.name)
    kept = times <= MOST
    print(f"\n{line}: {times:.2f} times {VLLM_ROUTER.name}; the bar is {MOST:g}: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each proxy and line (default %(default)s)")
    parser.add_argument("--requests", type=int, default=640, help="in one round (default %(default)s)")
    parser.add_argument("--streams", type=int, default=64, help="at once (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="between two tokens (default %(default)g)")
    parser.add_argument("--lines", type=Line, nargs="+", choices=list(Line), default=list(Line), metavar="LINE")
    parser.add_argument("--alone", action="store_true", help="pdproxy in both its ways, no other router")
    return parser


if __name__ == "__main__":
    sys.exit(main())
