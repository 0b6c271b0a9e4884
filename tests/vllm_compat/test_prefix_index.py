"""The prefix index says of every prompt what vLLM finds in its cache: its real scheduler, and its real events."""

import dataclasses
import os
import random
from collections.abc import Iterator, Sequence

import pytest

from pdproxy.nodes.node import Binding, Capacity, Node, Role
from pdproxy.planning.block_hashes import PromptExtras, PromptHasher
from pdproxy.planning.cost import covered_tokens
from pdproxy.planning.prefix import Hit, Place
from pdproxy.planning.prefix_index import PrefixIndex
from tests.connector.harness import BLOCK, ONE_BEHIND, at_pace, make_node, take_ticket
from tests.planning.hits import by_place
from tests.vllm_compat.publishing_node import MODELS, Engine

TURNS = int(os.environ.get("FUZZED", "30"))
NOTHING = Hit(0, 0)


def hit_of(index: PrefixIndex, place: Place, hashes: Sequence[int], prompt: Sequence[int]) -> Hit:
    """The hit that the index tells of one place."""
    return by_place(index.hits(hashes, len(prompt), 0.0), index.numbers).get(place, NOTHING)


def check(engine: Engine, hasher: PromptHasher) -> Iterator[Hit]:
    """The hits of prompts that vLLM and the index were asked for, and agreed on."""
    for salt, prompt in engine.prompts():
        hashes = hasher.hashes(prompt, PromptExtras(salt=salt))
        assert hashes is not None
        found = hit_of(engine.events.index, engine.place, hashes, prompt)
        assert found == engine.finds(salt, prompt), (salt, prompt)
        yield found


@pytest.mark.parametrize("name", MODELS)
def test_it_says_what_vllm_finds(name: str) -> None:
    model = MODELS[name]
    engine, hasher = Engine(model, PrefixIndex(model.scheme), seed=3), PromptHasher(model.scheme)
    hits: list[Hit] = []
    for _ in range(TURNS):
        engine.live()
        hits += check(engine, hasher)
    assert sum(hit.resume > 0 for hit in hits) > TURNS // 10
    assert len(model.groups) == 1 or sum(hit.resume < hit.attention for hit in hits) > TURNS // 10
    assert engine.events.seen["BlockRemoved"] > TURNS // 10, "nothing was evicted"
    assert engine.events.seen["AllBlocksCleared"]


def test_two_engines_with_other_groups_in_one_index() -> None:
    """With vLLM's asynchronous scheduler, which plans a step before the events of the one before are out."""
    scheme = dataclasses.replace(MODELS["hybrid"].scheme, states=None)
    index, hasher = PrefixIndex(scheme), PromptHasher(scheme)
    with at_pace(ONE_BEHIND):
        engines = [Engine(MODELS[name], index, seed) for seed, name in enumerate(("hybrid, many groups", "hybrid"))]
    for _ in range(TURNS):
        for engine in engines:
            engine.live()
            list(check(engine, hasher))
    for engine in engines:
        index.drop_place(engine.place)
    assert not len(index)


@pytest.mark.parametrize("name", ["hybrid", "hybrid, unit", "attention"])
def test_a_decode_node_that_reads_what_others_computed(name: str) -> None:
    """A node publishes no event of its state groups unless hand-overs end at a boundary of `--prefix-match-unit`."""
    model = MODELS[name]
    unit = model.unit if model.unit != BLOCK else None
    prefill = make_node(groups=model.groups, unit=unit, num_blocks=4000)
    decode, hasher = Engine(model, PrefixIndex(model.scheme), 5, "kv_consumer"), PromptHasher(model.scheme)
    hits: list[Hit] = []
    for turn in range(TURNS):
        _, prompt = decode.next_prompt()
        decode.pull(prompt, take_ticket(prefill, prompt, f"p-{turn}"))
        hits += check(decode, hasher)
    assert sum(hit.attention > 0 for hit in hits) > TURNS


@pytest.mark.parametrize("name", ["hybrid", "hybrid, EAGLE", "hybrid, unit, many groups"])
def test_after_a_gap_it_never_says_more_than_there_is(name: str) -> None:
    """Blocks that were cached before count when they are published again; their removal takes nothing else along."""
    model = MODELS[name]
    engine, hasher, hits = Engine(model, PrefixIndex(model.scheme), seed=8), PromptHasher(model.scheme), 0
    for turn in range(TURNS):
        if turn % 10 == 9:
            engine.events.index.drop_place(engine.place)
        engine.live()
        for salt, prompt in engine.prompts():
            hashes = hasher.hashes(prompt, PromptExtras(salt=salt)) or ()
            hit = hit_of(engine.events.index, engine.place, hashes, prompt)
            assert hit.resume <= engine.finds(salt, prompt).resume
            assert hit.attention <= engine.attention(salt, prompt)
            hits += hit.resume > 0
    assert hits > TURNS // 10
    assert engine.events.seen["BlockRemoved"] > TURNS // 10, "nothing was evicted"


@pytest.mark.parametrize("name", ["attention", "hybrid", "hybrid, EAGLE", "hybrid, unit", "hybrid, unit, EAGLE"])
def test_what_is_expected_of_a_prompt_is_what_comes(name: str) -> None:
    model, rng = MODELS[name], random.Random(4)
    engine, hasher = Engine(model, PrefixIndex(model.scheme), seed=1), PromptHasher(model.scheme)
    for tokens in [1, BLOCK, 4 * BLOCK, 4 * BLOCK + 1, *(rng.randrange(1, 130) for _ in range(TURNS // 2))]:
        prompt = engine.text(tokens)
        engine.run(prompt)
        expecting = PrefixIndex(model.scheme)
        expecting.expect(engine.place, hasher.hashes(prompt) or (), expecting.after_prefill(tokens), until=1.0)
        for later in (prompt, [*prompt, 1], [*prompt, *engine.text(40)]):
            found = hit_of(expecting, engine.place, hasher.hashes(later) or (), later)
            assert found == engine.finds(None, later), (tokens, len(later))


@pytest.mark.parametrize("name", ["attention", "hybrid, unit"])
@pytest.mark.parametrize("tokens", [65, 66, 68, 69])
def test_what_a_prefill_leg_leaves_for_a_longer_prompt_is_where_the_leg_ended(name: str, tokens: int) -> None:
    """A leg of a hybrid model computes 68 of 69 tokens in units of 4, and keeps the state after 64."""
    model = MODELS[name]
    states = 1 if len(model.groups) > 1 else None
    unit = model.unit if states else 0
    capacity = Capacity(1000, states, 1, Binding.ATTENTION)
    leg = covered_tokens(Node("p", "http://p", (Role.PREFILL,), prefix_match_unit=unit, capacity=capacity), tokens)
    engine = Engine(model, PrefixIndex(model.scheme), seed=2)
    prompt = engine.text(tokens)
    take_ticket(engine.node, prompt, "p-0")
    expected = engine.events.index.after_prefill(leg)
    assert engine.finds(None, [*prompt, *engine.text(40)]).resume == (expected.resume if states else expected.attention)
    if states is None:
        assert engine.finds(None, prompt).resume == (leg - 1) // BLOCK * BLOCK
