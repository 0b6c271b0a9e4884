"""The data network between two nodes is cut while everything else works: only one request waits for it.

Packets are dropped, not refused. Requests after the first one are computed at once and hold nothing; their leases end
at once. Soon after the network is back, prompts are handed over again.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import Node, NodeSpec, Role
from deploy.local.stack import await_nodes, logs_of
from deploy.local.supervise import Supervisor
from tests.e2e.legs import complete, hand_over, prefill
from tests.e2e.metrics_reader import read, watch
from tests.e2e.networks import Network, can_make_networks

pytestmark = [
    pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_networks(), reason="network namespaces need root"),
]  # fmt: skip

BLOCKS = 128
REQUESTS = 5
FIRST_WITHIN_S = 20.0
AT_ONCE_S = 3.0
BACK_WITHIN_S = 8.0
PATIENCE_S = 180.0
USAGE = "vllm:kv_cache_usage_perc"


@dataclass
class Scene:
    """Two nodes with small caches, on hosts of their own."""

    network: Network
    prefill: Node
    decode: Node
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(4000, 4400)))

    def question(self) -> Quiz:
        return quiz(next(self.seeds), 800)

    def ask(self) -> float:
        """Send one request with both legs. Returns the seconds of the second leg."""
        question = self.question()
        ticket = prefill(self.prefill.url, question.prompt())
        began = time.monotonic()
        assert complete(self.decode.url, question.prompt(), params=ticket).text == question.answer
        return time.monotonic() - began

    def held(self) -> tuple[float, float]:
        """The shares of the decode and the prefill node's caches in use."""
        return read(self.decode.url, USAGE), read(self.prefill.url, USAGE)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Logs: `.run/e2e-cut`."""
    with Network() as network, Supervisor(logs_of("e2e-cut")) as supervisor:
        give = network.start(supervisor, NodeSpec("prefill", Role.PREFILL, 0, 0, gpu_blocks=BLOCKS))
        take = network.start(supervisor, NodeSpec("decode", Role.DECODE, 0, 0, gpu_blocks=BLOCKS))
        await_nodes(supervisor, [give, take], print)
        yield Scene(network, give, take)


@pytest.mark.parametrize(
    ("known", "seconds"), [pytest.param(False, 20.0, id="strangers"), pytest.param(True, 60.0, id="a known pair")]
)
def test_one_request_pays_for_a_cut_and_hand_overs_go_on_soon_after_it(
    scene: Scene, known: bool, seconds: float
) -> None:
    """Nodes that have not met make their NIXL handshake while the network is cut."""
    if known:
        hand_over(scene.prefill.url, scene.decode.url, scene.question())
    expired = watch(scene.prefill.url, "leases_ended", how="expired")
    scene.network.cut()
    cut = time.monotonic()
    took = []
    for _ in range(REQUESTS):
        took.append(scene.ask())
        held = scene.held()
        print(f"{time.monotonic() - cut:.1f} s after the cut: took {took[-1]:.2f} s, held {held[0]:.0%}, {held[1]:.0%}")
    while time.monotonic() - cut < seconds:
        took.append(scene.ask())
        time.sleep(1.0)
    held = scene.held()
    print(
        f"then {len(took)} requests, the slowest but the first {max(took[1:]):.2f} s; held {held[0]:.0%}, {held[1]:.0%}"
    )
    verified = watch(scene.decode.url, "reads", outcome="verified")
    scene.network.heal()
    healed = time.monotonic()
    while not verified.grown():
        assert time.monotonic() - healed < PATIENCE_S
        took.append(scene.ask())
        time.sleep(0.2)
    back = time.monotonic() - healed
    print(f"handed over {back:.1f} s after healing; leases expired: {expired.grown():g}")
    assert took[0] < FIRST_WITHIN_S
    assert max(took[1:]) < AT_ONCE_S
    assert held == (0.0, 0.0)
    assert back < BACK_WITHIN_S
    assert not expired.grown()
    for _ in range(3):
        hand_over(scene.prefill.url, scene.decode.url, scene.question())
