"""The model's KV-cache groups, as far as children that store prefixes must fit them."""

import logging
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import MambaSpec

from connector.multi.fitness import Blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.pdproxy.multi")


def stored_blocks(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", hash_block: int) -> Blocks:
    """The groups that children store; a state of which only the running one exists is not cut into blocks."""
    specs = {number: group.kv_cache_spec for number, group in enumerate(kv_cache_config.kv_cache_groups)}
    whole = {
        number for number, spec in specs.items() if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none"
    }
    if whole:
        log.warning(
            "Cache groups %s hold one running state a request (mamba_cache_mode none): tiers cannot keep prefixes of "
            "this model; --enable-prefix-caching lets them.",
            sorted(whole),
        )
    sizes = {number: spec.block_size for number, spec in specs.items() if number not in whole}
    return Blocks(sizes, hash_block, vllm_config.model_config.max_model_len)
