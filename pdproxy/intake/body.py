"""A request's body: read, decompressed, and bounded, alone and together with all other bodies that are held."""

import asyncio
import ctypes
import dataclasses
import io
from collections.abc import Callable

from pdproxy.errors import ClientError
from pdproxy.intake.content_coding import decompressed, is_compressed
from pdproxy.intake.exchange import ClientGone, HttpExchange, Receive
from pdproxy.observe.labels import Rejection
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.client_errors import rejected_error
from pdproxy.request import Fields


async def read_body(receive: Receive, limit: int, grow_to: Callable[[int], None]) -> bytes:
    """The request's whole body.

    Args:
        limit: in bytes.
        grow_to: called with the number of bytes that have arrived; may raise.

    Raises:
        ClientError: 413 when it is longer than ``limit``.
        ClientGone: the client left while sending.
    """
    body, size = None, 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        grow_to(size)
        more = message.get("more_body", False)
        if body is None and not more:
            return piece
        body = body or io.BytesIO()  # to join megabytes at the end would keep all others from the event loop
        body.write(piece)
        if not more:
            return body.getvalue()


def check_head(fields: Fields, limit: int) -> None:
    """Raises ClientError: 413 where the head tells of a body longer than ``limit``, 415 where of one that is compressed
    in a way that is not understood."""
    is_compressed(fields.get("content-encoding"))
    if promised_length(fields) > limit:
        raise too_large(limit)


def promised_length(fields: Fields) -> int:
    """The length of the body that a head tells; 0 where it tells none. The server has checked that it is a number."""
    return int(fields.get("content-length", 0))


SMALL_BODY = 64 * 1024
"""Bytes: a body that is refused from its head has come by then, or is read and dropped, and its connection stays."""


def unread(error: ClientError, fields: Fields) -> ClientError:
    """The error for a request whose body was not read: it closes the connection, unless that body is small.

    A client that waits for 100 (Continue) may send the body after all or not (RFC 9110, 10.1.1): what comes next on the
    connection cannot be told.
    """
    known = "transfer-encoding" not in fields and "expect" not in fields
    if (known and promised_length(fields) <= SMALL_BODY) or any(name == "connection" for name, _ in error.headers):
        return error
    return dataclasses.replace(error, headers=(*error.headers, ("connection", "close")))


def too_large(limit: int) -> ClientError:
    """413."""
    return ClientError(
        413,
        f"The body is longer than the {limit} bytes that this server accepts: shorten the prompt.",
        code="request_too_large",
        headers=(("connection", "close"),),  # the rest of the body would otherwise be read as the next request
    )


TRIM_FROM = 8 * 1024 * 1024
"""Bytes of bodies that must have been held before free memory is given back to the system: smaller ones fit into what
the process has free anyway."""
TRIM_SECONDS = 1.0
"""From the moment when most of them are not needed any more."""


def give_back_memory() -> None:
    """Have the C library give free memory back to the system: of itself glibc keeps what lies between small objects."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every libc has it
    if trim is not None:
        trim(0)


class BodyBudget:
    """Bounds the bytes of request bodies that are held at once, of all requests together.

    Where there were many, and there are few again, memory is given back, in a thread: for some hundred megabytes it
    takes some 20 milliseconds. All bodies that end within `TRIM_SECONDS` share one call.
    """

    def __init__(self, limit: int, metrics: Metrics, trim: Callable[[], None] = give_back_memory) -> None:
        self._limit = limit
        self._metrics = metrics
        self._trim = trim
        self._held = self._most = 0
        self._trimming: asyncio.TimerHandle | None = None
        metrics.watch_bodies(lambda: self._held)

    def reserve(self, key: str, promised: int = 0) -> "Reservation":
        """For one request of an API key with this name; empty at first.

        ``promised``: the length that its head tells. It is not reserved, or slow clients would hold what they do not
        send; but what has no room now is not read at all.

        Raises:
            ClientError: as `hold`.
        """
        if self._held + promised > self._limit:
            raise self._full(key)
        return Reservation(self, key)

    def hold(self, size: int, key: str) -> None:
        """Hold so many bytes more.

        Raises:
            ClientError: 429 with Retry-After: there is no room for them.
        """
        held = self._held + size
        if held > self._limit and size > 0:
            raise self._full(key)
        self._held = held
        if held > self._most:
            self._most = held

    def give_back(self, size: int) -> None:
        """So many bytes are held no more."""
        self._held -= size
        if self._most > TRIM_FROM and self._held < self._most // 4:
            self._most = self._held
            if self._trimming is None:
                self._trimming = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._begin_to_trim)

    def _begin_to_trim(self) -> None:
        self._trimming = None
        asyncio.get_running_loop().run_in_executor(None, self._trim)

    def _full(self, key: str) -> ClientError:
        text = "The requests that are here take up all the room there is for them: try again later."
        close = ("connection", "close")  # the rest of the body would otherwise be read as the next request
        self._metrics.rejected(Rejection.BODIES_FULL, key)
        return rejected_error(Rejection.BODIES_FULL, text, 1, close)


class Reservation:
    """The bytes that one request holds, until `close`."""

    __slots__ = ("_budget", "_key", "_size")

    def __init__(self, budget: BodyBudget, key: str) -> None:
        self._budget = budget
        self._key = key
        self._size = 0

    def grow_to(self, size: int) -> None:
        """The body has so many bytes by now.

        Raises:
            ClientError: as `BodyBudget.hold`.
        """
        self._budget.hold(size - self._size, self._key)
        self._size = size

    def close(self) -> None:
        """The reservation holds no room any more. Idempotent."""
        size, self._size = self._size, 0
        if size:
            self._budget.give_back(size)


class BodyReader:
    """Reads bodies of ``most`` bytes at most, which have ``seconds`` to arrive."""

    def __init__(self, most: int, seconds: float) -> None:
        self.most = most
        self._seconds = seconds

    def at_once(self, exchange: HttpExchange, reservation: Reservation) -> bytes | None:
        """The body where all of it is here and it is not compressed: most are, and need no coroutine. Else None.

        Raises:
            ClientError: as `read`.
        """
        if "content-encoding" in exchange.fields:
            return None
        body = exchange.server.take_body()
        if body is not None:
            self._accept(body, reservation)
        return body

    async def read(self, exchange: HttpExchange, reservation: Reservation) -> bytes:
        """The body.

        Raises:
            ClientError: 408, 413, 415, 429: it comes too late, is too long, is compressed in a way that is not
                understood, there is no room for it; 400: it is not compressed as it says.
            ClientGone: the client left while sending.
        """
        body = await self._received(exchange, reservation)
        coding = exchange.fields.get("content-encoding")
        if not is_compressed(coding):
            return body

        def grow_to(size: int) -> None:
            if size > self.most:
                raise too_large(self.most)
            reservation.grow_to(max(size, len(body)))

        return await decompressed(body, coding or "", grow_to)

    async def _received(self, exchange: HttpExchange, reservation: Reservation) -> bytes:
        """The body as it was sent."""
        whole = exchange.server.take_body()
        check_head(exchange.fields, self.most)
        if whole is not None:
            self._accept(whole, reservation)
            return whole
        try:
            async with asyncio.timeout(self._seconds):
                return await read_body(exchange.receive, self.most, reservation.grow_to)
        except TimeoutError:
            text = f"The body did not arrive within {self._seconds:g} s."
            raise ClientError(408, text, code="upload_timeout", headers=(("connection", "close"),)) from None

    def _accept(self, body: bytes, reservation: Reservation) -> None:
        if len(body) > self.most:
            raise too_large(self.most)
        reservation.grow_to(len(body))
