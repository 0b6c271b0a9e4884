"""The small pure parts of the drive."""

import pytest

from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.failures import Moment, Step
from pdproxy.legs.shape import max_prompt_tokens
from pdproxy.observe.labels import Leg, Phase
from pdproxy.orchestration.client_errors import UpstreamErrorResponse, final_error
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.decode_stream import UsageEventFilter
from pdproxy.orchestration.in_flight import Timeline
from pdproxy.orchestration.node_picker import FaultReporter
from pdproxy.request import Endpoint, Json
from tests.orchestration.cluster import FakeCluster

FINISH = b'{"id":"1","choices":[{"text":"x","finish_reason":"stop"}]}'
USAGE = b'{"id":"1","choices":[],"usage":{"prompt_tokens":1},"system_fingerprint":"f"}'


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def test_the_tail_gives_the_fingerprint_back_to_the_finish() -> None:
    tail = UsageEventFilter()
    assert tail.feed(FINISH, _event(FINISH)) == b""
    assert tail.is_usage_event(USAGE)
    assert tail.on_usage_event(USAGE) == _event(FINISH[:-1] + b',"system_fingerprint":"f"}')
    assert tail.flush() == b""


def test_the_tail_loses_nothing_where_no_usage_comes() -> None:
    tail = UsageEventFilter()
    tail.feed(FINISH, _event(FINISH))
    assert tail.feed(b"[DONE]", b"data: [DONE]\n\n") == _event(FINISH) + b"data: [DONE]\n\n"


def test_the_tail_passes_everything_else_at_once() -> None:
    assert UsageEventFilter().feed(b'{"choices":[{"text":"x"}]}', b"seen") == b"seen"


async def test_a_5xx_counts_once_another_node_has_served_the_request() -> None:
    world = FakeCluster()
    fault_reporter = FaultReporter(world.pool)
    fault_reporter.failed(Leg.DECODE, "d0", Fault.SERVER_ERROR)
    fault_reporter.served(Leg.PREFILL, "p0")
    assert world.pool.view("d0").reason == "", "a good prefill says nothing about decoding"
    fault_reporter.served(Leg.DECODE, "d1")
    assert world.pool.view("d0").reason == "last fault: server_error"


async def test_a_5xx_does_not_count_where_the_same_node_served_it_later() -> None:
    world = FakeCluster()
    fault_reporter = FaultReporter(world.pool)
    fault_reporter.failed(Leg.DECODE, "d0", Fault.SERVER_ERROR)
    fault_reporter.served(Leg.DECODE, "d0")
    assert world.pool.view("d0").reason == ""


async def test_what_a_client_caused_never_counts() -> None:
    world = FakeCluster()
    fault_reporter = FaultReporter(world.pool)
    for fault in (Fault.CLIENT_ERROR, Fault.BUSY, Fault.NO_TICKET):
        fault_reporter.failed(Leg.DECODE, "d0", fault)
    fault_reporter.served(Leg.DECODE, "d1")
    assert world.pool.view("d0").reason == ""
    assert fault_reporter.excluded == {"d0"}


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
@pytest.mark.parametrize("fault", Fault)
def test_a_verdict_never_tells_what_is_inside(leg: Leg, fault: Fault) -> None:
    said = final_error(leg, Moment.OPENING, Step.FAIL, NodeFault(fault, "10.0.0.1:8000 secret"))
    assert isinstance(said, ClientError)
    assert 500 <= said.status < 600
    assert b"10.0.0.1" not in said.body()


def test_a_nodes_own_answer_keeps_its_status_body_and_wait() -> None:
    fault = NodeFault(Fault.BUSY, "", status=429, body=b'{"error":{}}', headers=(("retry-after", "9"), ("server", "x")))
    said = final_error(Leg.DECODE, Moment.OPENING, Step.ANSWER, fault)
    assert isinstance(said, UpstreamErrorResponse)
    assert (said.response.status, said.response.body) == (429, b'{"error":{}}')
    assert said.response.headers == (("content-type", "application/json"), ("retry-after", "9"))


async def test_the_timeline_tells_phases_in_milliseconds() -> None:
    world = FakeCluster()
    timeline = Timeline(world.clock, world.context.metrics, world.clock.now() - 1)
    for phase, seconds in ((Phase.PREFILL, 0.5), (Phase.PREFILL, 0.25), (Phase.HANDOVER, 0.25), (Phase.DECODE, 0.125)):
        world.clock.advance(seconds)
        timeline.enter(phase, phase)
    timeline.first_byte()
    told = "plan;dur=500.0, prefill;dur=500.0, handover;dur=125.0, first_token;dur=2125.0"
    assert timeline.header() == told
    assert world.count("pdproxy_phase_seconds_count", phase="prefill") == 1
    assert world.count("pdproxy_phase_seconds_count", phase="decode") == 0
    world.clock.advance(2.0)
    assert (timeline.so_far(Phase.DECODE), timeline.so_far(Phase.PREFILL)) == (2.0, 0.5)
    timeline.end()
    assert timeline.header() == told
    assert world.count("pdproxy_phase_seconds_sum", phase="decode") == 2.0
    assert world.count("pdproxy_phase_seconds_sum", phase="total") == 4.125


@pytest.mark.parametrize(
    ("endpoint", "body", "most"),
    [
        (Endpoint.COMPLETIONS, {"prompt": "abc"}, 4),
        (Endpoint.COMPLETIONS, {"prompt": "\u00e9"}, 3),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3]}, 3),
        (Endpoint.COMPLETIONS, {"prompt": []}, None),
        (Endpoint.CHAT, {"messages": []}, None),
    ],
)
def test_a_prompts_length_is_bounded_where_it_can_be(endpoint: Endpoint, body: Json, most: int | None) -> None:
    assert max_prompt_tokens(endpoint, body) == most


async def test_a_surely_short_prompt_is_computed_by_one_node() -> None:
    world = FakeCluster(config=OrchestrationConfig(local_below_tokens=10))
    short = await world.ask(Endpoint.COMPLETIONS, {"prompt": [4, 5, 6], "max_tokens": 2})
    long = await world.ask(Endpoint.COMPLETIONS, {"prompt": list(range(20)), "max_tokens": 2})
    assert short.headers["x-pdproxy-route"] == "local"
    assert long.headers["x-pdproxy-route"] == "disaggregated"
    assert world.count("pdproxy_local_total", reason="short_prompt") == 1
