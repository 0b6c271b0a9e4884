"""How nodes join: preflight, check, known-answer test, UP."""

import asyncio
import dataclasses
import logging

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.join import MOST_EARLY_PREFLIGHTS, Joiner, OutageLog
from pdproxy.nodes.node import Node, Role, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight, cause, check_nodes
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import LABELS, FakeNodeInfo, FakePoolTransport, levels, metrics, until


@pytest.fixture
def transport() -> FakePoolTransport:
    return FakePoolTransport(
        p1=FakeNodeInfo(Role.PREFILL, ("tiny", "lora")), d1=FakeNodeInfo(Role.DECODE), d2=FakeNodeInfo(Role.DECODE)
    )


@pytest.fixture
def pool() -> Pool:
    return Pool(FakeClock())


class FakeProof:
    """Notes the joining nodes, and takes as long as a test wants."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.joined: list[tuple[Node, State]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, node: Node) -> None:
        self.joined.append((node, self._pool.view(node.name).state))
        await self.open.wait()


@pytest.fixture
def proof(pool: Pool) -> FakeProof:
    return FakeProof(pool)


@pytest.fixture
def joiner(pool: Pool, transport: FakePoolTransport, proof: FakeProof) -> Joiner:
    return Joiner(pool, Preflight(transport), proof, OutageLog(FakeClock()))


def add(pool: Pool, transport: FakePoolTransport, *names: str) -> None:
    for name in names:
        pool.add(transport.node(name))


async def test_a_node_joins_with_what_it_publishes(pool: Pool, transport: FakePoolTransport, joiner: Joiner) -> None:
    add(pool, transport, "p1")
    await joiner.attempt("p1")
    seen = pool.view("p1")
    assert (seen.state, seen.node.model, seen.node.aliases) == (State.UP, "tiny", ("lora",))
    assert seen.node.cohort == "0.32.0+0.1.0"


async def test_a_node_is_proved_before_it_serves(
    pool: Pool, transport: FakePoolTransport, joiner: Joiner, proof: FakeProof
) -> None:
    add(pool, transport, "p1")
    proof.open.clear()
    attempt = asyncio.create_task(joiner.attempt("p1"))
    await until(lambda: bool(proof.joined))
    assert pool.view("p1").state is State.JOINING
    ((node, _),) = proof.joined
    assert (node.cohort, node.block_size, node.max_model_len) == ("0.32.0+0.1.0", 256, 4096)
    proof.open.set()
    await attempt
    assert pool.view("p1").state is State.UP


async def test_a_node_whose_engine_has_not_stepped_yet_is_waited_for(
    pool: Pool, transport: FakePoolTransport, joiner: Joiner, proof: FakeProof
) -> None:
    add(pool, transport, "p1")
    usual = metrics(LABELS)
    transport.nodes["p1"].paths["/metrics"] = (200, usual)
    await joiner.attempt("p1")
    assert pool.view("p1").state is State.JOINING
    assert "has not told" in pool.view("p1").reason
    transport.nodes["p1"].paths["/metrics"] = (200, usual + levels({"checkpoint": "c1", "all": "feed"}))
    await joiner.attempt("p1")
    assert pool.view("p1").state is State.UP
    assert pool.view("p1").node.cohort == "0.32.0+0.1.0+feed"
    transport.nodes["p1"].paths["/metrics"] = (200, usual)
    await joiner.attempt("p1")
    assert pool.view("p1").state is State.JOINING, "it restarted"


async def test_a_node_that_never_publishes_its_capacity_is_waited_for_only_so_long(
    pool: Pool, transport: FakePoolTransport, joiner: Joiner
) -> None:
    add(pool, transport, "p1")
    transport.nodes["p1"].paths["/metrics"] = (200, metrics(LABELS))
    for _ in range(MOST_EARLY_PREFLIGHTS):
        assert pool.view("p1").state is State.JOINING
        await joiner.attempt("p1")
    assert pool.view("p1").state is State.UP


async def test_two_fingerprints_are_two_cohorts_and_the_difference_is_named(
    pool: Pool, transport: FakePoolTransport, joiner: Joiner, caplog: pytest.LogCaptureFixture
) -> None:
    """A rolling change of weights: what is changed first serves alone until it has a partner."""
    caplog.set_level(logging.WARNING)
    transport.nodes["p2"] = FakeNodeInfo(Role.PREFILL)
    for name, weights in (("p1", "old"), ("d1", "old"), ("d2", "new"), ("p2", "new")):
        transport.nodes[name].fingerprint = {"checkpoint": weights, "dtype": "bfloat16", "all": weights}
    add(pool, transport, "p1", "d1", "d2", "p2")
    for name in ("p1", "d1", "d2"):
        await joiner.attempt(name)
    assert [view.state for view in pool.state().nodes] == [State.UP] * 3 + [State.JOINING]
    beginning = "node d2 exchanges no tickets: checkpoint: new here, old on p1: the same weights"
    assert [record.message[: len(beginning)] for record in caplog.records] == [beginning]
    await joiner.attempt("p2")
    cohorts = {view.node.name: view.node.cohort.rpartition("+")[2] for view in pool.state().nodes}
    assert cohorts == {"p1": "old", "d1": "old", "p2": "new", "d2": "new"}
    assert len(caplog.records) == 1


async def test_an_unreachable_node_goes_on_joining(pool: Pool, transport: FakePoolTransport, joiner: Joiner) -> None:
    add(pool, transport, "p1")
    transport.nodes["p1"].fault = Fault.REFUSED
    await joiner.attempt("p1")
    assert pool.view("p1").state is State.JOINING
    assert pool.view("p1").reason == "cannot be reached: injected"
    transport.nodes["p1"].fault = None
    transport.nodes["p1"].paths["/v1/models"] = (503, b"")
    await joiner.attempt("p1")
    assert "503" in pool.view("p1").reason


async def test_a_node_out_of_reach_is_logged_and_that_it_is_back(
    pool: Pool, transport: FakePoolTransport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    joiner = Joiner(pool, Preflight(transport), FakeProof(pool), OutageLog(FakeClock()))
    add(pool, transport, "p1")
    transport.nodes["p1"].fault = Fault.REFUSED
    for _ in range(3):
        await joiner.attempt("p1")
    [_, line] = caplog.messages
    assert line.startswith("node p1 cannot be reached: injected. ")
    transport.nodes["p1"].fault = None
    await joiner.attempt("p1")
    assert caplog.messages[2:] == ["node p1 is up"]


async def test_missing_metrics_and_version_do_not_matter(
    pool: Pool, transport: FakePoolTransport, joiner: Joiner
) -> None:
    add(pool, transport, "p1")
    transport.nodes["p1"].paths |= {"/metrics": (404, b""), "/version": Fault.INVALID_BODY}
    await joiner.attempt("p1")
    assert pool.view("p1").state is State.UP
    assert pool.view("p1").node.cohort == ""


async def test_a_mismatch_is_refused_by_name_and_mended_without_a_restart(
    pool: Pool, transport: FakePoolTransport, joiner: Joiner
) -> None:
    add(pool, transport, "p1", "d1")
    transport.nodes["d1"].labels = {**LABELS, "block_size": "16"}
    await joiner.attempt("p1")
    await joiner.attempt("d1")
    assert pool.view("d1").state is State.REFUSED
    assert pool.view("d1").reason == "block_size: 16 here, 256 on p1"
    transport.nodes["d1"].labels = LABELS
    await joiner.attempt("d1")
    assert pool.view("d1").state is State.UP


async def test_nodes_that_join_at_once_are_compared_with_each_other(
    pool: Pool, transport: FakePoolTransport, joiner: Joiner
) -> None:
    add(pool, transport, "p1", "d1")
    transport.nodes["d1"].labels = {**LABELS, "dtype": "float16"}
    await asyncio.gather(joiner.attempt("p1"), joiner.attempt("d1"))
    states = {view.state for view in pool.state().nodes}
    assert states == {State.UP, State.REFUSED}


async def test_a_node_that_left_is_not_compared_with(pool: Pool, transport: FakePoolTransport, joiner: Joiner) -> None:
    add(pool, transport, "p1", "d1")
    transport.nodes["d1"].labels = {**LABELS, "dtype": "float16"}
    await joiner.attempt("p1")
    pool.remove("p1")
    await joiner.attempt("d1")
    assert pool.view("d1").state is State.UP


async def test_a_node_removed_while_it_was_asked_stays_removed(
    pool: Pool, transport: FakePoolTransport, joiner: Joiner
) -> None:
    add(pool, transport, "p1")
    transport.nodes["p1"].held.clear()
    attempt = asyncio.create_task(joiner.attempt("p1"))
    await asyncio.sleep(0)
    pool.remove("p1")
    transport.nodes["p1"].held.set()
    await attempt
    assert pool.state().nodes == ()


async def test_every_answer_is_closed(pool: Pool, transport: FakePoolTransport, joiner: Joiner) -> None:
    add(pool, transport, "p1", "d1", "d2")
    await asyncio.gather(*(joiner.attempt(name) for name in ("p1", "d1", "d2")))
    assert transport.answers
    assert all(answer.closed for answer in transport.answers)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, "/v1/models answers 404: is this the address of a vLLM server?"),
        (500, "/v1/models answers 500"),
    ],
)
async def test_what_has_no_models_is_asked_whether_it_is_a_vllm_server(
    transport: FakePoolTransport, status: int, sentence: str
) -> None:
    transport.nodes["d1"].paths["/v1/models"] = (status, b"")
    with pytest.raises(NodeFault) as raised:
        await Preflight(transport).inspect(transport.node("d1"))
    assert cause(raised.value) == sentence


async def test_nodes_are_checked_in_the_order_given(transport: FakePoolTransport) -> None:
    transport.nodes["d1"].labels = {**LABELS, "mamba_cache_mode": "none"}
    transport.nodes["d2"].fault = Fault.REFUSED
    rows = await check_nodes(Preflight(transport), [transport.node(name) for name in ("p1", "d1", "d2")])
    assert [row.good() for row in rows] == [True, False, False]
    assert [finding.setting for finding in rows[1].compatibility.refusals] == ["mamba_cache_mode"]
    assert isinstance(rows[2].info, NodeFault)


async def test_a_check_names_nodes_that_have_no_partner_among_all(transport: FakePoolTransport) -> None:
    transport.nodes["p1"].fingerprint = transport.nodes["d2"].fingerprint = {"checkpoint": "new", "all": "new"}
    transport.nodes["d1"].fingerprint = {"checkpoint": "old", "all": "old"}
    rows = await check_nodes(Preflight(transport), [transport.node(name) for name in ("d1", "d2", "p1")])
    assert [row.good() for row in rows] == [True] * 3
    assert [[finding.setting for finding in row.unpaired] for row in rows] == [["checkpoint"], [], []]


async def test_a_node_that_serves_something_else_now_is_taken_as_that(
    pool: Pool, transport: FakePoolTransport, joiner: Joiner
) -> None:
    add(pool, transport, "p1")
    await joiner.attempt("p1")
    transport.nodes["p1"].names = ("huge",)
    await joiner.attempt("p1")
    assert pool.view("p1").state is State.UP
    assert (pool.view("p1").node.model, pool.view("p1").node.aliases) == ("huge", ())


async def test_an_amended_node_joins_again_with_its_new_settings(
    pool: Pool, transport: FakePoolTransport, joiner: Joiner
) -> None:
    add(pool, transport, "p1")
    await joiner.attempt("p1")
    pool.amend(dataclasses.replace(transport.node("p1"), weight=3.0))
    assert pool.view("p1").state is State.JOINING
    await joiner.attempt("p1")
    assert pool.view("p1").node.weight == 3.0
