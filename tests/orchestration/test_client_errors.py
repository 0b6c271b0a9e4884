"""Errors as clients read them, before and after the first byte of an answer."""

import json

import pytest

from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.failures import Moment, Step
from pdproxy.nodes.node import Node, PoolState, Role, State
from pdproxy.observe.labels import Leg
from pdproxy.orchestration.client_errors import (
    UpstreamErrorResponse,
    error_body,
    error_event,
    final_error,
    final_error_of,
    only_model,
    unknown_model_error,
)
from pdproxy.planning.plan_types import UnknownModel
from pdproxy.request import Endpoint
from tests.fakes.views import view_of
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


def test_an_error_that_vllm_writes_too_has_its_type_and_code() -> None:
    error = unknown_model_error(UnknownModel("x", ("a", "b")))
    assert error.status == 404
    inner = json.loads(error_body(Endpoint.CHAT, error))["error"]
    message = "The model `x` does not exist. Valid aliases: a, b."
    assert inner == {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
    messages = json.loads(error_body(Endpoint.MESSAGES, error))
    assert messages == {"type": "error", "error": {"type": "NotFoundError", "message": message}}
    assert final_error_of(error).code == "NotFoundError"


def of_models(*models: str) -> PoolState:
    """A prefill node, and a decode node for each, with an adapter."""
    named = [("p", Role.PREFILL, "other"), *((f"d{number}", Role.DECODE, model) for number, model in enumerate(models))]
    nodes = [Node(name, f"http://{name}", (role,), model=model, aliases=("poet",)) for name, role, model in named]
    return PoolState(tuple(view_of(node, State.UP, 0) for node in nodes))


def test_without_a_name_the_one_model_is_meant() -> None:
    assert only_model(of_models("a", "a")) == "a"
    assert only_model(of_models("a", "")) == "a"
    assert only_model(of_models("")) == ""
    with pytest.raises(ClientError, match="name one of them in `model`: a, b") as several:
        only_model(of_models("b", "a"))
    assert (several.value.status, several.value.param) == (400, "model")


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
