"""The ASGI application that clients talk to.

Written against bare ASGI: this is the hot path, where a framework's routing would cost more than our own work.
"""

import asyncio
import logging
import urllib.parse
from collections.abc import Awaitable, Callable

from pdproxy.errors import ClientError
from pdproxy.intake import documents, paths
from pdproxy.intake.auth import request_id
from pdproxy.intake.documents import openapi_document
from pdproxy.intake.handler import RequestHandler, shutting_down_error
from pdproxy.intake.request_context import (
    JSON,
    ClientGone,
    Receive,
    RequestContext,
    Scope,
    Send,
    TrackedSend,
    headers_of,
    send_whole,
)
from pdproxy.request import Headers
from pdproxy.response import SINK_EXTENSION

_LOG = logging.getLogger("pdproxy.intake")

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class ApiApp:
    """Lets requests in, by path.

    Args:
        service: what answers generating requests.
        operator: the ASGI application that answers /health, /ready and /metrics.
    """

    def __init__(self, service: RequestHandler, operator: AsgiApp) -> None:
        self._service = service
        self._operator = operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ClientError(404, f"Only HTTP is served here, not {scope['type']}.")
        headers = headers_of(scope)
        name = request_id(headers)
        sink = scope.get("extensions", {}).get(SINK_EXTENSION, {}).get("sink")
        context = RequestContext(
            scope["method"], scope["path"], query(scope), headers, name, receive, TrackedSend(send), sink
        )
        try:
            await self._dispatch(context, scope)
        except ClientGone:
            _LOG.info("client left", extra={"request_id": name})
        except ClientError as error:
            await context.refuse(error)
        except asyncio.CancelledError:  # The server's time is up; this is the top of the task: it ends with its answer.
            _LOG.warning("cut short by the shutdown", extra={"request_id": name})
            await context.refuse(shutting_down_error())
        except Exception:
            _LOG.exception("unexpected failure", extra={"request_id": name})
            await context.refuse(_ours(name))
            raise

    async def _dispatch(self, context: RequestContext, scope: Scope) -> None:
        path = context.path
        method = "GET" if context.method == "HEAD" else context.method  # the server leaves the body out
        if method == "POST" and path in paths.GENERATING:
            await self._service.generate(context, paths.GENERATING[path])
        elif method == "POST" and path in paths.PASSED_ON:
            await self._service.forward(context)
        elif method == "GET" and path in paths.OPERATOR:
            await self._operate(context, scope)
        elif method == "GET" and (body := self._document(path, context.headers)) is not None:
            await send_whole(context.send, 200, (JSON,), body)
        else:
            raise paths.unknown(context.method, path)

    async def _operate(self, context: RequestContext, scope: Scope) -> None:
        if context.path == "/metrics":
            self._service.keys.api_key(context.headers)
        await self._operator({**scope, "method": "GET"}, context.receive, context.send)

    def _document(self, path: str, headers: Headers) -> bytes | None:
        if path == "/openapi.json":
            return openapi_document()
        if path == "/v1/models":
            self._service.keys.api_key(headers)
            return documents.model_list(self._service.snapshot())
        if path.startswith("/v1/models/"):
            self._service.keys.api_key(headers)
            return self._model(urllib.parse.unquote(path.removeprefix("/v1/models/")))
        return None

    def _model(self, name: str) -> bytes:
        card = documents.model_card(self._service.snapshot(), name)
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
