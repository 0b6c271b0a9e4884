"""How a node's prefix cache is set up, out of the labels of its metrics. Pure."""

import dataclasses
from collections.abc import Mapping

EVERY_BLOCK = 1
"""The retention interval of a node that keeps every state it can: vLLM's "None"."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSettings:
    """Settings of one node, as it publishes them; 0 where it does not.

    Attributes:
        enabled: prefix caching is on.
        state_mode: vLLM's `--mamba-cache-mode`: "align", or "none".
        match_unit: `--prefix-match-unit` as it was given, whether or not it has an effect.
        retention: `--prefix-cache-retention-interval`, tokens; 0 keeps the states that are kept in any case.
        prefill_step: `--max-num-batched-tokens`: the most that are computed in one step, of one prompt if it is alone.
        tp_size: `--tensor-parallel-size`.
        blocks: of the caches of all its ranks.
        max_num_seqs: `--max-num-seqs`: requests of one rank at a time.
    """

    enabled: bool = True
    state_mode: str = ""
    match_unit: int = 0
    retention: int = 0
    prefill_step: int = 0
    tp_size: int = 0
    blocks: int = 0
    max_num_seqs: int = 0


def read_cache_settings(ours: Mapping[str, str], stock: Mapping[str, str]) -> CacheSettings | None:
    """From the labels of our connector's info gauge and of vLLM's `vllm:cache_config_info`; None without either."""
    if not ours and not stock:
        return None
    retention = stock.get("prefix_cache_retention_interval", "")
    return CacheSettings(
        enabled="false" not in (ours.get("prefix_caching"), stock.get("enable_prefix_caching", "").lower()),
        state_mode=ours.get("mamba_cache_mode") or stock.get("mamba_cache_mode", ""),
        match_unit=_number(stock.get("prefix_match_unit", "")),
        retention=EVERY_BLOCK if retention == "None" else _number(retention),
        prefill_step=_number(ours.get("max_num_batched_tokens", "")),
        tp_size=_number(ours.get("tp_size", "")),
        blocks=_number(stock.get("num_gpu_blocks", "")),
        max_num_seqs=_number(ours.get("max_num_seqs", "")),
    )


def _number(text: str) -> int:
    """A positive decimal number; 0 for anything else."""
    return int(text) if text.isdecimal() and len(text) < 10 else 0
