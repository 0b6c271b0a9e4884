"""One node in the pool: its state, the slots of its legs; and how many requests the nodes of each cohort got lately.
Only the pool changes an entry.
"""

import asyncio
import dataclasses
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable

import msgspec

from pdproxy.clock import Clock
from pdproxy.nodes.circuit_breaker import CircuitBreaker, CircuitState
from pdproxy.nodes.load import Load, Work
from pdproxy.nodes.node import NO_FOOTPRINT, Footprint, Node, NodeView, Role, State
from pdproxy.nodes.outlier import LegRecord
from pdproxy.observe.labels import Leg

_STATE_BY_CIRCUIT = {
    CircuitState.CLOSED: State.UP, CircuitState.OPEN: State.DOWN, CircuitState.HALF_OPEN: State.PROBING
}  # fmt: skip


class LegLoad(msgspec.Struct, frozen=True):
    """The load that a leg adds to its node.

    Attributes:
        rank: the data-parallel rank that it goes to; None where vLLM chooses.
        queued: tokens of its prompt that are to be computed there; None where none of it is.
        footprint: what it takes of the caches there: a decode leg's; on a node of both roles, a prefill leg's, too.
        key: the name of its API key.
        arrived: monotonic seconds when its prompt came to the proxy.
        leg: what the node is asked for.
    """

    rank: int | None = None
    queued: int | None = None
    footprint: Footprint = NO_FOOTPRINT
    key: str = ""
    arrived: float = 0.0
    leg: Leg = Leg.DECODE


NO_LOAD = LegLoad()
WINDOW = 300.0
"""Seconds for which a request counts."""
_STEP = 10.0
"""Seconds that are counted together."""


@dataclasses.dataclass(slots=True)
class PoolEntry:
    """The pool's facts of one node.

    Attributes:
        view: its state and its load, as plans see it.
        configured: the node as it was given to the pool.
        membership: JOINING, UP, DRAINING, TERMINATING or REFUSED; the circuit counts while it is UP or TERMINATING.
        constant_until: monotonic seconds until which the passing of time changes nothing.
        misses: active health probes failed in a row.
        well_at: when the last health probe began that found it well.
        progressed_at: monotonic seconds when a leg last received something from the node.
        busy_since: since when legs have been in flight without a pause; inf while none are.
        leaving: set when running streams should move elsewhere.
        idle: set while no leg is in flight.
        slots: those that are held on it, in the order in which they were taken.
        records: how its legs ended.
        out_by: the id of the request whose failure opened the circuit; "" where active health did.
        out_for: the reason for which it last went out.
        left: it is not in the pool any more; legs that run on it end later.
        joins_anew: it serves, and its preflight and its tests are to be made again, for it got another role.
    """

    view: NodeView
    circuit: CircuitBreaker
    configured: Node
    membership: State = State.JOINING
    constant_until: float = math.inf
    misses: int = 0
    well_at: float = float("-inf")
    progressed_at: float = float("-inf")
    busy_since: float = math.inf
    leaving: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    idle: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    slots: dict["Slot", None] = dataclasses.field(default_factory=dict)
    records: defaultdict[Leg, LegRecord] = dataclasses.field(default_factory=lambda: defaultdict(LegRecord))
    out_by: str = ""
    out_for: str = ""
    left: bool = False
    joins_anew: bool = False

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def node(self) -> Node:
        """The node with what the preflight found filled in."""
        return self.view.node

    def stay(self) -> None:
        """Streams that begin from now on need not leave. Those that run keep their event: it may still be set."""
        if self.leaving.is_set():
            self.leaving = asyncio.Event()

    def is_given_up(self) -> bool:
        """Whether active health has given the node up."""
        return self.misses >= self.circuit.config.failures

    def silent_since(self) -> float:
        """Monotonic seconds when something last came for a leg; inf while no leg is in flight."""
        return self.progressed_at if self.view.active else math.inf

    def send_legs_away(self) -> None:
        """Have streams move, and legs that wait for an answer fail, where there is another node for them."""
        self.leaving.set()
        for slot in tuple(self.slots):
            if slot.alarm is not None:
                slot.alarm()

    def state(self) -> State:
        """The state that plans are made from."""
        if self.membership is State.TERMINATING:  # never tried again once its circuit is open
            return State.TERMINATING if self.circuit.state is CircuitState.CLOSED else State.DOWN
        return _STATE_BY_CIRCUIT[self.circuit.state] if self.membership is State.UP else self.membership

    def is_going(self) -> bool:
        """Whether it leaves: nothing that is found out about it lets it serve as before."""
        return self.membership in (State.DRAINING, State.TERMINATING)


class Slot:
    """A leg's place on a node, from which the book of load is written: must be released, on every exit. Also a context
    manager.

    Args:
        load: what it adds there.
        on_release: called with ``entry`` and the slot.

    Attributes:
        alarm: called each time that active health finds the node gone; None where the leg does not wait for that.
        trial: it tries a half-open circuit.
        takes_room: of the node's caches.
    """

    __slots__ = (
        "_began", "_book", "_clock", "_ended", "_entry", "_load", "_on_release", "_place", "_queued", "alarm",
        "takes_room", "trial",
    )  # fmt: skip

    def __init__(
        self,
        entry: PoolEntry,
        clock: Clock,
        book: Load,
        load: LegLoad,
        on_release: Callable[[PoolEntry, "Slot"], None],
    ) -> None:
        view = entry.view
        self._entry: PoolEntry | None = entry
        self.alarm: Callable[[], None] | None = None
        self._clock = clock
        self._book = book
        self._load = load
        self._on_release = on_release
        self._began = clock.now()
        self._place = place = view.place(load.rank)
        self.trial = view.state is State.PROBING
        self._ended = False
        place.legs += 1
        self._queued = load.queued is not None
        if load.queued is not None:
            place.take_prompt(load.key, load.queued, self._began)
        takes = load.footprint
        self.takes_room = takes.sequences > 0
        place.tokens += takes.tokens
        place.sequences += takes.sequences
        view.active += 1
        view.changed(place)
        entry.slots[self] = None

    def computed(self, tokens: int | None = None) -> None:
        """The prompt that was to be computed is computed. Idempotent.

        ``tokens``: how many were; the place's speed is learned from it. None: the leg's time says nothing of that.
        """
        entry, load, place = self._entry, self._load, self._place
        if entry is None or not self._queued or load.queued is None:
            return
        self._queued = False
        place.drop_prompt(load.key, load.queued)
        entry.view.prompts_changed()
        now = self._clock.now()
        if tokens is None or entry.left:
            place.end_prompt(self._began, now)
        elif self.takes_room and len(entry.node.roles) == 1:
            self._book.computed(Work.LOCAL, place, tokens, self._began, now)
        else:
            seconds = self._book.computed(Work.PREFILL, place, tokens, self._began, now)
            self._book.prefilled(place, entry.node.ranks, seconds, load.arrived, now)

    def took_over(self, tokens: int, since: float, *, instead: bool) -> None:
        """The place has read so many tokens of a prompt from a prefill node, since that monotonic second. How fast it
        does that is learned. ``instead``: it could have computed the prompt itself."""
        if self._entry is not None and not self._entry.left:
            self._book.learn(Work.HAND_OVER, self._place, tokens, self._place.seconds_alone(since, self._clock.now()))
            if instead:
                self._book.passed_over(Work.LOCAL, self._place)

    def streamed(self, tokens: int, seconds: float) -> None:
        """So many tokens of a stream came in so many seconds."""
        if self._entry is not None:
            self._book.streamed(self._entry.view.legs(Role.DECODE), tokens, seconds)

    def progress(self) -> None:
        """Something arrived from the node: active health then knows that a slow probe means busy, not dead. Cheap."""
        if self._entry is not None:
            self._entry.progressed_at = self._clock.now()

    def end_leg(self) -> None:
        """The leg is over. What it takes of the caches counts until the slot is released: its ticket is not read yet.
        Idempotent."""
        entry = self._entry
        if entry is not None and not self._ended:
            self.alarm = None
            self.computed()
            self._ended = True
            self._place.legs -= 1
            entry.view.active -= 1
            entry.view.changed(self._place)

    def release(self) -> None:
        """Give the place back. Idempotent; works after the node has left the pool."""
        entry = self._entry
        if entry is None:
            return
        del entry.slots[self]
        self._entry = self.alarm = None
        place, load = self._place, self._load
        if not self._ended:
            place.legs -= 1
            entry.view.active -= 1
        if self._queued and load.queued is not None:
            place.drop_prompt(load.key, load.queued)
        takes = load.footprint
        place.tokens -= takes.tokens
        place.sequences -= takes.sequences
        entry.view.changed(place)
        self._on_release(entry, self)

    def __enter__(self) -> "Slot":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class CohortTraffic:
    """Requests by cohort, of those that have nodes: the pool says when a cohort has none any more."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, Counter[str]]] = deque()
        """When each began, in monotonic seconds, and its requests."""

    def record(self, cohort: str) -> None:
        """A request goes to a decode node of a cohort now."""
        now = self._clock.now()
        if not self._steps or now - self._steps[-1][0] >= _STEP:
            self._drop_old(now)
            self._steps.append((now, Counter()))
        self._steps[-1][1][cohort] += 1

    def drop_cohort(self, cohort: str) -> None:
        """The cohort has no nodes any more."""
        for _, requests in self._steps:
            del requests[cohort]

    def recent(self) -> Counter[str]:
        """Requests of the last WINDOW seconds, by cohort."""
        self._drop_old(self._clock.now())
        return sum((requests for _, requests in self._steps), Counter())

    def _drop_old(self, now: float) -> None:
        while self._steps and now - self._steps[0][0] > WINDOW:
            self._steps.popleft()
