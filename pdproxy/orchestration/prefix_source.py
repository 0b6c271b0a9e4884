"""Where the planner asks what places have cached of a prompt, and what it tells in return."""

import dataclasses
from typing import Protocol

from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import Place, PromptHits
from pdproxy.request import SubRequest


@dataclasses.dataclass(frozen=True, slots=True)
class RealHit:
    """What the place that computed a prompt said about it, in tokens.

    Attributes:
        place: the prefill node's, or the decode node's where that computed alone.
        prompt: in the whole prompt; None where the answer did not say.
        cached: of these, the first ones that it did not have to compute.
    """

    place: Place
    prompt: int | None
    cached: int


class PrefixSource(Protocol):
    """Knows, or estimates, what places have cached of prompts. Without one, plans are made by load alone."""

    async def look_up(self, sub_request: SubRequest) -> PromptHits | None:
        """What is cached of a prompt, and where; None where nothing is known, or it is not worth its cost.

        Asked once for each sub-request, before its first plan; retries use the same answer. Never raises.
        """

    def routed(self, sub_request: SubRequest, plan: Plan) -> None:
        """The request goes there. Counts at once: the next look-up sees what these places will have cached."""

    def answered(self, sub_request: SubRequest, real: RealHit) -> None:
        """What the place really had, for a source that can learn from it."""
