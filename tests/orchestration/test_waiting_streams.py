"""Streams that lose their node and find no other: they wait for one that comes back, and go on there."""

import asyncio
from collections.abc import Callable

import pytest

from pdproxy.nodes.node import DECODE, Node
from pdproxy.observe.labels import Move
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.request_queue import QueueLimits
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.node import FakeNode
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import MODEL, FakeCluster
from tests.orchestration.test_resumed_streams import CHAT, SHAPES, ask, moves, seen, uncut

DIES = InjectedFault(FaultKind.RESET, at=3, times=1)
AWAY = 90.0
"""Seconds that a node takes to start."""
LONGEST = OrchestrationConfig().queue.queue_seconds


class Restarts:
    """Nodes whose processes end with their first leg are given up by active health, and are started anew.

    Args:
        away: seconds until one serves again; None: it never does.
        then: what goes wrong on it then.
    """

    def __init__(
        self, cluster: FakeCluster, *nodes: FakeNode, away: float | None = AWAY, then: InjectedFault | None = None
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._away, self._then = away, then
        self.began = cluster.clock.now()
        cluster.clock.passed = self._passed  # type: ignore[attr-defined]

    @property
    def seconds(self) -> float:
        return self._cluster.clock.now() - self.began

    def _passed(self) -> None:
        pool = self._cluster.pool
        back = self._away is not None and self.seconds >= self._away
        for node in self._nodes:
            if back:
                node.fault = self._then
                pool.bring_up(pool.view(node.name).node)
            elif not pool.is_given_up(node.name):
                pool.give_up(node.name, "refused")


def lone(fault: InjectedFault | None = DIES, config: OrchestrationConfig | None = None) -> FakeCluster:
    """One node of both roles, which can resume."""
    cluster = FakeCluster(0, 0, config, shared=1)
    cluster.shared[0].can_resume = True
    cluster.amend("n0", can_resume=True)
    cluster.shared[0].fault = fault
    return cluster


NOTHING_OUT = {"hidden-reasoning", "stop-held"}
"""Streams of which nothing that was generated is out when the node dies: they are asked anew."""


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - NOTHING_OUT))
async def test_streams_of_a_lone_node_go_on_after_its_restart(shape: str) -> None:
    cluster = lone()
    restarts = Restarts(cluster, cluster.shared[0])
    assert seen(await ask(cluster, shape)) == seen(await ask(lone(None), shape))
    assert [len(node.legs()) for node in cluster.shared] == [2]
    assert AWAY <= restarts.seconds < AWAY + 2
    assert moves(cluster, Move.RESUMED) == 1
    assert cluster.count("pdproxy_stream_stall_seconds_sum", move="resumed") == pytest.approx(restarts.seconds, abs=1)


@pytest.mark.parametrize("shape", sorted(NOTHING_OUT))
async def test_streams_that_were_silent_until_then_have_the_same_text(shape: str) -> None:
    cluster = lone()
    restarts = Restarts(cluster, cluster.shared[0])
    got, right = [read_answer(CHAT, await ask(each, shape)) for each in (cluster, lone(None))]
    assert (got.texts, got.finishes, got.error) == (right.texts, right.finishes, None)
    assert restarts.seconds >= AWAY


async def test_a_stream_of_which_nothing_is_out_is_asked_anew() -> None:
    """The node cannot resume; it has said nothing but whose turn it is."""
    cluster = FakeCluster(0, 1, journaling=0)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=1, times=1)
    Restarts(cluster, cluster.decodes[0])
    got = await ask(cluster, "tools", include_reasoning=False)
    assert seen(got) == await uncut("tools", include_reasoning=False)
    assert moves(cluster, Move.RESTARTED) == 1


@pytest.mark.parametrize("decodes", [1, 2, 3])
async def test_all_decode_nodes_are_restarted_at_once(decodes: int) -> None:
    """The first dies under the stream; the others are gone when it asks them."""
    cluster = FakeCluster(1, decodes)
    cluster.decodes[0].fault = DIES
    for node in cluster.decodes[1:]:
        node.fault = InjectedFault(FaultKind.REFUSE)
    restarts = Restarts(cluster, *cluster.decodes)
    assert seen(await ask(cluster, "tools")) == await uncut("tools")
    assert restarts.seconds >= AWAY
    assert sum(len(node.legs()) for node in cluster.decodes) == 2


async def test_another_node_takes_the_place_of_one_that_was_removed() -> None:
    """As where pods have new names: meanwhile no node is known that serves the model."""
    cluster = lone()
    old, new = cluster.shared[0], FakeNode("n1", cluster.fabric)
    new.can_resume = True
    restarts = Restarts(cluster, old, away=None)

    def passed() -> None:
        if restarts.seconds >= AWAY and new not in cluster.shared:
            cluster.shared.append(new)
            cluster.transport.add(new)
            node = Node("n1", new.url, DECODE, MODEL, can_resume=True)
            cluster.pool.add(node)
            cluster.pool.bring_up(node)
        cluster.pool.remove("n0")

    cluster.clock.passed = passed  # type: ignore[attr-defined]
    assert seen(await ask(cluster, "chat")) == seen(await ask(lone(None), "chat"))
    assert len(new.legs()) == 1


async def error_after(cluster: FakeCluster, restarts: Restarts) -> tuple[str, float]:
    """The code of the error that ends the stream, and after how many seconds."""
    answer = read_answer(CHAT, await ask(cluster, "chat"))
    assert answer.error is not None
    assert answer.ended
    return str(answer.error["code"]), restarts.seconds


@pytest.mark.parametrize("longest", [0.0, 30.0, LONGEST])
async def test_a_node_that_does_not_come_back_is_waited_for_no_longer_than_the_queue_lets_wait(longest: float) -> None:
    cluster = lone(config=OrchestrationConfig(queue=QueueLimits(queue_seconds=longest)))
    _, seconds = await error_after(cluster, Restarts(cluster, cluster.shared[0], away=None))
    assert longest <= seconds < longest + 2


async def test_nor_beyond_the_deadline_of_its_request() -> None:
    cluster = lone(config=OrchestrationConfig(queue=QueueLimits(queue_seconds=10_000)))
    restarts = Restarts(cluster, cluster.shared[0], away=None)
    assert (await error_after(cluster, restarts))[1] == pytest.approx(3600, abs=2)


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.ERROR_EVENT, FaultKind.ABORT, FaultKind.GARBAGE])
async def test_a_node_that_is_well_is_not_waited_for(kind: FaultKind) -> None:
    """Its health is answered after the stream broke: it will not come back as another process."""
    cluster = lone(InjectedFault(kind, at=3))
    began = cluster.clock.now()
    answer = read_answer(CHAT, await ask(cluster, "chat"))
    assert answer.error is not None
    assert cluster.clock.now() - began < 2
    assert len(cluster.shared[0].legs()) == 1


async def test_a_dead_node_that_the_stream_was_never_on_is_not_waited_for() -> None:
    """The node that broke the stream off is well."""
    cluster = FakeCluster(1, 2)
    cluster.pool.give_up("d1", "refused")
    cluster.decodes[0].fault = InjectedFault(FaultKind.ERROR_EVENT, at=3)
    began = cluster.clock.now()
    assert read_answer(CHAT, await ask(cluster, "chat")).error is not None
    assert cluster.clock.now() - began < 2


async def test_a_stream_that_may_be_what_ends_processes_ends_two_at_most() -> None:
    """The second process ends as it gets the stream, before the client has more of it."""
    cluster = lone()
    restarts = Restarts(cluster, cluster.shared[0], then=InjectedFault(FaultKind.RESET, at=0))
    code, _ = await error_after(cluster, restarts)
    assert code == "node_failed"
    assert len(cluster.shared[0].legs()) == 2


async def test_a_restart_is_a_move() -> None:
    """Where no move is left the stream ends."""
    for migrations, goes_on in ((1, True), (0, False)):
        cluster = lone(config=OrchestrationConfig(migrations=migrations))
        Restarts(cluster, cluster.shared[0])
        assert (read_answer(CHAT, await ask(cluster, "chat")).error is None) is goes_on


async def _until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError


async def test_a_client_that_leaves_meanwhile_leaves_nothing() -> None:
    cluster = lone()
    restarts = Restarts(cluster, cluster.shared[0], away=None)
    endpoint, body = SHAPES["chat"]
    asking = asyncio.create_task(cluster.ask(endpoint, body))
    await _until(lambda: restarts.seconds > 10)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await cluster.settle()


async def test_a_request_without_an_answer_yet_is_refused_at_once() -> None:
    """Its client has nothing, and can ask again."""
    cluster = lone(InjectedFault(FaultKind.RESET, at=-1, times=9))
    restarts = Restarts(cluster, cluster.shared[0])
    endpoint, body = SHAPES["chat"]
    assert (await cluster.ask(endpoint, body)).status in (502, 503)
    assert restarts.seconds < 1
    await cluster.settle()
