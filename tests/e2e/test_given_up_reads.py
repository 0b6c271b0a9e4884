"""Blocks held for reads that were given up are freed on both nodes when the prefill node resumes.

The prefill node is stopped for nine seconds, under five posted reads or before the decode node knows it. The decode
node gives the reads up and computes. From the moment the prefill node resumes, no request goes to either node: within a
second both caches are as before, and every lease has ended as read or released. Deadlines are the defaults.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import Node, NodeSpec, Role, on_free_ports, start_node
from deploy.local.stack import await_nodes, logs_of, start_nodes
from deploy.local.supervise import Supervisor
from deploy.local.watchdog import descendants
from tests.e2e.legs import Params, complete, hand_over, prefill
from tests.e2e.metrics_reader import Watch, read, watch
from tests.e2e.process_faults import ProcessFault, go_on, strike

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(900)]

BLOCKS = 128
STOPPED_S = 9.0
BACK_WITHIN_S = 1.0
PATIENCE_S = 60.0
"""Seconds for steps that are only printed, or that no test here measures."""
CALM_S = 4.0
ENDS = ("read", "released", "expired")


@dataclass
class Scene:
    """Two nodes with small caches. Tests may break the prefill node; `renew` replaces it."""

    supervisor: Supervisor
    prefill: Node
    decode: Node
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(3000, 3400)))

    def questions(self, count: int) -> list[Quiz]:
        """Questions that no node has seen."""
        return [quiz(next(self.seeds), 800) for _ in range(count)]

    def renew(self) -> None:
        """Start a prefill node that the decode node does not know, under the old address."""
        strike(self.prefill.part, ProcessFault.KILLED)
        self.supervisor.stop(self.prefill.part)
        self.prefill = start_node(self.supervisor, self.prefill.spec)
        await_nodes(self.supervisor, [self.prefill, self.decode], print)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Logs: `.run/e2e-given-up`."""
    with Supervisor(logs_of("e2e-given-up")) as supervisor:
        specs = on_free_ports(
            NodeSpec("prefill", Role.PREFILL, 0, 0, gpu_blocks=BLOCKS),
            NodeSpec("decode", Role.DECODE, 0, 0, gpu_blocks=BLOCKS),
        )
        give, take = start_nodes(supervisor, specs, print)
        yield Scene(supervisor, give, take)


def usage(node: Node) -> float:
    """The share of a node's cache in use."""
    return read(node.url, "vllm:kv_cache_usage_perc")


def cpu_seconds(node: Node) -> float:
    """The CPU seconds of all the node's processes so far."""
    ticks = 0
    for pid in descendants(node.part.process.pid):
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def cores_used(node: Node, seconds: float) -> float:
    """How many cores the node keeps busy over these seconds."""
    began, used = time.monotonic(), cpu_seconds(node)
    time.sleep(seconds)
    return (cpu_seconds(node) - used) / (time.monotonic() - began)


@dataclass(frozen=True)
class Leases:
    """How leases of a prefill node end from now on."""

    ends: dict[str, Watch]

    @classmethod
    def of(cls, node: Node) -> "Leases":
        return cls({how: watch(node.url, "leases_ended", how=how) for how in ENDS})

    def ended(self) -> dict[str, float]:
        return {how: each.grown() for how, each in self.ends.items()}


def computed(scene: Scene, questions: list[Quiz], tickets: list[Params]) -> None:
    """Ask all at once. Every answer must be right."""
    with ThreadPoolExecutor(len(questions)) as pool:
        asked = [
            pool.submit(complete, scene.decode.url, question.prompt(), params=ticket)
            for question, ticket in zip(questions, tickets, strict=True)
        ]
        assert [each.result().text for each in asked] == [question.answer for question in questions]


def until_back(scene: Scene, leases: Leases, count: int) -> float:
    """Seconds until both caches are empty and all leases have ended, without a request to either node."""
    began = time.monotonic()
    back: dict[str, float] = {}
    while len(back) < 3:
        seen = {"decode": not usage(scene.decode), "prefill": not usage(scene.prefill)}
        seen["leases"] = sum(leases.ended().values()) >= count
        now = round(time.monotonic() - began, 3)
        back |= {what: now for what, over in seen.items() if over and what not in back}
        assert now < PATIENCE_S, f"only {back} after {now:.0f} s: {leases.ended()}"
        time.sleep(0.02)
    print(f"back after {back}, leases {leases.ended()}")
    return max(back.values())


def test_five_reads_under_a_stopped_prefill_node(scene: Scene) -> None:
    hand_over(scene.prefill.url, scene.decode.url, scene.questions(1)[0])
    questions = scene.questions(5)
    tickets = [prefill(scene.prefill.url, question.prompt()) for question in questions]
    leases, held = Leases.of(scene.prefill), usage(scene.prefill)
    began = time.monotonic()
    strike(scene.prefill.part, ProcessFault.STOPPED)
    computed(scene, questions, tickets)
    print(f"computed after {time.monotonic() - began:.1f} s; held: {usage(scene.decode):.0%} here, {held:.0%} there")
    print(
        f"idle while it waits: {cores_used(scene.decode, max(1.0, STOPPED_S - (time.monotonic() - began))):.2f} cores"
    )
    assert usage(scene.decode) > 0
    go_on(scene.prefill.part)
    took = until_back(scene, leases, len(tickets))
    assert leases.ended()["expired"] == 0
    print(
        f"idle afterwards: {cores_used(scene.decode, CALM_S):.2f} cores, {cores_used(scene.prefill, CALM_S):.2f} there"
    )
    assert took < BACK_WITHIN_S
    hand_over(scene.prefill.url, scene.decode.url, scene.questions(1)[0])


def test_five_reads_from_a_stopped_prefill_node_that_was_not_known(scene: Scene) -> None:
    """No handshake was possible, so nothing was read. The tickets go back once the prefill node answers."""
    scene.renew()
    questions = scene.questions(5)
    tickets = [prefill(scene.prefill.url, question.prompt()) for question in questions]
    leases = Leases.of(scene.prefill)
    began = time.monotonic()
    strike(scene.prefill.part, ProcessFault.STOPPED)
    computed(scene, questions, tickets)
    print(f"computed after {time.monotonic() - began:.1f} s")
    print(
        f"idle while it waits: {cores_used(scene.decode, max(1.0, STOPPED_S - (time.monotonic() - began))):.2f} cores"
    )
    go_on(scene.prefill.part)
    took = until_back(scene, leases, len(tickets))
    assert leases.ended()["expired"] == 0
    assert took < BACK_WITHIN_S
    hand_over(scene.prefill.url, scene.decode.url, scene.questions(1)[0])


def test_five_reads_under_a_prefill_node_that_never_wakes(scene: Scene) -> None:
    """The prefill node is stopped and then killed: the decode node has its blocks back, and is idle in the end."""
    hand_over(scene.prefill.url, scene.decode.url, scene.questions(1)[0])
    questions = scene.questions(5)
    tickets = [prefill(scene.prefill.url, question.prompt()) for question in questions]
    strike(scene.prefill.part, ProcessFault.STOPPED)
    computed(scene, questions, tickets)
    began = time.monotonic()
    strike(scene.prefill.part, ProcessFault.KILLED)
    while usage(scene.decode):
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.05)
    print(f"back after {time.monotonic() - began:.2f} s")
    scene.renew()
    hand_over(scene.prefill.url, scene.decode.url, scene.questions(1)[0])
