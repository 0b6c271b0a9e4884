"""The simulated cache of the planner's bench keeps and evicts what vLLM's own scheduler does.

Without evictions every hit is equal. With them a few prompts in a hundred may differ: vLLM takes its blocks for what is
not cached yet (a prompt's last tokens, the running state) from the oldest too, and the simulated cache does not.
"""

import random
from collections.abc import Iterator

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from deploy.bench.hybrid_cache import CacheShape, HybridCache
from deploy.bench.kv_events import hash_ids
from pdproxy.planning.prefix import Hit
from tests.connector.harness import BLOCK, DENSE, HYBRID, Node, make_node

PROMPTS = 120
SHAPES = {
    "hybrid": CacheShape(400, BLOCK, 0, 1),
    "hybrid, unit": CacheShape(400, BLOCK, 4, 1),
    "hybrid, evictions": CacheShape(60, BLOCK, 0, 1),
    "hybrid, unit, evictions": CacheShape(60, BLOCK, 4, 1),
    "attention, evictions": CacheShape(60, BLOCK, 0, 0),
}


def prompts(seed: int) -> Iterator[list[int]]:
    """Conversations over shared beginnings, one prompt after the other."""
    dice = random.Random(seed)
    systems, said = [_text(dice, length) for length in (0, 37, 64, 90, 131)], [[1, 2, 3]]
    for _ in range(PROMPTS):
        so_far = dice.choice(systems) if dice.random() < 0.4 else dice.choice(said[-6:])
        said.append([*so_far, *_text(dice, dice.randrange(1, 60))][:400])
        yield said[-1]


def _text(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(10, 900) for _ in range(length)]


def serve(node: Node, name: str, prompt: list[int]) -> None:
    """One prompt, computed to its first token."""
    node.add(name, prompt, max_tokens=1)
    while node.scheduler.requests:
        node.step()
    node.step()


def finds(node: Node, prompt: list[int]) -> Hit:
    """Tokens that vLLM counts as cached: for a request with a ticket, and for one without."""
    manager = node.scheduler.kv_cache_manager
    request = Request("look", prompt, SamplingParams(max_tokens=1), None, block_hasher=node.hasher)
    return Hit(manager.get_computed_blocks_for_connector(request)[1], manager.get_computed_blocks(request)[1])


@pytest.mark.parametrize("name", SHAPES)
def test_it_holds_what_vllm_holds(name: str) -> None:
    shape = SHAPES[name]
    groups = HYBRID if shape.state_groups else DENSE
    node = make_node(groups=groups, num_blocks=shape.blocks + 1, unit=shape.unit or None)
    node.scheduler.kv_cache_manager.coordinator.retention_interval = 0 if shape.state_groups else None
    simulated, wrong, hits = HybridCache(shape), list[tuple[int, Hit, Hit]](), 0
    for number, prompt in enumerate(prompts(3)):
        known = hash_ids(prompt, shape.step)
        ours, theirs = simulated.hit(known), finds(node, prompt)
        hits += theirs.resume > 0
        if ours != theirs:
            wrong.append((number, ours, theirs))
        simulated.compute(known)
        serve(node, str(number), prompt)
    assert hits > PROMPTS // 4
    assert len(wrong) <= (PROMPTS // 20 if "evictions" in name else 0), wrong
