"""The trace of one chat with real engines, as a collector gets it, beside the metrics and the log."""

import json
import time
from collections.abc import Iterator

import pytest
from openai import DefaultHttpxClient, OpenAI

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from deploy.local.stack import Proxy, ProxySpec, logs_of, start_proxy
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import Pair
from tests.e2e.metrics_reader import read
from tests.e2e.proxy_log import log_when
from tests.fakes.otlp_collector import CollectedSpan, Collector, otlp_collector

pytestmark = pytest.mark.e2e

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WITHIN_S = 60.0
FOLDER = "e2e-spans"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """A collector of traces."""
    with otlp_collector() as made:
        yield made


@pytest.fixture(scope="module")
def tracing_proxy(pair: Pair, collector: Collector) -> Iterator[Proxy]:
    """A proxy of its own in front of the shared nodes; it exports spans within a tenth of a second."""
    otel = {"PDPROXY_OTEL_EXPORT": "otlp", "PDPROXY_OTEL_ENDPOINT": collector.url, "PDPROXY_OTEL_SAMPLE": "1"}
    spec = ProxySpec(more_environment={**otel, "OTEL_BSP_SCHEDULE_DELAY": "100", "PDPROXY_LOG_FORMAT": "json"})
    with Supervisor(logs_of(FOLDER)) as supervisor:
        yield start_proxy(supervisor, spec, [pair.prefill, pair.decode], print)


def spans_of(collector: Collector, trace_id: str, number: int) -> list[CollectedSpan]:
    """So many spans of a trace, in the order of their starts. Raises TimeoutError if they do not come."""
    limit = time.monotonic() + WITHIN_S
    while len(found := [span for span in collector.spans if span.trace_id == trace_id]) < number:
        if time.monotonic() > limit:
            raise TimeoutError([span.name for span in found])
        time.sleep(0.05)
    return sorted(found, key=lambda span: span.began)


def end_lines(log: str, name: str) -> list[dict[str, object]]:
    """The log lines about the end of a request."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line for line in lines if (line.get("request_id"), line["message"]) == (name, "request ended")]


def test_a_trace_of_one_chat_shows_both_legs(tracing_proxy: Proxy, collector: Collector, pair: Pair) -> None:
    question = quiz(1801, 700)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "traced-chat"}
    http = DefaultHttpxClient(trust_env=False, timeout=WITHIN_S)
    with OpenAI(base_url=f"{tracing_proxy.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        events = client.chat.completions.create(
            model=SERVED_NAME,
            messages=[{"role": "user", "content": question.prompt()}],
            max_completion_tokens=8,
            temperature=0,
            stream=True,
            extra_headers=headers,
        )
        chunks = list(events)
    root, prefill, decode = spans_of(collector, TRACE, 3)
    assert (root.kind, root.parent, root.failed) == ("server", PARENT, False)
    assert [(leg.kind, leg.parent, leg.failed) for leg in (prefill, decode)] == [("client", root.span_id, False)] * 2
    for span in (root, prefill, decode):
        assert span.name == f"chat {SERVED_NAME}"
        said = {
            name: span.attributes[f"gen_ai.{name}"] for name in ("operation.name", "provider.name", "request.model")
        }
        assert said == {"operation.name": "chat", "provider.name": "vllm", "request.model": SERVED_NAME}
    prompt = root.attributes["gen_ai.usage.input_tokens"]
    assert prompt > 600
    assert prefill.attributes["gen_ai.usage.input_tokens"] == decode.attributes["gen_ai.usage.input_tokens"] == prompt
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] < prompt
    assert root.attributes["gen_ai.usage.output_tokens"] > 1
    assert root.attributes["gen_ai.response.id"] == chunks[0].id
    assert root.attributes["gen_ai.response.model"] == SERVED_NAME
    assert root.attributes["gen_ai.response.finish_reasons"] == [chunks[-1].choices[0].finish_reason]
    assert root.attributes["pdproxy.route"] == "disaggregated"
    assert (
        root.attributes["pdproxy.cohort"] == prefill.attributes["pdproxy.cohort"] == decode.attributes["pdproxy.cohort"]
    )
    ports = [int(leg.attributes["server.port"]) for leg in (prefill, decode)]
    assert [f":{port}" for port in ports] == [f":{node.url.rpartition(':')[2]}" for node in (pair.prefill, pair.decode)]
    assert prefill.ended <= decode.began
    log = log_when(tracing_proxy.part.log, lambda text: end_lines(text, "traced-chat"))
    (line,) = end_lines(log, "traced-chat")
    assert (line["trace_id"], line["span_id"], line["route"]) == (TRACE, root.span_id, "disaggregated")
    labels = {"gen_ai_request_model": SERVED_NAME, "gen_ai_request_stream": "true", "endpoint": "/v1/chat/completions"}
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert read(tracing_proxy.admin_url, f"gen_ai_server_{name}_seconds_count", **labels) == 1
    tokens = {"model": SERVED_NAME, "kind": "prompt"}
    assert read(tracing_proxy.admin_url, "pdproxy_tokens_total", **tokens) == prompt
