"""The nodes that this proxy knows: who belongs to the pool (`Roster`), their load, and how they behave (`Pool`).

No I/O: `health_check` and `join` do that and report here. Everything is synchronous and runs on one event loop. Over
300 lines, for membership, load and circuits change the same entries.
"""

import asyncio
from collections.abc import Callable, Iterator
from types import MappingProxyType

from pdproxy.clock import Clock
from pdproxy.errors import Fault, PdproxyError
from pdproxy.nodes.node import Bars, Node, NodeView, Role, Snapshot, State
from pdproxy.nodes.node_entry import (
    NODE_FAULTS,
    CircuitBreaker,
    CircuitBreakerConfig,
    CircuitState,
    Membership,
    NodeEntry,
    NullPoolObserver,
    PoolObserver,
)


class UnknownNode(PdproxyError):
    """No node of this name is in the pool (any more)."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no node named {name!r}")
        self.name = name


class DuplicateNode(PdproxyError):
    """The name is taken."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a node named {name!r} is already there")
        self.name = name


ANYBODY = "*"
"""Stands for all nodes of a role where a bar is shown; no node can have this name."""


class Roster:
    """All nodes, by name. It does no I/O and runs on one event loop; every call is done when it returns.

    Args:
        clock: for cool-downs and slow start.
        rules: when circuits open and close.
        watch: told of every change.
    """

    def __init__(
        self, clock: Clock, rules: CircuitBreakerConfig | None = None, watch: PoolObserver | None = None
    ) -> None:
        self._clock = clock
        self._rules = rules or CircuitBreakerConfig()
        self._watch = watch or NullPoolObserver()
        self._entries: dict[str, NodeEntry] = {}
        self.bars = Bars()
        """Which nodes exchange no tickets though they are of one cohort; changed by `bar` alone."""
        self.changed = asyncio.Event()
        """Set when a node was added or fell back to JOINING; `health` clears it."""

    def add(self, node: Node) -> None:
        """Take a node in as JOINING; `health` then runs its preflight and admits it.

        Raises:
            DuplicateNode: the name is taken.
        """
        if node.name in self._entries:
            raise DuplicateNode(node.name)
        self._entries[node.name] = entry = NodeEntry(node, CircuitBreaker(self._rules), node)
        self._watch.active(node, 0)
        self._watch.state(node, entry.state())
        self.changed.set()

    def configured(self, name: str) -> Node:
        """The node as it was given to `add` or `amend`, without what a preflight found: it may have changed since.

        Raises:
            UnknownNode: it has left.
        """
        return self._entry(name).configured

    def admit(self, node: Node) -> None:
        """Let the node of this name serve, with what the preflight found out about it; it starts slowly.

        Raises:
            UnknownNode: it left in the meantime.
        """
        entry = self._entry(node.name)
        if entry.stage is Membership.DRAINING:
            return
        entry.node, entry.misses, entry.reason = node, 0, ""
        entry.stay()
        self._move(entry, CircuitBreaker(self._rules, moved_at=self._clock.now()), Membership.SERVING)

    def refuse(self, name: str, reason: str) -> None:
        """The preflight found a setting that cannot work. Streams that run on the node go on.

        Raises:
            UnknownNode: it left in the meantime.
        """
        entry = self._entry(name)
        if entry.stage is Membership.DRAINING:
            return
        entry.reason = reason
        self._move(entry, entry.circuit, Membership.REFUSED)

    def waiting(self, name: str, reason: str) -> None:
        """Say why the node does not join yet; ignored for a node that has left.

        A refused node whose preflight cannot be repeated keeps the reason of its refusal.
        """
        entry = self._entries.get(name)
        if entry is not None and entry.stage is Membership.JOINING:
            entry.reason = reason

    def rejoin(self, name: str) -> None:
        """Back to JOINING: the end of a drain, or something new to look at.

        Raises:
            UnknownNode: it has left.
        """
        entry = self._entry(name)
        entry.reason = ""
        entry.stay()
        self._move(entry, entry.circuit, Membership.JOINING)
        self.changed.set()

    def amend(self, node: Node) -> None:
        """Other settings for the node of this name; it joins again with them, and running requests go on.

        Raises:
            UnknownNode: it has left.
        """
        self._entry(node.name).configured = node
        self.rejoin(node.name)

    def drain(self, name: str) -> None:
        """No new requests from now on. `Drainer` watches over the deadline.

        Raises:
            UnknownNode: it has left.
        """
        entry = self._entry(name)
        entry.reason = "drained by the operator"
        self._move(entry, entry.circuit, Membership.DRAINING)

    def bar(self, bars: Bars) -> None:
        """From now on these and no others are kept apart; plans that were made stay as they are."""
        before, after = set(self._shown(self.bars)), set(self._shown(bars))
        self.bars = bars
        for prefill, decode in before - after:
            self._watch.barred(prefill, decode, lifted=True)
        for prefill, decode in after - before:
            self._watch.barred(prefill, decode, lifted=False)

    def remove(self, name: str) -> None:
        """Forget the node; legs that still run on it are told to leave. Idempotent."""
        self.bar(_without(self.bars, name))
        entry = self._entries.pop(name, None)
        if entry is not None:
            entry.leaving.set()
            self._watch.gone(entry.node)

    def _shown(self, bars: Bars) -> Iterator[tuple[str, str]]:
        """By prefill and decode node; a node that is barred from everybody has ANYBODY beside it."""
        yield from bars.pairs
        for name in bars.nodes:
            entry = self._entries.get(name)
            if entry is not None:
                yield (name, ANYBODY) if entry.node.role is Role.PREFILL else (ANYBODY, name)

    def _entry(self, name: str) -> NodeEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise UnknownNode(name)
        return entry

    def _refresh(self, entry: NodeEntry, now: float) -> NodeEntry:
        """Let time pass; a node that active health gave up stays down however cool it is."""
        if entry.circuit.phase is CircuitState.OPEN and not entry.lost():
            self._move(entry, entry.circuit.at(now))
        return entry

    def _move(self, entry: NodeEntry, circuit: CircuitBreaker, stage: Membership | None = None) -> None:
        phase, state = entry.circuit.phase, entry.state()
        entry.circuit, entry.stage = circuit, stage or entry.stage
        if circuit.phase is not phase:
            entry.trials = 0
            self._watch.circuit_moved(entry.node, circuit.phase)
        if entry.state() is not state:
            self._watch.state(entry.node, entry.state())


def _without(bars: Bars, name: str) -> Bars:
    pairs = {pair: why for pair, why in bars.pairs.items() if name not in pair}
    nodes = {barred: why for barred, why in bars.nodes.items() if barred != name}
    return Bars(MappingProxyType(pairs), MappingProxyType(nodes))


class Slot:
    """A leg's place on a node. Whoever holds it must `release` it, on every exit; also a context manager."""

    def __init__(self, pool: "Pool", entry: NodeEntry) -> None:
        self._pool = pool
        self._entry: NodeEntry | None = entry
        self._trial = entry.state() is State.PROBING
        self._alarm: Callable[[], None] | None = None
        self.node = entry.node

    def progress(self) -> None:
        """Something arrived from the node: active health then knows that a slow probe means busy, not dead. Cheap."""
        if self._entry is not None:
            self._pool.progressed(self._entry)

    def on_node_down(self, alarm: Callable[[], None] | None) -> None:
        """Have ``alarm`` called each time that active health finds the node gone; None for not any more."""
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
            self._pool.released(entry, int(self._trial))

    def __enter__(self) -> "Slot":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Pool(Roster):
    """All nodes, by name, with what runs on them and how they behave."""

    # -- what planning and the legs use

    def snapshot(self) -> Snapshot:
        """Every node as it stands now, in the order of joining."""
        now = self._clock.now()
        return Snapshot(tuple(self._refresh(entry, now).view(now) for entry in self._entries.values()), bars=self.bars)

    def view(self, name: str) -> NodeView:
        """One node as it stands now.

        Raises:
            UnknownNode: it has left.
        """
        now = self._clock.now()
        return self._refresh(self._entry(name), now).view(now)

    def acquire(self, name: str) -> Slot:
        """Count a leg on the node, until it is released.

        Raises:
            UnknownNode: it left between the plan and this call.
        """
        entry = self._entry(name)
        slot = Slot(self, entry)
        entry.active += 1
        entry.trials += int(entry.state() is State.PROBING)
        entry.idle.clear()
        self._watch.active(entry.node, entry.active)
        return slot

    def report(self, name: str, fault: Fault | None) -> None:
        """How a leg on the node ended: None for well.

        Only NODE_FAULTS count. A 5xx that the request itself provokes (it fails on every node) must not be reported
        by the caller as SERVER_ERROR. A node that has left is ignored.
        """
        entry = self._entries.get(name)
        if entry is None or (fault is not None and fault not in NODE_FAULTS):
            return
        now = self._clock.now()
        if fault is None:
            self.progressed(entry)
            self._move(entry, self._refresh(entry, now).circuit.succeeded(now))
            return
        entry.reason = f"last fault: {fault}"
        self._move(entry, self._refresh(entry, now).circuit.failed(now))

    def leaving(self, name: str) -> asyncio.Event:
        """Set when streams on the node should migrate: the drain deadline came, or active health gave it up.

        Raises:
            UnknownNode: it has left.
        """
        return self._entry(name).leaving

    # -- what health, join and drain use

    def idle(self, name: str) -> asyncio.Event:
        """Set while no leg of ours is on the node.

        Raises:
            UnknownNode: it has left.
        """
        return self._entry(name).idle

    def probed(self, name: str, fault: Fault | None, began: float) -> None:
        """The outcome of an active health probe that ``began`` at that monotonic second.

        A timed-out probe is no miss if a leg heard from the node since ``began``: it is busy, not dead. `failures`
        misses in a row open the circuit; legs are told to leave once they are silent too. A node that has left is
        ignored.
        """
        entry = self._entries.get(name)
        if entry is None:
            return
        heard = entry.progressed_at >= began
        if fault is None or (heard and fault in (Fault.HEADERS_TIMEOUT, Fault.STALL)):
            entry.misses = 0
            return
        entry.misses += 1
        if entry.lost() and entry.circuit.phase is not CircuitState.OPEN:
            entry.reason = f"health: {fault}"
            self._move(entry, entry.circuit.opened(self._clock.now()))
        if entry.lost() and not heard:
            entry.leaving.set()
            for alarm in tuple(entry.alarms):
                alarm()

    def lost(self, name: str) -> bool:
        """Whether active health has given the node up (it must join anew before it serves)."""
        entry = self._entries.get(name)
        return entry is not None and entry.lost()

    def progressed(self, entry: NodeEntry) -> None:
        """For `Slot`."""
        entry.progressed_at = self._clock.now()

    def released(self, entry: NodeEntry, trials: int) -> None:
        """For `Slot`."""
        entry.active -= 1
        entry.trials = max(0, entry.trials - trials)
        if entry.active == 0:
            entry.idle.set()
        if self._entries.get(entry.node.name) is entry:
            self._watch.active(entry.node, entry.active)

    def silent(self, name: str, since: float) -> bool:
        """Whether legs run on the node and none has heard from it since that monotonic second."""
        entry = self._entries.get(name)
        return entry is not None and entry.active > 0 and entry.progressed_at < since
