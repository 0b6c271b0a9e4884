"""What a node's answer means: good, or which `Fault`."""

import json

from pdproxy.errors import Fault, NodeFault
from pdproxy.request import Headers, header
from pdproxy.transport.port import Incoming

FAULT_BODY_BYTES = 64 * 1024
"""How much of an error's body is kept for the client."""
ANSWER_BYTES = 256 * 1024 * 1024
"""The longest answer that is read whole: token ids and log-probabilities of a long prompt fit."""
KEPT_HEADERS = ("retry-after", "content-type", "www-authenticate")


async def judge(incoming: Incoming) -> Incoming:
    """Pass a 2xx on; anything else is a fault, and the response is closed.

    Raises:
        NodeFault: CLIENT_ERROR, BUSY, SERVER_ERROR or INVALID_BODY (neither 2xx nor an error), with a bounded body;
            or what reading it raised.
    """
    if 200 <= incoming.status < 300:
        return incoming
    try:
        body = await _bounded(incoming)
    finally:
        await incoming.aclose()
    kept = tuple((name, value) for name, value in incoming.headers if name in KEPT_HEADERS)
    fault = fault_of(incoming.status, incoming.headers)
    raise NodeFault(fault, f"status {incoming.status}", status=incoming.status, body=body, headers=kept)


def fault_of(status: int, headers: Headers) -> Fault:
    """The row of the failure table for a status that is not 2xx."""
    if status == 429 or (status == 503 and header(headers, "retry-after") is not None):
        return Fault.BUSY
    if 400 <= status < 500:
        return Fault.CLIENT_ERROR
    return Fault.SERVER_ERROR if 500 <= status < 600 else Fault.INVALID_BODY


async def _bounded(incoming: Incoming) -> bytes:
    kept = b""
    async for chunk in incoming.chunks():
        kept += chunk
        if len(kept) > FAULT_BODY_BYTES:
            return b""  # half an error body is no error body
    return kept


def json_object(raw: bytes) -> dict[str, object]:
    """A JSON object.

    Raises:
        NodeFault: INVALID_BODY.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise NodeFault(Fault.INVALID_BODY, f"the answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise NodeFault(Fault.INVALID_BODY, f"the answer is a JSON {type(value).__name__}, not an object")
    return value


def outgoing_body(body: object) -> bytes:
    """The bytes of a leg's body: ASCII, so that lone surrogates of a client's text survive."""
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def leg_headers(headers: Headers) -> Headers:
    """A client's headers with what the leg's own body needs."""
    own = ("content-type", "accept", "accept-encoding")
    kept = tuple((name, value) for name, value in headers if name not in own)
    return (*kept, ("content-type", "application/json"), ("accept-encoding", "identity"))
