"""Proxies that share the clients' port (``listen.reuse_port``), each a process of its own."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deploy.local.ports import free_ports
from pdproxy.__main__ import main
from pdproxy.errors import SettingsError
from pdproxy.server.server import bind
from pdproxy.settings.types import ReusePort, Role
from tests.app.running_proxy import SOON, plain_client, until, up
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode
from tests.watch.process import Process, serving

COMPLETION = {"model": "m", "prompt": "one two", "max_tokens": 5}
Nodes = list[dict[str, str]]


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    """A prefill and a decode node, as the settings name them."""
    fabric = FakeKvTransfer()
    async with LoopbackNode(FakeNode("prefill", fabric)) as one, LoopbackNode(FakeNode("decode", fabric)) as two:
        yield [{"url": one.url, "role": "prefill", "model": "m"}, {"url": two.url, "role": "decode", "model": "m"}]


def sharing(port: int, nodes: Nodes) -> dict[str, Any]:
    """Settings of one of several proxies."""
    health = {"interval": 0.1, "first_hand_over": "warm_up"}
    return {"listen": {"port": port, "admin_port": 0, "reuse_port": "on"}, "nodes": nodes, "health": health}


async def complete(proxy: Process) -> int:
    """One request on a connection of its own; its status."""
    async with plain_client(proxy.clients) as client:
        return (await client.post("/v1/completions", json=COMPLETION)).status_code


async def count_answers(proxy: Process) -> int:
    """Requests that this proxy answered, by its own metrics; it has both nodes when this returns."""
    async with plain_client(proxy.operators) as operator:
        await until(operator, *(up(f"{role}-0", role) for role in Role))
        text = (await operator.get("/metrics")).text
    found = re.findall(
        r'^pdproxy_requests_total\{endpoint="/v1/completions".*outcome="ok"\} (\S+)$', text, re.MULTILINE
    )
    return sum(map(int, map(float, found)))


async def test_two_proxies_answer_on_one_port_until_one_of_them_ends(tmp_path: Path, nodes: Nodes) -> None:
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    settings = sharing(free_ports(1)[0], nodes)
    async with asyncio.timeout(SOON), serving(folders[0], settings) as one:
        async with serving(folders[1], settings) as two:
            assert one.clients == two.clients
            assert [await count_answers(one), await count_answers(two)] == [0, 0]
            assert await asyncio.gather(*(complete(one) for _ in range(40))) == [200] * 40
            counts = [await count_answers(one), await count_answers(two)]
            assert sum(counts) == 40
            assert all(counts), "by chance one in 2 ** 39"
        assert await asyncio.gather(*(complete(one) for _ in range(10))) == [200] * 10
        assert await count_answers(one) == counts[0] + 10


@pytest.mark.parametrize("reuse", [ReusePort.ON, ReusePort.OFF])
def test_a_proxy_that_shares_no_port_with_others_is_refused_one_that_is_taken(reuse: ReusePort) -> None:
    with bind("127.0.0.1", 0, "listen.port", reuse) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SettingsError, match=f"listen.port: 127.0.0.1:{port} cannot be listened on: Address already"
        ):
            bind("127.0.0.1", port, "listen.port")


def test_each_needs_an_operators_port_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0, "listen.admin_port") as taken:
        operators, (clients,) = taken.getsockname()[1], free_ports(1)
        shared = ["--port", f"{clients}", "--listen-reuse-port", "on", "--admin-port", f"{operators}"]
        assert main(["serve", *shared]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"pdproxy: listen.admin_port: 127.0.0.1:{operators} cannot be listened on: Address already in use."
        " Proxies that share listen.port need a listen.admin_port each."
    )
