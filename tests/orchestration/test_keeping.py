"""Conversations that nodes are asked to keep: who is asked, what comes of it, and who is told to forget."""

import dataclasses
import itertools
import logging
from typing import Any

import msgspec
import pytest

from pdproxy.nodes.node import Binding, Capacity, Role
from pdproxy.orchestration.keeping import Keeping, PromptKeep
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.orchestration.text_prefix_source import TextPrefixSource
from pdproxy.planning.cache_aware import CacheAware
from pdproxy.planning.conversations import PAUSES, Conversations
from pdproxy.planning.plan import Candidates
from pdproxy.planning.plan_types import Plan, PlanInput
from pdproxy.planning.prefix import Place
from pdproxy.planning.shares import KeyLimits, LimitsByKey
from pdproxy.reasons import KeepReason
from pdproxy.request import Endpoint, KeepAsk
from pdproxy.settings.types import Keep
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.cluster import FakeCluster, Got, read
from tests.orchestration.prompts import body_for

HALF_AN_HOUR = KeepAsk(1800.0, KeepReason.PROMPT_CACHE_OPTIONS)


class KeepingCluster(FakeCluster):
    """Nodes that keep conversations; the key ``small`` may have 100 tokens kept."""

    def __init__(self, keep: Keep = Keep.AUTO, *, by_text: bool = True, ranks: int = 1) -> None:
        super().__init__()
        for node in self.nodes:
            node.kept = {}
            self.amend(node.name, keeps=True, ranks=ranks)
        source = TextPrefixSource(self.pool, self.clock) if by_text else None
        numbers, limits = itertools.count(), LimitsByKey({"small": KeyLimits(kept_tokens=100)})
        self.book = book = Conversations(keep, lambda: f"conversation-{next(numbers)}", limits, 3600.0)
        self.keeping = keeping = Keeping(book, self.clock, self.context.metrics.keeps, source)
        self.context = dataclasses.replace(self.context, prefix_source=source, keeping=keeping)
        self.orchestrator = Orchestrator(self.context)

    async def say(self, turn: int, *, after: float = 0.0, stream: bool = True, whose: str = "c", **more: Any) -> Got:
        """The next turn of a conversation, so many seconds after the one before."""
        self.clock.advance(after)
        roles = itertools.cycle(("user", "assistant"))
        messages = [
            {"role": role, "content": f"{whose}{number} " * 40}
            for number, role in zip(range(2 * turn + 1), roles, strict=False)
        ]
        request = self.request(Endpoint.CHAT, {"messages": messages, "stream": stream, "max_tokens": 4})
        reply = await self.orchestrator.answer(msgspec.structs.replace(request, **more))
        return Got(reply.status, dict(reply.headers), await read(reply))

    def orders(self, role: Role = Role.PREFILL) -> list[tuple[str, dict[str, Any]]]:
        """Orders about keeps to nodes of a role, in order of time."""
        nodes = self.prefills if role is Role.PREFILL else self.decodes
        legs = [(node.name, seen.body.get("kv_transfer_params") or {}) for node in nodes for seen in node.legs()]
        return [
            (name, {field: params[field] for field in ("pdproxy_keep", "pdproxy_forget") if field in params})
            for name, params in legs
        ]


def kept(cluster: KeepingCluster) -> dict[str, int]:
    return {name: tokens for node in cluster.nodes for name, tokens in (node.kept or {}).items()}


async def test_a_conversation_that_comes_back_is_kept_for_its_next_turn() -> None:
    cluster = KeepingCluster()
    await cluster.say(0)
    assert kept(cluster) == {}
    await cluster.say(1, after=4)
    (_, first), (_, second) = cluster.orders()
    assert (first, second) == ({}, {"pdproxy_keep": {"id": "conversation-0", "seconds": 21.0}})
    await cluster.say(2, after=4)
    assert list(kept(cluster)) == ["conversation-0"]
    assert cluster.count("pdproxy_keeps_asked_total", reason="usual_pause") == 2
    assert cluster.count("pdproxy_keeps_total", outcome="kept") == 2
    assert cluster.count("pdproxy_keep_turns_total", outcome="there") == 1
    assert cluster.count("pdproxy_keep_tokens_total", kind="hit") > 0
    assert cluster.orders(Role.DECODE) == [(name, {}) for name, _ in cluster.orders(Role.DECODE)]
    await cluster.settle()


async def test_no_conversation_is_looked_for_until_a_node_can_keep_one() -> None:
    cluster = KeepingCluster()
    for node in cluster.nodes:
        cluster.amend(node.name, keeps=False)
    await cluster.say(0, session=7)
    assert len(cluster.book) == 0
    cluster.amend("p0", keeps=True)
    await cluster.say(1, after=4, session=7)
    assert len(cluster.book) == 1
    await cluster.settle()


async def test_a_clients_word_is_enough() -> None:
    cluster = KeepingCluster(Keep.ASKED)
    await cluster.say(0, keep=HALF_AN_HOUR)
    await cluster.say(1, after=4)
    (_, first), (_, second) = cluster.orders()
    assert first["pdproxy_keep"]["seconds"] == 1800.0
    assert second["pdproxy_keep"] == {"id": first["pdproxy_keep"]["id"], "seconds": 0.0}, "its use ends it"
    assert kept(cluster) == {}
    await cluster.settle()


async def test_explicitly_nothing_ends_what_was_kept() -> None:
    cluster = KeepingCluster()
    await cluster.say(0, keep=HALF_AN_HOUR)
    (tokens,) = kept(cluster).values()
    await cluster.say(1, after=4, keep=KeepAsk(0.0, KeepReason.PROMPT_CACHE_OPTIONS))
    assert kept(cluster) == {}
    assert cluster.count("pdproxy_keep_tokens_total", kind="hit") == tokens, "its last turn found it"
    await cluster.settle()


async def test_a_named_session_is_kept_from_the_first_turn_on() -> None:
    cluster = KeepingCluster()
    await cluster.say(0, session=7)
    assert len(kept(cluster)) == 1
    assert cluster.count("pdproxy_keeps_asked_total", reason="session") == 1


async def test_without_the_texts_of_prompts_the_session_is_the_conversation() -> None:
    cluster = KeepingCluster(by_text=False)
    await cluster.say(0, session=7)
    await cluster.say(0, whose="d", after=2, session=7)
    await cluster.say(0, whose="e", after=2)
    ids = {params["pdproxy_keep"]["id"] for _, params in cluster.orders() if params}
    assert len(ids) == 1
    assert len([params for _, params in cluster.orders() if params]) == 2


async def test_a_conversation_that_moves_is_forgotten_where_it_was() -> None:
    cluster = KeepingCluster()
    await cluster.say(0, keep=HALF_AN_HOUR)
    (first,) = [node for node in cluster.prefills if node.kept]
    other = next(node for node in cluster.prefills if node is not first)
    first.fault = InjectedFault(FaultKind.STATUS, status=503)
    await cluster.say(1, after=4, keep=HALF_AN_HOUR)
    assert list(other.kept or {}) == ["conversation-0"]
    assert cluster.count("pdproxy_keep_turns_total", outcome="there") == 1, "where its turn was planned"
    first.fault, other.fault = None, InjectedFault(FaultKind.STATUS, status=503)
    await cluster.say(0, whose="d")
    assert first.kept == {}, "told with the next prompt that went there"
    await cluster.settle()


async def test_a_node_that_knows_nothing_of_keeps_is_not_asked() -> None:
    cluster = KeepingCluster()
    for node in cluster.prefills:
        cluster.amend(node.name, keeps=False)
    await cluster.say(0, keep=HALF_AN_HOUR)
    assert [params for _, params in cluster.orders() if params] == []


async def test_nothing_is_kept_where_the_rank_is_left_to_the_node() -> None:
    cluster = KeepingCluster(ranks=2)
    await cluster.ask(Endpoint.RESPONSES, body_for(Endpoint.RESPONSES, stream=False, user="u"))
    await cluster.ask(Endpoint.RESPONSES, body_for(Endpoint.RESPONSES, stream=False, user="u"))
    assert [params for _, params in cluster.orders() if params] == []


async def test_a_key_that_has_enough_kept_has_no_more() -> None:
    cluster = KeepingCluster()
    await cluster.say(2, keep=HALF_AN_HOUR, api_key="small")
    assert kept(cluster) == {}
    assert cluster.count("pdproxy_keeps_total", outcome="key_limit") == 1
    await cluster.say(0, whose="d", keep=HALF_AN_HOUR, api_key="small")
    assert len(kept(cluster)) == 1


async def test_what_a_node_does_not_keep_is_counted_by_its_reason() -> None:
    cluster = KeepingCluster()
    for node in cluster.prefills:
        node.keeps_nothing = "too_large"
    await cluster.say(0, keep=HALF_AN_HOUR)
    assert cluster.count("pdproxy_keeps_total", outcome="too_large") == 1
    for node in cluster.prefills:
        node.keeps_nothing = "word_of_a_later_release"
    await cluster.say(1, keep=HALF_AN_HOUR)
    assert cluster.count("pdproxy_keeps_total", outcome="untold") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_node_that_computes_alone_is_asked_and_the_client_sees_nothing_of_it(stream: bool) -> None:
    cluster = KeepingCluster()
    for node in cluster.prefills:
        cluster.pool.remove(node.name)
    got = await cluster.say(0, stream=stream, keep=HALF_AN_HOUR)
    assert got.route == "local"
    assert len(kept(cluster)) == 1
    assert b"pdproxy_kept" not in got.body
    assert cluster.count("pdproxy_keeps_total", outcome="untold" if stream else "kept") == 1
    await cluster.settle()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_to_a_hand_over_shows_nothing_of_it(stream: bool) -> None:
    cluster = KeepingCluster()
    got = await cluster.say(0, stream=stream, keep=HALF_AN_HOUR)
    assert (got.route, b"pdproxy_kept" in got.body, len(kept(cluster))) == ("disaggregated", False, 1)
    legs = [seen.body["kv_transfer_params"] for node in cluster.decodes for seen in node.legs()]
    assert all("pdproxy_kept" not in params for params in legs)


async def test_a_conversation_that_is_not_to_be_kept_any_more_is_forgotten_where_it_was() -> None:
    """Its last turn goes elsewhere, and asks for nothing to be kept."""
    cluster = KeepingCluster(Keep.ASKED)
    await cluster.say(0, keep=HALF_AN_HOUR)
    (first,) = [node for node in cluster.prefills if node.kept]
    first.fault = InjectedFault(FaultKind.REFUSE)
    await cluster.say(1, after=4)
    assert list(first.kept or {}) == ["conversation-0"], "it could not be told yet"
    first.fault = None
    other = next(node for node in cluster.prefills if node is not first)
    other.fault = InjectedFault(FaultKind.REFUSE)
    await cluster.say(0, whose="d")
    assert kept(cluster) == {}


async def test_an_operator_has_a_node_forget_what_it_keeps() -> None:
    cluster = KeepingCluster()
    await cluster.say(0, keep=HALF_AN_HOUR)
    (node,) = [node for node in cluster.prefills if node.kept]
    assert cluster.keeping.forget(node.name) == 1
    assert cluster.keeping.forget(node.name) == 0
    assert cluster.count("pdproxy_keeps_forgotten_total", reason="operator") == 1
    other = next(each for each in cluster.prefills if each is not node)
    assert cluster.keeping.forget(other.name) == 0
    other.fault = InjectedFault(FaultKind.REFUSE)
    await cluster.say(0, whose="d")
    assert node.kept == {}, "told with the next prompt that went there"
    await cluster.say(1, after=4, keep=HALF_AN_HOUR)
    assert list(node.kept) == ["conversation-0"], "its next turn asks again"
    await cluster.settle()


async def test_what_is_forgotten_while_its_turn_runs_is_told_with_the_next_prompt() -> None:
    cluster = KeepingCluster()
    conversation = cluster.book.turn("", [1], cluster.clock.now(), named=False, tokens=80)
    turn = PromptKeep(conversation, HALF_AN_HOUR, 80, cluster.book, cluster.clock, cluster.context.metrics.keeps)
    node = cluster.pool.view("p0").node
    turn.order(node, None)
    cluster.keeping.forget("p0")
    assert cluster.book.to_forget(Place("p0")) == ["conversation-0"]
    turn.told({"hit": 0, "tokens": 80, "blocks": 10, "why": ""})
    turn.end()
    assert cluster.book.to_forget(Place("p0")) == ["conversation-0"], "it began to keep it after it was told"


async def test_what_places_are_to_forget_is_counted_by_its_reason() -> None:
    cluster = KeepingCluster()
    await cluster.say(0, keep=HALF_AN_HOUR)
    (first,) = [node for node in cluster.prefills if node.kept]
    first.fault = InjectedFault(FaultKind.REFUSE)
    await cluster.say(1, after=4, keep=HALF_AN_HOUR)
    assert cluster.count("pdproxy_keeps_forgotten_total", reason="moved") == 1
    cluster.pool.remove(first.name)
    await cluster.say(2, after=4, keep=KeepAsk(0.0, KeepReason.PROMPT_CACHE_OPTIONS))
    assert cluster.count("pdproxy_keeps_forgotten_total", reason="client") == 0, "its own turn ended it where it was"


async def test_a_requests_log_line_tells_of_keeps_where_there_are_any(caplog: pytest.LogCaptureFixture) -> None:
    cluster = KeepingCluster()
    with caplog.at_level(logging.INFO, "pdproxy.orchestration.access_log"):
        for turn in range(3):
            await cluster.say(turn, after=4)
    lines = [vars(each) for each in caplog.records if each.name == "pdproxy.orchestration.access_log"]
    first, second, third = ({key: line[key] for key in line if key.startswith("keep_")} for line in lines)
    assert first == {}
    assert second == {
        "keep_asked": "usual_pause", "keep_seconds": 21.0, "keep_outcome": "kept", "keep_tokens": second["keep_tokens"],
    }  # fmt: skip
    assert third["keep_turn"] == "there"
    assert third["keep_hit"] == second["keep_tokens"]


def plans_of(cluster: KeepingCluster) -> list[PlanInput]:
    """The inputs of its plans from now on."""
    inputs = list[PlanInput]()

    class Seen(CacheAware):
        def pair(self, candidates: Candidates, turn: int) -> Plan | None:
            inputs.append(candidates.needs)
            return CacheAware().pair(candidates, turn)

    policy = cluster.context.plan_policy
    object.__setattr__(cluster.context, "plan_policy", dataclasses.replace(policy, routing=Seen()))
    return inputs


async def test_the_plan_knows_when_the_next_turn_is_expected() -> None:
    """Nothing is known of how long blocks stay: that is looked at in the plan's input."""
    cluster = KeepingCluster()
    inputs = plans_of(cluster)
    await cluster.say(0)
    await cluster.say(1, after=4)
    first, second = (each.next_turn for each in inputs)
    assert first is None
    assert second is not None
    assert second.seconds == PAUSES * 4.0


async def test_the_plan_knows_where_agents_live() -> None:
    cluster = KeepingCluster()
    for node in cluster.nodes:
        cluster.amend(node.name, capacity=Capacity(1000, None, 10, Binding.ATTENTION))
    await cluster.say(0)
    inputs = plans_of(cluster)
    await cluster.say(1, after=4)
    await cluster.say(0, whose="other")
    later, beginning = (each.next_turn for each in inputs)
    assert later is not None
    assert beginning is not None
    assert later.home is not None
    assert Role.PREFILL in cluster.pool.view(later.home.node).node.roles
    assert (dict(later.others), beginning.home) == ({}, None)
    assert list(beginning.others.values()) == [2 / 3], "one agent, times how likely another one goes on as well"
