"""How a node's prefix cache names the tokens of a prompt, out of the labels of its metrics. Pure.

The blocks of a cache are known by hashes: of the parent's hash, the tokens, and what else decides the block's content
(an adapter, an image, a salt). With the node's algorithm and its `NONE_HASH`, the parent of a prompt's first hash, the
same hashes can be computed anywhere.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Hashing:
    """The rule of one node.

    Attributes:
        algorithm: vLLM's name for it (`--prefix-caching-hash-algo`).
        unit: tokens for each hash.
        block_size: tokens in a block of the attention groups, a multiple of ``unit``.
        root: the parent of a prompt's first hash; b"" where that is not told.
        drops_unit: lookups give up the last unit of a hit (EAGLE and MTP).
        states: its model has state groups (mamba, GDN); None where that is not told.
    """

    algorithm: str
    unit: int
    block_size: int
    root: bytes
    drops_unit: bool = False
    states: bool | None = None


def connector_hashing(labels: Mapping[str, str]) -> Hashing | None:
    """From the labels of our connector's gauge; None where they make no sense."""
    unit, block_size = _number(labels, "unit"), _number(labels, "block_size")
    root = _digest(labels.get("root", ""))
    if not unit or not block_size or block_size % unit or root is None:
        return None
    drops_unit, states = labels.get("drops_unit") == "true", labels.get("states")
    return Hashing(
        labels.get("algorithm", ""), unit, block_size, root, drops_unit, None if states is None else states == "true"
    )


def stock_hashing(labels: Mapping[str, str]) -> Hashing | None:
    """From the labels of vLLM's own `vllm:cache_config_info`, for a node without our connector; None where they make no
    sense.

    vLLM does not tell the unit of a hybrid model without `--prefix-match-unit`: it is taken to be the attention block.
    Nor does it tell `NONE_HASH`, nor whether lookups give up a unit. Where the unit is wrong, no hash is ever found,
    which costs no more than having no index.
    """
    block_size = _number(labels, "effective_attention_block_size") or _number(labels, "block_size")
    unit = _number(labels, "prefix_match_unit") or block_size
    algorithm = labels.get("prefix_caching_hash_algo", "")
    if not algorithm or not block_size or block_size % unit:
        return None
    mode = labels.get("mamba_cache_mode")  # vLLM makes it "align" where there are mamba layers and prefix caching
    return Hashing(algorithm, unit, block_size, b"", states=None if mode is None else mode != "none")


def _number(labels: Mapping[str, str], name: str) -> int:
    """A positive decimal number; 0 for anything else."""
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _digest(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text) or None
    except ValueError:
        return None
