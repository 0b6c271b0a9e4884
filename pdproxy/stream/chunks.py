"""One data event of a completions or chat stream, seen the same way for both.

The most common event of a stream, read without a JSON parser.

One choice that says text and token ids and nothing else, written as vLLM 0.32 writes it. What looks different in any
way is not plain, and takes the long way.
"""

import dataclasses
import json
import re
from typing import NamedTuple

from pdproxy.errors import Fault, NodeFault
from pdproxy.request import Endpoint

HEAD = frozenset({"id", "object", "created", "model"})
"""What every event of an answer repeats."""
PARSED = {"reasoning": "reasoning", "reasoning_content": "reasoning", "tool_calls": "tool_calls"}
"""Fields of a chat delta that a node's parsers filled: their state cannot be handed to another node."""


def parse_object(data: bytes) -> dict[str, object]:
    """A JSON object.

    Raises:
        NodeFault: INVALID_BODY.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NodeFault(Fault.INVALID_BODY, f"an event of the stream is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise NodeFault(Fault.INVALID_BODY, "an event of the stream is not a JSON object")
    return value


def data_event(payload: object, name: bytes = b"") -> bytes:
    """An event of one data line."""
    head = b"event: " + name + b"\n" if name else b""
    return head + b"data: " + json.dumps(payload, separators=(",", ":")).encode("ascii") + b"\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One entry of ``choices``; ``said`` is the mapping that holds its text (chat: the delta)."""

    raw: dict[str, object]
    said: dict[str, object]
    key: str

    @property
    def index(self) -> int:
        index = self.raw.get("index")
        return index if isinstance(index, int) else 0

    @property
    def text(self) -> str:
        text = self.said.get(self.key)
        return text if isinstance(text, str) else ""

    def put_text(self, text: str) -> None:
        """Replace the text, where there is any."""
        if self.key in self.said:
            self.said[self.key] = text

    @property
    def token_ids(self) -> list[int] | None:
        ids = self.raw.get("token_ids")
        return ids if isinstance(ids, list) else None

    @property
    def finish(self) -> str | None:
        finish = self.raw.get("finish_reason")
        return finish if isinstance(finish, str) else None

    @property
    def logprobs(self) -> dict[str, object] | None:
        logprobs = self.raw.get("logprobs")
        return logprobs if isinstance(logprobs, dict) else None

    @property
    def parsed(self) -> str | None:
        """What a parser made of the text: reasoning, tool calls."""
        return next((word for key, word in PARSED.items() if self.said.get(key)), None)

    @property
    def says(self) -> bool:
        """Something generated is in it, not only a role."""
        return bool(self.text or self.token_ids or self.parsed or self.finish)

    def shift_offsets(self, base: int) -> int:
        """Move the text offsets of log-probabilities by ``base``; where the next token's text begins, 0 if unknown."""
        logprobs: dict[str, object] = self.logprobs or {}
        offsets, tokens = logprobs.get("text_offset"), logprobs.get("tokens")
        if not (isinstance(offsets, list) and isinstance(tokens, list) and offsets and tokens):
            return 0
        logprobs["text_offset"] = [offset + base for offset in offsets]
        return int(offsets[-1]) + base + len(str(tokens[-1]))

    @property
    def empty(self) -> bool:
        """Nothing but token ids."""
        return not self.said and self.finish is None and self.logprobs is None


class Chunk:
    """The payload of one data event. Changing it changes what `encode` gives."""

    def __init__(self, endpoint: Endpoint, payload: dict[str, object]) -> None:
        self.payload = payload
        listed = payload.get("choices")
        raw = [choice for choice in listed if isinstance(choice, dict)] if isinstance(listed, list) else []
        self.choices = [_choice(endpoint, choice) for choice in raw]

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        """Chat has them beside the choices, completions inside."""
        holders = (self.payload, *(choice.raw for choice in self.choices))
        found = (holder.get("prompt_token_ids") for holder in holders)
        return next((tuple(ids) for ids in found if isinstance(ids, list)), None)

    @property
    def empty(self) -> bool:
        """There are choices, and none says anything."""
        return bool(self.choices) and all(choice.empty for choice in self.choices)

    @property
    def usage(self) -> dict[str, object] | None:
        usage = self.payload.get("usage")
        return usage if isinstance(usage, dict) else None

    def adopt(self, first: "Chunk") -> None:
        """Belong to the answer that ``first`` began."""
        for key in ("id", "created", "model"):
            if key in first.payload:
                self.payload[key] = first.payload[key]

    def forget_prompt(self) -> None:
        """Leave out what only the first event of an answer tells."""
        for holder in (self.payload, *(choice.raw for choice in self.choices)):
            for key in ("prompt_token_ids", "prompt_text"):
                if key in holder:
                    holder[key] = None

    def forget_ids(self) -> None:
        """Leave out token ids, as vLLM writes it where nobody asked for them."""
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


def _choice(endpoint: Endpoint, raw: dict[str, object]) -> Choice:
    if endpoint is Endpoint.COMPLETIONS:
        return Choice(raw, raw, "text")
    delta = raw.get("delta")
    return Choice(raw, delta if isinstance(delta, dict) else {}, "content")


_WORD = rb'"[^"\\\x00-\x1f]*+"'
_HEAD = (
    rb'data: \{"id":' + _WORD + rb',"object":' + _WORD + rb',"created":\d++,"model":' + _WORD
    + rb',"choices":\[\{"index":(\d++),'
)  # fmt: skip
_SAID = rb'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"'
_TEXT = rb'(?:"delta":\{"content":' + _SAID + rb'\}|"text":' + _SAID + rb"),"
_TAIL = rb'"logprobs":null,"finish_reason":null,(?:"stop_reason":null,)?+(?:"prompt_token_ids":null,)?+'
_IDS = rb'"token_ids":\[(\d++(?:,\d++)*+|)\]\}\]\}\n\n'
_PLAIN = re.compile(_HEAD + _TEXT + _TAIL + _IDS)


class FastPathEvent(NamedTuple):
    """What a plain event says, and where in its bytes the token ids lie."""

    choice: int
    text: str
    token_ids: list[int]
    ids_from: int
    ids_to: int


def fast_path(raw: bytes) -> FastPathEvent | None:
    """The meaning of one whole event; None where it must be parsed, or is not one event, or more."""
    match = _PLAIN.fullmatch(raw)
    if match is None:
        return None
    index, content, text, ids = match.groups()
    said = content if text is None else text
    try:
        words: str = json.loads(b'"' + said + b'"') if b"\\" in said else said.decode()
        listed = list(map(int, ids.split(b","))) if b"," in ids else [int(ids)] if ids else []
    except ValueError:
        return None
    return FastPathEvent(int(index), words, listed, match.start(4) - 1, match.end(4) + 1)
