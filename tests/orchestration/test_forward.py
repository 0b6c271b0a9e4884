"""Requests that the proxy does not understand."""

import asyncio
import json
import logging

import pytest

from pdproxy.errors import ClientError
from pdproxy.nodes.node import State
from pdproxy.observe.labels import Leg
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.forward import ForwardRequest
from pdproxy.request import HeldBody
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.reading import follow
from tests.fakes.refused import refuse
from tests.orchestration.cluster import MODEL, FakeCluster


async def _forward(cluster: FakeCluster, model: str = MODEL, seconds: float = 3600.0) -> tuple[int, bytes]:
    sent = (("content-type", "application/json"),)
    deadline = cluster.clock.now() + seconds
    asked = ForwardRequest(
        "r-1", "POST", "/v1/embeddings?x=1", sent, HeldBody(b'{"input":"a"}'), model, deadline, lambda: True
    )
    reply = await cluster.orchestrator.forward(asked)
    if isinstance(reply.body, bytes):
        return reply.status, reply.body
    return reply.status, b"".join(await follow(reply.body))


@pytest.mark.parametrize("model", [MODEL, ""])
async def test_a_node_of_the_model_answers(model: str) -> None:
    cluster = FakeCluster()
    status, body = await _forward(cluster, model)
    assert (status, json.loads(body)["path"]) == (200, "/v1/embeddings?x=1")
    assert cluster.count("pdproxy_requests_total", endpoint="other", outcome="ok") == 1
    await cluster.settle()


async def test_another_node_is_asked_where_the_first_is_unreachable() -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(FaultKind.REFUSE)
    assert json.loads((await _forward(cluster))[1])["node"] == "d1"
    await cluster.settle()


async def test_unreachable_nodes_use_no_retry_up() -> None:
    cluster = FakeCluster(decodes=6, config=OrchestrationConfig(retries=1))
    for node in cluster.decodes[:5]:
        node.fault = InjectedFault(FaultKind.REFUSE)
    assert json.loads((await _forward(cluster))[1])["node"] == "d5"
    assert cluster.count("pdproxy_steps_total", leg="forward", fault="refused", step="other_node") == 5
    await cluster.settle()


async def test_where_no_node_can_be_reached_the_client_gets_503() -> None:
    cluster = FakeCluster()
    for node in cluster.decodes:
        node.fault = InjectedFault(FaultKind.REFUSE)
    with pytest.raises(ClientError) as caught:
        await _forward(cluster)
    assert (caught.value.status, caught.value.message) == (503, "No decode node could be reached.")
    await cluster.settle()


@pytest.mark.parametrize(
    "trouble",
    [InjectedFault(FaultKind.RESET), InjectedFault(FaultKind.HANG), InjectedFault(FaultKind.RESET, at=0)],
    ids=str,
)
async def test_a_request_that_a_node_may_have_handled_is_not_repeated(
    trouble: InjectedFault, access_log: list[logging.LogRecord]
) -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = trouble
    with pytest.raises(ClientError) as caught:
        await _forward(cluster)
    assert caught.value.status in (502, 504)
    assert cluster.decodes[1].seen == []
    (line,) = map(vars, access_log)
    assert (line["status"], line["node"], line["tried"]) == (caught.value.status, "d0", f"forward:d0:{line['fault']}")
    await cluster.settle()


@pytest.mark.parametrize(
    ("status", "outcome"), [(422, "client_error"), (429, "failed"), (500, "failed"), (503, "failed")]
)
async def test_a_nodes_error_is_passed_on_and_counted(status: int, outcome: str) -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(FaultKind.STATUS, status=status)
    assert (await _forward(cluster))[0] == status
    assert cluster.count("pdproxy_requests_total", endpoint="other", outcome=outcome) == 1
    await cluster.settle()


async def test_a_5xx_does_not_count_as_a_success_of_the_node() -> None:
    cluster = FakeCluster(decodes=1)
    for _ in range(4):
        refuse(cluster.pool, "d0", requests=1, leg=Leg.FORWARD)
        cluster.decodes[0].fault = InjectedFault(FaultKind.STATUS, status=500, times=1)
        if cluster.pool.view("d0").state is State.UP:
            await _forward(cluster)
    assert cluster.pool.view("d0").state is State.DOWN


async def test_a_400_counts_as_a_success_of_the_node() -> None:
    cluster = FakeCluster(decodes=1)
    for _ in range(8):
        refuse(cluster.pool, "d0", requests=1, leg=Leg.FORWARD)
        cluster.decodes[0].fault = InjectedFault(FaultKind.STATUS, status=400, times=1)
        assert (await _forward(cluster))[0] == 400
    assert cluster.pool.view("d0").state is State.UP


@pytest.mark.parametrize(
    "trouble",
    [InjectedFault(FaultKind.HANG), InjectedFault(FaultKind.STALL, at=0), InjectedFault(FaultKind.STALL, at=1)],
    ids=str,
)
async def test_the_deadline_of_the_whole_request_ends_it(trouble: InjectedFault) -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = trouble
    began = cluster.clock.now()
    with pytest.raises(ClientError) as caught:
        await _forward(cluster, seconds=5.0)
    assert (caught.value.status, caught.value.code) == (504, "deadline")
    assert cluster.clock.now() - began == pytest.approx(5)
    assert cluster.pool.view("d0").reason == "", "our own deadline is no fault of a node"
    assert cluster.count("pdproxy_requests_total", endpoint="other", outcome="failed") == 1
    await cluster.settle()


async def test_a_client_that_leaves_is_counted_and_leaves_nothing() -> None:
    cluster = FakeCluster()
    asking = asyncio.create_task(_forward(cluster))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert cluster.count("pdproxy_requests_total", endpoint="other", outcome="client_gone") == 1
    await cluster.settle()


async def test_an_unknown_model_is_404_and_no_node_is_503() -> None:
    cluster = FakeCluster()
    with pytest.raises(ClientError) as caught:
        await _forward(cluster, "other")
    assert caught.value.status == 404
    assert cluster.count("pdproxy_requests_total", endpoint="other", outcome="client_error") == 1
    for node in cluster.decodes:
        cluster.pool.drain(node.name)
    with pytest.raises(ClientError) as caught:
        await _forward(cluster)
    assert (caught.value.status, dict(caught.value.headers)["retry-after"]) == (503, "1")
