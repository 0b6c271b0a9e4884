"""What intake does for a request: authenticate, read, find a place, have it answered, pass the answer on."""

import asyncio
import dataclasses
import json
import re

from pdproxy.clock import Clock
from pdproxy.drive.reply import Reply
from pdproxy.errors import ClientError
from pdproxy.intake import asgi
from pdproxy.intake.admission import Admission
from pdproxy.intake.budget import Budget, Share
from pdproxy.intake.exchange import Exchange
from pdproxy.intake.identity import onward
from pdproxy.intake.keys import Keys
from pdproxy.intake.presence import Presence
from pdproxy.legs.body import check_values, parse, scrub
from pdproxy.nodes.node import Snapshot
from pdproxy.nodes.pool import Pool
from pdproxy.orchestrate import Forwarded, Orchestrator
from pdproxy.request import ClientRequest, Endpoint, Headers, Json
from pdproxy.settings import Credential

_IN_FORM = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--')
"""A field of a multipart form, as audio comes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
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


class Service:
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
        keys: Keys,
        admission: Admission,
        budget: Budget,
        orchestrator: Orchestrator,
        pool: Pool,
        clock: Clock,
        rules: Rules,
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

    async def generate(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Answer a request whose body the proxy understands.

        Raises:
            ClientError: what the client did wrong, or why it cannot be served.
            ClientGone: there is nobody to answer.
        """
        holder = self.keys.holder(exchange.headers)
        arrived = self._clock.now()
        with self._budget.share() as share:
            body = scrub(parse(endpoint, await self._read(exchange, share)))
            presence = Presence(exchange.receive)
            request = self._request(exchange, endpoint, body, arrived, presence)
            async with presence, self._admission.place(holder, request.priority):
                await self._pass_on(exchange, await self._orchestrator.answer(request))

    async def forward(self, exchange: Exchange) -> None:
        """Have one node answer a request that the proxy does not understand.

        Raises:
            ClientError, ClientGone: as `generate`.
        """
        holder = self.keys.holder(exchange.headers)
        deadline = self._clock.now() + self._rules.request_seconds
        with self._budget.share() as share:
            raw = await self._read(exchange, share)
            path, presence = exchange.path + exchange.query, Presence(exchange.receive)
            onward = self._onward(exchange)
            asked = Forwarded(exchange.method, path, onward, raw, model_of(raw), deadline, presence.left)
            async with presence, self._admission.place(holder, 0):
                await self._pass_on(exchange, await self._orchestrator.forward(asked))

    async def _read(self, exchange: Exchange, share: Share) -> bytes:
        try:
            async with asyncio.timeout(self._rules.upload_seconds):
                return await asgi.read_body(exchange.receive, exchange.headers, self._rules.body_bytes, share.reach)
        except TimeoutError:
            text = f"The body did not arrive within {self._rules.upload_seconds:g} s."
            raise ClientError(408, text, code="upload_timeout", headers=(("connection", "close"),)) from None

    def _request(
        self, exchange: Exchange, endpoint: Endpoint, body: Json, arrived: float, presence: Presence
    ) -> ClientRequest:
        priority = body.get("priority")
        return ClientRequest(
            request_id=exchange.request_id,
            endpoint=endpoint,
            body=body,
            headers=self._onward(exchange),
            model=str(body.get("model", "")),
            stream=body.get("stream") is True,
            priority=priority if isinstance(priority, int) else 0,
            arrived=arrived,
            deadline=arrived + self._rules.request_seconds,
            left=presence.left,
        )

    def _onward(self, exchange: Exchange) -> Headers:
        return onward(exchange.headers, exchange.request_id, self._rules.credential, self._rules.own)

    async def _pass_on(self, exchange: Exchange, reply: Reply) -> None:
        headers = (*reply.headers, ("x-request-id", exchange.request_id))
        if isinstance(reply.body, bytes):
            await asgi.send_whole(exchange.send, reply.status, headers, reply.body)
            return
        try:
            await asgi.send_head(exchange.send, reply.status, headers)
            async for piece in reply.body:
                await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
                if exchange.sink is not None:
                    await reply.body.pipe_to(exchange.sink)
            await exchange.send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            await exchange.break_off(leaving())  # nobody hears it where the client is the one who left
            raise
        finally:
            await reply.body.aclose()


def leaving() -> ClientError:
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
