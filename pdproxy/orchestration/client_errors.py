"""The errors that clients see: their messages, how each endpoint writes them, and the outcome of a request that ends
with one. No internal address is in them."""

import asyncio
import dataclasses
from collections.abc import Callable

from pdproxy.errors import ClientError, Fault, NodeFault, PdproxyError
from pdproxy.failures import FAILURE_TABLE, Moment, Step
from pdproxy.legs.parse import unknown_model
from pdproxy.nodes.node import PoolState
from pdproxy.observe.labels import Leg, Outcome, Rejection
from pdproxy.orchestration.request_record import FinalError
from pdproxy.planning.plan_types import NoNode, UnknownModel
from pdproxy.request import Endpoint, Headers, header, write_json
from pdproxy.response import ProxyResponse
from pdproxy.stream.chunks import DONE_EVENT

RETRY_AFTER = "1"
"""Seconds that a client is asked to wait where the node gave no number."""


class UpstreamErrorResponse(PdproxyError):
    """A node's own error answer goes to the client."""

    def __init__(self, response: ProxyResponse) -> None:
        super().__init__(f"a node answered {response.status}")
        self.response = response


StreamError = NodeFault | ClientError | UpstreamErrorResponse
"""Errors that end a stream with an error event."""


def final_error(leg: Leg, moment: Moment, step: Step, fault: NodeFault) -> ClientError | UpstreamErrorResponse:
    """The error that ends the request, by the final step of the fault's row."""
    if step is Step.ANSWER and fault.status is not None:
        if fault.body:
            kind = () if header(fault.headers, "content-type") else (("content-type", "application/json"),)
            return UpstreamErrorResponse(ProxyResponse(fault.status, (*fault.headers, *kind), fault.body))
        return _upstream_error(fault.status, "The node refused the request without saying why.", fault.headers)
    return _upstream_error(FAILURE_TABLE[leg, moment, fault.fault].status, _message(leg, fault.fault), fault.headers)


def deadline_error() -> ClientError:
    """504."""
    return ClientError(504, "The request took longer than its deadline allows.", kind="timeout_error", code="deadline")


def shutting_down_error() -> ClientError:
    """The error for a request that still runs at the end of a shutdown's grace period."""
    return ClientError(
        503,
        "This server is shutting down, and the answer was not complete in time: ask again.",
        kind="service_unavailable",
        code="shutting_down",
        headers=(("retry-after", "1"),),
    )


@dataclasses.dataclass(eq=False, repr=False)
class TurnedAway(ClientError):
    """Our own 429: the request was turned away before it ran; ``limit`` says by which limit."""

    _: dataclasses.KW_ONLY
    limit: Rejection


def rejected_error(limit: Rejection, message: str, retry_after: int, *headers: tuple[str, str]) -> TurnedAway:
    """429, with the limit as the error's code; ``retry_after`` in seconds."""
    retry = ("retry-after", str(retry_after))
    return TurnedAway(429, message, kind="rate_limit_error", code=limit, headers=(retry, *headers), limit=limit)


def unknown_model_error(error: UnknownModel) -> ClientError:
    """404, in vLLM's words."""
    names = ", ".join(error.known) or "none"
    return unknown_model(f"The model `{error.model}` does not exist. Valid aliases: {names}.")


def only_model(pool_state: PoolState) -> str:
    """The model of a request that names none: the one that is served; "" while none is known.

    Raises:
        ClientError: 400: there are several.
    """
    models = pool_state.base_models
    if len(models) > 1:
        text = f"Several models are served here: name one of them in `model`: {', '.join(models)}."
        raise ClientError(400, text, param="model", code="invalid_value")
    return models[0] if models else ""


def no_node_error(error: NoNode) -> ClientError:
    """503: no node takes the request now."""
    model = f" for the model `{error.model}`" if error.model else ""
    message = f"No node{model} takes requests now."
    return ClientError(
        503, message, kind="service_unavailable", code=str(error.reason), headers=(("retry-after", RETRY_AFTER),)
    )


def stream_error_event(endpoint: Endpoint, error: StreamError) -> bytes:
    """The bytes that end a broken stream: the node's own error event where there is one, else `error_event`."""
    own = error.body if isinstance(error, NodeFault) else b""
    if not own or b"\n" in own:
        return error_event(endpoint, _stream_broken_error(error))
    return node_error_event(endpoint, own)


def node_error_event(endpoint: Endpoint, own: bytes) -> bytes:
    """A node's error, one line of JSON, as the event that ends a stream."""
    own = own.replace(b"\n", b" ")  # between the values of JSON; within a text it would be escaped
    if endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        return b"data: " + own + b"\n\n" + DONE_EVENT
    return b"event: error\ndata: " + own + b"\n\n"


def _stream_broken_error(error: BaseException) -> ClientError:
    if isinstance(error, ClientError):
        return error
    if isinstance(error, NodeFault):
        what = _message(Leg.DECODE, error.fault)
        message = f"{what} The answer so far is right; the rest could not be generated elsewhere."
    else:
        message = "The node stopped in the middle of its answer, and no other could continue it."
    return ClientError(502, message, kind="upstream_error", code="stream_broken")


BUG = "internal_error"
"""The code of an error of ours that nobody expected."""
NODE_ANSWERED = "node_error"
"""The code of an error that a node answered with, and that its client got as it was."""


def final_error_of(error: BaseException) -> FinalError:
    """For a request that ends before its answer has begun."""
    match error:
        case ClientError():
            code = error.code if isinstance(error.code, str) else error.kind
            limit = error.limit if isinstance(error, TurnedAway) else None
            return FinalError(error.status, code, error.message, limit)
        case UpstreamErrorResponse():
            return answered_with(error.response.status)
        case asyncio.CancelledError():
            return final_error_of(shutting_down_error())
        case _:
            return FinalError(500, BUG, f"{type(error).__name__}: {error}")


def answered_with(status: int) -> FinalError:
    """For a request whose node answered with an error of its own."""
    return FinalError(status, NODE_ANSWERED, f"The node answered {status}.")


def final_error_in_stream(error: BaseException) -> FinalError:
    """For a stream that ends in an error event."""
    shown = error if isinstance(error, ClientError) else _stream_broken_error(error)
    return final_error_of(shown)._replace(status=200)


def error_event(endpoint: Endpoint, error: ClientError) -> bytes:
    """An error after the first byte, and the stream's clean end.

    Completions and chat: ``data: {"error": …}``, then ``data: [DONE]``. Messages: ``event: error`` with Anthropic's
    ``{"type": "error", "error": {type, message}}``. Responses: ``event: error`` with OpenAI's flat error event.
    """
    if endpoint is Endpoint.MESSAGES:
        return b"event: error\ndata: " + error_body(endpoint, error) + b"\n\n"
    if endpoint is Endpoint.RESPONSES:
        flat = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + write_json(flat) + b"\n\n"
    return b"data: " + error.body() + b"\n\n" + DONE_EVENT


def error_body(endpoint: Endpoint, error: ClientError) -> bytes:
    """The JSON body of an error before the first byte, in the endpoint's shape; vLLM's own errors have its type."""
    if endpoint is not Endpoint.MESSAGES:
        return error.body()
    kind = ANTHROPIC_ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    if isinstance(error.code, int):
        kind = error.kind
    shape = {"type": "error", "error": {"type": kind, "message": error.message}}
    return write_json(shape)


ANTHROPIC_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
"""Anthropic's error types by status, from its API reference."""


def outcome_of(error: BaseException, left: Callable[[], bool]) -> Outcome:
    """How a request ended that raised an error."""
    match error:
        case TurnedAway():
            return Outcome.REJECTED
        case ClientError(status=status):
            return status_outcome(status)
        case UpstreamErrorResponse(response=response):
            return status_outcome(response.status)
        case asyncio.CancelledError():
            return cancelled_outcome(left)
        case _:
            return Outcome.FAILED


def cancelled_outcome(left: Callable[[], bool]) -> Outcome:
    """The outcome of a cancelled request: its client has left, or we gave it up at the end of a shutdown."""
    return Outcome.CLIENT_GONE if left() else Outcome.FAILED


def status_outcome(status: int) -> Outcome:
    """The outcome of a request that was answered with this status."""
    if status < 400:
        return Outcome.OK
    return Outcome.CLIENT_ERROR if status < 500 and status != 429 else Outcome.FAILED


def _upstream_error(status: int, message: str, headers: Headers) -> ClientError:
    wait = header(headers, "retry-after") or (RETRY_AFTER if status in (429, 503) else None)
    kept = [("retry-after", wait)] if wait is not None else []
    kept += [pair for pair in headers if pair[0] == "www-authenticate" and status == 401]
    return ClientError(status, message, kind="upstream_error", code="node_failed", headers=tuple(kept))


def _message(leg: Leg, fault: Fault) -> str:
    return _FAULT_MESSAGES[fault].format(role="prefill" if leg is Leg.PREFILL else "decode")


_FAULT_MESSAGES = {
    Fault.REFUSED: "No {role} node could be reached.",
    Fault.RESET: "The connection to the {role} node broke, and no other could take over.",
    Fault.HEADERS_TIMEOUT: "The {role} node did not answer in time.",
    Fault.STALL: "The {role} node stopped in the middle of its answer.",
    Fault.CLIENT_ERROR: "The {role} node refused the request.",
    Fault.NO_ROUTE: "The {role} node does not know how to resume a stream.",
    Fault.BUSY: "All {role} nodes are busy.",
    Fault.SERVER_ERROR: "The {role} node failed.",
    Fault.INVALID_BODY: "The {role} node's answer could not be understood.",
    Fault.NO_TICKET: "The prefill node did not hand its work over.",
    Fault.ABORTED: "The {role} node gave the answer up: it is shutting down, or cannot serve such a request.",
    Fault.ERROR_EVENT: "The {role} node failed in the middle of its answer.",
}
