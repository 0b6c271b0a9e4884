"""No request takes more than one node of a role from the others, and no client does with many of them."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError, Fault
from pdproxy.failures import LEG_BLAME, Blame
from pdproxy.nodes.node import Node, Role, State
from pdproxy.nodes.outlier import LegOrigin
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Leg
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.failed_legs import FailedLegs
from pdproxy.request import Endpoint
from pdproxy.settings.types import OnPrefillFailure
from tests.fakes.clock import FakeClock
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.refused import refuse, serve
from tests.orchestration.answers import read_answer, text_of
from tests.orchestration.cluster import MODEL, FakeCluster
from tests.orchestration.prompts import body_for, right

FAULTS = st.builds(
    InjectedFault,
    st.sampled_from([*FaultKind, *[FaultKind.REFUSE] * 4]),  # one of these says more than any other
    at=st.integers(-1, 9),
    status=st.sampled_from([400, 404, 429, 500, 503]),
    times=st.sampled_from([1, 2, 1 << 30]),
)
WAYS = st.sampled_from(["whole", "stream", "list", "forward"])


@dataclasses.dataclass(frozen=True)
class Doubts:
    """Evidence that the pool was told of a node before: so many refused connections, and legs that went well."""

    refused: int
    good: int


DOUBTS = st.builds(Doubts, st.sampled_from([2, 2, 1, 0]), st.sampled_from([20, 0]))


@given(data=st.data())
def test_one_request_takes_out_one_node_of_a_role_at_most(data: st.DataObject) -> None:
    """Any faults on any nodes, any endpoint, any number of retries and prompts, and whatever was known of the nodes."""
    asyncio.run(_ask_once(data))


async def _ask_once(data: st.DataObject) -> None:
    prefills, decodes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    config = OrchestrationConfig(
        retries=data.draw(st.integers(0, 4)),
        migrations=data.draw(st.integers(0, 3)),
        on_prefill_failure=data.draw(st.sampled_from(OnPrefillFailure)),
    )
    journaling = data.draw(st.sampled_from([0, decodes]))
    cluster = FakeCluster(prefills, decodes, config, journaling=journaling)
    common = data.draw(FAULTS | st.none())
    for node in cluster.nodes:
        node.fault = common or data.draw(st.none() | FAULTS)
        doubts = data.draw(DOUBTS)
        for leg in (Leg.PREFILL, Leg.DECODE, Leg.FORWARD):
            for _ in range(doubts.good):
                serve(cluster.pool, node.name, leg)
            refuse(cluster.pool, node.name, doubts.refused, leg)
    await _ask(cluster, data.draw(WAYS), data.draw(st.sampled_from(Endpoint)))
    out = [view for view in cluster.pool.state().nodes if view.state is not State.UP]
    assert [len([view for view in out if role in view.node.roles]) <= 1 for role in Role] == [True, True], out
    await cluster.settle()


async def _ask(cluster: FakeCluster, way: str, endpoint: Endpoint) -> None:
    match way:
        case "forward":
            with contextlib.suppress(ClientError):
                await cluster.forward("/v1/embeddings")
        case "list":
            await cluster.ask(
                Endpoint.COMPLETIONS, {"prompt": [[4, 5, 6 + each] for each in range(12)], "max_tokens": 4}
            )
        case _:
            await cluster.ask(endpoint, body_for(endpoint, stream=way == "stream"))


@pytest.mark.parametrize("kind", FaultKind)
async def test_a_request_that_fails_everywhere_takes_out_one_of_several_nodes_in_doubt(kind: FaultKind) -> None:
    """Two connections were refused by each of them before."""
    cluster = FakeCluster(prefills=3, decodes=3)
    for node in cluster.nodes:
        node.fault = InjectedFault(kind, at=0)
        for leg in (Leg.PREFILL, Leg.DECODE):
            refuse(cluster.pool, node.name, 2, leg)
    await _ask(cluster, "list", Endpoint.COMPLETIONS)
    await _ask(cluster, "stream", Endpoint.CHAT)
    out = [view.node.roles for view in cluster.pool.state().nodes if view.state is not State.UP]
    assert len(out) == len(set(out))
    if kind is FaultKind.REFUSE:
        assert len(out) == len(Role)


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_every_node_gives_up_leaves_all_of_them_to_the_others(
    endpoint: Endpoint, stream: bool
) -> None:
    """As a chat stream with beam search does on vLLM 0.32."""
    cluster = FakeCluster(prefills=1, decodes=3)
    for number in range(12):
        for node in cluster.decodes:
            node.fault = InjectedFault(FaultKind.ABORT, at=0)
        body = body_for(endpoint, stream=stream)
        got = await cluster.ask(endpoint, body, name=f"hostile-{number}")
        assert got.status == 503 or read_answer(endpoint, got.body).error is not None
        for node in cluster.nodes:
            node.fault = None
        got = await cluster.ask(endpoint, body, name=f"honest-{number}")
        assert got.status == 200
        assert (read_answer(endpoint, got.body).texts[0] if stream else text_of(endpoint, got.json())) == right(
            endpoint
        )
    assert {view.state for view in cluster.pool.state().nodes} == {State.UP}
    await cluster.settle()


@pytest.mark.parametrize("retries", [0, 2])
async def test_a_node_that_fails_every_request_leaves(retries: int) -> None:
    """Without retries nobody knows of one request whether it is to blame; the other node's requests show it."""
    cluster = FakeCluster(prefills=1, decodes=2, config=OrchestrationConfig(retries=retries))
    cluster.decodes[0].fault = InjectedFault(FaultKind.STATUS, status=500)
    body = body_for(Endpoint.COMPLETIONS, stream=False)
    statuses = [(await cluster.ask(Endpoint.COMPLETIONS, body, name=f"r-{number}")).status for number in range(60)]
    failed = statuses.count(500)
    assert cluster.pool.view("d0").state is State.DOWN
    assert failed == 0 if retries else failed <= 12
    assert statuses[-30:] == [200] * 30
    assert len(cluster.decodes[0].legs()) <= 12


async def test_a_node_on_which_every_stream_breaks_leaves() -> None:
    """Each begins well there, and goes on elsewhere."""
    cluster = FakeCluster(prefills=1, decodes=2)
    cluster.decodes[0].fault = InjectedFault(FaultKind.ERROR_EVENT, at=4)
    body = body_for(Endpoint.CHAT, stream=True)
    for number in range(30):
        got = await cluster.ask(Endpoint.CHAT, body, name=f"r-{number}")
        assert read_answer(Endpoint.CHAT, got.body).texts[0] == right(Endpoint.CHAT)
    assert cluster.pool.view("d0").state is State.DOWN
    assert len(cluster.decodes[0].legs()) <= 12


async def test_a_node_that_fails_every_forwarded_request_leaves_and_one_whose_peer_does_too_stays() -> None:
    for failing in (1, 2):
        cluster = FakeCluster(prefills=1, decodes=2)
        for number in range(60):
            for node in cluster.decodes[:failing]:
                node.fault = InjectedFault(FaultKind.STATUS, status=500)
            await cluster.forward("/v1/embeddings", name=f"r-{number}")
        states = [cluster.pool.view(node.name).state for node in cluster.decodes]
        assert states == ([State.DOWN, State.UP] if failing == 1 else [State.UP, State.UP])


async def test_the_only_node_of_a_role_is_left_to_its_health_check() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    cluster.decodes[0].fault = InjectedFault(FaultKind.STATUS, status=500)
    for number in range(60):
        await cluster.ask(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=False), name=f"r-{number}")
    assert cluster.pool.view("d0").state is State.UP


IN_DOUBT = [fault for fault in Fault if LEG_BLAME[fault] is Blame.IN_DOUBT]
HEALTHY = ("d0", "d1", "d2", "d3")
HOSTILE = 0.05
"""The share of all requests that are hostile."""

Poison = Callable[[random.Random, str], bool]
"""Whether a hostile request fails on this node."""
POISONS: dict[str, Poison] = {
    "every node": lambda _dice, _node: True,
    "any node, by chance": lambda dice, _node: dice.random() < 0.5,
    "nodes of the old release": lambda _dice, node: node in ("d0", "d1"),
}


class Fleet:
    """Decode nodes, and requests that are sent to them in turn, or by their session; each is tried ``retries`` times
    more."""

    def __init__(self, dice: random.Random, retries: int, *, keys: bool) -> None:
        self.dice, self.retries, self.keys = dice, retries, keys
        self.metrics = Metrics(CollectorRegistry())
        self.pool = Pool(FakeClock(), metrics=self.metrics)
        self.sent = 0
        for name in HEALTHY:
            node = Node(name, f"http://{name}", (Role.DECODE,), MODEL)
            self.pool.add(node)
            self.pool.bring_up(node)

    def send(self, client: str, fails: Callable[[str], bool], first: str | None = None) -> None:
        """One request; ``first``: the node that its session is pinned to."""
        self.sent += 1
        source = LegOrigin(
            f"r-{self.sent}", client if self.keys else "", None if first is None else HEALTHY.index(first)
        )
        failed = FailedLegs(self.pool, OrchestrationConfig(), self.metrics, source)
        up = [view.name for view in self.pool.state().nodes if view.takes_requests()]
        self.dice.shuffle(up)
        for name in sorted(up, key=lambda each: each != first)[: 1 + self.retries]:
            if not fails(name):
                failed.leg_began(Leg.DECODE, name)
                failed.leg_ended(Leg.DECODE, name)
                break
            failed.leg_failed(Leg.DECODE, name, self.dice.choice(IN_DOUBT))
        failed.close()

    def down(self) -> list[str]:
        return [view.name for view in self.pool.state().nodes if view.state is not State.UP]


SEEDS: Sequence[object] = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("retries", [0, 1, 2])
@pytest.mark.parametrize("poison", POISONS)
def test_a_hostile_client_takes_no_healthy_node_out(
    poison: str, retries: int, keys: bool, pinned: bool, seed: int
) -> None:
    """One in twenty requests is hostile, and half of those come in a burst in which nobody else asks anything."""
    dice = random.Random(f"{poison} {retries} {keys} {pinned} {seed}")
    fleet = Fleet(dice, retries, keys=keys)

    def attack() -> None:
        fleet.send("hostile", lambda name: POISONS[poison](dice, name), "d0" if pinned else None)

    for _ in range(1500 if seed else 400):
        if dice.random() < HOSTILE:
            attack()
        else:
            fleet.send(dice.choice(["a", "b"]), lambda _: False)
        assert not fleet.down()
    if keys or poison == "every node":
        for _ in range(75):
            attack()
            assert not fleet.down()


@pytest.mark.parametrize("share", [1.0, 0.95])
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("retries", [0, 1, 2])
def test_among_hostile_requests_a_node_that_fails_leaves_and_no_other(retries: int, keys: bool, share: float) -> None:
    dice = random.Random(f"{retries} {keys} {share}")
    fleet = Fleet(dice, retries, keys=keys)
    for _ in range(400):
        if dice.random() < HOSTILE:
            fleet.send("hostile", lambda _: True)
        else:
            fleet.send(dice.choice(["a", "b"]), lambda name: name == "d2" and dice.random() < share)
    assert fleet.down() == ["d2"]
