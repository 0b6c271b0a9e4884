"""The engines that are asked: one that does both, and a prefill and a decode node behind two proxies, here."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import httpx

from deploy.bench.engines.loads import SEEDS_PER_RUN, Shape, question
from deploy.bench.peers import VLLM_ROUTER, Ports
from deploy.bench.rounds import BenchError
from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role
from deploy.local.paths import ROOT
from deploy.local.ports import HOST, free_ports
from deploy.local.readiness import Say, await_ready
from deploy.local.stack import ProxySpec, pair_specs, start_nodes, start_proxy
from deploy.local.supervise import Supervisor, inherited
from tests.e2e.metrics_reader import read

AGGREGATED = "one engine"
PDPROXY = "pdproxy"
ROUTER = "vllm-router"
TARGETS = (AGGREGATED, ROUTER, PDPROXY)
BEHIND_PROXIES = (ROUTER, PDPROXY)
UP_WITHIN_S = 60.0
ANSWER_WITHIN_S = 60.0
WARM_RUN = 1
"""The number of the warming requests among the runs, which `questions` makes lists for."""


class Targets(NamedTuple):
    """All that is up: addresses by target, and the two nodes."""

    urls: Mapping[str, str]
    prefill: Node
    decode: Node

    def verified(self) -> float:
        """Hand-overs that the decode node has counted as verified. Raises httpx.HTTPError."""
        return read(self.decode.url, "pdproxy_connector_reads_total", outcome="verified")


def start(supervisor: Supervisor, threads: int, say: Say) -> Targets:
    """Three engines and two proxies.

    Args:
        threads: of the one engine; the pair's engines have one each. More threads wait for each other by spinning,
            which costs more than it gives where others need the cores too.

    Raises:
        PartEndedError, NotReadyError, NodeRefusedError: as `deploy.local.stack` says.
    """
    alone = NodeSpec("aggregated", Role.PLAIN, 0, 0, more_environment={"OMP_NUM_THREADS": f"{threads}"})
    prefill, decode, aggregated = start_nodes(supervisor, [*pair_specs(), alone], say)
    proxy = start_proxy(supervisor, ProxySpec(), [prefill, decode], say)
    router = _start_router(supervisor, prefill, decode, say)
    return Targets({AGGREGATED: aggregated.url, ROUTER: router, PDPROXY: proxy.url}, prefill, decode)


def _start_router(supervisor: Supervisor, prefill: Node, decode: Node, say: Say) -> str:
    clients, operators = free_ports(2)
    command = VLLM_ROUTER.command(Ports(clients, operators, prefill.spec.port, decode.spec.port))
    supervisor.start(VLLM_ROUTER.name, command, inherited(), ROOT)
    url = f"http://{HOST}:{clients}"
    await_ready({ROUTER: f"{url}/health"}, within=UP_WITHIN_S, still_alive=supervisor.require_all_alive, say=say)
    return url


def warm(targets: Targets, shapes: Sequence[Shape]) -> None:
    """A request of each shape to each target, answered rightly: a first one takes longer than any other.

    Raises:
        BenchError: an answer was wrong.
        httpx.HTTPError: there was none.
    """
    for place, url in enumerate(targets.urls.values()):
        for at, shape in enumerate(shapes):
            asked = question(shape, WARM_RUN * SEEDS_PER_RUN + place * len(shapes) + at)
            text = complete(url, asked.prompt, shape.answer)
            if not text or not asked.answer.startswith(text):
                raise BenchError(f"{url} answered {text!r} instead of {asked.answer!r}")


def complete(url: str, prompt: str, tokens: int) -> str:
    """A completion at temperature 0, in one piece. Raises httpx.HTTPError."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_WITHIN_S, trust_env=False)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text
