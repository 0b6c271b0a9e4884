"""Comments in an event stream that has no event yet, so that a load balancer does not cut its silent connection."""

import asyncio
import contextlib
from collections.abc import Coroutine

from pdproxy.intake.exchange import HttpExchange, send_head
from pdproxy.response import ProxyResponse

COMMENT = b": keep-alive\n\n"
"""An event stream's clients skip comments (HTML standard, 9.2.6)."""
_HEADERS = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))


async def answer_with_comments(
    exchange: HttpExchange, answer: Coroutine[None, None, ProxyResponse], seconds: float
) -> ProxyResponse:
    """The response of ``answer``; while it takes longer than ``seconds``, the head of a stream, and comments, go out.

    Retries go on meanwhile: a comment is no event, and commits the answer to nothing but being a stream.
    Raises what ``answer`` raises.
    """
    answering = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait((answering,), timeout=seconds))[0]:
            if not exchange.begun:
                await send_head(exchange.send, 200, (*_HEADERS, ("x-request-id", exchange.request_id)))
            await exchange.send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        return answering.result()
    finally:
        if not answering.done():
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
