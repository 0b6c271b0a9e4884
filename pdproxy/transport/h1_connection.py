"""One connection to a node: an asyncio protocol around a `ResponseParser`, and its timeouts."""

import asyncio
import math
from collections.abc import Callable
from typing import cast

from pdproxy.errors import Fault, NodeFault, untraced
from pdproxy.response import Sink
from pdproxy.sockets import keep_alive
from pdproxy.transport.faults import ProtocolError, timeout_fault, while_exchanging
from pdproxy.transport.h1_messages import Origin, ResponseParser


class Watchdog:
    """Calls ``on_timeout`` when one `watch` lasts longer than its seconds.

    The timer is not moved at each `watch`: when it fires it checks whether the time has come, and is set again if not.
    So a stream of thousands of pieces sets a handful of timers.
    ``latest``: when it calls ``on_timeout`` at the latest, in the loop's time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_timeout: Callable[[], None]) -> None:
        self.latest = math.inf
        self._loop = loop
        self._on_timeout = on_timeout
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = math.inf

    def watch(self, seconds: float) -> None:
        """Call ``on_timeout`` in ``seconds``, unless `watch` or `rest` is called before. Called for each piece."""
        due = self._loop.time() + seconds
        if due > self.latest:
            due = self.latest
        self._due = due
        if due < self._fires_at:
            self._set_timer(due)

    @property
    def left(self) -> float:
        """Seconds until the watch ends; infinite where there is none."""
        return math.inf if self._due is None else max(0.0, self._due - self._loop.time())

    @property
    def late(self) -> bool:
        """Whether `latest` has passed."""
        return self._loop.time() >= self.latest

    def rest(self) -> None:
        """End the watch."""
        self._due = None

    def stop(self) -> None:
        """End the watch and cancel the timer."""
        self._due = None
        self._cancel_timer()

    def close(self) -> None:
        """`stop` for good: ``on_timeout`` is not called again, nor referred to."""
        self.stop()
        self._on_timeout = _nothing

    def _set_timer(self, due: float) -> None:
        self._cancel_timer()
        self._timer, self._fires_at = self._loop.call_at(due, self._fire), due

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._fires_at = None, math.inf

    def _fire(self) -> None:
        self._timer, self._fires_at = None, math.inf
        if self._due is None:
            return
        if self._loop.time() < self._due:
            self._set_timer(self._due)
        else:
            self._on_timeout()


def _nothing() -> None:
    """In the place of a callback that is not called any more."""


_FULL = 256 * 1024
"""Bytes of body that wait here before the node is made to wait."""
_ONE_WRITE = 64 * 1024
"""Up to this size head and body are joined: one system call is worth more than the copy."""


class H1Connection(asyncio.Protocol):
    """Carries one exchange at a time. After it, call `abort`, or give it back to the pool while it `is_reusable`.

    Attributes:
        answer: the response, as far as it has arrived.
        idle_since: when it was last given back, by the pool's clock.
        resend_seconds: what was left of the wait for a head when the peer closed or reset the connection before the
            first byte of an answer; 0 where that did not happen. An end that this side made does not count.
    """

    def __init__(self, origin: Origin, on_lost: Callable[["H1Connection"], None]) -> None:
        self.origin = origin
        self.answer = ResponseParser()
        self.idle_since = self.resend_seconds = 0.0
        self._where = f"{origin.host}:{origin.port}"
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._watchdog = Watchdog(self._loop, self._on_timeout)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._timeouts = (Fault.HEADERS_TIMEOUT, 0.0)
        self._failure: NodeFault | None = None
        self._busy = self._lost = self._paused = False

    @property
    def lost(self) -> bool:
        """Whether it is closed or closing."""
        return self._lost or self._transport is None or self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the exchange is over on both sides, and another may follow."""
        written = self._transport is not None and self._transport.get_write_buffer_size() == 0
        return self.answer.reusable and written and not self.lost

    @property
    def fileno(self) -> int:
        """The socket's descriptor, -1 once it is closed."""
        return -1 if self._transport is None else int(self._transport.get_extra_info("socket").fileno())

    def begin(self, method: str, head: bytes, body: bytes, due: float) -> None:
        """Send a request. Its response must have ended at ``due``, in the loop's time."""
        self.answer.expect(method)
        self._watchdog.latest = due
        self._busy, lost = True, self.lost
        self._failure = while_exchanging(None, self._where) if lost else None
        if self._transport is None or lost:
            return
        if len(body) <= _ONE_WRITE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def head(self, seconds: float) -> None:
        """Return when the response's head has come.

        Raises:
            NodeFault: RESET, or HEADERS_TIMEOUT when it took longer than ``seconds``.
        """
        while not self.answer.has_head:
            await self._wait(Fault.HEADERS_TIMEOUT, seconds)

    async def piece(self, seconds: float) -> bytes:
        """The next piece of the body, b"" at its end.

        Raises:
            NodeFault: RESET, or STALL when nothing came for ``seconds``, or the exchange is overdue.
        """
        if self._watchdog.late and not self.answer.ended:
            overdue = timeout_fault(Fault.STALL, self._where)
            self._fail(overdue)
            raise untraced(overdue)
        while not self.answer.pending and not self.answer.ended:
            await self._wait(Fault.STALL, seconds)
        piece = self.answer.take()
        self._resume()
        return piece

    async def pipe_to(self, sink: Sink, seconds: float) -> None:
        """See `port.HttpResponse.pipe_to`. The last piece, the end and a fault are left to `piece`."""
        if self.answer.pending or self.answer.ended or self._failure is not None:
            return
        self._sink = sink
        try:
            await self._wait(Fault.STALL, seconds)
        finally:
            self._sink = None

    def rest(self) -> None:
        """End the exchange: bytes that come from now on were not asked for."""
        self._busy = False
        self.answer.take()
        self._resume()

    def abort(self) -> None:
        """Close at once; a pending `head` or `piece` raises RESET. Idempotent."""
        self._fail(NodeFault(Fault.RESET, f"{self._where}: closed by us"))
        self._watchdog.stop()

    async def _wait(self, fault: Fault, seconds: float) -> None:
        if self._failure is not None:
            raise untraced(self._failure)
        self._waiter = self._loop.create_future()
        self._timeouts = (fault, seconds)
        self._watchdog.watch(seconds)
        try:
            await self._waiter
        finally:
            self._watchdog.rest()
            self._waiter = None

    def _wake(self, bug: BaseException | None = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            if bug is None:
                self._waiter.set_result(None)
            else:
                self._waiter.set_exception(bug)
            self._watchdog.rest()  # what was awaited is here, even if the waiter runs only after the timer

    def _awaited(self) -> bool:
        """Whether what was waited for is here: half a head must not extend the time for the head."""
        if self._timeouts[0] is Fault.HEADERS_TIMEOUT:
            return self.answer.has_head
        return self.answer.pending > 0 or self.answer.ended

    def _on_timeout(self) -> None:
        fault, seconds = self._timeouts
        self._fail(timeout_fault(fault, self._where, None if self._watchdog.late else seconds))

    def _fail(self, failure: NodeFault) -> None:
        self._failure = self._failure or failure
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _resume(self) -> None:
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._paused = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._transport.set_write_buffer_limits(high=0)
        keep_alive(self._transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            self.abort()
            return
        try:
            self.answer.feed(data)
        except ProtocolError as error:
            self._fail(while_exchanging(error, self._where))
            return
        if self._sink is not None and self.answer.pending and not self.answer.ended:
            try:
                more = self._sink(self.answer.take())
            except BaseException as bug:  # raised in `pipe_to` as well: the event loop only logs it
                self._wake(bug)
                raise
            if more:
                self._watchdog.watch(self._timeouts[1])
            else:  # ends the wait of `pipe_to`
                self._sink = None
                self._wake()
            return
        if self.answer.pending > _FULL and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._paused = True
        if self._awaited():
            self._wake()

    def resume_writing(self) -> None:
        """The last byte of the request is out: the wait for the head counts from here."""
        if self._waiter is not None:
            self._watchdog.watch(self._timeouts[1])

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._failure is None and self._busy and not self.answer.ended:
            if self.answer.silent:
                self.resend_seconds = self._watchdog.left
            if exc is not None or not self.answer.feed_eof():
                self._failure = while_exchanging(exc, self._where)
        self._drop_cycles()
        self._wake()
        self._on_lost(self)

    def _drop_cycles(self) -> None:
        """Drop what refers back here, so that a closed connection is freed at once, and not some thousand of them
        together when the collector comes by: each client that leaves in mid-stream closes one."""
        self._watchdog.close()
        self.answer.close()
        self._transport = None
