"""Agents, and where they live: large conversations, each counted once with all its branches. Pure.

An agent lives at the place that computed its latest large prompt, from its beginning until its next prompt is overdue.
A conversation that branches off an agent's, a sub-agent, belongs to it. It is found by the marks of earlier prompts,
more of which are remembered here than of other conversations: a sub-agent may begin after later calls of its parent.

A proxy counts the agents whose prompts pass it. Where there are several, each one spreads its own.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdproxy.planning.prefix import Place

MOST_MARKS = 64
"""The marks that are remembered of one agent's prompts; the oldest is forgotten first."""


@dataclass(slots=True, eq=False)
class Agent:
    """One agent.

    Attributes:
        running: prompts of it, of any branch, that are being answered.
        came_back: it has gone on after its first answer.
        home: where it lives; None while it is not counted.
        until: when its next prompt is overdue.
        due: whether it waits among those that may be overdue.
        marks: where its prompts ended.
    """

    running: int = 0
    came_back: bool = False
    home: Place | None = None
    until: float = -math.inf
    due: bool = False
    marks: deque[int] = field(default_factory=deque)


class Agents:
    """The agents that live at each place."""

    def __init__(self) -> None:
        self._living: dict[Agent, None] = {}
        self._begun = self._back = 0
        """All that there were, and those that have come back."""
        self._at: dict[Place, tuple[int, int]] = {}
        """How many have come back, and how many have not."""
        self._by_mark: dict[int, Agent] = {}
        self._due: list[tuple[float, int, Agent]] = []
        """A heap of those that wait for their next prompt; each is in it once, perhaps too early."""
        self._numbers = itertools.count()

    def begin(self, running: int) -> Agent:
        """A new one, of whose prompts so many are being answered."""
        self._begun += 1
        return Agent(running)

    def of_prompt(self, marks: Sequence[int], salt: int) -> Agent | None:
        """The one from whose earlier prompt a prompt with these marks goes on."""
        by_mark = self._by_mark
        return next((by_mark[mark ^ salt] for mark in reversed(marks) if mark ^ salt in by_mark), None)

    def lives(self, agent: Agent, place: Place, mark: int | None) -> None:
        """A place computes a prompt of it that ends at this mark."""
        if agent.home != place:
            self._count(agent, -1)
            agent.home = place
            self._count(agent, 1)
        self._living[agent] = None
        if mark is not None and self._by_mark.get(mark) is not agent:
            self._by_mark[mark] = agent
            agent.marks.append(mark)
            if len(agent.marks) > MOST_MARKS:
                self._drop_mark(agent, agent.marks.popleft())

    def came_back(self, agent: Agent) -> None:
        """The agent has gone on after its first answer."""
        if not agent.came_back:
            self._back += 1
            self._count(agent, -1)
            agent.came_back = True
            self._count(agent, 1)

    def answered(self, agent: Agent, until: float) -> None:
        """An answer to it has ended. Its next prompt is overdue then, or when that of another branch is."""
        agent.running -= 1
        agent.until = max(agent.until, until)
        if not agent.running:
            self._wait(agent)

    def at(self, now: float) -> Mapping[Place, float]:
        """How many live at each place; one that has not come back yet counts by how many of all did."""
        self._forget_overdue(now)
        likely = (self._back + 1) / (self._begun + 2)
        return {place: back + likely * first for place, (back, first) in self._at.items()}

    def forget_node(self, name: str) -> None:
        """Nobody lives at this node any more."""
        for agent in [each for each in self._living if each.home is not None and each.home.node == name]:
            self._leave(agent)

    def _forget_overdue(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, _, agent = heapq.heappop(self._due)
            agent.due = False
            if agent.running:
                continue
            if agent.until > now:
                self._wait(agent)
            else:
                self._leave(agent)

    def _wait(self, agent: Agent) -> None:
        if not agent.due:
            agent.due = True
            heapq.heappush(self._due, (agent.until, next(self._numbers), agent))

    def _leave(self, agent: Agent) -> None:
        self._count(agent, -1)
        agent.home = None
        self._living.pop(agent, None)
        while agent.marks:
            self._drop_mark(agent, agent.marks.popleft())

    def _drop_mark(self, agent: Agent, mark: int) -> None:
        if self._by_mark.get(mark) is agent:
            del self._by_mark[mark]

    def _count(self, agent: Agent, more: int) -> None:
        if agent.home is None:
            return
        back, first = self._at.get(agent.home, (0, 0))
        counted = (back + more, first) if agent.came_back else (back, first + more)
        if any(counted):
            self._at[agent.home] = counted
        else:
            self._at.pop(agent.home, None)
