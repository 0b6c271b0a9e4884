"""Which prompts hit a prefix that they share, by the settings of a hybrid model's prefix cache.

    python -m deploy.bench.retention [--block 256] [--shared 2900] [--rest 300]

It asks vLLM's own scheduler, without a model: three prompts of which the first ``shared`` tokens are the same, one
after the other. For each combination of `--prefix-match-unit`, `--prefix-cache-retention-interval` and the longest step
of a prefill it tells how many tokens each of them hits, how many the next turn of the first one does, and how many
states are kept after the three. A state takes one block of each state group. In a cache of its own: what a prompt hits
after one that is exactly the shared part.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec

from tests.connector.harness import Node, make_node

NO_INTERVAL = 0
"""The value of `--prefix-cache-retention-interval` by default in vLLM."""
ANSWER = 4


@dataclass(frozen=True)
class Setting:
    """How a node is set; tokens. ``unit`` 0: none."""

    block: int
    unit: int
    interval: int
    step: int


@dataclass(frozen=True)
class Hits:
    """Tokens that were hit; states kept after the third prompt."""

    prompts: tuple[int, ...]
    turn: int
    planted: int
    states: int


def groups(block: int) -> tuple[KVCacheSpec, KVCacheSpec]:
    """Attention, and states with pages of the same size."""
    attention = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
    state = MambaSpec(block_size=block, shapes=((block * 32,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    return attention, state


def node_of(setting: Setting) -> Node:
    """A prefill node with room for everything."""
    node = make_node(groups=groups(setting.block), unit=setting.unit or None, num_blocks=2000)
    scheduler = node.scheduler
    scheduler.cache_config.block_size = setting.block
    scheduler.max_num_scheduled_tokens = setting.step
    scheduler.kv_cache_manager.coordinator.retention_interval = setting.interval
    return node


def compute(node: Node, name: str, prompt: Sequence[int]) -> int:
    """Compute a prompt: how many of its tokens were hit."""
    request = node.add(name, prompt, max_tokens=ANSWER)
    node.step()  # it is scheduled at once
    hit = int(request.num_computed_tokens) - node.scheduled[-1][name]
    node.run_out(name, steps=200)
    return hit


def measure(setting: Setting, shared: int, rest: int) -> Hits:
    """Three prompts that begin alike, then the next turn of the first."""
    node = node_of(setting)
    prefix = [10 + at % 800 for at in range(shared)]
    prompts = [[*prefix, *[900 + at] * rest] for at in range(3)]
    hits = tuple(compute(node, f"p{at}", prompt) for at, prompt in enumerate(prompts))
    states = kept_states(node)
    turn = compute(node, "turn", [*prompts[0], *[7] * ANSWER, *[5] * rest])
    other = node_of(setting)
    compute(other, "prefix", prefix)
    return Hits(hits, turn, compute(other, "p0", prompts[0]), states)


def kept_states(node: Node) -> int:
    """Blocks of the state group that the prefix cache can find."""
    keys = [block.block_hash for block in node.scheduler.kv_cache_manager.block_pool.blocks]
    return sum(get_group_id(key) == 1 for key in keys if key is not None)


def table(block: int, shared: int, rest: int) -> Iterator[str]:
    """Markdown."""
    yield "| unit | interval | longest step | 1st prompt | 2nd | 3rd | 1st, next turn | after the prefix | states |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for unit, interval, step in itertools.product((0, 16), (NO_INTERVAL, block, 4 * block), (8192, 2048, 2 * block)):
        found = measure(Setting(block, unit, interval, step), shared, rest)
        told = (unit or "none", interval, step, *found.prompts, found.turn, found.planted, found.states)
        yield f"| {' | '.join(f'{each:,}' if isinstance(each, int) else each for each in told)} |"


def main(words: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m deploy.bench.retention")
    for name, default in (("block", 256), ("shared", 2900), ("rest", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(words)
    for line in table(given.block, given.shared, given.rest):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
