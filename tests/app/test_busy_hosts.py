"""Nodes on hosts that are busy with something else: the known-answer test of a joining pair takes minutes.

Two stock nodes on a loaded machine were seen to give clients 503 for as long as that test took.
"""

import asyncio

import pytest

from pdproxy.nodes import proof
from pdproxy.settings.model import Settings
from tests.app.running_proxy import SOON, starting_proxy, until, until_serving
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.node import FakeNode

ASK = {"model": "m", "prompt": "one two three four", "max_tokens": 4}
UP = 'pdproxy_node_up{node="prefill-0",role="prefill",state="up"} 1.0'
PASSED = 'pdproxy_known_answer_tests_total{result="passed"} 1.0'


@pytest.fixture
def nodes() -> tuple[FakeNode, FakeNode]:
    """A prefill and a decode node without our endpoints, which compute nothing yet."""
    fabric = FakeKvTransfer()
    prefill, decode = FakeNode("prefill", fabric), FakeNode("decode", fabric)
    for node in (prefill, decode):
        node.can_resume = False
        node.stepping.clear()
    return prefill, decode


async def test_until_patience_is_over_the_test_of_the_only_pair_keeps_clients_out(
    nodes: tuple[FakeNode, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "PATIENCE", 2 * SOON)
    async with starting_proxy(Settings(), *nodes) as made, asyncio.timeout(SOON):
        await until(made.operator, UP)
        refused = await made.client.post("/v1/completions", json=ASK)
        for node in nodes:
            node.stepping.set()
        await until(made.operator, PASSED)
        await until_serving(made.operator)
        answered = await made.client.post("/v1/completions", json=ASK)
    assert (refused.status_code, answered.status_code) == (503, 200)


async def test_then_clients_are_answered_while_that_test_is_under_way(
    nodes: tuple[FakeNode, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "PATIENCE", 0.0)
    prefill, decode = nodes
    async with starting_proxy(Settings(), prefill, decode) as made, asyncio.timeout(SOON):
        await until(made.operator, UP)
        await until_serving(made.operator)
        decode.stepping.set()  # the prefill node, and so the test, hangs on
        answers = await asyncio.gather(*(made.client.post("/v1/completions", json=ASK) for _ in range(3)))
        meanwhile = (await made.operator.get("/metrics")).text
        prefill.stepping.set()
        await until(made.operator, PASSED)
        after = await made.client.post("/v1/completions", json=ASK)
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [answer.headers["x-pdproxy-route"].partition(";")[0] for answer in answers] == ["local"] * 3
    assert PASSED not in meanwhile
    assert after.headers["x-pdproxy-route"].startswith("disaggregated")
