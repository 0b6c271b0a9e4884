"""Nodes that hand prompts to each other never wait for each other, and a ticket to its own issuer costs nothing."""

from collections.abc import Iterator

import pytest

from connector.messages import Verdict
from tests.connector.both_roles import Unfinished, world
from tests.connector.harness import Node, make_node, prompt, sent, take_ticket

MANY = 3_000


def unfinished(seeds: range) -> Iterator[str]:
    """What is wrong with those of the seeds that end badly."""
    for seed in seeds:
        with world(seed) as one:
            try:
                one.play()
            except Unfinished as wrong:
                yield str(wrong)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_every_request_ends_and_every_block_comes_back(first: int) -> None:
    assert list(unfinished(range(first, first + 25))) == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_request_ends_and_every_block_comes_back_in_many_ways() -> None:
    found = list(unfinished(range(100, 100 + MANY)))
    print(f"{len(found)} of {MANY} seeds did not end")
    assert found == []


@pytest.fixture
def node() -> Node:
    return make_node("kv_both", engine_id="engine-b")


def test_a_node_takes_the_prompt_of_its_own_ticket_from_its_own_cache(node: Node) -> None:
    free = node.free_blocks
    ticket = take_ticket(node, prompt(100))
    node.add("d", prompt(100), ticket)
    node.step()
    assert node.metas[-1].returned.keys() == {"p-0"}, "the workers are told that nobody will read it"
    assert not node.metas[-1].reads
    node.step(sent("p-0"))
    assert len(node.run_out("d")) == 2
    assert node.free_blocks == free
    assert node.counts("own_tickets") == {"": 1}
    assert node.counts("prompt_tokens") == {"computed": 103, "hit": 96}


def test_its_own_ticket_twice_is_served_twice(node: Node) -> None:
    ticket = take_ticket(node, prompt(100))
    for name in ("one", "two"):
        node.add(name, prompt(100), ticket)
        node.run_out(name)
    assert node.side.verify("engine-b", ticket["remote_request_id"], "any") is Verdict.HELD, "until the workers report"
    node.step(sent("p-0"))
    node.add("late", prompt(100), ticket)
    assert len(node.run_out("late")) == 4


def test_a_ticket_of_another_node_with_the_same_engine_id_is_named(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    twin = make_node("kv_both", engine_id="engine-b")
    node.add("d", prompt(100), take_ticket(twin, prompt(100)))
    assert len(node.run_out("d")) == 4
    assert node.counts("refused") == {"own_engine": 1}
    assert "no two nodes may have the same engine_id" in caplog.text


def test_a_node_that_only_prefills_may_fill_its_cache_with_leases() -> None:
    node = make_node("kv_producer", engine_id="engine-p", num_blocks=30)
    for number in range(3):
        take_ticket(node, prompt(100, number), f"p-{number}")
    assert len(node.side._leases) == 3


def test_prefill_legs_leave_half_of_a_shared_cache_to_others() -> None:
    node = make_node("kv_both", engine_id="engine-b", num_blocks=30)
    take_ticket(node, prompt(100))
    node.add("leg", prompt(100, 1), {"do_remote_decode": True}, max_tokens=1)
    node.step()
    assert "leg" not in node.scheduled[-1]
    node.add("other", prompt(100, 2))
    assert len(node.run_out("other")) == 4
    node.step(sent("p-0"))
    assert len(node.run_out("leg")) == 1


@pytest.mark.parametrize(
    ("kv_role", "extra", "delivers"),
    [
        ("kv_consumer", {}, False),
        ("kv_consumer", {"pdproxy_roles": ["prefill", "decode"]}, True),
        ("kv_producer", {}, True),
        ("kv_both", {}, True),
    ],
)
def test_vllms_scheduler_recomputes_what_is_preempted_where_tickets_are_given(
    kv_role: str, extra: dict[str, object], delivers: bool
) -> None:
    """Else a request that ended while it was preempted would name freed blocks in its ticket."""
    assert make_node(kv_role, extra=extra).scheduler.requires_kv_delivery is delivers
