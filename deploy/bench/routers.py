"""The proxies that a trace is replayed against, each with its policies: how it is started in front of simulated nodes.

The others have environments of their own, made once: vllm-router that of `make bench`, smg one beside it.
"""

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.bench.peers import BENCH_VENV, Ports, make_environment, make_smg_environment, smg_command, smg_workers
from deploy.bench.simulate import MODEL
from deploy.bench.traces import VOCABULARY
from deploy.local.paths import RUNS, VENV
from pdproxy.nodes.node import Role


class Front(NamedTuple):
    """Where a proxy listens, and the nodes behind it.

    Attributes:
        clients: port for clients.
        operators: port for metrics.
        nodes: by role: their addresses.
    """

    clients: int
    operators: int
    nodes: Mapping[Role, Sequence[str]]


class Router(NamedTuple):
    """A proxy with one policy. ``joins`` is called once it listens, and tells it of its nodes."""

    name: str
    command: Callable[[Front], list[str]]
    joins: Callable[[Front], None] = lambda _front: None


def pdproxy(routing: str) -> Router:
    """This project's."""
    return Router(f"pdproxy {routing}", lambda front: _pdproxy(front, routing))


def _pdproxy(front: Front, routing: str) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", f"{front.clients}", "--admin-port", f"{front.operators}"]
    patience = ["--deadlines-connect", "60", "--health-timeout", "60", "--health-slow-start", "0"]
    simple = ["--health-first-hand-over", "warm_up"]  # the nodes here know no log-probabilities
    command = [str(VENV / "bin" / "python"), "-m", "pdproxy", "serve", *_nodes(front), *listen, *patience, *simple]
    return [*command, "--policy-routing", routing, "--log-level", "warning"]


def vllm_router(policy: str) -> Router:
    """vLLM's own router, in Rust."""
    return Router(f"vllm-router {policy}", lambda front: _vllm_router(front, policy))


def _vllm_router(front: Front, policy: str) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", f"{front.clients}", "--prometheus-port", f"{front.operators}"]
    mode = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", policy]
    ready = ["--worker-startup-check-interval", "1", "--log-level", "warning"]
    known = _event_sources(front) if policy == "kv_aware" else []
    program = ["env", f"VLLM_ROUTER_TOKENIZER={write_tokenizer()}", str(BENCH_VENV / "bin" / "vllm-router")]
    return [*program, *mode, *_nodes(front), *listen, *ready, *known]


def _event_sources(front: Front) -> list[str]:
    """Flags that name where prefill nodes publish. In this mode vllm-router takes their blocks to be of 16 tokens."""
    words = list[str]()
    for url in front.nodes[Role.PREFILL]:
        with urllib.request.urlopen(f"{url}/kv_event_sources", timeout=10) as answer:
            words += ["--pd-kv-events", f"{url}={json.load(answer)['0']['endpoint']}"]
    return words


def write_tokenizer(folder: Path = RUNS / "plan-tokenizer") -> Path:
    """A tokenizer for the nodes' prompts: vllm-router's ``kv_aware`` wants one on its own disk. Its folder."""
    vocabulary = {"<unk>": 0} | {f"w{each}": each for each in range(1, VOCABULARY)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    return folder


def smg(policy: str) -> Router:
    """The SGLang project's gateway, in Rust."""
    return Router(f"smg {policy}", lambda front: _smg(front, policy), _smg_workers)


def _smg(front: Front, policy: str) -> list[str]:
    return smg_command(Ports(front.clients, front.operators, 0, 0), policy)


def _smg_workers(front: Front) -> None:
    smg_workers(front.clients, MODEL, front.nodes)


def _nodes(front: Front) -> list[str]:
    return [word for role, urls in front.nodes.items() for url in urls for word in (f"--{role}", url)]


def make_environments() -> None:
    """Install the other proxies, once.

    Raises:
        BootstrapError: one cannot be installed; the message has pip's output.
    """
    make_environment()
    make_smg_environment()


RIVALS = (
    vllm_router("sticky_least_loaded"),
    vllm_router("cache_aware"),
    vllm_router("kv_aware"),
    smg("cache_aware"),
)
