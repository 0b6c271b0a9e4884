"""What intake does for a request: find out what it asks for, authenticate, read the body, have it answered, send that.

Written against bare ASGI and what our own server offers beside it (`Exchange`): this is the hot path, where a
framework's routing would cost more than our own work.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable
from typing import Self

import msgspec

from pdproxy.clock import Clock
from pdproxy.credential import Secret
from pdproxy.errors import BrokenAnswer, ClientError
from pdproxy.intake import routes
from pdproxy.intake.auth import ANONYMOUS, ApiKey, ApiKeys, OpenRequests, headers_for_node, priority_of, request_id
from pdproxy.intake.content_coding import decompressed, is_compressed
from pdproxy.intake.rate_limits import RateCharge, RateLimits
from pdproxy.intake.request_context import (
    JSON_HEADER,
    AsgiApp,
    BodyBudget,
    ClientGone,
    DisconnectWatcher,
    Receive,
    RequestContext,
    Reservation,
    Scope,
    Send,
    TrackedSend,
    accept_body,
    check_head,
    headers_of,
    promised_length,
    read_body,
    send_head,
    send_whole,
    too_large,
    unread,
)
from pdproxy.intake.session import session_of
from pdproxy.intake.sse_keep_alive import answer_with_comments
from pdproxy.legs.form import FORM, model_in_form
from pdproxy.legs.lax_fields import UnreadableField
from pdproxy.legs.parse import LARGE, checked_fields, model_in, model_of, parse, reading, scrub
from pdproxy.legs.turns import in_turns
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.client_errors import BUG, only_model, shutting_down_error
from pdproxy.orchestration.forward import ForwardRequest
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.planning.shares import NO_LIMITS
from pdproxy.raw_json import Steps, at_once
from pdproxy.request import ClientRequest, Endpoint, Headers, HeldBody, Json, header, media_type, write_json
from pdproxy.response import EXCHANGE_EXTENSION, ProxyResponse
from pdproxy.settings.types import Credential, Routing

_LOG = logging.getLogger("pdproxy.intake")
_BY_SESSION = frozenset({Routing.CACHE, Routing.SESSION})
NOT_TAKEN = (ClientError, ClientGone, asyncio.CancelledError)
"""What ends a request before the orchestrator has it; from then on the orchestrator logs its end."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerConfig:
    """Limits of a request.

    Attributes:
        body_bytes: the longest body.
        upload_seconds: for a request's whole body to arrive.
        request_seconds: for a request as a whole.
        credential: whose credential a node gets; ``own`` is the operator's, as of now.
        routing: the policy; some need to know the sessions of requests.
        sse_keep_alive: seconds between two comments in a stream that has no event yet; 0 for none.
    """

    body_bytes: int
    upload_seconds: float
    request_seconds: float
    credential: Credential
    own: Secret
    routing: Routing = Routing.CACHE
    sse_keep_alive: float = 0.0


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
            watcher = DisconnectWatcher(context.exchange)
            try:
                raw = self._read_at_once(context, admitted.reservation)
                if raw is None:
                    raw = await self._read(context, admitted.reservation)
                steps = self._understanding(context, endpoint, raw, arrived, admitted, watcher)
                request = at_once(steps) if len(raw) <= LARGE else await in_turns(steps)
                if admitted.charge is not None and isinstance(request, ClientRequest):
                    request = await self._charged(request, admitted.charge)
            except NOT_TAKEN as error:
                self.not_taken(context, error, admitted.api_key.name)
                raise
            del raw, steps  # the request lets its body go while the answer is on its way
            with watcher:
                await self._respond(context, await self._answer(context, request), admitted.charge)

    def _answer(self, context: RequestContext, request: ClientRequest | ForwardRequest) -> Awaitable[ProxyResponse]:
        if isinstance(request, ForwardRequest):
            return self.orchestrator.forward(request)
        answer = self.orchestrator.answer(request)
        if request.stream and self.config.sse_keep_alive:
            return answer_with_comments(context, answer, self.config.sse_keep_alive)
        return answer

    async def forward(self, context: RequestContext) -> None:
        """Have one node answer a request that the proxy does not understand.

        Raises:
            ClientError, ClientGone: as `generate`.
        """
        arrived = self.clock.now()
        with self._admitted(context) as admitted:
            watcher = DisconnectWatcher(context.exchange)
            try:
                request = await self._forwarding(context, arrived, admitted, watcher)
            except NOT_TAKEN as error:
                self.not_taken(context, error, admitted.api_key.name)
                raise
            with watcher:
                await self._respond(context, await self.orchestrator.forward(request), admitted.charge)

    async def _forwarding(
        self, context: RequestContext, arrived: float, admitted: _Admitted, watcher: DisconnectWatcher
    ) -> ForwardRequest:
        """The request, read as far as its model's name."""
        raw = await self._read(context, admitted.reservation)
        if context.path in routes.SCRUBBED:
            raw = write_json(scrub(await in_turns(reading(raw))))
        held, model = HeldBody(raw, admitted.reservation.close), await _forwarded_model(context.headers, raw)
        return self._forward_request(context, held, model, arrived, watcher, admitted.api_key)

    def not_taken(self, context: RequestContext, error: BaseException, key: str = "") -> None:
        """Count and log a request that ends before the orchestrator has it: one of `NOT_TAKEN` was raised."""
        match error:
            case ClientGone():
                _LOG.info("client left", extra={"request_id": context.request_id})
            case ClientError():
                self.orchestrator.refused(context.request_id, context.path, context.endpoint, key, error)
            case _:
                self.not_taken(context, shutting_down_error(), key)

    def _understanding(
        self,
        context: RequestContext,
        endpoint: Endpoint,
        raw: bytes,
        arrived: float,
        admitted: _Admitted,
        watcher: DisconnectWatcher,
    ) -> Steps[ClientRequest | ForwardRequest]:
        """Read a body as a request; with a field that cannot be read, as one that a node is asked to refuse."""
        body, model = scrub(parse(raw) if len(raw) <= LARGE else (yield from reading(raw))), ""
        api_key, free = admitted.api_key, admitted.reservation.close
        try:
            model = model_in(endpoint, body)
            fields = yield from checked_fields(endpoint, body)
        except UnreadableField:
            return self._forward_request(context, HeldBody(write_json(body), free), model, arrived, watcher, api_key)
        by_session = self.config.routing in _BY_SESSION
        return ClientRequest(
            request_id=context.request_id,
            endpoint=endpoint,
            held=HeldBody[Json](body, free),
            headers=self._node_headers(context),
            model=model or only_model(self.pool.snapshot()),
            stream=bool(fields.get("stream")),
            priority=priority_of(context.headers, fields.get("priority", 0)),
            arrived=arrived,
            deadline=arrived + self.config.request_seconds,
            left=watcher.left,
            session=session_of(context.headers, body, api_key.name) if by_session else None,
            api_key=api_key.name,
            fields=fields,
        )

    async def _charged(self, request: ClientRequest, charge: RateCharge) -> ClientRequest:
        """The request, whose tokens count against its key's rates."""
        charge.expect(*await self.orchestrator.expected_tokens(request))
        return msgspec.structs.replace(request, on_usage=charge.used)

    def _admitted(self, context: RequestContext) -> _Admitted:
        """What is decided before the body is read: by the key, its limits, the body's type, the room for bodies and in
        the queue.

        Raises:
            ClientError: 400, 401, 429: it is not to be read.
        """
        api_key = ANONYMOUS
        try:
            api_key = self.keys.api_key(context.headers)
            routes.check_media_type(context.path, context.headers)
            self.open_requests.check(api_key)
            self.orchestrator.check_room(api_key.name)
            promised = promised_length(context.headers)
            fits = promised <= self.config.body_bytes  # one that never will is refused for that
            reservation = self.budget.reserve(api_key.name, promised if fits else 0)
            charge = None if api_key.limits is NO_LIMITS else self.rates.begin(api_key)
        except ClientError as error:
            self.not_taken(context, error, api_key.name)
            raise unread(error, context.headers) from None
        return _Admitted(api_key, reservation, charge, self.open_requests)

    def _read_at_once(self, context: RequestContext, reservation: Reservation) -> bytes | None:
        """The body where all of it is here and it is not compressed: most are, and need no coroutine."""
        if header(context.headers, "content-encoding") is not None:
            return None
        whole = context.exchange.take_body()
        return None if whole is None else accept_body(whole, self.config.body_bytes, reservation.grow_to)

    async def _read(self, context: RequestContext, reservation: Reservation) -> bytes:
        body = await self._received(context, reservation)
        coding = header(context.headers, "content-encoding")
        if not is_compressed(coding):
            return body
        most = self.config.body_bytes

        def grow_to(size: int) -> None:
            if size > most:
                raise too_large(most)
            reservation.grow_to(max(size, len(body)))

        return await decompressed(body, coding or "", grow_to)

    async def _received(self, context: RequestContext, reservation: Reservation) -> bytes:
        """The body as it was sent."""
        most, whole = self.config.body_bytes, context.exchange.take_body()
        check_head(context.headers, most)
        if whole is not None:
            return accept_body(whole, most, reservation.grow_to)
        try:
            async with asyncio.timeout(self.config.upload_seconds):
                return await read_body(context.receive, most, reservation.grow_to)
        except TimeoutError:
            text = f"The body did not arrive within {self.config.upload_seconds:g} s."
            raise ClientError(408, text, code="upload_timeout", headers=(("connection", "close"),)) from None

    def _forward_request(
        self,
        context: RequestContext,
        held: HeldBody[bytes],
        model: str,
        arrived: float,
        watcher: DisconnectWatcher,
        api_key: ApiKey,
    ) -> ForwardRequest:
        return ForwardRequest(
            request_id=context.request_id,
            method=context.method,
            path=f"{context.path}?{context.query}" if context.query else context.path,
            headers=self._node_headers(context),
            held=held,
            model=model,
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
            if context.send.begun:  # with comments: the node's own error is the stream's only event
                await context.end_with(response.body)
                return
            await send_whole(context.send, response.status, headers, response.body)
            return
        sink = context.exchange.sink
        try:
            if not context.send.begun:
                await send_head(context.send, response.status, headers)
            while piece := await response.body.read():
                await context.send({"type": "http.response.body", "body": piece, "more_body": True})
                if sink is not None:
                    await response.body.pipe_to(sink)
            await context.send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            await context.break_off(shutting_down_error())  # goes nowhere where the client has disconnected
            raise
        finally:
            await response.body.aclose()


async def _forwarded_model(headers: Headers, raw: bytes) -> str:
    """The model that a body asks for which goes to one node as it is."""
    if media_type(headers) == FORM:
        return await in_turns(model_in_form(raw, header(headers, "content-type") or ""))
    return model_of(raw)


class ApiApp:
    """Routes requests by path and method.

    ``operator``: the ASGI application that answers the paths ``shown`` of the operators' ones.
    """

    def __init__(self, handler: RequestHandler, operator: AsgiApp, shown: frozenset[str]) -> None:
        self._handler = handler
        self._operator = operator
        self._shown = shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ClientError(404, f"Only HTTP is served here, not {scope['type']}.")
        headers, path = headers_of(scope), scope["path"]
        if path[-1:] == "/":  # vLLM redirects to the path without it; to serve that at once is one exchange less
            path = path.rstrip("/")
        name = request_id(headers)
        context = RequestContext(
            method=scope["method"],
            path=path,
            query=scope["query_string"].decode("latin-1"),
            headers=headers,
            request_id=name,
            receive=receive,
            send=TrackedSend(send),
            exchange=scope["extensions"][EXCHANGE_EXTENSION],
            endpoint=routes.GENERATING.get(path),
        )
        try:
            await self._answer(context, scope)
        except ClientGone:
            pass
        except ClientError as error:
            await (context.break_off(error) if context.send.begun else context.refuse(error))
        except BrokenAnswer:
            return  # its line is written; the server cuts the connection of an answer that is not complete
        except asyncio.CancelledError:  # The server's time is up; this is the top of the task: it ends with its answer.
            await context.refuse(shutting_down_error())
        except Exception:
            _LOG.exception("unexpected failure", extra={"request_id": name})
            text = f"The proxy failed on this request; its log says more under {name}."
            await context.refuse(ClientError(500, text, kind="server_error", code=BUG))
            raise

    def _answer(self, context: RequestContext, scope: Scope) -> Awaitable[None]:
        """The coroutine that answers this path."""
        if context.method == "POST" and context.endpoint is not None:
            return self._handler.generate(context, context.endpoint)
        if context.method in routes.FORWARDED.get(context.path, ()):
            return self._handler.forward(context)
        return self._answer_itself(context, scope)

    async def _answer_itself(self, context: RequestContext, scope: Scope) -> None:
        """What needs no node."""
        try:
            method = "GET" if context.method == "HEAD" else context.method  # the server leaves the body out
            if method == "GET" and context.path in self._shown:
                await self._operate(context, scope)
            elif method == "GET" and (body := self._document(context)) is not None:
                await send_whole(context.send, 200, (JSON_HEADER,), body)
            else:
                raise routes.unknown_path(context.method, context.path, self._shown)
        except ClientError as error:
            self._handler.not_taken(context, error)
            raise

    async def _operate(self, context: RequestContext, scope: Scope) -> None:
        if context.path == routes.METRICS:
            self._handler.keys.api_key(context.headers)
        await self._operator({**scope, "method": "GET", "path": context.path}, context.receive, context.send)

    def _document(self, context: RequestContext) -> bytes | None:
        """What the proxy answers by itself; None for any other path."""
        if context.path == routes.OPENAPI:
            return routes.openapi_document()
        if not routes.is_of_models(context.path):
            return None
        self._handler.keys.api_key(context.headers)
        return routes.models_document(context.path, self._handler.pool.snapshot())
