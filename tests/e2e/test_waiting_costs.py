"""What requests that wait for their ticket cost: an idle node's CPU, and the speed of those that run beside them; and
what blocks cost that wait to be read.

`python -m pytest -s -m long tests/e2e/test_waiting_costs.py` prints the figures.
"""

import json
import time
from statistics import median
from typing import Any

import httpx
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME, Node
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.legs import prefill, release
from tests.e2e.metrics_reader import read
from tests.e2e.test_given_up_reads import cores_used
from tests.e2e.waiting import WAITING, sent, until

pytestmark = [pytest.mark.e2e, pytest.mark.long]

USAGE = "vllm:kv_cache_usage_perc"
SAMPLES, SECONDS = 5, 4.0
WAITERS = 8
TOKENS = 2100
STREAMED = 600
PAIRS = 8
MOST_CORES = 0.2
MOST_SLOWER = 1.05
"""Of the least of several runs, for whatever else runs on two cores makes single ones much slower."""


def gap(url: str) -> float:
    """Mean seconds from token to token of one stream, which has the engine to itself."""
    body: dict[str, Any] = {"model": SERVED_NAME, "prompt": quiz(3300, 300).prompt(), "max_tokens": STREAMED}
    body |= {"ignore_eos": True, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False) as answer:
        came = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {") and json.loads(line[6:])]
    assert len(came) > STREAMED / 2
    return (came[-1] - came[0]) / (len(came) - 1)


def cores(node: Node) -> float:
    """How many cores a node keeps busy; the least of some samples, for beside other work each step takes longer."""
    return min(cores_used(node, SECONDS) for _ in range(SAMPLES))


def test_an_idle_node_hardly_works_while_one_waits(pair: Pair) -> None:
    take = pair.decode.url
    until(take, WAITING, 0)
    idle = cores(pair.decode)
    with sent(take, quiz(3310, TOKENS).prompt()) as [leg]:
        waits = cores(pair.decode)
        leg.deliver(None)
    print(f"\nan idle decode node takes {idle:.3f} cores, one on which a request waits {waits:.3f}")
    assert waits < MOST_CORES


def test_an_idle_node_hardly_works_while_it_keeps_blocks(pair: Pair) -> None:
    give, hand_over = pair.prefill.url, "waiting-costs-hand-over"
    prefill(give, quiz(3315, TOKENS).prompt(), pdproxy_hand_over=hand_over)
    keeps = cores(pair.prefill)
    print(f"\na prefill node that keeps blocks until they are read takes {keeps:.3f} cores")
    assert read(give, USAGE) > 0, "the lease has ended meanwhile"
    release(give, hand_over)
    until(give, USAGE, 0)
    assert keeps < MOST_CORES


def test_others_are_as_fast_while_eight_wait(pair: Pair) -> None:
    take = pair.decode.url
    gap(take)
    alone, beside = list[float](), list[float]()
    for turn in range(PAIRS):
        alone.append(gap(take))
        with sent(take, *(quiz(3320 + WAITERS * turn + at, TOKENS).prompt() for at in range(WAITERS))) as legs:
            beside.append(gap(take))
            assert not any(leg.answer.done() for leg in legs)
            for leg in legs:
                leg.deliver(None)
    ratio = min(beside) / min(alone)
    print(f"\nfrom token to token {min(alone) * 1e3:.2f} ms alone, {min(beside) * 1e3:.2f} beside: {ratio:.3f}")
    print(f"medians, of {PAIRS}: {median(alone) * 1e3:.2f} and {median(beside) * 1e3:.2f}")
    assert ratio < MOST_SLOWER
