"""NIXL's agent with a progress thread that sleeps, for nodes whose cores are few.

NIXL's Python API fixes the delay of its progress thread to 0 (`nixl._api.nixl_agent.__init__`, 1.5.1): the thread polls
with no timeout and keeps a core busy for as long as the node lives. On two cores, a prefill and a decode node so left
nothing to the engines, and a hand-over took seconds. With a delay the thread sleeps until UCX has something for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CPU_PROGRESS_DELAY = 0.1
"""Seconds, on nodes without a GPU. Nodes with one sleep only when they are told to: it was not tried there."""


def patient_agent(
    device_type: str, backends: Sequence[str], settings: KVTransferConfig, delay: float | None
) -> PatientAgent | None:
    """An agent for a worker, before anything is registered with its own; None where its thread may spin.

    `delay`: as configured, in seconds; None leaves it to the kind of node.
    """
    seconds = (CPU_PROGRESS_DELAY if device_type == "cpu" else 0.0) if delay is None else delay
    if not seconds or list(backends) != ["UCX"]:
        return None
    return PatientAgent(settings.get_from_extra_config("num_threads", 4), seconds)


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
