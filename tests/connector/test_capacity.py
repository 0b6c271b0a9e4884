"""The capacity of a cache, by kind of group; and how the figures get to a node's metrics without any request."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from connector.kv_groups import (
    NO_CAPACITY,
    BoundedGroup,
    Capacity,
    GrowingGroup,
    LimitedBy,
    capacity,
    footprint,
    node_capacity,
)
from connector.stats import LEVELS
from tests.connector.harness import DENSE, make_node, prompt, state

STATE = BoundedGroup(1, 1)


def test_only_growing_groups_count_for_tokens() -> None:
    """Once it was blocks / all groups x block size: a quarter of this."""
    found = capacity(1000, 4096, [GrowingGroup(16), STATE, STATE, STATE])
    assert found == Capacity(tokens=16000, sequences=333, admitted=3, binding=LimitedBy.ATTENTION)


def test_short_sequences_run_out_of_state_first() -> None:
    found = capacity(1000, 32, [GrowingGroup(16), STATE, STATE, STATE])
    assert (found.admitted, found.binding) == (200, LimitedBy.STATE)


def test_tokens_and_sequences_share_the_pool() -> None:
    """`Capacity` promises of a load: at the brim, the two shares add up to one."""
    found = capacity(1200, 1600, [GrowingGroup(16), BoundedGroup(20, 20)])
    assert found.sequences is not None
    assert found.admitted * 1600 / found.tokens + found.admitted / found.sequences == 1


def test_one_sequence_may_be_at_its_peak() -> None:
    assert capacity(100, 160, [GrowingGroup(16), BoundedGroup(10, 10)]).admitted == 5
    assert capacity(100, 160, [GrowingGroup(16), BoundedGroup(10, 11)]).admitted == 4
    assert capacity(5, 160, [GrowingGroup(16), BoundedGroup(10, 40)]) == Capacity(80, 0, 0, LimitedBy.ATTENTION)


def test_blocks_of_two_sizes_fill_up_together() -> None:
    """64 tokens end a block in both groups, and take four blocks of one and one of the other."""
    assert capacity(100, 64, [GrowingGroup(16), GrowingGroup(64)]).tokens == 20 * 64


@pytest.mark.parametrize("wrong", [(-1, 1), (1, 0)])
def test_nonsense_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="there can be no"):
        capacity(*wrong, [GrowingGroup(16)])
    with pytest.raises(ValueError, match="there can be no"):
        GrowingGroup(0)
    with pytest.raises(ValueError, match="there can be no"):
        BoundedGroup(2, 1)


def test_a_group_in_host_memory_is_no_part_of_the_pool() -> None:
    config = make_node().scheduler.vllm_config
    device, host = KVCacheGroupSpec(["a"], DENSE[0]), KVCacheGroupSpec(["b"], DENSE[0], host_resident=True)
    assert node_capacity(config, KVCacheConfig(101, [], [device, host])).tokens == 1600
    assert node_capacity(config, KVCacheConfig(101, [], [host])) == NO_CAPACITY


def test_a_state_s_mode_decides_what_it_takes_for_a_moment() -> None:
    config = make_node().scheduler.vllm_config
    longest = config.model_config.max_model_len // 16
    peaks = {mode: footprint(state(mode), config) for mode in ("none", "align", "all")}
    assert peaks == {"none": BoundedGroup(1, 1), "align": BoundedGroup(1, 2), "all": BoundedGroup(1, longest)}


def test_an_idle_engine_steps_once_to_tell_its_capacity() -> None:
    """A proxy asks before it sends the first request."""
    node = make_node(num_blocks=401)
    assert node.scheduler.has_requests()
    outputs = node.scheduler.update_from_output(node.scheduler.schedule(), EMPTY_MODEL_RUNNER_OUTPUT)
    sent = outputs[0].scheduler_stats
    assert sent is not None
    assert sent.kv_connector_stats is not None
    found = {(name, *labels): value for name, labels, value in sent.kv_connector_stats[LEVELS]}
    assert found == {
        ("capacity_tokens",): 6400,
        ("capacity_sequences", "max_model_len"): 1,
        ("capacity_sequences", "state"): 400,
        ("capacity_binding", "attention"): 1,
        ("hashing", "sha256", "16", "16", "false", "true", kv_cache_utils.NONE_HASH.hex()): 1,
    }
    assert not node.scheduler.has_requests()


def test_the_scheduler_preempts_where_the_figures_say_that_it_is_full() -> None:
    """Within one block per sequence, and the states of one that is about to cross into another block."""
    groups = (*DENSE, *[state("align")] * 3)
    node = make_node(groups=groups, num_blocks=64)
    cache = KVCacheConfig(64, [], [KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate(groups)])
    found = node_capacity(node.scheduler.vllm_config, cache)
    assert (found.tokens, found.sequences) == (63 * 16, 21)
    requests = [node.add(f"s-{index}", prompt(100 + 5 * index, seed=index), max_tokens=500) for index in range(4)]
    held = 0
    for _ in range(300):
        node.step()
        if any(request.num_preemptions for request in requests):
            break
        held = sum(-(-request.num_tokens // 16) for request in requests)
    assert any(request.num_preemptions for request in requests)
    assert 63 - 4 - 3 <= held + 4 * 63 / 21 <= 63
