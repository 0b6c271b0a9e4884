"""A streamed answer: passed on as it comes, moved to another node when its node fails, and always ended properly."""

import asyncio
import functools
from collections.abc import Callable

from pdproxy.drive.given_up import silent
from pdproxy.drive.job import Job
from pdproxy.drive.listener import Listener
from pdproxy.drive.means import Means
from pdproxy.drive.passage import Ask, Passage
from pdproxy.drive.pieces import Pieces
from pdproxy.drive.tail import Tail
from pdproxy.drive.verdict import Answered, broken, from_client, node_event, too_late
from pdproxy.drive.why import Why
from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.failures import Chances, Moment, Step, decide
from pdproxy.legs.body import continuation_body
from pdproxy.nodes.pool import UnknownNode
from pdproxy.observe.labels import Answer, Leg, Migration, Outcome
from pdproxy.request import Addition, Endpoint, Json
from pdproxy.sink import Sink
from pdproxy.stream.errors import error_event
from pdproxy.stream.transcript import NotContinuable, Transcript
from pdproxy.transport.port import Incoming

ALIVE_SECONDS = 0.5
"""How often a stream's progress is told to active health."""


class Relay(Pieces):
    """The stream of one prompt; a `ReplyStream` once it is `open`. Whoever makes one must `aclose` it, on every exit.

    Args:
        means: dependencies.
        passage: this prompt's; the relay closes it.
        job: what has to be answered.
        ended: told once how it ended.
    """

    def __init__(self, means: Means, passage: Passage, job: Job, ended: Callable[[Outcome], None]) -> None:
        super().__init__()
        self._means = means
        self._passage = passage
        self._job = job
        self._ended = ended
        self._transcript = Transcript(job.endpoint, job.shape)
        self._listener: Listener | None = None
        self._leaving = asyncio.Event()
        self._given_up = False
        self._moves = means.terms.migrations
        self._done = False
        self._told_at = 0.0
        self.outcome: Outcome | None = None
        """How it ended, or would if it ended now; None until it is open."""

    async def open(self) -> None:
        """Wait for the first event.

        Raises:
            ClientError: all chances are used up.
            Answered: a node's own error goes to the client.
        """
        why = Why.of(self._job.shape.final_because)
        self._means.metrics.continuable(Answer.YES if why is Why.NONE else Answer.NO, why)
        self._ready = await self._passage.open(self._ask(self._job.body), self._listen)
        self._passage.holdings.place.when_given_up(self._give_up)
        self.outcome = Outcome.CLIENT_GONE

    async def pipe_to(self, sink: Sink) -> None:
        """See `ReplyStream`. A node that leaves, fails or ends its answer is looked at by the next read."""
        if self._listener is not None and not self._ready and not self._leaving.is_set():
            await self._listener.pipe_to(functools.partial(self._hand_on, sink))

    def _hand_on(self, sink: Sink, piece: bytes) -> bool:
        self._alive()
        return sink(piece) and not self._leaving.is_set()

    async def aclose(self) -> None:
        """End the legs, release what they hold. Idempotent."""
        if self.outcome is Outcome.CLIENT_GONE and self._transcript.ended and not self._ready:
            self._finish(Outcome.OK)  # many clients leave as soon as they have read the end
        self._done, self._ready = True, b""
        self._settle()
        try:
            await self._passage.aclose()
        finally:
            if self.outcome is not None:
                self._ended(self.outcome)

    def _ask(self, body: Json) -> Ask:
        usage = frozenset({Addition.USAGE}) if _adds_usage(self._job) else frozenset()
        return Ask(body, self._job.shape.additions | usage)

    async def _listen(self, incoming: Incoming) -> bytes:
        """A decode leg's head is here: read up to its first event."""
        hand_over = self._passage.hand_over
        if not self._transcript.started and hand_over is not None:
            self._transcript.cached_tokens = hand_over.cached_tokens
        tail = Tail() if _adds_usage(self._job) else None
        listener = Listener(incoming, self._transcript, hand_over is not None, tail)
        first = await listener.first()
        self._listener = listener
        self._leaving = self._watch()
        return first

    def _watch(self) -> asyncio.Event:
        try:
            return self._means.pool.leaving(self._passage.node_name)
        except UnknownNode:  # it was removed while it was asked
            gone = asyncio.Event()
            gone.set()
            return gone

    async def _advance(self) -> bytes:
        if self._done:
            raise StopAsyncIteration
        listener = self._listener
        if listener is None or listener.over:
            self._finish(Outcome.OK)
            return b""
        try:
            self._passage.remaining()
            if self._leaving.is_set() and self._can_move() and self._passage.elsewhere():
                return await self._migrate()
            piece = await listener.next()
        except NodeFault as fault:
            return await self._broken(listener, silent() if self._given_up else from_client(fault))
        except (ClientError, NotContinuable) as error:
            return await self._fail(error)
        self._alive()
        return piece

    def _give_up(self) -> None:
        """Active health finds the node gone. Worth ending the wait for it only where the stream can go on elsewhere."""
        if not self._given_up and self._can_move() and self._passage.elsewhere():
            self._given_up = True
            self._passage.holdings.cut()

    def _alive(self) -> None:
        """Tell active health now and then that the node is at work."""
        now = self._means.clock.now()
        if now >= self._told_at + ALIVE_SECONDS:
            self._told_at = now
            self._passage.holdings.progress()

    async def _broken(self, listener: Listener, fault: NodeFault) -> bytes:
        """The node failed in the middle of its answer."""
        self._passage.leg_failed(fault)
        if self._transcript.finished:
            self._finish(Outcome.OK)
            return listener.flush() + self._transcript.ending()
        if fault.fault is Fault.CLIENT_ERROR:
            return await self._fail(fault)
        if self._passage.late:
            return await self._fail(too_late())
        chances = Chances(self._means.terms.on_prefill_failure, 0, False, self._moves, self._continuable())
        step = decide(Leg.DECODE, Moment.STREAMING, fault.fault, chances)
        self._means.metrics.step_taken(Leg.DECODE, fault.fault, step)
        self._passage.show_failure(Leg.DECODE, self._passage.node_name, fault, step)
        return await (self._migrate() if step is Step.MIGRATE else self._fail(fault))

    async def _migrate(self) -> bytes:
        """Go on elsewhere from what the client has."""
        self._moves -= 1
        self._given_up = False
        self._settle()
        try:
            ask = self._rest()
            await self._passage.leave()
            ready = await self._passage.open(ask, self._listen)
            self._passage.holdings.place.when_given_up(self._give_up)
        except (ClientError, Answered, NotContinuable) as error:
            self._means.metrics.migrated(Migration.FAILED)
            return await self._fail(error)
        self._means.metrics.migrated(Migration.DONE)
        return ready

    def _rest(self) -> Ask:
        """What is still to be generated, as a request."""
        if not self._transcript.started:
            self._transcript.restart()
            return self._ask(self._job.body)
        continuation = self._transcript.continuation()
        self._transcript.resume()
        return self._ask(continuation_body(self._job.endpoint, self._job.body, continuation))

    def _can_move(self) -> bool:
        return self._moves > 0 and self._continuable()

    def _continuable(self) -> bool:
        if not self._transcript.started:
            return True
        try:
            self._transcript.continuation()
        except NotContinuable:
            return False
        return True

    async def _fail(self, error: NodeFault | ClientError | Answered | NotContinuable) -> bytes:
        """The error event, and the end. What is held is given back before the client has read it."""
        kept = b"" if self._listener is None else self._listener.flush()
        self._finish(Outcome.FAILED)
        await self._passage.aclose()
        own = node_event(self._job.endpoint, error)
        return kept + (own or error_event(self._job.endpoint, broken(error)))

    def _finish(self, outcome: Outcome) -> None:
        self._done, self.outcome = True, outcome
        if outcome is Outcome.OK:
            self._passage.holdings.settled()
        self._settle()

    def _settle(self) -> None:
        """A leg has ended: count what it told of itself."""
        listener, self._listener = self._listener, None
        if listener is not None and listener.tally is not None:
            self._passage.settle(listener.tally)


def _adds_usage(job: Job) -> bool:
    """Whether we ask for the usage event: it tells whether the node recomputed. Not where it would change more."""
    known = job.endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT)
    return known and job.shape.choices == 1 and job.body.get("stream_options") is None
