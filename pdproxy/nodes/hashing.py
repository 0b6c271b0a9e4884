"""How a node's prefix cache names the tokens of a prompt, out of the labels of its metrics. Pure.

The blocks of a cache are known by hashes: of the parent's hash, the tokens, and what else decides the block's content
(an adapter, an image, a salt). With the node's algorithm and its `NONE_HASH`, the parent of a prompt's first hash, the
same hashes can be computed anywhere.
"""

import dataclasses
import hashlib
from collections.abc import Mapping

SHA256_CBOR = "sha256_cbor"
"""The algorithm that vLLM documents as reproducible outside of Python (`--prefix-caching-hash-algo`)."""
_STOCK_SEED = b"vllm-none-hash"
"""What vLLM (0.32, `v1/core/kv_cache_utils.py`) hashes to get `NONE_HASH`, where PYTHONHASHSEED is not set."""
_CBOR_TEXT = 0x60
"""CBOR's type of a text of up to 23 bytes, to which its length is added (RFC 8949, 3)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hashing:
    """The rule of one node.

    Attributes:
        algorithm: vLLM's name for it.
        unit: tokens for each hash.
        block_size: tokens in a block of the attention groups, a multiple of ``unit``.
        root: the parent of a prompt's first hash.
        drops_unit: lookups give up the last unit of a hit (EAGLE and MTP).
    """

    algorithm: str
    unit: int
    block_size: int
    root: bytes
    drops_unit: bool = False


def connector_hashing(labels: Mapping[str, str]) -> Hashing | None:
    """From the labels of our connector's gauge; None where they make no sense."""
    unit, block_size = _number(labels, "unit"), _number(labels, "block_size")
    root = _digest(labels.get("root", ""))
    if not unit or not block_size or block_size % unit or root is None:
        return None
    return Hashing(labels.get("algorithm", ""), unit, block_size, root, labels.get("drops_unit") == "true")


def stock_hashing(labels: Mapping[str, str]) -> Hashing | None:
    """From the labels of vLLM's own `vllm:cache_config_info`, for a node without our connector; None where they make no
    sense, or name an algorithm whose root is not known from here.

    vLLM does not tell the unit of a hybrid model without `--prefix-match-unit`: it is taken to be the attention block.
    Nor does it tell `NONE_HASH`: PYTHONHASHSEED is taken not to be set. Where either is wrong, no hash is ever found,
    which costs no more than having no index. Nor whether it speculates.
    """
    block_size = _number(labels, "effective_attention_block_size") or _number(labels, "block_size")
    unit = _number(labels, "prefix_match_unit") or block_size
    if labels.get("prefix_caching_hash_algo") != SHA256_CBOR or not block_size or block_size % unit:
        return None
    seed = bytes((_CBOR_TEXT + len(_STOCK_SEED),)) + _STOCK_SEED
    return Hashing(SHA256_CBOR, unit, block_size, hashlib.sha256(seed).digest())


def _number(labels: Mapping[str, str], name: str) -> int:
    """A positive decimal number; 0 for anything else."""
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _digest(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text) or None
    except ValueError:
        return None
