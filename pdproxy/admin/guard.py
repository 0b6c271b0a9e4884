"""Who may change nodes."""

import hmac
import urllib.parse
from collections.abc import Awaitable, Callable

from fastapi import Request

from pdproxy.errors import ClientError

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def guard(token: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets only the operator through.

    With a token, each request must carry it as ``Authorization: Bearer``. Without one (the port is the operator's own),
    a web page of another origin must still not be able to change anything through the operator's browser.

    Raises:
        ClientError: 401 or 403.
    """

    async def check(request: Request) -> None:
        if token is not None and not _carries(request, token):
            raise ClientError(
                401,
                "This needs the admin token, as 'Authorization: Bearer …'.",
                code="admin_token_needed",
                headers=(("www-authenticate", "Bearer"),),
            )
        if request.method not in _SAFE and _is_foreign(request):
            raise ClientError(403, "A page of another origin may not change nodes.", code="foreign_origin")

    return check


def _carries(request: Request, token: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _is_foreign(request: Request) -> bool:
    origin = request.headers.get("origin")
    return origin is not None and urllib.parse.urlsplit(origin).netloc != request.headers.get("host")
