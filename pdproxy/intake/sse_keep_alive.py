"""Comments in an event stream while nothing comes, so that a load balancer does not cut its silent connection.

Before the first event retries go on; later a stream may wait for a node that takes it over.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TypeVar

from pdproxy.intake.exchange import HttpExchange

Awaited = TypeVar("Awaited")
COMMENT = b": keep-alive\n\n"
"""An event stream's clients skip comments (HTML standard, 9.2.6)."""
_HEADERS = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))


async def with_comments(exchange: HttpExchange, awaited: Coroutine[None, None, Awaited], seconds: float) -> Awaited:
    """The result of ``awaited``, between two whole events or before the first one; while it takes longer than
    ``seconds``, comments go out, before the first event after the head of a stream.

    A comment is no event, and commits the answer to nothing but being a stream. Raises what ``awaited`` raises.
    """
    waiting = asyncio.ensure_future(awaited)
    try:
        while not (await asyncio.wait((waiting,), timeout=seconds))[0]:
            if not exchange.begun:
                await exchange.send_head(200, (*_HEADERS, ("x-request-id", exchange.request_id)))
            await exchange.send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        return waiting.result()
    finally:
        if not waiting.done():
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
