"""A request's name, and which of its headers go on to a node."""

import re
import uuid

from pdproxy.nodes.node import RANK_HEADER
from pdproxy.request import Headers, header
from pdproxy.settings import Credential

_USABLE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
"""RFC 9110, 7.6.1."""

_KEPT_HERE = _HOP_BY_HOP | {
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


def onward(headers: Headers, name: str, credential: Credential, own: str) -> Headers:
    """What a node gets of the client's headers.

    Args:
        headers: the client's.
        name: the request's id.
        credential: whose credential the node gets.
        own: the operator's credential, for `Credential.REPLACE`.
    """
    dropped = _KEPT_HERE | {token.strip().lower() for token in (header(headers, "connection") or "").split(",")}
    passed = tuple(pair for pair in headers if pair[0] not in dropped and not pair[0].startswith("x-pdproxy-"))
    fixed = (("x-request-id", name), ("content-type", header(headers, "content-type") or "application/json"))
    return (*passed, *fixed, *_credential(headers, credential, own))


def _credential(headers: Headers, credential: Credential, own: str) -> Headers:
    if credential is Credential.REPLACE:
        return (("authorization", f"Bearer {own}"),)
    theirs = header(headers, "authorization")
    return (("authorization", theirs),) if credential is Credential.PASS and theirs else ()
