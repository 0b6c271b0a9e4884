"""The proxy has no socket left: no node gets a fault, and the client a 503 with Retry-After."""

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.node import State
from pdproxy.request import Endpoint
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for


@pytest.mark.parametrize("stream", [False, True])
async def test_no_node_gets_a_fault(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()

    async def send(request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        raise NodeFault(Fault.BUSY, "d0: OSError: [Errno 24] Too many open files")

    monkeypatch.setattr(cluster.transport, "send", send)
    for _ in range(5):
        got = await cluster.ask(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=stream))
        assert (got.status, got.headers["retry-after"]) == (503, "1")
        assert b"Errno" not in got.body
    assert {view.state for view in cluster.pool.state().nodes} == {State.UP}
    assert {view.reason for view in cluster.pool.state().nodes} == {""}
    await cluster.settle()
