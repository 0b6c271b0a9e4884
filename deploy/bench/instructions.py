"""Instructions that the proxy needs for one request: ``python -m deploy.bench.instructions``; needs valgrind.

CPU time tells two trees apart only where they differ by a tenth or more; the number of instructions repeats to half a
per cent, whatever else the machine does. The proxy runs under cachegrind twice, with requests and without, and the
difference is theirs. Not counted: the kernel's work, and what memory costs. Run it in another checkout to compare.

The arguments are the proxies that are counted: ``pdproxy`` if there are none, ``pdproxy-unsampled`` and
``pdproxy-sampled`` (tracing is on, for none and for all of the requests).
"""

import re
import shutil
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.bench.peers import PDPROXY, SAMPLED, UNSAMPLED, Peer, Ports
from deploy.bench.rounds import BenchError, Effort, ask, start
from deploy.bench.script import Line
from deploy.local.paths import RUNS
from deploy.local.supervise import PartEndedError, Supervisor, stop_signals
from pdproxy.stream.scan import BEST

REQUESTS, STREAMS = 240, 16
PATIENCE = 300.0
"""Seconds for its start, and for its end: a proxy runs some fifty times slower here."""
_TOTAL = re.compile(r"I\s+refs:\s+([\d,]+)")


def instructions(peer: Peer, line: Line) -> float:
    """Instructions of one request of a line, by a proxy of ours.

    Raises:
        BenchError: the proxy was not ready, or an answer was wrong.
    """
    return (_counted(peer, line, REQUESTS) - _counted(peer, line, 0)) / REQUESTS


def _counted(peer: Peer, line: Line, requests: int) -> int:
    """Instructions of a whole process: its start, one request that shows that it is ready, these, and its end."""
    effort = Effort(1, requests, STREAMS, 20.0)
    with TemporaryDirectory(dir=RUNS) as folder, Supervisor(Path(folder)) as supervisor:
        counted = Path(folder) / "counted"
        (running,) = start(supervisor, [_under_cachegrind(peer, counted)], effort, PATIENCE)
        if requests:
            ask(running, line, requests, STREAMS)
        running.part.process.send_signal(signal.SIGTERM)
        running.part.process.wait(PATIENCE)
        found = _TOTAL.search(counted.read_text(encoding="utf-8"))
    if found is None:
        raise BenchError("valgrind wrote no count of instructions")
    return int(found[1].replace(",", ""))


def _under_cachegrind(peer: Peer, counted: Path) -> Peer:
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]

    def command(ports: Ports) -> list[str]:
        return [*valgrind, f"--log-file={counted}", *peer.command(ports)]

    return Peer(peer.name, command)


def main() -> int:
    """Print a line for each proxy and shape of a request; the process's exit status."""
    if shutil.which("valgrind") is None:
        print("error: valgrind is not installed", file=sys.stderr)
        return 1
    known = {peer.name: peer for peer in (PDPROXY, UNSAMPLED, SAMPLED)}
    if unknown := set(sys.argv[1:]) - set(known):
        print(f"error: {', '.join(sorted(unknown))}: known are {', '.join(known)}", file=sys.stderr)
        return 1
    RUNS.mkdir(exist_ok=True)
    print(f"the proxy scans streams in {BEST.language}", flush=True)
    try:
        with stop_signals():
            for name in sys.argv[1:] or [PDPROXY.name]:
                for line in Line:
                    thousand = instructions(known[name], line) / 1000
                    print(f"{name:18} {line:24} {thousand:8.1f} thousand instructions a request", flush=True)
    except (BenchError, PartEndedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
