"""Conversations that nodes are asked to keep: what goes into the legs of a prompt for it, and what comes of it.

A keep is an order of eviction on the node that computed the prompt, which the connector there looks after: kept blocks
are the last ones that make room for others. The conversation is found by its prompts (`planning.conversations`); its
id names the keep, on whatever node.
"""

from collections.abc import Sequence

from pdproxy.clock import Clock
from pdproxy.nodes.node import Node, Role
from pdproxy.observe.keep_metrics import KeepMetrics
from pdproxy.observe.labels import KeepForget, KeepOutcome, KeepTurn
from pdproxy.orchestration.keep_facts import KeepFacts
from pdproxy.orchestration.prefix_source import PrefixSource
from pdproxy.planning.agents import large_tokens
from pdproxy.planning.conversations import Conversation, Conversations
from pdproxy.planning.plan_types import NextTurn
from pdproxy.planning.prefix import Place
from pdproxy.request import Json, KeepAsk, SubRequest


class Keeping:
    """Asks nodes to keep conversations. ``source`` as in `OrchestrationContext`; without one, only sessions that their
    clients name are known as conversations."""

    def __init__(
        self, conversations: Conversations, clock: Clock, metrics: KeepMetrics, source: PrefixSource | None
    ) -> None:
        self._conversations = conversations
        self._clock = clock
        self._metrics = metrics
        self._source = source

    def begin_turn(self, sub_request: SubRequest) -> "PromptKeep | None":
        """The turn of a prompt that has been looked up; None where nothing tells which conversation it belongs to."""
        request, marks = sub_request.request, self._marks(sub_request)
        if not marks:
            return None
        named = request.session is not None
        tokens, now = sub_request.shape.prompt_tokens, self._clock.now()
        conversation = self._conversations.turn(request.api_key, marks, now, named=named, tokens=tokens)
        return PromptKeep(conversation, request.keep, tokens, self._conversations, self._clock, self._metrics)

    def forget(self, node: str) -> int:
        """An operator's word: what this node keeps is forgotten. How many conversations that are.

        Each rank of it is told with the next prompt that it gets; plans count on nothing that it keeps from now on.
        """
        forgotten = self._conversations.forget_node(node, self._clock.now())
        self._metrics.forgotten(KeepForget.OPERATOR, forgotten)
        return forgotten

    def _marks(self, sub_request: SubRequest) -> Sequence[int]:
        if self._source is not None:
            return self._source.marks(sub_request)
        session = sub_request.request.session
        return () if session is None else (session,)


class PromptKeep:
    """One turn of a conversation. `end` it, on every exit.

    Attributes:
        facts: for the prompt's record.
    """

    def __init__(
        self,
        conversation: Conversation,
        ask: KeepAsk | None,
        tokens: int,
        conversations: Conversations,
        clock: Clock,
        metrics: KeepMetrics,
    ) -> None:
        self._ask, self._tokens = ask, tokens
        self._conversation, self._conversations = conversation, conversations
        self._clock, self._metrics = clock, metrics
        self._place: Place | None = None
        """The place that was asked, whose answer has not come."""
        self._kept_before = conversation.kept_until() > clock.now()
        self._seconds = 0.0
        """For which a place was asked to keep it."""
        self._forgets: tuple[Place, Sequence[str]] | None = None
        """A place that was told to forget these, whose answer has not come."""
        self._cached = self._ended = False
        self.facts = KeepFacts()

    def next_turn(self) -> NextTurn | None:
        """The turn that is expected after this one."""
        return self._conversations.next_turn(self._conversation, self._tokens, self._clock.now())

    def order(self, node: Node, rank: int | None) -> Json:
        """The fields of a leg's ``kv_transfer_params`` to the place that computes the prompt; most need none."""
        if rank is None and node.ranks > 1:
            return {}
        place, now = Place(node.name, rank or 0), self._clock.now()
        if Role.PREFILL in node.roles:  # a decode node that resumes by itself leaves the agent where it lives
            self._conversations.computes(self._conversation, place, self._tokens, large_tokens(node), now)
        if not node.keeps:
            return {}
        self._give_back()
        conversation, conversations = self._conversation, self._conversations
        fields: dict[str, object] = {}
        seconds, reason = conversations.seconds_to_keep(conversation, self._ask)
        why_not = KeepForget.NOT_ASKED if self._ask is None else KeepForget.CLIENT
        if reason is not None and not conversations.fits(conversation, self._tokens, now):
            self._told(KeepOutcome.KEY_LIMIT)
            seconds, reason, why_not = 0.0, None, KeepForget.KEY_LIMIT
        here = place in conversation.kept
        self._count_turn(here=here)
        if reason is not None:
            moved = conversations.keep(conversation, place, self._tokens, now)
            self._forgotten(KeepForget.MOVED, moved)
            self._metrics.asked(reason)
            self._place = place
            self.facts.asked, self.facts.seconds = reason, seconds
        elif conversation.kept:
            used = conversation.kept.get(place, 0.0) > now  # there it ends by this turn
            self._forgotten(why_not, conversations.let_go(conversation, now) - used)
        self._seconds = seconds
        if reason is not None or here:
            fields["pdproxy_keep"] = {"id": conversation.id, "seconds": round(seconds, 3)}
        ids = conversations.to_forget(place)
        if others := [each for each in ids if each != conversation.id]:
            fields["pdproxy_forget"] = others
        self._forgets = place, ids
        return fields

    def told(self, kept: object) -> None:
        """The node that computes the prompt has answered; ``kept``: its field `calls.KEPT`, None where it has none."""
        place, self._place, self._cached, self._forgets = self._place, None, True, None
        self._conversations.cached(self._conversation, self._seconds, self._clock.now())
        told = kept if isinstance(kept, dict) else {}
        tokens = _count(told.get("tokens"))
        hit = _count(told.get("hit"))
        self._metrics.add_tokens(hit=hit, kept=tokens)
        self.facts.hit += hit
        if place is None:
            return
        if not told:
            self._told(KeepOutcome.UNTOLD)
            return
        if tokens:
            self._conversation.tokens = self.facts.tokens = tokens
            self._told(KeepOutcome.KEPT)
            if place not in self._conversation.kept:  # an operator has had it forgotten since the leg was sent
                self._conversations.forget_later(place, (self._conversation.id,))
            return
        self._conversations.not_kept(self._conversation, place)
        why = told.get("why")
        self._told(KeepOutcome(why) if isinstance(why, str) and why in set(KeepOutcome) else KeepOutcome.UNTOLD)

    def end(self) -> None:
        """The answer has ended, or the prompt was given up. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._give_back()
        if not self._cached or self._place is not None:
            self.told(None)
        self._conversations.turn_ended(self._conversation)

    def _give_back(self) -> None:
        """Have a place told later what to forget, since it has not answered. To tell it twice does no harm."""
        forgets, self._forgets = self._forgets, None
        if forgets is not None:
            self._conversations.forget_later(*forgets)

    def _count_turn(self, *, here: bool) -> None:
        """Count the turn of a conversation that was kept, once."""
        turn = KeepTurn.LATE if here else None
        if self._kept_before:
            turn = KeepTurn.THERE if here else KeepTurn.MOVED
        self._kept_before = False
        if turn is not None:
            self._metrics.came_back(turn)
            self.facts.turn = turn

    def _told(self, outcome: KeepOutcome) -> None:
        self._metrics.told(outcome)
        self.facts.outcome = outcome

    def _forgotten(self, reason: KeepForget, places: int) -> None:
        self._metrics.forgotten(reason, places)
        if places:
            self.facts.forgotten = reason


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
