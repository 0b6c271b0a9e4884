"""The documents that the proxy serves itself: its OpenAPI schema and the list of models."""

import functools
import json

from pdproxy import __version__
from pdproxy.nodes.node import NodeView, Role, Snapshot, State
from pdproxy.request import Endpoint, Json

_TEXT = {"type": "string"}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": _TEXT},
    },
}
_PROMPT = {"oneOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": {"type": "string"}}]}
_LIMIT = {"type": "integer", "minimum": 1}
_COMMON = {
    "model": {"type": "string", "minLength": 1},
    "stream": {"type": "boolean"},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
}
_SEED = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_NEEDED: dict[Endpoint, dict[str, object]] = {
    Endpoint.COMPLETIONS: {"prompt": _PROMPT},
    Endpoint.CHAT: {"messages": _MESSAGES},
    Endpoint.MESSAGES: {"messages": _MESSAGES, "max_tokens": _LIMIT},
    Endpoint.RESPONSES: {"input": _TEXT},
}
_MORE: dict[Endpoint, dict[str, object]] = {
    Endpoint.COMPLETIONS: {"max_tokens": _LIMIT, "seed": _SEED},
    Endpoint.CHAT: {"max_tokens": _LIMIT, "max_completion_tokens": _LIMIT, "seed": _SEED},
    Endpoint.MESSAGES: {},
    Endpoint.RESPONSES: {"max_output_tokens": _LIMIT},
}


@functools.cache
def openapi_document() -> bytes:
    """The document as JSON, OpenAPI 3.1."""
    shown = {
        "openapi": "3.1.0",
        "info": {"title": "pdproxy", "version": __version__},
        "paths": {endpoint.value: {"post": _generating(endpoint)} for endpoint in Endpoint}
        | {"/v1/models": {"get": {"responses": {"200": _described("The models."), "401": _ERROR}}}}
        | {path: {"get": {"responses": _ALIVE}} for path in ("/health", "/ready")},
    }
    return json.dumps(shown).encode()


def _described(text: str, **schema: object) -> dict[str, object]:
    return {"description": text, "content": {"application/json": {"schema": {"type": "object", **schema}}}}


_SAID = {"type": "object", "required": ["message", "type"], "properties": {"message": _TEXT, "type": _TEXT}}
_ERROR = _described("An error in OpenAI's shape.", required=["error"], properties={"error": _SAID})
_ALIVE = {"200": _described("Yes."), "503": _described("Not now.")}


def _generating(endpoint: Endpoint) -> dict[str, object]:
    needed = _NEEDED[endpoint]
    properties = {**_COMMON, **needed, **_MORE[endpoint]}
    schema = {"type": "object", "required": ["model", *needed], "properties": properties}
    answer = _described("The answer.")
    answer["content"] = {kind: {"schema": {}} for kind in ("application/json", "text/event-stream")}
    errors = {str(status): _ERROR for status in (400, 401, 404, 408, 413, 415, 422, 429, 500, 502, 503, 504)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": answer, **errors},
    }


_SERVING = (State.UP, State.PROBING, State.DOWN, State.DRAINING)


def model_list(snapshot: Snapshot) -> bytes:
    """OpenAI's list of models: those of the decode nodes, adapters included."""
    views = [view for view in snapshot.nodes if view.node.role is Role.DECODE and view.state in _SERVING]
    names = dict.fromkeys(name for view in views for name in _model_names(view) if name)
    return json.dumps({"object": "list", "data": [_model_card(name) for name in names]}).encode()


def model_card(snapshot: Snapshot, name: str) -> bytes | None:
    """One model's card; None when it is not served here."""
    data = json.loads(model_list(snapshot))["data"]
    found = next((card for card in data if card["id"] == name), None)
    return None if found is None else json.dumps(found).encode()


def _model_names(view: NodeView) -> tuple[str, ...]:
    return (view.node.model, *view.node.aliases)


def _model_card(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "pdproxy"}
