"""A general plugin of vLLM: Kimi-Linear on vLLM's CPU build, with prefix caching.

Projections, convolution, experts, caches and their layouts are vLLM's own. Plain torch replaces what the build lacks:

    KDA   the three Triton functions that change or read the recurrent state: the chunked scan of a prompt, one step
          of decoding, and gathering the states that prompts go on from
    MLA   Kimi's own attention over the cache of latents, which consists of CUDA kernels. For other models with MLA
          the CPU platform has a reference without prefix caching and chunked prompts, or, on a CPU with AMX, a
          backend with both. Here the platform plans for that backend on any CPU; only its metadata is used
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import softplus

MODEL, MODULE = "KimiLinearForCausalLM", "tests.e2e.cpu_kimi_model"
EPSILON = 1e-6
"""Added under the root of the length by which keys and queries are divided."""


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803 (vLLM's name)
    g_bias: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan prompts, one after another: (1, tokens, heads, dim) each. Returns the outputs and the last states."""
    out, states = torch.empty_like(v), initial_state.float().clone()
    decay, beta = _gates(raw_g[0], raw_beta[0], A_log, g_bias)
    for row, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        for at in range(first, end):
            out[0, at] = _step(states[row], q[0, at], k[0, at], v[0, at], decay[at], beta[at])
    return out, states.to(initial_state.dtype)


def decode(
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor,
    state_indices: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of several requests; the states are changed in place."""
    heads, width = initial_state.shape[1:3]
    q, k, v = mixed_qkv.reshape(-1, 3, heads, width).unbind(1)
    out = torch.empty_like(v)
    decay, beta = _gates(raw_g[0], raw_beta[0], A_log, dt_bias)
    for row, block in enumerate(state_indices.tolist()):
        state = initial_state[block].float()
        out[row] = _step(state, q[row], k[row], v[row], decay[row], beta[row])
        initial_state[block] = state.to(initial_state.dtype)
    return out[None], initial_state


def _gates(
    raw_g: torch.Tensor, raw_beta: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decay of each channel of a state, and how much of a value enters it: one row a token."""
    softened = softplus(raw_g.float() + bias.view(raw_g.shape[1:]))
    return torch.exp(-a_log.exp()[:, None] * softened), raw_beta.float().sigmoid()


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One token: changes the state, (heads, values, keys), in place, and reads it."""
    query, key = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    state *= decay[:, None]
    entering = (v.float() - (state @ key[..., None])[..., 0]) * beta[:, None]
    state += entering[..., None] * key[:, None]
    return (state @ query[..., None])[..., 0].to(v.dtype)


def _unit(vector: torch.Tensor) -> torch.Tensor:
    return vector.float() * torch.rsqrt(vector.float().square().sum(-1, keepdim=True) + EPSILON)


def initial_states(state: torch.Tensor, indices: torch.Tensor, has_initial_state: torch.Tensor) -> torch.Tensor:
    """The states that prompts go on from; zeros for a prompt from its start."""
    rows = state[indices.long()]
    return rows * has_initial_state.view(-1, *(1 for _ in state.shape[1:])).to(rows.dtype)


def attention(
    self: Any,
    positions: torch.Tensor,
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    attn_out: torch.Tensor,
) -> None:
    """Kimi's attention, without positions: writes the tokens' latents and attends to all of a request."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    if context.attn_metadata is None:
        attn_out.zero_()
        return
    metadata: Any = context.attn_metadata[self.layer_name]
    count, cache = metadata.num_actual_tokens, self.kv_cache
    slots = context.slot_mapping[self.layer_name][:count].long()
    cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.cat((kv_c_normed, k_pe[:, 0]), -1)[:count]
    starts = metadata.query_start_loc.tolist()
    for (first, end), (blocks, length) in zip(pairwise(starts), _requests(metadata), strict=True):
        latents = cache[blocks[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]
        attn_out[first:end] = _attended(self, q[first:end], latents)


def _requests(metadata: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """The blocks of each request of a step, and its tokens up to the end of the step; decoding requests come first."""
    if metadata.decode is not None:
        yield from zip(metadata.decode.block_table, metadata.decode.seq_lens.tolist(), strict=True)
    if metadata.prefill is not None:
        yield from zip(metadata.prefill.block_table, metadata.prefill.cpu_seq_lens.tolist(), strict=True)


def _attended(layer: Any, q: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """One request: the queries of its last tokens over all of its latents."""
    content, place = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
    query = torch.cat((torch.einsum("tnp,npl->tnl", content, layer.W_UK_T), place), -1)
    scores = torch.einsum("tnl,sl->nts", query, latents).float() * layer.scale
    tokens, length = q.shape[0], latents.shape[0]
    later = torch.ones(tokens, length, dtype=torch.bool).triu(length - tokens + 1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1).to(latents.dtype)
    read = torch.einsum("nts,sl->ntl", weights, latents[:, : layer.kv_lora_rank])
    return torch.einsum("ntl,nlv->tnv", read, layer.W_UV).flatten(1)


@contextmanager
def amx() -> Iterator[None]:
    """Make the platform report AMX."""
    stock = torch.cpu._is_amx_tile_supported
    torch.cpu._is_amx_tile_supported = lambda: True
    try:
        yield
    finally:
        torch.cpu._is_amx_tile_supported = stock


def as_with_amx(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of the platform: it answers as on a CPU with AMX."""

    def answer(cls: type, *arguments: Any, **more: Any) -> Any:
        with amx():
            return stock(cls, *arguments, **more)

    return answer


def register() -> None:
    """The entry point of `vllm.general_plugins`. A second call in a process changes nothing.

    The model is imported when it is loaded, not here. Its import loads numba, and vLLM's CPU worker, which loads
    plugins first, fails where numba is loaded (`triton_utils/dispatcher.py` calls `vars` on all that modules hold).
    """
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms.cpu import CpuPlatform

    if MODEL in ModelRegistry.models and ModelRegistry.models[MODEL].module_name == MODULE:
        return
    os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"  # it would need a GPU's compiler
    ModelRegistry.register_model(MODEL, f"{MODULE}:{MODEL}")
    for name in ("check_and_update_config", "get_attn_backend_cls"):
        setattr(CpuPlatform, name, classmethod(as_with_amx(getattr(CpuPlatform, name).__func__)))
