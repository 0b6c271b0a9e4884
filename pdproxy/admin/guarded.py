"""The part of the operator's HTTP application that is made with FastAPI: nodes, requests, plans, and the page.

Loaded with the first request for it (`admin.app`): importing FastAPI takes as long as everything else at start.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError

from pdproxy.admin.context import AdminContext
from pdproxy.admin.debug import plan_route
from pdproxy.admin.nodes import node_routes, scrape_targets
from pdproxy.admin.page import page_route, state_route
from pdproxy.credential import Secret
from pdproxy.errors import ClientError
from pdproxy.nodes.cohorts import Answer
from pdproxy.nodes.pool import DuplicateNode, UnknownNode


def guarded_app(context: AdminContext) -> FastAPI:
    """The empty page and `open_routes` for everyone on this port; nodes and requests for the operator."""
    app = FastAPI(title="pdproxy administration", docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (ClientError, UnknownNode, DuplicateNode, RequestValidationError):
        app.add_exception_handler(kind, _error_response)
    app.include_router(page_route())
    app.include_router(open_routes(context))
    planning = [] if context.orchestration is None else [plan_route(context.orchestration)]
    for guarded in (node_routes(context), state_route(context), *planning):
        app.include_router(guarded, dependencies=[Depends(require_operator(context.token))])
    return app


def open_routes(context: AdminContext) -> APIRouter:
    """Routes that nodes and Prometheus ask: they have no token."""
    routes = APIRouter()

    @routes.get("/may-leave")
    async def may_leave(
        host: Annotated[str, Query(max_length=253)], port: Annotated[int, Query(ge=1, le=65535)]
    ) -> Answer:
        """Whether the node at this address may go, which it asks itself before it ends (docs/upgrading.md)."""
        return context.cohorts.may_leave(host, port)

    @routes.get("/prometheus/targets")
    async def targets() -> list[dict[str, object]]:
        """Where the nodes' own metrics are, whatever their state."""
        return [target for view in context.pool.state().nodes for target in scrape_targets(view.node)]

    return routes


def require_operator(token: Secret) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets only the operator through: with a token, each request must carry it as
    ``Authorization: Bearer``. `guard` has looked at the request before.

    Raises:
        ClientError: 401.
    """

    async def check(request: Request) -> None:
        if token.word and not _carries(request, token.word):
            raise ClientError(
                401,
                "This needs the admin token, as 'Authorization: Bearer …'.",
                code="admin_token_needed",
                headers=(("www-authenticate", "Bearer"),),
            )

    return check


def _carries(request: Request, token: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


async def _error_response(_: Request, error: Exception) -> Response:
    shown = _client_error(error)
    return Response(shown.body(), shown.status, {"content-type": "application/json", **dict(shown.headers)})


def _client_error(error: Exception) -> ClientError:
    match error:
        case UnknownNode():
            return ClientError(404, f"There is {error}: see GET /nodes.", code="node_not_found")
        case DuplicateNode():
            return ClientError(409, f"{error}: remove it first, or choose another name.", code="node_exists")
        case RequestValidationError():
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"][1:]) or "body"
            return ClientError(400, f"{where}: {first['msg']}.", param=where)
        case ClientError():
            return error
    raise error
