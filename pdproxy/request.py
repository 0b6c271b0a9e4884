"""A client's request as values: what intake made of the bytes, its shape, and one prompt of it; and JSON itself.

JSON is read and written by msgspec, in a fifth of the standard library's time. What msgspec refuses of a node's answer
goes to the standard library, for nothing that a node sends may be lost: lone surrogates (`"\\ud800"`), NaN, numbers
beyond a float's range. Errors are the standard library's, too. Clients' bodies are not parsed: see `raw_json`.
"""

import enum
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from pdproxy.reasons import KeepReason, LocalReason, NotContinuableReason

Json: TypeAlias = Mapping[str, object]
"""A JSON object. Its values may be raw JSON: `raw_json.value_of` decodes one that is to be looked at."""
_READ = msgspec.json.Decoder().decode
_WRITE = msgspec.json.Encoder().encode
_WRITE_ALL = msgspec.json.Encoder(enc_hook=str).encode
_PRINTABLE = re.compile(rb"[ -~]*").fullmatch

Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Header names in lower case, in the order they came."""

Fields: TypeAlias = Mapping[str, str]
"""The first value of each header, by its name in lower case."""

HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that belong to one connection (RFC 9110, 7.6.1)."""


def read_json(raw: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON; the message says where.
        RecursionError: it is nested too deeply.
    """
    try:
        return _READ(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(raw)


def write_json(value: object) -> bytes:
    """A value as JSON without spaces, in UTF-8; a text with lone surrogates in ASCII, where they survive.

    Floats that JSON has no number for become null. Raises TypeError for what is no JSON value.
    """
    try:
        return _WRITE(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), default=_parsed).encode("ascii")


def _parsed(value: object) -> object:
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))
    raise TypeError(f"{type(value).__name__} is no JSON value")


def write_json_line(value: object) -> str:
    """A value as JSON on one line of printable ASCII; what is no JSON value is written as ``str`` gives it."""
    try:
        text = _WRITE_ALL(value)
    except (UnicodeEncodeError, TypeError):
        return json.dumps(value, default=str)
    return text.decode() if _PRINTABLE(text) else json.dumps(value, default=str)


class Endpoint(enum.StrEnum):
    """The generating endpoints, whose bodies the proxy understands."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"


def header(headers: Headers, name: str) -> str | None:
    """The first value of a header, by its lower-case name."""
    return dict(headers[::-1]).get(name)  # a quarter of what a loop in Python costs


def media_type(content_type: str | None) -> str:
    """The kind of body that a ``content-type`` tells: in lower case, and without parameters; "" where there is none."""
    return "" if content_type is None else content_type.partition(";")[0].strip().lower()


Content = TypeVar("Content")


class HeldBody(Generic[Content]):
    """A client's body for as long as a node may have to get it. Then its holder drops it: its bytes are freed.

    ``on_dropped``: called when it is dropped, once.
    """

    __slots__ = ("_content", "_on_dropped")

    def __init__(self, content: Content, on_dropped: Callable[[], None] = lambda: None) -> None:
        self._content: Content | None = content
        self._on_dropped = on_dropped

    @property
    def content(self) -> Content:
        """The content, which must not be dropped yet."""
        if self._content is None:
            raise RuntimeError("a body was asked for that was dropped")
        return self._content

    @property
    def dropped(self) -> bool:
        return self._content is None

    def drop(self) -> None:
        """Nothing can need it any more. Idempotent."""
        if self._content is not None:
            self._content = None
            self._on_dropped()

    def parts(self, contents: Sequence[Content]) -> list["HeldBody[Content]"]:
        """Bodies that are made of the same bytes: this one is dropped with the last of them. One is this one."""
        if len(contents) == 1:
            self._content = contents[0]
            return [self]
        left = len(contents)

        def on_part_dropped() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.drop()

        return [HeldBody(content, on_part_dropped) for content in contents]


class KeepAsk(msgspec.Struct, frozen=True):
    """A client's wish that what its prompt leaves in the cache stays there for its next one.

    Attributes:
        seconds: from the end of the answer on; 0: what was kept of the conversation is needed no more.
        reason: the field that says so.
    """

    seconds: float
    reason: KeepReason


class Shape(msgspec.Struct, frozen=True):
    """The kind of answer that a body of one prompt asks for.

    Attributes:
        choices: ``n``, at least 1: how many answers there are, so how many readers a hand-over has.
        stream: whether the answer comes as server-sent events.
        local: why it cannot be disaggregated, None where it can.
        not_resumable: why a broken stream cannot be resumed by its journal, None where it can.
        wants_usage: the client asked for the final usage event.
        longest: tokens that one answer may have; None where the context is the limit.
        prompt_tokens: about how many tokens the prompt has.
        media: the messages hold anything but text.
    """

    choices: int
    stream: bool
    local: LocalReason | None = None
    not_resumable: NotContinuableReason | None = None
    wants_usage: bool = False
    longest: int | None = None
    prompt_tokens: int = 0
    media: bool = False


class PromptText:
    """The text of a prompt, until it is taken: what it has in common with earlier ones is found by it.

    Attributes:
        ids: the first token ids of a long prompt of such.

    Args:
        parts: the beginning of a long prompt of text.
        fields: those that a short prompt is rendered from, decoded; None of a long one.
    """

    __slots__ = ("_fields", "_parts", "ids")

    def __init__(self, parts: list[bytes], ids: Sequence[int] = (), fields: Json | None = None) -> None:
        self._parts = parts
        self._fields = fields
        self.ids = ids

    def take_fields(self) -> Json | None:
        """The fields of a short prompt. They are kept no longer."""
        fields, self._fields = self._fields, None
        return fields

    def take_parts(self) -> list[bytes]:
        """As `legs.prompt_text.prompt_parts`. They are kept no longer."""
        parts, self._parts = self._parts, []
        return parts


class ReadPrompt(msgspec.Struct, frozen=True):
    """One prompt of a request, read as far as plans need it: the request's body with this prompt alone, its shape, and
    its text where that is looked up."""

    body: Json
    shape: Shape
    text: PromptText | None


class ClientRequest(msgspec.Struct, frozen=True):
    """One request to a generating endpoint.

    Attributes:
        request_id: the client's ``x-request-id`` where it is usable, else one of ours.
        held: the JSON object, its values raw, already scrubbed of what a client may not send.
        headers: what may be passed on to a node (end-to-end headers, no credentials unless configured).
        priority: smaller is served first, as in vLLM.
        arrived: monotonic seconds.
        deadline: monotonic seconds by which the whole request must have ended.
        left: whether the client has disconnected; a request that is cancelled while it has not was cancelled by us.
        session: a hash of the key of its session and its client's name, 64 bits; None where it names none.
        keep: how long the client wants its conversation kept; None where it does not say.
        api_key: the name of the client's API key; never the key itself.
        fields: what the proxy looks at, as it was read (`legs.lax_fields`); None where nobody has read it yet.
        on_usage: called with the tokens of a prompt and of its answers, once its node has told them.
        prompts: that were read before it is answered; whoever answers takes them out, so that their bytes may go.
    """

    request_id: str
    endpoint: Endpoint
    held: HeldBody[Json]
    headers: Headers
    model: str
    stream: bool
    priority: int
    arrived: float
    deadline: float
    left: Callable[[], bool]
    session: int | None = None
    keep: KeepAsk | None = None
    api_key: str = ""
    fields: Mapping[str, Any] | None = None
    on_usage: Callable[[int, int], None] = lambda _prompt, _completion: None
    prompts: list[ReadPrompt] = []

    @property
    def body(self) -> Json:
        """The body, which must not be dropped yet."""
        return self.held.content


class DecodeRoute(enum.StrEnum):
    """Where a decode leg is sent."""

    ENDPOINT = "endpoint"
    """To the endpoint that the client asked for."""
    JOURNALED = "journaled"
    """To the route of our connector's endpoint plugin, which runs the same endpoint and sends a journal beside the
    events of a stream: from it another such node resumes the stream."""


class LegForm(msgspec.Struct, frozen=True):
    """How a decode leg asks for its answer.

    Attributes:
        adds_usage: the proxy asks for the usage event, and takes it out of the answer again.
        records: of a stream's journal so far, JSON values joined by commas; empty for a leg that resumes nothing.
    """

    route: DecodeRoute = DecodeRoute.ENDPOINT
    adds_usage: bool = False
    records: bytes = b""


class SubRequest(msgspec.Struct, frozen=True):
    """One prompt of a client's request.

    Attributes:
        held: the request's body with this prompt alone.
        name: the request id, with the prompt's number if there are several.
        index: the prompt's number, from 0.
        text: of the prompt, where it was read before; else it is read from the body.
        notes: what each prefix source has found out about the prompt, by source; it goes with the request.
    """

    request: ClientRequest
    held: HeldBody[Json]
    shape: Shape
    name: str
    index: int = 0
    text: PromptText | None = None
    notes: dict[object, Any] = {}

    @property
    def body(self) -> Json:
        """The body, which must not be dropped yet."""
        return self.held.content

    @property
    def endpoint(self) -> Endpoint:
        return self.request.endpoint

    @property
    def first_event_proves_read(self) -> bool:
        """Whether a decode leg's first event proves that the hand-over was read.

        The first of several choices may come before the others have read; and a stream of responses begins with events
        about itself. There the hand-over counts as unread until the stream ends well: releasing once more does no harm.
        """
        return not self.shape.stream or (self.shape.choices == 1 and self.endpoint is not Endpoint.RESPONSES)

    @property
    def headers(self) -> Headers:
        """The headers of both legs: the client's, and the request id by which node logs can be matched."""
        own = ("x-request-id", self.name)
        if own in self.request.headers:  # a lone prompt has the request's name
            return self.request.headers
        return (*[field for field in self.request.headers if field[0] != "x-request-id"], own)
