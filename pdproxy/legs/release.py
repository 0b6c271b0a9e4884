"""Tell a prefill node that nobody will read what a hand-over holds."""

import asyncio

from pdproxy.legs.judge import FAULT_BODY_BYTES, judge, leg_headers, outgoing_body
from pdproxy.nodes.node import Node
from pdproxy.request import Endpoint, Headers
from pdproxy.transport.port import Outgoing, Patience, Transport


async def release(
    transport: Transport, node: Node, model: str, hand_over: str, patience: Patience, headers: Headers = ()
) -> None:
    """Free the blocks of a hand-over; good before, during and after its prefill, and more than once.

    The node chose the rank of the prefill by itself and did not say which. A hand-over's name is known to nobody else,
    so every rank is told: those that do not have it have nothing to free.

    Args:
        transport: to the nodes.
        node: the prefill node that the hand-over was given to.
        model: a name that the node serves, as the client gave it.
        hand_over: the name given to `pdproxy.legs.body.prefill_body`.
        patience: the deadlines of each call.
        headers: what the node wants to see, such as its credential.

    Raises:
        NodeFault: any fault, after all ranks were told; the lease's end frees the blocks then.
    """
    body = {"model": model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"pdproxy_release": hand_over}}
    url, raw = node.url + Endpoint.COMPLETIONS, outgoing_body(body)
    requests = [Outgoing("POST", url, (*leg_headers(headers), *rank), raw) for rank in node.each_rank()]
    ends = await asyncio.gather(*(_tell(transport, request, patience) for request in requests), return_exceptions=True)
    for failure in ends:
        if failure is not None:
            raise failure


async def _tell(transport: Transport, request: Outgoing, patience: Patience) -> None:
    incoming = await transport.send(request, patience)
    try:
        await judge(incoming)
        await incoming.read(FAULT_BODY_BYTES)
    finally:
        await incoming.aclose()
