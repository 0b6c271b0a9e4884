"""Room for bodies: counted as they come, given back on every exit, and who finds none is told to come again."""

import asyncio
import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError
from pdproxy.intake.admission import BodyBudget
from pdproxy.observe.metrics import Metrics
from pdproxy.settings.model import Limits, Settings
from tests.app.running_proxy import SOON, RunningProxy, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault


class Room:
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


def test_what_is_here_counts_until_its_request_ends() -> None:
    room = Room()
    with room.budget.reserve() as share:
        share.grow_to(4)
        share.grow_to(9)
        assert room.held == 9
        with room.budget.reserve() as other:
            other.grow_to(1)
            assert room.held == 10
        assert room.held == 9
    assert (room.held, room.refused) == (0, None)


def test_who_finds_no_room_is_told_to_come_again_and_holds_nothing() -> None:
    room = Room()
    with room.budget.reserve() as share, room.budget.reserve() as late:
        share.grow_to(6)
        late.grow_to(2)
        with pytest.raises(ClientError) as caught:
            late.grow_to(5)
        assert (caught.value.status, caught.value.code) == (429, "bodies_full")
        assert dict(caught.value.headers) == {"retry-after": "1", "connection": "close"}
        assert (room.held, room.refused) == (8, 1)
        share.grow_to(8)
    assert room.held == 0


def test_it_is_given_back_whatever_happens() -> None:
    room = Room()

    def fail() -> None:
        with room.budget.reserve() as share:
            share.grow_to(10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert room.held == 0


def _ask(words: int) -> dict[str, Any]:
    return {"model": "m", "prompt": "x" * words, "max_tokens": 2}


async def _held(shop: RunningProxy, least: int) -> None:
    async with asyncio.timeout(SOON):
        while True:
            page = (await shop.client.get("/metrics")).text
            if int(float(page.partition("\npdproxy_body_bytes ")[2].split()[0])) >= least:
                return
            await asyncio.sleep(0.02)


async def test_a_full_house_lets_nobody_in_and_empties_again() -> None:
    async with running_proxy(Settings(limits=Limits(body_bytes=2048, held_bytes=2500))) as shop:
        shop.decode.trouble = InjectedFault(FaultKind.HANG)
        first = asyncio.ensure_future(shop.client.post("/v1/completions", json=_ask(1500)))
        await _held(shop, 1500)
        got = await shop.client.post("/v1/completions", json=_ask(1500))
        assert (got.status_code, got.headers["retry-after"]) == (429, "1")
        assert json.loads(got.content)["error"]["code"] == "bodies_full"
        shop.decode.trouble = None
        assert (await shop.client.post("/v1/completions", json=_ask(10))).status_code == 200
        first.cancel()
        await shop.until("pdproxy_body_bytes 0.0")
        assert (await shop.client.post("/v1/completions", json=_ask(1500))).status_code == 200
