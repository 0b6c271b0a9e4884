"""Spans that a collector gets of requests to the whole proxy, and the traces in their log lines."""

import io
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from pdproxy.observe.logs import JsonFormatter
from pdproxy.settings.model import Health, Otel, Settings
from pdproxy.settings.types import FirstHandOver, OtelExport
from tests.app.running_proxy import RunningProxy, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.node import FakeNode
from tests.fakes.otlp_collector import CollectedSpan, Collector, otlp_collector

PROMPT = "one two three four"
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 4},
}
OPERATIONS = dict.fromkeys(ASKS, "chat") | {"/v1/completions": "text_completion"}
TRACE, PARENT = "ab" * 16, "cd" * 8
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@asynccontextmanager
async def traced(collector: Collector | None, sample: float = 1.0, **more: Any) -> AsyncIterator[RunningProxy]:
    """A proxy that exports to this collector, or whose tracing is off; at its end all spans have arrived."""
    otel = Otel()
    if collector is not None:
        otel = Otel(export=OtelExport.OTLP, endpoint=collector.url, service="edge", sample=sample)
    settings = Settings(health=Health(first_hand_over=FirstHandOver.WARM_UP), otel=otel, **more)
    async with running_proxy(settings) as made:
        yield made


@contextmanager
def log_lines() -> Iterator[io.StringIO]:
    """The proxy's log meanwhile, in JSON."""
    stream = io.StringIO()
    handler, ours = logging.StreamHandler(stream), logging.getLogger("pdproxy")
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logging.getLogger().removeHandler(handler)


def lines(log: io.StringIO, message: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in log.getvalue().splitlines()]
    return [line for line in found if re.search(message, line["message"])]


def legs_seen(node: FakeNode) -> list[str]:
    """The spans that the node's own are to be children of, by its requests for the model ``m``."""
    return [dict(seen.headers).get("traceparent", "") for seen in node.legs() if seen.body.get("model") == "m"]


def of(span: CollectedSpan, *names: str) -> dict[str, Any]:
    """Some attributes of a span."""
    return {name: span.attributes.get(name) for name in names}


def tree(collector: Collector, trace_id: str = TRACE) -> tuple[CollectedSpan, list[CollectedSpan]]:
    """The request's span in one trace, and its children in the order of their beginnings."""
    spans = sorted((span for span in collector.spans if span.trace_id == trace_id), key=lambda span: span.began)
    (root,) = (span for span in spans if span.kind == "server")
    children = [span for span in spans if span is not root]
    assert {span.parent for span in children} <= {root.span_id}
    return root, children


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKS)
async def test_a_trace_shows_both_legs_in_the_names_of_the_conventions(path: str, stream: bool) -> None:
    asked = {"model": "m", **ASKS[path], "stream": stream, "temperature": 0, "top_p": 0.5}
    with otlp_collector() as collector, log_lines() as log:
        async with traced(collector) as made:
            answer = await made.client.post(path, json=asked, headers={**TRACEPARENT, "x-request-id": "mine"})
            assert answer.status_code == 200
            told = [legs_seen(node)[-1] for node in (made.prefill, made.decode)]
    assert (collector.content_types, collector.services) == ({"application/x-protobuf"}, {"edge"})
    root, (prefill, decode) = tree(collector)
    common = {
        "gen_ai.operation.name": OPERATIONS[path],
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
    }
    for span in (root, prefill, decode):
        assert span.name == f"{OPERATIONS[path]} m"
        assert of(span, *common) == common
        assert not span.failed
    assert (root.parent, prefill.kind, decode.kind) == (PARENT, "client", "client")
    assert told == [f"00-{TRACE}-{span.span_id}-01" for span in (prefill, decode)]
    wanted = {"max_tokens": 4, "temperature": 0.0, "top_p": 0.5, "stream": stream}
    assert {name: root.attributes.get(f"gen_ai.request.{name}") for name in wanted} == wanted
    shown = {
        "pdproxy.request_id": "mine",
        "pdproxy.outcome": "ok",
        "pdproxy.route": "disaggregated",
        "pdproxy.prefill_node": "prefill-0",
        "pdproxy.decode_node": "decode-0",
        "http.response.status_code": 200,
        "url.path": path,
        "gen_ai.response.model": "m",
        "gen_ai.usage.output_tokens": 4,
    }
    assert of(root, *shown) == shown
    assert len(root.attributes["gen_ai.response.finish_reasons"]) == 1
    assert root.attributes["gen_ai.response.id"] in answer.text
    assert ("gen_ai.response.time_to_first_chunk" in root.attributes) == stream
    assert {"pdproxy.plan_ms", "pdproxy.prefill_ms", "pdproxy.handover_ms"} <= root.attributes.keys()
    for span, leg in ((prefill, "prefill"), (decode, "decode")):
        its_own = {"pdproxy.leg": leg, "pdproxy.node": f"{leg}-0", "server.address": "127.0.0.1"}
        assert of(span, *its_own) == its_own
        assert {"server.port", "pdproxy.cohort", "gen_ai.usage.input_tokens"} <= span.attributes.keys()
    assert decode.attributes["pdproxy.prefill_node"] == "prefill-0"
    assert decode.attributes["gen_ai.usage.output_tokens"] == 4
    assert root.attributes["gen_ai.usage.input_tokens"] == prefill.attributes["gen_ai.usage.input_tokens"]
    assert root.began <= prefill.began <= prefill.ended <= decode.began <= decode.ended <= root.ended
    (line,) = lines(log, "request ended")
    assert (line["trace_id"], line["span_id"], line["route"]) == (TRACE, root.span_id, "disaggregated")


async def test_a_failed_leg_is_found_from_its_log_line() -> None:
    asked = {"model": "m", **ASKS["/v1/chat/completions"]}
    with otlp_collector() as collector, log_lines() as log:
        async with traced(collector) as made:
            made.prefill.fault = InjectedFault(FaultKind.STATUS)
            answer = await made.client.post("/v1/chat/completions", json=asked)
            assert answer.headers["x-pdproxy-route"].startswith("local; ")
    line = lines(log, "prefill leg on prefill-0")[0]
    root, children = tree(collector, line["trace_id"])
    assert line["span_id"] == root.span_id
    local = {"pdproxy.route": "local", "pdproxy.local_reason": "no_prefill"}
    assert of(root, *local) == local
    failed = [span for span in children if span.failed]
    assert failed
    assert {span.attributes["error.type"] for span in failed} == {"server_error"}
    assert {span.attributes["http.response.status_code"] for span in failed} == {500}
    (decode,) = (span for span in children if span.attributes.get("pdproxy.leg") == "decode")
    assert (decode.failed, "pdproxy.prefill_node" in decode.attributes) == (False, False)


async def test_a_broken_stream_and_a_model_that_nobody_serves() -> None:
    with otlp_collector() as collector:
        async with traced(collector) as made:
            made.decode.fault = InjectedFault(FaultKind.RESET, at=2)
            asked = {"model": "m", **ASKS["/v1/messages"], "stream": True}
            assert "error" in (await made.client.post("/v1/messages", json=asked, headers=TRACEPARENT)).text
            unknown = {**ASKS["/v1/completions"], "model": "whatever a client likes"}
            assert (await made.client.post("/v1/completions", json=unknown)).status_code == 404
    root, legs = tree(collector)
    assert (root.failed, root.attributes["error.type"], root.attributes["pdproxy.outcome"]) == (
        True,
        "failed",
        "failed",
    )
    assert (legs[-1].failed, legs[-1].attributes["error.type"]) == (True, "reset")
    (other,) = (span for span in collector.spans if span.name == "text_completion")
    assert (other.kind, other.failed) == ("server", False)
    assert other.attributes["gen_ai.request.model"] == unknown["model"]
    assert other.attributes["error.type"] == "client_error"


async def test_each_prompt_of_a_list_has_its_legs() -> None:
    asked = {"model": "m", "prompt": ["one two", "three four five"], "max_tokens": 4, "stream": True}
    with otlp_collector() as collector:
        async with traced(collector) as made:
            await made.client.post("/v1/completions", json=asked, headers=TRACEPARENT)
    root, legs = tree(collector)
    seen = sorted((span.attributes["pdproxy.prompt"], span.attributes["pdproxy.leg"]) for span in legs)
    assert seen == [(0, "decode"), (0, "prefill"), (1, "decode"), (1, "prefill")]
    assert of(root, "pdproxy.route", "gen_ai.usage.output_tokens") == {
        "pdproxy.route": "disaggregated",
        "gen_ai.usage.output_tokens": 8,
    }
    assert len(root.attributes["gen_ai.response.finish_reasons"]) == 2


async def test_without_tracing_the_clients_trace_goes_on_and_stands_in_the_log() -> None:
    asked = {"model": "m", **ASKS["/v1/chat/completions"]}
    with log_lines() as log:
        async with traced(None) as made:
            for headers in (TRACEPARENT, {}):
                assert (await made.client.post("/v1/chat/completions", json=asked, headers=headers)).status_code == 200
            assert legs_seen(made.decode)[-2:] == [TRACEPARENT["traceparent"], ""]
    with_trace, without = lines(log, "request ended")
    assert (with_trace["trace_id"], with_trace["span_id"]) == (TRACE, PARENT)
    assert "trace_id" not in without


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_not_sampled_leaves_no_span_and_the_nodes_are_told(stream: bool) -> None:
    """Whether its client decided so, or the proxy did; what the client wants traced is traced."""
    asked = {"model": "m", **ASKS["/v1/chat/completions"], "stream": stream}
    refused = {"traceparent": f"00-{TRACE}-{PARENT}-00", "tracestate": "vendor=1"}
    with otlp_collector() as collector, log_lines() as log:
        async with traced(collector, sample=0) as made:
            told: list[tuple[str, str]] = []
            for headers in ({}, refused, {"traceparent": "nonsense"}, TRACEPARENT):
                answer = await made.client.post("/v1/chat/completions", json=asked, headers=headers)
                assert answer.status_code == 200
                told.append((legs_seen(made.prefill)[-1], legs_seen(made.decode)[-1]))
            states = [dict(seen.headers).get("tracestate") for seen in made.decode.legs()]
    assert {span.trace_id for span in collector.spans} == {TRACE}
    root, legs = tree(collector)
    assert told[1] == (refused["traceparent"], refused["traceparent"])
    assert told[3] == tuple(f"00-{TRACE}-{leg.span_id}-01" for leg in legs)
    for prefill, decode in (told[0], told[2]):
        assert prefill == decode
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-0[02]", prefill)  # 02: the id is random
    assert states[-4:] == [None, "vendor=1", None, None]
    ids = [(line.get("trace_id"), line.get("span_id")) for line in lines(log, "request ended")]
    assert ids == [(None, None), (TRACE, PARENT), (None, None), (TRACE, root.span_id)]


async def test_a_collector_that_is_gone_keeps_no_answer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with otlp_collector() as collector:
        pass
    async with traced(collector) as made:
        for _ in range(3):
            answer = await made.client.post("/v1/completions", json={"model": "m", **ASKS["/v1/completions"]})
            assert answer.status_code == 200
    assert not collector.spans
