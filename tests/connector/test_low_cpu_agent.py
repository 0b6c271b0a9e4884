"""NIXL agents with a sleeping progress thread: idle when nothing is transferred, awake when something is."""

from __future__ import annotations

import time

from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

from connector.worker_base import LowCpuNixlAgent

WATCHED = 0.5
"""Seconds."""


def low_cpu() -> NixlWrapper:
    return LowCpuNixlAgent(threads=1, delay=1.0)


def stock() -> NixlWrapper:
    return NixlWrapper("stock", nixl_agent_config(num_threads=1))


def test_a_low_cpu_agent_costs_nothing_while_it_waits() -> None:
    agent = low_cpu()
    before = time.process_time()
    time.sleep(WATCHED)
    assert time.process_time() - before < WATCHED / 4
    del agent


def test_a_stock_agent_spins() -> None:
    """NIXL's own keeps a core busy, as far as the machine has one free; when it no longer does, ours is needless."""
    agent = stock()
    before, start = time.process_time(), time.monotonic()
    while time.process_time() - before <= WATCHED / 4 and time.monotonic() < start + 20 * WATCHED:
        time.sleep(WATCHED / 10)
    assert time.process_time() - before > WATCHED / 4
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
