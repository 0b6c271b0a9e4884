"""How a node comes in: preflight, check, known-answer test, UP. And what is logged while one cannot be reached."""

import logging
from collections.abc import Awaitable, Callable, Collection

from pdproxy.clock import Clock
from pdproxy.errors import NodeFault
from pdproxy.nodes.compatibility import Compatibility, check_compatibility, differences_from_partners
from pdproxy.nodes.node import Node, State
from pdproxy.nodes.node_info import NodeInfo
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight, cause, symptom

_LOG = logging.getLogger(__name__)

MOST_EARLY_PREFLIGHTS = 15
"""How often a preflight is made of a node whose engine has not published its cache yet; about a second apart."""
REMINDERS = (60.0, 300.0, 1800.0)
"""Seconds after which a node that still cannot be reached is logged again; after the last, each time as much later."""


class OutageLog:
    """Few lines while a node is out of reach. That it goes down, and that it serves again, the pool announces."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._outages: dict[str, tuple[float, int]] = {}
        """When each began (monotonic seconds), and how many lines were logged."""

    def failed(self, node: Node, fault: NodeFault) -> None:
        """A preflight or health probe of the node failed, once more."""
        now = self._clock.now()
        since, lines = self._outages.get(node.name, (now, 0))
        if lines == 0:
            text = "node %s %s: %s. It gets no requests until it answers; every health check tries again"
            _LOG.warning(text, node.name, symptom(fault), cause(fault))
        elif now - since >= _reminder_after(lines):
            text = "node %s still %s, for %s now: %s"
            _LOG.warning(text, node.name, symptom(fault), _duration(now - since), cause(fault))
        else:
            return
        self._outages[node.name] = since, lines + 1

    def down(self, node: Node, fault: NodeFault) -> None:
        """As `failed`, for a node that is down: its first line is the pool's."""
        if node.name in self._outages:
            self.failed(node, fault)
        else:
            self._outages[node.name] = self._clock.now(), 1

    def preflight_succeeded(self, node: Node) -> None:
        """A preflight of the node succeeded."""
        self._outages.pop(node.name, None)

    def retain(self, names: Collection[str]) -> None:
        """Forget all other nodes: they have left."""
        self._outages = {name: outage for name, outage in self._outages.items() if name in names}


def _reminder_after(lines: int) -> float:
    """Seconds from an outage's beginning to the line after so many."""
    return REMINDERS[lines - 1] if lines <= len(REMINDERS) else (lines - 2) * REMINDERS[-1]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"


class Joiner:
    """Admits nodes to the pool, or refuses them by the name of the setting.

    Args:
        prove: what is done with a node between its preflight and its first request; bounded in time.
        outages: logs nodes that cannot be reached; health checks use it too.
    """

    def __init__(
        self, pool: Pool, preflight: Preflight, prove: Callable[[Node], Awaitable[None]], outages: OutageLog
    ) -> None:
        self._pool = pool
        self._preflight = preflight
        self._prove = prove
        self.outages = outages
        self._accepted: dict[str, NodeInfo] = {}
        self._early_preflights: dict[str, int] = {}

    async def attempt(self, name: str) -> None:
        """Try to have one node of the pool join; it stays as it is when it cannot be reached. Raises `UnknownNode`."""
        node = self._pool.configured(name)
        try:
            info = await self._preflight.inspect(node)
        except NodeFault as fault:
            self._pool.note_silence(name, fault)
            self._pool.set_join_reason(name, f"{symptom(fault)}: {cause(fault)}")
            if self._has(node):
                self.outages.failed(node, fault)
            return
        self._pool.note_silence(name, None)
        self.outages.preflight_succeeded(node)
        if not self._has(node) or self._is_early(info):
            return
        everyone = [view.node for view in self._pool.state().nodes]
        compatibility = check_compatibility(info, self._others(name), everyone)
        if compatibility.refusals:
            self._refuse(name, compatibility)
        else:
            await self._admit(info, compatibility)

    def _others(self, name: str) -> list[NodeInfo]:
        """The other accepted nodes that are still in the pool."""
        self._accepted = {key: info for key, info in self._accepted.items() if key in self._pool}
        return [info for key, info in self._accepted.items() if key != name]

    def _refuse(self, name: str, compatibility: Compatibility) -> None:
        reason = "; ".join(map(str, compatibility.refusals))
        self._accepted.pop(name, None)
        self._pool.refuse(name, reason)

    async def _admit(self, info: NodeInfo, compatibility: Compatibility) -> None:
        """Accepted before it is proved: two nodes that join at the same time are checked against each other."""
        node = info.joined()
        self._accepted[node.name] = info
        served = self._pool.view(node.name).state is State.UP
        await self._prove(node)
        if self._has(info.node):
            if served or self._pool.view(node.name).state is not State.UP:  # else it was let in while it was tested
                self._pool.bring_up(node)
            for warning in compatibility.warnings:
                _LOG.warning("node %s: %s", node.name, warning)
            for difference in differences_from_partners(info, self._others(node.name)):
                _LOG.warning("node %s exchanges no tickets: %s", node.name, difference)

    def _is_early(self, info: NodeInfo) -> bool:
        """Whether the engine has not made its first step, with which its connector publishes what its cache holds.

        Its fingerprint is part of that: a node admitted without it would be of a cohort of its own.
        """
        name = info.node.name
        self._early_preflights[name] = self._early_preflights.get(name, 0) + 1
        if info.labels and info.capacity is None and self._early_preflights[name] < MOST_EARLY_PREFLIGHTS:
            if self._pool.view(name).state not in (State.JOINING, State.DRAINING, State.TERMINATING):
                self._pool.rejoin(name)  # it restarted, and what is known of it may be another one's
            self._pool.set_join_reason(name, "its engine has not told yet what its cache holds")
            return True
        del self._early_preflights[name]
        return False

    def _has(self, node: Node) -> bool:
        """Whether the pool still has this very node (it may have been removed, even replaced, while we asked)."""
        return node.name in self._pool and self._pool.configured(node.name) == node
