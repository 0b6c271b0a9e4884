"""The session that a request belongs to, as a hash: what `planning.session` chooses nodes by. Pure."""

from collections.abc import Iterator

from pdproxy.nodes.node import hash64
from pdproxy.raw_json import value_of
from pdproxy.request import Headers, Json, header

LONGEST_KEY = 512
"""Characters; what is longer is no key."""


def session_of(headers: Headers, body: Json, tenant: str) -> int | None:
    """The hash of the first key that the request has, and of its tenant: two tenants' equal keys do not meet.

    The key itself goes nowhere. ``tenant`` is the name of the API key.
    """
    key = next(filter(None, map(_usable, _keys(headers, body))), None)
    return None if key is None else hash64(f"{tenant}\0{key}")


def _keys(headers: Headers, body: Json) -> Iterator[object]:
    """What names a conversation comes before what may change with each request or name all of a user's."""
    yield header(headers, "x-session-affinity")
    yield header(headers, "x-session-id")
    yield value_of(body.get("prompt_cache_key"))
    yield header(headers, "x-correlation-id")
    yield value_of(body.get("user"))


def _usable(value: object) -> str | None:
    if not isinstance(value, str) or len(value) > LONGEST_KEY:
        return None
    return value.strip() or None
