"""Two nodes of any tensor-parallel sizes: equal fingerprints promise that vLLM's reader finds the right bytes.

The reader is vLLM's own code, which computes a peer's offsets from its own sizes. Each element of a cache is labelled
with what it is (channel, head, token), as the model's layers write it on each rank; what the reader would copy is then
compared with what its own rank would have written. The tables hold every pair of sizes, and nodes that differ in one
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import derive_mamba_conv_split
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, MLAAttentionSpec

from connector.config import ConfigError
from connector.kv_groups import require_movable_states
from connector.node_fingerprint import cache_parts, rank_parts
from tests.connector.harness import make_node
from tests.connector.test_node_fingerprint import payload

SIZES = (1, 2, 4, 8)
PAIRS = [(give, take) for give in SIZES for take in SIZES]


@pytest.fixture(autouse=True)
def states_first_dimension_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {part for part in one if one[part] != other[part]}


def parts(
    ranks: int, spec: Any, heads: int = 8, layout: str = "LBHNC", block_len: int = 1, **cache: Any
) -> dict[str, str]:
    """The parts of a node's fingerprint that describe its cache."""
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(**{"cache_dtype": "auto", "kv_cache_dtype_skip_layers": [], **cache}),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )
    cached = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)])
    chosen = [payload(kv_cache_layout=layout, block_lens=[block_len])] * ranks
    return cache_parts(config, cached) | rank_parts(chosen)


# States


@dataclass(frozen=True)
class StateModel:
    """The layers of a model: `kind` and sizes over all ranks. `drafts`: speculative tokens."""

    kind: MambaAttentionBackendEnum = MambaAttentionBackendEnum.MAMBA2
    heads: int = 16
    width: int = 2
    groups: int = 8
    size: int = 2
    kernel: int = 3
    drafts: int = 0

    def spec(self, ranks: int, dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int32)) -> MambaSpec:
        """As one rank has it, by vLLM's own functions."""
        calculator, inner = MambaStateShapeCalculator, self.heads * self.width
        shapes: tuple[tuple[int, ...], ...]
        match self.kind:
            case MambaAttentionBackendEnum.MAMBA1:
                shapes = calculator.mamba1_state_shape(ranks, inner, self.size, self.kernel)
            case MambaAttentionBackendEnum.MAMBA2:
                shapes = calculator.mamba2_state_shape(
                    ranks, inner, self.groups, self.heads, self.width, self.size, self.kernel, self.drafts
                )
            case _:
                shapes = calculator.gated_delta_net_state_shape(
                    ranks, self.groups, self.heads, self.size, self.width, self.kernel, self.drafts
                )
        return MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes, mamba_type=self.kind, mamba_cache_mode="align")

    def projections(self, rank: int, ranks: int) -> list[list[tuple[Any, ...]]]:
        """The channels of each projection of a rank's convolution."""
        heads = share(self.heads, rank, ranks)
        inner = [("x", head, place) for head in heads for place in range(self.width)]
        if self.kind is MambaAttentionBackendEnum.MAMBA1:
            return [inner]
        groups = share(self.groups, rank, ranks)
        of_groups = [[(name, group, place) for group in groups for place in range(self.size)] for name in "bc"]
        return [inner, *of_groups] if self.kind is MambaAttentionBackendEnum.MAMBA2 else [*of_groups, inner]

    def page(self, rank: int, ranks: int) -> list[Any]:
        """A rank's state, element by element: the convolution, then the recurrent state."""
        channels = [channel for projection in self.projections(rank, ranks) for channel in projection]
        rows = range(self.kernel - 1 + self.drafts)
        across = range(1 if self.kind is MambaAttentionBackendEnum.MAMBA1 else self.width)
        heads = share(self.heads * (self.width // len(across)), rank, ranks)
        recurrent = [("state", head, one, two) for head in heads for one in across for two in range(self.size)]
        return [(channel, row) for channel in channels for row in rows] + recurrent


def share(count: int, rank: int, ranks: int) -> list[int]:
    """The heads or groups of a rank: an even part, or one that several ranks have."""
    if count >= ranks:
        return list(range(rank * count // ranks, (rank + 1) * count // ranks))
    return [rank * count // ranks]


ELEMENT = 4
"""Bytes."""


def read_state(give: StateModel, take: StateModel, sizes: tuple[int, int], rank: int) -> list[Any]:
    """The memory of a rank of `take` after reading from ranks of `give`."""
    giving, taking = sizes
    own = derive_mamba_conv_split(take.spec(taking), taking)
    theirs = derive_mamba_conv_split(give.spec(giving), giving)
    worker: Any = SimpleNamespace(
        _conv_decomp=own, _mamba_ssm_size=own.ssm_sizes, _ssm_region_indices=[0], _ple_region_index=None, tp_rank=rank,
        device_id=0, _logical_num_blocks=1, _physical_blocks_per_logical_kv_block=1, block_stride_per_layer=[0],
        _stack_descs=NixlBaseConnectorWorker._stack_descs,
    )  # fmt: skip
    meta: Any = SimpleNamespace(
        kv_caches_base_addr=[0], ssm_sizes=theirs.ssm_sizes, num_blocks=1, device_id=0, block_strides=[0]
    )
    info: Any = SimpleNamespace(remote_physical_blocks_per_logical=1)
    wider = taking >= giving
    ratio = taking // giving if wider else -(giving // taking)
    sources = [rank * giving // taking] if wider else [rank * -ratio + at for at in range(-ratio)]
    local = NixlBaseConnectorWorker._build_mamba_local(worker, [0])
    remote = NixlBaseConnectorWorker._build_mamba_remote(worker, meta, ratio, info)
    held: list[Any] = [None] * len(take.page(rank, taking))
    for at, source in enumerate(sources):
        page = give.page(source, giving)
        for (to, length, _), (start, found, _) in zip(local.tolist(), remote.tolist(), strict=True):
            piece = length // len(sources)
            if piece != found:
                return ["NIXL refuses pieces of two lengths"]
            first, count = (to + at * piece) // ELEMENT, piece // ELEMENT
            held[first : first + count] = page[start // ELEMENT :][:count]
    return held


def is_read_right(give: StateModel, take: StateModel, sizes: tuple[int, int]) -> bool:
    return all(read_state(give, take, sizes, rank) == take.page(rank, sizes[1]) for rank in range(sizes[1]))


KINDS = {
    "mamba-1": StateModel(MambaAttentionBackendEnum.MAMBA1),
    "gdn": StateModel(MambaAttentionBackendEnum.GDN_ATTN),
    "kda": StateModel(MambaAttentionBackendEnum.GDN_ATTN, heads=8),
    **{f"mamba-2 of {groups} groups": StateModel(groups=groups) for groups in SIZES},
}


def test_kimi_linear_s_states_are_those_of_a_gated_delta_net_with_as_many_keys_as_values() -> None:
    """And vLLM gives them the same kind (`KimiGatedDeltaNetAttention`), which NIXL moves."""
    model = KINDS["kda"]
    for ranks in SIZES:
        assert model.spec(ranks).shapes == MambaStateShapeCalculator.kda_state_shape(
            ranks, model.heads, model.width, conv_kernel_size=model.kernel
        )
    assert KimiGatedDeltaNetAttention.mamba_type.fget(None) is model.kind


@pytest.mark.parametrize("sizes", PAIRS, ids=str)
@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_states_are_read_right_exactly_where_the_parts_are_equal(model: StateModel, sizes: tuple[int, int]) -> None:
    give, take = (parts(ranks, model.spec(ranks)) for ranks in sizes)
    repeated = {max(model.groups, ranks) for ranks in sizes}
    unequal = model.kind is MambaAttentionBackendEnum.MAMBA2 and len(repeated) > 1
    assert differing(give, take) == ({"state_groups", "state_shapes"} if unequal else set())
    assert is_read_right(model, model, sizes) is not unequal


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"drafts": 2}, {"state_shapes"}),
        ({"kernel": 4}, {"state_shapes"}),
        ({"heads": 8}, {"state_shapes"}),
        ({"width": 4}, {"state_shapes"}),
        ({"size": 4}, {"state_shapes"}),
        ({"groups": 4}, {"state_groups", "state_shapes"}),
    ],
    ids=str,
)
def test_states_that_differ_in_one_size_are_named(
    other: dict[str, int], named: set[str], sizes: tuple[int, int]
) -> None:
    usual, odd = KINDS["mamba-2 of 8 groups"], replace(KINDS["mamba-2 of 8 groups"], **other)
    for give, take in ((usual, odd), (odd, usual)):
        found = differing(*(parts(ranks, model.spec(ranks)) for model, ranks in zip((give, take), sizes, strict=True)))
        assert found == named
        assert not is_read_right(give, take, sizes)


def test_states_of_another_type_are_named() -> None:
    model = KINDS["gdn"]
    types = (torch.int32, torch.int16), (torch.int16, torch.int32)
    first, *others = [parts(1, model.spec(1, each)) for each in ((torch.int32, torch.int32), *types)]
    assert [differing(first, other) for other in others] == [{"state_dtypes"}] * 2


def test_a_model_whose_layers_keep_states_of_several_sizes_is_refused_at_start() -> None:
    """vLLM's worker takes the first layer's sizes for all."""
    one, other = (replace(StateModel(), heads=heads).spec(1) for heads in (16, 8))
    groups = [KVCacheGroupSpec([str(at)], spec) for at, spec in enumerate((one, one, other))]
    require_movable_states(KVCacheConfig(64, [], groups[:2]))
    with pytest.raises(ConfigError, match="keep states of 2 sizes"):
        make_node("kv_producer", (one, other))


def test_a_model_whose_states_nixl_does_not_know_is_refused_at_start() -> None:
    """LFM2's, of short convolutions. vLLM's own words are a traceback that ends in a list of names."""
    spec = replace(StateModel().spec(1), mamba_type=MambaAttentionBackendEnum.SHORT_CONV)
    with pytest.raises(ConfigError, match=r"the kind SHORT_CONV, and vLLM's NIXL connector moves those of Mamba-1, "):
        require_movable_states(KVCacheConfig(64, [], [KVCacheGroupSpec(["0"], spec)]))


# Attention


@dataclass(frozen=True)
class Pages:
    """A model's attention layers: KV heads of the whole model and of this layer, and how a rank lays out its pages.

    `padding`: cells at the end of a page. `apart`: keys and values have cells of their own, all keys first. `latent`:
    one for all heads (MLA), which every rank has whole.
    """

    heads: int = 4
    of_layer: int | None = None
    layout: str = "LBHNC"
    padding: int = 0
    apart: bool = False
    latent: bool = False
    tokens: int = 2

    def mine(self, rank: int, ranks: int) -> list[int]:
        return [0] if self.latent else share(self.of_layer or self.heads, rank, ranks)

    def cells(self, rank: int, ranks: int) -> list[Any]:
        heads = self.mine(rank, ranks)
        slots = [(name, head) for name in "kv" for head in heads] if self.apart else [("kv", head) for head in heads]
        if self.layout.endswith("HNC"):
            page = [(slot, token) for slot in slots for token in range(self.tokens)]
        else:
            page = [(slot, token) for token in range(self.tokens) for slot in slots]
        return [*page, *["padding"] * self.padding]

    def spec(self, ranks: int) -> FullAttentionSpec:
        """A cell has four bytes; one for a key alone, or a value alone, too."""
        if self.latent:
            return MLAAttentionSpec(block_size=self.tokens, num_kv_heads=1, head_size=2, dtype=torch.bfloat16)
        heads = len(self.mine(0, ranks))
        more: dict[str, Any] = {"num_head_slots": 2 * heads, "state_content_bytes": ELEMENT} if self.apart else {}
        if self.padding:
            more["page_size_padded"] = len(self.cells(0, ranks)) * ELEMENT
        return FullAttentionSpec(block_size=self.tokens, num_kv_heads=heads, head_size=1, dtype=torch.bfloat16, **more)

    def parts(self, ranks: int) -> dict[str, str]:
        block_len = len(self.cells(0, ranks)) * ELEMENT
        return parts(ranks, self.spec(ranks), self.heads, self.layout, block_len)


def read_page(pages: Pages, sizes: tuple[int, int], rank: int) -> list[Any]:
    """A rank's page after a read; as a hybrid model's, of which vLLM checks no block length."""
    giving, taking = sizes
    topology = TransferTopology(
        tp_rank=rank, tp_size=taking, block_size=pages.tokens, engine_id="own", is_mla=pages.latent, is_mamba=True,
        total_num_kv_heads=pages.heads, attn_backends=[],
    )  # fmt: skip
    topology.register_remote_engine("peer", EngineTransferInfo(giving, 1, pages.tokens, 1))
    plan = compute_tp_mapping(topology, giving, (type(pages.spec(1)),))
    length = len(pages.cells(rank, taking)) * ELEMENT
    worker: Any = SimpleNamespace(
        transfer_topo=topology, _group_spec_types=(type(pages.spec(1)),), _transfer_layer_region_indices=(),
        _is_region_replicated=lambda region: pages.latent, block_len_per_layer=[length], num_regions=1,
        region_num_blocks=[1], _stack_descs=NixlBaseConnectorWorker._stack_descs, _ple_region_index=None,
    )  # fmt: skip
    worker._fa_desc_replicated = lambda count, ratio=1: [pages.latent] * count
    meta: Any = SimpleNamespace(
        kv_caches_base_addr=[0], region_num_blocks=[1], num_blocks=1, device_id=0, block_strides=[0]
    )
    (start, found, _), *_ = NixlBaseConnectorWorker._build_fa_remote(worker, plan, meta, 1).tolist()
    whole = NixlBaseConnectorWorker._stack_descs(torch.zeros(1, dtype=torch.int64).numpy(), length, 0)
    wider = taking >= giving
    pieces: Iterator[Sequence[Any]] = iter([[(0, length, 0)]] * len(plan.all_source_ranks))
    if not wider:
        pieces = (handle for handle in NixlBaseConnectorWorker._build_local_splits_from_plan(worker, plan, whole, 1))
    held: list[Any] = ["padding"] * len(pages.cells(rank, taking))
    for source, ((to, length_of_piece, _), *_) in zip(plan.all_source_ranks, pieces, strict=True):
        if length_of_piece != found or length_of_piece % ELEMENT:
            return ["NIXL refuses pieces of two lengths"]
        count = length_of_piece // ELEMENT
        held[to // ELEMENT : to // ELEMENT + count] = pages.cells(source, giving)[start // ELEMENT :][:count]
    return held


def are_read_right(pages: Pages, sizes: tuple[int, int]) -> bool:
    return all(read_page(pages, sizes, rank) == pages.cells(rank, sizes[1]) for rank in range(sizes[1]))


LAYERS = {
    "8 heads": Pages(8),
    "2 heads": Pages(2),
    "one head": Pages(1),
    "a layer of more heads": Pages(2, of_layer=8),
    "a layer of fewer heads": Pages(8, of_layer=2),
    "tokens before heads": Pages(4, layout="LBNHC"),
    "one head, tokens first": Pages(1, layout="LBNHC"),
    "padded pages": Pages(4, padding=3),
    "keys and values apart": Pages(4, apart=True),
    "one latent for all heads": Pages(8, latent=True),
}


@pytest.mark.parametrize("sizes", PAIRS, ids=str)
@pytest.mark.parametrize("pages", LAYERS.values(), ids=LAYERS)
def test_pages_with_equal_parts_are_read_right(pages: Pages, sizes: tuple[int, int]) -> None:
    give, take = (pages.parts(ranks) for ranks in sizes)
    unlike = differing(give, take)
    assert unlike <= {"kv_heads", "kv_block_bytes"}
    assert are_read_right(pages, sizes) is not bool(unlike)


def test_which_layers_are_not_quantized_is_a_part() -> None:
    quantized = replace(Pages().spec(1), kv_quant_mode=1, dtype=torch.uint8)
    first, second = (parts(1, quantized, 4, kv_cache_dtype_skip_layers=[layer]) for layer in "05")
    assert differing(first, second) == {"kv_dtype"}
    assert differing(first, parts(1, quantized, 4)) == {"kv_dtype"}
