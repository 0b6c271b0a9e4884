"""Streams to the client, through the server's sink and without one."""

import asyncio
import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.credential import Secret
from pdproxy.intake.auth import OpenRequests, read_keys
from pdproxy.intake.body import BodyBudget, BodyReader
from pdproxy.intake.exchange import HttpExchange, Message
from pdproxy.intake.handler import HandlerConfig, RequestHandler
from pdproxy.intake.rate_limits import RateLimits
from pdproxy.observe.metrics import Metrics
from pdproxy.random_ids import random_ids
from pdproxy.request import Endpoint
from pdproxy.response import EXCHANGE_EXTENSION, Sink
from pdproxy.settings.types import Credential
from tests.fakes.server_exchange import WithoutDirectWrites
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import MODEL, FakeCluster
from tests.orchestration.prompts import body_for, right

TOKENS = 20
RULES = HandlerConfig(3600.0, Credential.PASS, own=Secret())

HEAD = {
    "method": "POST",
    "path": Endpoint.CHAT.value,
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
}


class Client(WithoutDirectWrites):
    """Both halves of an ASGI connection; what comes is kept in its order.

    Args:
        body: the request's.
        breath: pieces after which the client has to be waited for.
        chunks: its HTTP has them, so there is a sink.
    """

    def __init__(self, body: dict[str, Any], breath: int, *, chunks: bool = True) -> None:
        self._asked: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._breath = breath
        self.sink: Sink | None = self._take if chunks else None
        self.chunk_sink: Sink | None = None
        self.pieces: list[bytes] = []
        self.sent = self.straight = 0

    async def receive(self) -> Message:
        if not self._asked:
            await asyncio.Event().wait()
        return self._asked.pop()

    async def send(self, message: Message) -> None:
        self.sent += 1
        self.pieces.append(message.get("body", b""))

    def _take(self, piece: bytes) -> bool:
        self.straight += 1
        self.pieces.append(piece)
        return self.straight % self._breath != 0

    async def ask(self, cluster: FakeCluster) -> bytes:
        """The answer, whole."""
        metrics = Metrics(CollectorRegistry())
        open_requests, rates = OpenRequests(0, metrics), RateLimits(cluster.clock, metrics)
        budget, bodies = BodyBudget(1 << 20, metrics), BodyReader(1 << 20, 60.0)
        pool, clock = cluster.pool, cluster.clock
        service = RequestHandler(
            read_keys(None), open_requests, rates, budget, bodies, cluster.orchestrator, pool, clock, RULES
        )
        scope = {**HEAD, "extensions": {EXCHANGE_EXTENSION: self}}
        await service.serve(HttpExchange(scope, self.receive, self.send, random_ids()))
        return b"".join(self.pieces)


@pytest.mark.parametrize("breath", [1, 2, 3, 1000])
async def test_the_response_is_the_same_with_and_without_sink(breath: int) -> None:
    body = {"model": MODEL, **body_for(Endpoint.CHAT, stream=True, tokens=TOKENS)}
    cluster = FakeCluster()
    at_once, in_turn = Client(body, breath), Client(body, breath, chunks=False)
    whole = await at_once.ask(cluster)
    assert read_answer(Endpoint.CHAT, whole).texts[0] == right(Endpoint.CHAT, TOKENS)
    told = read_answer(Endpoint.CHAT, await in_turn.ask(cluster))
    assert (told.texts[0], told.ended) == (right(Endpoint.CHAT, TOKENS), True)
    assert (in_turn.straight, at_once.straight > 0) == (0, True)
    await cluster.settle()


async def test_almost_every_piece_goes_to_the_sink() -> None:
    """The cost of a stream hangs on it: `make bench`."""
    body = {"model": MODEL, **body_for(Endpoint.CHAT, stream=True, tokens=TOKENS)}
    client = Client(body, breath=1000)
    await client.ask(FakeCluster())
    assert client.straight > TOKENS - 4
    assert client.sent < 8
