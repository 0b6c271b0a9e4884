"""The cost of a shared prefix to the first, second and third prompt, by the settings of the prefix cache.

`python -m deploy.bench.retention` gets the same from vLLM's scheduler alone, for any block size. This test uses real
nodes, and the report of `pdproxy check`. Run with -s to see the table.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from pdproxy.app.check import inspect
from pdproxy.app.host import HostEnvironment
from pdproxy.settings import types
from pdproxy.settings.model import ConfiguredNode, Settings
from tests.e2e.conftest import REQUEST_TIMEOUT_S

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(900)]

SHARED, REST = 2900, 300
STEP = 2048
"""The default `--max-num-batched-tokens` of vLLM's API server on a CPU."""


@dataclass(frozen=True)
class Setting:
    """Flags of a node. ``hits``: of the three prompts, and of the first one's next turn."""

    unit: int | None
    interval: int
    step: int
    hits: tuple[int, int, int, int]
    advised: bool = False

    def spec(self, at: int) -> NodeSpec:
        flags = ("--prefix-cache-retention-interval", str(self.interval), "--max-num-batched-tokens", str(self.step))
        return NodeSpec(f"node-{at}", Role.PREFILL, 0, 0, prefix_match_unit=self.unit, more_arguments=flags)


PAIRS = (
    (
        Setting(None, 0, STEP, (0, 0, 2816, 3072), advised=True),
        Setting(16, 0, STEP, (0, 0, 2816, 3184)),
    ),
    (
        Setting(16, 256, STEP, (0, 2048, 2816, 3184), advised=True),
        Setting(16, 1024, STEP, (0, 2048, 2816, 3184), advised=True),
    ),
    (
        Setting(None, 256, 512, (0, 2560, 2816, 3072), advised=True),
        Setting(16, 512, 512, (0, 2560, 2816, 3184)),
    ),
)
"""Nodes that run at one time."""


def ask(node: Node, prompt: list[int]) -> int:
    """Compute a prompt. Returns how many of its tokens were cached."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{node.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    answer.raise_for_status()
    return int((answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def hits(node: Node) -> tuple[int, ...]:
    prefix = [10 + at % 800 for at in range(SHARED)]
    prompts = [[*prefix, *[900 + at] * REST] for at in range(3)]
    # No answer is like it: the turn shares only the prompt.
    return (*(ask(node, prompt) for prompt in prompts), ask(node, [*prompts[0], *[5] * REST]))


def told(node: Node) -> list[str]:
    """The report of `pdproxy check`."""
    configured = ConfiguredNode(url=node.url, roles=(types.Role.PREFILL,))
    return list(asyncio.run(inspect(Settings(nodes=(configured,)), HostEnvironment())).caches)


@pytest.fixture(params=PAIRS, ids=("default", "interval", "interval and steps"))
def running(request: pytest.FixtureRequest) -> Iterator[list[tuple[Setting, Node]]]:
    """Logs: `.run/e2e-retention`."""
    pair: tuple[Setting, ...] = request.param
    with Supervisor(logs_of("e2e-retention")) as supervisor:
        nodes = start_nodes(supervisor, [setting.spec(at) for at, setting in enumerate(pair)], print)
        yield list(zip(pair, nodes, strict=True))


def test_who_hits_a_shared_prefix(running: list[tuple[Setting, Node]]) -> None:
    for setting, node in running:
        found, lines = hits(node), told(node)
        print(
            f"unit {setting.unit}, interval {setting.interval}, step {setting.step}: {found}",
            *lines,
            sep="\n  ",
        )
        assert found == setting.hits
        assert any(": advice:" in line for line in lines) == setting.advised
