"""What intake does for a request: authenticate, read, find a place, have it answered, pass the answer on."""

import asyncio
import dataclasses
import json
import re

from pdproxy.clock import Clock
from pdproxy.errors import ClientError
from pdproxy.intake.admission import Admission, BodyBudget, Reservation
from pdproxy.intake.auth import ApiKeys, headers_for_node
from pdproxy.intake.request_context import DisconnectWatcher, RequestContext, read_body, send_head, send_whole
from pdproxy.legs.parse import check_values, parse, scrub
from pdproxy.nodes.node import Snapshot
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.forward import ForwardRequest
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.orchestration.response import ProxyResponse
from pdproxy.request import ClientRequest, Endpoint, Headers, Json
from pdproxy.settings.types import Credential

_IN_FORM = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--')
"""A field of a multipart form, as audio comes."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerConfig:
    """What the operator set for the door.

    Attributes:
        body_bytes: the longest body.
        upload_seconds: for a request's whole body.
        request_seconds: for a request as a whole.
        credential: whose credential a node gets; ``own`` is the operator's.
    """

    body_bytes: int
    upload_seconds: float
    request_seconds: float
    credential: Credential
    own: str


class RequestHandler:
    """Answers requests.

    Args:
        keys: who may come in.
        admission: who runs when.
        budget: for bodies.
        orchestrator: what answers.
        pool: what is served.
    """

    def __init__(
        self,
        keys: ApiKeys,
        admission: Admission,
        budget: BodyBudget,
        orchestrator: Orchestrator,
        pool: Pool,
        clock: Clock,
        rules: HandlerConfig,
    ) -> None:
        self.keys = keys
        self._admission = admission
        self._budget = budget
        self._orchestrator = orchestrator
        self._pool = pool
        self._clock = clock
        self._rules = rules

    def snapshot(self) -> Snapshot:
        """The nodes as they are now."""
        return self._pool.snapshot()

    async def generate(self, context: RequestContext, endpoint: Endpoint) -> None:
        """Answer a request whose body the proxy understands.

        Raises:
            ClientError: what the client did wrong, or why it cannot be served.
            ClientGone: there is nobody to answer.
        """
        api_key = self.keys.api_key(context.headers)
        arrived = self._clock.now()
        with self._budget.share() as share:
            body = scrub(parse(endpoint, await self._read(context, share)))
            watcher = DisconnectWatcher(context.receive)
            request = self._request(context, endpoint, body, arrived, watcher)
            async with watcher, self._admission.place(api_key, request.priority):
                await self._pass_on(context, await self._orchestrator.answer(request))

    async def forward(self, context: RequestContext) -> None:
        """Have one node answer a request that the proxy does not understand.

        Raises:
            ClientError, ClientGone: as `generate`.
        """
        api_key = self.keys.api_key(context.headers)
        deadline = self._clock.now() + self._rules.request_seconds
        with self._budget.share() as share:
            raw = await self._read(context, share)
            path, watcher = context.path + context.query, DisconnectWatcher(context.receive)
            headers_for_node = self._onward(context)
            asked = ForwardRequest(context.method, path, headers_for_node, raw, model_of(raw), deadline, watcher.left)
            async with watcher, self._admission.place(api_key, 0):
                await self._pass_on(context, await self._orchestrator.forward(asked))

    async def _read(self, context: RequestContext, share: Reservation) -> bytes:
        try:
            async with asyncio.timeout(self._rules.upload_seconds):
                return await read_body(context.receive, context.headers, self._rules.body_bytes, share.reach)
        except TimeoutError:
            text = f"The body did not arrive within {self._rules.upload_seconds:g} s."
            raise ClientError(408, text, code="upload_timeout", headers=(("connection", "close"),)) from None

    def _request(
        self, context: RequestContext, endpoint: Endpoint, body: Json, arrived: float, watcher: DisconnectWatcher
    ) -> ClientRequest:
        priority = body.get("priority")
        return ClientRequest(
            request_id=context.request_id,
            endpoint=endpoint,
            body=body,
            headers=self._onward(context),
            model=str(body.get("model", "")),
            stream=body.get("stream") is True,
            priority=priority if isinstance(priority, int) else 0,
            arrived=arrived,
            deadline=arrived + self._rules.request_seconds,
            left=watcher.left,
        )

    def _onward(self, context: RequestContext) -> Headers:
        return headers_for_node(context.headers, context.request_id, self._rules.credential, self._rules.own)

    async def _pass_on(self, context: RequestContext, reply: ProxyResponse) -> None:
        headers = (*reply.headers, ("x-request-id", context.request_id))
        if isinstance(reply.body, bytes):
            await send_whole(context.send, reply.status, headers, reply.body)
            return
        try:
            await send_head(context.send, reply.status, headers)
            async for piece in reply.body:
                await context.send({"type": "http.response.body", "body": piece, "more_body": True})
                if context.sink is not None:
                    await reply.body.pipe_to(context.sink)
            await context.send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            await context.break_off(shutting_down_error())  # nobody hears it where the client is the one who left
            raise
        finally:
            await reply.body.aclose()


def shutting_down_error() -> ClientError:
    """The time that running requests have at a shutdown is up."""
    return ClientError(
        503,
        "This server is shutting down, and the answer was not complete in time: ask again.",
        kind="service_unavailable",
        code="shutting_down",
        headers=(("retry-after", "1"),),
    )


def model_of(raw: bytes) -> str:
    """The ``model`` of a JSON body or a form; "" where there is none.

    Raises:
        ClientError: 413 for a body of too many values.
    """
    check_values(raw)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        field = _IN_FORM.search(raw)
        return field.group(1).decode("utf-8", "replace") if field else ""
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else ""
