"""A node's own fingerprint, from what its engine really runs.

Three sources, all in the scheduler's process: vLLM's configuration; the KV-cache groups that the workers' layers gave;
and the workers' handshake payloads, which have the layout and the attention backend that were chosen.

Nodes of different tensor-parallel sizes can be paired, but vLLM's reader computes where a peer's bytes are from its own
sizes and the ratio of the two, and never compares them with the peer's (`remote_conv_offsets`, `_build_mamba_remote`,
`_build_fa_remote`, 0.32). What it takes for granted, and the part that shows where a node is not so:

    the ranks divide each state, and repeat nothing              state_shapes (over all ranks), state_groups
    the ranks divide the model's KV heads, or repeat single ones  kv_heads
    a page has one cell for each head and token, and no padding   kv_heads
    a head's cells lie together in a block                        kv_block_bytes
    an attention block covers as many tokens                      block_sizes, kernel_block_size
    an element has as many bytes, and means the same              dtype, kv_dtype, kv_shape, state_dtypes
    a convolution's state has as many rows                        state_shapes, speculative
    context parallelism deals out whole blocks                    context_parallel
    every layer's state is as large as the first one's            `kv_groups.require_movable_states`, when a node starts

A value is the same at every tensor-parallel size at which that holds.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

from .config import STATE_LAYOUT
from .fingerprint import (
    NONE,
    Fingerprint,
    context_text,
    model_digest,
    quantization_text,
    read_backends,
    rope_text,
    settings_text,
    short,
)
from .resume_boundary import ResumeBoundary
from .tokenizer_files import TokenizerSource, chat_template_part, tokenizer_part
from .weights import WeightsSource, checkpoint_text

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


MEDIA_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
"""Settings in vLLM's `MultiModalConfig` that change the embeddings of an image or video."""

LORA_SETTINGS = ("target_modules", "lora_dtype", "enable_tower_connector_lora", "enable_moe_shared_loras")
"""Settings in vLLM's `LoRAConfig` that change what an adapter computes."""


def node_fingerprint(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", boundary: ResumeBoundary, weights_label: str = ""
) -> Fingerprint:
    """Every part but those of `rank_parts`. Reads the checkpoint's files.

    ``weights_label``: the operator's word for the weights, which tells two apart where samples of their files would
    not.
    """
    return Fingerprint.of(
        {
            **model_parts(vllm_config),
            **speculative_parts(vllm_config),
            **cache_parts(vllm_config, kv_cache_config),
            **hand_over_parts(boundary),
            **weight_parts(vllm_config),
            "weights_label": short(weights_label) if weights_label else NONE,
        }
    )


@dataclass
class RankPayload(NixlHandshakePayload):
    """A rank's published metadata: vLLM's payload, and all attention backends (`backends_text`).

    vLLM names the first layer's backend alone, that of mamba where a model begins with a mamba layer, and makes its
    handshake's hash of it, which a decode node of stock vLLM compares too; that one skips what it does not know.
    """

    backends: str = ""


class Published(msgspec.Struct, frozen=True):
    """The part of a worker's handshake (vLLM's `NixlAgentMetadata`) that is used here."""

    kv_cache_layout: str
    attn_backend_name: str
    block_size: int
    block_lens: tuple[int, ...]


def model_parts(vllm_config: "VllmConfig") -> dict[str, str]:
    """The parts that say what is computed: release, model, its settings and types."""
    from vllm import __version__ as vllm_version

    config = vllm_config.model_config.hf_config.to_dict()
    return {
        "vllm": short(str(vllm_version)),
        "architecture": short(str(vllm_config.model_config.architecture)),
        "model_config": model_digest(
            config, {"disable_sliding_window": vllm_config.model_config.disable_sliding_window}
        ),
        "rope": rope_text(config),
        "context": context_text(config, vllm_config.model_config.max_model_len),
        "tokenizer": tokenizer_part(tokenizer_source(vllm_config)),
        "chat_template": chat_template_part(tokenizer_source(vllm_config)),
        "media": _media(vllm_config.model_config.multimodal_config),
        "dtype": _type(vllm_config.model_config.dtype),
        "quantization": quantization_text(
            vllm_config.model_config.quantization,
            vllm_config.model_config.quantization_config,
            config.get("quantization_config") or config.get("compression_config"),
        ),
    }


def tokenizer_source(vllm_config: "VllmConfig") -> TokenizerSource:
    """Where this node's tokenizer is from."""
    model = vllm_config.model_config
    download_dir = vllm_config.load_config.download_dir
    return TokenizerSource(str(model.tokenizer), model.tokenizer_revision, str(model.tokenizer_mode), download_dir)


def speculative_parts(vllm_config: "VllmConfig") -> dict[str, str]:
    """Method and number of speculative tokens, which are rows of the convolution's state. vLLM's own handshake
    compares methods that use hidden states only, and never the number."""
    config = vllm_config.speculative_config
    if config is None:
        return {"speculative": NONE}
    return {"speculative": short(f"{config.method}:{vllm_config.num_speculative_tokens}")}


def cache_parts(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> dict[str, str]:
    """The parts that describe one block of each group."""
    groups = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
    specs = [spec for group in groups for spec in _members(group)]
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    cache, ranks = vllm_config.cache_config, vllm_config.parallel_config.tensor_parallel_size
    heads = vllm_config.model_config.get_total_num_kv_heads()
    return {
        "cache_groups": short(_runs(_kind(group) for group in groups)),
        "block_sizes": short(_runs(_block_size(group) for group in groups)),
        "kv_dtype": _kv_dtypes(attention, str(cache.cache_dtype), cache.kv_cache_dtype_skip_layers),
        "kv_shape": _each(_kv_shape(spec) for spec in attention),
        "kv_heads": _each(_kv_heads(spec, max(1, heads // ranks)) for spec in attention),
        "cache_mode": _each(spec.mamba_cache_mode for spec in states),
        "state_dtypes": _each("+".join(map(_type, spec.dtypes)) for spec in states),
        "state_groups": _each(_state_groups(spec, ranks) for spec in states),
        "state_shapes": _each(_state_shapes(spec, ranks) for spec in states),
        "state_layout": short(os.environ.get(STATE_LAYOUT, "default")) if states else NONE,
    }


def hand_over_parts(boundary: ResumeBoundary) -> dict[str, str]:
    """Where a hand-over ends: nodes of two units take two states from one prompt."""
    return {"prefix_match_unit": NONE if boundary.unit is None else str(boundary.unit)}


def weight_parts(vllm_config: "VllmConfig") -> dict[str, str]:
    """The content of the checkpoint, and of the draft model's where it has one of its own.

    For a model in object storage `model_weights` is where its weights are; `model` is then a folder with the rest.
    """
    target = WeightsSource(
        vllm_config.model_config.model_weights or vllm_config.model_config.model,
        vllm_config.model_config.revision,
        str(vllm_config.load_config.load_format),
        vllm_config.load_config.download_dir,
    )
    return {"checkpoint": checkpoint_text(target), "draft_checkpoint": _draft(vllm_config, target)}


def rank_parts(payloads: Collection[NixlHandshakePayload]) -> dict[str, str]:
    """The parts that workers choose. All ranks should agree; where they do not, the part has every value."""
    decode = msgspec.msgpack.Decoder(Published).decode
    ranks = [decode(payload.agent_metadata_bytes) for payload in payloads]
    named = [payload.backends for payload in payloads if isinstance(payload, RankPayload)]
    backends = [read_backends(text) for text in named or [rank.attn_backend_name for rank in ranks]]
    return {
        "kv_layout": _each(rank.kv_cache_layout for rank in ranks),
        "kv_block_bytes": _each(_block_bytes(rank) for rank in ranks),
        "attention_backend": _each(names for names, _ in backends),
        "context_parallel": _each(dealt for _, dealt in backends),
        "kernel_block_size": _each(str(rank.block_size) for rank in ranks),
    }


def lora_settings(vllm_config: "VllmConfig") -> dict[str, Any]:
    """This node's LoRA settings that change what an adapter computes.

    They are not in the fingerprint but in the digest of prompts with an adapter: other prompts are the same with and
    without `--enable-lora`.
    """
    config = vllm_config.lora_config
    return {} if config is None else {name: getattr(config, name, None) for name in LORA_SETTINGS}


def _draft(vllm_config: "VllmConfig", target: WeightsSource) -> str:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return NONE
    model, load = speculative.draft_model_config, speculative.draft_load_config
    draft = replace(target, model=model.model_weights or model.model, revision=model.revision)
    if load is not None:
        draft = replace(draft, load_format=str(load.load_format), download_dir=load.download_dir)
    return NONE if draft == target else checkpoint_text(draft)


def _media(config: Any) -> str:
    return NONE if config is None else settings_text({name: getattr(config, name, None) for name in MEDIA_SETTINGS})


def _members(spec: Any) -> Iterator[Any]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def _kind(spec: Any) -> str:
    """The type of a group, with its window."""
    first = next(_members(spec))
    name = type(first).__name__.removesuffix("Spec")
    windows = (getattr(first, field, None) for field in ("sliding_window", "attention_chunk_size", "rswa_window"))
    return name + "".join(f"({window})" for window in windows if window is not None)


def _block_size(spec: Any) -> str:
    """Tokens per block; "-" for a state that is kept once for a whole sequence, whose nominal block is
    `max_model_len`."""
    first = next(_members(spec))
    if isinstance(first, MambaSpec) and first.mamba_cache_mode == "none":
        return "-"
    return str(first.block_size)


def _kv_dtypes(specs: Sequence[AttentionSpec], configured: str, skipped: Sequence[str]) -> str:
    """The types of all attention groups, and which layers `--kv-cache-dtype-skip-layers` leaves unquantized."""
    types = _each(_kv_dtype(spec, configured) for spec in specs)
    return short(f"{types}:skip:{settings_text({'layers': list(skipped)})}") if skipped and specs else types


def _kv_dtype(spec: AttentionSpec, configured: str) -> str:
    """The type of the stored bytes, and their quantization: `fp8_e4m3` and `fp8_e5m2` are stored as one type."""
    stored = _type(spec.dtype)
    if not spec.kv_quant_mode:
        return stored
    return f"{stored}:{'fp8_e4m3' if configured == 'fp8' else configured}"


def _kv_shape(spec: AttentionSpec) -> str:
    """Key and value dimensions and bytes of one token for one head."""
    states = "" if spec.tokens_per_state == 1 else f"/{spec.tokens_per_state}"
    return f"{spec.head_size}+{spec.head_size_v}={spec.state_content_size_bytes}B{states}"


def _kv_heads(spec: AttentionSpec, of_a_rank: int) -> str:
    """`divided` where a rank's page has `of_a_rank` heads, as vLLM's reader supposes of its peer, with one cell for
    each head and token. Otherwise how many times as many heads a rank has; and of a page that cannot be divided by
    heads (it is padded, or has cells of its own for keys and for values) the heads of a rank, and the cells of a token.
    One latent for all heads is never divided.
    """
    if spec.head_size_v == 0:
        return NONE
    found = Fraction(spec.num_kv_heads, of_a_rank)
    cells = Fraction(spec.page_size_bytes * spec.tokens_per_state, spec.block_size * spec.state_content_size_bytes)
    if cells != spec.num_kv_heads:
        return f"{spec.num_kv_heads}*rank:{cells}"
    return "divided" if found == 1 else f"divided:{found}"


def _block_bytes(rank: Published) -> str:
    """`NONE` where each head's part of a block is contiguous (`KVCacheLayout.is_block_contiguous`)."""
    return NONE if rank.kv_cache_layout.endswith("HNC") else "+".join(map(str, dict.fromkeys(rank.block_lens)))


def _state_shapes(spec: MambaSpec, ranks: int) -> str:
    """Each state's dimensions over all ranks. vLLM shards the first one (with the layout that NIXL needs, "DS", that of
    convolutions too)."""
    shapes = (shape if spec.tp_replicated else (shape[0] * ranks, *shape[1:]) for shape in spec.shapes)
    return "+".join(f"({','.join(map(str, shape))})" for shape in shapes)


def _state_groups(spec: MambaSpec, ranks: int) -> str:
    """How many groups a layer has over all ranks, each with one B and C (Mamba-2) or key and query (GDN) for its heads:
    the convolution's channels are heads x width, and twice groups x size. It is the model's own number, or more where
    vLLM repeats groups for ranks that have none of their own (`extra_groups_for_head_shards`)."""
    if [len(shape) for shape in spec.shapes[:2]] != [2, 3]:
        return NONE
    (channels, _), (heads, width, size) = spec.shapes[:2]
    return str(Fraction((channels - heads * width) * ranks, 2 * size))


def _each(values: Iterable[str]) -> str:
    """The distinct values of all layers, or of all ranks, in the order in which they first appear."""
    distinct = dict.fromkeys(values)
    return short("/".join(distinct)) if distinct else NONE


def _runs(values: Iterable[str]) -> str:
    """`a,a,b` as `a*2,b`: the order of groups matters, since a ticket lists blocks in it."""
    runs = ((value, len(list(run))) for value, run in groupby(values))
    return ",".join(value if length == 1 else f"{value}*{length}" for value, length in runs) or NONE


def _type(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def all_parts(fingerprint: Fingerprint) -> Mapping[str, str]:
    """For the metric: every part, and their digest as `all`."""
    return {**dict(fingerprint.parts), "all": fingerprint.digest}
