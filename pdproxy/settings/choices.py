"""The settings that are one of a few words."""

import enum


class OnPrefillFailure(enum.StrEnum):
    """What follows when a prefill leg has failed."""

    RETRY = "retry"
    """Another prefill node, then the decode node computes the prompt itself."""
    LOCAL = "local"
    """The decode node computes the prompt itself, at once."""
    FAIL = "fail"
    """Another prefill node, then the client gets the error."""


class Credential(enum.StrEnum):
    """What a node gets as its ``Authorization`` header."""

    PASS = "pass"
    """What the client sent."""
    REPLACE = "replace"
    """The credential in ``upstream.credential_file``."""
    NONE = "none"
    """Nothing."""


class LogLevel(enum.StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """How a log line looks."""

    JSON = "json"
    TEXT = "text"


class OtelExport(enum.StrEnum):
    """Where spans go."""

    OFF = "off"
    OTLP = "otlp"


class NodeRole(enum.StrEnum):
    """What a configured node is asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"


class Finding(enum.StrEnum):
    """Where the nodes of a role come from, besides ``nodes``."""

    STATIC = "static"
    """From nowhere else."""
    FILE = "file"
    """A file, which is read again and again."""
    DNS = "dns"
    """A name: its addresses, or its SRV records."""
    KUBERNETES = "kubernetes"
    """EndpointSlices, which are watched."""


class FirstHandOver(enum.StrEnum):
    """What a node is asked to hand over before it serves."""

    KNOWN_ANSWER = "known_answer"
    """A prompt of several blocks, whose answer must be that of the decode node alone."""
    WARM_UP = "warm_up"
    """Four tokens, so that the handshake is made; nothing is compared."""


class Scheme(enum.StrEnum):
    """How an address begins."""

    HTTP = "http"
    HTTPS = "https"
