"""Where prompts can resume from a node's prefix cache. Pure.

Read in vLLM 0.32 (`v1/core/single_type_kv_cache_manager.py`, `v1/core/sched/scheduler.py`): attention is cached block
by block, and a request goes on after any of them. A model with states (mamba, GDN) goes on only where a state was kept,
and vLLM keeps few: the one at the last boundary before a prompt's end, and, once a prompt is seen to share a prefix
with an earlier one, the one at the last whole block of what they share. `--prefix-cache-retention-interval` keeps more,
but a state exists only where a step of the prefill ends.
"""

import dataclasses
import math
from collections.abc import Iterator

from pdproxy.nodes.cache_settings import CacheSettings
from pdproxy.nodes.hashing import Hashing
from pdproxy.nodes.node import Node


@dataclasses.dataclass(frozen=True, slots=True)
class Reuse:
    """Where the prefix cache of one data-parallel rank can be hit; all in tokens.

    Attributes:
        states: the model keeps states, so that a prompt can be resumed only where one was kept.
        block: of an attention block.
        unit: hits of a whole earlier prompt end at multiples of it; ``block`` where there is no smaller one.
        drops: what EAGLE and MTP give up at the end of each hit; 0 without them.
        every: states are kept at multiples of it, where the retention interval keeps more than vLLM does in any case;
            else 0.
    """

    states: bool
    block: int
    unit: int
    drops: int = 0
    every: int = 0

    @property
    def shortest_prompt(self) -> int:
        """The shortest prompt after which the next one of its conversation has a hit."""
        if self.drops:
            return 2 * self.unit
        return self.unit + 1 if self.states else self.unit

    @property
    def shortest_shared(self) -> int:
        """The shortest prefix of different prompts that can be hit, once a state is kept at its end."""
        return self.block + (self.block if self.drops else 0)


def reuse(node: Node) -> Reuse | None:
    """How a node reuses its cache; None where it does not tell its block size, or where nothing is ever hit."""
    settings, hashing = node.cache, node.hashing
    if settings is None or hashing is None or not settings.enabled:
        return None
    states, block = bool(hashing.states), hashing.block_size
    unit = _unit(node, hashing) if states else block
    drops = unit if hashing.drops_unit else 0
    return Reuse(states, block, unit, drops, _spacing(settings, block) if states else 0)


def _unit(node: Node, hashing: Hashing) -> int:
    """Our connector says whether a unit that was set has an effect; of another node it is taken to have one."""
    return (node.prefix_match_unit or hashing.block_size) if node.fingerprint else hashing.unit


def block_sizes(node: Node) -> frozenset[int]:
    """Tokens in a block of each of the node's cache groups, without those of states that are kept once."""
    return frozenset(int(size) for size in _runs(node.fingerprint.get("block_sizes", "")) if size.isdecimal())


def state_groups(node: Node) -> int:
    """How many cache groups hold states: so many blocks one state takes."""
    return sum(kind == "Mamba" for kind in _runs(node.fingerprint.get("cache_groups", "")))


def _spacing(settings: CacheSettings, block: int) -> int:
    """Where a full step's end and the retention interval meet. A step ends at a whole block."""
    if not settings.retention:
        return 0
    interval = max(settings.retention, block)
    return math.lcm(interval, max(settings.prefill_step // block, 1) * block)


def _runs(text: str) -> Iterator[str]:
    """`a*2,b` as a, a, b: the fingerprint's way to list groups."""
    for run in filter(None, text.split(",")):
        value, _, times = run.partition("*")
        yield from [value] * (int(times) if times.isdecimal() and len(times) < 5 else 1)
