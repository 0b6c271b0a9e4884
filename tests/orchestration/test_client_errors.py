"""An error after the first byte, as each endpoint's clients read it."""

import json

import pytest

from pdproxy.errors import ClientError
from pdproxy.orchestration.client_errors import error_body, error_event
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
