"""Compare the contents of streams, without ids, times and chunk borders.

Two uncut answers to one request differ in ids and times, and in the grouping of tokens into chunks: a busy API server
merges tokens, and choices take turns as they come. None of these belong to the answer:

- An id or a time becomes its rank of first appearance: `id 0`, `id 1`, … An answer that changes its id in the middle,
  or uses another item's id, still differs.
- Neighbouring deltas are joined. Completions and chat: for each choice and field, as clients join them; the fields of
  one chunk have no order. Messages and responses: within one block or item.
- Cached prompt tokens are left out: they belong to the node, not to the answer.

Everything else must be equal, event by event: roles, finish reasons, usage, the end. The Responses API's
`sequence_number` counts events, and so chunks: it must count up by one, and is then left out. Log-probabilities may
differ by rounding.
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
"""The most that rounding changes a log-probability: logits are bfloat16, whose last bit is 0.125 above 16."""
END = "[DONE]"
ERRORS = frozenset({"error", "response.failed"})
"""Types of error events. The other APIs' error events have no type."""


class BrokenStreamError(Exception):
    """Bytes that are no event stream, or an incomplete one; the message says where."""


@dataclass
class Contents:
    """The contents of one stream.

    `places`: the pieces in order, by choice and field (`choice 0 content`, `choice 0 logprobs`, …), or under `events`
    for APIs without choices. `kinds`: the kinds of these pieces, `reasoning`, `content`, `tool`, …, or the types of
    deltas.
    """

    places: dict[str, list[Any]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)

    def text(self, *kinds: str, choice: int = 0) -> str:
        """All text of these kinds, one choice or block after the other."""
        own = [self.places.get(f"choice {choice} {kind}", []) for kind in kinds] + [self.places.get("events", [])]
        return "".join(run["text"] for runs in own for run in runs if run["kind"] in kinds)

    def say(self, place: str, kind: str, text: str, **more: Any) -> None:
        """Add text. It joins the text before it if that is of the same kind."""
        self.kinds.add(kind)
        runs = self.places.setdefault(place, [])
        run = {"kind": kind, **more}
        if runs and {key: value for key, value in runs[-1].items() if key != "text"} == run:
            runs[-1]["text"] += text
        else:
            runs.append({**run, "text": text})

    def add(self, place: str, what: Any) -> None:
        """Add a piece that is not joined with others."""
        self.places.setdefault(place, []).append(what)

    def once(self, place: str, what: Any) -> None:
        """Add a value that every chunk repeats."""
        if what not in self.places.setdefault(place, []):
            self.places[place].append(what)


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """Name (empty where there is none) and data of each event, without comments.

    Raises:
        BrokenStreamError: the body ends in the middle of an event, or has bytes that are no event, or a record meant
            for the proxy.
    """
    if b"pdproxy" in body:
        raise BrokenStreamError(f"not for clients: {body[max(0, body.index(b'pdproxy') - 80) :][:200]!r}")
    if not body.endswith(b"\n\n"):
        raise BrokenStreamError(f"ends in the middle of an event: {body[-80:]!r}")
    return [event for block in body.decode().split("\n\n") if (event := _event(block))]


def contents_of(body: bytes) -> Contents:
    """The contents of a stream; error events are at the place `errors`. Raises BrokenStreamError."""
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
    """Each event of a stream without ids, times and node-specific values. Raises BrokenStreamError."""
    names = Names()
    return [(name, without_incidentals(data, names)) for name, data in events_of(body)]


class Names:
    """Names for ids and times, in the order of their first appearance."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Any], str] = {}

    def of(self, kind: str, value: Any) -> str:
        """The name of a value of this kind; the same value has the same name."""
        count = sum(known == kind for known, _ in self._seen)
        return self._seen.setdefault((kind, value), f"{kind} {count}")


def without_incidentals(value: Any, names: Names) -> Any:
    """The value with names for ids and times, and without node-specific values."""
    if isinstance(value, list):
        return [without_incidentals(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    if "cache_read_input_tokens" in value:  # Anthropic counts cached tokens apart from the others
        cached = (value["cache_read_input_tokens"] or 0) + (value.get("cache_creation_input_tokens") or 0)
        value = {**value, "input_tokens": value["input_tokens"] + cached}
    return {key: _field(key, each, names) for key, each in value.items() if key not in OF_THE_NODE}


def differences(expected: Contents, got: Contents) -> list[str]:
    """The differences between two answers, one line each."""
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
    """Use the last usage: where each chunk has one, they grow with the chunks."""
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
    """The lists of a chunk's log-probabilities. Alternatives to a token are listed by their numbers alone: two that are
    equally likely change places by rounding."""
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
