"""Agents, and where they live: conversations of large prompts, each counted once with all that branch off it. Pure.

An agent lives at the place that computed its latest large prompt. It is counted there for `LIVES` seconds after each of
them: whole once it has come back, and until then by how likely that is.

A proxy counts the agents whose prompts pass it. Where there are several, each one spreads its own.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from pdproxy.nodes.node import Node
from pdproxy.planning.prefix import Place

LARGE = 1 / 48
"""The part of a place's cache above which a prompt is a large one, such as agents have."""
LIVES = 300.0
"""Seconds after its latest large prompt for which an agent is taken to need its place."""
MOST_AGENTS = 1 << 14
"""The agents that are counted; those that have been silent for longest are not."""


def large_tokens(node: Node) -> float:
    """The tokens above which a prompt is a large one at a node's places; infinite where its caches are not known."""
    return math.inf if node.capacity is None else LARGE * (node.capacity.tokens // node.ranks)


class Agent(msgspec.Struct, eq=False):
    """One agent.

    Attributes:
        home: the place where it lives; None before its first large prompt is computed.
        came_back: it has gone on after its first prompt.
    """

    home: Place | None = None
    came_back: bool = False


class Agents:
    """How many agents live at each place."""

    def __init__(self) -> None:
        self._since: OrderedDict[Agent, float] = OrderedDict()
        """The agents that are counted, and since when; the one that has been silent for longest is first."""
        self._at: dict[Place, tuple[int, int]] = {}
        """How many have come back, and how many have not."""
        self._back = self._gone = 0
        """How many of all came back, and how many were silent until they were not counted any more."""

    def lives(self, agent: Agent, place: Place, now: float, turns: int) -> None:
        """A place computes a large prompt of it, which is this turn of its conversation."""
        self._leave(agent)
        if turns > 1 and not agent.came_back:
            agent.came_back = True
            self._back += 1
        agent.home = place
        self._since[agent] = now
        self._count(agent, place, 1)
        if len(self._since) > MOST_AGENTS:
            self._leave(next(iter(self._since)))

    def at(self, now: float) -> Mapping[Place, float]:
        """The agents at each place that one which begins may meet again: how many there are, times how likely it goes
        on itself."""
        while self._since:
            agent, since = next(iter(self._since.items()))
            if now - since < LIVES:
                break
            self._leave(agent)
            self._gone += not agent.came_back
        likely = (self._back + 1) / (self._back + self._gone + 2)
        return {place: likely * (back + likely * first) for place, (back, first) in self._at.items()}

    def _leave(self, agent: Agent) -> None:
        if self._since.pop(agent, None) is not None and agent.home is not None:
            self._count(agent, agent.home, -1)

    def _count(self, agent: Agent, place: Place, more: int) -> None:
        back, first = self._at.pop(place, (0, 0))
        counted = (back + more, first) if agent.came_back else (back, first + more)
        if any(counted):
            self._at[place] = counted
