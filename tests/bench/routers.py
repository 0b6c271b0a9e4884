"""The proxies that a trace is replayed against, each with its policies: how it is started in front of simulated nodes.

The others have environments of their own, made once: vllm-router that of `make bench`, smg one beside it.
"""

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from deploy.local.bootstrap import STAMP, Plan, make_empty, pip, run_first_that_works
from deploy.local.paths import ROOT, RUNS, VENV
from pdproxy.nodes.node import Role
from tests.bench.hybrid_cache import CacheShape
from tests.bench.peers import BENCH_VENV, make_environment
from tests.bench.simulate import MODEL

SMG_VENV = RUNS / "smg-venv"
SMG = "smg==1.13.0"


class Front(NamedTuple):
    """Where a proxy listens, and the nodes behind it.

    Attributes:
        clients: port for clients.
        operators: port for metrics.
        nodes: by role: their addresses.
        events: of each prefill node: its event and replay endpoints, by address.
    """

    clients: int
    operators: int
    nodes: Mapping[Role, Sequence[str]]
    events: Mapping[str, tuple[str, str]]
    shape: CacheShape


class Router(NamedTuple):
    """A proxy with one policy. ``joins`` is called once it listens, and tells it of its nodes where they are not given."""

    name: str
    command: Callable[[Front], list[str]]
    joins: Callable[[Front], None] = lambda front: None


def pdproxy(routing: str) -> Router:
    """This project's."""
    return Router(f"pdproxy {routing}", lambda front: _pdproxy(front, routing))


def _pdproxy(front: Front, routing: str) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", f"{front.clients}", "--admin-port", f"{front.operators}"]
    patience = ["--deadlines-connect", "60", "--health-timeout", "60", "--health-slow-start", "0"]
    simple = ["--health-first-hand-over", "warm_up"]  # the nodes here know no log-probabilities
    command = [str(VENV / "bin" / "python"), "-m", "pdproxy", "serve", *_nodes(front), *listen, *patience, *simple]
    return [*command, "--policy-routing", routing, "--log-level", "warning"]


def vllm_router(policy: str, extra: Callable[[Front], list[str]] = lambda front: []) -> Router:
    """vLLM's own router, in Rust."""
    return Router(f"vllm-router {policy}", lambda front: [*_vllm_router(front, policy), *extra(front)])


def _vllm_router(front: Front, policy: str) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", f"{front.clients}", "--prometheus-port", f"{front.operators}"]
    mode = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", policy]
    ready = ["--worker-startup-check-interval", "1", "--log-level", "warning"]
    return [str(BENCH_VENV / "bin" / "vllm-router"), *mode, *_nodes(front), *listen, *ready]


def kv_events_of(front: Front) -> list[str]:
    """vllm-router's event sources, for ``kv_aware``."""
    return [word for url, (events, _) in front.events.items() for word in ("--pd-kv-events", f"{url}={events}")]


def smg(policy: str) -> Router:
    """The SGLang project's gateway, in Rust."""
    return Router(f"smg {policy}", lambda front: _smg(front, policy), _smg_workers)


def _smg(front: Front, policy: str) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", f"{front.clients}", "--prometheus-port", f"{front.operators}"]
    mode = ["--enable-igw", "--pd-disaggregation", "--backend", "vllm", "--policy", policy]
    quiet = ["--prometheus-host", "127.0.0.1", "--disable-tokenizer-autoload", "--log-level", "warn"]
    return [str(SMG_VENV / "bin" / "smg"), "launch", *mode, *listen, *quiet]


def _smg_workers(front: Front) -> None:
    for role, urls in front.nodes.items():
        for url in urls:
            worker = {"url": url, "worker_type": role, "runtime_type": "vllm", "model_id": MODEL}
            body = json.dumps({**worker, "labels": {"kv_connector": "NixlConnector"}}).encode()
            asked = urllib.request.Request(f"http://127.0.0.1:{front.clients}/workers", body, method="POST")
            asked.add_header("content-type", "application/json")
            with urllib.request.urlopen(asked, timeout=10) as answer:
                answer.read()


def _nodes(front: Front) -> list[str]:
    return [word for role, urls in front.nodes.items() for url in urls for word in (f"--{role}", url)]


def make_environments() -> None:
    """Install the other proxies, once.

    Raises:
        BootstrapError: one cannot be installed; the message has pip's output.
    """
    make_environment()
    plan, stamp = Plan(ROOT, SMG_VENV), SMG_VENV / STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == SMG:
        return
    print(f"making {SMG_VENV} for smg (once) …", flush=True)
    make_empty(plan)
    run_first_that_works([pip(plan, SMG)])
    stamp.write_text(SMG, encoding="utf-8")


RIVALS = (
    vllm_router("sticky_least_loaded"),
    vllm_router("cache_aware"),
    vllm_router("kv_aware", kv_events_of),
    smg("cache_aware"),
    smg("prefix_hash"),
)
