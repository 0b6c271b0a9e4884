"""A client's request as a value: what intake made of the bytes, before any decision."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import TypeAlias

Json: TypeAlias = Mapping[str, object]
Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Header names in lower case, in the order they came."""

HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that belong to one connection (RFC 9110, 7.6.1)."""


class Endpoint(enum.StrEnum):
    """The generating endpoints, whose bodies the proxy understands."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"


def cancelled_by_client() -> bool:
    """Where nobody watches the client, whoever ends its request does so for it."""
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request to a generating endpoint.

    Attributes:
        request_id: the client's ``x-request-id`` where it is usable, else one of ours.
        endpoint: which API.
        body: the parsed JSON object, already scrubbed of what a client may not send.
        headers: what may be passed on to a node (end-to-end headers, no credentials unless configured).
        model: the body's ``model``.
        stream: whether the client wants server-sent events.
        priority: smaller is served first, as in vLLM.
        arrived: monotonic seconds.
        deadline: monotonic seconds by which the whole request must have ended.
        left: whether the client has gone: else it is not the one who cancelled its request.
    """

    request_id: str
    endpoint: Endpoint
    body: Json
    headers: Headers
    model: str
    stream: bool
    priority: int
    arrived: float
    deadline: float
    left: Callable[[], bool] = cancelled_by_client


def header(headers: Headers, name: str) -> str | None:
    """The first value of a header, by its lower-case name."""
    return next((value for key, value in headers if key == name), None)


class Addition(enum.StrEnum):
    """What the proxy asks a decode node for beyond what the client asked; taken out of the answer again."""

    TOKEN_IDS = "return_token_ids"
    """So that a broken stream can go on elsewhere."""
    USAGE = "include_usage"
    """The final usage event."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What kind of request a body is: all that planning, driving and relaying need to know of it.

    Attributes:
        prompts: how many prompts it holds; more than one is split, one hand-over each.
        choices: ``n``, at least 1: how many answers to each prompt, so how many readers of a hand-over.
        stream: whether the answer comes as server-sent events.
        local_because: why it cannot be disaggregated (a word for a metric), None where it can.
        final_because: why a broken stream cannot go on elsewhere (a word), None where it can.
        asked: which of our additions the client asked for itself, so that they stay in the answer.
        held_back: characters that vLLM holds back for stop strings (the longest one's length less one).
        greedy: temperature 0: computing the same tokens again gives the same tokens.
        max_tokens: what the client allows, None where it does not say.
    """

    prompts: int
    choices: int
    stream: bool
    local_because: str | None = None
    final_because: str | None = None
    asked: frozenset[Addition] = frozenset()
    held_back: int = 0
    greedy: bool = False
    max_tokens: int | None = None

    @property
    def disaggregable(self) -> bool:
        """Whether prefill and decode may run on two nodes."""
        return self.local_because is None

    @property
    def continuable(self) -> bool:
        """Whether a stream that breaks can go on elsewhere, as far as the request tells."""
        return self.final_because is None

    @property
    def additions(self) -> frozenset[Addition]:
        """What to ask the decode node for on top of the client's wishes."""
        wanted = frozenset({Addition.TOKEN_IDS}) if self.stream and self.continuable else frozenset()
        return wanted - self.asked


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """From where a broken stream goes on.

    Attributes:
        prompt_token_ids: the prompt, as the first node tokenized it.
        produced_token_ids: the tokens to append to it; their text has reached the client.
        overlap: characters of the continuation's text that the client already has.
        forced: the text that a sampled continuation must begin with; a greedy one does so by itself.
    """

    prompt_token_ids: tuple[int, ...]
    produced_token_ids: tuple[int, ...]
    overlap: int = 0
    forced: str = ""
