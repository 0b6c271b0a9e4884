"""One node in the pool: its state, what runs on it, its view, the slots of its legs; and how many requests the nodes of
each cohort got lately. Only the pool changes an entry.
"""

import asyncio
import dataclasses
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from pdproxy.clock import Clock
from pdproxy.nodes.circuit_breaker import CircuitBreaker, CircuitState
from pdproxy.nodes.node import NO_FOOTPRINT, Bars, Footprint, Node, NodeView, Roster, Snapshot, State
from pdproxy.nodes.outlier import LegRecord
from pdproxy.observe.labels import Leg

_STATE_BY_CIRCUIT = {
    CircuitState.CLOSED: State.UP, CircuitState.OPEN: State.DOWN, CircuitState.HALF_OPEN: State.PROBING
}  # fmt: skip


class LegLoad(NamedTuple):
    """What a leg adds to its node.

    Attributes:
        rank: the data-parallel rank that it goes to; None where vLLM chooses.
        queued: tokens of its prompt that are to be computed there.
        footprint: what it takes of the caches there: a decode leg's.
    """

    rank: int | None = None
    queued: int = 0
    footprint: Footprint = NO_FOOTPRINT


NO_LOAD = LegLoad()
WINDOW = 300.0
"""Seconds for which a request counts."""
_STEP = 10.0
"""Seconds that are counted together."""


@dataclasses.dataclass(slots=True)
class PoolEntry:
    """What the pool keeps of one node.

    Attributes:
        node: with what the preflight found filled in.
        configured: as it was given to the pool.
        membership: JOINING, UP, DRAINING, TERMINATING or REFUSED; the circuit counts while it is UP or TERMINATING.
        active: legs in flight.
        legs: of them, by data-parallel rank; as many ranks as the node has, or has had.
        queued: of their prompts' tokens, those that are still to be computed on each rank.
        held: what they take of each rank's caches.
        trials: of these, the ones that were sent to try a half-open circuit.
        misses: active health probes failed in a row.
        progressed_at: monotonic seconds when a leg last received something from the node.
        since: monotonic seconds when its state last changed; while it is out, when that began.
        leaving: set when running streams should move elsewhere.
        idle: set while no leg is in flight.
        alarms: called when active health gives the node up.
        records: how its legs ended.
        out_by: the id of the request whose failure opened the circuit; "" where active health did.
    """

    node: Node
    circuit: CircuitBreaker
    configured: Node
    membership: State = State.JOINING
    active: int = 0
    legs: list[int] = dataclasses.field(default_factory=lambda: [0])
    queued: list[int] = dataclasses.field(default_factory=lambda: [0])
    held: list[Footprint] = dataclasses.field(default_factory=lambda: [NO_FOOTPRINT])
    trials: int = 0
    misses: int = 0
    progressed_at: float = float("-inf")
    reason: str = ""
    since: float = float("-inf")
    leaving: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    idle: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    alarms: set[Callable[[], None]] = dataclasses.field(default_factory=set)
    records: defaultdict[Leg, LegRecord] = dataclasses.field(default_factory=lambda: defaultdict(LegRecord))
    out_by: str = ""

    def __post_init__(self) -> None:
        self.idle.set()

    def stay(self) -> None:
        """Streams that begin from now on need not leave. Those that run keep their event: it may still be set."""
        if self.leaving.is_set():
            self.leaving = asyncio.Event()

    def lost(self) -> bool:
        """Whether active health has given the node up."""
        return self.misses >= self.circuit.config.failures

    def silent_since(self) -> float:
        """Monotonic seconds when something last came for a leg; inf while no leg is in flight."""
        return self.progressed_at if self.active else math.inf

    def send_legs_away(self) -> None:
        """Have streams move, and legs that wait for an answer fail, where there is another node for them."""
        self.leaving.set()
        for alarm in tuple(self.alarms):
            alarm()

    def state(self) -> State:
        """The state that plans are made from."""
        if self.membership is State.TERMINATING:  # never tried again once its circuit is open
            return State.TERMINATING if self.circuit.state is CircuitState.CLOSED else State.DOWN
        return _STATE_BY_CIRCUIT[self.circuit.state] if self.membership is State.UP else self.membership

    def is_going(self) -> bool:
        """Whether it leaves: nothing that is found out about it lets it serve as before."""
        return self.membership in (State.DRAINING, State.TERMINATING)

    def admit(self, node: Node) -> None:
        """The node with what its preflight found; it may have more ranks than before, or fewer."""
        self.node = node
        self.records.clear()
        more = node.ranks - len(self.legs)
        self.legs += [0] * more
        self.queued += [0] * more
        self.held += [NO_FOOTPRINT] * more

    def lightest_rank(self) -> int:
        """The one with the fewest legs: where vLLM sends a leg that names none, as far as this proxy can tell."""
        return min(range(self.node.ranks), key=self.legs.__getitem__)

    def view(self, now: float) -> NodeView:
        """The node as a snapshot shows it."""
        state, share, ranks = self.state(), self.circuit.share(now), self.node.ranks
        legs, queued, held = self.legs, self.queued, self.held
        if len(legs) > ranks:  # it had more of them
            legs, queued, held = legs[:ranks], queued[:ranks], held[:ranks]
        return NodeView(
            self.node, state, self.active, share, self.trials, self.reason, tuple(legs), tuple(queued), tuple(held),
            self.since,
        )  # fmt: skip


class Views:
    """The views of all nodes, in the order of joining: each is kept until its node changes, or time changes it.

    Args:
        refresh: applies the passing of time to an entry, until a moment in monotonic seconds.

    Attributes:
        outdated: nodes that have changed since their view was made; the pool puts them in.
    """

    def __init__(self, refresh: Callable[[PoolEntry, float], PoolEntry]) -> None:
        self._refresh = refresh
        self._entries: dict[str, PoolEntry] = {}
        self._views: dict[str, NodeView] = {}
        self._constant_until: dict[str, float] = {}
        """Of nodes whose view changes with time alone."""
        self._next_change = math.inf
        self._roster: Roster | None = None
        self._latest: Snapshot | None = None
        self.outdated: dict[str, PoolEntry] = {}

    def add(self, entry: PoolEntry, now: float) -> None:
        """A node joins."""
        self._entries[entry.node.name] = entry
        self._views[entry.node.name] = entry.view(now)
        self._roster = self._latest = None

    def remove(self, name: str) -> None:
        """It leaves."""
        del self._entries[name], self._views[name]
        self.outdated.pop(name, None)
        self._constant_until.pop(name, None)
        self._roster = self._latest = None

    def one(self, name: str, now: float) -> NodeView:
        """One node as it stands now."""
        self._renew(now)
        return self._views[name]

    def snapshot(self, now: float, bars: Bars) -> Snapshot:
        """All as they stand now."""
        self._renew(now)
        if self._latest is None or self._latest.bars is not bars:
            self._latest = Snapshot(tuple(self._views.values()), bars, self._roster)
            self._roster = self._latest.roster
        return self._latest

    def _renew(self, now: float) -> None:
        if now >= self._next_change:
            later = {name: until for name, until in self._constant_until.items() if now < until}
            self.outdated |= {name: self._entries[name] for name in self._constant_until.keys() - later.keys()}
            self._constant_until, self._next_change = later, min(later.values(), default=math.inf)
        if self.outdated:
            outdated, self.outdated = self.outdated, {}
            for name, entry in outdated.items():
                self._renew_one(name, self._refresh(entry, now), now)
            self._latest = None

    def _renew_one(self, name: str, entry: PoolEntry, now: float) -> None:
        before, view = self._views[name], entry.view(now)
        self._views[name] = view
        # A trial decides whether a node that is on trial takes requests.
        moved = view.state is not before.state or bool(view.trials) is not bool(before.trials)
        if moved or view.node is not before.node:
            self._roster = None
        until = entry.circuit.constant_until(now)
        if until == math.inf:
            self._constant_until.pop(name, None)
        else:
            self._constant_until[name] = until
            self._next_change = min(self._next_change, until)


class Slot:
    """A leg's place on a node: must be released, on every exit. Also a context manager.

    Args:
        load: what it adds there.
        on_change: called when ``entry`` has changed.
        on_release: called with ``entry`` and the slot.

    Attributes:
        trial: it tries a half-open circuit.
        takes_room: of the node's caches.
    """

    def __init__(
        self,
        entry: PoolEntry,
        clock: Clock,
        load: LegLoad,
        on_change: Callable[[PoolEntry], None],
        on_release: Callable[[PoolEntry, "Slot"], None],
    ) -> None:
        self._entry: PoolEntry | None = entry
        self._clock = clock
        self._queued, self._footprint = load.queued, load.footprint
        self.takes_room = load.footprint.sequences > 0
        self._on_change = on_change
        self._on_release = on_release
        self.trial = entry.state() is State.PROBING
        self._alarm: Callable[[], None] | None = None
        rank = load.rank
        if rank is None:
            rank = 0 if entry.node.ranks == 1 else entry.lightest_rank()
        self._rank = rank
        entry.legs[rank] += 1
        entry.queued[rank] += load.queued
        if self.takes_room:
            tokens, sequences = entry.held[rank]
            entry.held[rank] = Footprint(tokens + load.footprint.tokens, sequences + load.footprint.sequences)

    def prompt_computed(self) -> None:
        """The tokens that were to be computed for it are. Idempotent."""
        if self._entry is not None and self._queued:
            self._entry.queued[self._rank] -= self._queued
            self._queued = 0
            self._on_change(self._entry)

    def progress(self) -> None:
        """Something arrived from the node: active health then knows that a slow probe means busy, not dead. Cheap."""
        if self._entry is not None:
            self._entry.progressed_at = self._clock.now()

    def on_node_down(self, alarm: Callable[[], None] | None) -> None:
        """Call ``alarm`` each time that active health finds the node gone; None ends that."""
        if self._entry is None:
            return
        if self._alarm is not None:
            self._entry.alarms.discard(self._alarm)
        if alarm is not None:
            self._entry.alarms.add(alarm)
        self._alarm = alarm

    def release(self) -> None:
        """Give the place back. Idempotent; works after the node has left the pool."""
        self.on_node_down(None)
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.legs[self._rank] -= 1
            entry.queued[self._rank] -= self._queued
            if self.takes_room:
                tokens, sequences = entry.held[self._rank]
                entry.held[self._rank] = Footprint(
                    tokens - self._footprint.tokens, sequences - self._footprint.sequences
                )
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

    def forget(self, cohort: str) -> None:
        """It has no nodes any more."""
        for _, requests in self._steps:
            del requests[cohort]

    def recent(self) -> Counter[str]:
        """Of the last WINDOW seconds, by cohort."""
        self._drop_old(self._clock.now())
        return sum((requests for _, requests in self._steps), Counter())

    def _drop_old(self, now: float) -> None:
        while self._steps and now - self._steps[0][0] > WINDOW:
            self._steps.popleft()
