"""Plans: what one is made for, what it says, and why there may be none. Values."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from pdproxy.errors import PdproxyError
from pdproxy.nodes.node import Node
from pdproxy.observe.labels import Affinity
from pdproxy.planning.prefix import NO_HIT, Hit, Place, PromptHits
from pdproxy.reasons import LocalReason, NoNodeReason, RouteReason


class NoNode(PdproxyError):
    """No plan can be made now; it may be possible later.

    Attributes:
        reason: the ``code`` of the client's error.
    """

    def __init__(self, reason: NoNodeReason, model: str) -> None:
        super().__init__(f"no node for {model!r}: {reason}")
        self.reason = reason
        self.model = model


class UnknownModel(PdproxyError):
    """No node, in whatever state, serves this model. ``known`` are the models that are served."""

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no node serves {model!r}")
        self.model = model
        self.known = known


class NextTurn(msgspec.Struct, frozen=True):
    """The prompt that is expected to go on from this one.

    Attributes:
        seconds: within which it comes, most probably.
        tokens: that it would lack if they were evicted meanwhile; fewer where it may not come.
        kept_at: the places that keep its conversation: there they are not evicted.
        home: where its agent lives (`agents`); None where this prompt begins one, or is none's.
        others: where it may begin an agent: how many live at each place, times how likely it is gone on with.
    """

    seconds: float
    tokens: float
    kept_at: tuple[Place, ...] = ()
    home: Place | None = None
    others: Mapping[Place, float] = MappingProxyType({})


class PlanInput(msgspec.Struct, frozen=True):
    """The facts of one request on which a plan depends.

    Attributes:
        model: as the client named it.
        local: why it cannot be disaggregated; None when it can.
        excluded: names of nodes that must not be used (they failed this request).
        partner: the prefill node whose ticket the decode node must be able to use; None for any.
        session: a hash of the key of its session, 64 bits; None where it names none.
        prefix: what places have cached of the prompt; None where nothing is known.
        tokens: about how long the prompt is, for when ``prefix`` does not say; 0 for unknown.
        next_turn: what is expected of the prompt's conversation; None where nothing is.
        names_rank: a leg can be sent to a rank of a node; False where vLLM heeds no rank.
    """

    model: str
    local: LocalReason | None = None
    excluded: frozenset[str] = frozenset()
    partner: Node | None = None
    session: int | None = None
    prefix: PromptHits | None = None
    tokens: int = 0
    names_rank: bool = True
    next_turn: NextTurn | None = None


class Plan(msgspec.Struct, frozen=True):
    """Where a request goes, and why.

    Attributes:
        prefill: None where the decode node computes everything; ``local`` says why.
        prefill_affinity, decode_affinity: whether the two are its session's own; None where the policy knows no
            sessions.
        prefill_rank, decode_rank: data-parallel ranks of the two; None leaves the choice to vLLM.
        reason: why the prompt is computed where it is, by a policy that goes by what is cached. From other policies all
            that follows is empty.
        tokens: in the prompt, as far as known.
        prefill_hit: what the prefill place has cached; None where the decode place computes.
        decode_hit: what the decode place has cached.
        computed: tokens of the prompt that the place which computes it has to compute.
        prefill_seconds: until the prefill place has computed the prompt, what waits there before it counted in; where
            the decode place computes, until that has.
        decode_seconds: until the decode place has taken the prompt over, and what its load adds; 0 where it computes.
    """

    prefill: Node | None
    decode: Node
    local: LocalReason | None = None
    prefill_affinity: Affinity | None = None
    decode_affinity: Affinity | None = None
    prefill_rank: int | None = None
    decode_rank: int | None = None
    reason: RouteReason | None = None
    tokens: int = 0
    prefill_hit: Hit | None = None
    decode_hit: Hit = NO_HIT
    computed: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def computing(self) -> Node:
        """The node that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    def rank(self, node: Node) -> int | None:
        """The rank that is named on one of its nodes; None on any other."""
        if node is self.prefill:
            return self.prefill_rank
        return self.decode_rank if node is self.decode else None

    def cached_share(self) -> str:
        """For the client: how many of the prompt's tokens were taken to be cached."""
        return f"cached={self.tokens - self.computed}/{self.tokens}"

    def facts(self) -> dict[str, str | int | float]:
        """For a log line and a span: flat, and by names that say what they are. Empty where there is no reason."""
        if self.reason is None:
            return {}
        computing = self.decode_hit if self.prefill_hit is None else self.prefill_hit
        return {
            "route_reason": self.reason.value,
            "planned_tokens": self.tokens,
            "planned_attention": computing.attention,
            "planned_resume": computing.resume,
            "planned_decode_attention": self.decode_hit.attention,
            "planned_computed": self.computed,
            # To tenths; with a number of digits `round` takes five times as long.
            "planned_prefill_ms": round(self.prefill_seconds * 10_000) / 10,
            "planned_decode_ms": round(self.decode_seconds * 10_000) / 10,
        }
