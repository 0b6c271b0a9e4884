"""Instructions of a request by the number of nodes: ``python -m deploy.bench.nodes_cost``; needs valgrind.

Requests go one after another (`lockstep`), before 2 nodes and before 100. What the proxy does by itself, such as health
checks, is counted apart: from idle seconds. Nodes that start slowly are no part of it: slow start is off.

``--policies`` names the policies, ``--pairs`` the nodes of each role, ``--line`` the kind of request.
"""

import argparse
import asyncio
import shutil
import sys
from typing import NamedTuple

from deploy.bench.lockstep import counted
from deploy.bench.peers import PDPROXY, Peer, Ports
from deploy.bench.rounds import BenchError
from deploy.bench.script import Line
from deploy.local.paths import RUNS
from deploy.local.supervise import PartEndedError, Stopped, stop_signals
from pdproxy.settings.types import Routing

REQUESTS = 200
IDLE = 20.0
NO_PROBES = ("--health-interval", "600")
"""While requests are counted: before 100 nodes probes and the like take as much as 14 requests a second, and never the
same."""
FLAGS = ("--health-slow-start", "0", "--log-level", "warning")


class NodesCost(NamedTuple):
    """Instructions: of one request, without what the proxy does by itself meanwhile; and of that, in a second."""

    request: float
    second: float


async def cost(routing: Routing, line: Line, pairs: int) -> NodesCost:
    """Raises BenchError where the proxy was not ready, or an answer was wrong."""
    alone, quiet = _peer("--policy-routing", routing, *FLAGS), _peer("--policy-routing", routing, *FLAGS, *NO_PROBES)
    warm = 4 * pairs  # by then there are connections to all nodes
    busy = await counted(quiet, line, warm + REQUESTS, pairs=pairs)
    idle = await counted(quiet, line, warm, busy.seconds * REQUESTS / (warm + REQUESTS), pairs)
    longer, shorter = [await counted(alone, line, 0, seconds, pairs) for seconds in (IDLE, 0.0)]
    return NodesCost(
        (busy.instructions - idle.instructions) / REQUESTS, (longer.instructions - shorter.instructions) / IDLE
    )


def _peer(*flags: str) -> Peer:
    def command(ports: Ports) -> list[str]:
        return [*PDPROXY.command(ports), *flags]

    return Peer(PDPROXY.name, command)


async def table(asked: argparse.Namespace) -> None:
    """Print a row for each policy and number of nodes; raises as `cost`."""
    print("| policy | nodes | thousand instructions a request | times | a second alone |\n|---|---|---|---|---|")
    for routing in asked.policies:
        first = 0.0
        for pairs in asked.pairs:
            found = await cost(routing, asked.line, pairs)
            first = first or found.request
            cells = f"{found.request / 1000:,.0f} | {found.request / first:.2f} | {found.second / 1000:,.0f}"
            print(f"| {routing} | {2 * pairs} | {cells} |", flush=True)


def main() -> int:
    """Print the table; the process's exit status."""
    if shutil.which("valgrind") is None:
        print("error: valgrind is not installed", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(prog="python -m deploy.bench.nodes_cost", description=__doc__)
    parser.add_argument("--policies", type=Routing, nargs="+", choices=[*Routing], default=[Routing.CACHE])
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 50], metavar="N", help="nodes of each role")
    parser.add_argument("--line", type=Line, choices=[*Line], default=Line.WHOLE, metavar="LINE")
    asked = parser.parse_args()
    RUNS.mkdir(exist_ok=True)
    try:
        with stop_signals():
            asyncio.run(table(asked))
    except (BenchError, PartEndedError, Stopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
