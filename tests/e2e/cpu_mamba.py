"""What vLLM 0.32's CPU build lacks to run Mamba-2 layers with prefix caching, in plain torch: a vLLM general plugin.

It has kernels of its own for the convolution, the scan and one step of decoding. It lacks the states in between chunks
(`return_intermediate_states` is ignored), and the Triton kernel that keeps one of them, `store_prefill_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SCAN, STORE = "mamba_chunk_scan_combined_varlen", "store_prefill_checkpoint"


def with_states_in_between(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The scan; where the states in between are asked for it is run once for each chunk."""

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
    """As the Triton kernel of that name."""
    rows = checkpoint.checkpoint_offsets.tolist(), checkpoint.state_indices.tolist(), chunk_idx.tolist()
    for row, (offset, block, chunk) in enumerate(zip(*rows, strict=False)):
        if offset > 0:
            end = int(query_start_loc[row]) + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunk]


def register() -> None:
    """The entry point of `vllm.general_plugins`. A second call in a process changes nothing."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    if getattr(mamba_mixer2, STORE, None) is not store_prefill_checkpoint:
        setattr(mamba_mixer2, SCAN, with_states_in_between(getattr(mamba_mixer2, SCAN)))
        setattr(mamba_mixer2, STORE, store_prefill_checkpoint)
