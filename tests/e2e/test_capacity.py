"""A node's reported capacity against what its engine admits: they agree within one block per sequence.

Requests are added to a node with few blocks until vLLM queues or preempts one.
"""

import asyncio
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import pytest

from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role, on_free_ports
from deploy.local.paths import ROOT
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import REQUEST_TIMEOUT_S
from tests.e2e.metrics_reader import read

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines]

BLOCK = 256
FEW_BLOCKS = 64
LONGEST = 4096
EDGE = 0.1
GROWING = 6
"""Sequences that grow side by side."""
APART = 40
"""Tokens by which each is longer than the one before, so that they reach new blocks in turn, as the figure assumes."""
LATE = 2 * BLOCK
"""Tokens below the figure at the start, so that all are admitted."""
Prompt = list[int]


@dataclass(frozen=True)
class ReportedCapacity:
    """The reported capacity: tokens of attention; sequences that fit by their states; sequences of `LONGEST` tokens."""

    tokens: int
    sequences: int
    longest: int

    def share(self, count: int, length: float) -> float:
        """The share of the node that so many sequences of so many tokens take; they fit while it is at most 1."""
        return count * length / self.tokens + count / self.sequences

    def length(self, count: int) -> float:
        """Tokens that each of so many sequences may have."""
        return self.tokens * (1 - count / self.sequences) / count


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A decode node with few blocks. Logs: `.run/e2e-capacity`.

    With a unit, each sequence takes one more state for one step right after its prompt, and all of these prompts end in
    the same step.
    """
    specs = on_free_ports(
        NodeSpec("few", Role.DECODE, 0, 0, gpu_blocks=FEW_BLOCKS, max_model_len=LONGEST, prefix_match_unit=None)
    )
    with Supervisor(logs_of("e2e-capacity")) as supervisor:
        yield start_nodes(supervisor, specs, print)[0]


@pytest.fixture(scope="module")
def reported(node: Node) -> ReportedCapacity:
    def of(name: str, **labels: str) -> int:
        return int(read(node.url, f"pdproxy_connector_capacity_{name}", **labels))

    return ReportedCapacity(of("tokens"), of("sequences", limit="state"), of("sequences", limit="max_model_len"))


def prompts(count: int, tokens: int, seed: int) -> list[Prompt]:
    """Token ids without a common prefix."""
    source = random.Random(seed)
    return [[source.randrange(10, 900) for _ in range(tokens)] for _ in range(count)]


def growing(mean: float, seed: int) -> list[Prompt]:
    """Prompts with this mean length."""
    first = math.floor(mean) - APART * (GROWING - 1) // 2
    return [prompts(1, first + APART * number, seed + number)[0] for number in range(GROWING)]


Span = tuple[float, float]
"""The seconds in which a sequence ran, by its own stream."""


async def grow(client: httpx.AsyncClient, prompt: Prompt, by: int) -> Span:
    """Generate so many tokens of one sequence: the times of the first and the last."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": by, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        came = [time.monotonic() async for line in answer.aiter_lines() if line.startswith("data: {")]
    assert answer.status_code == 200
    return came[0], came[-1]


async def grown(node: Node, load: Sequence[Prompt], by: int) -> list[Span]:
    """Generate all these sequences at once."""
    async with httpx.AsyncClient(base_url=node.url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        return await asyncio.gather(*(grow(client, prompt, by) for prompt in load))


async def most_running(node: Node, load: Sequence[Prompt], by: int) -> int:
    """How many sequences the engine ran at the same time; the others waited.

    The ends of each span do not count: the end of one sequence may arrive after the start of the next.
    """
    spans = [
        (first + EDGE * (last - first), last - EDGE * (last - first)) for first, last in await grown(node, load, by)
    ]
    most = max(sum(first <= moment <= last for first, last in spans) for moment, _ in spans)
    assert most < len(load), "all of them ran at once: this says nothing of what the node admits"
    return most


async def preemptions(node: Node, load: Sequence[Prompt], by: int) -> int:
    """How often the engine preempted a sequence while all of them grew."""
    before = read(node.url, "vllm:num_preemptions_total")
    await grown(node, load, by)
    return int(read(node.url, "vllm:num_preemptions_total") - before)


async def test_sequences_of_the_greatest_length(node: Node, reported: ReportedCapacity) -> None:
    last = BLOCK - 16
    assert await most_running(node, prompts(reported.longest + 2, LONGEST - last, 1), last) == reported.longest


async def test_short_sequences(node: Node, reported: ReportedCapacity) -> None:
    """One attention block and the states each: the states limit how many fit."""
    length = BLOCK - 16
    seen = await most_running(node, prompts(2 * reported.sequences, length // 2, 2), length // 2)
    assert reported.share(seen, length) <= 1 < reported.share(seen + 1, length + BLOCK)


async def test_growing_sequences(node: Node, reported: ReportedCapacity) -> None:
    """All are admitted. At one block below the figure they can grow, at one block above it they cannot."""
    start = reported.length(GROWING) - LATE
    assert await preemptions(node, growing(start, 10), LATE - BLOCK) == 0
    assert await preemptions(node, growing(start, 20), LATE + BLOCK) > 0


def test_a_check_prints_the_figures(node: Node, reported: ReportedCapacity) -> None:
    line = [sys.executable, "-m", "pdproxy", "check", "--decode", node.url]
    checked = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    row = next((row.split() for row in checked.stdout.splitlines() if SERVED_NAME in row), [])
    assert row[4:] == [f"{reported.tokens:,}", f"{reported.sequences:,}", f"{reported.longest:,}", "attention", "ok"], (
        checked
    )
