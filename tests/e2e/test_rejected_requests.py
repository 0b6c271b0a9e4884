"""A request that a node's API server rejects ends no other request, whatever id its body has.

vLLM reports it to the engine under that id, so that its ticket goes back. If a running request had the id, an assertion
of vLLM's scheduler would fail, and the engine would end.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import httpx
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role, on_free_ports
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.legs import complete, hand_over, prefill
from tests.e2e.metrics_reader import watch

pytestmark = pytest.mark.e2e

TOO_LONG = "7 " * 6000
AT_ONCE = 8


def reject(node: Node, request_id: str, **params: Any) -> int:
    """Send a prompt that is too long under this id. Returns the status."""
    body = {
        "model": SERVED_NAME,
        "prompt": TOO_LONG,
        "max_tokens": 1,
        "request_id": request_id,
        "kv_transfer_params": {"do_remote_prefill": True, **params},
    }
    headers = {"X-Request-Id": request_id}
    answer = httpx.post(
        f"{node.url}/v1/completions", json=body, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False
    )
    return answer.status_code


def test_under_the_name_that_a_living_ticket_gives_its_request(pair: Pair) -> None:
    """The request that ended the prefill node while tickets named the engine's own request id."""
    question = quiz(2600, 700)
    ticket = prefill(pair.prefill.url, question.prompt())
    for node in (pair.prefill, pair.decode):
        assert reject(node, ticket["remote_request_id"]) == HTTPStatus.BAD_REQUEST
    verified = watch(pair.decode.url, "reads", outcome="verified")
    assert complete(pair.decode.url, question.prompt(), params=ticket).text == question.answer
    verified.reaches(1)
    hand_over(pair.prefill.url, pair.decode.url, quiz(2601, 300))


def test_several_at_once_under_one_id_all_give_their_tickets_back(pair: Pair) -> None:
    questions = [quiz(2610 + at, 300) for at in range(AT_ONCE)]
    tickets = [prefill(pair.prefill.url, question.prompt()) for question in questions]
    ended = watch(pair.prefill.url, "leases_ended", how="read")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        statuses = pool.map(lambda ticket: reject(pair.decode, "the-same-for-all", **ticket), tickets)
    assert set(statuses) == {HTTPStatus.BAD_REQUEST}
    ended.reaches(AT_ONCE)
    hand_over(pair.prefill.url, pair.decode.url, quiz(2620, 300))


@pytest.fixture
def talkative() -> Iterator[Node]:
    """A prefill node that logs its engine's request ids. Logs: `.run/e2e-rejected`."""
    with Supervisor(logs_of("e2e-rejected")) as supervisor:
        specs = on_free_ports(NodeSpec("prefill", Role.PREFILL, 0, 0, more_arguments=("--enable-log-requests",)))
        yield start_nodes(supervisor, specs, print)[0]


@pytest.mark.long
@pytest.mark.own_engines
def test_under_the_engine_s_own_id_of_a_living_request(talkative: Node) -> None:
    """No ticket has that id; here it is read from the node's log."""
    question = quiz(2630, 700)
    prefill(talkative.url, question.prompt())
    said = (logs_of("e2e-rejected") / "prefill.log").read_text(encoding="utf-8")
    (engine_id,) = re.findall(r"Added request (\S+?)\.?$", said, re.MULTILINE)
    for _ in range(2):
        assert reject(talkative, engine_id) == HTTPStatus.BAD_REQUEST
    assert complete(talkative.url, question.prompt()).text == question.answer
