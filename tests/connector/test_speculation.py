"""Speculative decoding changes a hand-over, on vLLM's real scheduler: states, and how far a ticket reaches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec

from connector.kv_groups import GroupSize, group_sizes
from tests.connector.harness import BLOCK, Node, attention, make_node, prompt, received, take_ticket

pytestmark = pytest.mark.usefixtures("every_pace")

KERNEL, VALUE_DIM = 4, 8


def state_group(speculative: int) -> MambaSpec:
    """A GDN state of a tiny model whose nodes propose `speculative` tokens."""
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        tp_world_size=1,
        num_k_heads=1,
        num_v_heads=1,
        head_k_dim=VALUE_DIM,
        head_v_dim=VALUE_DIM,
        conv_kernel_size=KERNEL,
        num_spec=speculative,
    )
    return MambaSpec(
        block_size=BLOCK,
        shapes=shapes,
        dtypes=(torch.bfloat16, torch.bfloat16),
        mamba_cache_mode="align",
        page_size_padded=BLOCK * 2 * 16 * 2,
        num_speculative_blocks=speculative,
    )


def sizes(spec: KVCacheSpec) -> Sequence[GroupSize]:
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return group_sizes(cache)


@pytest.mark.parametrize("speculative", [0, 1, 3])
def test_a_state_has_a_row_more_for_each_proposed_token(speculative: int) -> None:
    """So two nodes that propose different numbers must not read from each other: their states' rows lie elsewhere."""
    row = 3 * VALUE_DIM * 2
    (none,), (some,) = sizes(state_group(0)), sizes(state_group(speculative))
    assert some.block_bytes == none.block_bytes + speculative * row
    assert none.block_bytes == (KERNEL - 1) * row + VALUE_DIM * VALUE_DIM * 2


def node(role: str, speculative: int) -> Node:
    return make_node(role, (attention(), state_group(speculative)), engine_id=role)


@pytest.mark.parametrize("speculative", [1, 3])
def test_only_the_running_state_travels(speculative: int) -> None:
    """Beside it a request holds a block for each proposed token, which is scratch."""
    give, take = node("kv_producer", speculative), node("kv_consumer", speculative)
    ticket = take_ticket(give, prompt(100))
    assert [len(ids) for ids in ticket["remote_block_ids"]] == [7, 1]
    free = take.free_blocks
    take.add("d", prompt(100), ticket)
    take.step()
    assert [len(ids) for ids in take.metas[-1].reqs_to_recv["d"].local_block_ids] == [7, 1]
    take.step(received(take, "d"))
    assert len(take.run_out("d")) == 4
    assert take.counts("blocks") == {"attention/pulled": 7, "state/pulled": 1}
    assert take.free_blocks == free


@contextmanager
def lookahead(monkeypatch: pytest.MonkeyPatch, tokens: int) -> Iterator[None]:
    """Nodes made inside run a drafter that reads so many tokens ahead of a prefill (several MTP modules)."""
    with monkeypatch.context() as patch:
        patch.setattr(VllmConfig, "num_prefill_lookahead_tokens", property(lambda config: tokens))
        yield


@pytest.mark.parametrize(("tokens", "left_out"), [(0, 1), (1, 1), (2, 1), (3, 2), (5, 4)])
def test_a_prefill_leaves_out_what_the_drafter_reads_ahead(
    monkeypatch: pytest.MonkeyPatch, tokens: int, left_out: int
) -> None:
    with lookahead(monkeypatch, tokens):
        give, take = node("kv_producer", 0), node("kv_consumer", 0)
        ticket = take_ticket(give, prompt(110))
        assert ticket["remote_num_tokens"] == 110 - left_out
        take.add("d", prompt(110), ticket)
        take.step()
        assert take.metas[-1].reads["d"].pull_tokens == 110 - left_out
        take.step(received(take, "d"))
        take.run_out("d")
    assert take.counts("prompt_tokens") == {"pulled": 110 - left_out, "computed": left_out}


def test_a_node_that_leaves_out_another_number_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = take_ticket(node("kv_producer", 0), prompt(100))
    with lookahead(monkeypatch, 3):
        take = node("kv_consumer", 0)
        take.add("d", prompt(100), ticket)
        take.run_out("d")
        assert take.counts("refused") == {"number": 1}
    assert take.counts("prompt_tokens") == {"computed": 100}
