"""What a request holds on nodes, and how it is given back on every exit."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.calls import PrefillAnswer, release
from pdproxy.lifecycle import IllegalTransition
from pdproxy.nodes.node import Node
from pdproxy.nodes.pool import Pool, Slot
from pdproxy.observe.labels import Attempt, Leg
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.sub_request import SubRequest
from pdproxy.request import Headers, Json
from pdproxy.transport.port import HttpResponse

_HINT = "remote_prefill_cached_tokens"
"""vLLM's scheduler adds it to the ticket, and a decode node that gets it reports it as its own ``cached_tokens``
(0.32, v1/engine/output_processor.py). Without it the decode node reports what it did not have to compute, which tells
whether it used the ticket. The connector does not look at it, and no signature covers it."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandOver:
    """A ticket, by whom and when it was given.

    Attributes:
        name: by which it can be released.
        node: the prefill node.
        answer: what its leg brought.
        issued_at: monotonic seconds.
    """

    name: str
    node: Node
    answer: PrefillAnswer
    issued_at: float

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the prefill node had cached."""
        return self.answer.cached_tokens

    def ticket(self) -> Json:
        """The ticket as the decode node gets it."""
        return {key: value for key, value in self.answer.ticket.items() if key != _HINT}


DETAIL = "active health gave the node up, and nothing has come from it since"


def node_down_fault() -> NodeFault:
    """The fault of such a node."""
    return NodeFault(Fault.STALL, DETAIL)


@asynccontextmanager
async def fail_if_node_down(slot: Slot, alternative_exists: Callable[[], bool]) -> AsyncIterator[None]:
    """Wait inside for an answer.

    Args:
        slot: the leg's on its node.
        alternative_exists: whether giving up leads anywhere; else the leg waits on, for the node may come back.

    Raises:
        NodeFault: STALL, as soon as active health has given the node up.
    """
    now = asyncio.get_running_loop().time
    scope = asyncio.timeout(None)
    try:
        async with scope:
            slot.on_node_down(lambda: scope.reschedule(now()) if alternative_exists() and not scope.expired() else None)
            try:
                yield
            finally:
                slot.on_node_down(None)
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise node_down_fault() from error


_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Background tasks, all bounded by the release deadline. None outlives `aclose`."""

    def __init__(self, context: OrchestrationContext) -> None:
        self._context = context
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Errands under way."""
        return len(self._running)

    def release(self, node: Node, model: str, hand_over: str, headers: Headers) -> None:
        """Have ``hand_over`` freed on ``node``. Returns at once; never raises: also good while being cancelled."""
        self._run(self._release(node, model, hand_over, headers))

    def close(self, response: HttpResponse) -> None:
        """Close a response that somebody else reads: there the reading ends in RESET. Returns at once."""
        self._run(response.aclose())

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def aclose(self) -> None:
        """Wait for what is under way; what outlasts the release deadline is given up."""
        if self._running:
            _, late = await asyncio.wait(tuple(self._running), timeout=self._context.config.release)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _release(self, node: Node, model: str, hand_over: str, headers: Headers) -> None:
        outcome = Attempt.FAILED
        try:
            await self._release_with_retry(node, model, hand_over, headers)
            outcome = Attempt.SUCCEEDED
        except NodeFault as fault:
            self._context.metrics.leg_failed(Leg.RELEASE, fault.fault)
            _log.warning("release of %s on %s failed: %s", hand_over, node.name, fault.fault)
        finally:
            self._context.metrics.released(outcome)

    async def _release_with_retry(self, node: Node, model: str, hand_over: str, headers: Headers) -> None:
        """Once more where the connection broke: a release is good any number of times."""
        timeouts = self._context.config.release_timeouts()
        try:
            await release(self._context.transport, node, model, hand_over, timeouts, headers)
        except NodeFault as fault:
            if fault.fault is not Fault.RESET:
                raise
            await release(self._context.transport, node, model, hand_over, timeouts, headers)


class HeldResources:
    """A decode node's place, an open response, a hand-over that nobody has read yet."""

    def __init__(
        self, pool: Pool, metrics: Metrics, background_tasks: BackgroundTasks, sub_request: SubRequest
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._background_tasks = background_tasks
        self._sub_request = sub_request
        self._slot: Slot | None = None
        self._prefilling: tuple[Slot, str, int] | None = None
        self._response: HttpResponse | None = None
        self._unread: tuple[Node, str] | None = None

    @property
    def slot(self) -> Slot:
        """On the decode node.

        Raises:
            IllegalTransition: none was taken.
        """
        if self._slot is None:
            raise IllegalTransition("a decode leg needs a place on its node")
        return self._slot

    def acquire(self, decode: Node) -> None:
        """Take a place on a decode node; the one held before is given back."""
        self.release_decode()
        self._slot = self._pool.acquire(decode.name)

    def release_decode(self) -> None:
        """Give the decode node's place back."""
        if self._slot is not None:
            self._slot.release()
            self._slot = None

    def begin_prefill(self, node: Node, hand_over: str, tokens: int) -> Slot:
        """A prefill leg is about to be sent: from now on the node may hold blocks by this name. Its place there.

        ``tokens`` are what its prompt has, as far as one can tell.
        """
        slot = self._pool.acquire(node.name)
        self._metrics.prefill_began(node.model, tokens)
        self._prefilling = (slot, node.model, tokens)
        self._unread = (node, hand_over)
        return slot

    def end_prefill(self) -> None:
        """The prefill leg has ended, in whatever way; its blocks may wait for a reader."""
        ended, self._prefilling = self._prefilling, None
        if ended is not None:
            slot, model, tokens = ended
            slot.release()
            self._metrics.prefill_ended(model, tokens)

    def hand_over_read(self) -> None:
        """Nothing is held by the hand-over's name any more: it was read, or never taken up."""
        self._unread = None

    def release_hand_over(self) -> None:
        """Have the hand-over freed, if nobody has read it."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._background_tasks.release(
                unread[0], self._sub_request.request.model, unread[1], self._sub_request.headers
            )

    def hold_response(self, response: HttpResponse) -> HttpResponse:
        """A response arrived: it is closed by `close_decode_leg`."""
        self._response = response
        return response

    def progress(self) -> None:
        """The decode node is alive."""
        if self._slot is not None:
            self._slot.progress()

    def abort_decode_leg(self) -> None:
        """Close the decode leg while it is being read: there the reading ends in RESET."""
        if self._response is not None:
            self._background_tasks.close(self._response)

    async def close_decode_leg(self) -> None:
        """End the decode leg: its place first, for closing may be interrupted."""
        self.release_decode()
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()

    async def aclose(self) -> None:
        """Give everything back. Idempotent."""
        self.end_prefill()
        self.release_hand_over()
        await self.close_decode_leg()
