"""Events of a node's stream: read by a JSON parser or without one, and rewritten for the client.

``find`` and not ``in`` looks for something in each event's bytes: CPython takes what stands left of ``in`` for a number
first, and writes the error that it is none, which costs five times as much as the search.
"""

import dataclasses
import re
from array import array
from typing import Any, NamedTuple, TypeVar

import msgspec

from pdproxy.errors import Fault, NodeFault
from pdproxy.raw_json import IdList
from pdproxy.request import Endpoint, Json, NotContinuableReason, read_json, write_json
from pdproxy.stream.sse import Event, event_of
from pdproxy.usage import with_cached_tokens

Kind = TypeVar("Kind")
DONE = b"[DONE]"
"""The data of the last event of completions and chat."""
DONE_EVENT = b"data: [DONE]\n\n"
HEAD = ("id", "object", "created", "model")
"""What every event of an answer repeats."""
PARSED = {
    "reasoning": NotContinuableReason.REASONING,
    "reasoning_content": NotContinuableReason.REASONING,
    "tool_calls": NotContinuableReason.TOOL_CALLS,
}
"""Fields of a chat delta that a node's parsers filled: their state cannot be handed to another node."""
TICKETS = ("kv_transfer_params", "ec_transfer_params")
TICKET = b'_transfer_params":{'
"""Is in the data of an event that has one."""
TICKET_KEY = b'_transfer_params"'
"""Is in the bytes of such an event, whatever their layout."""
_IDS_KEY, _ID_LIST = b'token_ids":', re.compile(rb"\s*+\[[\d,\s]*+\]")
LONG_DATA = 64 * 1024
"""Bytes from which on parsing an event would delay others: only the ids of its prompt make it so long."""
_PROMPT_IDS = b'"prompt_token_ids":['
FINAL_EVENTS = frozenset({b"message_delta", b"response.completed", b"response.incomplete", b"response.failed"})


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
    """One whole event, read, with the ids of a long prompt beside its data, and null in their place.

    To copy some megabytes, or to search them, takes milliseconds each time, in which no other stream moves: so this
    comes first. What is looked for cannot stand inside a JSON string, where quotes are escaped.
    """
    begin = raw.find(_PROMPT_IDS) + len(_PROMPT_IDS) if len(raw) > LONG_DATA else 0
    end = raw.find(b"]", begin)
    if begin < len(_PROMPT_IDS) or end - begin < LONG_DATA:
        return compact(event_of(raw))
    ids = memoryview(raw)[begin:end]
    if any(bytes(ids[at : at + LONG_DATA]).translate(None, b"0123456789,") for at in range(0, len(ids), LONG_DATA)):
        return event_of(raw)
    short = event_of(raw[: begin - 1] + b"null" + raw[end + 1 :])
    return Event(raw, short.name, short.data, IdList(ids))


def compact(event: Event) -> Event:
    """The same event, with the data as vLLM writes JSON: without blanks between values, which are left as they are.

    What is looked for in data is looked for in this layout. The event's own bytes do not change.
    """
    if event.data is None or event.data == DONE:
        return event
    try:
        return Event(event.raw, event.name, msgspec.json.format(event.data, indent=-1), event.prompt_ids)
    except msgspec.MsgspecError:  # no JSON: whoever has to read it says so
        return event


def choices_of(payload: Json) -> list[dict[str, object]]:
    """The choices of an answer or of an event's payload."""
    choices = payload.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def data_event(payload: object, name: bytes = b"") -> bytes:
    """An event of one data line."""
    head = b"event: " + name + b"\n" if name else b""
    return head + b"data: " + write_json(payload) + b"\n\n"


def rewrite_answer(endpoint: Endpoint, answer: dict[str, object], cached_tokens: int | None) -> dict[str, object]:
    """A non-streamed answer (or an event's payload) as the client may see it: no ticket, the true ``cached_tokens``.

    ``cached_tokens`` are the prefill node's: None where unknown, or where the decode node computed the prompt itself.
    """
    seen = {**answer, **{key: None for key in TICKETS if key in answer}}
    if cached_tokens is not None and isinstance(usage := answer.get("usage"), dict):
        seen["usage"] = with_cached_tokens(endpoint, usage, cached_tokens)
    return seen


def rewrite_event(endpoint: Endpoint, event: Event, data: bytes, cached_tokens: int | None) -> bytes:
    """An event as the client may see it; untouched bytes unless it has the final usage or a ticket."""
    has_usage = cached_tokens is not None and data.find(b'"usage":') >= 0 and data.find(b'"usage":null') < 0
    if not has_usage and data.find(TICKET) < 0:
        return event.raw
    whole = data if event.prompt_ids is None else event_of(event.raw).data or b""
    payload = parse_object(whole)
    seen = _rewrite_payload(endpoint, event, payload, cached_tokens)
    return event.raw if seen == payload else data_event(seen, event.name)


def _rewrite_payload(
    endpoint: Endpoint, event: Event, payload: dict[str, object], cached_tokens: int | None
) -> dict[str, object]:
    final_event = event.name in FINAL_EVENTS
    inner = payload.get("response")
    if isinstance(inner, dict):
        return {**payload, "response": rewrite_answer(endpoint, inner, cached_tokens if final_event else None)}
    final_chunk = payload.get("choices") == [] or final_event
    return rewrite_answer(endpoint, payload, cached_tokens if final_chunk else None)


def without_ids(event: bytes) -> bytes:
    """An event with null in the place of token ids, those of the prompt too.

    The key cannot stand inside a JSON string: its quotes would be escaped.
    """
    kept, start = [], 0
    while (key := event.find(_IDS_KEY, start)) >= 0:
        end = key + len(_IDS_KEY)
        kept.append(event[start:end])
        ids = _ID_LIST.match(event, end) if event.endswith((b'"', b'"prompt_'), 0, key) else None
        start = end if ids is None else ids.end()
        kept.append(b"" if ids is None else b"null")
    return b"".join((*kept, event[start:])) if kept else event


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkChoice:
    """One entry of ``choices``.

    Attributes:
        raw: the entry.
        content: where it has its text, under ``key``: of chat the delta, of completions the entry itself.
        parsed: what a node's parser made of the text.
    """

    raw: dict[str, object]
    content: dict[str, object]
    key: str
    index: int
    text: str
    token_ids: list[int] | None
    finish: str | None
    logprobs: dict[str, object] | None
    parsed: NotContinuableReason | None

    @classmethod
    def read(cls, endpoint: Endpoint, raw: dict[str, object]) -> "ChunkChoice":
        """The meaning of an entry; fields of a wrong type count as missing."""
        content, key = raw, "text"
        if endpoint is not Endpoint.COMPLETIONS:
            content, key = _typed(raw.get("delta"), dict) or {}, "content"
        return cls(
            raw,
            content,
            key,
            index=_typed(raw.get("index"), int) or 0,
            text=_typed(content.get(key), str) or "",
            token_ids=_typed(raw.get("token_ids"), list),
            finish=_typed(raw.get("finish_reason"), str),
            logprobs=_typed(raw.get("logprobs"), dict),
            parsed=next((reason for field, reason in PARSED.items() if content.get(field)), None),
        )

    @property
    def has_output(self) -> bool:
        """Something generated is in it, not only a role."""
        return bool(self.text or self.token_ids or self.parsed or self.finish)

    @property
    def empty(self) -> bool:
        """Nothing but token ids."""
        return not self.content and self.finish is None and self.logprobs is None

    def put_text(self, text: str) -> None:
        """Replace the text, where there is any."""
        if self.key in self.content:
            self.content[self.key] = text

    def shift_offsets(self, base: int) -> int:
        """Move the text offsets of log-probabilities by ``base``; where the next token's text begins, 0 if unknown."""
        logprobs: dict[str, object] = self.logprobs or {}
        offsets, tokens = logprobs.get("text_offset"), logprobs.get("tokens")
        if not (isinstance(offsets, list) and isinstance(tokens, list) and offsets and tokens):
            return 0
        logprobs["text_offset"] = [offset + base for offset in offsets]
        return int(offsets[-1]) + base + len(str(tokens[-1]))


def _typed(value: object, kind: type[Kind]) -> Kind | None:
    return value if isinstance(value, kind) else None


class Chunk:
    """The payload of one data event of completions or chat. Changing it changes what `encode` gives."""

    def __init__(self, endpoint: Endpoint, payload: dict[str, object]) -> None:
        self._endpoint = endpoint
        self.payload = payload
        self.choices = [ChunkChoice.read(endpoint, raw) for raw in choices_of(payload)]

    def take_prompt_token_ids(self) -> "array[int] | None":
        """Chat has them beside the choices, completions inside. They are not in this chunk from then on: of a first
        one something is kept as long as its stream lasts."""
        holders = (self.payload, *(choice.raw for choice in self.choices))
        found = next((holder for holder in holders if isinstance(holder.get("prompt_token_ids"), list)), None)
        if found is None:
            return None
        ids: Any = found["prompt_token_ids"]
        found["prompt_token_ids"] = None
        try:
            return array("I", ids)
        except (TypeError, OverflowError):
            return None

    def head(self) -> "Chunk":
        """What every event of its answer repeats."""
        return Chunk(self._endpoint, {key: value for key, value in self.payload.items() if key in HEAD})

    @property
    def empty(self) -> bool:
        """There are choices, and all are `ChunkChoice.empty`."""
        return bool(self.choices) and all(choice.empty for choice in self.choices)

    @property
    def usage(self) -> dict[str, object] | None:
        return _typed(self.payload.get("usage"), dict)

    def adopt(self, first: "Chunk") -> None:
        """Become part of the answer that began with ``first``: take its id, and drop what only a first event has."""
        self.payload |= {key: first.payload[key] for key in ("id", "created", "model") if key in first.payload}
        for holder in (self.payload, *(choice.raw for choice in self.choices)):
            holder |= {key: None for key in ("prompt_token_ids", "prompt_text") if key in holder}

    def drop_token_ids(self) -> None:
        """Leave out token ids, as vLLM writes it where they were not asked for."""
        for choice in self.choices:
            if "token_ids" in choice.raw:
                choice.raw["token_ids"] = None

    def encode(self) -> bytes:
        """The event's bytes."""
        return data_event(self.payload)

    def usage_event(self, usage: dict[str, object]) -> bytes:
        """A final usage event of the answer that this chunk belongs to."""
        kept = {key: value for key, value in self.payload.items() if key in HEAD}
        return data_event({**kept, "choices": [], "usage": usage})


_WORD = rb'"[^"\\\x00-\x1f]*+"'
_EVENT_HEAD = (
    rb'data: \{"id":' + _WORD + rb',"object":' + _WORD + rb',"created":\d++,"model":' + _WORD
    + rb',"choices":\[\{"index":(\d++),'
)  # fmt: skip
_STRING = rb'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"'
_CONTENT = rb'(?:"delta":\{"content":' + _STRING + rb'\}|"text":' + _STRING + rb"),"
_NULLS = rb'"logprobs":null,"finish_reason":null,(?:"stop_reason":null,)?+(?:"prompt_token_ids":null,)?+'
_TOKEN_IDS = rb'"token_ids":\[(\d++(?:,\d++)*+|)\]\}\]\}\n\n'
_IDS_END = b"]}]}\n\n"
_FAST_PATH = re.compile(_EVENT_HEAD + _CONTENT + _NULLS + _TOKEN_IDS)


class FastPathEvent(NamedTuple):
    """One choice's text and token ids, and where in the event's bytes they lie: the text in its quotes, the ids in
    their brackets."""

    choice: int
    text: str
    token_ids: list[int]
    text_from: int
    text_to: int
    ids_from: int
    ids_to: int


def fast_path(raw: bytes) -> FastPathEvent | None:
    """The most common event read without a JSON parser: one choice with text and token ids and nothing else.

    Returns None for bytes that are not exactly one event as vLLM 0.32 writes it: these must be parsed.
    """
    match = _FAST_PATH.fullmatch(raw)
    if match is None:
        return None
    index, content, text, ids = match.groups()
    group, quoted = (2, content) if text is None else (3, text)
    (text_from, text_to), (ids_from, ids_to) = match.span(group), match.span(4)
    try:
        unquoted: str = read_json(b'"' + quoted + b'"') if quoted.find(b"\\") >= 0 else quoted.decode()
        token_ids = list(map(int, ids.split(b","))) if ids else []
    except ValueError:
        return None
    return FastPathEvent(int(index), unquoted, token_ids, text_from - 1, text_to + 1, ids_from - 1, ids_to + 1)


class EventFrame(NamedTuple):
    """What the events of one choice that `fast_path` reads have in common: all but text and token ids.

    Attributes:
        head: up to the text, with its quote.
        between: from the text's second quote to the ids, with their bracket.
        rest: from the text's second quote to the end, with null in the place of the ids.
    """

    choice: int
    head: bytes
    between: bytes
    rest: bytes

    @classmethod
    def of(cls, raw: bytes, event: FastPathEvent) -> "EventFrame":
        """That of an event with these bytes."""
        between, end = raw[event.text_to - 1 : event.ids_from], raw[event.ids_to :]
        return cls(event.choice, raw[: event.text_from + 1], between + b"[", between + b"null" + end)

    def read(self, raw: bytes) -> tuple[str, int, int] | None:
        """The text and the only token id of an event in this frame, and where its text ends; a quarter of the pattern's
        cost. None for any other event, and for a text with anything but printable characters."""
        head, between = self.head, self.between
        text_to = raw.find(between, len(head))
        token_id = raw[text_to + len(between) : -len(_IDS_END)]
        if text_to < 0 or not raw.startswith(head) or not raw.endswith(_IDS_END) or not token_id.isdigit():
            return None
        try:
            text = raw[len(head) : text_to].decode()
            plain = text.isprintable() and '"' not in text and "\\" not in text
            return (text, int(token_id), text_to) if plain else None
        except ValueError:
            return None
