"""Our connector, which writes down when a request's prefill was done, when its decode node had the ticket, and when it
had read: nodes load this module in the place of `connector.nixl_connector`.

A prefill is done when vLLM's scheduler ends its request, right after the forward pass that computed its last token. The
decode node has the ticket when its scheduler allocates the blocks to read into, and has read when that scheduler is
told so: the read is verified, and vLLM computes with the next step.
"""

import os
import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector.nixl_connector import NixlConnector as Plain
from deploy.local.node import NodeSpec

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

TIMES = "PDPROXY_TEST_TIMES"


def timed(spec: NodeSpec, times: Path) -> NodeSpec:
    """The same node, which appends a line to this file for each request that ends, that reads, or that has read."""
    return replace(
        spec,
        connector_module=__name__,
        more_environment={**spec.more_environment, TIMES: str(times)},
    )


class Moment(StrEnum):
    """What is written down."""

    ENDED = "ended"
    READS = "reads"
    HAS_READ = "has_read"


def noted(times: Path, moment: Moment) -> dict[str, float]:
    """When it came for each request, by vLLM's id for it, in seconds of this host's monotonic clock."""
    lines = (line.split() for line in times.read_text(encoding="ascii").splitlines())
    return {request_id: float(at) for kind, request_id, at in lines if kind == moment}


def _note(moment: Moment, request_id: str) -> None:
    now = time.monotonic()
    with Path(os.environ[TIMES]).open("a", encoding="ascii") as times:
        times.write(f"{moment} {request_id} {now:.6f}\n")


class NixlConnector(Plain):
    """Named as vLLM's own, like the one that it is made of."""

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note the time, then as always."""
        _note(Moment.ENDED, request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return answer

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Note the time where blocks are to be read, then as always."""
        if num_external_tokens:
            _note(Moment.READS, request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Note the time for reads that were verified, then as always."""
        for request_id in (connector_output.finished_recving or set()) - connector_output.failed_recving:
            _note(Moment.HAS_READ, request_id)
        super().update_connector_output(connector_output)
