"""Who belongs to the pool, and in which state: the half of `Pool` that operators, health and discovery change."""

import asyncio
from collections.abc import Iterator
from types import MappingProxyType

from pdproxy.clock import Clock
from pdproxy.errors import PdproxyError
from pdproxy.nodes.circuit import Circuit, CircuitRules, Phase
from pdproxy.nodes.member import Member, Stage
from pdproxy.nodes.node import Bars, Node, Role
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


ANYBODY = "*"
"""Stands for all nodes of a role where a bar is shown; no node can have this name."""


class Roster:
    """All nodes, by name. It does no I/O and runs on one event loop; every call is done when it returns.

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
        self.bars = Bars()
        """Which nodes exchange no tickets though they are of one cohort; changed by `bar` alone."""
        self.changed = asyncio.Event()
        """Set when a node was added or fell back to JOINING; `health` clears it."""

    def add(self, node: Node) -> None:
        """Take a node in as JOINING; `health` then runs its preflight and admits it.

        Raises:
            DuplicateNode: the name is taken.
        """
        if node.name in self._members:
            raise DuplicateNode(node.name)
        self._members[node.name] = member = Member(node, Circuit(self._rules), node)
        self._watch.active(node, 0)
        self._watch.state(node, member.state())
        self.changed.set()

    def configured(self, name: str) -> Node:
        """The node as it was given to `add` or `amend`, without what a preflight found: it may have changed since.

        Raises:
            UnknownNode: it has left.
        """
        return self._member(name).configured

    def admit(self, node: Node) -> None:
        """Let the node of this name serve, with what the preflight found out about it; it starts slowly.

        Raises:
            UnknownNode: it left in the meantime.
        """
        member = self._member(node.name)
        if member.stage is Stage.DRAINING:
            return
        member.node, member.misses, member.reason = node, 0, ""
        member.stay()
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
        member.reason = ""
        member.stay()
        self._move(member, member.circuit, Stage.JOINING)
        self.changed.set()

    def amend(self, node: Node) -> None:
        """Other settings for the node of this name; it joins again with them, and running requests go on.

        Raises:
            UnknownNode: it has left.
        """
        self._member(node.name).configured = node
        self.rejoin(node.name)

    def drain(self, name: str) -> None:
        """No new requests from now on. `Drainer` watches over the deadline.

        Raises:
            UnknownNode: it has left.
        """
        member = self._member(name)
        member.reason = "drained by the operator"
        self._move(member, member.circuit, Stage.DRAINING)

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
        member = self._members.pop(name, None)
        if member is not None:
            member.leaving.set()
            self._watch.gone(member.node)

    def _shown(self, bars: Bars) -> Iterator[tuple[str, str]]:
        """By prefill and decode node; a node that is barred from everybody has ANYBODY beside it."""
        yield from bars.pairs
        for name in bars.nodes:
            member = self._members.get(name)
            if member is not None:
                yield (name, ANYBODY) if member.node.role is Role.PREFILL else (ANYBODY, name)

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


def _without(bars: Bars, name: str) -> Bars:
    pairs = {pair: why for pair, why in bars.pairs.items() if name not in pair}
    nodes = {barred: why for barred, why in bars.nodes.items() if barred != name}
    return Bars(MappingProxyType(pairs), MappingProxyType(nodes))
