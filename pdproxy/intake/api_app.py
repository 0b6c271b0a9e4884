"""The ASGI application that clients talk to: which paths there are, and what the proxy answers by itself.

Written against bare ASGI: this is the hot path, where a framework's routing would cost more than our own work.
"""

import asyncio
import functools
import importlib.resources
import logging
import urllib.parse
from collections.abc import Awaitable, Callable

from pdproxy import __version__
from pdproxy.errors import ClientError
from pdproxy.intake.auth import request_id
from pdproxy.intake.handler import RequestHandler, shutting_down_error
from pdproxy.intake.request_context import (
    JSON_HEADER,
    ClientGone,
    Receive,
    RequestContext,
    Scope,
    Send,
    TrackedSend,
    headers_of,
    send_whole,
)
from pdproxy.nodes.node import Role, Snapshot, State
from pdproxy.request import Endpoint, Headers, Json, write_json
from pdproxy.response import SINK_EXTENSION

_LOG = logging.getLogger("pdproxy.intake")

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATING = {endpoint.value: endpoint for endpoint in Endpoint}
"""The endpoints whose requests the proxy understands."""

FORWARDED = frozenset(
    {"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    | {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/audio/transcriptions", "/v1/audio/translations"}
)
"""What one node answers by itself. A list, for a node has further endpoints that are its operator's alone
(``/reset_prefix_cache``, ``/sleep``, ``/v1/load_lora_adapter``, …)."""

OPERATOR = frozenset(["/health", "/ready", "/metrics"])
"""What the clients' port shows of the operators'."""

_LISTED = (State.UP, State.PROBING, State.DOWN, State.DRAINING, State.TERMINATING)


class ApiApp:
    """Routes requests by path and method.

    ``operator``: the ASGI application that answers /health, /ready and /metrics.
    """

    def __init__(self, handler: RequestHandler, operator: AsgiApp) -> None:
        self._handler = handler
        self._operator = operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ClientError(404, f"Only HTTP is served here, not {scope['type']}.")
        headers, path = headers_of(scope), scope["path"]
        name = request_id(headers)
        context = RequestContext(
            method=scope["method"],
            path=path,
            query=scope["query_string"].decode("latin-1"),
            headers=headers,
            request_id=name,
            receive=receive,
            send=TrackedSend(send),
            endpoint=GENERATING.get(path),
            sink=scope.get("extensions", {}).get(SINK_EXTENSION, {}).get("sink"),
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
            text = f"The proxy failed on this request; its log says more under {name}."
            await context.refuse(ClientError(500, text, kind="server_error", code="internal_error"))
            raise

    async def _dispatch(self, context: RequestContext, scope: Scope) -> None:
        path = context.path
        method = "GET" if context.method == "HEAD" else context.method  # the server leaves the body out
        if method == "POST" and context.endpoint is not None:
            await self._handler.generate(context, context.endpoint)
        elif method == "POST" and path in FORWARDED:
            await self._handler.forward(context)
        elif method == "GET" and path in OPERATOR:
            await self._operate(context, scope)
        elif method == "GET" and (body := self._document(path, context.headers)) is not None:
            await send_whole(context.send, 200, (JSON_HEADER,), body)
        else:
            raise unknown_path(context.method, path)

    async def _operate(self, context: RequestContext, scope: Scope) -> None:
        if context.path == "/metrics":
            self._handler.keys.api_key(context.headers)
        await self._operator({**scope, "method": "GET"}, context.receive, context.send)

    def _document(self, path: str, headers: Headers) -> bytes | None:
        """What the proxy answers by itself; None for any other path."""
        if path == "/openapi.json":
            return openapi_document()
        if path != "/v1/models" and not path.startswith("/v1/models/"):
            return None
        self._handler.keys.api_key(headers)
        cards = model_cards(self._handler.pool.snapshot())
        if path == "/v1/models":
            return write_json({"object": "list", "data": list(cards.values())})
        name = urllib.parse.unquote(path.removeprefix("/v1/models/"))
        if name not in cards:
            text = f"The model {name[:100]!r} is not served here: see /v1/models."
            raise ClientError(404, text, code="model_not_found")
        return write_json(cards[name])


@functools.cache
def openapi_document() -> bytes:
    """The OpenAPI document, JSON."""
    import yaml  # not before somebody asks: the start is shorter without

    text = importlib.resources.files("pdproxy.intake").joinpath("openapi.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    document["info"]["version"] = __version__
    return write_json(document)


def model_cards(snapshot: Snapshot) -> dict[str, Json]:
    """OpenAI's model cards, by name: the models of the decode nodes, adapters included."""
    nodes = [view.node for view in snapshot.nodes if view.node.role is Role.DECODE and view.state in _LISTED]
    names = dict.fromkeys(name for node in nodes for name in (node.model, *node.aliases) if name)
    return {name: {"id": name, "object": "model", "created": 0, "owned_by": "pdproxy"} for name in names}


def unknown_path(method: str, path: str) -> ClientError:
    """The error for a path or method that is not served here."""
    if path in GENERATING or path in FORWARDED:
        return _wrong_method(method, path, "POST")
    if path == "/v1/models" or path in OPERATOR:
        return _wrong_method(method, path, "GET, HEAD")
    if path.startswith(f"{Endpoint.RESPONSES}/"):
        text = "Responses are not kept here: send 'store': false and the whole conversation with each request."
        return ClientError(404, text, code="not_stored")
    text = f"There is no {path[:100]} here. Generating endpoints: {', '.join(GENERATING)}; also /v1/models."
    return ClientError(404, text, code="unknown_url")


def _wrong_method(method: str, path: str, right: str) -> ClientError:
    text = f"{path} takes {right}, not {method[:20]}."
    return ClientError(405, text, code="method_not_allowed", headers=(("allow", right),))
