"""Events of a node's stream: read, and rewritten for the client.

``find`` and not ``in`` looks for something in each event's bytes: CPython takes what stands left of ``in`` for a number
first, and writes the error that it is none, which costs five times as much as the search.
"""

import re

import msgspec

from pdproxy.errors import Fault, NodeFault
from pdproxy.request import Endpoint, Json, read_json, write_json
from pdproxy.stream.sse import Event, event_of
from pdproxy.usage import CacheUse, with_cache_use

DONE = b"[DONE]"
"""The data of the last event of completions and chat."""
DONE_EVENT = b"data: [DONE]\n\n"
HEAD = ("id", "object", "created", "model")
"""Fields that every event of an answer repeats."""
_OUTPUT = ("text", "token_ids", "finish_reason", "logprobs")
"""Fields of a choice that have what was generated."""
_CONTENT = ("content", "reasoning", "reasoning_content", "tool_calls")
"""Fields of a chat delta that have it; the other one is the role."""
TICKETS = frozenset({"kv_transfer_params", "ec_transfer_params"})
TICKET = b'_transfer_params":{'
"""Is in the data of an event that has one."""
TICKET_KEY = b'_transfer_params"'
"""Is in the bytes of such an event, whatever their layout."""
LONG_DATA = 64 * 1024
"""Bytes from which on parsing an event would delay others: only the ids of its prompt make it so long."""
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content|thinking)":"')
"""Begins the text of an event: of completions, chat or messages, and of a model that thinks."""
_NUMBERED = b'"sequence_number":'
_PROMPT_IDS = b'"prompt_token_ids":['
FINAL_EVENTS = frozenset({b"message_delta", b"response.completed", b"response.incomplete", b"response.failed"})


class Likeness:
    """An event that passed as it came, without its text: an event that differs in nothing else passes, too.

    Attributes:
        head: up to the text, the quote before it included.
        tail: what comes after the quote that ends the text.
    """

    __slots__ = ("_length", "_marked", "_text", "head", "tail")

    def __init__(self, head: bytes, tail: bytes, mark: bytes) -> None:
        self.head, self._text = head, len(head)
        self.tail, self._marked = tail, b'"' + tail + mark
        self._length = len(self._marked)

    @classmethod
    def of(cls, raw: bytes, mark: bytes = b"") -> "Likeness | None":
        """The likeness of an event that passed, with the mark that has to follow it.

        None where more than its text differs from event to event: lists (but ``choices``) of ids or log-probabilities,
        the numbers of responses. And where it has no text that can be told, or one with an escaped quote.
        """
        if raw.find(b"[", raw.find(b"[") + 1) >= 0 or raw.find(_NUMBERED) >= 0:
            return None
        found = _TEXT.search(raw)
        if found is None:
            return None
        text = found.end()
        end = raw.find(b'"', text)
        if raw[end - 1 : end] == b"\\":
            return None
        return cls(raw[:text], raw[end + 1 :], mark)

    def end_in(self, piece: bytes, start: int) -> int:
        """Where the event that begins at ``start`` ends, and the mark after it; 0 where it is not such an event.

        A text ends at the first quote: one with escaped quotes does not fit, which is not wrong, for it is looked at.
        """
        if not piece.startswith(self.head, start):
            return 0
        quote = piece.find(b'"', start + self._text)
        return quote + self._length if piece.startswith(self._marked, quote) else 0


def parse_object(data: bytes) -> dict[str, object]:
    """A JSON object; anything else is an INVALID_BODY fault."""
    try:
        value = read_json(data)
    except (ValueError, RecursionError) as error:
        raise NodeFault(Fault.INVALID_BODY, f"an event of the stream is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise NodeFault(Fault.INVALID_BODY, "an event of the stream is not a JSON object")
    return value


def short_event_of(raw: bytes) -> Event:
    """One whole event, read, with null in its data in the place of a long prompt's ids.

    To copy some megabytes, or to search them, takes milliseconds each time, in which no other stream moves: so this
    comes first. What is looked for cannot stand inside a JSON string, where quotes are escaped.
    """
    if len(raw) <= LONG_DATA:
        return compact(event_of(raw))
    begin = raw.find(_PROMPT_IDS) + len(_PROMPT_IDS)
    end = raw.find(b"]", begin)
    if begin < len(_PROMPT_IDS) or end - begin < LONG_DATA:
        return compact(event_of(raw))
    if any(raw.find(mark, begin, end) >= 0 for mark in (b'"', b"[", b"{")):  # no list of numbers
        return event_of(raw)
    return msgspec.structs.replace(event_of(raw[: begin - 1] + b"null" + raw[end + 1 :]), raw=raw, shortened=True)


def compact(event: Event) -> Event:
    """The same event, with the data as vLLM writes JSON: without blanks between values, which are left as they are.

    What is looked for in data is looked for in this layout. The event's own bytes do not change.
    """
    if event.data is None or event.data == DONE:
        return event
    try:
        data = msgspec.json.format(event.data, indent=-1)
    except msgspec.MsgspecError:  # no JSON: whoever has to read it says so
        return event
    return event if data == event.data else msgspec.structs.replace(event, data=data)


def choices_of(payload: Json) -> list[dict[str, object]]:
    """The choices of an answer or of an event's payload."""
    choices = payload.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def data_event(payload: object, name: bytes = b"") -> bytes:
    """An event of one data line."""
    head = b"event: " + name + b"\n" if name else b""
    return head + b"data: " + write_json(payload) + b"\n\n"


def rewrite_answer(endpoint: Endpoint, answer: dict[str, object], cache_use: CacheUse | None) -> dict[str, object]:
    """A non-streamed answer (or an event's payload) as the client may see it: no ticket, and of the cache the truth.

    ``cache_use`` is the prefill node's: None where unknown, or where the decode node computed the prompt itself.
    """
    seen = dict(answer)
    for key in TICKETS.intersection(answer):
        seen[key] = None
    if cache_use is not None and isinstance(usage := answer.get("usage"), dict):
        seen["usage"] = with_cache_use(endpoint, usage, cache_use)
    return seen


def rewrite_event(endpoint: Endpoint, event: Event, data: bytes, cache_use: CacheUse | None) -> bytes:
    """An event as the client may see it; untouched bytes unless it has the final usage or a ticket."""
    has_usage = cache_use is not None and data.find(b'"usage":') >= 0 and data.find(b'"usage":null') < 0
    if not has_usage and data.find(TICKET) < 0:
        return event.raw
    whole = (event_of(event.raw).data or b"") if event.shortened else data
    payload = parse_object(whole)
    seen = _rewrite_payload(endpoint, event, payload, cache_use)
    return event.raw if seen == payload else data_event(seen, event.name)


def _rewrite_payload(
    endpoint: Endpoint, event: Event, payload: dict[str, object], cache_use: CacheUse | None
) -> dict[str, object]:
    final_event = event.name in FINAL_EVENTS
    inner = payload.get("response")
    if isinstance(inner, dict):
        return {**payload, "response": rewrite_answer(endpoint, inner, cache_use if final_event else None)}
    final_chunk = payload.get("choices") == [] or final_event
    return rewrite_answer(endpoint, payload, cache_use if final_chunk else None)


def head_of(chunk: Json) -> dict[str, object]:
    """The fields that every event of a chunk's answer repeats."""
    return {key: chunk[key] for key in HEAD if key in chunk}


def has_output(endpoint: Endpoint, chunk: Json) -> bool:
    """Whether a chunk of completions or chat has something generated, and not only a role or the prompt's ids."""
    for choice in choices_of(chunk):
        delta = choice.get("delta") if endpoint is Endpoint.CHAT else None
        if any(map(choice.get, _OUTPUT)) or (isinstance(delta, dict) and any(map(delta.get, _CONTENT))):
            return True
    return False


def adopted(endpoint: Endpoint, chunk: Json, head: Json, cache_use: CacheUse | None) -> bytes:
    """A chunk of an answer that was asked for anew, as the client may see it: a part of the answer that began with
    ``head``, without what only a first event has."""
    part = {**chunk, **head}
    for holder in (part, *choices_of(chunk)):
        holder |= {key: None for key in ("prompt_token_ids", "prompt_text") if key in holder}
    return data_event(rewrite_answer(endpoint, part, None if chunk.get("choices") else cache_use))
