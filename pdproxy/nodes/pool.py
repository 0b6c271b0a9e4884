"""The nodes that this proxy knows: membership, load, conduct. It does no I/O; `health` and `join` do, and tell it.

Everything here is synchronous and runs on one event loop.
"""

import asyncio

from pdproxy.clock import Clock
from pdproxy.errors import Fault, PdproxyError
from pdproxy.nodes.circuit import NODE_FAULTS, Circuit, CircuitRules, Phase
from pdproxy.nodes.member import Member, Stage
from pdproxy.nodes.node import Node, NodeView, Snapshot, State
from pdproxy.nodes.watch import NodeWatch, Unwatched


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


class Occupied:
    """A leg's place on a node. Whoever holds it must `release` it, on every exit; also a context manager."""

    def __init__(self, pool: "Pool", member: Member) -> None:
        self._pool = pool
        self._member: Member | None = member
        self._trial = member.state() is State.PROBING
        self.node = member.node

    def progress(self) -> None:
        """Something arrived from the node: active health then knows that a slow probe means busy, not dead. Cheap."""
        if self._member is not None:
            self._pool.progressed(self._member)

    def release(self) -> None:
        """Give the place back. Idempotent; works after the node has left the pool."""
        member, self._member = self._member, None
        if member is not None:
            self._pool.vacate(member, int(self._trial))

    def __enter__(self) -> "Occupied":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Pool:
    """All nodes, by name.

    Args:
        clock: for cool-downs and slow start.
        rules: when circuits open and close.
        watch: told of every change.
    """

    def __init__(self, clock: Clock, rules: CircuitRules | None = None, watch: NodeWatch | None = None) -> None:
        self._clock = clock
        self._rules = rules or CircuitRules()
        self._watch = watch or Unwatched()
        self._members: dict[str, Member] = {}
        self.changed = asyncio.Event()
        """Set when a node was added or fell back to JOINING; `health` clears it."""

    # -- what planning and the legs use

    def snapshot(self) -> Snapshot:
        """Every node as it stands now, in the order of joining."""
        now = self._clock.now()
        return Snapshot(tuple(self._refresh(member, now).view(now) for member in self._members.values()))

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

    # -- membership

    def add(self, node: Node) -> None:
        """Take a node in as JOINING; `health` then runs its preflight and admits it.

        Raises:
            DuplicateNode: the name is taken.
        """
        if node.name in self._members:
            raise DuplicateNode(node.name)
        self._members[node.name] = member = Member(node, Circuit(self._rules))
        self._watch.active(node, 0)
        self._watch.state(node, member.state())
        self.changed.set()

    def admit(self, node: Node) -> None:
        """Let the node of this name serve, with what the preflight found out about it; it starts slowly.

        Raises:
            UnknownNode: it left in the meantime.
        """
        member = self._member(node.name)
        if member.stage is Stage.DRAINING:
            return
        member.node, member.misses, member.reason = node, 0, ""
        member.leaving = asyncio.Event()
        self._move(member, Circuit(self._rules, moved_at=self._clock.now()), Stage.SERVING)

    def refuse(self, name: str, reason: str) -> None:
        """The preflight found a setting that cannot work. Streams that run on the node go on.

        Raises:
            UnknownNode: it left in the meantime.
        """
        member = self._member(name)
        if member.stage is Stage.DRAINING:
            return
        member.reason = reason
        self._move(member, member.circuit, Stage.REFUSED)

    def waiting(self, name: str, reason: str) -> None:
        """Say why the node does not join yet; ignored for a node that has left.

        A refused node whose preflight cannot be repeated keeps the reason of its refusal.
        """
        member = self._members.get(name)
        if member is not None and member.stage is Stage.JOINING:
            member.reason = reason

    def rejoin(self, name: str) -> None:
        """Back to JOINING: the end of a drain, or something new to look at.

        Raises:
            UnknownNode: it has left.
        """
        member = self._member(name)
        member.reason, member.leaving = "", asyncio.Event()
        self._move(member, member.circuit, Stage.JOINING)
        self.changed.set()

    def drain(self, name: str) -> None:
        """No new requests from now on. `Drainer` watches over the deadline.

        Raises:
            UnknownNode: it has left.
        """
        member = self._member(name)
        member.reason = "drained by the operator"
        self._move(member, member.circuit, Stage.DRAINING)

    def remove(self, name: str) -> None:
        """Forget the node; legs that still run on it are told to leave. Idempotent."""
        member = self._members.pop(name, None)
        if member is not None:
            member.leaving.set()
            self._watch.gone(member.node)

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
        misses in a row open the circuit; streams are told to leave once they are silent too. A node that has left is
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

    def _member(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None:
            raise UnknownNode(name)
        return member

    def _refresh(self, member: Member, now: float) -> Member:
        """Let time pass; a node that active health gave up stays down however cool it is."""
        if member.circuit.phase is Phase.OPEN and not member.lost():
            self._move(member, member.circuit.at(now))
        return member

    def _move(self, member: Member, circuit: Circuit, stage: Stage | None = None) -> None:
        phase, state = member.circuit.phase, member.state()
        member.circuit, member.stage = circuit, stage or member.stage
        if circuit.phase is not phase:
            member.trials = 0
            self._watch.circuit_moved(member.node, circuit.phase)
        if member.state() is not state:
            self._watch.state(member.node, member.state())
