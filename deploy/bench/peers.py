"""The proxies that are compared: how each is started, and the other routers' own environments.

production-stack's router is not among them: no package registry has it, and nothing else is fetched here.
"""

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.bench.node import TRACES_PATH
from deploy.bench.script import KEY, MODEL
from deploy.local.bootstrap import STAMP, Plan, make_empty, make_pinned, pip, run_first_that_works
from deploy.local.paths import REQUIREMENTS, ROOT, RUNS, VENV
from pdproxy.nodes.node import Role

PINS = REQUIREMENTS / "bench.txt"
BENCH_VENV = RUNS / "bench-venv"
SMG_VENV = RUNS / "smg-venv"
SMG = "smg==1.13.0"
KEYS = RUNS / "bench" / "keys"
LEAST_LOADED = ("--policy-routing", "least-loaded")


class Ports(NamedTuple):
    """Where a proxy listens (for clients, and for its operators), and where the two nodes do."""

    clients: int
    operators: int
    prefill: int
    decode: int


class Peer(NamedTuple):
    """A proxy. ``joins`` is called once it listens, and tells it of its nodes; raises OSError while it does not."""

    name: str
    command: Callable[[Ports], list[str]]
    joins: Callable[[Ports], None] = lambda _ports: None


def pdproxy(name: str, python: Path, *flags: str) -> Peer:
    """This project's, run by a Python, with two decode nodes: without a second one no stream could go on elsewhere."""

    def command(ports: Ports) -> list[str]:
        # The one decode node by two names.
        return [*_pdproxy(ports, python), "--decode", f"http://localhost:{ports.decode}", *flags]

    return Peer(name, command)


def variants(python: Path, suffix: str = "") -> list[Peer]:
    """pdproxy as it is compared with others: without what they have not, as it comes, and with everything.

    As it comes: records of streams to go on from, plans by what is cached. Everything: accounting by keys, and tracing
    of a twentieth of the requests, too.
    """
    KEYS.parent.mkdir(parents=True, exist_ok=True)
    KEYS.write_text(f"{KEY} bench\n", encoding="utf-8")
    counts = ["--keys-file", str(KEYS), "--otel-export", "otlp"]

    def everything(ports: Ports) -> list[str]:
        collector = ["--otel-endpoint", f"http://127.0.0.1:{ports.prefill}{TRACES_PATH}"]
        return [*pdproxy("", python, *counts).command(ports), *collector]

    return [
        pdproxy(f"pdproxy{suffix}, migration off", python, "--policy-migrations", "0", *LEAST_LOADED),
        pdproxy(f"pdproxy{suffix}, as it comes", python),
        Peer(f"pdproxy{suffix}, everything on", everything),
    ]


def _traced(sample: float) -> Callable[[Ports], list[str]]:
    """With tracing on, of this part of the requests; the prefill node is the collector, too."""

    def command(ports: Ports) -> list[str]:
        collector = ["--otel-endpoint", f"http://127.0.0.1:{ports.prefill}{TRACES_PATH}"]
        return [*_pdproxy(ports), "--otel-export", "otlp", "--otel-sample", f"{sample}", *collector]

    return command


def _pdproxy(ports: Ports, python: Path = VENV / "bin" / "python") -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", f"{ports.clients}", "--admin-port", f"{ports.operators}"]
    patience = ["--deadlines-connect", "60", "--health-timeout", "60"]  # a starved machine is no node that failed
    simple = ["--health-first-hand-over", "warm_up"]  # the nodes here know no log-probabilities
    never_alone = ["--policy-itl-budget", "0"]  # and refuse a prompt without a ticket: no decode node may compute one
    return [str(python), "-m", "pdproxy", "serve", *_nodes(ports), *listen, *patience, *simple, *never_alone]


def _vllm_router(ports: Ports) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", f"{ports.clients}", "--prometheus-port", f"{ports.operators}"]
    mode = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
    return [str(BENCH_VENV / "bin" / "vllm-router"), *mode, *_nodes(ports), *listen]


def smg_command(ports: Ports, policy: str) -> list[str]:
    """How the SGLang project's gateway is started; its nodes come later (`smg_workers`)."""
    listen = ["--host", "127.0.0.1", "--port", f"{ports.clients}", "--prometheus-port", f"{ports.operators}"]
    mode = ["--enable-igw", "--pd-disaggregation", "--backend", "vllm", "--policy", policy]
    quiet = ["--prometheus-host", "127.0.0.1", "--disable-tokenizer-autoload", "--log-level", "warn"]
    return [str(SMG_VENV / "bin" / "smg"), "launch", *mode, *listen, *quiet]


def smg_workers(clients: int, model: str, nodes: Mapping[Role, Sequence[str]]) -> None:
    """Tell the gateway of its nodes, by role. Raises OSError where it does not listen."""
    for role, urls in nodes.items():
        for url in urls:
            worker = {"url": url, "worker_type": role, "runtime_type": "vllm", "model_id": model}
            body = json.dumps({**worker, "labels": {"kv_connector": "NixlConnector"}}).encode()
            asked = urllib.request.Request(f"http://127.0.0.1:{clients}/workers", body, method="POST")
            asked.add_header("content-type", "application/json")
            with urllib.request.urlopen(asked, timeout=10) as answer:
                answer.read()


def _join_smg(ports: Ports) -> None:
    numbers = {Role.PREFILL: ports.prefill, Role.DECODE: ports.decode}
    smg_workers(ports.clients, MODEL, {role: [f"http://127.0.0.1:{port}"] for role, port in numbers.items()})


def _nodes(ports: Ports) -> list[str]:
    return ["--prefill", f"http://127.0.0.1:{ports.prefill}", "--decode", f"http://127.0.0.1:{ports.decode}"]


PDPROXY = Peer("pdproxy", _pdproxy)
UNSAMPLED = Peer("pdproxy-unsampled", _traced(0))
SAMPLED = Peer("pdproxy-sampled", _traced(1))
VLLM_ROUTER = Peer("vllm-router", _vllm_router)
SMG_ROUTER = Peer("smg", lambda ports: smg_command(ports, "round_robin"), _join_smg)


def make_environment(venv: Path = BENCH_VENV) -> None:
    """Install the other router, once.

    Raises:
        BootstrapError: it cannot be installed; the message has pip's output.
    """
    make_pinned(Plan(ROOT, venv), PINS)


def make_smg_environment() -> None:
    """Install the gateway, once.

    Raises:
        BootstrapError: it cannot be installed; the message has pip's output.
    """
    plan, stamp = Plan(ROOT, SMG_VENV), SMG_VENV / STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == SMG:
        return
    print(f"making {SMG_VENV} for smg (once) …", flush=True)
    make_empty(plan)
    run_first_that_works([pip(plan, SMG)])
    stamp.write_text(SMG, encoding="utf-8")
