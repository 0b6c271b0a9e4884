"""The nodes that this proxy knows: membership (`Roster`), load, conduct. It does no I/O; `health` and `join` do, and
tell it.

Everything here is synchronous and runs on one event loop.
"""

import asyncio
from collections.abc import Callable

from pdproxy.errors import Fault
from pdproxy.nodes.circuit import NODE_FAULTS, Phase
from pdproxy.nodes.member import Member
from pdproxy.nodes.node import NodeView, Snapshot, State
from pdproxy.nodes.roster import DuplicateNode, Roster, UnknownNode

__all__ = ["DuplicateNode", "Occupied", "Pool", "UnknownNode"]


class Occupied:
    """A leg's place on a node. Whoever holds it must `release` it, on every exit; also a context manager."""

    def __init__(self, pool: "Pool", member: Member) -> None:
        self._pool = pool
        self._member: Member | None = member
        self._trial = member.state() is State.PROBING
        self._alarm: Callable[[], None] | None = None
        self.node = member.node

    def progress(self) -> None:
        """Something arrived from the node: active health then knows that a slow probe means busy, not dead. Cheap."""
        if self._member is not None:
            self._pool.progressed(self._member)

    def when_given_up(self, alarm: Callable[[], None] | None) -> None:
        """Have ``alarm`` called each time that active health finds the node gone; None for not any more."""
        if self._member is None:
            return
        if self._alarm is not None:
            self._member.alarms.discard(self._alarm)
        if alarm is not None:
            self._member.alarms.add(alarm)
        self._alarm = alarm

    def release(self) -> None:
        """Give the place back. Idempotent; works after the node has left the pool."""
        self.when_given_up(None)
        member, self._member = self._member, None
        if member is not None:
            self._pool.vacate(member, int(self._trial))

    def __enter__(self) -> "Occupied":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Pool(Roster):
    """All nodes, by name, with what runs on them and how they behave."""

    # -- what planning and the legs use

    def snapshot(self) -> Snapshot:
        """Every node as it stands now, in the order of joining."""
        now = self._clock.now()
        return Snapshot(
            tuple(self._refresh(member, now).view(now) for member in self._members.values()), bars=self.bars
        )

    def view(self, name: str) -> NodeView:
        """One node as it stands now.

        Raises:
            UnknownNode: it has left.
        """
        now = self._clock.now()
        return self._refresh(self._member(name), now).view(now)

    def occupy(self, name: str) -> Occupied:
        """Count a leg on the node, until it is released.

        Raises:
            UnknownNode: it left between the plan and this call.
        """
        member = self._member(name)
        occupied = Occupied(self, member)
        member.active += 1
        member.trials += int(member.state() is State.PROBING)
        member.idle.clear()
        self._watch.active(member.node, member.active)
        return occupied

    def report(self, name: str, fault: Fault | None) -> None:
        """How a leg on the node ended: None for well.

        Only NODE_FAULTS count. A 5xx that the request itself provokes (it fails on every node) must not be reported
        by the caller as SERVER_ERROR. A node that has left is ignored.
        """
        member = self._members.get(name)
        if member is None or (fault is not None and fault not in NODE_FAULTS):
            return
        now = self._clock.now()
        if fault is None:
            self.progressed(member)
            self._move(member, self._refresh(member, now).circuit.succeeded(now))
            return
        member.reason = f"last fault: {fault}"
        self._move(member, self._refresh(member, now).circuit.failed(now))

    def leaving(self, name: str) -> asyncio.Event:
        """Set when streams on the node should migrate: the drain deadline came, or active health gave it up.

        Raises:
            UnknownNode: it has left.
        """
        return self._member(name).leaving

    # -- what health, join and drain use

    def idle(self, name: str) -> asyncio.Event:
        """Set while no leg of ours is on the node.

        Raises:
            UnknownNode: it has left.
        """
        return self._member(name).idle

    def probed(self, name: str, fault: Fault | None, began: float) -> None:
        """The outcome of an active health probe that ``began`` at that monotonic second.

        A timed-out probe is no miss if a leg heard from the node since ``began``: it is busy, not dead. `failures`
        misses in a row open the circuit; legs are told to leave once they are silent too. A node that has left is
        ignored.
        """
        member = self._members.get(name)
        if member is None:
            return
        heard = member.progressed_at >= began
        if fault is None or (heard and fault in (Fault.HEADERS_TIMEOUT, Fault.STALL)):
            member.misses = 0
            return
        member.misses += 1
        if member.lost() and member.circuit.phase is not Phase.OPEN:
            member.reason = f"health: {fault}"
            self._move(member, member.circuit.opened(self._clock.now()))
        if member.lost() and not heard:
            member.leaving.set()
            for alarm in tuple(member.alarms):
                alarm()

    def lost(self, name: str) -> bool:
        """Whether active health has given the node up (it must join anew before it serves)."""
        member = self._members.get(name)
        return member is not None and member.lost()

    def progressed(self, member: Member) -> None:
        """For `Occupied`."""
        member.progressed_at = self._clock.now()

    def vacate(self, member: Member, trials: int) -> None:
        """For `Occupied`."""
        member.active -= 1
        member.trials = max(0, member.trials - trials)
        if member.active == 0:
            member.idle.set()
        if self._members.get(member.node.name) is member:
            self._watch.active(member.node, member.active)

    def silent(self, name: str, since: float) -> bool:
        """Whether legs run on the node and none has heard from it since that monotonic second."""
        member = self._members.get(name)
        return member is not None and member.active > 0 and member.progressed_at < since
