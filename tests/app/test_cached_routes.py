"""The policy `cache` through the whole proxy, in front of fake nodes on loopback: that everything is wired up."""

import logging
from typing import Any

import httpx
import pytest

from pdproxy.settings.model import Health, Settings
from pdproxy.settings.types import FirstHandOver, OnNoDecode, Routing
from tests.app.running_proxy import RunningProxy, running_proxy

SETTINGS = Settings(health=Health(first_hand_over=FirstHandOver.WARM_UP))
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "word " * 500}],
    "max_tokens": 4,
    "stream": True,
}


async def ask(running: RunningProxy) -> httpx.Response:
    answered = await running.client.post("/v1/chat/completions", json=CHAT)
    assert answered.text.endswith("data: [DONE]\n\n")
    return answered


async def test_a_plan_says_why_in_header_log_and_metrics(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdproxy")
    async with running_proxy(SETTINGS) as running:
        first = await ask(running)
        await running.until('pdproxy_real_hit_tokens_total{role="prefill"} 1.0')
        again = await ask(running)
        metrics = (await running.operator.get("/metrics")).text
    assert first.headers["x-pdproxy-route"].startswith("disaggregated; reason=nothing_cached; cached=0/")
    # A decode node that is seen to be quicker than the first prefill was computes by itself.
    assert again.headers["x-pdproxy-route"].split("; ")[1] == "reason=cached"
    assert 'pdproxy_plans_total{reason="nothing_cached"} 1.0' in metrics
    lines = [vars(record) for record in caplog.records if record.name == "pdproxy.orchestration.access_log"]
    assert lines[0]["planned_computed"] == lines[0]["planned_tokens"] > 500
    assert lines[0]["route_reason"] == "nothing_cached"


async def test_a_prefill_node_is_the_last_resort_of_this_policy_too() -> None:
    policy = SETTINGS.policy.model_copy(update={"on_no_decode": OnNoDecode.PREFILL})
    async with running_proxy(SETTINGS.model_copy(update={"policy": policy})) as running:
        await running.operator.delete("/nodes/decode-0")
        assert (await running.client.get("/ready")).status_code == 200
        answered = [await ask(running) for _ in range(2)]
        metrics = (await running.operator.get("/metrics")).text
    routes = {each.headers["x-pdproxy-route"].split("; cached")[0] for each in answered}
    assert routes == {"local; reason=no_decode"}
    assert 'pdproxy_local_total{reason="no_decode"} 2.0' in metrics


@pytest.mark.parametrize("routing", Routing)
async def test_a_local_answer_says_in_its_header_what_its_log_line_says(
    routing: Routing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdproxy")
    policy = SETTINGS.policy.model_copy(update={"routing": routing})
    async with running_proxy(SETTINGS.model_copy(update={"policy": policy})) as running:
        await running.operator.post("/nodes/prefill-0/drain")
        answered = await ask(running)
    [line] = [vars(record) for record in caplog.records if record.name == "pdproxy.orchestration.access_log"]
    assert answered.headers["x-pdproxy-route"].split("; ")[:2] == ["local", f"reason={line['local_reason']}"]
    assert line["local_reason"] == "no_prefill"


async def test_the_operator_may_ask_for_a_plan() -> None:
    async with running_proxy(SETTINGS) as running:
        shown = (await running.operator.post("/debug/plan", json=CHAT)).json()
    assert shown["route_reason"] == "nothing_cached"
    assert shown["source"] == "approximation"
    assert set(shown["candidates"]) == {"prefill", "decode", "decode_alone"}
