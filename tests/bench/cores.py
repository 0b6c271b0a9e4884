"""What a second worker gives: `python -m tests.bench.cores`; needs Debian's packages wrk and nginx.

Whole answers, from `wrk` (C) to the proxy, whose nodes are `nginx` (C), which answer at once with fixed bodies: so most
CPU time is the proxy's. In turn with one worker and with two: requests a second, CPU time per request of the proxy, of
the nodes and of the load generator, and how the connections were split. With as many connections each of two workers
has half as many requests in one turn of its event loop, and so saves less by doing things together; with twice as many
its turns are those of the one worker, and what is left is what it costs to share a port.

wrk counts answers of another status as errors; it does not look into bodies, but the first answer of each is checked.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.local.bootstrap import BootstrapError
from deploy.local.paths import ROOT, RUNS, VENV
from deploy.local.ports import free_ports
from deploy.local.supervise import Part, PartEndedError, Stopped, Supervisor, inherited, stop_signals
from tests.bench.cpu import seconds_of_tree
from tests.bench.interpreters import environment, interpreter
from tests.bench.node import TICKET
from tests.bench.peers import Ports, pdproxy
from tests.bench.rounds import BenchError, Running, await_ready
from tests.bench.script import MODEL, Line, body, expected

FOLDER = RUNS / "bench-cores"
WORKERS = (1, 2)


class Turn(NamedTuple):
    """One turn. ``proxy``, ``nodes``, ``load``: CPU milliseconds per request; ``shares``: of the connections."""

    workers: int
    connections: int
    rate: float
    proxy: float
    nodes: float
    load: float
    shares: tuple[float, ...]


def nginx_config(folder: Path, prefill: int, decode: int) -> str:
    """Two nodes that answer what a proxy asks of them."""
    usage = {"prompt_tokens": 250, "completion_tokens": 32, "total_tokens": 282}
    whole = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "usage": usage}
    text = {"index": 0, "text": expected(Line.WHOLE), "finish_reason": "length", "logprobs": None}
    first = {**whole, "choices": [{**text, "text": ""}], "kv_transfer_params": TICKET}
    servers = _server(prefill, first) + _server(decode, {**whole, "choices": [text]})
    paths = [f"{each}_temp_path {folder}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    http = ["access_log off;", "keepalive_requests 1000000;", "client_body_buffer_size 64k;", *paths, *servers]
    top = ["daemon off;", "worker_processes 1;", f"pid {folder}/pid;", "events { worker_connections 4096; }"]
    return "\n".join([*top, "http {", *http, "}"])


def _server(port: int, answer: object) -> list[str]:
    fixed = {
        "= /v1/completions": json.dumps(answer),
        "= /v1/models": json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}),
        "= /version": json.dumps({"version": "0.32.0"}),
        "/": "",
    }
    places = [f"location {path} {{ return 200 {_quoted(text)}; }}" for path, text in fixed.items()]
    return ["server {", f"listen 127.0.0.1:{port} backlog=1024;", "default_type application/json;", *places, "}"]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def lua() -> str:
    """wrk's script: the request."""
    sent = json.dumps(body(Line.WHOLE))
    return f'wrk.method = "POST"\nwrk.body = [==[{sent}]==]\nwrk.headers["content-type"] = "application/json"\n'


class Wrk(NamedTuple):
    """What wrk told."""

    requests: int
    rate: float


def read_wrk(output: str) -> Wrk:
    """Raises BenchError where an answer had another status, or a socket an error."""
    if "Non-2xx" in output or "Socket errors" in output:
        raise BenchError(f"not all answers were right:\n{output}")
    requests, rate = re.search(r"(\d+) requests in", output), re.search(r"Requests/sec:\s+([\d.]+)", output)
    if requests is None or rate is None:
        raise BenchError(f"wrk told nothing:\n{output}")
    return Wrk(int(requests[1]), float(rate[1]))


def measure(python: Path, connections: Sequence[int], seconds: int, rounds: int) -> Iterator[Turn]:
    """Each number of workers and connections in turns."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    prefill, decode, *ports = free_ports(2 + 2 * len(WORKERS))
    (FOLDER / "nginx.conf").write_text(nginx_config(FOLDER, prefill, decode), encoding="utf-8")
    (FOLDER / "ask.lua").write_text(lua(), encoding="utf-8")
    with Supervisor(FOLDER) as supervisor:
        command = ["nginx", "-e", "stderr", "-p", str(FOLDER), "-c", str(FOLDER / "nginx.conf")]
        nodes = supervisor.start("nodes", command, inherited(), ROOT)
        proxies = {}
        for workers, clients, operators in zip(WORKERS, ports[0::2], ports[1::2], strict=True):
            peer = pdproxy(f"workers-{workers}", python, "--workers", f"{workers}", "--log-level", "warning")
            around = Ports(clients, operators, prefill, decode)
            part = supervisor.start(peer.name, peer.command(around), inherited(), ROOT)
            proxies[workers] = Running(peer, around, part)
        for proxy in proxies.values():
            await_ready(supervisor, proxy, 60.0, Line.WHOLE)
        for _ in range(rounds):
            for number in connections:
                for workers, proxy in proxies.items():
                    yield _turn(workers, proxy, nodes, number, seconds)


def _turn(workers: int, proxy: Running, nodes: Part, connections: int, seconds: int) -> Turn:
    parts = proxy.part.process.pid, nodes.process.pid
    before, given = [seconds_of_tree(each) for each in parts], _connections(proxy, workers)
    target = f"http://127.0.0.1:{proxy.port}/v1/completions"
    words = ["-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(FOLDER / "ask.lua"), target]
    clock = ["bash", "-c", 'wrk "$@"; status=$?; times; exit $status', "bash", *words]
    done = subprocess.run(clock, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"wrk failed:\n{done.stdout}{done.stderr}")
    found = read_wrk(done.stdout)
    used = [1000 * (seconds_of_tree(each) - old) / found.requests for each, old in zip(parts, before, strict=True)]
    more = [now - old for now, old in zip(_connections(proxy, workers), given, strict=True)]
    shares = tuple(each / sum(more) for each in more)
    return Turn(workers, connections, found.rate, used[0], used[1], 1000 * _times(done.stdout) / found.requests, shares)


def _times(output: str) -> float:
    """CPU seconds of the children, as bash's `times` prints them last: minutes and seconds, user and system."""
    found = re.findall(r"(\d+)m([\d.]+)s", output.strip().splitlines()[-1])
    return sum(60 * int(minutes) + float(seconds) for minutes, seconds in found)


def _connections(proxy: Running, workers: int) -> list[float]:
    """Given to each worker until now; nothing of one worker, which has all."""
    if workers == 1:
        return []
    with urllib.request.urlopen(f"http://127.0.0.1:{proxy.ports.operators}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return [float(each) for each in re.findall(r"^pdproxy_worker_connections_total\{.*\} (\S+)$", text, re.MULTILINE)]


def table(turns: Sequence[Turn]) -> str:
    """The best rate and the least CPU time of each kind's turns; ratios are to one worker with as many connections."""
    columns = ["workers", "connections", "requests/s", "ratio", "proxy's CPU ms", "ratio", "nodes'", "wrk's", "split"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for connections in dict.fromkeys(turn.connections for turn in turns):
        base = [turn for turn in turns if (turn.workers, turn.connections) == (1, connections)]
        for workers in WORKERS:
            own = [turn for turn in turns if (turn.workers, turn.connections) == (workers, connections)]
            rate, cost = max(turn.rate for turn in own), min(turn.proxy for turn in own)
            cells = [f"{workers}", f"{connections}", f"{rate:.0f}", f"{rate / max(turn.rate for turn in base):.2f}x"]
            cells += [f"{cost:.3f}", f"{cost / min(turn.proxy for turn in base):.2f}x"]
            cells += [f"{min(turn.nodes for turn in own):.3f}", f"{min(turn.load for turn in own):.3f}"]
            shares = [statistics.fmean(turn.shares[each] for turn in own) for each in range(len(own[0].shares))]
            cells += [" : ".join(f"{100 * share:.0f}" for share in shares)]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cores", description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, nargs="+", default=[64, 128], help="at once (default 64 128)")
    parser.add_argument("--seconds", type=int, default=6, help="of one turn (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    parser.add_argument(
        "--python", type=Path, metavar="PATH", help="interpreter for the proxy (default: the project's)"
    )
    asked = parser.parse_args(arguments)
    if missing := [name for name in ("wrk", "nginx") if shutil.which(name) is None]:
        print(f"error: {' and '.join(missing)} not found: apt-get install wrk nginx", file=sys.stderr)
        return 1
    try:
        python = environment(asked.python) if asked.python else VENV / "bin" / "python"
        print(interpreter(python).describe(), flush=True)
        with stop_signals():
            turns = []
            for turn in measure(python, asked.connections, asked.seconds, asked.rounds):
                turns.append(turn)
                print(f"  {turn.workers} workers, {turn.connections} connections: {turn.rate:.0f}/s", flush=True)
        print(f"\n{table(turns)}")
    except (BenchError, BootstrapError, PartEndedError, Stopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
