"""The settings that are one of a few words."""

import enum
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema


class Choice(enum.StrEnum):
    """One of a few words, in whatever case. YAML reads a bare on or off as a truth value: here it is the word."""

    @classmethod
    def _missing_(cls, value: object) -> "Choice | None":
        if isinstance(value, bool):
            value = "on" if value else "off"
        word = value.strip().lower() if isinstance(value, str) else ""
        return next((member for member in cls if member.value == word), None)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler.resolve_ref_schema(handler(schema))
        return {"enum": [*described["enum"], *([False] if "off" in list(cls) else [])]}


class OnPrefillFailure(Choice):
    """What follows when a prefill leg has failed."""

    RETRY = "retry"
    """Another prefill node, then the decode node computes the prompt itself."""
    LOCAL = "local"
    """The decode node computes the prompt itself, at once."""
    FAIL = "fail"
    """Another prefill node, then the client gets the error."""


class Credential(Choice):
    """What a node gets as its ``Authorization`` header."""

    PASS = "pass"
    """What the client sent."""
    REPLACE = "replace"
    """The credential in ``upstream.credential_file``."""
    NONE = "none"
    """Nothing."""


class LogLevel(Choice):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(Choice):
    """How a log line looks."""

    JSON = "json"
    TEXT = "text"


class OtelExport(Choice):
    """Where spans go."""

    OFF = "off"
    OTLP = "otlp"


class NodeRole(Choice):
    """What a configured node is asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"


class DiscoveryKind(Choice):
    """Where the nodes of a role come from, besides ``nodes``."""

    STATIC = "static"
    """From nowhere else."""
    FILE = "file"
    """A file, which is read again and again."""
    DNS = "dns"
    """A name: its addresses, or its SRV records."""
    KUBERNETES = "kubernetes"
    """EndpointSlices, which are watched."""


class FirstHandOver(Choice):
    """What a node is asked to hand over before it serves."""

    KNOWN_ANSWER = "known_answer"
    """A prompt of several blocks, whose answer must be that of the decode node alone."""
    WARM_UP = "warm_up"
    """Four tokens, so that the handshake is made; nothing is compared."""


class Scheme(Choice):
    """How an address begins."""

    HTTP = "http"
    HTTPS = "https"
