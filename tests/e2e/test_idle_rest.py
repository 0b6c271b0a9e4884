"""The CPU that a prefill node uses while blocks wait to be read.

`python -m pytest -s -m long tests/e2e/test_idle_rest.py` prints the figure.
"""

import time

import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import Node
from tests.e2e.conftest import Pair
from tests.e2e.legs import prefill, release
from tests.e2e.metrics_reader import PATIENCE_S, read
from tests.e2e.test_given_up_reads import cores_used

pytestmark = [pytest.mark.e2e, pytest.mark.long]

USAGE = "vllm:kv_cache_usage_perc"
SAMPLES, SECONDS = 5, 4.0
TOKENS = 2100
MOST_CORES = 0.2


def cores(node: Node) -> float:
    """How many cores a node keeps busy: the least of some samples, because other work makes steps longer."""
    return min(cores_used(node, SECONDS) for _ in range(SAMPLES))


def until_free(url: str) -> None:
    """Wait until the node holds no block. Raises AssertionError after PATIENCE_S."""
    limit = time.monotonic() + PATIENCE_S
    while read(url, USAGE):
        assert time.monotonic() < limit, "blocks are still held"
        time.sleep(0.02)


def test_an_idle_node_hardly_works_while_it_keeps_blocks(pair: Pair) -> None:
    give, hand_over = pair.prefill.url, "idle-rest-hand-over"
    prefill(give, quiz(3315, TOKENS).prompt(), pdproxy_hand_over=hand_over)
    keeps = cores(pair.prefill)
    print(f"\na prefill node that keeps blocks until they are read takes {keeps:.3f} cores")
    assert read(give, USAGE) > 0, "the lease has ended meanwhile"
    release(give, hand_over)
    until_free(give)
    assert keeps < MOST_CORES
