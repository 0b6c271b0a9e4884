"""The prefill node dies, freezes or stops answering at each moment of a read: the decode node soon answers right.

*Before*: between the two legs, on a decode node that has read from this prefill node already, or has not. *During*: the
saboteur on the decode node stops the prefill node just before the transfer is posted; or kills or stops it between the
posting and the first check of the transfer. *After*: at the last byte, before the question whether the blocks were
held. All deadlines are a few seconds.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
from tests.e2e.sabotaged_connector import Moment, Order, Orders, sabotaged

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(900)]

SOON_S = 60.0
"""Every deadline below twice, for there are two attempts, on a busy machine."""
SHORT = {"pdproxy_read_deadline": 4.0, "pdproxy_probe_timeout": 3.0, "pdproxy_verify_timeout": 3.0}
USAGE = "vllm:kv_cache_usage_perc"
STOPPED_OR_KILLED = pytest.mark.parametrize(
    "fate", [ProcessFault.STOPPED, pytest.param(ProcessFault.KILLED, marks=pytest.mark.long)]
)
"""A killed node takes twenty seconds to start: `make test` kills one before and one during a read."""
BAD_ENDS = ("transfer_failed", "unverified", "peer_unreachable", "no_progress", "not_held")


@dataclass
class Scene:
    """Two nodes with a saboteur each. Tests may break the prefill node; `heal` repairs it."""

    supervisor: Supervisor
    prefill: Node
    decode: Node
    orders: dict[Role, Orders]
    known: Node | None = None
    """The prefill node that the decode node has read from."""
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(1200, 1400)))

    def question(self) -> Quiz:
        """A question that no node has seen."""
        return quiz(next(self.seeds), 800)

    def hand_over(self) -> None:
        """Hand a prompt over. The answer must be right, and the read verified."""
        hand_over(self.prefill.url, self.decode.url, self.question())
        self.known = self.prefill

    def pids(self) -> tuple[int, ...]:
        """All processes of the prefill node."""
        return tuple(descendants(self.prefill.part.process.pid))

    def computes(self, question: Quiz, ticket: Params) -> None:
        """The decode node answers soon and right. It counts a failed read, or one that it skipped after an earlier
        failure."""
        bad = [watch(self.decode.url, "reads", outcome=end) for end in BAD_ENDS]
        bad.append(watch(self.decode.url, "barred_tickets"))
        began = time.monotonic()
        assert complete(self.decode.url, question.prompt(), params=ticket).text == question.answer
        took = time.monotonic() - began
        at_least_one(bad)
        print(f"computed after {took:.2f} s: {[(one.labels, one.grown()) for one in bad if one.grown()]}")
        assert took < SOON_S

    def heal(self) -> None:
        """Resume the prefill node, or start a new one under its address."""
        for orders in self.orders.values():
            orders.give()
        go_on(self.prefill.part)
        if self.prefill.part.process.poll() is not None:
            self.supervisor.stop(self.prefill.part)
            self.prefill = start_node(self.supervisor, self.prefill.spec)
        await_nodes(self.supervisor, [self.prefill, self.decode], print)


def at_least_one(watches: list[Watch]) -> None:
    """Wait until one of them has grown."""
    limit = time.monotonic() + SOON_S
    while not any(one.grown() for one in watches):
        assert time.monotonic() < limit, "no read was counted as failed"
        time.sleep(0.1)


def spec(name: str, role: Role, folder: Path) -> NodeSpec:
    return sabotaged(NodeSpec(name, role, 0, 0, connector_config=SHORT), folder / name)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Both nodes, for all tests here. Logs: `.run/e2e-faults`."""
    folder = tmp_path_factory.mktemp("faults")
    roles = {"prefill": Role.PREFILL, "decode": Role.DECODE}
    with Supervisor(logs_of("e2e-faults")) as supervisor:
        specs = on_free_ports(*(spec(name, role, folder) for name, role in roles.items()))
        give, take = start_nodes(supervisor, specs, print)
        yield Scene(supervisor, give, take, {role: Orders(folder / name) for name, role in roles.items()})


@pytest.fixture
def whole(scene: Scene) -> Scene:
    """Both nodes are up, and one hand-over was made."""
    scene.heal()
    scene.hand_over()
    return scene


@pytest.fixture
def strange(scene: Scene) -> Scene:
    """Both nodes are up, and the decode node has not met this prefill node."""
    if scene.known is scene.prefill:
        strike(scene.prefill.part, ProcessFault.KILLED)
    scene.heal()
    return scene


def test_stopped_before_the_read(whole: Scene) -> None:
    question = whole.question()
    ticket = prefill(whole.prefill.url, question.prompt())
    strike(whole.prefill.part, ProcessFault.STOPPED)
    whole.computes(question, ticket)
    whole.heal()
    whole.hand_over()


def test_what_was_held_for_a_read_that_was_given_up_comes_back_when_the_node_wakes(whole: Scene) -> None:
    """On both nodes, without another request to either; `test_given_up_reads` measures the time."""
    question = whole.question()
    ticket = prefill(whole.prefill.url, question.prompt())
    ended = {how: watch(whole.prefill.url, "leases_ended", how=how) for how in ("read", "expired")}
    strike(whole.prefill.part, ProcessFault.STOPPED)
    whole.computes(question, ticket)
    assert read(whole.decode.url, USAGE) > 0
    go_on(whole.prefill.part)
    limit = time.monotonic() + SOON_S
    while read(whole.decode.url, USAGE) or read(whole.prefill.url, USAGE):
        assert time.monotonic() < limit, "blocks are still held"
        time.sleep(0.05)
    ended["read"].reaches(1)
    assert not ended["expired"].grown()


@STOPPED_OR_KILLED
def test_struck_after_the_last_byte(whole: Scene, fate: ProcessFault) -> None:
    question = whole.question()
    ticket = prefill(whole.prefill.url, question.prompt())
    whole.orders[Role.DECODE].give(Order(Moment.LANDED, signal=fate.value, pids=whole.pids()))
    whole.computes(question, ticket)
    whole.orders[Role.DECODE].await_done(1)


@pytest.mark.parametrize("fate", [ProcessFault.STOPPED, ProcessFault.KILLED])
def test_struck_during_the_read(whole: Scene, fate: ProcessFault) -> None:
    question = whole.question()
    ticket = prefill(whole.prefill.url, question.prompt())
    stopped = Order(Moment.POSTING, signal=ProcessFault.STOPPED.value, pids=whole.pids())
    whole.orders[Role.DECODE].give(stopped, replace(stopped, moment=Moment.POSTED, signal=fate.value))
    whole.computes(question, ticket)
    print(f"transfers were then {whole.orders[Role.DECODE].await_done(2)[1]['states']}")


@STOPPED_OR_KILLED
def test_struck_before_the_first_read_from_it(strange: Scene, fate: ProcessFault) -> None:
    question = strange.question()
    ticket = prefill(strange.prefill.url, question.prompt())
    strike(strange.prefill.part, fate)
    strange.computes(question, ticket)


def deafen(scene: Scene) -> None:
    """End the prefill node's side channel under a ticket. The node cannot be used afterwards."""
    scene.orders[Role.PREFILL].give(Order(Moment.PLANNED, deaf=True))
    question = scene.question()
    ticket = prefill(scene.prefill.url, question.prompt())
    scene.orders[Role.PREFILL].await_done(1)
    scene.computes(question, ticket)
    strike(scene.prefill.part, ProcessFault.KILLED)


def test_the_side_channel_is_gone_before_the_first_read(strange: Scene) -> None:
    deafen(strange)


def test_the_side_channel_is_gone_after_others(whole: Scene) -> None:
    deafen(whole)


def test_killed_before_the_read(whole: Scene) -> None:
    question = whole.question()
    ticket = prefill(whole.prefill.url, question.prompt())
    strike(whole.prefill.part, ProcessFault.KILLED)
    whole.computes(question, ticket)
