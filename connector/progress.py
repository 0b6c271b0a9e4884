"""NIXL's agent with a progress thread that sleeps, for nodes whose cores are few.

NIXL's Python API fixes the delay of its progress thread to 0 (`nixl._api.nixl_agent.__init__`, 1.5.1): the thread polls
with no timeout and keeps a core busy for as long as the node lives. On two cores, a prefill and a decode node so left
nothing to the engines, and a hand-over took seconds. With a delay the thread sleeps until UCX has something for it.
"""

from __future__ import annotations

import sys
from uuid import uuid4

from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

CPU_PROGRESS_DELAY = 0.1
"""Seconds, on nodes without a GPU. Nodes with one sleep only when they are told to: it was not tried there."""


def progress_delay(device_type: str, configured: float | None) -> float:
    """Seconds that the thread of a worker on this kind of device may sleep; 0: it spins. `configured` wins."""
    if configured is not None:
        return configured
    return CPU_PROGRESS_DELAY if device_type == "cpu" else 0.0


class PatientAgent(NixlWrapper):
    """What vLLM makes in `NixlBaseConnectorWorker.__init__`, but for the delay."""

    def __init__(self, threads: int, delay: float) -> None:
        """`threads`: of the UCX backend. `delay`: seconds that the thread sleeps at most, in whole milliseconds."""
        name = str(uuid4())
        super().__init__(name, nixl_agent_config(backends=[], capture_telemetry=True))
        bindings = sys.modules[NixlWrapper.__module__].nixlBind
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = round(delay * 1e6)
        config.captureTelemetry = True
        self.agent = bindings.nixlAgent(name, config)
        self.create_backend("UCX", {"num_threads": str(threads)})
