"""The decode leg: the answer's head judged, its body left to whoever relays it."""

from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.judge import ANSWER_BYTES, json_object, judge, leg_headers, outgoing_body
from pdproxy.nodes.node import Node
from pdproxy.request import Endpoint, Headers, Json, header
from pdproxy.transport.port import Incoming, Outgoing, Patience, Transport

EVENT_STREAM = "text/event-stream"


async def decode(
    transport: Transport, node: Node, endpoint: Endpoint, body: Json, headers: Headers, patience: Patience
) -> Incoming:
    """Start the decode leg. Whoever gets the response must close it.

    Args:
        transport: to the nodes.
        node: a decode node.
        endpoint: which API.
        body: from `pdproxy.legs.body.decode_body`.
        headers: the client's end-to-end headers.
        patience: the leg's deadlines.

    Raises:
        NodeFault: any fault up to the head; INVALID_BODY where a stream was asked and something else came.
    """
    request = Outgoing("POST", node.url + endpoint, leg_headers(headers), outgoing_body(body))
    incoming = await judge(await transport.send(request, patience))
    kind = header(incoming.headers, "content-type") or ""
    if bool(body.get("stream")) == kind.startswith(EVENT_STREAM):
        return incoming
    await incoming.aclose()
    raise NodeFault(Fault.INVALID_BODY, f"asked for stream={body.get('stream')} and got {kind or 'no content type'}")


async def read_answer(incoming: Incoming, limit: int = ANSWER_BYTES) -> dict[str, object]:
    """A non-streamed answer, whole; closes the response.

    Raises:
        NodeFault: RESET, STALL, or INVALID_BODY where it is not a JSON object or longer than ``limit`` bytes.
    """
    try:
        return json_object(await incoming.read(limit))
    finally:
        await incoming.aclose()
