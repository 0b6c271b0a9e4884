"""The conversations that pass this proxy: which prompt goes on from which, after how long, and what nodes keep. Pure.

A conversation's next prompt begins with its last one. So a prompt is known by its marks (`text_chain`), of which the
last mark of an earlier one tells whose turn it is, whether its client names a session or not. Clients do not meet: the
marks of one API key are not those of another.

Two prompts may go on from one: the first one is the conversation's next turn, the other one begins a branch, which
inherits how long its pauses are. Conversations of large prompts are those of agents (`agents`).
"""

import dataclasses
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

from pdproxy.planning.agents import Agent, Agents
from pdproxy.planning.plan_types import NextTurn
from pdproxy.planning.prefix import Place
from pdproxy.planning.shares import LimitsByKey
from pdproxy.reasons import KeepReason
from pdproxy.request import KeepAsk
from pdproxy.settings.types import Keep

MOST_CONVERSATIONS = 1 << 14
"""The conversations that are remembered; the one whose turn came longest ago is forgotten first."""
MOST_MARKS = 8
"""The turns of a conversation at which branches are known to begin, the latest ones: an agent's sub-agents may begin
while it goes on itself."""
NEWEST_PAUSE = 0.5
"""The part of the latest pause in the usual one."""
NEWEST_TURN = 0.02
"""The part of the latest turn in what is usual for its API key."""
PAUSES, SPARE = 4.0, 5.0
"""A conversation is kept for so many of its usual pauses, and so many seconds besides."""
MOST_USUAL = 300.0
"""The most seconds for which one is kept without its client's word."""
FIRST_PAUSE = 60.0
"""Seconds for which a named session is kept after its first turn, when nothing is known of its pauses."""
FEW, SELDOM = 16, 0.25
"""After so many first turns of named sessions of a key, of which a smaller part than this came back, such are not kept
any more."""
MOST_FORGOTTEN = 1024
"""Ids that one request may tell a place to forget."""

MOST_PLACES = 4096
"""Places that may still have to be told to forget something; some of them may have left."""


@dataclasses.dataclass(slots=True, eq=False)
class Conversation:
    """One conversation, or one branch of it.

    Attributes:
        id: by which nodes keep it.
        tenant: the name of its API key.
        named: its client names a session.
        turns: how many of its prompts have come.
        running: of these, how many are still being answered.
        ended: when the node that computed its last prompt was done with it, and so began to keep it.
        pause: the usual time from then to its next prompt, the last times counting most; None before the first.
        kept: until when each place keeps it.
        tokens: that are kept.
        marks: at the ends of its latest prompts.
        agent: whose it is, once a prompt of it, or of the one that it branches off, was a large one.
    """

    id: str
    tenant: str
    named: bool
    turns: int = 0
    running: int = 0
    ended: float = -math.inf
    pause: float | None = None
    kept: dict[Place, float] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    marks: deque[int] = dataclasses.field(default_factory=deque)
    agent: Agent | None = None

    def kept_until(self) -> float:
        """The latest time until which any place keeps it; without end while it is being answered."""
        return max(self.kept.values(), default=-math.inf)


@dataclasses.dataclass(slots=True)
class _Returns:
    """How often conversations of one key came back.

    Attributes:
        begun, came_back: named sessions, and those that had a second turn; ``all_begun``, ``all_came_back`` of all.
        turns: after the first ones.
        pause, tokens: the usual pause before these, and the usual length of their prompts, the last ones counting most.
    """

    begun: int = 0
    came_back: int = 0
    all_begun: int = 0
    all_came_back: int = 0
    turns: int = 0
    pause: float = 0.0
    tokens: float = 0.0


class Conversations:
    """The conversations by the marks of their prompts.

    Args:
        keep: what is kept.
        new_id: must return unguessable ids, of 16 to 128 letters, digits, - and _.
        limits: of API keys.
        longest: the most seconds for which a client's word has a conversation kept.
    """

    def __init__(
        self,
        keep: Keep,
        new_id: Callable[[], str],
        limits: LimitsByKey,
        longest: float,
        most: int = MOST_CONVERSATIONS,
    ) -> None:
        self._keep = keep
        self._new_id = new_id
        self._limits = limits
        self._longest = longest
        self._most = most
        self._by_mark: dict[int, Conversation] = {}
        self._all: OrderedDict[str, Conversation] = OrderedDict()
        """By id; the one whose turn came longest ago is first."""
        self._kept: dict[str, dict[str, Conversation]] = {}
        """Those that are kept, by API key and id."""
        self._returns: dict[str, _Returns] = {}
        self._agents = Agents()
        self._large = math.inf
        """No place has a cache so small that a prompt of fewer tokens is a large one there."""
        self._forget: OrderedDict[Place, list[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._all.values())

    def turn(self, tenant: str, marks: Sequence[int], now: float, *, named: bool, tokens: int = 0) -> Conversation:
        """The conversation whose turn a prompt with these marks is, the last one at its end; a new one if it is none.

        ``named``: its client names a session; ``tokens``: in the prompt. `cached` and `answered` must be called for it.
        """
        salt, by_mark = hash(tenant), self._by_mark
        met = next((mark ^ salt for mark in reversed(marks) if mark ^ salt in by_mark), None)
        end, found = marks[-1] ^ salt, None if met is None else by_mark[met]
        if found is None:
            conversation = self._add(Conversation(self._new_id(), tenant, named), end)
        elif found.running or found.marks[-1] != met:
            branch = Conversation(self._new_id(), tenant, named, pause=found.pause, turns=1, agent=found.agent)
            conversation = self._add(branch, end)
        else:
            conversation = found
            self._came_back(found, end, tokens, now)
        conversation.turns += 1
        conversation.running += 1
        if conversation.turns == 1:
            returns = self._returns_of(tenant)
            returns.all_begun += 1
            returns.begun += named
        return conversation

    def next_turn(self, conversation: Conversation, tokens: int, now: float) -> NextTurn | None:
        """The turn after one whose prompt has so many tokens; None where none of its API key has come back yet."""
        returns = self._returns.get(conversation.tenant)
        if returns is None or not returns.all_came_back:
            return None
        likely = 1.0 if conversation.pause is not None else (returns.all_came_back + 1) / (returns.all_begun + 2)
        pause = max(returns.pause, conversation.pause or 0.0)
        kept_at = tuple(place for place, until in conversation.kept.items() if until > now)
        home = None if conversation.agent is None else conversation.agent.home
        others = self._agents.at(now) if conversation.turns == 1 and tokens > self._large else {}
        return NextTurn(PAUSES * pause, likely * max(tokens, returns.tokens), kept_at, home, others)

    def computes(self, conversation: Conversation, place: Place, tokens: int, large: float, now: float) -> None:
        """A prefill place computes its prompt of so many tokens, which is a large one there above ``large`` tokens."""
        self._large = min(self._large, large)
        if tokens <= large:
            return
        if conversation.agent is None:
            conversation.agent = Agent()
        self._agents.lives(conversation.agent, place, now, conversation.turns)

    def cached(self, conversation: Conversation, seconds: float, now: float) -> None:
        """The place that computes a turn's prompt is done with it; if it was asked, it keeps it for so many ``seconds``
        from now on."""
        conversation.ended = now
        for place in conversation.kept:
            conversation.kept[place] = now + seconds

    def turn_ended(self, conversation: Conversation) -> None:
        """The answer to a turn has ended."""
        conversation.running -= 1

    def seconds_to_keep(self, conversation: Conversation, ask: KeepAsk | None) -> tuple[float, KeepReason | None]:
        """For how long to keep a conversation after this turn, and why; 0 and None if it is not to be kept."""
        if ask is not None:
            return min(ask.seconds, self._longest), ask.reason if ask.seconds else None
        if self._keep is not Keep.AUTO:
            return 0.0, None
        if conversation.pause is not None:
            return min(PAUSES * conversation.pause + SPARE, MOST_USUAL), KeepReason.USUAL_PAUSE
        returns = self._returns.get(conversation.tenant)
        if conversation.named and returns and (returns.begun < FEW or returns.came_back >= SELDOM * returns.begun):
            return FIRST_PAUSE, KeepReason.SESSION
        return 0.0, None

    def fits(self, conversation: Conversation, tokens: int, now: float) -> bool:
        """Whether its API key may have so many tokens more kept."""
        most = self._limits.of_key(conversation.tenant).kept_tokens
        if most is None:
            return True
        kept = self._kept.get(conversation.tenant, {})
        for each in [each for each in kept.values() if each.kept_until() <= now]:
            del kept[each.id]
        return tokens + sum(each.tokens for each in kept.values() if each is not conversation) <= most

    def keep(self, conversation: Conversation, place: Place, tokens: int, now: float) -> int:
        """A place is asked to keep it; all other places are to forget it: how many these are."""
        others = [each for each in conversation.kept if each != place]
        forgotten = sum([self._let_go(conversation, each, now) for each in others])
        conversation.kept[place], conversation.tokens = math.inf, tokens
        self._kept.setdefault(conversation.tenant, {})[conversation.id] = conversation
        return forgotten

    def let_go(self, conversation: Conversation, now: float) -> int:
        """No place needs to keep it any more; how many kept it."""
        return sum([self._let_go(conversation, place, now) for place in list(conversation.kept)])

    def forget_node(self, name: str, now: float) -> int:
        """No place of this node is to keep any conversation any more; how many they kept."""
        kept = [(each, place) for each in self._all.values() for place in each.kept if place.node == name]
        return sum([self._let_go(each, place, now) for each, place in kept])

    def not_kept(self, conversation: Conversation, place: Place) -> None:
        """A place said that it keeps nothing of it."""
        conversation.kept.pop(place, None)

    def to_forget(self, place: Place) -> Sequence[str]:
        """Ids that a place is still to be told to forget, as many as one request may tell it.

        The caller tells it, or calls `forget_later`.
        """
        waiting = self._forget.pop(place, None)
        if waiting is None:
            return ()
        ids = [each for each in waiting if not self._is_kept(each, place)]
        if more := ids[MOST_FORGOTTEN:]:
            self._forget[place] = more
        return ids[:MOST_FORGOTTEN]

    def forget_later(self, place: Place, ids: Sequence[str]) -> None:
        """The place could not be told to forget these."""
        waiting = self._forget.setdefault(place, [])
        waiting += ids
        del waiting[: -self._most]  # of a place that is asked nothing the first ones have ended by themselves
        while len(self._forget) > MOST_PLACES:
            self._forget.popitem(last=False)

    def _is_kept(self, name: str, place: Place) -> bool:
        known = self._all.get(name)
        return known is not None and place in known.kept

    def _add(self, conversation: Conversation, end: int) -> Conversation:
        self._all[conversation.id] = conversation
        self._move(conversation, end)
        while len(self._all) > self._most:
            _, oldest = self._all.popitem(last=False)
            for mark in oldest.marks:
                self._drop_mark(oldest, mark)
            self._kept.get(oldest.tenant, {}).pop(oldest.id, None)
        return conversation

    def _returns_of(self, tenant: str) -> _Returns:
        return self._returns.setdefault(tenant, _Returns())

    def _came_back(self, conversation: Conversation, end: int, tokens: int, now: float) -> None:
        pause, returns = max(0.0, now - conversation.ended), self._returns_of(conversation.tenant)
        before = conversation.pause
        conversation.pause = pause if before is None else before + NEWEST_PAUSE * (pause - before)
        if conversation.turns == 1:
            returns.all_came_back += 1
            returns.came_back += conversation.named
        returns.turns += 1
        weight = max(NEWEST_TURN, 1.0 / returns.turns)
        returns.pause += weight * (pause - returns.pause)
        returns.tokens += weight * (tokens - returns.tokens)
        self._move(conversation, end)
        self._all.move_to_end(conversation.id)

    def _move(self, conversation: Conversation, end: int) -> None:
        """Its newest prompt ends at this mark. Some of those before are remembered, too: branches begin there."""
        marks = conversation.marks
        if end in marks:
            marks.remove(end)
        marks.append(end)
        self._by_mark[end] = conversation
        if len(marks) > MOST_MARKS:
            self._drop_mark(conversation, marks.popleft())

    def _drop_mark(self, conversation: Conversation, mark: int) -> None:
        if self._by_mark.get(mark) is conversation:
            del self._by_mark[mark]

    def _let_go(self, conversation: Conversation, place: Place, now: float) -> bool:
        """Whether it was still kept there."""
        kept = conversation.kept.pop(place) > now
        if kept:
            self.forget_later(place, (conversation.id,))
        return kept
