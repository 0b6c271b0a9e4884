"""Our connector, which writes down when each prefill was done: a node loads this module in the place of
`connector.nixl_connector`.

The moment is that in which vLLM's scheduler ends a request, right after the forward pass that computed its last token.
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector.nixl_connector import NixlConnector as Plain
from deploy.local.node import NodeSpec, kv_transfer_config

if TYPE_CHECKING:
    from vllm.v1.request import Request

TIMES = "PDPROXY_TEST_TIMES"


def timed(spec: NodeSpec, times: Path) -> NodeSpec:
    """The same node, which appends a line to this file for each request that ends."""
    config = {**kv_transfer_config(spec), "kv_connector_module_path": __name__}
    return replace(
        spec,
        more_arguments=(*spec.more_arguments, "--kv-transfer-config", json.dumps(config)),
        more_environment={**spec.more_environment, TIMES: str(times)},
    )


def ended(times: Path) -> dict[str, float]:
    """When each request ended, by vLLM's id for it, in seconds of this host's monotonic clock."""
    lines = (line.split() for line in times.read_text(encoding="ascii").splitlines())
    return {request_id: float(at) for request_id, at in lines}


class NixlConnector(Plain):
    """Named as vLLM's own, like the one that it is made of."""

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note the time, then as always."""
        now = time.monotonic()
        with Path(os.environ[TIMES]).open("a", encoding="ascii") as times:
            times.write(f"{request.request_id} {now:.6f}\n")
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return answer
