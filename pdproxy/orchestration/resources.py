"""What a request holds on nodes and in the queue, and how it is given back on every exit."""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from opentelemetry import trace

from pdproxy.clock import Clock
from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.calls import NOTHING_HELD, PrefillAnswer, release
from pdproxy.lifecycle import IllegalTransition
from pdproxy.nodes.node import Node
from pdproxy.nodes.pool_entry import NO_LOAD, LegLoad, Slot
from pdproxy.observe.labels import Attempt, Leg
from pdproxy.observe.tracing import NO_LEG_SPAN, LegSpan, leg_span
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.request_queue import Asked, RequestQueue, Waiter
from pdproxy.planning.shares import Standing
from pdproxy.request import Headers, SubRequest
from pdproxy.transport.port import HttpResponse

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class HandOver(msgspec.Struct, frozen=True):
    """A prompt that prefill node ``node`` has computed for a decode node to read; ``issued_at`` monotonic seconds."""

    hand_over_id: str
    node: Node
    answer: PrefillAnswer
    issued_at: float


def node_down_fault() -> NodeFault:
    """The fault of a leg on a node that active health gave up."""
    return NodeFault(Fault.STALL, "active health gave the node up, and nothing has come from it since")


def begin_leg_span(context: OrchestrationContext, sub_request: SubRequest, leg: Leg, node: Node) -> LegSpan:
    """The span of a leg that begins now; none where that of its request is not recorded."""
    if context.tracer is None or not trace.get_current_span().is_recording():
        return NO_LEG_SPAN
    model = sub_request.request.model
    facts: dict[str, str | int | bool] = {"node": node.name, "cohort": node.cohort, "prompt": sub_request.index}
    label = model if context.metrics.models.label(model) == model else ""
    return leg_span(context.tracer, leg, sub_request.endpoint, model, label, facts)


class LegWait:
    """Wait inside for a leg's answer: a STALL fault, as soon as active health has given its node up.

    Where no alternative exists the leg waits on, for the node may come back. It works as `asyncio.timeout` does, by
    cancelling the task and taking that back, and costs a third of one.
    """

    __slots__ = ("_alternative_exists", "_cancelled", "_cancelling", "_handle", "_slot", "_task")

    def __init__(self, slot: Slot, alternative_exists: Callable[[], bool]) -> None:
        self._slot = slot
        self._alternative_exists = alternative_exists
        self._handle: asyncio.Handle | None = None
        self._cancelled = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._slot.on_node_down(self._on_node_down)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._slot.on_node_down(None)
        if self._handle is None:
            return
        self._handle.cancel()  # where the wait ended first
        ours = self._cancelled and self._task.uncancel() <= self._cancelling
        if ours and kind is asyncio.CancelledError:
            raise node_down_fault() from error

    def _on_node_down(self) -> None:
        if self._handle is None and self._alternative_exists():  # later, for the task itself may be calling
            self._handle = asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()


class BackgroundTasks:
    """Work that outlives a request, bounded by the release deadline. No task outlives `aclose`."""

    def __init__(self, context: OrchestrationContext) -> None:
        self._context = context
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def release(self, node: Node, model: str, hand_over_id: str, headers: Headers) -> None:
        """Have a hand-over freed on its prefill node. Returns at once and never raises, also while being cancelled."""
        self.run(self._release(node, model, hand_over_id, headers))

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Do some work that is bounded by itself. Returns at once."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def aclose(self) -> None:
        """Wait for what is under way; what outlasts the release deadline is cancelled."""
        if self._running:
            _, late = await asyncio.wait(tuple(self._running), timeout=self._context.config.release)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _release(self, node: Node, model: str, hand_over_id: str, headers: Headers) -> None:
        context, outcome = self._context, Attempt.FAILED
        try:
            await release(context.transport, node, model, hand_over_id, context.config.release_timeouts(), headers)
            outcome = Attempt.SUCCEEDED
        except NodeFault as fault:
            context.metrics.leg_failed(Leg.RELEASE, fault.fault)
            _LOG.warning("release of %s on %s failed: %s", hand_over_id, node.name, fault.fault)
        finally:
            context.metrics.released(outcome)


class HeldResources:
    """A slot on the decode node, an open response, a hand-over that has not been read yet."""

    def __init__(
        self, context: OrchestrationContext, background_tasks: BackgroundTasks, sub_request: SubRequest
    ) -> None:
        self._pool = context.pool
        self._metrics = context.metrics
        self._background_tasks = background_tasks
        self._sub_request = sub_request
        self._slot: Slot | None = None
        self._response: HttpResponse | None = None
        self._unread: tuple[Node, str] | None = None
        self._sent_twice: tuple[Node, str] | None = None
        self.leg_span: LegSpan = NO_LEG_SPAN
        """Of the decode leg; ended with it."""

    @property
    def slot(self) -> Slot:
        """On the decode node; there must be one."""
        if self._slot is None:
            raise IllegalTransition("a decode leg needs a slot on its node")
        return self._slot

    def acquire(self, decode: Node, load: LegLoad = NO_LOAD) -> None:
        """Take a slot on a decode node; the one held before is given back."""
        self._release_slot()
        self._slot = self._pool.acquire(decode.name, load)

    @contextmanager
    def prefilling(self, node: Node, hand_over_id: str, tokens: int, load: LegLoad = NO_LOAD) -> Iterator[Slot]:
        """A slot for a prefill leg of about so many tokens; from here on the node may hold blocks for it.

        What the node may hold of a leg that fails is released.
        """
        with self._pool.acquire(node.name, load) as slot:
            self._unread = (node, hand_over_id)
            self._metrics.prefill_began(node.model, tokens)
            try:
                yield slot
            except NodeFault as fault:
                if fault.fault in NOTHING_HELD:
                    self.forget_hand_over()
                self.release_hand_over()
                raise
            finally:
                self._metrics.prefill_ended(node.model, tokens)

    def prefill_resent(self) -> None:
        """The prefill leg goes out a second time (`Transport.send`). The node may hold blocks for each of the two."""
        self._sent_twice = self._unread

    def forget_hand_over(self) -> None:
        """The ticket was read, or the node gave none: nothing is held under the hand-over's id any more. Of a leg that
        was sent twice the first copy may hold blocks of its own, so its id is released."""
        if self._unread is self._sent_twice:
            self.release_hand_over()
        self._unread = None

    def release_hand_over(self) -> None:
        """Have the hand-over freed, unless it was read."""
        unread, self._unread = self._unread, None
        if unread is not None:
            node, hand_over_id = unread
            self._background_tasks.release(
                node, self._sub_request.request.model, hand_over_id, self._sub_request.headers
            )

    def hold_response(self, response: HttpResponse) -> HttpResponse:
        """Have a response closed by `close_decode_leg`."""
        self._response = response
        return response

    def progress(self) -> None:
        """Report to active health that the decode node is at work."""
        if self._slot is not None:
            self._slot.progress()

    def abort_decode_leg(self) -> None:
        """Close the decode leg while it is being read: its read ends in RESET."""
        if self._response is not None:
            self._background_tasks.run(self._response.aclose())

    async def close_decode_leg(self) -> None:
        """End the decode leg: its slot first, for closing may be interrupted."""
        self._release_slot()
        self.leg_span.end()
        self.leg_span = NO_LEG_SPAN
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()

    async def aclose(self) -> None:
        """Give everything back. Idempotent."""
        self.release_hand_over()
        await self.close_decode_leg()

    def _release_slot(self) -> None:
        if self._slot is not None:
            self._slot.release()
            self._slot = None


class Admission:
    """One prompt on its way through the queue; to be ended on every exit.

    Attributes:
        runs: it counts among those that run.
    """

    __slots__ = ("_asked", "_clock", "_computing", "_queue", "_waiter", "runs")

    def __init__(self, queue: RequestQueue, clock: Clock, asked: Asked) -> None:
        self._queue = queue
        self._clock = clock
        self._asked = asked
        self._waiter: Waiter | None = None
        self._computing: str | None = None
        self.runs = False

    async def begin(self, attempt: Callable[[Standing], T | None], lane: Callable[[], str]) -> T:
        """What ``attempt`` returns once there is room: until then that is None. Raises as `RequestQueue.wait`.

        Where there is room and nothing waits, the loop gets no turn. ``attempt`` is told how its key
        stands: there may be less room. ``lane``: its model; called if it waits.
        """
        begun: list[T] = []
        start = functools.partial(self._start, attempt, begun)
        if not self._queue.begin_at_once(self._asked, start):
            self._waiter = await self._queue.wait(self._asked, lane(), start)
        return begun[0]

    def planned(self, node: str) -> None:
        """A node is to compute the prompt; not the one of an earlier plan any more."""
        self._drop()
        self._computing = node
        self._queue.backlog.add(node, self._asked.key, self._asked.prompt, self._clock.now())

    def computed(self) -> None:
        """The prompt is computed: there may be room for one that waits. Idempotent."""
        node, self._computing = self._computing, None
        if node is not None:
            self._queue.backlog.computed(node, self._asked.key, self._asked.prompt, self._clock.now())
            self._queue.room_changed()

    def used(self, tokens: int) -> None:
        """It has cost so many tokens, of prompt and answers. One that did not wait was not charged at all."""
        if self._waiter is not None:
            self._queue.correct(self._waiter, tokens)

    def end(self) -> None:
        """It runs no more. Idempotent."""
        self._drop()
        if self.runs:
            self.runs = False
            self._queue.ended(self._asked)

    def _drop(self) -> None:
        node, self._computing = self._computing, None
        if node is not None:
            self._queue.backlog.drop(node, self._asked.key, self._asked.prompt)

    def _start(self, attempt: Callable[[Standing], T | None], begun: list[T], standing: Standing) -> bool:
        result = attempt(standing)
        if result is not None:
            begun.append(result)
            self.runs = True
        return self.runs
