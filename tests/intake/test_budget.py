"""The budget for request bodies: counted as they arrive, given back on every exit, 429 beyond it."""

import asyncio
import json
from contextlib import closing
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError
from pdproxy.intake.body import TRIM_FROM, BodyBudget
from pdproxy.observe.metrics import Metrics
from pdproxy.settings.model import Limits, Settings
from tests.app.running_proxy import SOON, RunningProxy, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault


class BudgetSetup:
    """A budget of ten bytes, and what is seen of it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.budget = BodyBudget(10, Metrics(self.registry))

    @property
    def held(self) -> float | None:
        return self.registry.get_sample_value("pdproxy_body_bytes")

    @property
    def refused(self) -> float | None:
        return self.registry.get_sample_value("pdproxy_rejected_total", {"reason": "bodies_full"})


def test_bytes_count_until_their_request_ends() -> None:
    setup = BudgetSetup()
    with closing(setup.budget.reserve("k")) as share:
        share.grow_to(4)
        share.grow_to(9)
        assert setup.held == 9
        with closing(setup.budget.reserve("k")) as other:
            other.grow_to(1)
            assert setup.held == 10
        assert setup.held == 9
    assert (setup.held, setup.refused) == (0, 0)


@pytest.mark.parametrize(("size", "trims"), [(TRIM_FROM + 1, 1), (TRIM_FROM, 0)])
async def test_free_memory_goes_back_to_the_system_once_after_large_bodies(size: int, trims: int) -> None:
    """One body of 12 MB that a client sends now and then would else keep as much between small objects for good."""
    trimmed = list[int]()
    budget = BodyBudget(4 * TRIM_FROM, Metrics(CollectorRegistry()), lambda: trimmed.append(1))
    for _ in range(3):
        with closing(budget.reserve("k")) as share:
            share.grow_to(size)
    async with asyncio.timeout(SOON):
        while len(trimmed) < trims:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert len(trimmed) == trims


def test_without_room_a_request_gets_429_and_holds_nothing_more() -> None:
    setup = BudgetSetup()
    with closing(setup.budget.reserve("k")) as share, closing(setup.budget.reserve("k")) as late:
        share.grow_to(6)
        late.grow_to(2)
        with pytest.raises(ClientError) as caught:
            late.grow_to(5)
        assert (caught.value.status, caught.value.code) == (429, "bodies_full")
        assert dict(caught.value.headers) == {"retry-after": "1", "connection": "close"}
        assert (setup.held, setup.refused) == (8, 1)
        share.grow_to(8)
    assert setup.held == 0


def test_bytes_are_given_back_on_an_error() -> None:
    setup = BudgetSetup()

    def fail() -> None:
        with closing(setup.budget.reserve("k")) as share:
            share.grow_to(10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert setup.held == 0


def _ask(words: int) -> dict[str, Any]:
    return {"model": "m", "prompt": "x" * words, "max_tokens": 2}


async def _held(server: RunningProxy, least: int) -> None:
    async with asyncio.timeout(SOON):
        while True:
            page = (await server.operator.get("/metrics")).text
            if int(float(page.partition("\npdproxy_body_bytes ")[2].split()[0])) >= least:
                return
            await asyncio.sleep(0.02)


async def test_a_full_budget_refuses_requests_until_there_is_room() -> None:
    async with running_proxy(Settings(limits=Limits(body_bytes=2048, held_bytes=2500))) as server:
        server.decode.fault = InjectedFault(FaultKind.HANG)
        first = asyncio.ensure_future(server.client.post("/v1/completions", json=_ask(1500)))
        await _held(server, 1500)
        got = await server.client.post("/v1/completions", json=_ask(1500))
        assert (got.status_code, got.headers["retry-after"]) == (429, "1")
        assert json.loads(got.content)["error"]["code"] == "bodies_full"
        server.decode.fault = None
        assert (await server.client.post("/v1/completions", json=_ask(10))).status_code == 200
        first.cancel()
        await server.until("pdproxy_body_bytes 0.0")
        assert (await server.client.post("/v1/completions", json=_ask(1500))).status_code == 200
