"""The prefill leg: one token computed, a ticket brought back."""

import dataclasses

from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.judge import ANSWER_BYTES, json_object, judge, leg_headers, outgoing_body
from pdproxy.nodes.node import Node
from pdproxy.request import Endpoint, Headers, Json
from pdproxy.transport.port import Outgoing, Patience, Transport


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """What a prefill leg brought.

    Attributes:
        ticket: opaque; goes to the decode leg unchanged.
        cached_tokens: prompt tokens that the prefill node had cached; None where it does not say.
        prompt_tokens: the prompt's length in tokens; None where the node does not say.
        prompt_token_ids: only where ``return_token_ids`` was in the body.
    """

    ticket: Json
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None


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
    return PrefillAnswer(ticket, _cached(answer, ticket), _prompt_tokens(answer), _ids(answer))


def _cached(answer: Json, ticket: Json) -> int | None:
    # The scheduler writes this key beside the ticket; usage needs --enable-prompt-tokens-details.
    told = _int(ticket.get("remote_prefill_cached_tokens"))
    usage = _dict(answer.get("usage"))
    details = _dict(usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
    return told if told is not None else _int(details.get("cached_tokens", usage.get("cache_read_input_tokens")))


def _prompt_tokens(answer: Json) -> int | None:
    usage = _dict(answer.get("usage"))
    if "prompt_tokens" in usage:
        return _int(usage["prompt_tokens"])
    fresh = _int(usage.get("input_tokens"))
    if fresh is None or "input_tokens_details" in usage:
        return fresh
    # Anthropic counts what was cached apart from input_tokens.
    apart = (usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens"))
    return fresh + sum(_int(part) or 0 for part in apart)


def _ids(answer: Json) -> tuple[int, ...] | None:
    choices = answer.get("choices")
    first = _dict(choices[0]) if isinstance(choices, list) and choices else {}
    ids = answer.get("prompt_token_ids") or first.get("prompt_token_ids")
    return tuple(ids) if isinstance(ids, list) else None


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
