"""Tokens that an external connector offers for a hybrid model with prefix caching, on vLLM's real scheduler.

Three faults of schedulers that assumed no external tokens on such models; each docstring says what went wrong, and what
holds now.
"""

import pytest
from vllm.v1.request import RequestStatus

from connector.counters import ReadOutcome
from tests.connector.harness import BLOCK, Node, lost, make_node, prompt, received, take_ticket

pytestmark = pytest.mark.usefixtures("every_pace")


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture
def decode() -> Node:
    return make_node("kv_consumer", engine_id="engine-d")


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, BLOCK + 2, 5 * BLOCK, 5 * BLOCK + 1, 100])
def test_an_external_offer_works_with_the_block_aligned_split(prefill: Node, decode: Node, length: int) -> None:
    """Once: the block-aligned split asserted that no external tokens exist. Now: any number of them is loaded."""
    decode.add("d", prompt(length), take_ticket(prefill, prompt(length)))
    decode.step()
    assert decode.metas[-1].reads["d"].pull_tokens == length - 1
    decode.step(received(decode, "d"))
    assert len(decode.run_out("d")) == 4


def test_an_async_load_waits_and_is_not_offered_again(prefill: Node, decode: Node) -> None:
    """Once: a load that schedules no tokens broke out before allocation and claimed again in each step, for ever.
    Now: it is allocated once, waits, and others run meanwhile."""
    request = decode.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    decode.add("other", prompt(50, seed=1))
    for _ in range(10):
        decode.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert sum("d" in meta.reqs_to_recv for meta in decode.metas) == 1
    assert "other" not in decode.scheduler.requests
    decode.step(received(decode, "d"))
    assert len(decode.run_out("d")) == 4


def test_attention_and_state_are_loaded_together(prefill: Node, decode: Node) -> None:
    """Once: attention alone was restored, and the output was corrupt. Now: every read has blocks of every group, the
    state's one among them, and after it the whole prefix is cached for both groups."""
    decode.add("d", prompt(97), take_ticket(prefill, prompt(97)))
    decode.step()
    attention, state = decode.metas[-1].reqs_to_recv["d"].local_block_ids
    assert (len(attention), len(state)) == (6, 1)
    decode.step(received(decode, "d"))
    decode.run_out("d")
    decode.add("plain", prompt(97))
    decode.run_out("plain")
    assert decode.counts("prompt_tokens")["hit"] == 96


@pytest.mark.parametrize("length", [40 * BLOCK - 2, 40 * BLOCK, 40 * BLOCK + 3])
def test_a_block_table_longer_than_needed_after_a_failed_load(prefill: Node, decode: Node, length: int) -> None:
    """Once: "num_required_blocks 39 < len(req_blocks) 40" ended the engine. Now: a failed load is computed, in chunks
    too, and the engine goes on."""
    free = decode.free_blocks
    decode.add("d", prompt(length), take_ticket(prefill, prompt(length)))
    decode.step()
    decode.step(lost(decode, ReadOutcome.NOT_HELD, "d"))
    assert len(decode.run_out("d")) == 4
    assert decode.free_blocks == free
    decode.add("next", prompt(100, seed=2), take_ticket(prefill, prompt(100, seed=2), "p-next"))
    decode.step()
    decode.step(received(decode, "next"))
    assert len(decode.run_out("next")) == 4
