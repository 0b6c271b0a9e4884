"""The ASGI application that clients talk to.

Written against bare ASGI: this is the hot path, where a framework's routing would cost more than our own work.
"""

import asyncio
import logging
import urllib.parse
from collections.abc import Awaitable, Callable

from pdproxy.errors import ClientError
from pdproxy.intake import models, paths
from pdproxy.intake.asgi import JSON, ClientGone, Receive, Scope, Send, headers_of, send_whole
from pdproxy.intake.exchange import Exchange, Sender
from pdproxy.intake.identity import request_id
from pdproxy.intake.openapi import document
from pdproxy.intake.service import Service, leaving
from pdproxy.request import Headers
from pdproxy.sink import EXTENSION

_LOG = logging.getLogger("pdproxy.intake")

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Door:
    """Lets requests in, by path.

    Args:
        service: what answers generating requests.
        operator: the ASGI application that answers /health, /ready and /metrics.
    """

    def __init__(self, service: Service, operator: AsgiApp) -> None:
        self._service = service
        self._operator = operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ClientError(404, f"Only HTTP is served here, not {scope['type']}.")
        headers = headers_of(scope)
        name = request_id(headers)
        sink = scope.get("extensions", {}).get(EXTENSION, {}).get("sink")
        exchange = Exchange(scope["method"], scope["path"], query(scope), headers, name, receive, Sender(send), sink)
        try:
            await self._dispatch(exchange, scope)
        except ClientGone:
            _LOG.info("client left", extra={"request_id": name})
        except ClientError as error:
            await exchange.refuse(error)
        except asyncio.CancelledError:  # The server's time is up; this is the top of the task: it ends with its answer.
            _LOG.warning("cut short by the shutdown", extra={"request_id": name})
            await exchange.refuse(leaving())
        except Exception:
            _LOG.exception("unexpected failure", extra={"request_id": name})
            await exchange.refuse(_ours(name))
            raise

    async def _dispatch(self, exchange: Exchange, scope: Scope) -> None:
        path = exchange.path
        method = "GET" if exchange.method == "HEAD" else exchange.method  # the server leaves the body out
        if method == "POST" and path in paths.GENERATING:
            await self._service.generate(exchange, paths.GENERATING[path])
        elif method == "POST" and path in paths.PASSED_ON:
            await self._service.forward(exchange)
        elif method == "GET" and path in paths.OPERATOR:
            await self._operate(exchange, scope)
        elif method == "GET" and (body := self._document(path, exchange.headers)) is not None:
            await send_whole(exchange.send, 200, (JSON,), body)
        else:
            raise paths.unknown(exchange.method, path)

    async def _operate(self, exchange: Exchange, scope: Scope) -> None:
        if exchange.path == "/metrics":
            self._service.keys.holder(exchange.headers)
        await self._operator({**scope, "method": "GET"}, exchange.receive, exchange.send)

    def _document(self, path: str, headers: Headers) -> bytes | None:
        if path == "/openapi.json":
            return document()
        if path == "/v1/models":
            self._service.keys.holder(headers)
            return models.listing(self._service.snapshot())
        if path.startswith("/v1/models/"):
            self._service.keys.holder(headers)
            return self._model(urllib.parse.unquote(path.removeprefix("/v1/models/")))
        return None

    def _model(self, name: str) -> bytes:
        card = models.single(self._service.snapshot(), name)
        if card is None:
            raise ClientError(
                404, f"The model {name[:100]!r} is not served here: see /v1/models.", code="model_not_found"
            )
        return card


def query(scope: Scope) -> str:
    """The query string, with its question mark; "" without one."""
    raw: bytes = scope["query_string"]
    return f"?{raw.decode('latin-1')}" if raw else ""


def _ours(name: str) -> ClientError:
    text = f"The proxy failed on this request; its log says more under {name}."
    return ClientError(500, text, kind="server_error", code="internal_error")
