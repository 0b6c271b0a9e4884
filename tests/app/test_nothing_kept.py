"""Over real connections: once a client has its answer, its request is not alive, without the garbage collector."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdproxy.request import ClientRequest, SubRequest
from pdproxy.settings.model import Health, Limits, Settings
from pdproxy.settings.types import FirstHandOver
from tests.app.running_proxy import SOON, RunningProxy, running_proxy
from tests.fakes.faults import QUICK_FAULTS, FaultKind, InjectedFault

SETTINGS = Settings(
    limits=Limits(body_bytes=200_000, held_bytes=400_000),
    health=Health(first_hand_over=FirstHandOver.WARM_UP),
)
FAULTS = {"none": InjectedFault(FaultKind.RESET, times=0), **QUICK_FAULTS}
ON_SHARED_LOOP = pytest.mark.asyncio(loop_scope="module")
pytestmark = pytest.mark.usefixtures("no_collector")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[RunningProxy]:
    async with running_proxy(SETTINGS) as made:
        yield made


def alive() -> list[object]:
    return [each for each in gc.get_objects() if isinstance(each, ClientRequest | SubRequest)]


async def check_gone() -> None:
    """Nothing is alive once all tasks had their turns: a release goes out behind the answer."""
    async with asyncio.timeout(SOON):
        while alive():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def body(model: str = "m", *, stream: bool = False) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "words " * 10}], "max_tokens": 8, "stream": stream}


@ON_SHARED_LOOP
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_request_is_gone_once_it_is_answered(shared: RunningProxy, fault: str, role: str, stream: bool) -> None:
    node = shared.prefill if role == "prefill" else shared.decode
    node.fault = FAULTS[fault]
    try:
        answer = await shared.client.post("/v1/chat/completions", json=body(stream=stream))
    finally:
        node.fault = None
    await check_gone()
    assert answer.status_code in (200, 400, 429, 500, 502, 503)


@ON_SHARED_LOOP
@pytest.mark.parametrize("sent", [b"{", b"[" * 150_000, b'{"model":"m","n":0}', b'{"model":"other"}'])
async def test_a_request_that_is_refused_is_gone(shared: RunningProxy, sent: bytes) -> None:
    answer = await shared.client.post("/v1/chat/completions", content=sent)
    await check_gone()
    assert answer.status_code in (400, 404)


@ON_SHARED_LOOP
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_client_has_left_is_gone(shared: RunningProxy, stream: bool) -> None:
    shared.decode.fault = InjectedFault(FaultKind.STALL, at=2)
    try:
        with contextlib.suppress(httpx.TimeoutException):
            await shared.client.post("/v1/chat/completions", json=body(stream=stream), timeout=0.3)
    finally:
        shared.decode.fault = None
    await check_gone()
