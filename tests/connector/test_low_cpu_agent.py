"""NIXL agents with a sleeping progress thread: idle when nothing is transferred, awake when something is."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

from connector.worker_base import LowCpuNixlAgent

WATCHED = 0.5
"""Seconds."""


def low_cpu() -> NixlWrapper:
    return LowCpuNixlAgent(threads=1, delay=1.0)


def stock() -> NixlWrapper:
    return NixlWrapper("stock", nixl_agent_config(num_threads=1))


@pytest.mark.parametrize(("make", "spins"), [(low_cpu, False), (stock, True)])
def test_a_low_cpu_agent_costs_nothing_while_it_waits(make: Callable[[], NixlWrapper], spins: bool) -> None:
    """NIXL's own keeps a core busy; should that change, `LowCpuNixlAgent` is needless."""
    agent = make()
    before = time.process_time()
    time.sleep(WATCHED)
    assert (time.process_time() - before > WATCHED / 4) is spins
    del agent


def test_a_notif_wakes_the_thread_long_before_its_delay() -> None:
    sender, receiver = low_cpu(), low_cpu()
    name = sender.add_remote_agent(receiver.get_agent_metadata())
    sender.send_notif(name, notif_msg=b"first, which also connects")
    assert arrival(receiver) < 5
    sender.send_notif(name, notif_msg=b"done")
    assert arrival(receiver) < 0.5


def arrival(agent: NixlWrapper) -> float:
    """Seconds until a notif is there."""
    start = time.monotonic()
    while not agent.get_new_notifs() and time.monotonic() < start + 10:
        time.sleep(0.001)
    return time.monotonic() - start
