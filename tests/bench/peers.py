"""The proxies that are compared: how each is started, and the other router's own environment."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from deploy.local.bootstrap import STAMP, Plan, make_empty, pip, run_first_that_works
from deploy.local.paths import REQUIREMENTS, ROOT, RUNS, VENV

PINS = REQUIREMENTS / "bench.txt"
BENCH_VENV = RUNS / "bench-venv"


class Ports(NamedTuple):
    """Where a proxy listens (for clients, and for its operators), and where the two nodes do."""

    clients: int
    operators: int
    prefill: int
    decode: int


class Peer(NamedTuple):
    """A proxy."""

    name: str
    command: Callable[[Ports], list[str]]


def _together(ports: Ports) -> list[str]:
    return [*_pdproxy(ports), "--policy-legs", "together"]


def _journaled(ports: Ports) -> list[str]:
    # The decode node by a second name: a stream has a journal where another node could resume it.
    return [*_pdproxy(ports), "--decode", f"http://localhost:{ports.decode}"]


def _pdproxy(ports: Ports) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", f"{ports.clients}", "--admin-port", f"{ports.operators}"]
    patience = ["--deadlines-connect", "60", "--health-timeout", "60"]  # a starved machine is no node that failed
    simple = ["--health-first-hand-over", "warm_up"]  # the nodes here know no log-probabilities
    return [str(VENV / "bin" / "python"), "-m", "pdproxy", "serve", *_nodes(ports), *listen, *patience, *simple]


def _vllm_router(ports: Ports) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", f"{ports.clients}", "--prometheus-port", f"{ports.operators}"]
    mode = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
    return [str(BENCH_VENV / "bin" / "vllm-router"), *mode, *_nodes(ports), *listen]


def _nodes(ports: Ports) -> list[str]:
    return ["--prefill", f"http://127.0.0.1:{ports.prefill}", "--decode", f"http://127.0.0.1:{ports.decode}"]


PDPROXY = Peer("pdproxy", _pdproxy)
JOURNALED = Peer("pdproxy-journaled", _journaled)
TOGETHER = Peer("pdproxy-together", _together)
VLLM_ROUTER = Peer("vllm-router", _vllm_router)


def make_environment(venv: Path = BENCH_VENV) -> None:
    """Install the other router, once.

    Raises:
        BootstrapError: it cannot be installed; the message has pip's output.
    """
    plan, pins = Plan(ROOT, venv), PINS.read_text(encoding="utf-8")
    stamp = venv / STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == pins:
        return
    print(f"making {venv} for the other router (once) …", flush=True)
    make_empty(plan)
    run_first_that_works([pip(plan, "--no-deps", "-r", str(PINS))])
    stamp.write_text(pins, encoding="utf-8")
