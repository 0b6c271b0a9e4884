"""The handler of a request: find out what it asks for, authenticate, read the body, have it answered, send that.

Written against bare ASGI and what our own server offers beside it (`Exchange`): this is the hot path, where a
framework's routing would cost more than our own work.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable

import msgspec

from pdproxy.clock import Clock
from pdproxy.credential import Secret
from pdproxy.errors import BrokenAnswer, ClientError
from pdproxy.intake import routes
from pdproxy.intake.auth import ANONYMOUS, ApiKey, ApiKeys, OpenRequests, headers_for_node, priority_of
from pdproxy.intake.body import BodyBudget, BodyReader, Reservation, promised_length, unread
from pdproxy.intake.exchange import (
    JSON_HEADER,
    AsgiApp,
    ClientGone,
    HttpExchange,
    Receive,
    Scope,
    Send,
)
from pdproxy.intake.rate_limits import RateCharge, RateLimits
from pdproxy.intake.session import session_of
from pdproxy.intake.sse_keep_alive import with_comments
from pdproxy.legs.form import FORM, model_in_form
from pdproxy.legs.keep_words import keep_asked
from pdproxy.legs.lax_fields import UnreadableField
from pdproxy.legs.parse import LARGE, checked_fields, model_in, model_of, parse, reading, scrub
from pdproxy.legs.turns import in_turns
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.client_errors import BUG, only_model, shutting_down_error
from pdproxy.orchestration.forward import ForwardRequest
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.planning.shares import NO_LIMITS
from pdproxy.random_ids import random_ids
from pdproxy.raw_json import Steps, at_once
from pdproxy.request import ClientRequest, Endpoint, Headers, HeldBody, media_type, write_json
from pdproxy.response import ProxyResponse
from pdproxy.settings.types import Credential, Keep, Routing

_LOG = logging.getLogger("pdproxy.intake")
_BY_SESSION = frozenset({Routing.CACHE, Routing.SESSION})
NOT_TAKEN = (ClientError, ClientGone, asyncio.CancelledError)
"""Errors that end a request before the orchestrator has it; from then on the orchestrator logs its end."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerConfig:
    """Limits of a request.

    Attributes:
        request_seconds: for a request as a whole.
        credential: whose credential a node gets; ``own`` is the operator's, as of now.
        routing: the policy; some need to know the sessions of requests.
        keep: which conversations nodes are asked to keep: what clients say of that is read, or not.
        sse_keep_alive: seconds between two comments in a stream that has no event yet; 0 for none.
    """

    request_seconds: float
    credential: Credential
    own: Secret
    routing: Routing = Routing.CACHE
    keep: Keep = Keep.AUTO
    sse_keep_alive: float = 0.0


class _Admitted(msgspec.Struct, frozen=True):
    """A request whose body may be read. ``charge``: of its key's rates, where that has such."""

    api_key: ApiKey
    reservation: Reservation
    charge: RateCharge | None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestHandler:
    """Answers one request: what `ApiApp` routes to it."""

    keys: ApiKeys
    open_requests: OpenRequests
    rates: RateLimits
    budget: BodyBudget
    bodies: BodyReader
    orchestrator: Orchestrator
    pool: Pool
    clock: Clock
    config: HandlerConfig

    async def serve(self, exchange: HttpExchange) -> None:
        """Have nodes answer a request.

        Raises:
            ClientError: what the client did wrong, or why it cannot be served.
            ClientGone: the client has disconnected.
        """
        arrived = self.clock.now()
        admitted = self._admit(exchange)
        name = admitted.api_key.name
        self.open_requests.add(name)
        try:
            try:
                request = await self._request(exchange, arrived, admitted)
            except NOT_TAKEN as error:
                self.not_taken(exchange, error, name)
                raise
            exchange.watch_client()
            keep_alive = self._keep_alive(request) if self.config.sse_keep_alive else 0.0
            response = await self._answer(exchange, request, keep_alive)
            await self._respond(exchange, response, admitted.charge, keep_alive)
        except asyncio.CancelledError:
            exchange.unwatch_client()
            if exchange.cancelled_by_client():
                raise ClientGone from None
            raise
        finally:
            exchange.unwatch_client()
            self.open_requests.remove(name)
            admitted.reservation.close()
            if admitted.charge is not None:
                admitted.charge.settle()

    def _keep_alive(self, request: ClientRequest | ForwardRequest) -> float:
        """Seconds after which a silent stream gets a comment; 0 for never. A forwarded one may be no event stream."""
        return self.config.sse_keep_alive if isinstance(request, ClientRequest) and request.stream else 0.0

    def _answer(
        self, exchange: HttpExchange, request: ClientRequest | ForwardRequest, keep_alive: float
    ) -> Awaitable[ProxyResponse]:
        if isinstance(request, ForwardRequest):
            return self.orchestrator.forward(request)
        answer = self.orchestrator.answer(request)
        return with_comments(exchange, answer, keep_alive) if keep_alive else answer

    async def _request(
        self, exchange: HttpExchange, arrived: float, admitted: _Admitted
    ) -> ClientRequest | ForwardRequest:
        """The request, read; only it knows its bytes, so that they may go while the answer is on its way."""
        raw = self.bodies.at_once(exchange, admitted.reservation)
        if raw is None:
            raw = await self.bodies.read(exchange, admitted.reservation)
        endpoint = exchange.endpoint
        if endpoint is None:
            return await self._unread_request(exchange, raw, arrived, admitted)
        steps = self._understanding(exchange, endpoint, raw, arrived, admitted)
        request = at_once(steps) if len(raw) <= LARGE else await in_turns(steps)
        if admitted.charge is not None and isinstance(request, ClientRequest):
            admitted.charge.expect(*await self.orchestrator.expected_tokens(request))
            return msgspec.structs.replace(request, on_usage=admitted.charge.used)
        return request

    async def _unread_request(
        self, exchange: HttpExchange, raw: bytes, arrived: float, admitted: _Admitted
    ) -> ForwardRequest:
        """A request that one node answers: it is read as far as its model's name."""
        if exchange.path in routes.SCRUBBED:
            raw = write_json(scrub(await in_turns(reading(raw))))
        content_type = exchange.fields.get("content-type", "")
        is_form = media_type(content_type) == FORM
        model = await in_turns(model_in_form(raw, content_type)) if is_form else model_of(raw)
        return self._forward_request(exchange, raw, model, arrived, admitted)

    def not_taken(self, exchange: HttpExchange, error: BaseException, key: str = "") -> None:
        """Count and log a request that ends before the orchestrator has it: one of `NOT_TAKEN` was raised."""
        match error:
            case ClientGone():
                _LOG.info("client left", extra={"request_id": exchange.request_id})
            case ClientError():
                self.orchestrator.refused(exchange.request_id, exchange.path, exchange.endpoint, key, error)
            case _:
                self.not_taken(exchange, shutting_down_error(), key)

    def _understanding(
        self, exchange: HttpExchange, endpoint: Endpoint, raw: bytes, arrived: float, admitted: _Admitted
    ) -> Steps[ClientRequest | ForwardRequest]:
        """Read a body as a request; with a field that cannot be read, as one that a node is asked to refuse."""
        body, model = scrub(parse(raw) if len(raw) <= LARGE else (yield from reading(raw))), ""
        try:
            model = model_in(endpoint, body)
            fields = yield from checked_fields(endpoint, body)
            keep = None if self.config.keep is Keep.OFF else (yield from keep_asked(endpoint, body, raw))
        except UnreadableField:
            return self._forward_request(exchange, write_json(body), model, arrived, admitted)
        key, config = admitted.api_key.name, self.config
        return ClientRequest(
            request_id=exchange.request_id,
            endpoint=endpoint,
            held=HeldBody(body, admitted.reservation.close),
            headers=self._node_headers(exchange),
            model=model or only_model(self.pool.state()),
            stream=bool(fields.get("stream")),
            priority=priority_of(exchange.fields, fields.get("priority", 0)),
            arrived=arrived,
            deadline=arrived + config.request_seconds,
            left=exchange.left,
            session=session_of(exchange.fields, body, key) if config.routing in _BY_SESSION else None,
            keep=keep,
            api_key=key,
            fields=fields,
        )

    def _forward_request(
        self, exchange: HttpExchange, raw: bytes, model: str, arrived: float, admitted: _Admitted
    ) -> ForwardRequest:
        return ForwardRequest(
            request_id=exchange.request_id,
            method=exchange.method,
            path=f"{exchange.path}?{exchange.query}" if exchange.query else exchange.path,
            headers=(*self._node_headers(exchange), *_of_the_message(exchange)),
            held=HeldBody(raw, admitted.reservation.close),
            model=model,
            deadline=arrived + self.config.request_seconds,
            left=exchange.left,
            api_key=admitted.api_key.name,
        )

    def _node_headers(self, exchange: HttpExchange) -> Headers:
        config = self.config
        return headers_for_node(
            exchange.headers, exchange.fields, exchange.request_id, config.credential, config.own.word
        )

    def _admit(self, exchange: HttpExchange) -> _Admitted:
        """Decide before the body is read: by the key, its limits, the body's type, the room for bodies and in
        the queue.

        Raises:
            ClientError: 400, 401, 429: it is not to be read.
        """
        api_key, fields = ANONYMOUS, exchange.fields
        try:
            api_key = self.keys.api_key(fields)
            routes.check_media_type(exchange.path, fields)
            self.open_requests.check(api_key)
            self.orchestrator.check_room(api_key.name)
            promised = promised_length(fields)
            fits = promised <= self.bodies.most  # one that never will is refused for that
            reservation = self.budget.reserve(api_key.name, promised if fits else 0)
            charge = None if api_key.limits is NO_LIMITS else self.rates.charge_request(api_key)
        except ClientError as error:
            self.not_taken(exchange, error, api_key.name)
            raise unread(error, fields) from None
        return _Admitted(api_key, reservation, charge)

    async def _respond(
        self, exchange: HttpExchange, response: ProxyResponse, charge: RateCharge | None, keep_alive: float
    ) -> None:
        body, headers = response.body, (*response.headers, ("x-request-id", exchange.request_id))
        if charge is not None:
            headers = (*headers, *charge.headers())
            if response.status < 400:
                charge.confirm()
        if isinstance(body, bytes):
            if exchange.begun:  # with comments: the node's own error is the stream's only event
                await exchange.end_with(body)
            else:
                await exchange.send_whole(response.status, headers, body)
            return
        sink, chunk_sink = exchange.server.sink, exchange.server.chunk_sink
        try:
            if not exchange.begun:
                await exchange.send_head(response.status, headers)
            while piece := await (with_comments(exchange, body.read(), keep_alive) if keep_alive else body.read()):
                await exchange.send_piece(piece)
                if sink is not None:
                    await body.pipe_to(sink, chunk_sink)
            await exchange.send_end()
        except asyncio.CancelledError:
            await exchange.break_off(shutting_down_error())  # goes nowhere where the client has disconnected
            raise
        finally:
            await body.aclose()


def _of_the_message(exchange: HttpExchange) -> Headers:
    """The headers that a node needs for a request that it gets as it came."""
    content_type = exchange.fields.get("content-type") or JSON_HEADER[1]
    return ("content-type", content_type), *[pair for pair in exchange.headers if pair[0] == "accept"]


class ApiApp:
    """Routes requests by path and method.

    ``operator``: the ASGI application that answers the paths ``shown`` of the operators' ones.
    """

    def __init__(self, handler: RequestHandler, operator: AsgiApp, shown: frozenset[str]) -> None:
        self._handler = handler
        self._operator = operator
        self._shown = shown
        self._ids = random_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ClientError(404, f"Only HTTP is served here, not {scope['type']}.")
        exchange = HttpExchange(scope, receive, send, self._ids)
        try:
            await self._answer(exchange, scope)
        except ClientGone:
            pass
        except ClientError as error:
            await (exchange.break_off(error) if exchange.begun else exchange.refuse(error))
        except BrokenAnswer:
            return  # its line is written; the server cuts the connection of an answer that is not complete
        except asyncio.CancelledError:  # The server's time is up; this is the top of the task: it ends with its answer.
            await exchange.refuse(shutting_down_error())
        except Exception:
            _LOG.exception("unexpected failure", extra={"request_id": exchange.request_id})
            text = f"The proxy failed on this request; its log says more under {exchange.request_id}."
            # The server closes the connection after what is raised: untold, a client would lose its next request.
            closes = (("connection", "close"),)
            await exchange.refuse(ClientError(500, text, kind="server_error", code=BUG, headers=closes))
            raise

    def _answer(self, exchange: HttpExchange, scope: Scope) -> Awaitable[None]:
        """The coroutine that answers this path."""
        generating = exchange.endpoint is not None and exchange.method == "POST"
        if generating or exchange.method in routes.FORWARDED.get(exchange.path, ()):
            return self._handler.serve(exchange)
        return self._answer_itself(exchange, scope)

    async def _answer_itself(self, exchange: HttpExchange, scope: Scope) -> None:
        """Answer a request that needs no node."""
        try:
            method = "GET" if exchange.method == "HEAD" else exchange.method  # the server leaves the body out
            if method == "GET" and exchange.path in self._shown:
                await self._operate(exchange, scope)
            elif method == "GET" and (body := self._document(exchange)) is not None:
                await exchange.send_whole(200, (JSON_HEADER,), body)
            else:
                raise routes.unknown_path(exchange.method, exchange.path, self._shown)
        except ClientError as error:
            self._handler.not_taken(exchange, error)
            raise

    async def _operate(self, exchange: HttpExchange, scope: Scope) -> None:
        if exchange.path == routes.METRICS:
            self._handler.keys.api_key(exchange.fields)
        await self._operator({**scope, "method": "GET", "path": exchange.path}, exchange.receive, exchange.send)

    def _document(self, exchange: HttpExchange) -> bytes | None:
        """The document that the proxy answers by itself; None for any other path."""
        if exchange.path == routes.OPENAPI:
            return routes.openapi_document()
        if not routes.is_of_models(exchange.path):
            return None
        self._handler.keys.api_key(exchange.fields)
        return routes.models_document(exchange.path, self._handler.pool.state())
