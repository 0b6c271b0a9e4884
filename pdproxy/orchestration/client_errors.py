"""The errors that clients see when nothing more can be tried. No internal address gets into them."""

from pdproxy.clock import Clock
from pdproxy.errors import ClientError, Fault, NodeFault, PdproxyError
from pdproxy.failures import FAILURE_TABLE, Moment, Step
from pdproxy.observe.labels import Leg
from pdproxy.orchestration.response import ProxyResponse
from pdproxy.planning.plan import NoNode, UnknownModel
from pdproxy.request import Endpoint, Headers, header
from pdproxy.stream.errors import DONE
from pdproxy.stream.transcript import NotContinuable

RETRY_AFTER = "1"
"""Seconds; what a client is told to wait for where a node did not say."""
_JSON = "application/json"


class UpstreamErrorResponse(PdproxyError):
    """A node's own error answer is what the client gets."""

    def __init__(self, reply: ProxyResponse) -> None:
        super().__init__(f"a node answered {reply.status}")
        self.reply = reply


def final_error(leg: Leg, moment: Moment, step: Step, fault: NodeFault) -> ClientError | UpstreamErrorResponse:
    """The error that ends the request, by the final step of the fault's row."""
    if step is Step.ANSWER and fault.status is not None:
        if fault.body:
            return UpstreamErrorResponse(ProxyResponse(fault.status, _kept_headers(fault.headers), fault.body))
        return _upstream_error(fault.status, "The node refused the request without saying why.", fault.headers)
    return _upstream_error(
        FAILURE_TABLE[leg, moment, fault.fault].status, _MESSAGES[fault.fault].format(leg=leg), fault.headers
    )


def deadline_error() -> ClientError:
    """The whole request's deadline came."""
    return ClientError(504, "The request took longer than its deadline allows.", kind="timeout_error", code="deadline")


def unknown_model_error(error: UnknownModel) -> ClientError:
    """404, in OpenAI's words."""
    names = ", ".join(error.known) or "none"
    message = f"The model `{error.model}` does not exist. Served now: {names}."
    return ClientError(404, message, kind="NotFoundError", code="model_not_found", param="model")


def no_node_error(error: NoNode) -> ClientError:
    """503: nothing takes requests now."""
    message = f"No node for the model `{error.model}` takes requests now."
    return ClientError(
        503, message, kind="service_unavailable", code=str(error.reason), headers=(("retry-after", RETRY_AFTER),)
    )


def stream_broken_error(error: NodeFault | ClientError | UpstreamErrorResponse | NotContinuable) -> ClientError:
    """What the error event says about a stream that cannot go on."""
    if isinstance(error, ClientError):
        return error
    if isinstance(error, NodeFault):
        said = _MESSAGES[error.fault].format(leg=Leg.DECODE)
        message = f"{said} The answer so far is right; the rest could not be generated elsewhere."
    else:
        message = "The node stopped in the middle of its answer, and no other could continue it."
    return ClientError(502, message, kind="upstream_error", code="stream_broken")


def node_error_event(
    endpoint: Endpoint, error: NodeFault | ClientError | UpstreamErrorResponse | NotContinuable
) -> bytes | None:
    """The event by which a node itself reported its error, where there is one."""
    if not isinstance(error, NodeFault) or not error.body or b"\n" in error.body:
        return None
    if endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        return b"data: " + error.body + b"\n\n" + DONE
    return b"event: error\ndata: " + error.body + b"\n\n"


def as_client_fault(fault: NodeFault) -> NodeFault:
    """An error event with a 4xx code is the client's own error; everything else is what it is."""
    if fault.fault is Fault.ERROR_EVENT and fault.status is not None and fault.status < 500:
        return NodeFault(Fault.CLIENT_ERROR, fault.detail, status=fault.status, body=fault.body)
    return fault


def _kept_headers(headers: Headers) -> Headers:
    wait = header(headers, "retry-after")
    kind = ("content-type", header(headers, "content-type") or _JSON)
    return (kind,) if wait is None else (kind, ("retry-after", wait))


def _upstream_error(status: int, message: str, headers: Headers) -> ClientError:
    wait = header(headers, "retry-after") or (RETRY_AFTER if status in (429, 503) else None)
    kept = () if wait is None else (("retry-after", wait),)
    return ClientError(status, message, kind="upstream_error", code="node_failed", headers=kept)


_MESSAGES = {
    Fault.REFUSED: "No {leg} node could be reached.",
    Fault.RESET: "The connection to the {leg} node broke, and no other could take over.",
    Fault.HEADERS_TIMEOUT: "The {leg} node did not answer in time.",
    Fault.STALL: "The {leg} node stopped in the middle of its answer.",
    Fault.CLIENT_ERROR: "The {leg} node refused the request.",
    Fault.BUSY: "All {leg} nodes are busy.",
    Fault.SERVER_ERROR: "The {leg} node failed.",
    Fault.INVALID_BODY: "The {leg} node's answer could not be understood.",
    Fault.NO_TICKET: "The prefill node did not hand its work over.",
    Fault.ERROR_EVENT: "The {leg} node failed in the middle of its answer.",
}


EARLY = 0.01
"""Seconds that a timer may fire before its time: event loops count in milliseconds."""


def deadline_passed(clock: Clock, deadline: float) -> bool:
    """Whether it has come."""
    return clock.now() >= deadline - EARLY


def remaining_seconds(clock: Clock, deadline: float) -> float:
    """Seconds that are left.

    Raises:
        ClientError: 504 where none are.
    """
    if deadline_passed(clock, deadline):
        raise deadline_error()
    return deadline - clock.now()
