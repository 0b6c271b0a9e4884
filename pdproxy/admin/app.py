"""The operator's HTTP application: health, readiness and metrics here, everything else in `guarded`.

These three are asked for all the time, and from the start on; the rest by people, perhaps never. So they are bare ASGI,
and FastAPI, half of what there is to import, is loaded with the first request that needs it.
"""

import asyncio

from prometheus_client.exposition import choose_encoder

from pdproxy.admin.context import SERVES, AdminContext, readiness
from pdproxy.admin.guard import JSON, App, Receive, Scope, Send, send_answer
from pdproxy.errors import ClientError
from pdproxy.request import write_json


class AdminApp:
    """An ASGI application: what everyone on the operators' port may see, and the guarded routes behind it."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._public = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}
        self._guarded: App | None = None
        self._loading = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._public.get(scope["path"]) if scope["type"] == "http" else None
        if answer is None:
            await (self._guarded or await self._load())(scope, receive, send)
        elif scope["method"] == "GET":
            await answer(scope, send)
        else:
            text = f"{scope['path']} takes GET, not {scope['method'][:20]}."
            error = ClientError(405, text, code="method_not_allowed")
            await send_answer(send, 405, JSON, error.body(), ((b"allow", b"GET"),))

    async def _load(self) -> App:
        """The guarded routes, made in a thread: the event loop goes on meanwhile."""
        async with self._loading:
            if self._guarded is None:
                self._guarded = await asyncio.to_thread(_guarded_app, self._context)
            return self._guarded

    async def _health(self, _: Scope, send: Send) -> None:
        """The process is alive."""
        await send_answer(send, 200, JSON, write_json({"status": "ok"}))

    async def _ready(self, _: Scope, send: Send) -> None:
        """Whether requests can be served now."""
        found = readiness(self._context)
        await send_answer(send, 200 if found in SERVES else 503, JSON, write_json({"status": found}))

    async def _metrics(self, scope: Scope, send: Send) -> None:
        """The proxy's metrics, for Prometheus."""
        encode, content_type = choose_encoder(accepted(scope))
        await send_answer(send, 200, content_type, encode(self._context.registry))


def admin_app(context: AdminContext) -> AdminApp:
    """Health, readiness, metrics and the open routes of `guarded` for everyone; nodes and requests for the operator."""
    return AdminApp(context)


def accepted(scope: Scope) -> str:
    """The request's ``Accept`` header, which chooses the format of metrics."""
    return ", ".join(value.decode("latin-1") for name, value in scope["headers"] if name == b"accept")


def _guarded_app(context: AdminContext) -> App:
    from pdproxy.admin.guarded import guarded_app

    return guarded_app(context)
