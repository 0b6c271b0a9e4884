"""Exact knowledge goes before an estimate, node by node."""

from collections.abc import Sequence

from pdproxy.legs.shape import shape
from pdproxy.nodes.node import Node, Role
from pdproxy.orchestration.prefix_source import CombinedSource, RealHit
from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import Hit, HitSource, Place, PromptHits
from pdproxy.request import ClientRequest, Endpoint, HeldBody, SubRequest
from tests.planning.hits import hit_places

BODY = {"model": "tiny", "prompt": "a"}
ASKED = SubRequest(
    ClientRequest("r", Endpoint.COMPLETIONS, HeldBody(BODY), (), "tiny", False, 0, 0.0, 9.0, lambda: False),
    HeldBody(BODY),
    shape(Endpoint.COMPLETIONS, BODY),
    "r",
)
READ, UNREAD = Place("read"), Place("unread")
EXACT = PromptHits(100, HitSource.EVENTS, hit_places({READ: Hit(64, 32)}), {READ: 60.0})
ESTIMATE = PromptHits(90, HitSource.APPROXIMATION, hit_places({READ: Hit(80, 80), UNREAD: Hit(16, 0)}))


class Source:
    """Says always the same, and keeps what it is told."""

    def __init__(self, hits: PromptHits | None) -> None:
        self._hits, self.all_read, self.asked = hits, False, 0
        self.told: list[Plan | RealHit] = []

    async def look_up(self, sub_request: SubRequest) -> PromptHits | None:
        self.asked += 1
        return self._hits

    def routed(self, sub_request: SubRequest, plan: Plan) -> None:
        self.told.append(plan)

    def learn(self, sub_request: SubRequest, real: RealHit) -> None:
        self.told.append(real)

    def marks(self, sub_request: SubRequest) -> Sequence[int]:
        return (1, 2)

    def reads(self, node: str) -> bool:
        return node == READ.node

    def reads_all(self, sub_request: SubRequest) -> bool:
        return self.all_read


async def test_the_estimate_counts_for_nodes_of_which_nothing_is_known() -> None:
    found = await CombinedSource(Source(EXACT), Source(ESTIMATE)).look_up(ASKED)
    assert found is not None
    assert found.by_place() == {READ: Hit(64, 32), UNREAD: Hit(16, 0)}
    assert (found.tokens, found.source, found.stays) == (100, HitSource.EVENTS, {READ: 60.0})


async def test_where_all_nodes_are_known_nothing_is_estimated() -> None:
    exact, estimate = Source(EXACT), Source(ESTIMATE)
    exact.all_read = True
    assert await CombinedSource(exact, estimate).look_up(ASKED) is EXACT
    assert estimate.asked == 0


async def test_a_node_that_is_known_to_have_nothing_is_not_estimated_to_have_something() -> None:
    found = await CombinedSource(Source(PromptHits(100, HitSource.EVENTS, ())), Source(ESTIMATE)).look_up(ASKED)
    assert found is not None
    assert found.by_place() == {UNREAD: Hit(16, 0)}


async def test_one_alone_is_enough() -> None:
    assert await CombinedSource(Source(None), Source(ESTIMATE)).look_up(ASKED) == ESTIMATE
    assert await CombinedSource(Source(EXACT), Source(None)).look_up(ASKED) == EXACT
    assert await CombinedSource(Source(None), Source(None)).look_up(ASKED) is None


def test_both_hear_of_plans_and_the_estimate_of_what_came_of_them() -> None:
    exact, estimate = Source(EXACT), Source(ESTIMATE)
    both = CombinedSource(exact, estimate)
    assert both.marks(ASKED) == (1, 2)
    plan, real = Plan(None, Node("read", "http://r", (Role.DECODE,))), RealHit(READ, 100, 32)
    both.routed(ASKED, plan)
    both.learn(ASKED, real)
    assert (exact.told, estimate.told) == ([plan], [plan, real])
