"""Telling each child what concerns it, out of what vLLM tells the choosing connector as a whole."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from connector.multi.child import Child
from connector.multi.metadata import WeightedMetadata, WeightedReport

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


def tell_output(
    children: Sequence[Child], connector_output: "KVConnectorOutput", owners: Mapping[str, int | None]
) -> None:
    """What the workers did: each child gets its own part of their report, and its own loads.

    `owners`: who loads each request that has ended loading; None where nobody knows, and all are told. The very object
    goes to each in turn, as vLLM does it, since a child may write into it.
    """
    finished, failed = connector_output.finished_recving, connector_output.failed_recving
    report = connector_output.kv_connector_worker_meta
    told = report.children if isinstance(report, WeightedReport) else None
    parts = (None,) * len(children) if told is None else told.metadata
    try:
        for child, part in zip(children, parts, strict=True):
            mine = {request_id for request_id, owner in owners.items() if owner in (None, child.number)}
            connector_output.finished_recving = mine
            connector_output.failed_recving = failed & mine
            connector_output.kv_connector_worker_meta = part
            child.connector.update_connector_output(connector_output)
    finally:
        connector_output.finished_recving, connector_output.failed_recving = finished, failed
        connector_output.kv_connector_worker_meta = report


def tell_preempted(
    children: Sequence[Child], told: KVConnectorMetadata | set[str], bound: KVConnectorMetadata | None
) -> None:
    """Who was preempted: `told` is request ids or metadata, whichever the caller has; `bound`, this step's metadata."""
    ids = told if isinstance(told, set) else told.preempted if isinstance(told, WeightedMetadata) else frozenset()
    whole = bound if isinstance(told, set) else told
    parts = whole.metadata if isinstance(whole, MultiKVConnectorMetadata) else (None,) * len(children)
    for child, part in zip(children, parts, strict=True):
        child.preempted(sorted(ids), part)
