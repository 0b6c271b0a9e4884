"""Hostile `kv_transfer_params` on vLLM's real scheduler: nothing raises or is dialled, every refusal is counted."""

import copy
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from connector.ticket_fields import RefusalReason
from tests.connector.harness import PACES, Node, at_pace, make_node, prompt, received, take_ticket
from tests.connector.tickets import ANYTHING, EXAMPLES, MALFORMED, UNSIGNED, Spoil, spoiled

Pairs = dict[str, tuple[Node, Node]]
KEY = "0123456789abcdef0123456789abcdef"
TOKENS = prompt(100)
NUMBERS = count()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """At each pace a prefill and a decode node that share a key, kept for all examples, as an engine is."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEY, encoding="utf-8")
    return {name: _pair(name, {"pdproxy_key_file": str(path)}) for name in PACES}


def _pair(pace: str, extra: dict[str, str]) -> tuple[Node, Node]:
    with at_pace(PACES[pace]):
        return make_node("kv_producer", engine_id="p", extra=extra), make_node(
            "kv_consumer", engine_id="d", extra=extra
        )


@pytest.fixture(scope="module")
def tickets(pairs: Pairs) -> dict[str, dict[str, Any]]:
    """A good ticket of each pair."""
    return {name: take_ticket(give, TOKENS) for name, (give, _) in pairs.items()}


@pytest.fixture(params=PACES)
def pace(request: pytest.FixtureRequest) -> str:
    """How the nodes step."""
    name: str = request.param
    return name


@pytest.fixture
def pair(pace: str, pairs: Pairs) -> tuple[Node, Node]:
    """The nodes of one pace."""
    return pairs[pace]


@pytest.fixture
def ticket(pace: str, tickets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A good ticket of the prefill node of one pace."""
    return tickets[pace]


def ask(node: Node, params: Any) -> Any:
    """Send a request with `params`, run the scheduler once, take the request back. What was left of the params."""
    name = f"r-{next(NUMBERS)}"
    request = node.add(name, TOKENS, params)
    left = request.kv_transfer_params
    node.step()
    if left is None:
        assert name not in node.metas[-1].reqs_to_recv
        assert not node.metas[-1].heartbeat_by_engine
    node.abort(name)
    waits = name in node.scheduler.requests
    node.step(received(node, name) if waits else None)
    assert name not in node.scheduler.requests
    return left


def works(pair: tuple[Node, Node]) -> None:
    """Both nodes still hand a request over, and hold nothing else."""
    give, take = pair
    name = f"r-{next(NUMBERS)}"
    take.add(name, TOKENS, take_ticket(give, TOKENS, name))
    take.step()
    if name in take.metas[-1].reqs_to_recv and take.metas[-1].reqs_to_recv[name].awaiting_kvs:
        take.step(received(take, name))
    assert len(take.run_out(name)) == 4
    assert list(take.scheduler.requests) == []


def refused(node: Node) -> int:
    return sum(node.counts("refused").values())


CASES = [*MALFORMED, *((f"altered: {name}", spoil, reason) for name, spoil, reason in UNSIGNED)]


@pytest.mark.parametrize(("spoil", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_bad_ticket_is_refused_under_its_reason(
    pair: tuple[Node, Node], ticket: dict[str, Any], spoil: Spoil, reason: RefusalReason
) -> None:
    before = dict(pair[1].counts("refused"))
    assert ask(pair[1], spoil(ticket)) is None
    after = pair[1].counts("refused")
    grown = {name for name in after if after[name] != before.get(name, 0)}
    assert grown <= {reason, RefusalReason.BAD_SIGNATURE}
    assert sum(after.values()) == sum(before.values()) + 1


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=spoiled())
def test_spoiled_tickets_on_a_decode_node(pairs: Pairs, raw: Any) -> None:
    asks = isinstance(raw, dict) and raw.get("do_remote_prefill") is True
    for _, node in pairs.values():
        before = refused(node)
        assert ask(node, copy.deepcopy(raw)) is None
        assert refused(node) - before in ({1} if asks else {0, 1})


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=ANYTHING | spoiled())
def test_anything_on_a_prefill_node(pairs: Pairs, raw: Any) -> None:
    for node, _ in pairs.values():
        left = ask(node, copy.deepcopy(raw))
        assert left is None or left.keys() <= {"do_remote_decode", "do_remote_prefill", "_p_side_truncated"}


def test_replays_are_taken_while_the_ticket_is_good(pair: tuple[Node, Node], ticket: dict[str, Any]) -> None:
    """Whether the blocks are still held is asked after the read, not remembered here."""
    for _ in range(20):
        assert ask(pair[1], ticket) is not None


def test_mismatched_prompts(pair: tuple[Node, Node]) -> None:
    tickets = [take_ticket(pair[0], prompt(100, seed), f"m-{seed}") for seed in range(1, 6)]
    before = refused(pair[1])
    assert [ask(pair[1], each) for each in tickets] == [None] * 5
    assert refused(pair[1]) == before + 5


def test_after_all_that_both_nodes_still_work(pair: tuple[Node, Node]) -> None:
    works(pair)
    works(pair)
