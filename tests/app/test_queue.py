"""Requests that wait in the running proxy, and its answers to those that may not."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from pdproxy.settings.model import Keys, Limits, Settings
from tests.app.running_proxy import SOON, RunningProxy, bearer, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault

ASK: dict[str, Any] = {"model": "m", "prompt": "one two three four", "max_tokens": 4}
ONE_AT_A_TIME = 1e-4
"""Part of the fake node's 100,000 tokens: less than two of these requests take."""


async def asked(server: RunningProxy, key: str = "none", **headers: str) -> httpx.Response:
    return await server.client.post("/v1/completions", json=ASK, headers={**bearer(key), **headers})


async def test_a_request_waits_for_room_and_the_next_one_is_turned_away() -> None:
    async with running_proxy(Settings(limits=Limits(decode_fill=ONE_AT_A_TIME, queue=1))) as server:
        server.decode.fault = InjectedFault(FaultKind.STALL, at=2, times=1)
        async with asyncio.timeout(SOON), server.client.stream("POST", "/v1/completions", json={**ASK, "stream": True}):
            waits = asyncio.create_task(asked(server))
            await server.until("pdproxy_requests_queued 1.0")
            prefilled = len(server.prefill.legs())
            refused = await asked(server)
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "try again in" in error["message"]
            assert len(server.prefill.legs()) == prefilled, "neither has a hand-over"
        answered = await asyncio.wait_for(waits, SOON)
        assert (answered.status_code, answered.headers["x-pdproxy-route"].split(";")[0]) == (200, "disaggregated")
        assert "queue;dur=" in answered.headers["server-timing"]
        await server.until('pdproxy_phase_seconds_count{phase="queue"} 1.0')
        await server.until('pdproxy_rejected_total{reason="queue_full"} 1.0')
        await server.until('pdproxy_requests_total{endpoint="/v1/completions",model="other",outcome="rejected"} 1.0')


async def test_a_client_that_leaves_the_queue_leaves_nothing_behind() -> None:
    async with running_proxy(Settings(limits=Limits(decode_fill=ONE_AT_A_TIME))) as server:
        server.decode.fault = InjectedFault(FaultKind.STALL, at=2, times=1)
        async with asyncio.timeout(SOON), server.client.stream("POST", "/v1/completions", json={**ASK, "stream": True}):
            waits = asyncio.create_task(asked(server))
            await server.until("pdproxy_requests_queued 1.0")
            waits.cancel()
            await server.until("pdproxy_requests_queued 0.0")
        await server.until("pdproxy_requests_active 0.0")
        await server.until('pdproxy_requests_total{endpoint="/v1/completions",model="m",outcome="client_gone"} 2.0')


async def test_a_flood_of_one_key_lets_the_other_key_in_and_an_urgent_one_goes_first(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-flood flood\nsk-quiet quiet\n")
    order: list[str] = []

    async def ask_and_note(key: str, **headers: str) -> None:
        assert (await asked(server, key, **headers)).status_code == 200
        order.append(headers.get("x-vllm-priority", key))

    settings = Settings(keys=Keys(file=path), limits=Limits(concurrency=1))
    async with running_proxy(settings, "sk-flood") as server, asyncio.timeout(SOON):
        server.decode.fault = InjectedFault(FaultKind.STALL, at=2, times=1)
        async with server.client.stream("POST", "/v1/completions", json={**ASK, "stream": True}):
            flood = [asyncio.create_task(ask_and_note("sk-flood")) for _ in range(8)]
            await server.until("pdproxy_requests_queued 8.0")
            quiet = asyncio.create_task(ask_and_note("sk-quiet"))
            await server.until("pdproxy_requests_queued 9.0")
            urgent = asyncio.create_task(ask_and_note("sk-flood", **{"x-vllm-priority": "-1"}))
            await server.until("pdproxy_requests_queued 10.0")
        await asyncio.gather(quiet, urgent, *flood)
    assert order[0] == "-1"
    assert order.index("sk-quiet") <= 2
