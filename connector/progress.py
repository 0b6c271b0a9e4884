"""NIXL's agent with a progress thread that sleeps, for nodes whose cores are few.

NIXL's Python API fixes the delay of its progress thread to 0 (`nixl._api.nixl_agent.__init__`, 1.5.1): the thread polls
with no timeout and keeps a core busy for as long as the node lives. On two cores, a prefill and a decode node so left
nothing to the engines, and a hand-over took seconds. With a delay the thread sleeps until UCX has something for it.
"""

from __future__ import annotations

import sys
from uuid import uuid4

from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config


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
