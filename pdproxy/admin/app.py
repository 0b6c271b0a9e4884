"""The operator's HTTP application."""

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client.exposition import choose_encoder

from pdproxy.admin.context import AdminContext, Readiness, readiness, require_operator
from pdproxy.admin.routes import page_router, router, state_router
from pdproxy.errors import ClientError
from pdproxy.nodes.pool import DuplicateNode, UnknownNode


def admin_app(desk: AdminContext) -> FastAPI:
    """Health, readiness, metrics and the empty page for everyone on this port; nodes and requests for the operator."""
    app = FastAPI(title="pdproxy administration", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ClientError, _client_error)
    app.add_exception_handler(UnknownNode, _unknown_node)
    app.add_exception_handler(DuplicateNode, _duplicate_node)
    app.add_exception_handler(RequestValidationError, _invalid)
    _add_signs(app, desk)
    app.include_router(page_router())
    for guarded in (router(desk), state_router(desk)):
        app.include_router(guarded, dependencies=[Depends(require_operator(desk.token))])
    return app


def _add_signs(app: FastAPI, desk: AdminContext) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Requests can be served now."""
        found = readiness(desk)
        return JSONResponse({"status": found}, 200 if found is Readiness.READY else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """What is counted, for Prometheus."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(desk.registry), headers={"content-type": content_type})


async def _client_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ClientError)
    return _answer(error)


async def _unknown_node(_: Request, error: Exception) -> Response:
    return _answer(ClientError(404, f"There is {error}: see GET /nodes.", code="node_not_found"))


async def _duplicate_node(_: Request, error: Exception) -> Response:
    return _answer(ClientError(409, f"{error}: remove it first, or choose another name.", code="node_exists"))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or "body"
    return _answer(ClientError(400, f"{where}: {first['msg']}.", param=where))


def _answer(error: ClientError) -> Response:
    headers = {"content-type": "application/json", **dict(error.headers)}
    return Response(error.body(), error.status, headers=headers)
