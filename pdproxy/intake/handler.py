"""What intake does for a request: authenticate, read the body, get it answered, send the answer."""

import asyncio
import contextlib
import dataclasses
import re
from typing import Self

import msgspec

from pdproxy.clock import Clock
from pdproxy.credential import Secret
from pdproxy.errors import ClientError
from pdproxy.intake.auth import ANONYMOUS, ApiKey, ApiKeys, OpenRequests, headers_for_node, priority_of
from pdproxy.intake.rate_limits import RateCharge, RateLimits
from pdproxy.intake.request_context import (
    BodyBudget,
    DisconnectWatcher,
    RequestContext,
    Reservation,
    promised_length,
    read_body,
    send_head,
    send_whole,
    unread,
)
from pdproxy.intake.session import session_of
from pdproxy.legs.large import read_object
from pdproxy.legs.parse import check_values, scrub
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.forward import ForwardRequest
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.planning.shares import NO_LIMITS
from pdproxy.request import ClientRequest, Endpoint, Headers, Json, read_json
from pdproxy.response import ProxyResponse
from pdproxy.settings.types import BY_CACHE, Credential, Routing

_IN_FORM = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--')
"""The ``model`` field of a multipart form, such as audio comes in."""


class _Named(msgspec.Struct):
    """What is read of a body that goes to one node: nothing else of it is made an object."""

    model: object = None


_MODEL = msgspec.json.Decoder(_Named).decode
_BY_SESSION = BY_CACHE | {Routing.SESSION}


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerConfig:
    """Limits of a request.

    Attributes:
        body_bytes: the longest body.
        upload_seconds: for a request's whole body to arrive.
        request_seconds: for a request as a whole.
        credential: whose credential a node gets; ``own`` is the operator's, as of now.
        routing: the policy; some need to know the sessions of requests.
    """

    body_bytes: int
    upload_seconds: float
    request_seconds: float
    credential: Credential
    own: Secret
    routing: Routing = Routing.LEAST_LOADED


class _Admitted:
    """A request whose body may be read; it is open, and holds what it holds, until the end of the context.

    ``charge``: of its key's rates, where that has such.
    """

    __slots__ = ("_open_requests", "api_key", "charge", "reservation")

    def __init__(
        self, api_key: ApiKey, reservation: Reservation, charge: RateCharge | None, open_requests: OpenRequests
    ) -> None:
        self.api_key = api_key
        self.reservation = reservation
        self.charge = charge
        self._open_requests = open_requests

    def __enter__(self) -> Self:
        self._open_requests.begin(self.api_key.name)
        return self

    def __exit__(self, *_: object) -> None:
        self._open_requests.end(self.api_key.name)
        self.reservation.close()
        if self.charge is not None:
            self.charge.settle()


@dataclasses.dataclass(frozen=True, slots=True)
class RequestHandler:
    """Answers one request: what `ApiApp` routes to it."""

    keys: ApiKeys
    open_requests: OpenRequests
    rates: RateLimits
    budget: BodyBudget
    orchestrator: Orchestrator
    pool: Pool
    clock: Clock
    config: HandlerConfig

    async def generate(self, context: RequestContext, endpoint: Endpoint) -> None:
        """Answer a request whose body the proxy understands.

        Raises:
            ClientError: what the client did wrong, or why it cannot be served.
            ClientGone: the client has disconnected.
        """
        arrived = self.clock.now()
        with self._admitted(context) as admitted:
            api_key = admitted.api_key
            body = scrub(await read_object(endpoint, await self._read(context, admitted.reservation)))
            watcher = DisconnectWatcher(context.receive)
            request = self._request(context, endpoint, body, arrived, watcher, api_key)
            if self.config.routing in _BY_SESSION:
                session = session_of(context.headers, body, api_key.name)
                request = msgspec.structs.replace(request, session=session)
            if admitted.charge is not None:
                self._expect(admitted.charge, api_key, endpoint, body)
                request = msgspec.structs.replace(request, on_usage=admitted.charge.used)
            async with watcher:
                await self._respond(context, await self.orchestrator.answer(request), admitted.charge)

    async def forward(self, context: RequestContext) -> None:
        """Have one node answer a request that the proxy does not understand.

        Raises:
            ClientError, ClientGone: as `generate`.
        """
        deadline = self.clock.now() + self.config.request_seconds
        with self._admitted(context) as admitted:
            raw = await self._read(context, admitted.reservation)
            path = f"{context.path}?{context.query}" if context.query else context.path
            watcher = DisconnectWatcher(context.receive)
            headers = self._node_headers(context)
            model, key = model_of(raw), admitted.api_key.name
            request = ForwardRequest(context.method, path, headers, raw, model, deadline, watcher.left, key)
            async with watcher:
                await self._respond(context, await self.orchestrator.forward(request), admitted.charge)

    def _admitted(self, context: RequestContext) -> "_Admitted":
        """What is decided before the body is read: by the key, its limits, the room for bodies and in the queue.

        Raises:
            ClientError: 401, 429: it is not to be read.
        """
        api_key = ANONYMOUS
        try:
            api_key = self.keys.api_key(context.headers)
            self.open_requests.check(api_key)
            self.orchestrator.check_room(api_key.name)
            promised = promised_length(context.headers)
            fits = promised <= self.config.body_bytes  # one that never will is refused for that
            reservation = self.budget.reserve(api_key.name, promised if fits else 0)
            charge = None if api_key.limits is NO_LIMITS else self.rates.begin(api_key)
        except ClientError as error:
            if error.status == 429:
                self.orchestrator.turned_away(context.endpoint, api_key.name)
            raise unread(error, context.headers) from None
        return _Admitted(api_key, reservation, charge, self.open_requests)

    def _expect(self, charge: RateCharge, api_key: ApiKey, endpoint: Endpoint, body: Json) -> None:
        """The tokens of a request are known now, about; raises the `ClientError` 429 where they are not left."""
        try:
            charge.expect(*self.orchestrator.expected_tokens(endpoint, body))
        except ClientError:
            self.orchestrator.turned_away(endpoint, api_key.name)
            raise

    async def _read(self, context: RequestContext, reservation: Reservation) -> bytes:
        try:
            async with asyncio.timeout(self.config.upload_seconds):
                return await read_body(context.receive, context.headers, self.config.body_bytes, reservation.grow_to)
        except TimeoutError:
            text = f"The body did not arrive within {self.config.upload_seconds:g} s."
            raise ClientError(408, text, code="upload_timeout", headers=(("connection", "close"),)) from None

    def _request(
        self,
        context: RequestContext,
        endpoint: Endpoint,
        body: Json,
        arrived: float,
        watcher: DisconnectWatcher,
        api_key: ApiKey,
    ) -> ClientRequest:
        return ClientRequest(
            request_id=context.request_id,
            endpoint=endpoint,
            body=body,
            headers=self._node_headers(context),
            model=str(body.get("model", "")),
            stream=body.get("stream") is True,
            priority=priority_of(context.headers, body),
            arrived=arrived,
            deadline=arrived + self.config.request_seconds,
            left=watcher.left,
            api_key=api_key.name,
        )

    def _node_headers(self, context: RequestContext) -> Headers:
        return headers_for_node(context.headers, context.request_id, self.config.credential, self.config.own.word)

    async def _respond(self, context: RequestContext, response: ProxyResponse, charge: RateCharge | None) -> None:
        headers = (*response.headers, ("x-request-id", context.request_id))
        if charge is not None:
            headers = (*headers, *charge.headers())
            if response.status < 400:
                charge.answered()
        if isinstance(response.body, bytes):
            await send_whole(context.send, response.status, headers, response.body)
            return
        try:
            await send_head(context.send, response.status, headers)
            async for piece in response.body:
                await context.send({"type": "http.response.body", "body": piece, "more_body": True})
                if context.sink is not None:
                    await response.body.pipe_to(context.sink)
            await context.send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            await context.break_off(shutting_down_error())  # goes nowhere where the client has disconnected
            raise
        finally:
            await response.body.aclose()


def shutting_down_error() -> ClientError:
    """The error for a request that still runs at the end of a shutdown's grace period."""
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
    if not raw.startswith(b"--"):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            model = _MODEL(raw).model
            return model if isinstance(model, str) else ""
        with contextlib.suppress(ValueError, RecursionError):
            body = read_json(raw)
            model = body.get("model") if isinstance(body, dict) else None
            return model if isinstance(model, str) else ""
    field = _IN_FORM.search(raw)
    return field.group(1).decode("utf-8", "replace") if field else ""
