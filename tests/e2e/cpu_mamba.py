"""A general plugin of vLLM: what its CPU build lacks for mamba layers with prefix caching, in plain torch.

The CPU build has its own kernels for the convolution, Mamba-2's scan and one step of its decoding. It lacks:

    Mamba-2   the states between chunks (`return_intermediate_states` is ignored), and the Triton kernel that keeps
              one of them, `store_prefill_checkpoint`
    Mamba-1   `selective_scan_fn`. Its decoding step runs and is wrong: the kernel takes one A, dt, bias and D for a
              whole head. Its projections multiply transposed matrices, which `onednn_mm` refuses

Without torchvision, which text does not need, vLLM cannot import Qwen3.5's multimodal class, and asks for its image and
video processors at the start, also with `--language-model-only`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import silu, softplus

TEXT_ONLY = "--language-model-only"
SCAN, STORE = "mamba_chunk_scan_combined_varlen", "store_prefill_checkpoint"


def with_states_in_between(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the scan: where the states between chunks are asked for, it runs once for each chunk."""

    def scan(
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        chunk_size: int,
        cu_seqlens: torch.Tensor,
        cu_chunk_seqlens: torch.Tensor,
        last_chunk_indices: torch.Tensor,
        seq_idx: torch.Tensor,
        out: torch.Tensor,
        **more: Any,
    ) -> Any:
        if not more.get("return_intermediate_states"):
            bounds = cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx
            return stock(x, dt, a, b, c, chunk_size, *bounds, out, **more)
        initial, kept = more.pop("initial_states"), more["state_dtype"]
        more |= {"state_dtype": torch.float32, "return_intermediate_states": False}
        states: list[torch.Tensor] = []
        state, before = None, None
        ends = cu_chunk_seqlens.tolist()
        for sequence, first, end in zip(seq_idx.tolist(), ends, ends[1:], strict=False):
            if sequence != before:
                state = None if initial is None else initial[sequence : sequence + 1]
            part, length = slice(first, end), cu_seqlens.new_tensor([0, end - first])
            chunk = torch.empty_like(out[part]).contiguous()
            bounds = length, length, length[:1], length[:1]
            state = stock(
                x[part], dt[part], a, b[part], c[part], chunk_size, *bounds, chunk, initial_states=state, **more
            )
            out[part], before = chunk, sequence
            states.append(state.to(kept))
        return torch.cat(states)

    return scan


def store_prefill_checkpoint(
    checkpoint: Any,
    chunk_idx: torch.Tensor,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    chunk_states: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    state_len: int,
) -> None:
    """Replaces the Triton kernel of that name."""
    rows = checkpoint.checkpoint_offsets.tolist(), checkpoint.state_indices.tolist(), chunk_idx.tolist()
    for row, (offset, block, chunk) in enumerate(zip(*rows, strict=False)):
        if offset > 0:
            end = int(query_start_loc[row]) + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunk]


def selective_scan(
    u: torch.Tensor,
    ssm_states: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor,
    *,
    delta_softplus: bool,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Mamba-1's scan: (dim, tokens) in, the same out; the states are changed in place."""
    step = _steps(delta + bias[:, None], delta_softplus)
    out, bounds = torch.empty(u.shape, dtype=torch.float32), query_start_loc.tolist()
    for row, (first, end) in enumerate(pairwise(bounds)):
        block = int(cache_indices[row])
        state = ssm_states[block].float() if has_initial_state[row] else torch.zeros(a.shape)
        for at in range(first, end):
            entering = (step[:, at] * u[:, at].float())[:, None] * b[:, at].float()
            state = torch.exp(step[:, at, None] * a) * state + entering
            out[:, at] = state @ c[:, at].float()
        ssm_states[block] = state.to(ssm_states.dtype)
    return ((out + skip[:, None] * u.float()) * silu(z.float())).to(u.dtype)


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    bias: torch.Tensor,
    z: torch.Tensor,
    *,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """Mamba-1's step of decoding: one token a row."""
    step, rows = _steps(dt + bias, dt_softplus), state_batch_indices.flatten().long()
    entering = (step * x.float())[..., None] * b[:, None].float()
    new = torch.exp(step[..., None] * a) * state[rows].float() + entering
    state[rows] = new.to(state.dtype)
    read = (new * c[:, None].float()).sum(-1) + skip.float() * x.float()
    out.copy_(read * silu(z.float()))


def _steps(raw: torch.Tensor, positive: bool) -> torch.Tensor:
    return softplus(raw.float()) if positive else raw.float()


def contiguous(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a matrix product: its operand is copied into the order of its shape first."""
    return lambda handler, x, bias: stock(handler, x.contiguous(), bias)


def without_torchvision() -> None:
    """Let modules import torchvision's names for images, which they do not use for text."""
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():  # cached, so that transformers does not take the empty modules for torchvision
        return
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
    functional = "torchvision.transforms.v2.functional"
    sys.modules[functional] = module.functional = ModuleType(functional)  # type: ignore[attr-defined]


def without_media() -> None:
    """Stop a node that takes only text from asking how many tokens an image may have. vLLM's decode nodes would ask in
    any case: it has every KV consumer take embeddings of images."""
    from vllm.model_executor.models.qwen2_vl import Qwen2VLProcessingInfo

    Qwen2VLProcessingInfo.get_mm_max_tokens_per_item = lambda *_, **__: {}


def register() -> None:
    """The entry point of `vllm.general_plugins`. A second call in a process changes nothing."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba import mamba_mixer, mamba_mixer2

    if getattr(mamba_mixer2, STORE, None) is store_prefill_checkpoint:
        return
    setattr(mamba_mixer2, SCAN, with_states_in_between(getattr(mamba_mixer2, SCAN)))
    setattr(mamba_mixer2, STORE, store_prefill_checkpoint)
    without_torchvision()
    if TEXT_ONLY in sys.argv:
        without_media()
    mamba_mixer.selective_scan_fn = selective_scan
    mamba_mixer.selective_state_update = selective_state_update
    _custom_ops.onednn_mm = contiguous(_custom_ops.onednn_mm)
