"""Official clients, as their registries have them, get the same through the proxy as from one stock engine.

The nodes have a reasoning parser and a tool parser. The clients' scripts in `clients/` have the questions.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from deploy.local.node import Node, NodeSpec, Role
from deploy.local.stack import Proxy, ProxySpec, logs_of, pair_specs, start_nodes, start_proxy
from deploy.local.supervise import Supervisor
from tests.e2e.client_scripts import differences, questions, run, wrong
from tests.e2e.metrics_reader import PATIENCE_S, Watch, read, watch
from tests.e2e.stream_shapes import NODE_FLAGS

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.own_engines, pytest.mark.timeout(1500)]

SCRIPTS = {
    "openai for Python": "openai_client.py",
    "anthropic for Python": "anthropic_client.py",
    "litellm": "litellm_client.py",
    "langchain": "langchain_client.py",
    "openai for Node": "openai_client.mjs",
    "ai for Node": "ai_client.mjs",
}
SEEDS = 200
"""The seeds of one client's questions."""
LEAVES = "leaves"


@dataclass(frozen=True)
class Targets:
    """A proxy, its two nodes, and an engine by itself."""

    proxy: Proxy
    prefill: Node
    decode: Node
    alone: Node


@pytest.fixture(scope="module")
def targets() -> Iterator[Targets]:
    """Started together. Logs: `.run/e2e-clients`."""
    specs = [replace(spec, more_arguments=NODE_FLAGS) for spec in (*pair_specs(), NodeSpec("alone", Role.PLAIN, 0, 0))]
    with Supervisor(logs_of("e2e-clients")) as supervisor:
        prefill, decode, alone = start_nodes(supervisor, specs, print)
        yield Targets(start_proxy(supervisor, ProxySpec(), [prefill, decode], print), prefill, decode, alone)


class Counted:
    """The proxy's and the decode node's counts from now on."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._verified = watch(targets.decode.url, "reads", outcome="verified")
        self._reads = watch(targets.decode.url, "reads")
        self._refused = watch(targets.decode.url, "refused")
        self._outcomes = {each: self._of_proxy("requests", outcome=each) for each in ("ok", "failed", "rejected")}
        self._passed_on = self._of_proxy("requests", endpoint="other", outcome="ok")
        self._gone = self._of_proxy("requests", outcome="client_gone")
        self._alone = [self._of_proxy(name) for name in ("recomputed", "local", "migrations")]
        self._faults, self._asked = self._of_proxy("leg_faults"), self._of_proxy("leg_faults", fault="client_error")

    def _of_proxy(self, name: str, **labels: str) -> Watch:
        full = f"pdproxy_{name}_total"
        url = self._targets.proxy.admin_url
        return Watch(url, full, labels, read(url, full, **labels))

    def check(self, left: int) -> str:
        """Every answer came from both nodes, and nothing failed but the client's own mistakes. Returns the counts.

        Args:
            left: how many streams the client left.
        """
        self._gone.reaches(left)
        handed_over = self._outcomes["ok"].grown() - self._passed_on.grown() + left
        self._reads.reaches(handed_over)
        assert [each.grown() for each in self._alone] == [0, 0, 0]
        assert (self._outcomes["failed"].grown(), self._outcomes["rejected"].grown()) == (0, 0)
        assert self._faults.grown() == self._asked.grown()
        assert self._refused.grown() == 0
        assert self._gone.grown() == left
        assert self._verified.grown() == self._reads.grown() == handed_over
        self._idle()
        return (
            f"{handed_over:g} requests handed over and verified, {left} of them left, {self._asked.grown():g} refused"
        )

    def _idle(self) -> None:
        """No node still works for a client that has left."""
        limit = time.monotonic() + PATIENCE_S
        for node in (self._targets.prefill, self._targets.decode):
            while read(node.url, "vllm:num_requests_running") + read(node.url, "vllm:num_requests_waiting"):
                assert time.monotonic() < limit, f"{node.spec.name} still runs a request"
                time.sleep(0.1)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_client_gets_what_it_gets_from_one_engine(targets: Targets, name: str) -> None:
    script, asked = SCRIPTS[name], questions(10_000 + SEEDS * list(SCRIPTS).index(name))
    alone = run(script, targets.alone.url, asked)
    counted = Counted(targets)
    through = run(script, targets.proxy.url, asked)
    assert not differences(alone, through)
    assert not wrong(through, asked)
    told = counted.check(sum(each.check == LEAVES for each in through))
    print(f"\n{name}: {len(through)} checks; {told}\n  {'; '.join(each.check for each in through)}")
