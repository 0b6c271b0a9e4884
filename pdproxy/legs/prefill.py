"""The prefill leg: one token computed, a ticket brought back."""

import dataclasses

from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.judge import ANSWER_BYTES, json_object, judge, leg_headers, outgoing_body
from pdproxy.legs.tally import tally
from pdproxy.nodes.node import Node
from pdproxy.request import Endpoint, Headers, Json
from pdproxy.transport.port import Outgoing, Patience, Transport


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
    transport: Transport, node: Node, endpoint: Endpoint, body: Json, headers: Headers, patience: Patience
) -> PrefillAnswer:
    """Run the prefill leg to its end.

    Args:
        transport: to the nodes.
        node: a prefill node.
        endpoint: which API.
        body: from `pdproxy.legs.body.prefill_body`.
        headers: the client's end-to-end headers.
        patience: the leg's deadlines.

    Raises:
        NodeFault: any fault; NO_TICKET where the answer is good and carries none.
    """
    request = Outgoing("POST", node.url + endpoint, leg_headers(headers), outgoing_body(body))
    incoming = await transport.send(request, patience)
    try:
        await judge(incoming)
        return read_prefill(json_object(await incoming.read(ANSWER_BYTES)))
    finally:
        await incoming.aclose()


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
    told = tally(answer.get("usage"))
    return None if told is None else told.cached
