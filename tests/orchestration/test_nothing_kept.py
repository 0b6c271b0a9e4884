"""Once a request has ended, whatever failed, nothing of it, and so of its body, waits for the collector."""

import gc
from collections import Counter

import pytest

from pdproxy.errors import ClientError
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.request import ClientRequest, Endpoint, SubRequest
from pdproxy.settings.types import Legs
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.node import FakeNode
from tests.fakes.reading import follow
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for

OF_A_REQUEST = (ClientRequest, SubRequest, UpstreamRequest)


async def asked(cluster: FakeCluster, *, stream: bool) -> None:
    """One request to its end, good or bad."""
    request = cluster.request(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=stream))
    try:
        reply = await cluster.orchestrator.answer(request)
        if not isinstance(reply.body, bytes):
            await follow(reply.body)
    except ClientError:
        return


def break_all(nodes: list[FakeNode], kind: FaultKind) -> None:
    """Each leg of these nodes fails."""
    for node in nodes:
        node.fault = InjectedFault(kind, status=500)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("kind", [FaultKind.STATUS, FaultKind.RESET, FaultKind.ERROR_EVENT, FaultKind.NO_TICKET])
async def test_nothing_of_a_request_whose_legs_failed_is_kept(kind: FaultKind, role: str, stream: bool) -> None:
    cluster = FakeCluster(prefills=2, decodes=2, legs=Legs.IN_TURN)
    break_all(cluster.prefills if role == "prefill" else cluster.decodes, kind)
    gc.collect()
    gc.disable()
    try:
        await asked(cluster, stream=stream)
        alive = Counter(type(each).__name__ for each in gc.get_objects() if type(each) in OF_A_REQUEST)
    finally:
        gc.enable()
    assert alive == {}
    await cluster.settle()
