"""The model of a node's caches keeps what vLLM 0.32 was seen to keep."""

import random

import pytest

from deploy.bench.hybrid_cache import CacheShape, HybridCache, Kind, Removed, Stored
from deploy.bench.traces import Prompt, Segment, hashed

LARGE = CacheShape(blocks=4096)
WITH_UNIT = CacheShape(blocks=4096, unit=16)


def cached(node: HybridCache, prompt: Prompt) -> int:
    """Compute a prompt; how many of its tokens needed not be."""
    known = hashed(prompt, node.shape.step)
    return known.tokens - node.compute(known)


def after(shared: int, own: int, name: int) -> Prompt:
    """A prompt that begins with as many shared tokens."""
    return (Segment(1, shared), Segment(name, own))


@pytest.mark.parametrize(("shared", "third"), [(1300, 1280), (2900, 2816)])
def test_a_branch_point_has_a_state_from_the_second_prompt_on(shared: int, third: int) -> None:
    node = HybridCache(LARGE)
    assert [cached(node, after(shared, 400, name)) for name in (2, 3, 4, 5)] == [0, 0, third, third]


def test_a_prompt_of_exactly_the_shared_prefix_gives_the_next_its_hit() -> None:
    node = HybridCache(LARGE)
    assert [cached(node, (Segment(1, 1300),)), cached(node, after(1300, 400, 2))] == [0, 1280]


@pytest.mark.parametrize(("shape", "resume"), [(LARGE, 768), (WITH_UNIT, 1008)])
def test_the_next_turn_resumes_at_the_last_boundary_before_the_last_token(shape: CacheShape, resume: int) -> None:
    node, turn = HybridCache(shape), (Segment(1, 1024),)
    cached(node, turn)
    assert cached(node, (*turn, Segment(2, 300))) == resume


@pytest.mark.parametrize(("shape", "resume"), [(LARGE, 0), (WITH_UNIT, 688)])
def test_a_decode_node_can_resume_after_a_pull_only_with_a_unit(shape: CacheShape, resume: int) -> None:
    node, turn = HybridCache(shape), (Segment(1, 690),)
    pulled = node.pull(hashed(turn, shape.step))
    hit = node.hit(hashed((*turn, Segment(2, 75)), shape.step))
    assert (hit.attention, hit.resume) == ((688, 688) if resume else (512, 0))
    assert pulled.moved + pulled.computed == 690


def test_after_a_pull_an_event_without_hashes_tells_of_the_state_groups() -> None:
    node = HybridCache(LARGE)
    node.pull(hashed((Segment(1, 690),), 256))
    states = [event for event in node.take_events() if isinstance(event, Stored) and event.kind is Kind.STATE]
    assert [(event.hashes, event.begins, event.ends) for event in states] == [((), 0, 512)]


def test_a_decode_node_pulls_what_it_has_no_attention_of() -> None:
    node, turn = HybridCache(LARGE), (Segment(1, 690),)
    node.pull(hashed(turn, 256))
    assert node.pull(hashed((*turn, Segment(2, 75)), 256)).moved == 764 - 512


def test_plain_attention_resumes_wherever_its_blocks_are() -> None:
    node = HybridCache(CacheShape(state_groups=0))
    assert [cached(node, after(1300, 400, name)) for name in (2, 3)] == [0, 1280]


def test_what_was_not_used_for_the_longest_time_is_evicted() -> None:
    node = HybridCache(CacheShape(blocks=24))
    kept, gone = (Segment(1, 1025),), (Segment(2, 1025),)
    for prompt in (kept, gone, kept, (Segment(3, 1025),), (Segment(4, 1025),)):
        cached(node, prompt)
    assert (node.hit(hashed(kept, 256)).resume, node.hit(hashed(gone, 256)).resume) == (1024, 0)
    assert node.used <= 24


def test_of_a_prompt_the_end_is_evicted_before_the_beginning() -> None:
    node = HybridCache(CacheShape(blocks=10, state_groups=0))
    cached(node, (Segment(1, 2049),))
    cached(node, (Segment(2, 1025),))
    assert node.hit(hashed((Segment(1, 2049),), 256)).attention == 6 * 256


@pytest.mark.parametrize("shape", [CacheShape(blocks=60), CacheShape(blocks=60, unit=16)])
def test_the_events_tell_what_is_cached(shape: CacheShape) -> None:
    """A reader of the events knows each entry, whether prompts are computed or pulled."""
    dice, node, known = random.Random(1), HybridCache(shape), set[tuple[Kind, int]]()
    seen: list[Prompt] = [()]
    for name in range(300):
        prompt = (*dice.choice(seen[-8:])[:4], Segment(name, dice.randint(1, 900)))
        seen.append(prompt)
        dice.choice((node.compute, node.pull))(hashed(prompt, shape.step))
        for event in node.take_events():
            if isinstance(event, Stored):
                known |= {(event.kind, each) for each in event.hashes}
            else:
                assert isinstance(event, Removed)
                known.remove((event.kind, event.hash))
        cost = sum(shape.state_groups if kind is Kind.STATE else 1 for kind, _ in known)
        assert cost == node.used <= shape.blocks


def test_a_prompt_that_the_pool_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="pool"):
        HybridCache(CacheShape(blocks=4)).compute(hashed((Segment(1, 4096),), 256))
