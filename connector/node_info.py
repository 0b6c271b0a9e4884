"""What a node tells a preflight about itself, as labels of `pdproxy_connector_info`."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def node_info(vllm_config: VllmConfig, *, lease_seconds: float, signed: bool) -> dict[str, str]:
    """Label values for the info gauge, each a string.

    Read in the API server's process, where vLLM has by then copied the engine's final block sizes into the config
    (`vllm/v1/engine/core_client.py`, "Sync block_size"). Two nodes can be paired when `model`, `block_size`,
    `mamba_*`, `*dtype`, `ssm_layout` and both versions agree and their roles differ.
    """
    from vllm import __version__ as vllm_version

    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    return {
        "role": str(transfer.kv_role),
        "model": str(vllm_config.model_config.model),
        "block_size": str(cache.block_size),
        "mamba_block_size": str(cache.mamba_block_size),
        "mamba_cache_mode": str(cache.mamba_cache_mode),
        "prefix_caching": str(bool(cache.enable_prefix_caching)).lower(),
        "kv_cache_dtype": str(cache.cache_dtype),
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "tp_size": str(vllm_config.parallel_config.tensor_parallel_size),
        "ssm_layout": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", "default"),
        "failure_policy": str(transfer.kv_load_failure_policy),
        "lease_seconds": f"{lease_seconds:g}",
        "signed": str(signed).lower(),
        "connector_version": connector_version(),
        "vllm_version": str(vllm_version),
    }


def connector_version() -> str:
    """The installed distribution's version; `unknown` where the connector was put on the path by hand."""
    try:
        return version("pdproxy")
    except PackageNotFoundError:
        return "unknown"
