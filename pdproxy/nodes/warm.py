"""The first hand-over between two nodes costs a handshake of seconds; a tiny request pays for it before clients do."""

import json
import secrets
from collections.abc import Callable

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.ask import post
from pdproxy.nodes.node import Node
from pdproxy.request import Headers
from pdproxy.transport.port import Patience, Transport

PATIENCE = Patience(connect=5.0, headers=20.0, stall=20.0, whole=30.0)

_PROMPT = (1, 2, 3, 4)
"""Token ids that any vocabulary has; the prefill node drops the last one, so there must be several."""


def _unguessable() -> str:
    return secrets.token_urlsafe(16)


class WarmUp:
    """Sends one tiny request through a pair.

    Args:
        transport: the way to the nodes.
        headers: sent along (a credential that nodes ask for).
        new_id: makes unguessable hand-over ids.
    """

    def __init__(
        self,
        transport: Transport,
        headers: Headers = (),
        patience: Patience = PATIENCE,
        new_id: Callable[[], str] = _unguessable,
    ) -> None:
        self._transport = transport
        self._headers = headers
        self._patience = patience
        self._new_id = new_id

    async def pair(self, prefill: Node, decode: Node, model: str) -> None:
        """Prefill, hand over, decode one token. If the decode leg fails, the hand-over is released.

        Raises:
            NodeFault: either leg failed; the pair is merely cold then.
        """
        hand_over = self._new_id()
        ask = {"do_remote_decode": True, "do_remote_prefill": False, "pdproxy_hand_over": hand_over}
        ask |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        ticket = (await self._complete(prefill, model, list(_PROMPT), ask)).get("kv_transfer_params")
        if not isinstance(ticket, dict):
            raise NodeFault(Fault.NO_TICKET, f"{prefill.name} gave no ticket for the warm-up")
        try:
            await self._complete(decode, model, list(_PROMPT), ticket)
        except NodeFault:
            for rank in prefill.each_rank():
                await self._complete(prefill, model, [0], {"pdproxy_release": hand_over}, rank)
            raise

    async def _complete(
        self, node: Node, model: str, prompt: list[int], params: dict[str, object], rank: Headers = ()
    ) -> dict[str, object]:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
        url = f"{node.url}/v1/completions"
        headers = (*self._headers, *rank)
        status, answer = await post(self._transport, url, headers, json.dumps(body).encode(), self._patience)
        if status != 200:
            raise NodeFault(Fault.SERVER_ERROR, f"{node.name} answered {status} to the warm-up", status=status)
        return _object(answer)


def _object(body: bytes) -> dict[str, object]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise NodeFault(Fault.INVALID_BODY, "the answer to the warm-up is not JSON") from error
    if not isinstance(value, dict):
        raise NodeFault(Fault.INVALID_BODY, "the answer to the warm-up is no object")
    return value
