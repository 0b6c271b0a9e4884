"""For operators: what a node's prefix cache can do, what in its settings makes hits rare, and what to change. Pure.

`pdproxy check` and `GET /nodes` show it. Nothing of it keeps a node out.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from pdproxy.nodes.cache_reuse import Reuse, block_sizes, reuse, state_groups
from pdproxy.nodes.node import Binding, Node, Role

USUAL_UNIT = 16
"""Tokens: divides every block size that vLLM chooses on a GPU."""
SPARE_BLOCKS = 1.25
"""Blocks for each sequence of `--max-num-seqs` of a model with states: with fewer a node is near the edge."""
EVENTS_FLAG = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}\''
)


class EventsSeen(enum.StrEnum):
    """How much is known of a node's KV events."""

    READ = "read"
    """They can be read."""
    OFF = "off"
    """The node publishes none."""
    UNREACHABLE = "unreachable"
    """The node publishes them where the proxy gets no connection."""
    UNKNOWN = "unknown"
    """Nobody asked."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheReport:
    """Sentences about one node's prefix cache. ``advice``: what makes hits rare, and what to change."""

    facts: tuple[str, ...]
    advice: tuple[str, ...]


def first_of_cohorts(nodes: Iterable[Node]) -> Mapping[str, Node]:
    """By cohort, the node to which the others of it are compared: the first that tells how it hashes."""
    first: dict[str, Node] = {}
    for node in nodes:
        if node.cohort and node.hashing is not None:
            first.setdefault(node.cohort, node)
    return first


def cache_report(
    node: Node, first: Mapping[str, Node] = MappingProxyType({}), events: EventsSeen = EventsSeen.UNKNOWN
) -> CacheReport:
    """The report on a node's cache. ``first``: as `first_of_cohorts`."""
    found = reuse(node)
    rules = _advice(node) if found is None else _advice_on(node, found)
    seen = () if found is None else (*_events(node, events), *_unlike(node, first.get(node.cohort)))
    return CacheReport(() if found is None else tuple(_facts(node, found, events)), (*rules, *seen))


def _facts(node: Node, found: Reuse, events: EventsSeen) -> Iterator[str]:
    degree = f" at --tensor-parallel-size {node.cache.tp_size}" if node.cache and node.cache.tp_size else ""
    yield f"blocks of {found.block:,} tokens{degree}, hits end at multiples of {found.unit:,}"
    if found.states:
        yield f"the shortest prompt whose next turn has a hit: {found.shortest_prompt:,} tokens"
        yield f"the shortest prefix that different prompts can share: {found.shortest_shared:,} tokens, {_when(found)}"
    else:
        yield f"the shortest prefix that can be hit: {found.shortest_prompt:,} tokens"
    if node.ranks > 1:
        yield f"{node.ranks} data-parallel ranks, each with a cache of its own"
    if kept := _prompts_kept(node):
        yield f"room for {kept:,} prompts of {node.max_model_len:,} tokens, in use or kept"
    if events is EventsSeen.READ:
        yield "its KV events can be read"


def _when(found: Reuse) -> str:
    """From which prompt on a shared prefix is hit, and how much of it."""
    later = "from the third prompt on, in whole blocks"
    return f"{later}; from the second on in multiples of {found.every:,}" if found.every else later


def _prompts_kept(node: Node) -> int:
    """Prompts of the greatest length that fit into the caches of all ranks, each with one state."""
    capacity = node.capacity
    if capacity is None or not node.max_model_len or not capacity.tokens:
        return 0
    part = node.max_model_len / capacity.tokens + (1 / capacity.sequences if capacity.sequences else 0.0)
    return int(1 / part)


def _advice(node: Node) -> Iterator[str]:
    """Advice for a node that has no hits, or does not tell."""
    if node.cache is not None and not node.cache.enabled:
        yield (
            "prefix caching is off, so nothing is ever hit: start it, and its partners, with --enable-prefix-caching. A"
            " hybrid model's states then take blocks of the cache, too"
        )
    else:
        yield (
            "it does not tell how its prefix cache works: pdproxy's connector does, with its first step; without that,"
            " vLLM's own metrics tell a part, unless --disable-log-stats is given"
        )


def _advice_on(node: Node, found: Reuse) -> Iterator[str]:
    """Advice for a node whose cache works."""
    yield from _lost_states(node, found)
    yield from _unit(node, found)
    yield from _too_short(node, found)
    yield from _too_small(node)
    yield from _few_blocks(node, found)
    yield from _retention(node, found)


def _lost_states(node: Node, found: Reuse) -> Iterator[str]:
    settings, sizes = node.cache, block_sizes(node)
    if found.states and settings is not None and settings.state_mode in ("none", "None"):
        yield "--mamba-cache-mode none keeps no states, so nothing is ever hit: leave it out (vLLM then takes align)"
    elif found.states and node.block_size and sizes and node.block_size not in sizes:
        yield (
            f"its scheduler counts blocks of {node.block_size:,} tokens, its cache has {max(sizes):,}: prompts that end"
            f" more than {node.block_size:,} tokens into a block leave no state, and are not hit. vLLM 0.32 does so on"
            f" CPUs: start it with --block-size {max(sizes)}"
        )


def _unit(node: Node, found: Reuse) -> Iterator[str]:
    """About `--prefix-match-unit`, which is for models with states alone."""
    if not found.states or found.unit < found.block:
        return
    if node.fingerprint and node.cache is not None and 0 < node.cache.match_unit < found.block:
        yield (
            f"--prefix-match-unit {node.cache.match_unit} has no effect: another cache group is matched by whole blocks"
            ' only, or the mamba cache mode is not align. Its log says why ("has no effect on hand-overs")'
        )
        return
    lost = (
        "it cannot resume after a hand-over: what comes without a ticket is computed from its first token"
        if Role.PREFILL not in node.roles
        else f"hits end at whole blocks: of each, up to {found.block:,} tokens are computed again, and prompts below"
        f" {found.shortest_prompt:,} tokens leave nothing to be hit"
    )
    unit = math.gcd(USUAL_UNIT, found.block, *block_sizes(node))
    yield (
        f"{lost}. --prefix-match-unit {unit} on prefill and decode nodes alike mends it. It costs hashing (3.7 ms for a"
        f" prompt of 32,768 tokens), and up to {2 * unit if found.drops else unit} tokens that the decode node computes"
    )


def _too_short(node: Node, found: Reuse) -> Iterator[str]:
    if 0 < node.max_model_len <= found.shortest_prompt:
        yield (
            f"--max-model-len {node.max_model_len} allows no prompt that could be hit: that takes"
            f" {found.shortest_prompt + 1:,} tokens. Allow longer ones{_smaller(found)}"
        )


def _smaller(found: Reuse) -> str:
    return ", or set --prefix-match-unit" if found.states and found.unit == found.block else ""


def _too_small(node: Node) -> Iterator[str]:
    capacity = node.capacity
    if capacity is not None and capacity.longest < 2 * node.ranks:
        first = "states" if capacity.binding is Binding.STATE else "attention blocks"
        each = " of each rank" if node.ranks > 1 else ""
        yield (
            f"the cache{each} does not hold two prompts of {node.max_model_len:,} tokens ({first} run out first): what"
            " a long one leaves is evicted by the next. Give it more memory (--gpu-memory-utilization), a smaller"
            " --kv-cache-dtype, or a shorter --max-model-len"
        )


def _few_blocks(node: Node, found: Reuse) -> Iterator[str]:
    """About the rule by which vLLM ends a node of a model with states at start (0.32 and 0.33, full CUDA graphs)."""
    settings = node.cache
    if settings is None or not found.states or not settings.max_num_seqs or not settings.blocks:
        return
    blocks = settings.blocks // node.ranks
    if blocks < settings.max_num_seqs * SPARE_BLOCKS:
        yield (
            f"it has {blocks:,} blocks for --max-num-seqs {settings.max_num_seqs}: with little less free memory it"
            " ends at its next start, for vLLM wants a block for each."
            f" --max-num-seqs {int(blocks / SPARE_BLOCKS)} leaves room"
        )


def _retention(node: Node, found: Reuse) -> Iterator[str]:
    settings = node.cache
    if settings is None or not found.every or found.every <= max(settings.retention, found.block):
        return
    interval = max(settings.retention, found.block)
    yield (
        f"--prefix-cache-retention-interval is to keep a state each {interval:,} tokens, but there is one only where a"
        f" step of the prefill ends: for a lone prompt each {found.every:,} tokens. --max-num-batched-tokens {interval}"
        f" makes all steps so short, and prefills slower; as it is, an interval of {found.every} does the same. Blocks"
        f" that each state takes: {state_groups(node) or 'some'}"
    )


def _events(node: Node, events: EventsSeen) -> Iterator[str]:
    if events is EventsSeen.OFF:
        yield (
            f"it publishes no KV events, and plans can only estimate what it has cached: start it with {EVENTS_FLAG},"
            " its ports open for the proxy alone"
        )
    if events is EventsSeen.UNREACHABLE:
        yield (
            "the proxy gets no connection to its KV events, and plans can only estimate what it has cached: let the"
            " proxy reach the ports that its /kv_event_sources names, or give it fixed ones instead of tcp://*:0"
        )
    algorithm = "" if node.hashing is None else node.hashing.algorithm
    if algorithm and not algorithm.startswith("sha256"):
        yield (
            f"the proxy cannot hash prompts by {algorithm}, and plans can only estimate what it has cached: start it"
            " with --prefix-caching-hash-algo sha256_cbor"
        )


def _unlike(node: Node, other: Node | None) -> Iterator[str]:
    """Where the same tokens have other names than on a node of the same cohort."""
    mine, theirs = node.hashing, None if other is None else other.hashing
    if other is None or mine is None or theirs is None or b"" in (mine.root, theirs.root):
        return
    if (mine.algorithm, mine.root) != (theirs.algorithm, theirs.root):
        yield (
            f"it hashes prompts otherwise than {other.name}: nothing is lost by it, but the proxy hashes each prompt"
            " once for every way. Give all the same --prefix-caching-hash-algo, and PYTHONHASHSEED to all or to none"
        )
