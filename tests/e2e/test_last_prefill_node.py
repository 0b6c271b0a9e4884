"""The only prefill node freezes: the decode node computes prompts within seconds, and later ones at once."""

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME, NodeSpec, Role
from deploy.local.stack import ProxySpec, Stack, logs_of, start_stack
from deploy.local.supervise import Supervisor
from tests.e2e.metrics_reader import read
from tests.e2e.process_faults import ProcessFault, go_on, strike

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(600)]

AT_ONCE = 5
FOUND_WITHIN_S = 8.0
"""Seconds: silence, and two probes of three times `health.silence_timeout`, are five seconds in all."""
LATER_WITHIN_S = 2.0
BACK_WITHIN_S = 30.0
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One node of each role and a proxy. Logs: `.run/e2e-last-prefill`."""
    specs = [NodeSpec("prefill", Role.PREFILL, 0, 0), NodeSpec("decode", Role.DECODE, 0, 0)]
    with Supervisor(logs_of("e2e-last-prefill")) as supervisor:
        yield start_stack(supervisor, specs, ProxySpec(), print)


async def ask(client: httpx.AsyncClient, stack: Stack, seed: int) -> float:
    """Seconds until the right answer."""
    question = quiz(seed, 800)
    body = {"model": SERVED_NAME, "prompt": question.prompt(), "max_tokens": 8, "temperature": 0}
    began = time.monotonic()
    answer = await client.post(f"{stack.proxy.url}/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == question.answer
    return time.monotonic() - began


async def test_nobody_waits_for_the_only_prefill_node(stack: Stack) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        await ask(client, stack, 5000)
        strike(stack.prefill[0].part, ProcessFault.STOPPED)
        try:
            first = await asyncio.gather(*(ask(client, stack, 5001 + at) for at in range(AT_ONCE)))
            later = [await ask(client, stack, 5100 + at) for at in range(AT_ONCE)]
        finally:
            go_on(stack.prefill[0].part)
        print(f"\nfrozen: the first took {max(first):.1f} s, later ones {max(later):.1f} s", end="; ")
        woken = time.monotonic()
        while not await asyncio.to_thread(read, stack.proxy.admin_url, "pdproxy_node_up", node="prefill-0", state="up"):
            assert time.monotonic() - woken < BACK_WITHIN_S
            await asyncio.sleep(0.1)
        print(f"serves again {time.monotonic() - woken:.1f} s after it woke")
    assert max(first) < FOUND_WITHIN_S
    assert max(later) < LATER_WITHIN_S
