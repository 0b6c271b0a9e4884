"""Tell a prefill node that nobody will read what a hand-over holds."""

from pdproxy.legs.judge import FAULT_BODY_BYTES, judge, leg_headers, outgoing_body
from pdproxy.nodes.node import Node
from pdproxy.request import Endpoint, Headers
from pdproxy.transport.port import Outgoing, Patience, Transport


async def release(
    transport: Transport, node: Node, model: str, hand_over: str, patience: Patience, headers: Headers = ()
) -> None:
    """Free the blocks of a hand-over; good before, during and after its prefill, and more than once.

    Args:
        transport: to the nodes.
        node: the prefill node that the hand-over was given to.
        model: a name that the node serves, as the client gave it.
        hand_over: the name given to `pdproxy.legs.body.prefill_body`.
        patience: the call's deadlines.
        headers: what the node wants to see, such as its credential.

    Raises:
        NodeFault: any fault; the lease's end frees the blocks then.
    """
    body = {"model": model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"pdproxy_release": hand_over}}
    request = Outgoing("POST", node.url + Endpoint.COMPLETIONS, leg_headers(headers), outgoing_body(body))
    incoming = await transport.send(request, patience)
    try:
        await judge(incoming)
        await incoming.read(FAULT_BODY_BYTES)
    finally:
        await incoming.aclose()
