"""One prompt's way under a policy that goes by what is cached: what its plan is told, and what is learned from it."""

import msgspec

from pdproxy.legs.calls import PrefillAnswer
from pdproxy.nodes.node import RANK_HEADER, Node, Role
from pdproxy.nodes.pool_entry import LegLoad
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.hand_over import HandOver
from pdproxy.orchestration.in_flight import predicted
from pdproxy.orchestration.prefix_source import RealHit
from pdproxy.orchestration.request_record import PromptRecord
from pdproxy.planning.plan_types import Decision, Plan, PlanInput
from pdproxy.planning.prefix import Place, PromptHits
from pdproxy.planning.rates import Work
from pdproxy.request import Endpoint, Headers, SubRequest
from pdproxy.usage import Usage

USUAL_BLOCK = 16
"""Tokens in a block of a node that does not tell: vLLM's default."""


class CacheRoute:
    """Asks the prefix source once, and tells it and the rates what came of it.

    Attributes:
        plan: the last one.
    """

    __slots__ = (
        "_asked", "_context", "_counted", "_decode_began", "_estimated", "_prefill_began", "_prefix", "_rates",
        "_record", "_sub_request", "plan",
    )  # fmt: skip

    def __init__(
        self, context: OrchestrationContext, sub_request: SubRequest, record: PromptRecord, estimated_tokens: int
    ) -> None:
        self._context = context
        self._rates = context.rates
        self._sub_request = sub_request
        self._record = record
        self._prefix: PromptHits | None = None
        self._asked = self._counted = False
        self._estimated = estimated_tokens
        self._prefill_began = self._decode_began = 0.0
        """In monotonic seconds: the last leg of each kind."""
        self.plan: Plan | None = None

    async def look_up(self) -> None:
        """Before the first plan; later calls do nothing."""
        source = self._context.prefix_source
        if source is not None and not self._asked:
            self._asked = True
            self._prefix = await source.look_up(self._sub_request)

    def informed(self, needs: PlanInput) -> PlanInput:
        """With what is known of the prompt and the nodes. vLLM heeds no rank of a leg for responses."""
        names_rank = self._sub_request.endpoint is not Endpoint.RESPONSES
        return msgspec.structs.replace(
            needs, prefix=self._prefix, tokens=self._estimated, rates=self._rates, names_rank=names_rank
        )

    def planned(self, plan: Plan) -> None:
        """The request goes there."""
        self.plan = plan
        if plan.decision is not None:
            self._record.decision = plan.decision
            self._context.metrics.planned(plan.decision.reason)
            self._context.in_flight.plans[plan.decision.reason] += 1
        if self._context.prefix_source is not None:
            self._context.prefix_source.routed(self._sub_request, plan)

    def load(self, node: Node) -> LegLoad:
        """What a leg of this request adds to a node: to the planned rank, and less where the prompt is cached."""
        plan, tokens = self.plan, self._tokens
        if plan is None or plan.decision is None:
            return LegLoad(None, tokens if node.role is Role.PREFILL else 0)
        computed = plan.decision.computed
        if node is plan.prefill:
            return LegLoad(plan.prefill_rank, computed)
        if node is plan.decode:
            return LegLoad(plan.decode_rank, computed if plan.prefill is None else 0)
        return LegLoad(None, tokens if node.role is Role.PREFILL else 0)

    def begin_leg(self, node: Node) -> Headers:
        """The headers of a leg that begins now: they name the planned rank."""
        now = self._context.clock.now()
        if node.role is Role.PREFILL:
            self._prefill_began = now
        else:
            self._decode_began = now
        rank = self._rank(node)
        headers = self._sub_request.headers
        return headers if rank is None else (*headers, (RANK_HEADER, str(rank)))

    def prefilled(self, node: Node, answer: PrefillAnswer) -> None:
        """A prefill leg ended well: how fast the node computes."""
        place = self._place(node)
        if place is not None:
            prompt = self._tokens if answer.prompt_tokens is None else answer.prompt_tokens
            cached = answer.cached_tokens
            if cached is None:
                cached = self._tokens - self._computed(node)
            tokens = max(0, prompt - cached)
            began, ended = self._prefill_began, self._context.clock.now()
            self._rates.computed(Work.PREFILL, place, tokens, began, ended, node.ranks)

    def first_event(self, node: Node, hand_over: HandOver | None) -> None:
        """The first event of a decode leg is here: how fast the planned node computes, or takes over."""
        plan, place, now = self.plan, self._place(node), self._context.clock.now()
        if plan is None or plan.decision is None or node is not plan.decode or place is None:
            return
        if not self._sub_request.shape.stream:
            return  # the whole answer came with it
        if hand_over is not None:
            lacking = max(0, self._tokens - plan.decision.decode.attention)
            self._rates.taken_over(place, lacking, hand_over.issued_at, now)
            if plan.decision.decode.resume:
                self._rates.passed_over(Work.LOCAL, node.name)
        elif plan.prefill is None:
            self._rates.computed(Work.LOCAL, place, plan.decision.computed, self._decode_began, now)

    def answered(self, node: Node, usage: Usage, hand_over: HandOver | None) -> None:
        """The nodes said what they had cached: once, for the prompt as the client sent it.

        ``hand_over``: the ticket that was used; None where ``node``, the decode node, computed.
        """
        computing, cached = (
            (node, usage.cached) if hand_over is None else (hand_over.node, hand_over.answer.cached_tokens)
        )
        place = self._place(computing)
        if self._counted or cached is None or place is None:
            return
        self._counted = True
        if (
            self.plan is not None
            and self.plan.decision is not None
            and computing in (self.plan.prefill, self.plan.decode)
        ):
            self._count_hit(computing, self.plan.decision, usage.prompt or 0, cached)
        if self._context.prefix_source is not None:
            self._context.prefix_source.answered(self._sub_request, RealHit(place, usage.prompt, cached))

    def _count_hit(self, node: Node, decision: Decision, prompt: int, cached: int) -> None:
        planned = decision.tokens - decision.computed
        outcome = predicted(planned, cached, node.block_size or USUAL_BLOCK)
        self._context.metrics.hit(node.role, planned, cached, outcome)
        self._context.in_flight.planned_hits[node.role].add(prompt, planned, cached, outcome)

    @property
    def _tokens(self) -> int:
        return self._estimated if self._prefix is None else self._prefix.tokens

    def _computed(self, node: Node) -> int:
        return self.load(node).queued

    def _rank(self, node: Node) -> int | None:
        if self.plan is None:
            return None
        if node is self.plan.prefill:
            return self.plan.prefill_rank
        return self.plan.decode_rank if node is self.plan.decode else None

    def _place(self, node: Node) -> Place | None:
        """Where a leg ran; None where vLLM chose among several ranks."""
        rank = self._rank(node)
        return None if rank is None and node.ranks > 1 else Place(node.name, rank or 0)
