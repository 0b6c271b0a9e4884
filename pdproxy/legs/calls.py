"""The HTTP calls to nodes: the prefill leg, the decode leg, the release of a hand-over."""

import asyncio
import dataclasses
import json

from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.usage import read_usage
from pdproxy.nodes.node import Node
from pdproxy.request import Endpoint, Headers, Json, header
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts, Transport, read_to_end

FAULT_BODY_BYTES = 64 * 1024
"""How much of an error's body is kept for the client."""
ANSWER_BYTES = 256 * 1024 * 1024
"""The longest answer that is read whole: token ids and log-probabilities of a long prompt fit."""
KEPT_HEADERS = ("retry-after", "content-type", "www-authenticate")


async def raise_for_status(response: HttpResponse) -> HttpResponse:
    """Pass a 2xx on; anything else is a fault, and the response is closed.

    Raises:
        NodeFault: CLIENT_ERROR, BUSY, SERVER_ERROR or INVALID_BODY (neither 2xx nor an error), with a bounded body;
            or what reading it raised.
    """
    if 200 <= response.status < 300:
        return response
    try:
        body = await _bounded(response)
    finally:
        await response.aclose()
    kept = tuple((name, value) for name, value in response.headers if name in KEPT_HEADERS)
    fault = fault_of(response.status, response.headers)
    raise NodeFault(fault, f"status {response.status}", status=response.status, body=body, headers=kept)


def fault_of(status: int, headers: Headers) -> Fault:
    """The row of the failure table for a status that is not 2xx."""
    if status == 429 or (status == 503 and header(headers, "retry-after") is not None):
        return Fault.BUSY
    if 400 <= status < 500:
        return Fault.CLIENT_ERROR
    return Fault.SERVER_ERROR if 500 <= status < 600 else Fault.INVALID_BODY


async def _bounded(response: HttpResponse) -> bytes:
    kept = b""
    async for chunk in response:
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


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """What a prefill leg brought.

    Attributes:
        ticket: opaque; goes to the decode leg unchanged.
        cached_tokens: prompt tokens that the prefill node had cached; None where it does not say.
    """

    ticket: Json
    cached_tokens: int | None = None


async def prefill(
    transport: Transport, node: Node, endpoint: Endpoint, body: Json, headers: Headers, timeouts: Timeouts
) -> PrefillAnswer:
    """Run the prefill leg to its end.

    Args:
        transport: to the nodes.
        node: a prefill node.
        endpoint: which API.
        body: from `pdproxy.legs.body.prefill_body`.
        headers: the client's end-to-end headers.
        timeouts: the leg's deadlines.

    Raises:
        NodeFault: any fault; NO_TICKET where the answer is good and carries none.
    """
    request = HttpRequest("POST", node.url + endpoint, leg_headers(headers), outgoing_body(body))
    response = await transport.send(request, timeouts)
    try:
        await raise_for_status(response)
        return read_prefill(json_object(await read_to_end(response, ANSWER_BYTES)))
    finally:
        await response.aclose()


def read_prefill(answer: Json) -> PrefillAnswer:
    """The answer's meaning.

    Raises:
        NodeFault: NO_TICKET.
    """
    ticket = answer.get("kv_transfer_params")
    if not isinstance(ticket, dict) or not ticket:
        raise NodeFault(Fault.NO_TICKET, "the prefill answer carries no kv_transfer_params")
    return PrefillAnswer(ticket, _cached(answer, ticket))


def _cached(answer: Json, ticket: Json) -> int | None:
    """As the scheduler writes it beside the ticket; usage may say it too."""
    beside = ticket.get("remote_prefill_cached_tokens")
    if isinstance(beside, int):
        return beside
    told = read_usage(answer.get("usage"))
    return None if told is None else told.cached


EVENT_STREAM = "text/event-stream"


async def decode(
    transport: Transport, node: Node, endpoint: Endpoint, body: Json, headers: Headers, timeouts: Timeouts
) -> HttpResponse:
    """Start the decode leg. Whoever gets the response must close it.

    Args:
        transport: to the nodes.
        node: a decode node.
        endpoint: which API.
        body: from `pdproxy.legs.body.decode_body`.
        headers: the client's end-to-end headers.
        timeouts: the leg's deadlines.

    Raises:
        NodeFault: any fault up to the head; INVALID_BODY where a stream was asked and something else came.
    """
    request = HttpRequest("POST", node.url + endpoint, leg_headers(headers), outgoing_body(body))
    response = await raise_for_status(await transport.send(request, timeouts))
    kind = header(response.headers, "content-type") or ""
    if bool(body.get("stream")) == kind.startswith(EVENT_STREAM):
        return response
    await response.aclose()
    raise NodeFault(Fault.INVALID_BODY, f"asked for stream={body.get('stream')} and got {kind or 'no content type'}")


async def read_answer(response: HttpResponse, limit: int = ANSWER_BYTES) -> dict[str, object]:
    """A non-streamed answer, whole; closes the response.

    Raises:
        NodeFault: RESET, STALL, or INVALID_BODY where it is not a JSON object or longer than ``limit`` bytes.
    """
    try:
        return json_object(await read_to_end(response, limit))
    finally:
        await response.aclose()


async def release(
    transport: Transport, node: Node, model: str, hand_over: str, timeouts: Timeouts, headers: Headers = ()
) -> None:
    """Free the blocks of a hand-over; good before, during and after its prefill, and more than once.

    The node chose the rank of the prefill by itself and did not say which. A hand-over's name is known to nobody else,
    so every rank is told: those that do not have it have nothing to free.

    Args:
        transport: to the nodes.
        node: the prefill node that the hand-over was given to.
        model: a name that the node serves, as the client gave it.
        hand_over: the name given to `pdproxy.legs.body.prefill_body`.
        timeouts: the deadlines of each call.
        headers: what the node wants to see, such as its credential.

    Raises:
        NodeFault: any fault, after all ranks were told; the lease's end frees the blocks then.
    """
    body = {"model": model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"pdproxy_release": hand_over}}
    url, raw = node.url + Endpoint.COMPLETIONS, outgoing_body(body)
    requests = [HttpRequest("POST", url, (*leg_headers(headers), *rank), raw) for rank in node.each_rank()]
    ends = await asyncio.gather(*(_tell(transport, request, timeouts) for request in requests), return_exceptions=True)
    for failure in ends:
        if failure is not None:
            raise failure


async def _tell(transport: Transport, request: HttpRequest, timeouts: Timeouts) -> None:
    response = await transport.send(request, timeouts)
    try:
        await raise_for_status(response)
        await read_to_end(response, FAULT_BODY_BYTES)
    finally:
        await response.aclose()
