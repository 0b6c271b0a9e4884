"""Hand-overs that end where the decode node can resume, on vLLM's real scheduler: blocks of 16 tokens, a unit of 4."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import RequestStatus

from connector.counters import ReadOutcome
from connector.resume_boundary import ResumeBoundary
from tests.connector.harness import BLOCK, HYBRID, Node, lost, make_node, nonce_of, prompt, received, take_ticket

pytestmark = pytest.mark.usefixtures("every_pace")

UNIT = 4
FIRST = prompt(103)
BOUNDARY = 100
NEXT = [*FIRST, 7, 7, 7, 7, *prompt(30, seed=3)]
"""The turn after FIRST: what was said, and a new question."""


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p", unit=UNIT)


@pytest.fixture
def decode() -> Node:
    return make_node("kv_consumer", engine_id="engine-d", unit=UNIT)


def hand_over(prefill: Node, decode: Node, tokens: list[int], name: str = "d") -> None:
    decode.add(name, tokens, take_ticket(prefill, tokens, f"p-{name}"))
    step_until_it_reads(decode, name)
    decode.step(received(decode, name))
    assert len(decode.run_out(name)) == 4


def step_until_it_reads(decode: Node, name: str) -> None:
    """At most two steps: the first may only take a block out of the prefix cache."""
    for _ in range(2):
        decode.step()
        if decode.scheduler.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return
    raise AssertionError(f"{name} reads nothing")


def hit(node: Node, tokens: list[int], name: str) -> int:
    """How many tokens of a prompt without a ticket the node does not compute."""
    before = node.counts("prompt_tokens").get("hit", 0)
    node.add(name, tokens)
    node.run_out(name)
    return node.counts("prompt_tokens").get("hit", 0) - before


def forget_states(node: Node) -> None:
    """As if other requests' states had taken the place of these."""
    pool = node.scheduler.kv_cache_manager.block_pool
    states = {block.block_id for block in pool.blocks if block.block_hash and block.block_hash[-1] == 1}
    assert states
    pool.evict_blocks(states)


# ---- where it ends


@pytest.mark.parametrize(("length", "tokens"), [(103, 100), (101, 100), (100, 96), (97, 96), (8, 4), (5, 4), (4, 3)])
def test_a_ticket_ends_at_the_last_boundary_before_the_prompt_s_end(prefill: Node, length: int, tokens: int) -> None:
    assert take_ticket(prefill, prompt(length))["remote_num_tokens"] == tokens


def test_without_a_unit_it_ends_at_the_last_token_but_one() -> None:
    assert take_ticket(make_node("kv_producer"), FIRST)["remote_num_tokens"] == 102


def media(offset: int, length: int) -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length))


@pytest.mark.parametrize(
    ("unit", "drops", "features", "backoff", "tokens"),
    [
        (None, False, (), 1, 102),
        (16, False, (), 1, 96),
        (16, True, (), 1, 80),  # EAGLE and MTP: vLLM keeps the state one unit earlier
        (16, False, (), 10, 93),  # MTP of many modules leaves out more than the boundary does
        (16, False, (media(90, 10),), 1, 102),  # the boundary would cut an image in two
        (16, False, (media(96, 4),), 1, 96),
        (16, False, (media(86, 10),), 1, 96),
        (128, False, (), 1, 102),  # the prompt is shorter than a unit
    ],
)
def test_its_end_for_each_kind_of_request(
    unit: int | None, drops: bool, features: tuple[Any, ...], backoff: int, tokens: int
) -> None:
    request = SimpleNamespace(num_prompt_tokens=103, mm_features=features)
    assert ResumeBoundary(unit, drops).tokens(request, backoff) == tokens


# ---- what the decode node can do with it


def test_the_next_turn_without_a_ticket_resumes_at_the_boundary(prefill: Node, decode: Node) -> None:
    hand_over(prefill, decode, FIRST)
    assert decode.counts("prompt_tokens") == {"pulled": BOUNDARY, "computed": 3}
    assert hit(decode, NEXT, "next") == BOUNDARY


def test_without_a_unit_it_starts_at_the_first_token() -> None:
    decode = make_node("kv_consumer", engine_id="engine-d")
    hand_over(make_node("kv_producer", engine_id="engine-p"), decode, FIRST)
    assert hit(decode, NEXT, "next") == 0


def test_the_same_prompt_again_reads_nothing_and_gives_its_ticket_back(prefill: Node, decode: Node) -> None:
    hand_over(prefill, decode, FIRST)
    ticket = take_ticket(prefill, FIRST, "again")
    decode.add("again", FIRST, ticket)
    decode.run_out("again")
    assert decode.counts("prompt_tokens")["hit"] == BOUNDARY
    assert decode.counts("unused_tickets") == {"": 1}


def test_the_next_turn_with_a_ticket_reads_only_what_is_new(prefill: Node, decode: Node) -> None:
    hand_over(prefill, decode, FIRST)
    hand_over(prefill, decode, NEXT, "next")
    # Attention is matched by whole blocks where a read follows.
    assert decode.counts("prompt_tokens") == {"hit": 96, "pulled": BOUNDARY + 40, "computed": 3 + 1}


@pytest.mark.parametrize("length", [103, 113])
def test_a_hit_that_ends_where_the_ticket_does_still_gets_its_state(prefill: Node, decode: Node, length: int) -> None:
    """At a boundary inside of a block, and at a block's end (112)."""
    tokens = prompt(length)
    hand_over(prefill, decode, tokens)
    forget_states(decode)
    decode.add("again", tokens, take_ticket(prefill, tokens, "p-again"))
    step_until_it_reads(decode, "again")
    assert decode.metas[-1].reqs_to_recv["again"].local_block_ids[1], "the state is not read"
    decode.step(received(decode, "again"))
    decode.run_out("again")
    assert decode.counts("prompt_tokens")["hit"] == 96
    assert hit(decode, tokens, "third") == (length - 1) // UNIT * UNIT


@pytest.mark.parametrize("length", [103, 113])
def test_so_it_does_beside_a_running_request_with_the_same_prompt(prefill: Node, decode: Node, length: int) -> None:
    """vLLM registers the end of the running one's prompt anew in each step: "again" must not wait until it ends."""
    tokens = prompt(length)
    decode.add("running", tokens, max_tokens=200)
    for _ in range(6):
        decode.step()
    forget_states(decode)
    decode.add("again", tokens, take_ticket(prefill, tokens, "p-again"))
    step_until_it_reads(decode, "again")
    decode.step(received(decode, "again"))
    assert len(decode.run_out("again")) == 4
    assert "running" in decode.scheduler.requests


def test_so_it_does_without_a_unit() -> None:
    prefill = make_node("kv_producer", engine_id="engine-p")
    decode = make_node("kv_consumer", engine_id="engine-d")
    hand_over(prefill, decode, prompt(113))
    forget_states(decode)
    hand_over(prefill, decode, prompt(113), "again")
    assert decode.counts("prompt_tokens") == {"hit": 96, "pulled": 112 + 16, "computed": 2}


def test_a_preempted_request_resumes_at_the_boundary(prefill: Node, decode: Node) -> None:
    ticket = take_ticket(prefill, FIRST)
    request = decode.add("d", FIRST, ticket, max_tokens=8)
    decode.step()
    decode.step(received(decode, "d"))
    for _ in range(3):
        decode.step()
    scheduler = decode.scheduler
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    resumed = len(decode.scheduled)
    assert len(decode.run_out("d")) > 0
    again = next(step["d"] for step in decode.scheduled[resumed:] if "d" in step)
    assert again <= request.num_tokens - BOUNDARY, "it computed its prompt again"
    assert decode.counts("prompt_tokens") == {"pulled": BOUNDARY, "computed": 3}


# ---- nothing wrong is kept


@pytest.mark.parametrize("stalled", [False, True])
def test_a_failed_read_leaves_nothing_in_the_cache(prefill: Node, decode: Node, stalled: bool) -> None:
    decode.add("d", FIRST, take_ticket(prefill, FIRST))
    decode.step()
    nonces = [nonce_of(decode, "d")] if stalled else []
    outcome = ReadOutcome.NO_PROGRESS if stalled else ReadOutcome.NOT_HELD
    decode.step(lost(decode, outcome, "d", stalled=nonces))
    decode.abort("d")
    decode.step()
    assert hit(decode, NEXT, "next") == 0


def test_an_aborted_read_leaves_nothing_in_the_cache(prefill: Node, decode: Node) -> None:
    free = decode.free_blocks
    decode.add("d", FIRST, take_ticket(prefill, FIRST))
    decode.step()
    decode.abort("d")
    decode.step(received(decode, "d"))
    assert decode.free_blocks == free
    assert hit(decode, NEXT, "next") == 0


def test_a_stream_that_moves_here_with_its_tokens_resumes_too(prefill: Node, decode: Node) -> None:
    """Its continuation is a longer prompt with a ticket of its own; what follows it resumes at that one's end."""
    hand_over(prefill, decode, [*FIRST, 7, 7, 7])
    assert hit(decode, NEXT, "next") == 104


# ---- nodes that cannot


def test_nodes_of_two_units_refuse_each_other_by_name(decode: Node, caplog: pytest.LogCaptureFixture) -> None:
    ticket = take_ticket(make_node("kv_producer", engine_id="engine-p", unit=8), FIRST)
    with caplog.at_level("WARNING", "vllm.pdproxy.scheduler"):
        decode.add("d", FIRST, ticket)
    assert "prefix_match_unit is 4 here, 8 on the prefill node" in caplog.text
    assert "start both with the same --prefix-match-unit" in caplog.text
    assert decode.counts("refused") == {"fingerprint": 1}


WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16, sliding_window=64)


def test_a_unit_without_effect_is_said_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "vllm.pdproxy.scheduler"):
        node = make_node("kv_producer", (*HYBRID, WINDOW), unit=UNIT)
        make_node("kv_producer", unit=BLOCK)
    assert take_ticket(node, FIRST)["remote_num_tokens"] == 102
    assert "--prefix-match-unit 4 has no effect on hand-overs: another cache group" in caplog.text
    assert "--prefix-match-unit 16 has no effect on hand-overs: no state group" in caplog.text
