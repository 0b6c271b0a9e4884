"""Usage as it truly was, and nothing of the hand-over in it.

Prompt tokens were cached, or not, on the prefill node; what a decode node reports as cached is what it pulled.
Shapes as vLLM 0.32 writes them: completions and chat ``usage.prompt_tokens_details.cached_tokens``, responses
``usage.input_tokens_details.cached_tokens``, messages ``usage.cache_read_input_tokens`` (apart from input_tokens).
"""

from pdproxy.request import Endpoint
from pdproxy.stream.chunks import data_event, parse_object
from pdproxy.stream.sse import Event

TICKETS = ("kv_transfer_params", "ec_transfer_params")
_TICKET = b'_transfer_params":{'
FINAL_EVENTS = frozenset({b"message_delta", b"response.completed", b"response.incomplete", b"response.failed"})


def rewrite_answer(endpoint: Endpoint, answer: dict[str, object], cached_tokens: int | None) -> dict[str, object]:
    """A non-streamed answer as the client may see it: the true ``cached_tokens``, no ticket.

    Args:
        endpoint: which API.
        answer: from the decode node; left as it is.
        cached_tokens: the prefill node's, None where unknown or where the decode node computed the prompt itself.
    """
    seen = {**answer, **{key: None for key in TICKETS if key in answer}}
    if cached_tokens is not None and isinstance(usage := answer.get("usage"), dict):
        seen["usage"] = rewrite_usage(endpoint, usage, cached_tokens)
    return seen


def rewrite_usage(endpoint: Endpoint, usage: dict[str, object], cached_tokens: int) -> dict[str, object]:
    """A usage object with ``cached_tokens`` put where the endpoint has it."""
    if endpoint is Endpoint.MESSAGES:
        return _anthropic(usage, cached_tokens)
    key = "input_tokens_details" if endpoint is Endpoint.RESPONSES else "prompt_tokens_details"
    details = usage.get(key)
    return {**usage, key: {**(details if isinstance(details, dict) else {}), "cached_tokens": cached_tokens}}


def rewrite_event(endpoint: Endpoint, event: Event, data: bytes, cached_tokens: int | None) -> bytes:
    """An event of a stream as the client may see it; untouched bytes unless it ends the usage or holds a ticket.

    Raises:
        NodeFault: INVALID_BODY where such an event is no JSON object.
    """
    telling = cached_tokens is not None and b'"usage":' in data and b'"usage":null' not in data
    if not telling and _TICKET not in data:
        return event.raw
    payload = parse_object(data)
    seen = _rewrite_payload(endpoint, event, payload, cached_tokens)
    return event.raw if seen == payload else data_event(seen, event.name)


def _rewrite_payload(
    endpoint: Endpoint, event: Event, payload: dict[str, object], cached_tokens: int | None
) -> dict[str, object]:
    inner = payload.get("response")
    if isinstance(inner, dict):
        final = cached_tokens if event.name in FINAL_EVENTS else None
        return {**payload, "response": rewrite_answer(endpoint, inner, final)}
    final_chunk = payload.get("choices") == [] or event.name in FINAL_EVENTS
    return rewrite_answer(endpoint, payload, cached_tokens if final_chunk else None)


def _anthropic(usage: dict[str, object], cached_tokens: int) -> dict[str, object]:
    fresh, read = usage.get("input_tokens"), usage.get("cache_read_input_tokens")
    if not isinstance(fresh, int):
        return usage
    total = fresh + (read if isinstance(read, int) else 0)
    return {**usage, "input_tokens": max(0, total - cached_tokens), "cache_read_input_tokens": cached_tokens}
