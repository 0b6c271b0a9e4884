"""The OpenAPI document of the clients' port: what the proxy itself promises. What else a body may hold is vLLM's."""

import functools
import json

from pdproxy import __version__
from pdproxy.request import Endpoint

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
_COMMON = {
    "model": _TEXT,
    "stream": {"type": "boolean"},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "seed": {"type": "integer"},
}
_OWN: dict[Endpoint, dict[str, object]] = {
    Endpoint.COMPLETIONS: {"prompt": _PROMPT},
    Endpoint.CHAT: {"messages": _MESSAGES},
    Endpoint.MESSAGES: {"messages": _MESSAGES},
    Endpoint.RESPONSES: {"input": _TEXT},
}


@functools.cache
def document() -> bytes:
    """The document as JSON, OpenAPI 3.1."""
    shown = {
        "openapi": "3.1.0",
        "info": {"title": "pdproxy", "version": __version__},
        "paths": {endpoint.value: {"post": _generating(endpoint)} for endpoint in Endpoint}
        | {"/v1/models": {"get": {"responses": {"200": _described("The models."), "401": _ERROR}}}}
        | {path: {"get": {"responses": _ALIVE}} for path in ("/health", "/ready")},
    }
    return json.dumps(shown).encode()


def _described(text: str) -> dict[str, object]:
    return {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}


_ERROR = _described("An error in OpenAI's shape.")
_ALIVE = {"200": _described("Yes."), "503": _described("Not now.")}


def _generating(endpoint: Endpoint) -> dict[str, object]:
    schema = {"type": "object", "required": ["model", *_OWN[endpoint]], "properties": {**_COMMON, **_OWN[endpoint]}}
    answer = _described("The answer.")
    answer["content"] = {kind: {"schema": {}} for kind in ("application/json", "text/event-stream")}
    errors = {str(status): _ERROR for status in (400, 401, 404, 408, 413, 415, 422, 429, 500, 502, 503, 504)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": answer, **errors},
    }
