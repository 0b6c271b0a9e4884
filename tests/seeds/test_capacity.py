"""Capacity counts only cache groups that grow with a sequence (vllm#40384), compared with what vLLM's allocator admits.

The six shapes of that change, sliding windows and chunks: a real `KVCacheManager` is filled until it refuses, first
by sequences of `max_model_len` that enter one after another, then by short ones that grow.
"""

import itertools

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from connector.kv_groups import NO_CAPACITY, Capacity, LimitedBy, node_capacity
from tests.connector.harness import BLOCK, attention, make_node, prompt, state

LONGEST = 4096
"""The harness's `max_model_len`."""
USABLE = 1300
"""Blocks, vLLM's null block left out."""
ATTENTION = LONGEST // BLOCK


def sliding() -> KVCacheSpec:
    """A window of 100 tokens."""
    return SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16, sliding_window=100)


def chunked() -> KVCacheSpec:
    """Chunks of 128 tokens."""
    return ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16, attention_chunk_size=128
    )


SHAPES: dict[str, tuple[KVCacheSpec, ...]] = {
    "dense": (attention(),),
    "hybrid none": (attention(), state("none")),
    "hybrid align": (attention(), state("align")),
    "hybrid all": (attention(), state("all")),
    "mamba only none": (state("none"),),
    "mamba only align": (state("align"),),
    "one attention, three mamba": (attention(), *[state("align")] * 3),
    "sliding window": (attention(), sliding()),
    "chunked": (attention(), chunked()),
    "empty": (),
}
WITH_ATTENTION = [shape for shape in SHAPES if not shape.startswith(("mamba", "empty"))]

FIGURES = {
    "dense": Capacity(USABLE * BLOCK, None, USABLE // ATTENTION, LimitedBy.ATTENTION),
    "hybrid none": Capacity(USABLE * BLOCK, USABLE, USABLE // (ATTENTION + 1), LimitedBy.ATTENTION),
    "hybrid align": Capacity(USABLE * BLOCK, USABLE, 1299 // (ATTENTION + 1), LimitedBy.ATTENTION),
    "hybrid all": Capacity(USABLE * BLOCK, USABLE, 1045 // (ATTENTION + 1), LimitedBy.ATTENTION),
    "mamba only none": Capacity(USABLE * LONGEST, USABLE, USABLE, LimitedBy.STATE),
    "mamba only align": Capacity(USABLE * LONGEST, USABLE, USABLE - 1, LimitedBy.STATE),
    "one attention, three mamba": Capacity(USABLE * BLOCK, USABLE // 3, 1297 // (ATTENTION + 3), LimitedBy.ATTENTION),
}


class Cache:
    """vLLM's block allocation for one shape of model; a test adds sequences and makes them longer."""

    def __init__(self, shape: str, config: VllmConfig, usable: int) -> None:
        groups = SHAPES[shape]
        cache = KVCacheConfig(usable + 1, [], [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(groups)])
        self.told = node_capacity(config, cache)
        self.sequences: list[Request] = []
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.manager = KVCacheManager(
            cache,
            max_model_len=LONGEST,
            scheduler_block_size=max((spec.block_size for spec in groups), default=BLOCK),
            hash_block_size=BLOCK,
            max_in_flight_tokens=config.max_in_flight_tokens,
            enable_caching="none" not in shape and shape != "empty",
        )

    def enters(self, length: int) -> bool:
        """Admit one more sequence and decode its last token; False when there are no blocks for it."""
        name = f"s-{len(self.sequences)}"
        request = Request(
            request_id=name,
            prompt_token_ids=prompt(length - 1, seed=len(self.sequences)),
            sampling_params=SamplingParams(max_tokens=LONGEST),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.manager.new_step_starts()
        if self.manager.allocate_slots(request, length - 1, full_sequence_must_fit=True) is None:
            return False
        request.num_computed_tokens = length - 1
        self.sequences.append(request)
        return self.grows(request)

    def fill(self, length: int) -> int:
        """How many sequences of this length are admitted, one after another."""
        return next(count for count in itertools.count() if not self.enters(length))

    def grows(self, request: Request) -> bool:
        """One token more for a sequence; False when there is no block for it."""
        self.manager.new_step_starts()
        request.append_output_token_ids(7)
        if self.manager.allocate_slots(request, 1) is None:
            return False
        request.num_computed_tokens += 1
        return True

    def grow(self, count: int) -> float:
        """Admit so many and make them longer in turn until one is refused; the load reached, 1 being full."""
        assert all(self.enters(200 + index * 5) for index in range(count))
        while all(self.grows(request) for request in self.sequences):
            pass
        tokens: int = sum(-(-request.num_computed_tokens // BLOCK) * BLOCK for request in self.sequences)
        return tokens / self.told.tokens + (count / self.told.sequences if self.told.sequences else 0)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    """The tiny hybrid model's configuration; its own cache groups are not used."""
    return make_node().scheduler.vllm_config


@pytest.mark.parametrize("shape", FIGURES)
def test_the_figures(shape: str, config: VllmConfig) -> None:
    assert Cache(shape, config, USABLE).told == FIGURES[shape]


@pytest.mark.parametrize("usable", [800, 1040, 1300])
@pytest.mark.parametrize("shape", WITH_ATTENTION)
def test_as_many_sequences_of_max_model_len_are_admitted_as_the_figure_says(
    shape: str, usable: int, config: VllmConfig
) -> None:
    """As many as `capacity_sequences` says are admitted; one more fits only into the room kept for a peak."""
    cache = Cache(shape, config, usable)
    assert cache.fill(LONGEST) in (cache.told.admitted, cache.told.admitted + 1)


@pytest.mark.parametrize("shape", ["mamba only none", "mamba only align"])
def test_without_attention_only_the_state_groups_limit(shape: str, config: VllmConfig) -> None:
    cache = Cache(shape, config, usable=40)
    assert cache.fill(LONGEST) == cache.told.sequences == 40


@pytest.mark.parametrize("shape", [shape for shape in WITH_ATTENTION if shape != "chunked"])
def test_growing_sequences_fill_the_cache_to_the_figure(shape: str, config: VllmConfig) -> None:
    """Sequences of different lengths grow in turn until one is refused: within a block per sequence of the figure."""
    cache = Cache(shape, config, usable=520)
    assert cache.grow(12) == pytest.approx(1, abs=12 * BLOCK / cache.told.tokens)


def test_a_chunk_counts_as_full(config: VllmConfig) -> None:
    """A sequence that has just begun a chunk holds one block of it, not eight: more fits for a while, never less."""
    cache = Cache("chunked", config, usable=520)
    assert 1 <= cache.grow(12) <= 1 + 12 * 7 * BLOCK / cache.told.tokens


def test_an_empty_cache_has_no_capacity_and_limits_nothing(config: VllmConfig) -> None:
    cache = Cache("empty", config, usable=0)
    assert cache.told == NO_CAPACITY
    assert all(cache.enters(LONGEST) for _ in range(5))
