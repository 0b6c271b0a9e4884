"""One connection to a node: an asyncio protocol around a `ResponseParser`, and its timeouts."""

import asyncio
import math
import select
from collections.abc import Callable
from typing import cast

from pdproxy.errors import Fault, NodeFault, untraced
from pdproxy.response import ChunkSink, Sink
from pdproxy.sockets import keep_alive
from pdproxy.transport.faults import ProtocolError, timeout_fault, while_exchanging
from pdproxy.transport.h1_messages import Origin, ResponseParser
from pdproxy.transport.port import Timeouts


class Watchdog:
    """Calls ``on_timeout`` when nothing was heard for as long as `watch` says.

    The timer is not moved each time that something is heard: when it fires it looks whether the time has come, and is
    set again if not. So a stream of thousands of pieces sets a handful of timers.

    Attributes:
        latest: when it calls ``on_timeout`` at the latest, in the loop's time.
        heard: when something was heard last, in the loop's time; set for each piece.
        seconds: that may pass from then on; infinite while it rests.
    """

    __slots__ = ("_fires_at", "_loop", "_on_timeout", "_timer", "heard", "latest", "seconds")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_timeout: Callable[[], None]) -> None:
        self.latest = self.seconds = math.inf
        self.heard = 0.0
        self._loop = loop
        self._on_timeout = on_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = math.inf

    def watch(self, seconds: float) -> None:
        """Call ``on_timeout`` in ``seconds``, unless something is heard, or it rests, before."""
        self.heard, self.seconds = self._loop.time(), seconds
        due = min(self.heard + seconds, self.latest)
        if due < self._fires_at:
            self._set_timer(due)

    @property
    def seconds_left(self) -> float:
        """Seconds until the watch ends; infinite where there is none."""
        return self.seconds if self.seconds == math.inf else max(0.0, self._due() - self._loop.time())

    @property
    def late(self) -> bool:
        """Whether `latest` has passed."""
        return self._loop.time() >= self.latest

    def stop(self) -> None:
        """End the watch and cancel the timer."""
        self.seconds = math.inf
        self._cancel_timer()

    def close(self) -> None:
        """`stop` for good: ``on_timeout`` is not called again, nor referred to."""
        self.stop()
        self._on_timeout = _nothing

    def _due(self) -> float:
        return min(self.heard + self.seconds, self.latest)

    def _set_timer(self, due: float) -> None:
        self._cancel_timer()
        self._timer, self._fires_at = self._loop.call_at(due, self._fire), due

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._fires_at = None, math.inf

    def _fire(self) -> None:
        self._timer, self._fires_at = None, math.inf
        if self.seconds == math.inf:
            return
        due = self._due()
        if self._loop.time() < due:
            self._set_timer(due)
        else:
            self._on_timeout()


def _nothing() -> None:
    """In the place of a callback that is not called any more."""


_FULL = 256 * 1024
"""Bytes that wait here, of a body and its frames, before the node is made to wait."""
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
        self._readable = select.poll()
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._chunk_sink: ChunkSink | None = None
        self._chunk_sink_now: ChunkSink | None = None
        """The same, while the next read begins where a chunk does: that may pass by the parser."""
        self._timeouts = (Fault.HEADERS_TIMEOUT, 0.0)
        self._failure: NodeFault | None = None
        self._stall = self._piece_wait = 0.0
        self._untaken = 0
        """Bytes that came since a piece was taken last."""
        self._busy = self._paused = False

    @property
    def lost(self) -> bool:
        """Whether it is closed or closing."""
        return self._transport is None or self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the exchange is over on both sides, and another may follow."""
        transport = self._transport
        if transport is None or not self.answer.reusable or transport.is_closing():
            return False
        return transport.get_write_buffer_size() == 0

    @property
    def quiet(self) -> bool:
        """Whether nothing is there to be read on an idle connection that is not lost: the peer's close, or bytes that
        were not asked for."""
        return not self._readable.poll(0)

    async def exchange(self, method: str, head: bytes, body: bytes, timeouts: Timeouts, due: float) -> None:
        """Send a request; return when its response's head has come. All of it must have ended at ``due``, in the loop's
        time. Where no head comes, the connection is closed.

        Raises:
            NodeFault: RESET, or HEADERS_TIMEOUT.
        """
        answer = self.answer
        answer.expect(method)
        self._watchdog.latest = due
        self._stall, self._piece_wait, self._untaken = timeouts.stall, timeouts.first_piece, 0
        self._busy, transport = True, self._transport
        if transport is None or transport.is_closing():
            self._failure = while_exchanging(None, self._where)
        else:
            self._failure = None
            if len(body) <= _ONE_WRITE:
                transport.write(head + body)
            else:
                transport.write(head)
                transport.write(body)
        try:
            while not answer.has_head:
                await self._wait(Fault.HEADERS_TIMEOUT, timeouts.headers)
        except BaseException:
            self.abort()
            raise

    async def piece(self) -> bytes:
        """The next piece of the body; StopAsyncIteration at its end.

        Raises:
            NodeFault: RESET, or STALL when nothing came for too long, or the exchange is overdue.
        """
        answer = self.answer
        if not answer.ended and self._watchdog.late:
            overdue = timeout_fault(Fault.STALL, self._where)
            self._fail(overdue)
            raise untraced(overdue)
        while not answer.pieces:
            if answer.ended:
                raise StopAsyncIteration
            await self._wait(Fault.STALL, self._piece_wait)
        self._piece_wait, self._untaken = self._stall, 0
        if self._paused:
            self._resume()
        return answer.take()

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        """See `port.HttpResponse.pipe_to`. The last piece, the end and a fault are left to `piece`."""
        answer = self.answer
        if answer.pieces or answer.ended or self._failure is not None:
            return
        self._sink, self._chunk_sink = sink, chunk_sink
        self._chunk_sink_now = chunk_sink if answer.between_chunks else None
        try:
            await self._wait(Fault.STALL, self._stall)
        finally:
            self._end_pipe()

    def rest(self) -> None:
        """End the exchange: bytes that come from now on were not asked for."""
        self._busy = False
        self.answer.pieces.clear()
        if self._paused:
            self._resume()

    def abort(self) -> None:
        """Close at once; a pending `exchange` or `piece` raises RESET. Idempotent."""
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
            self._watchdog.seconds = math.inf
            self._waiter = None

    def _wake(self, bug: BaseException | None = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            if bug is None:
                self._waiter.set_result(None)
            else:
                self._waiter.set_exception(bug)
            self._watchdog.seconds = math.inf  # what was awaited is here, even if the waiter runs only after the timer

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
        socket = self._transport.get_extra_info("socket")
        keep_alive(socket)
        self._readable.register(socket.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        chunk_sink = self._chunk_sink_now
        try:
            if chunk_sink is None or (more := chunk_sink(data)) is None:
                more = self._parse(data)
        except BaseException as bug:  # raised in `pipe_to` as well: the event loop only logs it
            self._wake(bug)
            raise
        if more:
            self._watchdog.heard = self._loop.time()
        elif more is not None:  # ends the wait of `pipe_to`
            self._end_pipe()
            self._wake()

    def _parse(self, data: bytes) -> bool | None:
        """Take what came, whatever it is. True where the sink took it, False where it wants no more after that."""
        if not self._busy:
            self.abort()
            return None
        answer, sink = self.answer, self._sink
        try:
            answer.feed(data)
        except ProtocolError as error:
            self._fail(while_exchanging(error, self._where))
            return None
        self._chunk_sink_now = self._chunk_sink if answer.between_chunks else None
        if sink is None or answer.ended or not answer.pieces:
            self._keep(answer, len(data))
            return None
        return sink(answer.take())

    def _end_pipe(self) -> None:
        self._sink = self._chunk_sink = self._chunk_sink_now = None

    def _keep(self, answer: ResponseParser, size: int) -> None:
        """Bytes that came stay here until they are read."""
        if answer.pieces:
            self._untaken += size
            if self._untaken > _FULL and self._transport is not None and not self._transport.is_closing():
                self._transport.pause_reading()
                self._paused = True
        if self._timeouts[0] is not Fault.HEADERS_TIMEOUT:
            awaited = bool(answer.pieces) or answer.ended
        else:  # half a head must not extend the time for the head
            awaited = answer.has_head
        if awaited:
            self._wake()

    def resume_writing(self) -> None:
        """The last byte of the request is out: the wait for the head counts from here."""
        if self._waiter is not None:
            self._watchdog.watch(self._timeouts[1])

    def connection_lost(self, exc: Exception | None) -> None:
        if self._failure is None and self._busy and not self.answer.ended:
            if self.answer.silent:
                self.resend_seconds = self._watchdog.seconds_left
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
