"""The session that a request belongs to, as a hash: what `planning.session` chooses nodes by. Pure."""

from pdproxy.nodes.node import hash64
from pdproxy.raw_json import value_of
from pdproxy.request import Fields, Json

LONGEST_KEY = 512
"""Characters; what is longer is no key."""


def session_of(fields: Fields, body: Json, tenant: str) -> int | None:
    """The hash of the first key that the request has, and of its tenant: two tenants' equal keys do not meet.

    The key itself goes nowhere. ``tenant`` is the name of the API key.
    """
    # What names a conversation comes before what may change with each request or name all of a user's.
    named = (
        fields.get("x-session-affinity"),
        fields.get("x-session-id"),
        body.get("prompt_cache_key"),
        fields.get("x-correlation-id"),
        body.get("user"),
    )
    for raw in filter(None, named):
        key = value_of(raw)
        if isinstance(key, str) and len(key) <= LONGEST_KEY and (key := key.strip()):
            return hash64(f"{tenant}\0{key}")
    return None
