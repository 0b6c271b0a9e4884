"""The end of a proxy: streams get their time, what outlives it is told, and operators can look until then."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from pdproxy.app.run import clients_config, operators_config
from pdproxy.server.server import bind, leave, serve
from pdproxy.settings.model import Deadlines, Settings
from tests.app.running_proxy import SOON, RunningProxy, plain_client, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.quick_server import QuickServer

COMPLETION = {"model": "m", "prompt": "one two", "max_tokens": 5, "stream": True}
MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True}
RESPONSE = {"model": "m", "input": "hello", "max_output_tokens": 5, "stream": True}


@dataclass(frozen=True)
class Served:
    """A proxy on both of its ports; ``ended`` is done when it has ended."""

    proxy: RunningProxy
    clients: httpx.AsyncClient
    operators: httpx.AsyncClient
    ports: tuple[QuickServer, QuickServer]
    ended: asyncio.Task[None]

    def terminate(self) -> None:
        """As SIGTERM does."""
        leave(*self.ports, self.proxy.running.leaving)


@contextlib.asynccontextmanager
async def served(grace: float) -> AsyncIterator[Served]:
    """Streams that run when it ends get so many seconds."""
    settings = Settings(deadlines=Deadlines(shutdown=grace))
    async with running_proxy(settings) as proxy:
        clients, operators = (
            QuickServer(config(settings, proxy.running), bind("127.0.0.1", 0, "a port"))
            for config in (clients_config, operators_config)
        )
        ended = asyncio.create_task(serve(clients, operators, proxy.running.leaving))
        async with asyncio.timeout(SOON):
            while not (clients.started and operators.started):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        async with plain_client(f"http://{clients.address}") as one, plain_client(f"http://{operators.address}") as two:
            try:
                yield Served(proxy, one, two, (clients, operators), ended)
            finally:
                clients.should_exit = clients.force_exit = True
                await asyncio.wait_for(ended, SOON)


async def stalled(served: Served, stack: contextlib.AsyncExitStack, path: str, body: Any) -> AsyncIterator[bytes]:
    """A stream that has begun and goes on only when its node does."""
    served.proxy.decode.fault = InjectedFault(FaultKind.STALL, at=2)
    response = await stack.enter_async_context(served.clients.stream("POST", path, json=body))
    pieces = response.aiter_bytes()
    await anext(pieces)
    return pieces


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", COMPLETION), ("/v1/chat/completions", MESSAGES), ("/v1/messages", MESSAGES),
     ("/v1/responses", RESPONSE)],
)  # fmt: skip
async def test_a_stream_that_outlives_the_grace_is_told_and_ends_well(path: str, body: dict[str, Any]) -> None:
    """httpx raises for a chunked answer that is cut."""
    async with served(grace=0.0) as running, contextlib.AsyncExitStack() as stack, asyncio.timeout(SOON):
        pieces = await stalled(running, stack, path, body)
        running.terminate()
        said = b"".join([piece async for piece in pieces])
        event = next(each for each in said.split(b"\n\n") if b"shutting" in each)
        text = json.loads(event.partition(b"data: ")[2])
        assert "shutting down" in json.dumps(text)
        assert event.startswith(b"event: error\n") is (path in ("/v1/messages", "/v1/responses"))
        await running.ended


async def test_operators_can_look_while_streams_end_and_a_second_signal_cuts_them() -> None:
    async with served(grace=SOON) as running, contextlib.AsyncExitStack() as stack, asyncio.timeout(SOON):
        pieces = await stalled(running, stack, "/v1/completions", COMPLETION)
        running.terminate()
        await refused(str(running.clients.base_url))
        assert (await running.operators.get("/ready")).status_code == 503
        assert "pdproxy_requests_active 1.0" in (await running.operators.get("/metrics")).text
        assert not running.ended.done()
        running.terminate()
        await running.ended
        assert pieces is not None, "a stream that nobody refers to is closed"


async def refused(address: str) -> None:
    """Wait until a port takes no connections any more."""
    with contextlib.suppress(httpx.TransportError):
        while True:
            async with plain_client(address) as late:
                await late.get("/health")
            await asyncio.sleep(0.01)


async def test_a_port_that_ends_by_itself_ends_the_other() -> None:
    for number in range(2):
        async with served(grace=SOON) as running, asyncio.timeout(SOON):
            running.ports[number].should_exit = True
            await running.ended
            assert running.proxy.running.leaving.is_set()
