"""The local hit of a request with a ticket counts attention groups alone (vllm#42524); of any other, all groups."""

import pytest

from connector.counters import ReadOutcome
from tests.connector.harness import Node, lost, make_node, prompt, received, take_ticket

pytestmark = pytest.mark.usefixtures("every_pace")

FIRST = prompt(100)
SECOND = [*FIRST, 7, 7, 7, *prompt(30, seed=3)]


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture
def decode(prefill: Node) -> Node:
    """A node that has decoded FIRST: attention is cached up to 96 tokens, state nowhere."""
    node = make_node("kv_consumer", engine_id="engine-d")
    hand_over(prefill, node, FIRST, "first")
    assert node.counts("prompt_tokens") == {"pulled": 99, "computed": 1}
    return node


def hand_over(prefill: Node, decode: Node, tokens: list[int], name: str) -> None:
    decode.add(name, tokens, take_ticket(prefill, tokens, f"p-{name}"))
    decode.step()
    decode.step(received(decode, name))
    assert len(decode.run_out(name)) == 4


def grown(node: Node, before: dict[str, int]) -> dict[str, int]:
    after = node.counts("prompt_tokens")
    return {source: after[source] - before.get(source, 0) for source in after if after[source] != before.get(source, 0)}


def test_a_ticket_s_hit_counts_attention_alone(prefill: Node, decode: Node) -> None:
    """Once: the hit was the minimum over groups, so 0, and all blocks were pulled again. Now: only the rest is."""
    before = decode.counts("prompt_tokens")
    decode.add("d", SECOND, take_ticket(prefill, SECOND))
    decode.step()
    attention, state = decode.metas[-1].reqs_to_recv["d"].local_block_ids
    assert (len(attention), len(state)) == (3, 1)
    decode.step(received(decode, "d"))
    decode.run_out("d")
    assert grown(decode, before) == {"hit": 96, "pulled": 36, "computed": 1}


def test_without_a_ticket_every_group_counts(decode: Node) -> None:
    """The same prompt computed here can start only where the state is cached too: nowhere."""
    before = decode.counts("prompt_tokens")
    decode.add("plain", SECOND)
    decode.run_out("plain")
    assert grown(decode, before) == {"computed": len(SECOND)}


def test_a_request_whose_ticket_was_refused_counts_all_groups(prefill: Node, decode: Node) -> None:
    """A hit without its state would be wrong: a request whose ticket was refused starts where all groups agree."""
    before = decode.counts("prompt_tokens")
    decode.add("d", SECOND, {**take_ticket(prefill, SECOND), "remote_num_tokens": 5})
    decode.run_out("d")
    assert grown(decode, before) == {"computed": len(SECOND)}


def test_a_request_whose_last_read_failed_counts_all_groups(prefill: Node, decode: Node) -> None:
    """After the last failed read the attention hit, whose state never came, is not used."""
    before = decode.counts("prompt_tokens")
    decode.add("d", SECOND, take_ticket(prefill, SECOND))
    decode.step()
    decode.step(lost(decode, ReadOutcome.NOT_HELD, "d"))
    decode.run_out("d")
    assert grown(decode, before) == {"computed": len(SECOND)}


def test_on_the_prefill_node_every_group_counts(prefill: Node) -> None:
    """Prefill-side caching is as it was: it resumes where all groups have their block."""
    take_ticket(prefill, FIRST, "p-1")
    take_ticket(prefill, SECOND, "p-2")
    assert prefill.counts("prompt_tokens") == {"computed": 99 + 132 - 96, "hit": 96}


def test_a_preempted_request_counts_its_prompt_once(prefill: Node) -> None:
    """Preempted after its read and resumed by computing, a request counts its prompt once, and ends right."""
    node = make_node("kv_consumer", engine_id="engine-d", num_blocks=24)
    names = [f"d-{index}" for index in range(3)]
    for index, name in enumerate(names):
        tokens = prompt(90, seed=index)
        node.add(name, tokens, take_ticket(prefill, tokens, f"p-{index}"), max_tokens=40)
    node.step()
    reading = [name for name in names if name in node.metas[-1].reqs_to_recv]
    node.step(received(node, *reading))
    ended: set[str] = set()
    told = set(reading)
    preempted = 0
    for _ in range(400):
        fresh = [name for name in node.metas[-1].reqs_to_recv if name not in told]
        told |= set(fresh)
        preempted = max([preempted, *(request.num_preemptions for request in node.scheduler.requests.values())])
        outputs = node.step(received(node, *fresh) if fresh else None)
        ended |= {output.request_id for output in outputs if output.finish_reason is not None}
        if ended == set(names):
            break
    assert ended == set(names)
    assert preempted > 0
    assert node.counts("prompt_tokens") == {"pulled": 3 * 89, "computed": 3}
