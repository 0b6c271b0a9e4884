"""API keys and their limits, request ids, priorities, and which headers of a client go on to a node."""

import contextlib
import dataclasses
import hashlib
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pdproxy.credential import read_text
from pdproxy.errors import ClientError, SettingsError
from pdproxy.nodes.node import RANK_HEADER
from pdproxy.observe.labels import Rejection
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.client_errors import rejected_error
from pdproxy.request import HOP_BY_HOP, Headers, Json, header
from pdproxy.settings.types import Credential


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    """A client's key. ``limit``: requests that keys of this name may have open at once; None: no limit of its own."""

    name: str
    limit: int | None = None


ANONYMOUS = ApiKey("anonymous")


@dataclasses.dataclass(slots=True)
class ApiKeys:
    """The accepted keys, by their digests; without any, every request is accepted. `replace` them while requests run:
    a request is asked for its key once, when it comes.
    """

    by_digest: Mapping[bytes, ApiKey] = dataclasses.field(default_factory=dict)

    def replace(self, keys: "ApiKeys") -> None:
        """Accept those keys, and no others, from now on."""
        self.by_digest = keys.by_digest

    def api_key(self, headers: Headers) -> ApiKey:
        """The key that a request carries.

        Raises:
            ClientError: 401 for no key or an unknown one.
        """
        if not self.by_digest:
            return ANONYMOUS
        found = self.by_digest.get(key_digest(presented_key(headers)))
        if found is None:
            raise ClientError(
                401,
                "Incorrect or missing API key: send it as 'Authorization: Bearer KEY'.",
                kind="authentication_error",
                code="invalid_api_key",
                headers=(("www-authenticate", "Bearer"),),
            )
        return found


class KeyLimits:
    """How many requests of each API key are open: they run, or wait.

    ``limit``: of a key that has none of its own; 0 for none.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def one_open(self, api_key: ApiKey) -> Iterator[None]:
        """One request more is open while inside.

        Raises:
            ClientError: 429: the key has as many as it may.
        """
        limit, name = api_key.limit or (self._limit if api_key is not ANONYMOUS else 0), api_key.name
        if limit and self._open[name] >= limit:
            self._metrics.rejected(Rejection.KEY_LIMIT)
            text = f"This API key may have {limit} requests open at once."
            raise rejected_error(Rejection.KEY_LIMIT, text, 1)
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]


def presented_key(headers: Headers) -> str:
    """The key in a request's headers, "" without one: OpenAI's header, else Anthropic's."""
    scheme, _, key = (header(headers, "authorization") or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else (header(headers, "x-api-key") or "")


def key_digest(key: str) -> bytes:
    """SHA-256: keys themselves are not kept."""
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: Path | None) -> ApiKeys:
    """Read a file of keys; no path: no keys.

    Raises:
        SettingsError: the file cannot be read, holds no key, or a line is wrong (by its number; never the key itself).
    """
    if path is None:
        return ApiKeys({})
    by_digest = dict(parse_key_lines(read_text(path, "keys.file").splitlines()))
    if not by_digest:
        raise SettingsError(
            f"keys.file: {path} holds no key: every request would be refused. Leave the setting out to accept all."
        )
    return ApiKeys(by_digest)


def parse_key_lines(lines: Iterable[str]) -> Iterable[tuple[bytes, ApiKey]]:
    """The digest and the key of each line.

    Raises:
        SettingsError: a line with more than three words or a limit that is no positive number.
    """
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 3 or (len(words) == 3 and not (words[2].isdecimal() and int(words[2]) > 0)):
            raise SettingsError(f"keys.file, line {number}: write 'key [name [limit]]', with a limit of 1 or more.")
        name = words[1] if len(words) > 1 else f"line-{number}"
        yield key_digest(words[0]), ApiKey(name, int(words[2]) if len(words) == 3 else None)


_USABLE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NOT_PASSED_ON = HOP_BY_HOP | {
    # What describes this connection's message, and what our transport sets itself.
    *("host", "content-length", "content-type", "accept-encoding", "content-encoding", "expect", "cookie"),
    "x-request-id",
    # Of a node that the client did not choose.
    RANK_HEADER,
    # Credentials go on by the operator's setting alone.
    *("authorization", "x-api-key", "api-key"),
}


def request_id(headers: Headers) -> str:
    """The client's ``x-request-id`` where it can go into logs and headers as it is, else a new one."""
    theirs = header(headers, "x-request-id") or ""
    return theirs if _USABLE.fullmatch(theirs) else f"req-{uuid.uuid4().hex}"


PRIORITY_HEADER = "x-vllm-priority"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def priority_of(headers: Headers, body: Json) -> int:
    """A request's priority, smaller first: the header goes before the body's field, as in vLLM 0.32; 0 without.

    Both go on to the nodes, which heed them with ``--scheduling-policy priority`` and ignore them without (0.32).
    """
    theirs = (header(headers, PRIORITY_HEADER) or "").strip()
    if _WHOLE_NUMBER.fullmatch(theirs):
        return int(theirs)
    priority = body.get("priority")
    return priority if isinstance(priority, int) else 0


def headers_for_node(headers: Headers, request_id: str, credential: Credential, own: str) -> Headers:
    """What a node gets of the client's headers, with the request's id; ``own`` is the operator's credential."""
    dropped = _NOT_PASSED_ON | {token.strip().lower() for token in (header(headers, "connection") or "").split(",")}
    passed = tuple(pair for pair in headers if pair[0] not in dropped and not pair[0].startswith("x-pdproxy-"))
    fixed = (("x-request-id", request_id), ("content-type", header(headers, "content-type") or "application/json"))
    return (*passed, *fixed, *_credential(headers, credential, own))


def _credential(headers: Headers, credential: Credential, own: str) -> Headers:
    if credential is Credential.REPLACE:
        return (("authorization", f"Bearer {own}"),)
    theirs = header(headers, "authorization")
    return (("authorization", theirs),) if credential is Credential.PASS and theirs else ()
