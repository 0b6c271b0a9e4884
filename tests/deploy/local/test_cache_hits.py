"""Reading a node's counters."""

from collections import Counter as Tally

from deploy.local.cache_hits import Counts, await_change, describe, parse

EXPOSITION = """\
# HELP pdproxy_connector_prompt_tokens_total Prompt tokens by source.
# TYPE pdproxy_connector_prompt_tokens_total counter
pdproxy_connector_prompt_tokens_total{engine="0",model_name="m",source="hit"} 512.0
pdproxy_connector_prompt_tokens_total{engine="1",model_name="m",source="hit"} 256.0
pdproxy_connector_prompt_tokens_total{engine="0",model_name="m",source="pulled"} 26.0
# HELP pdproxy_connector_blocks_total Blocks.
# TYPE pdproxy_connector_blocks_total counter
pdproxy_connector_blocks_total{engine="0",group="attention",kind="hit",model_name="m"} 2.0
pdproxy_connector_blocks_total{engine="0",group="attention",kind="pulled",model_name="m"} 1.0
pdproxy_connector_blocks_total{engine="0",group="state",kind="pulled",model_name="m"} 3.0
# HELP vllm:other_total Something else.
# TYPE vllm:other_total counter
vllm:other_total{engine="0"} 7.0
"""

TOKENS = "pdproxy_connector_prompt_tokens_total"


def counted(hit: int) -> Counts:
    return Tally({(TOKENS, "hit"): hit})


def test_engines_are_added_up_and_other_series_left_alone() -> None:
    counts = parse(EXPOSITION)
    assert counts[TOKENS, "hit"] == 768
    assert sum(counts.values()) == 768 + 26 + 2 + 1 + 3


def test_one_line_for_tokens_and_one_a_group() -> None:
    assert describe(parse(EXPOSITION)) == [
        "prompt tokens: 768 hit, 26 pulled",
        "attention blocks: 2 hit, 1 pulled",
        "state blocks: 3 pulled",
    ]


def test_without_counts_there_is_no_line() -> None:
    assert describe(Tally()) == []


def test_waits_for_a_node_whose_counts_come_late_and_in_parts() -> None:
    before, some, all_of_it = counted(5), counted(9), counted(12)
    looks = iter([before, before, some, all_of_it, all_of_it])
    assert await_change(before, lambda: next(looks)) == {(TOKENS, "hit"): 7}


def test_gives_up_when_nothing_comes() -> None:
    before = counted(5)
    assert not await_change(before, lambda: before, patience=0.0)
