"""The whole proxy in front of nodes of both roles: one, and two."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from pdproxy.app.build import proxy
from pdproxy.app.host import HostEnvironment
from pdproxy.app.run import one_node
from pdproxy.nodes import join
from pdproxy.request import Endpoint
from pdproxy.settings.model import ConfiguredNode, Discovery, Health, Listen, Settings
from pdproxy.settings.types import DiscoveryKind, Role
from tests.app.running_proxy import listening, operator_of, plain_client, until, up
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode
from tests.orchestration.answers import read_answer
from tests.orchestration.prompts import body_for

QUICK = Health(interval=0.1, slow_start=0)
BODY = {"model": "m", "prompt": "What is a lease?", "max_tokens": 4}


@pytest.fixture(autouse=True)
def nodes_join_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake nodes have no cache whose size they could tell, for which a join waits."""
    monkeypatch.setattr(join, "MOST_EARLY_PREFLIGHTS", 1)


@contextlib.asynccontextmanager
async def running(count: int) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """A client and an operator of a proxy in front of so many equal nodes."""
    fabric = FakeKvTransfer()
    async with in_front_of([LoopbackNode(FakeNode(f"n{number}", fabric)) for number in range(count)]) as made:
        yield made


@contextlib.asynccontextmanager
async def in_front_of(nodes: Sequence[LoopbackNode]) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """The same, of nodes that are started here."""
    count = len(nodes)
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
        configured = tuple(ConfiguredNode(url=node.url, model="m") for node in nodes)
        settings = Settings(nodes=configured, health=QUICK, listen=Listen(sse_keep_alive=0.1))
        made = await stack.enter_async_context(proxy(settings, HostEnvironment()))
        url = await stack.enter_async_context(listening(made, settings))
        client = await stack.enter_async_context(plain_client(url))
        operator = await stack.enter_async_context(operator_of(made))
        await until(operator, '"ready"', path="/ready")
        await until(operator, *(up(f"node-{number}", role) for number in range(count) for role in Role))
        yield client, operator


async def test_one_node_is_a_start(caplog: pytest.LogCaptureFixture) -> None:
    async with running(1) as (client, operator):
        caplog.clear()
        for _ in range(3):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert (await operator.get("/ready")).json()["status"] == "ready"
        metrics = (await operator.get("/metrics")).text
        assert "pdproxy_hand_overs_failing 0.0" in metrics
        assert 'pdproxy_local_total{reason="only_node"} 3.0' in metrics
        assert [each for each in caplog.records if each.levelno > logging.INFO] == []


async def test_a_stream_of_a_lone_node_goes_on_after_its_restart() -> None:
    """Comments keep its connection alive meanwhile, each between two events."""
    fake = FakeNode("n0", FakeKvTransfer())
    fake.can_resume = True
    node, body = LoopbackNode(fake, pace=0.05), {"model": "m", **body_for(Endpoint.CHAT, stream=True, tokens=20)}
    async with in_front_of([node]) as (client, _):
        uncut = read_answer(Endpoint.CHAT, (await client.post("/v1/chat/completions", json=body)).content)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            pieces, got = answer.aiter_raw(), b""
            while got.count(b"data: ") < 5:
                got += await anext(pieces)
            await node.kill()
            while b": keep-alive" not in got:
                got += await anext(pieces)
            await asyncio.sleep(3 * QUICK.interval)
            await node.start()
            got += b"".join([piece async for piece in pieces])
        answered = read_answer(Endpoint.CHAT, got.replace(b": keep-alive\n\n", b""))
        assert (answered.texts, answered.finishes, answered.error) == (uncut.texts, uncut.finishes, None)
        assert sum(leg.path.startswith("/v1/pdproxy/streams") for leg in fake.legs()) == 3


async def test_roles_change_while_it_runs() -> None:
    async with running(2) as (client, operator):
        for name, roles in (("node-0", ["prefill"]), ("node-1", ["decode"])):
            assert (await operator.patch(f"/nodes/{name}", json={"roles": roles})).status_code == 202
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["x-pdproxy-route"].split(";")[0]) == (200, "disaggregated")
        assert (await operator.patch("/nodes/node-0", json={"roles": ["prefill", "decode"]})).status_code == 202
        await until(operator, up("node-0", Role.DECODE))
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


def test_one_line_says_what_one_node_gives() -> None:
    one, fixed = ConfiguredNode(url="http://a"), ConfiguredNode(url="http://b", roles=(Role.DECODE,))
    assert one_node(Settings(nodes=(one,))).startswith("one node: it computes every prompt")
    elsewhere = Discovery(node=DiscoveryKind.DNS, node_name="n")
    for settings in (
        Settings(nodes=(fixed,)), Settings(nodes=(one, fixed)), Settings(), Settings(nodes=(one,), discovery=elsewhere)
    ):  # fmt: skip
        assert one_node(settings) == ""
