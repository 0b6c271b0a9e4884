"""What goes into a plan and what comes out of it: values."""

import dataclasses
import enum

from pdproxy.errors import PdproxyError
from pdproxy.nodes.node import Node


class Lack(enum.StrEnum):
    """Why no plan could be made."""

    NO_DECODE = "no_decode"
    """No decode node for the model takes requests now (down, draining, joining, refused, on trial)."""
    NO_PREFILL = "no_prefill"
    """No prefill node takes requests now, and the policy forbids to do without."""
    EXCLUDED = "excluded"
    """There are nodes that take requests, but all were excluded (tried already)."""
    NO_PAIR = "no_pair"
    """Prefill and decode nodes there are, but none of one cohort, and the policy forbids to do without prefill."""
    BARRED_PAIR = "barred_pair"
    """The same, of pairs that failed the known-answer test."""


class NoNode(PdproxyError):
    """No plan can be made now; it may be possible later."""

    def __init__(self, reason: Lack, model: str) -> None:
        super().__init__(f"no node for {model!r}: {reason}")
        self.reason = reason
        self.model = model


class UnknownModel(PdproxyError):
    """No node, in whatever state, serves this model.

    Attributes:
        model: what the client asked for.
        known: what it could have asked for.
    """

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no node serves {model!r}")
        self.model = model
        self.known = known


class Without(enum.StrEnum):
    """What to do when no prefill node can be had."""

    LOCAL = "local"
    """The decode node computes the prompt itself."""
    FAIL = "fail"


class Reason(enum.StrEnum):
    """Why the plan is what it is (or it is `Needs.local`)."""

    DISAGGREGATED = "disaggregated"
    SHORT_PROMPT = "short_prompt"
    NO_PREFILL = "no_prefill"
    NO_PAIR = "no_pair"
    BARRED_PAIR = "barred_pair"
    """There are pairs of one cohort, and all of them failed the known-answer test."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanPolicy:
    """The operator's choices.

    Attributes:
        without_prefill: when no prefill node can be had.
        local_below_tokens: prompts known to be shorter are computed on the decode node; 0 for none.
    """

    without_prefill: Without = Without.LOCAL
    local_below_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What a request asks of a plan.

    Attributes:
        model: as the client named it.
        local: why it cannot be disaggregated, in one of the words of an enumeration; None when it can.
        excluded: names of nodes that must not be used (they failed this request).
        decode: the decode node to keep if it still takes requests (affinity).
        cohort: the decode node must pair with it (a ticket is at hand); "" for any.
        prefill: the name of the prefill node whose ticket is at hand: the decode node may not be barred from it; "" for
            none.
        prompt_tokens: how long the prompt is, where known.
    """

    model: str
    local: enum.StrEnum | None = None
    excluded: frozenset[str] = frozenset()
    decode: str | None = None
    cohort: str = ""
    prefill: str = ""
    prompt_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Where a request goes. ``prefill`` is None when the decode node computes everything; ``reason`` says why."""

    prefill: Node | None
    decode: Node
    reason: enum.StrEnum
