"""A decode node whose cache holds one long prompt: reads that fail or fill the cache delay no other request.

The prefill node is killed or frozen while the decode node reads a prompt of 2,150 tokens into 12 of its 23 blocks. A
short request without a ticket follows. Deadlines are the defaults.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import Node, NodeSpec, Role, on_free_ports
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.legs import Params, complete, hand_over, prefill
from tests.e2e.metrics_reader import read, watch
from tests.e2e.process_faults import ProcessFault, go_on, strike

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(600)]

BLOCKS = 24
LONGEST = 2560
LONG, SHORT = 2150, 300
"""Tokens of a prompt."""
BLOCK = 256
"""Tokens of a block."""
SECONDS = 15.0
"""Seconds for an answer. Without `connector.admission` both requests waited until their clients left."""
POSTED_S = 1.0
"""Seconds from the allocation of a read's blocks until it is posted. The prefill node counts as silent after 6 s."""
PATIENCE_S = 60.0
"""Seconds for steps that no test here measures."""


@dataclass
class Scene:
    """Both nodes. Tests may break the prefill node."""

    supervisor: Supervisor
    prefill: Node
    decode: Node
    pool: ThreadPoolExecutor
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(5000, 5400)))

    def question(self, tokens: int) -> Quiz:
        """A question that no node has seen."""
        return quiz(next(self.seeds), tokens)

    def ask(self, tokens: int, *, struck: bool = False) -> "Future[float]":
        """Ask the decode node as a client does: seconds until the right answer.

        `struck`: the request has a ticket of the prefill node, which is then stopped.
        """
        question = self.question(tokens)
        ticket = prefill(self.prefill.url, question.prompt()) if struck else None
        if struck:
            strike(self.prefill.part, ProcessFault.STOPPED)
        return self.pool.submit(self.seconds_to_answer, question, ticket)

    def seconds_to_answer(self, question: Quiz, ticket: Params | None) -> float:
        """Seconds until the right answer."""
        began = time.monotonic()
        assert complete(self.decode.url, question.prompt(), params=ticket).text == question.answer
        return time.monotonic() - began

    def usage(self) -> float:
        """The share of the decode node's cache in use."""
        return read(self.decode.url, "vllm:kv_cache_usage_perc")

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the condition holds."""
        limit = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < limit
            time.sleep(0.05)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Logs: `.run/e2e-crowded-cache`."""
    with Supervisor(logs_of("e2e-crowded-cache")) as supervisor, ThreadPoolExecutor(4) as pool:
        specs = on_free_ports(
            NodeSpec("prefill", Role.PREFILL, 0, 0, max_model_len=LONGEST),
            NodeSpec("decode", Role.DECODE, 0, 0, max_model_len=LONGEST, gpu_blocks=BLOCKS),
        )
        give, take = start_nodes(supervisor, specs, print)
        yield Scene(supervisor, give, take, pool)


def test_a_prefill_node_that_is_frozen_in_mid_read(scene: Scene) -> None:
    """The read's blocks stay in use, and the long prompt does not fit beside them. The short one overtakes it."""
    hand_over(scene.prefill.url, scene.decode.url, scene.question(SHORT))
    given_up = watch(scene.decode.url, "reads", outcome="no_progress")
    long = scene.ask(LONG, struck=True)
    scene.until(lambda: given_up.grown() > 0)
    took = scene.ask(SHORT).result()
    print(f"the short prompt took {took:.1f} s; {scene.usage():.0%} of the cache is held")
    assert took < SECONDS
    assert scene.usage() > 0.5
    assert not long.done()
    go_on(scene.prefill.part)
    woken = time.monotonic()
    long.result()
    print(f"the long one was answered {time.monotonic() - woken:.1f} s after the prefill node woke")
    assert time.monotonic() - woken < SECONDS
    scene.until(lambda: scene.usage() == 0)
    hand_over(scene.prefill.url, scene.decode.url, scene.question(SHORT))


def test_reads_that_take_all_blocks_between_them(scene: Scene) -> None:
    """Two reads take 12 and 11 blocks; each also waits for its state's next block. The prefill node is stopped until
    both requests are there, so that neither is computed meanwhile."""
    tickets = [(each, prefill(scene.prefill.url, each.prompt())) for each in map(scene.question, (LONG, LONG - BLOCK))]
    strike(scene.prefill.part, ProcessFault.STOPPED)
    asked = [scene.pool.submit(scene.seconds_to_answer, *each) for each in tickets]
    scene.until(lambda: scene.usage() > 0.4)
    time.sleep(POSTED_S)
    go_on(scene.prefill.part)
    assert max(each.result(timeout=PATIENCE_S) for each in asked) < SECONDS
    scene.until(lambda: scene.usage() == 0)


def test_a_prefill_node_that_is_killed_in_mid_read(scene: Scene) -> None:
    """The node is stopped before it is killed, so that the read is surely under way when it dies."""
    hand_over(scene.prefill.url, scene.decode.url, scene.question(SHORT))
    failed = watch(scene.decode.url, "reads", outcome="transfer_failed")
    long = scene.ask(LONG, struck=True)
    scene.until(lambda: scene.usage() > 0)
    time.sleep(POSTED_S)
    short = scene.ask(SHORT)
    strike(scene.prefill.part, ProcessFault.KILLED)
    print(f"the long prompt took {long.result():.1f} s, the short one behind it {short.result():.1f} s")
    assert failed.grown() == 1
    assert max(long.result(), short.result()) < SECONDS
    scene.until(lambda: scene.usage() == 0)
