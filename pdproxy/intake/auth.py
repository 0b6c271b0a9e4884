"""API keys and their limits, request ids, priorities, and which headers of a client go on to a node."""

import dataclasses
import functools
import hashlib
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pdproxy.credential import read_text
from pdproxy.errors import ClientError, SettingsError
from pdproxy.nodes.node import RANK_HEADER
from pdproxy.observe.labels import Rejection
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.client_errors import rejected_error
from pdproxy.planning.shares import NO_LIMITS, KeyLimits, LimitsByKey
from pdproxy.request import HOP_BY_HOP, Fields, Headers
from pdproxy.settings.types import Credential


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    """A client's key, by its name: all keys of one name have their limits together."""

    name: str
    limits: KeyLimits = NO_LIMITS


ANONYMOUS = ApiKey("anonymous")
"""Every client where no key is asked for: nothing tells them apart."""


class ApiKeys:
    """The accepted keys, by their digests; without any, every request is accepted. `replace` them while requests run:
    a request is asked for its key once, when it comes.

    Attributes:
        limits: by the keys' names.
    """

    def __init__(self, by_digest: Mapping[bytes, ApiKey] | None = None) -> None:
        self.by_digest = dict(by_digest or {})
        self.limits = LimitsByKey({key.name: key.limits for key in self.by_digest.values()})

    def replace(self, keys: "ApiKeys") -> None:
        """Accept those keys, and no others, from now on. Their limits hold at once, also for what waits."""
        self.by_digest = keys.by_digest
        self.limits.replace(keys.limits)

    def names(self) -> set[str]:
        """The names of all keys."""
        return {key.name for key in self.by_digest.values()}

    def api_key(self, fields: Fields) -> ApiKey:
        """The key that a request carries.

        Raises:
            ClientError: 401 for no key or an unknown one.
        """
        if not self.by_digest:
            return ANONYMOUS
        found = self.by_digest.get(key_digest(presented_key(fields)))
        if found is None:
            raise ClientError(
                401,
                "Incorrect or missing API key: send it as 'Authorization: Bearer KEY'.",
                kind="authentication_error",
                code="invalid_api_key",
                headers=(("www-authenticate", "Bearer"),),
            )
        return found


class OpenRequests:
    """How many requests of each API key are open: they are being sent, run, or wait.

    ``limit``: of a key that has none of its own; 0 for none.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self._open: dict[str, int] = {}

    def check(self, api_key: ApiKey) -> None:
        """Raise the `ClientError` 429 where a key has as many open as it may."""
        limit, name = api_key.limits.open or (self._limit if api_key is not ANONYMOUS else 0), api_key.name
        if limit and self._open.get(name, 0) >= limit:
            self._metrics.rejected(Rejection.KEY_LIMIT, name)
            text = f"This API key may have {limit} requests open at once."
            raise rejected_error(Rejection.KEY_LIMIT, text, 1)

    def add(self, name: str) -> None:
        """One request more of a key is open, until `remove`."""
        self._open[name] = self._open.get(name, 0) + 1

    def remove(self, name: str) -> None:
        """The request is open no more."""
        if self._open[name] > 1:
            self._open[name] -= 1
        else:
            del self._open[name]


def presented_key(fields: Fields) -> str:
    """The key in a request's headers, "" without one: OpenAI's header, else Anthropic's."""
    scheme, _, key = fields.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else fields.get("x-api-key", "")


def key_digest(key: str) -> bytes:
    """SHA-256: keys themselves are not kept."""
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: Path | None) -> ApiKeys:
    """Read a file of keys; no path: no keys.

    Raises:
        SettingsError: the file cannot be read, holds no key, or a line is wrong (by its number; never the key itself).
    """
    if path is None:
        return ApiKeys()
    keys = parse_key_lines(read_text(path, "keys.file").splitlines())
    if not keys:
        raise SettingsError(
            f"keys.file: {path} holds no key: every request would be refused. Leave the setting out to accept all."
        )
    return ApiKeys(keys)


_FORM = "write 'key [name [limits]]', such as 'sk-… alice weight=2 concurrency=8'; what follows a '#' is a comment"


def parse_key_lines(lines: Iterable[str]) -> dict[bytes, ApiKey]:
    """The keys by their digests.

    Limits belong to a name: they stand on one of its lines, or are the same on each.

    Raises:
        SettingsError: a limit is unknown, is no number that it can be, stands where the name should, or differs from
            that of another line.
    """
    names: dict[bytes, str] = {}
    limits: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"keys.file, line {number}"
        name = words[1] if len(words) > 1 else f"line-{number}"
        if "=" in name:
            raise SettingsError(f"{where}: there is no name before the limits; {_FORM}.")
        names[key_digest(words[0])] = name
        known = limits.setdefault(name, {})
        for word in words[2:]:
            limit, value = _limit(word, where)
            if known.setdefault(limit, value) != value:
                why = f"keys of one name have their limits together, and {limit} is another on an earlier line"
                raise SettingsError(f"{where}: {why}. Write it on one of them, or the same on each.")
    made = {name: ApiKey(name, KeyLimits(**known) if known else NO_LIMITS) for name, known in limits.items()}
    return {digest: made[name] for digest, name in names.items()}


_COUNT = re.compile(r"([0-9]{1,15})([kM]?)")
_UNITS = {"": 1, "k": 1000, "M": 1_000_000}


def _count(text: str) -> int | None:
    """A whole number of 1 or more, such as 200 or 200k."""
    match = _COUNT.fullmatch(text)
    return (int(match[1]) * _UNITS[match[2]] or None) if match else None


def _weight(text: str) -> float | None:
    match = re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text)
    return (float(text) or None) if match else None


_KINDS: Mapping[str, tuple[Callable[[str], float | None], str]] = {
    field.name: (_count, "a whole number of 1 or more, such as 200 or 200k") for field in dataclasses.fields(KeyLimits)
} | {"weight": (_weight, "a number above 0, such as 2 or 0.5")}


def _limit(word: str, where: str) -> tuple[str, float]:
    """The name of a limit and its value. A number alone is `open`. No word is quoted: it might be a key."""
    limit, given, text = word.partition("=")
    if not given:
        limit, text = "open", word
    if limit not in _KINDS:
        raise SettingsError(f"{where}: there is no such limit. Limits are {', '.join(_KINDS)}; {_FORM}.")
    parse, kind = _KINDS[limit]
    value = parse(text)
    if value is None:
        raise SettingsError(f"{where}: {limit} must be {kind}; {_FORM}.")
    return limit, value


_NAME = operator.itemgetter(0)
_USABLE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NOT_PASSED_ON = HOP_BY_HOP | {
    # What describes this connection's message and its answer, and what our transport sets itself.
    *("host", "content-length", "content-type", "accept", "accept-encoding", "content-encoding", "expect", "cookie"),
    "x-request-id",
    # Of a node that the client did not choose.
    RANK_HEADER,
    # Credentials go on by the operator's setting alone.
    *("authorization", "x-api-key", "api-key"),
}


def request_id(fields: Fields, ids: Iterator[str]) -> str:
    """The client's ``x-request-id`` where it can go into logs and headers as it is, else a new one of ``ids``."""
    theirs = fields.get("x-request-id")
    return theirs if theirs and _USABLE.fullmatch(theirs) else f"req-{next(ids)}"


PRIORITY_HEADER = "x-vllm-priority"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def priority_of(fields: Fields, field: int) -> int:
    """A request's priority, smaller first: the header goes before the body's ``field``, as in vLLM 0.32.

    Both go on to the nodes, which heed them with ``--scheduling-policy priority`` and ignore them without (0.32).
    """
    theirs = fields.get(PRIORITY_HEADER)
    if theirs and _WHOLE_NUMBER.fullmatch(theirs.strip()):
        return int(theirs)
    return field


def headers_for_node(headers: Headers, fields: Fields, request_id: str, credential: Credential, own: str) -> Headers:
    """The client's headers that a node gets, with the request's id; ``own`` is the operator's credential.

    None of them tells of a body or asks for a kind of answer: the request to the node may have another one.
    """
    names = tuple(map(_NAME, headers))
    passed = [
        *itertools.compress(headers, _passed_on(names, fields.get("connection", ""))),
        ("x-request-id", request_id),
    ]
    if credential is Credential.REPLACE:
        passed.append(("authorization", f"Bearer {own}"))
    elif credential is Credential.PASS and (theirs := fields.get("authorization")):
        passed.append(("authorization", theirs))
    return tuple(passed)


@functools.lru_cache(maxsize=64)
def _passed_on(names: tuple[str, ...], connection: str) -> tuple[bool, ...]:
    """Which fields of these names go on; ``connection``: the header of this name. Most clients send the same."""
    dropped = _NOT_PASSED_ON | {token.strip().lower() for token in connection.split(",")}
    return tuple(name not in dropped and not name.startswith("x-pdproxy-") for name in names)
