"""The end of a ticket is told to whoever asks, on vLLM's real scheduler."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput

from connector.counters import ReadOutcome
from connector.metadata import ReadEnd, WorkerReport
from connector.read_reports import EXPLAIN, REPORT
from tests.connector.harness import Node, make_node, nonce_of, prompt, received, take_ticket

REFUSED = "[Errno 111] Connection refused"


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture
def node() -> Node:
    return make_node("kv_consumer", engine_id="engine-d")


def asking(prefill: Node, name: str, seed: int = 0) -> dict[str, Any]:
    return {**take_ticket(prefill, prompt(100, seed), name), EXPLAIN: True}


def told(node: Node, name: str) -> Any:
    """The report in the request's last output."""
    return (node.run_out(name)[-1].kv_transfer_params or {}).get(REPORT)


def unreachable(node: Node, name: str) -> KVConnectorOutput:
    """The workers' output: the read failed, and a rank knows why."""
    end = ReadEnd(nonce_of(node, name), ReadOutcome.PEER_UNREACHABLE, why=REFUSED)
    ranks = WorkerReport(reads_ended={name: ReadEnd(end.nonce, ReadOutcome.TRANSFER_FAILED, why="another")})
    ranks.aggregate(WorkerReport(reads_ended={name: end}))
    return KVConnectorOutput(finished_recving={name}, failed_recving={name}, kv_connector_worker_meta=ranks)


def test_a_read_that_is_verified(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), asking(prefill, "p"))
    node.step()
    node.step(received(node, "d"))
    assert told(node, "d") == {"cause": "verified", "why": ""}


def test_a_ticket_that_leaves_nothing_to_pull(prefill: Node, node: Node) -> None:
    first = prompt(97)
    node.add("first", [*first[:96], 5], None, max_tokens=1)
    node.run_out("first")
    node.add("d", first, {**take_ticket(prefill, first), EXPLAIN: True})
    assert told(node, "d") == {"cause": "not_needed", "why": ""}


def test_a_read_that_failed_and_the_tickets_that_are_not_read_for_it(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), asking(prefill, "p"))
    node.step()
    node.step(unreachable(node, "d"))
    assert told(node, "d") == {"cause": "peer_unreachable", "why": REFUSED}
    node.add("next", prompt(100, 1), asking(prefill, "p-next", 1))
    assert told(node, "next") == {"cause": "peer_unreachable", "why": REFUSED}


def test_a_ticket_that_is_refused(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100, seed=1), asking(prefill, "p"))
    assert told(node, "d") == {"cause": "digest", "why": "the ticket is for another prompt"}


def test_nothing_is_told_unasked_and_nothing_is_kept(prefill: Node, node: Node) -> None:
    ticket = asking(prefill, "p")
    node.add("d", prompt(100, seed=1), {**ticket, EXPLAIN: "yes"})
    assert told(node, "d") is None
    prefill.add("leg", prompt(100), {"do_remote_decode": True, EXPLAIN: True}, max_tokens=1)
    assert REPORT not in (prefill.run_out("leg")[-1].kv_transfer_params or {})
    node.add("gone", prompt(100, seed=1), ticket)
    node.abort("gone")
    assert not node.side._reports._reports
    assert not prefill.side._reports._reports
