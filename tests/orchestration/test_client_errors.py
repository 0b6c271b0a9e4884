"""Errors as clients read them, before and after the first byte of an answer."""

import json

import pytest

from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.failures import Moment, Step
from pdproxy.observe.labels import Leg
from pdproxy.orchestration.client_errors import UpstreamErrorResponse, error_body, error_event, final_error
from pdproxy.request import Endpoint
from tests.stream.engine import events

ERROR = ClientError(502, "the decode node is gone", kind="upstream_error", code="node_lost")


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT])
def test_openai_streams_end_cleanly_after_the_error(endpoint: Endpoint) -> None:
    error, done = events(error_event(endpoint, ERROR))
    assert json.loads(error.data or b"")["error"]["message"] == ERROR.message
    assert done.data == b"[DONE]"


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.RESPONSES])
def test_named_streams_get_an_error_event(endpoint: Endpoint) -> None:
    (event,) = events(error_event(endpoint, ERROR))
    assert event.name == b"error"
    payload = json.loads(event.data or b"")
    assert payload["type"] == "error"
    assert ERROR.message in (payload.get("message"), payload.get("error", {}).get("message"))


def test_bodies_have_the_endpoints_shape() -> None:
    assert json.loads(error_body(Endpoint.CHAT, ERROR)) == json.loads(ERROR.body())
    messages = json.loads(error_body(Endpoint.MESSAGES, ClientError(404, "no such model")))
    assert messages == {"type": "error", "error": {"type": "not_found_error", "message": "no such model"}}


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
@pytest.mark.parametrize("fault", Fault)
def test_an_error_never_shows_internal_addresses(leg: Leg, fault: Fault) -> None:
    said = final_error(leg, Moment.OPENING, Step.FAIL, NodeFault(fault, "10.0.0.1:8000 secret"))
    assert isinstance(said, ClientError)
    assert 500 <= said.status < 600
    assert b"10.0.0.1" not in said.body()


def test_a_nodes_own_answer_keeps_its_status_body_and_headers() -> None:
    fault = NodeFault(Fault.BUSY, "", status=429, body=b'{"error":{}}', headers=(("retry-after", "9"), ("x-y", "z")))
    said = final_error(Leg.DECODE, Moment.OPENING, Step.ANSWER, fault)
    assert isinstance(said, UpstreamErrorResponse)
    assert (said.response.status, said.response.body) == (429, b'{"error":{}}')
    assert said.response.headers == (("retry-after", "9"), ("x-y", "z"), ("content-type", "application/json"))
