"""Types of settings: one of a few words, a number with a unit, a text, an address, a file."""

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from annotated_types import Ge, Le, MinLen
from pydantic import (
    AfterValidator,
    BeforeValidator,
    FilePath,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class OneOf(enum.StrEnum):
    """One of a few words, in upper or lower case. YAML reads a bare on or off as a boolean: here it is the word."""

    @classmethod
    def _missing_(cls, value: object) -> "OneOf | None":
        if isinstance(value, bool):
            value = "on" if value else "off"
        word = value.strip().lower() if isinstance(value, str) else ""
        return next((member for member in cls if member.value == word), None)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler.resolve_ref_schema(handler(schema))
        bare = [value for word, value in (("on", True), ("off", False)) if word in list(cls)]
        return {"enum": [*described["enum"], *bare]}


class OnPrefillFailure(OneOf):
    """The step after a failed prefill leg."""

    RETRY = "retry"
    """Another prefill node, then the decode node computes the prompt itself."""
    LOCAL = "local"
    """The decode node computes the prompt itself, at once."""
    FAIL = "fail"
    """Another prefill node, then the client gets the error."""


class OnNoDecode(OneOf):
    """The step where no decode node is left."""

    FAIL = "fail"
    """The client gets an error, 503."""
    PREFILL = "prefill"
    """A prefill node serves the whole request."""


class Routing(OneOf):
    """How one is chosen among several nodes."""

    CACHE = "cache"
    """The one that costs least, by what it can resume from; or the decode node alone, where that costs less."""
    SESSION = "session"
    """The one that the session's key belongs to, while it has room."""
    LEAST_LOADED = "least-loaded"
    """The one with the fewest legs for its weight."""


class Keep(OneOf):
    """Which conversations nodes are asked to keep until their next turn."""

    AUTO = "auto"
    """Those whose clients ask for it, those that have come back before, and new ones whose clients name a session."""
    ASKED = "asked"
    """Those whose clients ask for it."""
    OFF = "off"
    """None."""


class Credential(OneOf):
    """The ``Authorization`` header that a node gets."""

    PASS = "pass"
    """The client's own header."""
    REPLACE = "replace"
    """The credential in ``upstream.credential_file``."""
    NONE = "none"
    """Nothing."""


class LogLevel(OneOf):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(OneOf):
    """The format of a log line."""

    JSON = "json"
    TEXT = "text"


class MetricsPort(OneOf):
    """Which ports serve ``/metrics``."""

    OPERATORS = "operators"
    BOTH = "both"


class ReusePort(OneOf):
    """Whether several proxies listen on one clients' port."""

    ON = "on"
    OFF = "off"


class OtelExport(OneOf):
    """Where spans go."""

    OFF = "off"
    OTLP = "otlp"


class Role(OneOf):
    """The work that a node is asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"


Roles = tuple[Role, ...]
"""The roles of one node: one or both, in the order of `Role`."""


def in_order(roles: Iterable[Role]) -> Roles:
    """Each of these once, in the order of `Role`."""
    given = frozenset(roles)
    return tuple(role for role in Role if role in given)


def kind_of_node(roles: Roles) -> str:
    """The name of a node with these roles: a prefill node, a decode node, or, of both, just a node."""
    return roles[0] if len(roles) == 1 else "node"


class NodeEntry(Protocol):
    """An entry of a list of nodes: a pydantic model."""

    @property
    def url(self) -> str: ...

    @property
    def roles(self) -> Roles: ...

    def model_copy(self, *, update: dict[str, Any]) -> Self: ...


Listed = TypeVar("Listed", bound=NodeEntry)


def one_for_each_address(entries: Iterable[Listed]) -> tuple[Listed, ...]:
    """Entries of nodes, those of one address as one, with the roles of both.

    Raises:
        ValueError: one has a role twice, or the two differ in more than their roles.
    """
    found: dict[str, Listed] = {}
    for entry in entries:
        first = found.setdefault(entry.url, entry)
        if first is entry:
            continue
        for role in entry.roles:
            if role in first.roles:
                raise ValueError(f"the {role} node {entry.url} is there twice; use weight to give it more.")
        if entry.model_copy(update={"roles": first.roles}) != first:
            raise ValueError(f"the node {entry.url} is there twice: it is one node, so write it once, with its roles.")
        found[entry.url] = first.model_copy(update={"roles": in_order((*first.roles, *entry.roles))})
    return tuple(found.values())


def with_roles(entry: object) -> object:
    """An entry as it was written: ``role: decode`` is short for ``roles: [decode]``."""
    if isinstance(entry, dict) and "role" in entry and "roles" not in entry:
        return {("roles" if name == "role" else name): value for name, value in entry.items()}
    return entry


class DiscoveryKind(OneOf):
    """Where the nodes of a role come from, besides ``nodes``."""

    STATIC = "static"
    """Only from ``nodes``."""
    FILE = "file"
    """A file, which is read periodically."""
    DNS = "dns"
    """The addresses of a DNS name, or its SRV records."""
    KUBERNETES = "kubernetes"
    """EndpointSlices, which are watched."""


class FirstHandOver(OneOf):
    """Which hand-over a node is tested with before it serves."""

    KNOWN_ANSWER = "known_answer"
    """A prompt of several blocks, whose answer must be that of the decode node alone."""
    WARM_UP = "warm_up"
    """Four tokens, so that the connectors' handshake is made; nothing is compared."""


class Scheme(OneOf):
    """The scheme of a node's address."""

    HTTP = "http"
    HTTPS = "https"


UNSHOWN = "unshown"
"""The type of a validation error whose input must not be shown: it may hold a password."""


@dataclasses.dataclass(frozen=True, slots=True)
class Takes:
    """Annotates a type with what a setting of it takes, for messages: "the path of a file"."""

    words: str


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """Annotates a number with the units in which it may be written, such as ``30s``.

    Attributes:
        unit: what the number counts: "seconds", "bytes", "tokens", or "" for a plain number.
        suffixes: units that may follow a number, and how much each is; a longer one stands before its own ending.
    """

    unit: str = ""
    suffixes: tuple[tuple[str, float], ...] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.parse, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        number = handler(schema)
        units = "|".join(suffix for suffix, _ in self.suffixes)
        fraction = r"(\.[0-9]+)?" if units or number["type"] == "number" else ""
        pattern = f"^[0-9]+{fraction}" + (f" ?({units})?$" if units else "$")
        return {**number, "type": [number["type"], "string"], "pattern": pattern}

    def parse(self, value: object) -> float:
        """Convert a text or a number. Raises ValueError."""
        text, factor = str(value).strip(), 1.0
        for suffix, size in self.suffixes:
            if text.endswith(suffix):
                text, factor = text.removesuffix(suffix).rstrip(), size
                break
        return float(text) * factor

    def meant(self, value: object) -> str:
        """The short form, "10m" for "10 minutes"; "" for what is no number with a unit in words."""
        found = _IN_WORDS.fullmatch(str(value).strip())
        if found is None:
            return ""
        number, word = found.groups()
        of_ours = {suffix for suffix, _ in self.suffixes}
        named = (unit for name, unit in _UNITS.items() if name.startswith(word.lower()) and unit in of_ours)
        unit = next(named, "")
        return number + unit if unit else ""


_IN_WORDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)")
_UNITS: Mapping[str, str] = MappingProxyType(
    {
        "milliseconds": "ms", "seconds": "s", "secs": "s", "minutes": "m", "mins": "m", "hours": "h", "hrs": "h",
        "bytes": "B", "kb": "KiB", "kib": "KiB", "kilobytes": "KiB", "mb": "MiB", "mib": "MiB", "megabytes": "MiB",
        "gb": "GiB", "gib": "GiB", "gigabytes": "GiB",
    }
)  # fmt: skip
"""Units as people write them, and as the settings do."""


def address(text: str) -> str:
    """Check an http(s) address, and strip a slash from its end. Raises ValueError or PydanticCustomError."""
    _refuse_credentials(text)
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or " " in text:
        raise ValueError("no address")
    return text.rstrip("/")


def node_url(text: str) -> str:
    """Check a node's address, which may have a path prefix but not end with ``/v1``, and strip slashes from its end.

    The one rule for nodes, whether they come from the settings, a file or an operator.

    Raises:
        ValueError: it is none; the message says what one looks like.
        PydanticCustomError: it has credentials, a query or a fragment; the address must not be shown.
    """
    _refuse_credentials(text)
    parts = _NODE_URL.fullmatch(text)
    bare = text.rstrip("/")
    if parts is None or int(parts["port"] or 1) not in range(1, 65536) or bare.endswith("/v1"):
        raise ValueError(f"must be {_ADDRESS.words}")
    return bare


def host_name(text: str) -> str:
    """Check a name by which a machine is reached, without a port. Raises ValueError."""
    if _HOST_NAME.fullmatch(text) is None:
        raise ValueError("no host name")
    return text


def _refuse_credentials(text: str) -> None:
    _, _, rest = text.rpartition("://")
    if "@" in rest.partition("/")[0] or "?" in text or "#" in text:
        raise PydanticCustomError(UNSHOWN, "an address without credentials, query or fragment")


def _address_or_nothing(text: str) -> str:
    return address(text) if text else ""


def _path_or_none(value: object) -> object:
    return None if value == "" else value


def _roles(value: object) -> Roles:
    """The roles in a list of words, or in words with commas between them. Raises ValueError."""
    words = _split(value)
    if not isinstance(words, (list, tuple)) or not words:
        raise ValueError("must name prefill, decode, or both")
    return in_order(map(Role, words))


def _split(value: object) -> object:
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


_ADDRESS = Takes("an address such as http://10.0.0.1:8000")
_NODE_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(/[A-Za-z0-9._~-]+)*/?")

_PATH_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+/?")


def _path_prefix(text: str) -> str:
    """A path without a slash at its end; empty for none."""
    if text and not _PATH_PREFIX.fullmatch(text):
        raise ValueError("must be a path that begins with a slash, such as /llm")
    return text.rstrip("/")


_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")

Number = Annotated[float, Quantity()]
Count = Annotated[int, Quantity()]
Tokens = Annotated[int, Quantity("tokens")]
Seconds = Annotated[float, Quantity("seconds", (("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)))]
Bytes = Annotated[int, Quantity("bytes", (("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("B", 1.0)))]
Port = Annotated[int, Ge(0), Le(65535), Quantity()]
Text = Annotated[str, Takes("a text")]
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(_split),
    WithJsonSchema({"type": ["array", "string"], "items": {"type": "string"}}),
    Takes("a list of texts"),
]
NodeRoles = Annotated[
    Roles,
    PlainValidator(_roles),
    WithJsonSchema({"type": ["array", "string"], "items": {"enum": [*Role]}, "minItems": 1, "minLength": 1}),
    Takes(f"one or both of {', '.join(Role)}"),
]
HostNames = Annotated[
    tuple[Annotated[str, AfterValidator(host_name)], ...],
    BeforeValidator(_split),
    WithJsonSchema({"type": ["array", "string"], "items": {"type": "string", "pattern": f"^{_HOST_NAME.pattern}$"}}),
    Takes("a list of names such as x.example"),
]
Host = Annotated[str, MinLen(1), Takes("an address such as 127.0.0.1")]
Address = Annotated[
    str,
    AfterValidator(address),
    WithJsonSchema({"type": "string", "pattern": r"^https?://[^ @/?#]+(/[^ ?#]*)?$"}),
    _ADDRESS,
]
NodeUrl = Annotated[
    str,
    AfterValidator(node_url),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{_NODE_URL.pattern.replace('?P<port>', '')}$",
            "not": {"pattern": "/v1/*$"},
        }
    ),
    _ADDRESS,
]
OptionalAddress = Annotated[
    str,
    AfterValidator(_address_or_nothing),
    WithJsonSchema({"type": "string", "pattern": r"^(https?://[^ @/?#]+(/[^ ?#]*)?)?$"}),
    _ADDRESS,
]
PathPrefix = Annotated[
    str,
    AfterValidator(_path_prefix),
    WithJsonSchema({"type": "string", "pattern": f"^({_PATH_PREFIX.pattern})?$"}),
    Takes("a path such as /llm"),
]
OptionalFile = Annotated[
    FilePath | None,
    BeforeValidator(_path_or_none),
    WithJsonSchema({"type": ["string", "null"]}),
    Takes("the path of a file"),
]
