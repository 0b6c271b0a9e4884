"""A client's request as a value: what intake made of the bytes, before any decision."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import TypeAlias

Json: TypeAlias = Mapping[str, object]
Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Header names in lower case, in the order they came."""


class Endpoint(enum.StrEnum):
    """The generating endpoints, whose bodies the proxy understands."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"


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


def header(headers: Headers, name: str) -> str | None:
    """The first value of a header, by its lower-case name."""
    return next((value for key, value in headers if key == name), None)
