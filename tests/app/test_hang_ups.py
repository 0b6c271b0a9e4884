"""Clients that leave in the middle of their streams: nothing of those stays, and nothing waits for the collector."""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from pdproxy.settings.model import Settings
from tests.app.running_proxy import SOON, RunningProxy, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault

STREAM = {"model": "m", "prompt": "one two", "max_tokens": 5, "stream": True}
FIRST, MORE = 5, 25
PACKAGES = ("pdproxy.", "uvicorn.", "httptools.")
REMEMBERED = ("Place", "Prefilled")
"""For some seconds, to count how many nodes are needed."""


@pytest.fixture
async def server() -> AsyncIterator[RunningProxy]:
    async with running_proxy(Settings()) as running:
        running.decode.fault = InjectedFault(FaultKind.STALL, at=2)
        yield running


async def hang_up(server: RunningProxy, times: int) -> None:
    """One stream after the other is left after its first piece."""
    for _ in range(times):
        async with server.client.stream("POST", "/v1/completions", json=STREAM) as response:
            assert response.status_code == 200
            await anext(response.aiter_raw())
    async with asyncio.timeout(SOON):
        while server.decode.running or server.prefill.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


async def test_a_client_whose_body_was_large_is_seen_to_leave(server: RunningProxy) -> None:
    """While such a body is read, the server stops reading whenever enough of it waits to be taken."""
    stream = {**STREAM, "user": "x" * 1_000_000}
    async with server.client.stream("POST", "/v1/completions", json=stream) as response:
        await anext(response.aiter_raw())
    async with asyncio.timeout(SOON):
        while server.decode.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def ours() -> Counter[str]:
    """Objects that there are, by the names of their classes: those of this proxy and of its server."""
    kinds = (type(each) for each in gc.get_objects())
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)  # of a class in C the module may be no text
    return Counter(name for name in names if name.startswith(PACKAGES))


@pytest.mark.usefixtures("no_collector")
async def test_no_object_of_a_stream_outlives_its_client(server: RunningProxy) -> None:
    await hang_up(server, FIRST)
    before = ours()
    await hang_up(server, MORE)
    grown = {name: count for name, count in (ours() - before).items() if not name.endswith(REMEMBERED)}
    assert max(grown.values(), default=0) < MORE // 2, grown
