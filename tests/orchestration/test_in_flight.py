"""Requests in flight as the operator sees them."""

import logging
from typing import Any

import msgspec
import pytest

from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.failures import Step
from pdproxy.observe.labels import Leg, Outcome, Phase
from pdproxy.orchestration.in_flight import MAX_FAILURES, InFlightRequests, LegFailure, OutputLengths
from pdproxy.orchestration.recorder import Recorder
from pdproxy.orchestration.request_record import MOST_TOLD, AnswerRecord, FailureRecord, Route
from pdproxy.request import Endpoint
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.cluster import MODEL, FakeCluster, read
from tests.orchestration.prompts import body_for, prompt_ids

CHAT = body_for(Endpoint.CHAT, stream=True)


async def test_a_stream_is_in_flight_until_it_has_ended() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    reply = await cluster.orchestrator.answer(cluster.request(Endpoint.CHAT, CHAT))
    (ride,) = cluster.context.in_flight.newest(50)
    assert (ride.name, ride.first.phase, ride.failure.outcome) == ("r-1", Phase.DECODE, None)
    assert ride.first.nodes == {Phase.PREFILL: "p0", Phase.HANDOVER: "d0", Phase.DECODE: "d0"}
    await read(reply)
    assert (len(cluster.context.in_flight), ride.failure.outcome) == (0, Outcome.OK)
    await cluster.settle()


async def test_a_request_whose_client_leaves_is_no_longer_in_flight() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    reply = await cluster.orchestrator.answer(cluster.request(Endpoint.CHAT, CHAT))
    (ride,) = cluster.context.in_flight.newest(50)
    assert not isinstance(reply.body, bytes)
    await reply.body.aclose()
    assert (len(cluster.context.in_flight), ride.failure.outcome) == (0, Outcome.CLIENT_GONE)
    await cluster.settle()


async def test_a_prompt_counts_for_the_cache_that_served_it() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    await cluster.ask(Endpoint.CHAT, CHAT)
    cluster.pool.remove("p0")
    await cluster.ask(Endpoint.CHAT, CHAT)
    sums = cluster.context.in_flight.cache_stats
    long = len(prompt_ids(Endpoint.CHAT))
    pulled, local, again = (sums[way] for way in (Route.DISAGGREGATED, Route.LOCAL, Route.RECOMPUTED))
    assert (pulled.prompts, pulled.prompt_tokens, pulled.cached_tokens) == (1, long, 1)
    assert (local.prompts, local.prompt_tokens, local.cached_tokens) == (1, long, 0)
    assert again.prompts == 0
    await cluster.settle()


@pytest.mark.parametrize(
    ("decodes", "name", "trouble", "step", "outcome"),
    [
        (1, "p0", InjectedFault(FaultKind.RESET), Step.OTHER_PREFILL, Outcome.OK),
        (2, "d0", InjectedFault(FaultKind.RESET, at=3), Step.MIGRATE, Outcome.OK),
        (1, "d0", InjectedFault(FaultKind.RESET, at=3), Step.MIGRATE, Outcome.FAILED),
    ],
)
async def test_a_failure_shows_the_outcome_of_its_request(
    decodes: int, name: str, trouble: InjectedFault, step: Step, outcome: Outcome
) -> None:
    cluster = FakeCluster(prefills=1, decodes=decodes)
    next(node for node in cluster.nodes if node.name == name).fault = trouble
    await cluster.ask(Endpoint.CHAT, CHAT)
    last = cluster.context.in_flight.failures()[-1]
    assert (last.name, last.node, last.fault, last.step) == ("r-1", name, Fault.RESET, step)
    assert last.leg is (Leg.PREFILL if name == "p0" else Leg.DECODE)
    assert last.request.outcome is outcome


async def test_a_clients_own_mistake_is_no_failure() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    cluster.prefills[0].fault = InjectedFault(FaultKind.STATUS, status=400, times=9)
    assert (await cluster.ask(Endpoint.CHAT, CHAT)).status == 400
    assert cluster.context.in_flight.failures() == []


def test_the_number_of_failures_is_bounded() -> None:
    cluster, live = FakeCluster(0, 0), InFlightRequests()
    for index in range(MAX_FAILURES + 5):
        request = cluster.request(Endpoint.CHAT, CHAT, name=f"r-{index}")
        record = AnswerRecord.of(request, cluster.clock.now)
        live.add(record)
        live.failed(LegFailure(0.0, record.name, Leg.DECODE, "d0", Fault.RESET, Step.FAIL, record.failure))
    assert [ride.name for ride in live.newest(2)] == ["r-24", "r-23"]
    assert [failure.name for failure in live.failures()][::19] == ["r-24", "r-5"]


async def test_the_log_line_has_outcome_nodes_and_phases(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    with caplog.at_level(logging.INFO, "pdproxy.orchestration.access_log"):
        await cluster.ask(Endpoint.CHAT, CHAT)
    (line,) = (vars(record) for record in caplog.records if record.name == "pdproxy.orchestration.access_log")
    assert {"prefill_ms", "handover_ms", "first_token_ms", "total_ms"} <= line.keys()
    assert (line["request_id"], line["outcome"], line["model"]) == ("r-1", "ok", "tiny")
    assert (line["prefill_node"], line["decode_node"]) == ("p0", "d0")


async def test_a_failed_request_says_why_where_and_what_was_tried(access_log: list[logging.LogRecord]) -> None:
    cluster = FakeCluster()
    for node in cluster.decodes:
        node.fault = InjectedFault(FaultKind.RESET)
    assert (await cluster.ask(Endpoint.CHAT, CHAT)).status == 502
    told = told_of(access_log)
    assert (told["status"], told["code"], told["fault"]) == (502, "node_failed", "reset")
    assert told["reason"] == "The connection to the decode node broke, and no other could take over."
    assert (told["node"], told["tried"]) == ("d1", "decode:d0:reset,decode:d1:reset")


async def test_so_does_a_stream_that_ends_in_an_error_event(access_log: list[logging.LogRecord]) -> None:
    cluster = FakeCluster()
    for node in cluster.decodes:
        node.fault = InjectedFault(FaultKind.RESET, at=2)
    assert (await cluster.ask(Endpoint.CHAT, {**CHAT, "stream": True, "n": 2})).status == 200
    told = told_of(access_log)
    assert (told["status"], told["code"], told["fault"], told["node"]) == (200, "stream_broken", "reset", "d1")


async def test_a_retry_that_went_well_is_told_of_and_is_no_warning(access_log: list[logging.LogRecord]) -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET)
    assert (await cluster.ask(Endpoint.CHAT, CHAT)).status == 200
    (line,) = map(vars, access_log)
    assert (line["levelname"], line["outcome"], line["tried"]) == ("INFO", "ok", "decode:d0:reset")


async def test_a_node_that_answers_nothing_until_the_deadline_is_named(access_log: list[logging.LogRecord]) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    cluster.prefills[0].fault = InjectedFault(FaultKind.HANG)
    request = msgspec.structs.replace(cluster.request(Endpoint.CHAT, CHAT), deadline=cluster.clock.now() + 2)
    with pytest.raises(ClientError):
        await cluster.orchestrator.answer(request)
    told = told_of(access_log)
    assert (told["status"], told["code"], told["node"]) == (504, "deadline", "p0")


def told_of(lines: list[logging.LogRecord]) -> dict[str, Any]:
    """The one line, of a request that failed."""
    (line,) = map(vars, lines)
    assert (line["levelname"], line["outcome"]) == ("WARNING", "failed")
    return line


def test_the_legs_that_a_line_names_are_bounded() -> None:
    record = FailureRecord()
    for number in range(MOST_TOLD + 5):
        record.leg_failed(Leg.DECODE, f"d{number}", NodeFault(Fault.RESET, "broke"))
    assert str(record.facts()["tried"]).endswith("decode:d7:reset,+5")


async def test_phases_are_shown_in_milliseconds() -> None:
    cluster = FakeCluster()
    request = msgspec.structs.replace(cluster.request(Endpoint.CHAT, CHAT), arrived=cluster.clock.now() - 1)
    recorder = Recorder(cluster.context)
    record = recorder.begin_record(request)
    for phase, seconds in ((Phase.PREFILL, 0.5), (Phase.PREFILL, 0.25), (Phase.HANDOVER, 0.25), (Phase.DECODE, 0.125)):
        cluster.clock.advance(seconds)
        record.first.enter(phase, phase)
    told = "plan;dur=500.0, prefill;dur=500.0, handover;dur=125.0, first_token;dur=2125.0"
    recorder.answer_began(record)
    assert record.server_timing() == told
    assert cluster.count("pdproxy_phase_seconds_count", phase="prefill") == 1
    assert cluster.count("pdproxy_phase_seconds_count", phase="decode") == 0
    cluster.clock.advance(2.0)
    assert (record.first.so_far(Phase.DECODE), record.first.so_far(Phase.PREFILL)) == (2.0, 0.5)
    recorder.end(record, Outcome.OK)
    assert cluster.count("pdproxy_phase_seconds_sum", phase="decode") == 2.0
    assert record.server_timing() == told
    assert record.first.took[Phase.TOTAL] == 4.125


def test_the_length_of_answers_is_learned_by_model_and_bounded() -> None:
    lengths = OutputLengths()
    assert (lengths.expected("m", None), lengths.expected("m", 16)) == (256, 16)
    for _ in range(500):
        lengths.seen("m", 1000)
    assert lengths.expected("m", 4096) == pytest.approx(1000, abs=5)
    assert lengths.expected("other", None) == 256
    for number in range(10_000):
        lengths.seen(f"m{number}", 5)
    assert len(lengths._means) < 300


@pytest.mark.parametrize("choices", [1, 4])
async def test_usage_teaches_how_long_each_answer_is(choices: int) -> None:
    cluster = FakeCluster()
    lengths = cluster.context.in_flight.output_lengths
    for _ in range(500):
        lengths.seen(MODEL, 100)
    await cluster.ask(Endpoint.COMPLETIONS, body_for(Endpoint.COMPLETIONS, stream=False, tokens=36, n=choices))
    assert lengths.expected(MODEL, None) == 99, "one of 64 is 36 long"
    await cluster.settle()
