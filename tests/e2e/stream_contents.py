"""What a stream says, whatever ids, times and chunks it says it in: for comparing one answer with another.

Two uncut answers to one request differ in ids and times, and in how tokens are grouped into chunks: an API server that
is busy merges what the engine made meanwhile, and choices take turns as they come. None of that is part of the answer:

- An id or a time becomes the place at which it was seen first: `id 0`, `id 1`, … An answer that changes its id in the
  middle, or takes up another item's, still differs from one that does not.
- Neighbouring deltas are joined. Completions and chat: choice by choice and field by field, as clients join them; a
  chunk may hold several fields, which have no order. Messages and responses: as long as the block or item is the same.
- Tokens of the prompt that came from a cache are left out: they belong to the node, not to the answer.

All else must be the same, event by event: roles, finish reasons, usage, the end. `sequence_number` of the Responses API
counts events, and so chunks; it must count up by one, and is then left out. Log-probabilities may differ by rounding.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

NAMES = frozenset({"id", "item_id", "call_id", "response_id", "signature"})
TIMES = frozenset({"created", "created_at", "completed_at"})
DELTAS = ("role", "reasoning", "content")
OF_THE_NODE = frozenset(
    {"cached_tokens", "created_cache_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"}
)
NATS = 0.3
"""What rounding may change of a log-probability: logits are bfloat16, whose last bit is 0.125 above 16."""
END = "[DONE]"
ERRORS = frozenset({"error", "response.failed"})
"""Types of events; an error event of the other APIs has none."""


class BrokenStreamError(Exception):
    """Bytes that are no event stream, or not a whole one; the message says where."""


@dataclass
class Contents:
    """What one stream says.

    `places`: by choice and field (`choice 0 content`, `choice 0 logprobs`, …) or, where the API has no choices, under
    `events`, what was said there in order. `kinds`: of everything that was said, `reasoning`, `content`, `tool`, …, or
    the types of deltas.
    """

    places: dict[str, list[Any]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)

    def text(self, *kinds: str, choice: int = 0) -> str:
        """All text of these kinds, of one choice or block after the other."""
        own = [self.places.get(f"choice {choice} {kind}", []) for kind in kinds] + [self.places.get("events", [])]
        return "".join(run["text"] for runs in own for run in runs if run["kind"] in kinds)

    def say(self, place: str, kind: str, text: str, **more: Any) -> None:
        """Add text; it joins the text before it where that is of the same kind."""
        self.kinds.add(kind)
        runs = self.places.setdefault(place, [])
        run = {"kind": kind, **more}
        if runs and {key: value for key, value in runs[-1].items() if key != "text"} == run:
            runs[-1]["text"] += text
        else:
            runs.append({**run, "text": text})

    def add(self, place: str, what: Any) -> None:
        """Add something that stands for itself."""
        self.places.setdefault(place, []).append(what)

    def once(self, place: str, what: Any) -> None:
        """Add something that all chunks repeat."""
        if what not in self.places.setdefault(place, []):
            self.places[place].append(what)


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """Name (empty where it has none) and data of each event; comments are left out.

    Raises:
        BrokenStreamError: for a body that ends in the middle of an event, or holds something else than events, or one
            word of what nodes and proxy say to each other.
    """
    if b"pdproxy" in body:
        raise BrokenStreamError(f"not for clients: {body[max(0, body.index(b'pdproxy') - 80) :][:200]!r}")
    if not body.endswith(b"\n\n"):
        raise BrokenStreamError(f"ends in the middle of an event: {body[-80:]!r}")
    return [event for block in body.decode().split("\n\n") if (event := _event(block))]


def contents_of(body: bytes) -> Contents:
    """What a stream says; error events are at the place `errors`. Raises BrokenStreamError."""
    said, names = Contents(), Names()
    for position, (name, data) in enumerate(events_of(body)):
        if data == END:
            said.add("end", END)
            continue
        event = without_incidentals(_counted(data, position), names)
        if "choices" in event:
            _add_chunk(said, event)
        elif "type" not in event or event["type"] in ERRORS:
            said.add("errors", event)
        else:
            _add_event(said, name, event)
    return said


def chunks_of(body: bytes) -> list[tuple[str, Any]]:
    """Each event of a stream as it came, but for ids, times and what belongs to a node. Raises BrokenStreamError."""
    names = Names()
    return [(name, without_incidentals(data, names)) for name, data in events_of(body)]


class Names:
    """Ids and times in the order in which they are seen first."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Any], str] = {}

    def of(self, kind: str, value: Any) -> str:
        """The same for the same value, of a kind."""
        count = sum(known == kind for known, _ in self._seen)
        return self._seen.setdefault((kind, value), f"{kind} {count}")


def without_incidentals(value: Any, names: Names) -> Any:
    """The same with ids and times named, and without what belongs to a node alone."""
    if isinstance(value, list):
        return [without_incidentals(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    if "cache_read_input_tokens" in value:  # Anthropic counts cached tokens beside the others
        cached = (value["cache_read_input_tokens"] or 0) + (value.get("cache_creation_input_tokens") or 0)
        value = {**value, "input_tokens": value["input_tokens"] + cached}
    return {key: _field(key, each, names) for key, each in value.items() if key not in OF_THE_NODE}


def differences(expected: Contents, got: Contents) -> list[str]:
    """Where two answers differ, one line each."""
    return list(_differences("", expected.places, got.places))


def _event(block: str) -> tuple[str, Any] | None:
    name, data = "", None
    for line in block.split("\n"):
        key, _, value = line.partition(":")
        match key:
            case "event":
                name = value.strip()
            case "data":
                data = value.strip()
            case "":
                pass
            case _:
                raise BrokenStreamError(f"no line of an event stream: {line!r}")
    return None if data is None else (name, data if data == END else json.loads(data))


def _counted(event: Json, position: int) -> Json:
    if "sequence_number" in event and event["sequence_number"] != position:
        raise BrokenStreamError(f"event {position} has sequence_number {event['sequence_number']}")
    return {key: value for key, value in event.items() if key != "sequence_number"}


def _field(key: str, value: Any, names: Names) -> Any:
    if isinstance(value, str | int) and key in NAMES | TIMES:
        return names.of("time" if key in TIMES else "id", value)
    return without_incidentals(value, names)


def _add_chunk(said: Contents, chunk: Json) -> None:
    """A chunk of /v1/completions or /v1/chat/completions."""
    for choice in chunk.pop("choices"):
        _add_choice(said, choice)
    if usage := chunk.pop("usage", None):
        _add_usage(said, usage)
    said.once("chunks", _given(chunk))


def _add_usage(said: Contents, usage: Json) -> None:
    """The last one counts: where each chunk has one, they grow with the chunks."""
    said.places["usage"] = [usage]


def _add_choice(said: Contents, choice: Json) -> None:
    place = f"choice {choice.pop('index')}"
    delta = choice.pop("delta", None) or {}
    for kind, text in (("text", choice.pop("text", None)), *((kind, delta.get(kind)) for kind in DELTAS)):
        if text:
            said.say(f"{place} {kind}", kind, text)
    for call in delta.get("tool_calls") or []:
        _add_call(said, f"{place} tool", call)
    for name, values in _logprobs(choice.pop("logprobs", None)):
        said.places.setdefault(f"{place} {name}", []).extend(values)
    said.places.setdefault(f"{place} token_ids", []).extend(choice.pop("token_ids", None) or [])
    for name, value in _given(choice).items():
        said.add(f"{place} {name}", value)


def _add_call(said: Contents, place: str, call: Json) -> None:
    function = call.pop("function", None) or {}
    if function.get("name") or call.get("id"):
        said.add(place, {"kind": "call", **_given(call), "name": function.get("name"), "text": ""})
    if function.get("arguments"):
        said.say(place, "tool", function["arguments"], call=call["index"])


def _logprobs(logprobs: Json | None) -> Iterator[tuple[str, list[Any]]]:
    """The lists of a chunk's log-probabilities. Of the alternatives to a token, ranked, only the numbers: two that are
    as good as each other change places by rounding."""
    if logprobs is None:
        return
    for name, values in logprobs.items():
        match name:
            case "content":
                yield "logprobs", [_ranked(token) for token in values or []]
            case "top_logprobs":
                yield name, [sorted(each.values(), reverse=True) if each else each for each in values or []]
            case _:
                yield name, values or []


def _ranked(token: Json) -> Json:
    return {**token, "top_logprobs": [one["logprob"] for one in token["top_logprobs"]]}


def _given(fields: Json) -> Json:
    return {key: value for key, value in fields.items() if value is not None}


def _add_event(said: Contents, name: str, event: Json) -> None:
    """An event of /v1/messages or /v1/responses."""
    delta = event.get("delta")
    if event["type"].endswith(".delta") and isinstance(delta, str):
        where = {key: event[key] for key in ("item_id", "output_index", "content_index") if key in event}
        said.say("events", event["type"], delta, **where)
    elif event["type"] == "content_block_delta" and isinstance(delta, dict):
        kind = delta["type"]
        text = next(value for key, value in delta.items() if key != "type")
        said.say("events", kind, text, index=event["index"])
    else:
        said.kinds.add(event["type"])
        said.add("events", {"kind": name, "text": "", "event": event})


def _differences(path: str, expected: Any, got: Any) -> Iterator[str]:
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        for key in [*expected, *(key for key in got if key not in expected)]:
            yield from _differences(f"{path}/{key}", expected.get(key), got.get(key))
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for position, (one, other) in enumerate(zip(expected, got, strict=True)):
            yield from _differences(f"{path}/{position}", one, other)
    elif isinstance(expected, float) and isinstance(got, float):
        if abs(expected - got) > NATS:
            yield f"{path}: {got} instead of {expected}"
    elif expected != got:
        yield f"{path}: {_shown(got)} instead of {_shown(expected)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 400 else f"{text[:200]} … {text[-200:]}"
