"""Blocks that a node keeps for a conversation's next turn and for prompts that wait, on vLLM's real scheduler.

Blocks of 16 tokens, a unit of 4, of which the state and the attention of a whole prompt are cached.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.interface import PauseState

from connector import keeps
from connector.keeps import REPORT
from connector.stats import LEVELS
from deploy.bench import node_keeps
from tests.connector.harness import DENSE, Node, make_node, prompt, received, sent, take_ticket
from tests.fakes.clock import FakeClock

pytestmark = pytest.mark.usefixtures("every_pace")

UNIT = 4
BLOCKS = 41
"""40 and vLLM's null block: 12 of them may be kept."""
ANSWER = [7] * 4
FIRST = prompt(90)
KEPT = 88
NEXT = [*FIRST, *ANSWER, *prompt(30, seed=3)]
ONE, TWO = "conversation-number-one", "conversation-number-two"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def node(clock: FakeClock) -> Node:
    return node_of(clock)


def node_of(clock: FakeClock, role: str = "kv_consumer", **settings: Any) -> Node:
    made = make_node(role, num_blocks=BLOCKS, engine_id=role, **{"unit": UNIT, **settings})
    made.side.keeps._now = clock.now
    return made


def turn(node: Node, name: str, tokens: Sequence[int], conversation: str = ONE, seconds: float = 60) -> dict[str, Any]:
    """Answer a turn of a conversation: the node's report."""
    node.add(name, tokens, {"pdproxy_keep": {"id": conversation, "seconds": seconds}})
    return report(node.run_out(name)[-1].kv_transfer_params)


def report(params: Any) -> dict[str, Any]:
    found: dict[str, Any] = params[REPORT]
    return found


def crowd(node: Node, number: int = 6, name: str = "crowd") -> None:
    """Other requests' prompts, one after another, of 150 tokens each: they evict all that is not kept."""
    for each in range(number):
        node.add(f"{name}-{each}", prompt(150, 10 + each))
        node.run_out(f"{name}-{each}")


def hit(node: Node, name: str, tokens: Sequence[int] = NEXT) -> int:
    """How many tokens of a prompt the node does not compute."""
    before = node.counts("prompt_tokens").get("hit", 0)
    node.add(name, tokens)
    node.run_out(name)
    return node.counts("prompt_tokens").get("hit", 0) - before


def forget(node: Node, *conversations: str) -> None:
    node.add(f"forget-{conversations}", [1], {"pdproxy_forget": list(conversations)}, max_tokens=1)
    node.run_out(f"forget-{conversations}")


def ended(node: Node) -> dict[str, int]:
    """How keeps ended so far."""
    return node.counts("keeps_ended")


def test_the_next_turn_resumes_from_what_is_kept(node: Node) -> None:
    assert turn(node, "first", FIRST) == {"hit": 0, "tokens": KEPT, "blocks": 7, "why": ""}
    crowd(node)
    told = turn(node, "next", NEXT)
    assert told["hit"] == KEPT < told["tokens"]
    assert ended(node) == {"hit": 1}
    assert node.counts("prompt_tokens")["hit"] == KEPT
    assert node.counts("keep_tokens") == {"kept": KEPT + told["tokens"], "hit": KEPT}


def test_without_a_keep_other_prompts_evict_it(node: Node) -> None:
    node.add("first", FIRST)
    node.run_out("first")
    crowd(node)
    assert hit(node, "next") == 0


def test_blocks_of_another_pool_are_left_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has groups whose blocks are not the GPU's; their numbers are used twice."""
    manager = node.scheduler.kv_cache_manager
    find = manager.get_computed_blocks

    def with_others(request: Any) -> Any:
        found, tokens, boundary = find(request)
        return KVCacheBlocks((*found.blocks, BlockPool(4, True, 16).blocks[1:])), tokens, boundary

    monkeypatch.setattr(
        node.side.keeps, "_manager", SimpleNamespace(block_pool=manager.block_pool, get_computed_blocks=with_others)
    )
    assert turn(node, "first", FIRST)["blocks"] == 7


def test_a_model_without_states_keeps_its_blocks(clock: FakeClock) -> None:
    node = node_of(clock, groups=DENSE, unit=None)
    assert turn(node, "first", FIRST) == {"hit": 0, "tokens": 80, "blocks": 5, "why": ""}
    crowd(node)
    assert turn(node, "next", NEXT)["hit"] == 80


def test_kept_blocks_are_free(node: Node) -> None:
    """So nothing that vLLM counts shows them: the engine is idle, and its prefix cache can be reset."""
    turn(node, "first", FIRST)
    assert node.free_blocks == BLOCKS - 1
    for _ in list(node.ahead):
        node.step()
    node.step()
    assert not node.scheduler.has_requests()
    assert not node.side.has_pending_push_work()
    assert node.scheduler.reset_prefix_cache()
    assert turn(node, "next", NEXT)["hit"] == 0
    assert ended(node) == {"missed": 1}


def test_a_turn_that_asks_for_no_more_ends_the_keep(node: Node) -> None:
    turn(node, "first", FIRST)
    crowd(node)
    assert turn(node, "next", NEXT, seconds=0) == {"hit": KEPT, "tokens": 0, "blocks": 0, "why": "not_asked"}
    assert node.side.keeps._kept.total() == 0


def test_a_turn_whose_prompt_is_another_one_misses(node: Node) -> None:
    turn(node, "first", FIRST)
    assert turn(node, "next", [*FIRST[:40], *prompt(60, seed=4)])["hit"] == 0
    assert ended(node) == {"missed": 1}


def test_a_keep_ends_after_its_time(node: Node, clock: FakeClock) -> None:
    turn(node, "first", FIRST, seconds=60)
    clock._now += 59.9
    crowd(node, 1)
    assert ended(node) == {}
    clock._now += 0.2
    crowd(node, name="more")
    assert ended(node) == {"expired": 1}
    assert turn(node, "next", NEXT)["hit"] == 0


def test_what_is_forgotten_is_evicted_as_everything_else(node: Node) -> None:
    turn(node, "first", FIRST)
    forget(node, TWO, ONE)
    forget(node, ONE)
    assert ended(node) == {"forgotten": 1}
    crowd(node)
    assert hit(node, "next") == 0


def test_a_request_that_needs_the_blocks_gets_them_at_once(node: Node) -> None:
    turn(node, "first", FIRST)
    node.add("large", prompt(600, seed=9), max_tokens=1)
    node.step()
    assert node.scheduled[-1]["large"] > 500
    assert ended(node) == {"need": 1}


def test_the_oldest_goes_first_and_only_as_many_as_are_needed(node: Node, clock: FakeClock) -> None:
    short, long = prompt(50, seed=5), prompt(70, seed=6)
    turn(node, "short", short, ONE)
    clock._now += 10
    turn(node, "long", long, TWO)
    clock._now += 1
    node.add("large", prompt(30 * 16 - 1, seed=9), max_tokens=1)
    node.run_out("large")
    assert ended(node) == {"need": 1}
    assert turn(node, "one", [*short, *ANSWER, 5], ONE, 0)["hit"] == 0
    assert turn(node, "two", [*long, *ANSWER, 5], TWO, 0)["hit"] == 68


def test_of_equally_old_ones_what_saves_least_for_its_room_goes_first(node: Node) -> None:
    """The state takes a block of each: a short prompt has fewer tokens to a block."""
    long, short = prompt(70, seed=6), prompt(34, seed=5)
    turn(node, "long", long, TWO)
    turn(node, "short", short, ONE)
    node.side.keeps._now = lambda: 1001.0
    crowd(node, 1)
    node.add("large", prompt(30 * 16 - 1, seed=9), max_tokens=1)
    node.run_out("large")
    assert turn(node, "one", [*short, *ANSWER, 5], ONE, 0)["hit"] == 0
    assert turn(node, "two", [*long, *ANSWER, 5], TWO, 0)["hit"] == 68


def test_the_share_is_a_ceiling(node: Node, clock: FakeClock) -> None:
    """A kept conversation stays kept, however old, as long as nothing says that its next turn is overdue."""
    assert turn(node, "first", FIRST, ONE)["blocks"] == 7
    clock._now += 59
    for name, tokens in (("other", prompt(70, seed=6)), ("long", prompt(200, seed=8))):
        assert turn(node, name, tokens, TWO) == {"hit": 0, "tokens": 0, "blocks": 0, "why": "too_large"}
    assert ended(node) == {}
    assert node.counts("keeps_refused") == {"too_large": 2}
    clock._now += 2
    assert turn(node, "late", prompt(70, seed=6), TWO)["blocks"] == 6
    assert ended(node) == {"expired": 1}


def test_a_keep_that_is_overdue_makes_room_for_another_one(node: Node, clock: FakeClock) -> None:
    turn(node, "first", FIRST, ONE)
    clock._now += 2
    turn(node, "next", NEXT[:100], ONE)
    other = prompt(70, seed=6)
    clock._now += 8
    assert turn(node, "other", other, TWO)["why"] == "too_large"
    clock._now += 0.1
    assert turn(node, "once more", other, TWO)["blocks"] == 6
    assert ended(node) == {"hit": 1, "share": 1}


def test_blocks_that_conversations_share_count_once(node: Node) -> None:
    system = prompt(48, seed=1)
    for at in range(2):  # the second prompt is at which vLLM keeps the state of what both share
        turn(node, f"warm-{at}", [*system, *prompt(30, seed=20 + at)], ONE, 0)
    turn(node, "one", [*system, *prompt(30, seed=5)], ONE)
    turn(node, "two", [*system, *prompt(30, seed=6)], TWO)
    assert ended(node) == {}
    assert len(node.side.keeps._kept) == 9


def test_a_share_of_nothing_keeps_nothing(clock: FakeClock) -> None:
    node = node_of(clock, extra={"pdproxy_keep_share": 0})
    assert turn(node, "first", FIRST)["why"] == "off"
    assert node.counts("keeps_refused") == {}


def test_a_prompt_too_short_to_resume_from_is_not_kept(node: Node) -> None:
    assert turn(node, "first", prompt(3))["why"] == "nothing_cached"
    assert node.counts("keeps_refused") == {"nothing_cached": 1}


def test_a_keep_is_replaced_by_another_of_its_conversation(node: Node) -> None:
    for name in ("one", "two"):
        node.add(name, FIRST, {"pdproxy_keep": {"id": ONE, "seconds": 60}})
    node.run_out("one")
    while node.scheduler.requests:
        node.step()
    assert ended(node) == {"replaced": 1}
    assert node.counts("keeps_begun") == {"": 2}


@pytest.mark.parametrize("keep", [7, {"id": "short"}, {"id": ONE, "seconds": -1}])
def test_a_refused_order_changes_nothing_else(node: Node, keep: Any) -> None:
    node.add("first", FIRST, {"pdproxy_keep": keep})
    assert node.run_out("first")[-1].kv_transfer_params is None
    assert node.counts("refused") == {"bad_field": 1}


def test_what_is_kept_stands_in_the_metrics(node: Node) -> None:
    for name, tokens, conversation in (("first", FIRST, ONE), ("other", prompt(50, seed=4), TWO)):
        node.add(name, tokens, {"pdproxy_keep": {"id": conversation, "seconds": 60}})
    gauges: dict[str, int] = {}
    while node.scheduler.has_requests():
        for output in node._step(None):
            stats = output.scheduler_stats and output.scheduler_stats.kv_connector_stats
            gauges |= {name: value for name, _, value in (stats or {}).get(LEVELS, ())}
    assert (gauges["keeps"], gauges["keep_blocks"]) == (2, 11)


# ---- hand-overs


def test_a_prefill_node_keeps_what_it_computed(clock: FakeClock) -> None:
    """From the end of its leg on, whether the lease is over or not; the ticket is as good with the report beside it."""
    node, decode = node_of(clock, "kv_producer"), node_of(clock)
    ticket = take_ticket(node, FIRST, "p", pdproxy_keep={"id": ONE, "seconds": 60})
    kept = report(ticket)["tokens"]
    assert kept == KEPT - UNIT  # vLLM keeps the state before the last unit of what it computes
    assert node.free_blocks == BLOCKS - 1 - 7
    decode.add("d", FIRST, ticket)
    decode.step()
    decode.step(received(decode, "d"))
    decode.run_out("d")
    assert decode.counts("refused") == {}
    node.step(sent("p"))
    assert node.free_blocks == BLOCKS - 1
    crowd(node)
    assert report(take_ticket(node, NEXT, "q", pdproxy_keep={"id": ONE}))["hit"] == kept


def test_a_decode_node_keeps_what_it_read(clock: FakeClock) -> None:
    node, prefill = node_of(clock), node_of(clock, "kv_producer")
    ticket = take_ticket(prefill, FIRST, "p")
    node.add("d", FIRST, {**ticket, "pdproxy_keep": {"id": ONE, "seconds": 60}})
    node.step()
    node.step(received(node, "d"))
    assert report(node.run_out("d")[-1].kv_transfer_params)["tokens"] == KEPT
    crowd(node)
    assert turn(node, "next", NEXT)["hit"] == KEPT


# ---- prompts that wait


def test_what_a_waiting_prompt_resumes_from_is_not_evicted_by_those_before_it(clock: FakeClock) -> None:
    node = node_of(clock, scheduling={"max_num_seqs": 1})
    node.add("first", FIRST)
    node.run_out("first")
    for at in range(6):
        node.add(f"before-{at}", prompt(150, 10 + at), max_tokens=2)
    node.add("next", NEXT, max_tokens=1)
    node.run_out("next")
    assert node.counts("prompt_tokens")["hit"] == KEPT
    assert node.counts("waiting_holds_ended") == {"admitted": 1}


def test_a_waiting_prompt_that_goes_leaves_its_conversations_keep(node: Node) -> None:
    turn(node, "first", FIRST)
    node.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    node.add("next", NEXT, {"pdproxy_keep": {"id": ONE, "seconds": 60}})
    node.step()
    node.abort("next")
    node.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert ended(node) == {}
    assert node.counts("waiting_holds_ended") == {"gone": 1}
    crowd(node)
    assert turn(node, "again", NEXT)["hit"] == KEPT


def test_the_prompt_that_came_last_gives_way_first(node: Node) -> None:
    """A prompt in front of them needs all but a few blocks."""
    second = prompt(90, seed=2)
    for name, tokens in (("one", FIRST), ("two", second)):
        node.add(name, tokens)
        node.run_out(name)
    node.add("large", prompt(28 * 16 - 1, seed=9), max_tokens=1)
    node.add("next", NEXT, max_tokens=1)
    node.add("last", [*second, *ANSWER, 5], max_tokens=1)
    for name in ("large", "next", "last"):
        if name in node.scheduler.requests:
            node.run_out(name)
    assert node.counts("waiting_holds_ended") == {"need": 1, "admitted": 1}
    assert node.counts("prompt_tokens")["hit"] >= KEPT


def test_nothing_is_remembered_of_requests_that_have_ended(node: Node) -> None:
    turn(node, "first", FIRST)
    crowd(node)
    node.add("gone", NEXT)
    node.abort("gone")
    turn(node, "next", NEXT)
    assert (len(node.side.keeps), node.side.keeps._waiting) == (0, {})


def test_simulated_nodes_wait_as_long_for_a_next_turn() -> None:
    assert (node_keeps.OVERDUE, node_keeps.PAUSES) == (keeps.OVERDUE, keeps.PAUSES)
