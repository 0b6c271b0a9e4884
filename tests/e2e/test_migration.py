"""A decode node dies in the middle of sixteen streams, and no client can tell."""

import asyncio
from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI

from deploy.local.node import Node
from deploy.local.stack import Proxy, ProxySpec, logs_of, start_proxy
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import Pair
from tests.e2e.crowd import Crowd, crowd, reciters
from tests.e2e.fate import Fate, strike
from tests.e2e.meters import read

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.asyncio(loop_scope="function")]


@pytest.fixture
def both(pair: Pair, doomed: Node) -> Iterator[Proxy]:
    """A proxy of our own in front of the shared pair and the node that will die; logs lie in `.run/e2e-migration`."""
    with Supervisor(logs_of("e2e-migration")) as supervisor:
        yield start_proxy(supervisor, ProxySpec(), [pair.prefill, pair.decode, doomed], print)


async def test_killing_a_decode_node_breaks_no_stream(both: Proxy, doomed: Node, reference_client: AsyncOpenAI) -> None:
    streams = await reciters(reference_client, 300)
    async with crowd(both.url, streams) as running:
        await running.until(Crowd.under_way)
        await asyncio.to_thread(strike, doomed.part, Fate.KILLED)
    assert not running.verdict()
    assert read(both.admin_url, "pdproxy_leg_faults_total", leg="decode") > 0, "it died with nothing to do"
    moved = read(both.admin_url, "pdproxy_migrations_total", outcome="done")
    print(f"\n{moved:g} streams moved, longest stall {running.longest_stall():.1f} s")
