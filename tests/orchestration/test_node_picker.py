"""Which faults count against a node, and what is planned on one node."""

from pdproxy.errors import Fault
from pdproxy.observe.labels import Leg
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.node_picker import FaultReporter
from pdproxy.request import Endpoint
from tests.orchestration.cluster import FakeCluster


async def test_a_5xx_counts_once_another_node_has_served_the_request() -> None:
    cluster = FakeCluster()
    fault_reporter = FaultReporter(cluster.pool)
    fault_reporter.failed(Leg.DECODE, "d0", Fault.SERVER_ERROR)
    fault_reporter.served(Leg.PREFILL, "p0")
    assert cluster.pool.view("d0").reason == "", "a good prefill says nothing about decoding"
    fault_reporter.served(Leg.DECODE, "d1")
    assert cluster.pool.view("d0").reason == "last fault: server_error"


async def test_a_5xx_does_not_count_where_the_same_node_served_it_later() -> None:
    cluster = FakeCluster()
    fault_reporter = FaultReporter(cluster.pool)
    fault_reporter.failed(Leg.DECODE, "d0", Fault.SERVER_ERROR)
    fault_reporter.served(Leg.DECODE, "d0")
    assert cluster.pool.view("d0").reason == ""


async def test_what_a_client_caused_never_counts() -> None:
    cluster = FakeCluster()
    fault_reporter = FaultReporter(cluster.pool)
    for fault in (Fault.CLIENT_ERROR, Fault.BUSY, Fault.NO_TICKET):
        fault_reporter.failed(Leg.DECODE, "d0", fault)
    fault_reporter.served(Leg.DECODE, "d1")
    assert cluster.pool.view("d0").reason == ""
    assert fault_reporter.excluded == {"d0"}


async def test_a_surely_short_prompt_is_computed_by_one_node() -> None:
    cluster = FakeCluster(config=OrchestrationConfig(local_below_tokens=10))
    short = await cluster.ask(Endpoint.COMPLETIONS, {"prompt": [4, 5, 6], "max_tokens": 2})
    long = await cluster.ask(Endpoint.COMPLETIONS, {"prompt": list(range(20)), "max_tokens": 2})
    assert short.headers["x-pdproxy-route"] == "local"
    assert long.headers["x-pdproxy-route"] == "disaggregated"
    assert cluster.count("pdproxy_local_total", reason="short_prompt") == 1
