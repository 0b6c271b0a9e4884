"""Requests under the policy that goes by what is cached, on fake nodes that keep states as those of a hybrid model."""

import asyncio
import collections
import dataclasses
import json
from typing import Any

import pytest

from pdproxy.nodes.load import Load, PlaceLoad, Work
from pdproxy.nodes.node import NO_FOOTPRINT, Bars, Binding, Capacity, Role
from pdproxy.nodes.pool_entry import LegLoad
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.explain import explain
from pdproxy.orchestration.in_flight import predicted
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.orchestration.text_prefix_source import TextPrefixSource
from pdproxy.planning.cache_aware import ITL_BUDGET, CacheAware
from pdproxy.planning.prefix import PromptHits
from pdproxy.reasons import RouteReason
from pdproxy.request import Endpoint, SubRequest
from tests.fakes.fake_model import tokenize
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.prompt_cache import PromptCache
from tests.orchestration.cluster import FakeCluster, Got
from tests.orchestration.prompts import body_for

SYSTEM = " ".join(f"rule{number}" for number in range(300))


class SteadyLoad(Load):
    """Learns nothing, for on the cluster's clock nothing takes any time; what it would have learned is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Work, int]] = []
        self.avoided = 0

    def learn(self, work: Work, place: PlaceLoad, tokens: int, seconds: float) -> None:
        self.seen.append((work, tokens))

    def passed_over(self, work: Work, place: PlaceLoad) -> None:
        self.avoided += work is Work.LOCAL


class CachingCluster(FakeCluster):
    """Nodes with caches, and a proxy that plans by them. ``resumes``: decode nodes can go on by themselves."""

    def __init__(
        self,
        nodes: int = 3,
        *,
        resumes: bool = False,
        ranks: int = 1,
        itl_budget: float = ITL_BUDGET,
    ) -> None:
        config = OrchestrationConfig(routing_policy=CacheAware(itl_budget))
        super().__init__(nodes, nodes, config)
        for fake in self.nodes:
            fake.cache = PromptCache()
            fake.resumes = resumes and fake in self.decodes
            known = self.pool.view(fake.name).node
            unit = 8 if fake.resumes else 0
            self.pool.bring_up(dataclasses.replace(known, prefix_match_unit=unit, block_size=8, ranks=ranks))
        self.pool.load = self.steady = SteadyLoad()
        source = TextPrefixSource(self.pool, self.clock)
        self.context = dataclasses.replace(self.context, prefix_source=source)
        self.orchestrator = Orchestrator(self.context)

    async def say(self, *said: str, endpoint: Endpoint = Endpoint.CHAT, **more: object) -> Got:
        """A conversation's next turn: what was said by turns, after the system prompt."""
        roles = ["user", "assistant"] * len(said)
        messages = [{"role": "system", "content": SYSTEM}]
        messages += [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
        field = "input" if endpoint is Endpoint.RESPONSES else "messages"
        body: dict[str, Any] = {field: messages, "stream": True, "temperature": 0, **more}
        body |= {"max_output_tokens": 4} if endpoint is Endpoint.RESPONSES else {"max_tokens": 4}
        got = await self.ask(endpoint, body, name=f"r-{self.asked}")
        assert got.status == 200
        return got

    @property
    def asked(self) -> int:
        return sum(len(node.legs()) for node in self.nodes)

    def legs_on(self, role: Role = Role.PREFILL) -> dict[str, int]:
        nodes = self.prefills if role is Role.PREFILL else self.decodes
        return {node.name: len(node.legs()) for node in nodes if node.legs()}


def said(turn: int, conversation: int = 0) -> list[str]:
    """The conversation up to a turn; words of its own."""
    return [f"c{conversation}t{number} " * 40 for number in range(2 * turn + 1)]


async def test_the_turns_of_a_conversation_stay_without_any_session_key() -> None:
    cluster = CachingCluster()
    for turn in range(4):
        got = await cluster.say(*said(turn))
    assert list(cluster.legs_on().values()) == [4]
    assert got.headers["x-pdproxy-route"].startswith("disaggregated; reason=cached; cached=")
    assert cluster.count("pdproxy_plans_total", reason="cached") == 3
    planned = cluster.count("pdproxy_planned_hit_tokens_total", role="prefill")
    assert 0 < planned <= cluster.count("pdproxy_real_hit_tokens_total", role="prefill")
    shown = cluster.context.in_flight
    assert (shown.plans[RouteReason.CACHED], shown.plans[RouteReason.LOAD]) == (3, 0)
    assert (shown.planned_hits[Role.PREFILL].prompts, shown.planned_hits[Role.PREFILL].planned) == (4, planned)
    await cluster.settle()


@pytest.mark.parametrize(
    ("planned", "real", "outcome"),
    [(512, 512, "right"), (512, 256, "right"), (256, 512, "right"), (512, 255, "less"), (0, 257, "more")],
)
def test_a_plan_is_right_where_it_is_off_by_a_block_at_most(planned: int, real: int, outcome: str) -> None:
    assert predicted(planned, real, block_size=256) == outcome


async def test_a_plan_that_was_wrong_is_counted() -> None:
    cluster = CachingCluster(nodes=1)
    await cluster.say(*said(3))
    for node in cluster.prefills:
        node.cache = PromptCache()
    await cluster.say(*said(4))
    assert cluster.count("pdproxy_hit_predictions_total", role="prefill", outcome="less") == 1
    assert cluster.context.in_flight.planned_hits[Role.PREFILL].wrong == 1
    await cluster.settle()


async def test_a_shared_system_prompt_stays_on_one_node_while_that_is_idle() -> None:
    cluster = CachingCluster()
    for conversation in range(6):
        await cluster.say(*said(0, conversation))
    assert list(cluster.legs_on().values()) == [6]
    assert [cluster.count("pdproxy_plans_total", reason=reason) for reason in ("nothing_cached", "branch", "cached")] \
        == [1, 1, 4]  # fmt: skip


async def test_tokens_in_flight_are_given_back() -> None:
    cluster = CachingCluster()
    cluster.prefills[0].fault = InjectedFault(FaultKind.RESET, times=1)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, times=1)
    for turn in range(4):
        await cluster.say(*said(turn))
    await cluster.settle()
    for view in cluster.pool.state().nodes:
        (place,) = view.places
        assert (place.queued, place.prompts, place.keys, place.legs, view.footprint) == (0, 0, {}, 0, NO_FOOTPRINT)


async def test_tokens_are_queued_until_they_are_computed_and_held_until_the_answer_ends() -> None:
    cluster = CachingCluster(nodes=1, resumes=True)
    seen = []
    for turn in range(2):
        levels = set[tuple[str, int, bool]]()
        asking = asyncio.ensure_future(cluster.say(*said(turn)))
        while not asking.done():
            await asyncio.sleep(0)
            views = cluster.pool.state().nodes
            levels |= {(view.name, view.lightest.queued, view.footprint.tokens > 0) for view in views if view.active}
        seen.append(sorted(levels))
    (decoding, prefilling), (after, computing) = seen
    assert (decoding, prefilling[::2]) == (("d0", 0, True), ("p0", False))
    assert (after, computing[::2]) == (("d0", 0, True), ("d0", True)), "it resumes: no prefill node gets this turn"
    assert prefilling[1] > 300 > computing[1] > 0


class CountingSource(TextPrefixSource):
    """Counts the questions."""

    asked = 0

    async def look_up(self, sub_request: SubRequest) -> PromptHits | None:
        self.asked += 1
        return await super().look_up(sub_request)


async def test_a_prompt_is_looked_up_once_however_often_it_is_planned() -> None:
    cluster = CachingCluster()
    source = CountingSource(cluster.pool, cluster.clock)
    context = dataclasses.replace(cluster.context, prefix_source=source)
    cluster.orchestrator = Orchestrator(context)
    for node in (cluster.prefills[0], *cluster.decodes):
        node.fault = InjectedFault(FaultKind.RESET, at=2, times=1)
    await cluster.say(*said(0))
    assert cluster.asked > 3, "it moved to another node in mid-stream"
    assert source.asked == 1


async def test_what_others_had_a_node_compute_is_learned() -> None:
    cluster = CachingCluster()
    shared = tokenize(json.dumps([{"role": "system", "content": SYSTEM}]))[:-1]
    for node in cluster.prefills:
        assert node.cache is not None
        node.cache.compute(shared)
    await cluster.say(*said(0, 1))
    await cluster.say(*said(0, 2))
    assert [cluster.count("pdproxy_plans_total", reason=reason) for reason in ("branch", "cached")] == [0, 1]


async def test_what_runs_already_counts_at_once() -> None:
    cluster = CachingCluster()
    await cluster.say(*said(0))
    home = next(iter(cluster.legs_on()))
    with cluster.pool.acquire(home, LegLoad(0, queued=100_000)):
        await cluster.say(*said(1))
    assert len(cluster.legs_on()) == 2
    assert cluster.count("pdproxy_plans_total", reason="load") == 1


async def test_a_node_that_fails_is_not_asked_again_and_a_barred_pair_is_not_planned() -> None:
    cluster = CachingCluster()
    await cluster.say(*said(0))
    (home,), (decode,) = cluster.legs_on(), cluster.legs_on(Role.DECODE)
    next(node for node in cluster.prefills if node.name == home).fault = InjectedFault(FaultKind.RESET, times=1)
    await cluster.say(*said(1))
    assert len(cluster.legs_on()) == 2
    cluster.pool.bar(Bars({(home, decode): "", **{(node.name, decode): "" for node in cluster.prefills}}))
    await cluster.say(*said(2))
    assert len(cluster.legs_on(Role.DECODE)) >= 2
    await cluster.settle()


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES])
async def test_a_leg_names_its_rank_where_vllm_heeds_it(endpoint: Endpoint) -> None:
    cluster = CachingCluster(nodes=1, ranks=2)
    for turn in range(3):
        await cluster.say(*said(turn), endpoint=endpoint)
    for node in cluster.nodes:
        named = {dict(seen.headers).get("x-data-parallel-rank") for seen in node.legs()}
        assert named == ({None} if endpoint is Endpoint.RESPONSES else named - {None})
        assert len(named) == 1
    unknown = cluster.count("pdproxy_plans_total", reason="nothing_cached")
    assert unknown == (3 if endpoint is Endpoint.RESPONSES else 1), "nobody says which rank it was"
    await cluster.settle()


async def test_a_decode_node_that_resumes_serves_the_next_turn_alone() -> None:
    cluster = CachingCluster(nodes=2, resumes=True)
    routes = [(await cluster.say(*said(turn))).route for turn in range(3)]
    assert routes == ["disaggregated", "local", "local"]
    assert cluster.count("pdproxy_local_total", reason="cached") == 2
    assert len(cluster.legs_on(Role.DECODE)) == 1
    assert cluster.count("pdproxy_real_hit_tokens_total", role="decode") > 0
    assert {work for work, _ in cluster.steady.seen} == set(Work)
    await cluster.settle()


async def test_a_model_without_states_resumes_wherever_its_attention_does() -> None:
    cluster = CachingCluster()
    for fake in cluster.nodes:
        dense = Capacity(100_000, None, 10, Binding.ATTENTION)
        cluster.pool.bring_up(dataclasses.replace(cluster.pool.view(fake.name).node, capacity=dense))
    await cluster.say(*said(0))
    await cluster.say(*said(0, 1))
    assert cluster.count("pdproxy_plans_total", reason="resumes") == 1, "the second prompt, not the third"


async def test_a_node_that_evicted_is_believed() -> None:
    cluster = CachingCluster()
    for conversation in range(3):
        await cluster.say(*said(0, conversation))
    (home,) = cluster.legs_on()
    cache = next(node for node in cluster.prefills if node.name == home).cache
    assert cache is not None
    cache.clear()
    before = cluster.count("pdproxy_plans_total", reason="cached")
    await cluster.say(*said(0, 4))
    await cluster.say(*said(0, 5))
    made = cluster.count("pdproxy_plans_total", reason="cached") - before
    assert made == 1, "the second one does not expect what the first did not find"


async def test_rates_are_learned_from_the_tokens_that_were_computed() -> None:
    cluster = CachingCluster()
    await cluster.say(*said(0))
    await cluster.say(*said(1))
    works = collections.Counter(work for work, _ in cluster.steady.seen)
    assert works == {Work.PREFILL: 2, Work.HAND_OVER: 2}
    computed = [tokens for work, tokens in cluster.steady.seen if work is Work.PREFILL]
    assert computed[0] > 300 > computed[1]


async def test_the_first_event_of_a_stream_does_not_wait_for_what_is_learned_from_it() -> None:
    cluster = CachingCluster()
    reply = await cluster.orchestrator.answer(cluster.request(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True)))
    assert not isinstance(reply.body, bytes)
    assert await reply.body.read()
    assert {work for work, _ in cluster.steady.seen} == {Work.PREFILL}
    await asyncio.sleep(0)
    assert {work for work, _ in cluster.steady.seen} == {Work.PREFILL, Work.HAND_OVER}
    await reply.body.aclose()
    await cluster.settle()


async def test_the_time_of_a_whole_answer_tells_nothing_of_how_fast_a_decode_node_is() -> None:
    cluster = CachingCluster(nodes=2, resumes=True)
    for turn in range(3):
        await cluster.say(*said(turn), stream=False)
    assert cluster.count("pdproxy_local_total", reason="cached") == 2
    assert {work for work, _ in cluster.steady.seen} == {Work.PREFILL}
    assert not any(place.queued for view in cluster.pool.state().nodes for place in view.places)


@pytest.mark.parametrize(("resumes", "avoided"), [(True, 2), (False, 0)])
async def test_a_decode_node_that_could_have_resumed_and_did_not_is_noted(*, resumes: bool, avoided: int) -> None:
    cluster = CachingCluster(nodes=1, resumes=resumes, itl_budget=1e-9)
    for turn in range(3):
        await cluster.say(*said(turn))
    assert cluster.count("pdproxy_local_total", reason="cached") == 0
    assert cluster.steady.avoided == avoided


async def test_an_explanation_says_what_would_be_planned_and_counts_nothing() -> None:
    cluster = CachingCluster()
    for turn in range(2):
        await cluster.say(*said(turn))
    (home,) = cluster.legs_on()
    body = cluster.prefills[int(home[1:])].legs()[-1].body
    raw = json.dumps({"model": "tiny", "messages": body["messages"]}).encode()
    before = cluster.count("pdproxy_plans_total", reason="cached")
    shown: Any = await explain(cluster.context, Endpoint.CHAT, raw)
    assert shown["prefill"]["node"] == home
    assert shown["route_reason"] == "cached"
    assert [len(shown["candidates"][kind]) for kind in ("prefill", "decode", "decode_alone")] == [3, 3, 3]
    assert shown["candidates"]["prefill"][0]["node"] == home
    assert cluster.count("pdproxy_plans_total", reason="cached") == before
    assert cluster.asked == 4
