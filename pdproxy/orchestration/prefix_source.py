"""Where the planner asks what places have cached of a prompt, and what it tells in return."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdproxy.nodes.node import PlaceSet
from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import HitSource, Place, PromptHits
from pdproxy.request import SubRequest


class RealHit(msgspec.Struct, frozen=True):
    """The tokens that the place which computed a prompt had cached, as it said.

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
        """The places that have some of a prompt cached; None where nothing is known, or asking costs too much.

        Asked once for each sub-request, before its first plan; retries use the same answer. Never raises.
        """

    def routed(self, sub_request: SubRequest, plan: Plan) -> None:
        """The request goes there. Counts at once: the next look-up sees what these places will have cached."""

    def learn(self, sub_request: SubRequest, real: RealHit) -> None:
        """Learn from what the place really had."""

    def marks(self, sub_request: SubRequest) -> Sequence[int]:
        """Hashes of the beginnings of a prompt that was looked up, the whole prompt last: of a prompt that goes on from
        it, this is one of them."""


class ExactSource(Protocol):
    """Knows what some nodes have cached, from their own KV events."""

    async def look_up(self, sub_request: SubRequest) -> PromptHits | None:
        """As `PrefixSource`."""

    def routed(self, sub_request: SubRequest, plan: Plan) -> None:
        """As `PrefixSource`."""

    def reads(self, node: str) -> bool:
        """Whether anything is known of this node."""

    def reads_all(self, sub_request: SubRequest) -> bool:
        """Whether it `reads` every node that may get this prompt, which was looked up."""


class CombinedSource:
    """A `PrefixSource` that takes what is known exactly, and an estimate for all other nodes and prompts."""

    def __init__(self, exact: ExactSource, estimate: PrefixSource) -> None:
        self._exact = exact
        self._estimate = estimate

    async def look_up(self, sub_request: SubRequest) -> PromptHits | None:
        """As `PrefixSource`. The hits are `HitSource.EVENTS` where any node's are exact."""
        exact = await self._exact.look_up(sub_request)
        if exact is not None and self._exact.reads_all(sub_request):
            return exact
        estimate = await self._estimate.look_up(sub_request)
        if exact is None or estimate is None:
            return exact or estimate
        others = [(hit, PlaceSet(self._unread(places))) for hit, places in estimate.hits]
        return PromptHits(exact.tokens, HitSource.EVENTS, (*exact.hits, *others), exact.stays)

    def _unread(self, places: PlaceSet) -> list[tuple[str, int]]:
        return [place for place in places.places if not self._exact.reads(place[0])]

    def routed(self, sub_request: SubRequest, plan: Plan) -> None:
        """As `PrefixSource`."""
        self._exact.routed(sub_request, plan)
        self._estimate.routed(sub_request, plan)

    def learn(self, sub_request: SubRequest, real: RealHit) -> None:
        """As `PrefixSource`: what is exact learns from events alone."""
        self._estimate.learn(sub_request, real)

    def marks(self, sub_request: SubRequest) -> Sequence[int]:
        """As `PrefixSource`."""
        return self._estimate.marks(sub_request)
