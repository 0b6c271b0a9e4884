"""Recovery from failed loads with one KV-cache group and with several (vllm#35223), on vLLM's real scheduler."""

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput

from connector.counters import ReadOutcome
from tests.connector.harness import BLOCK, DENSE, HYBRID, Node, attention, lost, make_node, prompt, state, take_ticket

pytestmark = pytest.mark.usefixtures("every_pace")

Groups = tuple[KVCacheSpec, ...]
MANY: Groups = (attention(), state("align"), state("align"), attention())


def waiting(groups: Groups, length: int = 100) -> Node:
    """A decode node whose one request, "d", is reading."""
    prefill = make_node("kv_producer", groups, engine_id="engine-p")
    node = make_node("kv_consumer", groups, engine_id="engine-d")
    node.add("d", prompt(length), take_ticket(prefill, prompt(length)))
    node.step()
    return node


@pytest.mark.parametrize("groups", [HYBRID, MANY, DENSE], ids=["two groups", "four groups", "one group"])
@pytest.mark.parametrize("length", [100, 5 * BLOCK, 5 * BLOCK + 1])
def test_a_failed_read_is_recomputed_from_the_start(groups: Groups, length: int) -> None:
    """Once: recovery unpacked a single group's block list and died on two. Now: whatever is left of a window or a
    state counts as nothing, the whole prompt is computed, and the tokens come out."""
    node = waiting(groups, length)
    free = node.free_blocks
    node.step(lost(node, ReadOutcome.NOT_HELD, "d"))
    assert len(node.run_out("d")) == 4
    assert node.free_blocks > free
    assert node.counts("prompt_tokens") == {"computed": length}


def test_a_dense_model_recomputes_only_what_was_lost() -> None:
    """vLLM's block-level recovery for one group: computing starts at the first block that did not come."""
    node = waiting(DENSE)
    blocks = node.metas[-1].reqs_to_recv["d"].local_block_ids[0]
    node.step(KVConnectorOutput(finished_recving={"d"}, invalid_block_ids={blocks[3]}))
    plan = node.scheduler.schedule()
    assert plan.num_scheduled_tokens["d"] == 100 - 3 * BLOCK


def test_a_failed_load_does_not_leave_its_blocks_in_the_cache() -> None:
    """Blocks of a failed read are no cache hit for the next request with the same prompt until they were computed."""
    node = waiting(HYBRID)
    node.step(lost(node, ReadOutcome.NOT_HELD, "d"))
    node.abort("d")
    node.add("same", prompt(100))
    node.run_out("same")
    assert node.counts("prompt_tokens") == {"computed": 100}


def test_the_recomputed_prompt_is_cached_like_any_other() -> None:
    """After recovery a later turn hits what was computed here, in every group."""
    node = waiting(HYBRID)
    node.step(lost(node, ReadOutcome.NOT_HELD, "d"))
    node.run_out("d")
    node.add("same", prompt(100))
    node.run_out("same")
    assert node.counts("prompt_tokens") == {"computed": 104, "hit": 96}


def test_a_full_hit_recomputes_the_last_token_and_caches_its_block() -> None:
    """A dense load of the whole prompt leaves one token to compute, and the last full block is still cached."""
    node = waiting(DENSE, 96)
    node.step(KVConnectorOutput(finished_recving={"d"}))
    node.step()
    assert node.scheduled[-1]["d"] == 1
    longer = [*prompt(96), 5, 5, 5]
    node.add("longer", longer)
    node.step()
    assert node.counts("prompt_tokens") == {"pulled": 96, "hit": 96, "computed": 3}
