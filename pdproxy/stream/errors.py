"""An error after the first byte: an event that the endpoint's clients know, then a clean end."""

import json

from pdproxy.errors import ClientError
from pdproxy.request import Endpoint

DONE = b"data: [DONE]\n\n"


def error_event(endpoint: Endpoint, error: ClientError) -> bytes:
    """The bytes that end a broken stream.

    Completions and chat: ``data: {"error": …}``, then ``data: [DONE]``. Messages: ``event: error`` with Anthropic's
    ``{"type": "error", "error": {type, message}}``. Responses: ``event: error`` with OpenAI's flat error event.
    """
    if endpoint is Endpoint.MESSAGES:
        return _named({"type": "error", "error": {"type": _anthropic(error.status), "message": error.message}})
    if endpoint is Endpoint.RESPONSES:
        return _named({"type": "error", "code": error.code, "message": error.message, "param": error.param})
    return b"data: " + error.body() + b"\n\n" + DONE


def error_body(endpoint: Endpoint, error: ClientError) -> bytes:
    """The JSON body of an error before the first byte, in the endpoint's shape."""
    if endpoint is Endpoint.MESSAGES:
        shape = {"type": "error", "error": {"type": _anthropic(error.status), "message": error.message}}
        return json.dumps(shape, ensure_ascii=False).encode()
    return error.body()


def _named(payload: dict[str, object]) -> bytes:
    return b"event: error\ndata: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def _anthropic(status: int) -> str:
    """Anthropic's error types by status, from its API reference."""
    names = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        529: "overloaded_error",
    }
    return names.get(status, "invalid_request_error" if status < 500 else "api_error")
