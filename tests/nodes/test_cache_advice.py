"""Advice to operators about a node's prefix cache."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from pdproxy.nodes.cache_advice import CacheReport, EventsSeen, cache_report, first_of_cohorts
from pdproxy.nodes.cache_settings import EVERY_BLOCK, CacheSettings, read_cache_settings
from pdproxy.nodes.hashing import Hashing
from pdproxy.nodes.node import Binding, Capacity, Node, Role

ROOT = bytes(32)
HASHING = Hashing("sha256_cbor", 16, 1056, ROOT, states=True)
PARTS = {"block_sizes": "1056*4", "cache_groups": "Mamba*3,FullAttention"}
SETTINGS = CacheSettings(state_mode="align", match_unit=16, prefill_step=8192, tp_size=2)
ROOMY = Capacity(1_056_000, 333, 30, Binding.ATTENTION)
HYBRID = Node(
    "p1", "http://p1", (Role.PREFILL,), "m", cohort="c", capacity=ROOMY, fingerprint=PARTS, block_size=1056,
    max_model_len=32768, prefix_match_unit=16, hashing=HASHING, cache=SETTINGS,
)  # fmt: skip
DENSE = dataclasses.replace(
    HYBRID, fingerprint={"block_sizes": "16"}, block_size=16, prefix_match_unit=0,
    hashing=Hashing("sha256", 16, 16, ROOT), cache=CacheSettings(state_mode="none", tp_size=2),
)  # fmt: skip


def changed(node: Node, cache: Mapping[str, Any] | None = None, **fields: Any) -> Node:
    """The node with other fields, and other settings of its cache."""
    assert node.cache is not None
    return dataclasses.replace(node, cache=dataclasses.replace(node.cache, **(cache or {})), **fields)


WITHOUT_UNIT = changed(HYBRID, {"match_unit": 0}, prefix_match_unit=0, hashing=dataclasses.replace(HASHING, unit=1056))


@pytest.mark.parametrize("node", [HYBRID, DENSE, changed(HYBRID, roles=(Role.DECODE,))])
def test_a_good_node_gets_no_advice(node: Node) -> None:
    assert cache_report(node, first_of_cohorts([node]), EventsSeen.READ).advice == ()


def test_what_a_hybrid_node_can_reuse() -> None:
    assert cache_report(HYBRID, events=EventsSeen.READ).facts == (
        "blocks of 1,056 tokens at --tensor-parallel-size 2, hits end at multiples of 16",
        "the shortest prompt whose next turn has a hit: 17 tokens",
        "the shortest prefix that different prompts can share: 1,056 tokens, from the third prompt on, in whole blocks",
        "room for 29 prompts of 32,768 tokens, in use or kept",
        "its KV events can be read",
    )


def test_what_a_dense_node_can_reuse() -> None:
    node = dataclasses.replace(DENSE, capacity=None, ranks=4)
    assert cache_report(node).facts == (
        "blocks of 16 tokens at --tensor-parallel-size 2, hits end at multiples of 16",
        "the shortest prefix that can be hit: 16 tokens",
        "4 data-parallel ranks, each with a cache of its own",
    )


def test_a_multi_token_model_gives_up_the_last_unit() -> None:
    drafts = dataclasses.replace(HYBRID, hashing=dataclasses.replace(HASHING, drops_unit=True))
    assert cache_report(drafts).facts[1:3] == (
        "the shortest prompt whose next turn has a hit: 32 tokens",
        "the shortest prefix that different prompts can share: 2,112 tokens, from the third prompt on, in whole blocks",
    )
    dense = dataclasses.replace(DENSE, hashing=Hashing("sha256", 16, 16, ROOT, drops_unit=True))
    assert cache_report(dense).facts[1] == "the shortest prefix that can be hit: 32 tokens"


def test_states_that_are_kept_more_often_are_shared_earlier() -> None:
    kept = changed(HYBRID, {"retention": 8448, "prefill_step": 9000})
    assert cache_report(kept).facts[2].endswith("; from the second on in multiples of 8,448")
    assert cache_report(kept).advice == ()


@pytest.mark.parametrize(
    ("node", "events", "said"),
    [
        (changed(HYBRID, {"enabled": False}), EventsSeen.OFF, ("nothing is ever hit", "--enable-prefix-caching")),
        (dataclasses.replace(HYBRID, cache=None, hashing=None), EventsSeen.UNKNOWN, ("does not tell", "connector")),
        (changed(HYBRID, {"state_mode": "none"}), EventsSeen.READ, ("nothing is ever hit", "--mamba-cache-mode none")),
        (
            changed(HYBRID, block_size=128),
            EventsSeen.READ,
            ("blocks of 128 tokens, its cache has 1,056", "start it with --block-size 1056"),
        ),
        (WITHOUT_UNIT, EventsSeen.READ, ("prompts below 1,057 tokens", "--prefix-match-unit 16", "It costs hashing")),
        (
            changed(WITHOUT_UNIT, roles=(Role.DECODE,)),
            EventsSeen.READ,
            ("cannot resume after a hand-over", "--prefix-match-unit 16", "up to 16 tokens that the decode node"),
        ),
        (changed(WITHOUT_UNIT, {"match_unit": 16}), EventsSeen.READ, ("--prefix-match-unit 16 has no effect",)),
        (
            changed(HYBRID, max_model_len=17),
            EventsSeen.READ,
            ("--max-model-len 17 allows no prompt that could be hit: that takes 18 tokens",),
        ),
        (
            dataclasses.replace(HYBRID, ranks=2, capacity=Capacity(80_000, 4, 3, Binding.STATE)),
            EventsSeen.READ,
            ("the cache of each rank does not hold two prompts of 32,768 tokens (states run out first)",),
        ),
        (
            changed(HYBRID, {"retention": 2112}),
            EventsSeen.READ,
            (
                "a state each 2,112 tokens, but there is one only where a step of the prefill ends",
                "for a lone prompt each 14,784 tokens",
                "--max-num-batched-tokens 2112",
                "an interval of 14784",
                "Blocks that each state takes: 3",
            ),
        ),
        (
            changed(HYBRID, {"blocks": 319, "max_num_seqs": 256}),
            EventsSeen.READ,
            ("it has 319 blocks for --max-num-seqs 256: with little less free", "--max-num-seqs 255 leaves room"),
        ),
        (changed(HYBRID, {"retention": EVERY_BLOCK}), EventsSeen.READ, ("each 1,056 tokens, but", "each 7,392 tokens")),
        (HYBRID, EventsSeen.OFF, ("publishes no KV events", "--kv-events-config '{")),
        (HYBRID, EventsSeen.UNREACHABLE, ("no connection to its KV events", "/kv_event_sources")),
        (
            dataclasses.replace(HYBRID, hashing=dataclasses.replace(HASHING, algorithm="xxhash", root=b"")),
            EventsSeen.READ,
            ("cannot hash prompts by xxhash", "--prefix-caching-hash-algo sha256_cbor"),
        ),
    ],
)
def test_each_setting_that_makes_hits_rare_is_told_with_what_to_change(
    node: Node, events: EventsSeen, said: tuple[str, ...]
) -> None:
    (advice,) = cache_report(node, events=events).advice
    for part in said:
        assert part in advice


def test_a_unit_divides_all_blocks() -> None:
    odd = dataclasses.replace(WITHOUT_UNIT, fingerprint=PARTS | {"block_sizes": "1048*4"}, block_size=1048)
    (advice,) = cache_report(odd).advice
    assert "--prefix-match-unit 8 on" in advice


@pytest.mark.parametrize(("root", "algorithm"), [(bytes(31) + b"x", "sha256_cbor"), (ROOT, "sha256")])
def test_nodes_of_a_cohort_that_hash_otherwise_are_named(root: bytes, algorithm: str) -> None:
    other = dataclasses.replace(HYBRID, name="d1", hashing=dataclasses.replace(HASHING, algorithm=algorithm, root=root))
    (advice,) = cache_report(other, first_of_cohorts([HYBRID, other])).advice
    assert advice.startswith("it hashes prompts otherwise than p1")
    assert cache_report(HYBRID, first_of_cohorts([HYBRID, other])).advice == ()
    apart = dataclasses.replace(other, cohort="another")
    assert cache_report(apart, first_of_cohorts([HYBRID, apart])).advice == ()


def test_a_node_without_our_connector_is_judged_by_vllms_own_metrics() -> None:
    stock = dataclasses.replace(
        HYBRID, fingerprint={}, prefix_match_unit=0, hashing=Hashing("sha256", 16, 1056, b"", states=True)
    )
    assert cache_report(stock, first_of_cohorts([HYBRID])).advice == ()
    assert cache_report(stock).facts[1] == "the shortest prompt whose next turn has a hit: 17 tokens"


@pytest.mark.parametrize(
    ("ours", "stock", "read"),
    [
        ({}, {}, None),
        (
            {
                "prefix_caching": "true",
                "mamba_cache_mode": "align",
                "tp_size": "2",
                "max_num_batched_tokens": "8192",
                "max_num_seqs": "256",
            },
            {
                "prefix_match_unit": "16",
                "prefix_cache_retention_interval": "512",
                "mamba_cache_mode": "other",
                "num_gpu_blocks": "1601",
            },
            CacheSettings(True, "align", 16, 512, 8192, 2, 1601, 256),
        ),
        (
            {"max_num_batched_tokens": "8192"},
            {"prefix_cache_retention_interval": "None", "prefix_match_unit": "None"},
            CacheSettings(retention=EVERY_BLOCK, prefill_step=8192),
        ),
        ({"prefix_caching": "false"}, {}, CacheSettings(enabled=False)),
        ({}, {"enable_prefix_caching": "False"}, CacheSettings(enabled=False)),
    ],
)
def test_settings_are_read_out_of_labels(
    ours: Mapping[str, str], stock: Mapping[str, str], read: CacheSettings | None
) -> None:
    assert read_cache_settings(ours, stock) == read


def test_blocks_are_enough_where_there_is_a_quarter_to_spare_or_nothing_to_run_out() -> None:
    assert cache_report(changed(HYBRID, {"blocks": 320, "max_num_seqs": 256})).advice == ()
    two = dataclasses.replace(changed(HYBRID, {"blocks": 638, "max_num_seqs": 256}), ranks=2)
    assert "it has 319 blocks" in cache_report(two).advice[0]
    assert cache_report(changed(DENSE, {"blocks": 2, "max_num_seqs": 256})).advice == ()


def test_a_node_that_tells_nothing_has_no_facts() -> None:
    report = cache_report(Node("p1", "http://p1", (Role.PREFILL,)))
    assert report == CacheReport((), report.advice)
    assert len(report.advice) == 1
