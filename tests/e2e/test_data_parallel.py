"""Two data-parallel ranks on each node: every rank has its own side channel, leases, releases and cache.

The model is dense, because vLLM runs the ranks of a dense model as separate engines. (Ranks of a mixture of experts
step together, which vLLM's CPU build cannot do.) It has only attention, so that these tests also cover plain attention
models.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from connector.vllm_version import release_of, running_version
from deploy.local.node import SERVED_NAME, NodeSpec, Role
from deploy.local.stack import ProxySpec, logs_of, start_nodes, start_proxy
from deploy.local.supervise import Supervisor
from pdproxy.clock import SystemClock
from pdproxy.events.sources import read_sources
from pdproxy.legs.calls import release
from pdproxy.nodes.node import Node as ProxyNode
from pdproxy.nodes.node import Role as ProxyRole
from pdproxy.nodes.preflight import Preflight
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.port import Timeouts
from tests.e2e.dense import Dense, make_dense, tokens
from tests.e2e.metrics_reader import watch
from tests.e2e.ranks import Rank, complete_ids, draw
from tests.events.feeds import Caches, subscribed
from tests.events.test_subscription import PATIENT

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines]

MEMORY_NODES = Path("/sys/devices/system/node")
RANKS = 2
BLOCK = 128
"""Tokens in a block of the CPU build."""
BLOCKS = 128
"""Blocks of each rank: four of the longest prompts."""


@dataclass(frozen=True)
class Ranks:
    """All ranks."""

    give: list[Rank]
    take: list[Rank]
    room: Supervisor


def spec(name: str, role: Role, model: Dense) -> NodeSpec:
    """A node with this model."""
    return NodeSpec(
        name,
        role,
        0,
        0,
        model=model.folder,
        gpu_blocks=BLOCKS,
        block_size=None,
        prefix_match_unit=None,
        data_parallel_size=RANKS,
        more_arguments=("--dtype", "float32"),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    return make_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def ranks(model: Dense) -> Iterator[Ranks]:
    """A prefill and a decode node of two data-parallel ranks each."""
    if release_of(running_version()) != "0.32.0" and len(list(MEMORY_NODES.glob("node*"))) < RANKS:
        pytest.skip("vLLM 0.33's CPU worker takes a memory node for each rank, and ends where there is none")
    specs = [spec("prefill", Role.PREFILL, model), spec("decode", Role.DECODE, model)]
    with Supervisor(logs_of("data_parallel")) as supervisor:
        nodes = start_nodes(supervisor, specs, print)
        give, take = ([Rank(node, rank) for rank in range(RANKS)] for node in nodes)
        yield Ranks(give, take, supervisor)


def test_a_rank_says_without_a_ticket_what_the_model_says(ranks: Ranks, model: Dense) -> None:
    alone = draw(model, 1)
    assert all(rank.answers(alone) == alone.answer for rank in ranks.take)


def test_each_rank_answers_for_its_own_blocks(ranks: Ranks, model: Dense) -> None:
    for seed, (give, take) in enumerate(itertools.product(ranks.give, ranks.take), 10):
        asked = draw(model, seed)
        verified, ended = take.watch("reads", outcome="verified"), give.watch("leases_ended", how="read")
        ticket = give.prefill(asked)
        assert ticket["remote_port"] == give.node.spec.side_channel_port + give.rank
        assert take.answers(asked, ticket) == asked.answer
        verified.reaches(1)
        ended.reaches(1)


def test_a_release_is_for_the_rank_that_it_is_sent_to(ranks: Ranks, model: Dense) -> None:
    asked, name, (first, second), take = draw(model, 20), secrets.token_hex(16), ranks.give, ranks.take[0]
    ticket = second.prefill(asked, pdproxy_hand_over=name)
    released, not_held = second.watch("leases_ended", how="released"), take.watch("reads", outcome="not_held")
    first.release(name)
    assert released.grown() == 0
    second.release(name)
    released.reaches(1)
    assert take.answers(asked, ticket) == asked.answer
    not_held.reaches(1)


async def test_each_rank_publishes_what_it_caches(ranks: Ranks, model: Dense) -> None:
    """Each rank publishes at a port of its own, and the proxy finds them all."""
    give = ranks.give
    url = give[0].node.url
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        answer = await client.get(f"{url}/kv_event_sources")
    sources = read_sources(answer.raise_for_status().content, url).usable
    assert [source.rank for source in sources] == list(range(RANKS))
    assert len({port for source in sources for port in (source.port, source.replay_port)}) == 2 * RANKS
    for rank, source in zip(give, sources, strict=True):
        asked = draw(model, 80 + rank.rank)
        rank.prefill(asked)
        caches = Caches()
        async with subscribed(caches, source, PATIENT):
            assert caches.count("kv_event_batches_total", outcome="junk") == 0
            assert caches.blocks() >= len(asked.prompt) // BLOCK


async def test_the_proxy_finds_the_ranks_and_releases_on_whichever_holds(ranks: Ranks, model: Dense) -> None:
    transport, url = H1Transport(SystemClock()), ranks.give[0].node.url
    facts = await Preflight(transport).inspect(ProxyNode("p", url, (ProxyRole.PREFILL,)))
    assert facts.ranks == RANKS
    for seed, rank in enumerate(ranks.give, 60):
        name, released = secrets.token_hex(16), rank.watch("leases_ended", how="released")
        rank.prefill(draw(model, seed), pdproxy_hand_over=name)
        await release(transport, facts.joined(), SERVED_NAME, name, Timeouts())
        released.reaches(1)
    await transport.aclose()


def test_through_the_proxy_answers_are_right_on_whichever_ranks_vllm_picks(ranks: Ranks, model: Dense) -> None:
    give, take = ranks.give[0].node, ranks.take[0].node
    spec = ProxySpec(more_environment={"PDPROXY_POLICY_ROUTING": "least-loaded"})  # `cache` picks the ranks itself
    url = start_proxy(ranks.room, spec, [give, take], print).url
    asked = [draw(model, seed) for seed in range(70, 74)]
    ended = [rank.watch("leases_ended", how="read") for rank in ranks.give]
    verified = watch(take.url, "reads", outcome="verified")
    for each in asked:
        assert complete_ids(url, each.prompt)["choices"][0]["token_ids"] == each.answer
    verified.reaches(len(asked))
    for one in ended:
        one.reaches(1)


def test_the_second_turn_pulls_only_what_is_new(ranks: Ranks, model: Dense) -> None:
    first, give, take = draw(model, 30), ranks.give[0], ranks.take[1]
    second = first.then(model, tokens(31, 200))
    assert take.answers(first, give.prefill(first)) == first.answer
    hit, pulled, computed = (take.watch("prompt_tokens", source=source) for source in ("hit", "pulled", "computed"))
    assert take.answers(second, give.prefill(second)) == second.answer
    cached = len(first.prompt) // BLOCK * BLOCK
    hit.reaches(cached)
    pulled.reaches(len(second.prompt) - cached)
    assert (hit.grown(), pulled.grown(), computed.grown()) == (cached, len(second.prompt) - cached, 0)


def test_the_ticket_of_another_prompt_is_refused_and_poisons_no_cache(ranks: Ranks, model: Dense) -> None:
    one, other, give, take = draw(model, 40), draw(model, 41), ranks.give[1], ranks.take[0]
    refused = take.watch("refused", reason="digest")
    assert take.answers(other, give.prefill(one)) == other.answer
    refused.reaches(1)
    assert take.answers(other, give.prefill(other)) == other.answer


def test_a_ticket_that_was_read_is_held_no_more_and_the_answer_is_right(ranks: Ranks, model: Dense) -> None:
    asked, give, (first, second) = draw(model, 50), ranks.give[0], ranks.take
    ticket, ended = give.prefill(asked), give.watch("leases_ended", how="read")
    assert first.answers(asked, ticket) == asked.answer
    ended.reaches(1)
    not_held = second.watch("reads", outcome="not_held")
    assert second.answers(asked, ticket) == asked.answer
    not_held.reaches(1)
