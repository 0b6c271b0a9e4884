"""The proxy in front of nodes with vLLM's own NixlConnector, without our connector (docs/other-parts.md).

Prompts are handed over and answers are right. A prompt whose prefill node has died is computed on the decode node. The
page lists what such nodes cannot do.
"""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME, Node, NodeSpec
from deploy.local.stack import Proxy, ProxySpec, logs_of, pair_specs, start_nodes, start_proxy
from deploy.local.supervise import Supervisor
from deploy.local.watchdog import descendants
from tests.e2e.conftest import REQUEST_TIMEOUT_S
from tests.e2e.metrics_reader import read
from tests.e2e.proxy_log import log_when

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(600)]

QUESTIONS = 6
TRANSFERS = "vllm:nixl_xfer_time_seconds_count"


@dataclass
class Stock:
    prefill: Node
    decode: Node
    proxy: Proxy

    def ask(self, seed: int) -> httpx.Response:
        question = quiz(seed, 800)
        body = {"model": SERVED_NAME, "prompt": question.prompt(), "max_tokens": 8, "temperature": 0}
        url = f"{self.proxy.url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == question.answer
        return answer


def stock(spec: NodeSpec) -> NodeSpec:
    """The same node, with nothing of ours but what a CPU needs."""
    return replace(spec, connector_module="", more_environment={"VLLM_PLUGINS": ""})


@pytest.fixture(scope="module")
def nodes() -> Iterator[Stock]:
    """Logs: `.run/e2e-stock`."""
    with Supervisor(logs_of("e2e-stock")) as supervisor:
        prefill, decode = start_nodes(supervisor, [stock(spec) for spec in pair_specs()], print)
        yield Stock(prefill, decode, start_proxy(supervisor, ProxySpec(), [prefill, decode], print))


def test_prompts_are_handed_over_and_a_dead_prefill_node_costs_no_answer(nodes: Stock) -> None:
    assert httpx.get(f"{nodes.proxy.admin_url}/ready", trust_env=False).json() == {"status": "ready"}
    before = read(nodes.decode.url, TRANSFERS)
    routes = [nodes.ask(seed).headers["x-pdproxy-route"].partition(";")[0] for seed in range(7000, 7000 + QUESTIONS)]
    print(json.dumps(routes))
    assert routes == ["disaggregated"] * QUESTIONS
    assert read(nodes.decode.url, TRANSFERS) - before >= QUESTIONS
    log = log_when(nodes.proxy.part.log, lambda text: text.count("request ended") == QUESTIONS)
    assert "exchange no tickets" not in log
    for process in descendants(nodes.prefill.part.process.pid):
        os.kill(process, signal.SIGKILL)
    assert nodes.ask(7100).headers["x-pdproxy-route"].startswith("local")
