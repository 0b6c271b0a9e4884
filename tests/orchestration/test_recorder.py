"""A record tells of its request at its end and once."""

import msgspec

from pdproxy.observe.labels import Outcome
from pdproxy.orchestration.recorder import Recorder
from pdproxy.orchestration.request_record import FailureRecord, FinalError, Route
from pdproxy.request import Endpoint
from pdproxy.usage import Usage
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for


async def test_the_tokens_of_all_legs_count_and_the_last_leg_tells_those_of_the_answer() -> None:
    cluster = FakeCluster()
    told: list[tuple[int, int]] = []
    request = msgspec.structs.replace(
        cluster.request(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True), api_key="alice"),
        on_usage=lambda prompt, completion: told.append((prompt, completion)),
    )
    recorder = Recorder(cluster.context)
    record = recorder.begin_record(request)
    record.first.leg_used(Usage(5, 2, 4), Route.DISAGGREGATED)
    record.first.leg_used(Usage(5, 7, None), None)
    assert record.usage() == Usage(5, 7, None)
    for _ in range(2):
        recorder.end(record, Outcome.OK)
    assert told == [(5, 2), (5, 7)]
    kinds = {kind: cluster.count("pdproxy_tokens_total", kind=kind) for kind in ("prompt", "completion", "cached")}
    assert kinds == {"prompt": 10, "completion": 9, "cached": 4}
    assert cluster.count("pdproxy_key_tokens_total", key="alice", kind="completion") == 9
    answered = cluster.context.in_flight.cache_stats[Route.DISAGGREGATED]
    assert (answered.prompts, answered.prompt_tokens, answered.cached_tokens) == (1, 5, 4)


async def test_a_stream_that_moves_keeps_the_route_that_it_began_by() -> None:
    cluster = FakeCluster()
    request = cluster.request(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True))
    record = Recorder(cluster.context).begin_record(request)
    record.first.answer_began(Route.DISAGGREGATED, "one")
    record.first.answer_began(Route.LOCAL, "another")
    assert (record.first.route, record.first.cohort) == (Route.DISAGGREGATED, "one")


def test_of_several_prompts_the_first_error_tells_why() -> None:
    record = FailureRecord()
    record.ended_with(FinalError(502, "node_failed", "The first."), "d0")
    record.ended_with(FinalError(503, "shutting_down", "The second."), "d1")
    assert record.facts() == {"status": 502, "code": "node_failed", "reason": "The first.", "node": "d0"}
