"""A stopped decode node is given up within two seconds, also if only its engine core stops; a busy one is not.

Two decode nodes compute their prompts themselves, so that every wait is theirs.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import httpx
import pytest

from deploy.local.node import SERVED_NAME, NodeSpec, Role
from deploy.local.stack import ProxySpec, Stack, logs_of, start_stack
from deploy.local.supervise import Supervisor
from deploy.local.watchdog import descendants
from tests.e2e.conftest import async_client
from tests.e2e.metrics_reader import read
from tests.e2e.process_faults import ProcessFault, go_on, inject
from tests.e2e.stream_load import StreamLoad, reciters, start_stream_load

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(900)]

ENVIRONMENT = {
    "PDPROXY_HEALTH_INTERVAL": "1",
    "PDPROXY_HEALTH_SLOW_START": "0",
    "PDPROXY_POLICY_ROUTING": "least-loaded",  # by what is cached all streams may go to the node that is not stopped
    "PDPROXY_HEALTH_SILENCE": "0.1",  # on a fast machine no prompt of this model takes the usual 0.4 s
}
LONGEST = 4096
"""Tokens of a prompt, with its answer."""
PROMPTS = 16
SILENCE = "pdproxy_silence_probes_total"
SOON = 4.0
"""Seconds until a node is given up on a busy machine: twice the usual two."""
PATIENCE = 120.0


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two nodes and a proxy. Logs: `.run/e2e-frozen`."""
    specs = [NodeSpec(f"decode-{at}", Role.DECODE, 0, 0) for at in range(2)]
    with Supervisor(logs_of("e2e-frozen")) as supervisor:
        yield start_stack(supervisor, specs, ProxySpec(more_environment=ENVIRONMENT), print)


def of_all(pids: Collection[int]) -> Collection[int]:
    return pids


def of_the_engine_core(pids: Collection[int]) -> Collection[int]:
    return [pid for pid in pids if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_prompts_of_full_length_are_no_silence(stack: Stack) -> None:
    before = read(stack.proxy.admin_url, SILENCE, outcome="given_up")
    began = time.monotonic()
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
        bodies = [
            {"model": SERVED_NAME, "prompt": [100 + at, *[200 + at] * (LONGEST - 20)], "max_tokens": 8, "stream": True}
            for at in range(PROMPTS)
        ]
        answers = await asyncio.gather(
            *(client.post(f"{stack.proxy.url}/v1/completions", json=body) for body in bodies)
        )
    assert {answer.status_code for answer in answers} == {200}
    answered = read(stack.proxy.admin_url, SILENCE, outcome="answered")
    print(
        f"\n{PROMPTS} prompts of {LONGEST} tokens took {time.monotonic() - began:.1f} s; probes answered: {answered:g}"
    )
    assert answered > 0, "no node was silent"
    assert read(stack.proxy.admin_url, SILENCE, outcome="given_up") == before


@pytest.mark.parametrize("which", [pytest.param(of_all, marks=pytest.mark.long), of_the_engine_core])
async def test_a_stopped_node_is_given_up_and_comes_back(
    stack: Stack, which: Callable[[Collection[int]], Collection[int]]
) -> None:
    part = stack.decode[0].part
    async with async_client(stack.decode[1].url) as alone:
        streams = await reciters(alone, 5000 if which is of_all else 6000, count=6)
    pids = which(descendants(part.process.pid))
    assert pids
    try:
        async with start_stream_load(stack.proxy.url, streams) as running:
            await running.until(StreamLoad.under_way)
            before = running.longest_stall()
            stopped = time.monotonic()
            await asyncio.to_thread(inject, pids, ProcessFault.STOPPED)
            seconds = await _until_state(stack, "down") - stopped
            print(f"\n{which.__name__} ({len(pids)} processes) stopped: given up after {seconds:.2f} s", end="; ")
        print(f"longest stall {running.longest_stall():.1f} s, before that {before:.1f} s")
        assert not running.verdict()
        assert seconds < SOON
        await asyncio.sleep(max(0.0, 12.0 - (time.monotonic() - stopped)))
        assert await _state(stack) == "down", "it came back while it was stopped"
    finally:
        go_on(part)
    await _until_state(stack, "up")


async def _until_state(stack: Stack, state: str) -> float:
    """The monotonic second when decode-0 reaches this state."""
    async with asyncio.timeout(PATIENCE):
        while await _state(stack) != state:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return time.monotonic()


async def _state(stack: Stack) -> str:
    for state in ("up", "down", "probing", "joining"):
        if await asyncio.to_thread(read, stack.proxy.admin_url, "pdproxy_node_up", node="decode-0", state=state):
            return state
    return ""
