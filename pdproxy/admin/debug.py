"""``POST /debug/plan``: what would be planned for a request, and what each node would cost it. Nothing is sent."""

from fastapi import APIRouter, Request

from pdproxy.errors import ClientError
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.explain import endpoint_named, explain
from pdproxy.request import Endpoint

MOST_BYTES = 16 * 1024 * 1024
"""The longest body. The proxy parses it as it would a client's, which blocks the event loop for as long."""


def plan_route(context: OrchestrationContext) -> APIRouter:
    """The route; `guarded_app` guards it."""
    routes = APIRouter()

    @routes.post("/debug/plan")
    async def debug_plan(request: Request, endpoint: str = Endpoint.CHAT) -> dict[str, object]:
        """The plan for the body of this request, were it a client's to ``endpoint``: nodes, reason, candidates."""
        raw = b""
        async for piece in request.stream():
            raw += piece
            if len(raw) > MOST_BYTES:
                raise ClientError(413, f"At most {MOST_BYTES} bytes are looked at here.", code="request_too_large")
        return await explain(context, endpoint_named(endpoint), raw)

    return routes
