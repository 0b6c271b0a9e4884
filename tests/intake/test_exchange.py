"""A client that leaves while it is watched, told from a task that somebody else cancels."""

import asyncio
from collections.abc import Callable

import pytest

from pdproxy.intake.exchange import HttpExchange, Message
from pdproxy.random_ids import random_ids
from pdproxy.request import Endpoint
from pdproxy.response import EXCHANGE_EXTENSION, Sink
from tests.fakes.server_exchange import WithoutDirectWrites


class Connection(WithoutDirectWrites):
    """The server's half; `leave` closes the client's."""

    sink: Sink | None = None
    chunk_sink: Sink | None = None

    def __init__(self) -> None:
        self._on_left: Callable[[], None] | None = None
        scope = {
            "method": "POST",
            "path": f"{Endpoint.CHAT}/",
            "query_string": b"",
            "headers": [(b"x", b"1"), (b"x", b"2")],
        }
        self.exchange = HttpExchange(
            scope | {"extensions": {EXCHANGE_EXTENSION: self}}, self._receive, self._send, random_ids()
        )

    def tell_when_left(self, on_left: Callable[[], None] | None) -> None:
        self._on_left = on_left

    def leave(self) -> None:
        if self._on_left is not None:
            self._on_left()

    async def _receive(self) -> Message:
        return {}

    async def _send(self, message: Message) -> None:
        """Nobody reads it."""


async def answering(connection: Connection) -> bool:
    """Work for ever; whether the client alone ended it."""
    connection.exchange.watch_client()
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        connection.exchange.unwatch_client()
        return connection.exchange.cancelled_by_client()
    return False


@pytest.mark.parametrize(
    ("leaves", "shut_down", "alone"), [(True, False, True), (False, True, False), (True, True, False)]
)
async def test_only_a_client_that_leaves_has_its_cancellation_taken_back(
    leaves: bool, shut_down: bool, alone: bool
) -> None:
    connection = Connection()
    task = asyncio.ensure_future(answering(connection))
    await asyncio.sleep(0)
    if leaves:
        connection.leave()
    if shut_down:
        task.cancel()
    assert await task is alone
    assert connection.exchange.left() is leaves


async def test_nobody_is_cancelled_after_the_watch() -> None:
    connection = Connection()
    connection.exchange.watch_client()
    connection.exchange.unwatch_client()
    connection.leave()
    await asyncio.sleep(0)
    assert not connection.exchange.left()


def test_the_first_of_several_headers_counts_and_a_slash_at_the_end_does_not() -> None:
    exchange = Connection().exchange
    assert (exchange.fields, exchange.endpoint) == ({"x": "1"}, Endpoint.CHAT)
    assert exchange.headers == (("x", "1"), ("x", "2"))
