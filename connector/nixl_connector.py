"""What a node tells a preflight about itself, as labels of `pdproxy_connector_info`.

A request id that is taken already must not end the engine.

vLLM's scheduler asserts that a new request's id is not a living one's ("duplicate request id"), and a failed assertion
there ends the engine. Two ways lead to it (read in 0.32 and 0.33):

- `AsyncLLM.notify_kv_transfer_request_rejected`, for a request that the API server rejects, sends the engine a
  stand-in under the id that the client wrote into the body. Every other entry point makes the id unique first
  (`InputProcessor.assign_request_id`: 32 random bits behind the client's id; sub-requests of `n` and of a list put
  their number before or after that).
- Those 32 bits may repeat among the living requests to which clients gave one id.

vLLM has no hook before the assertion, so `Scheduler.add_request` is wrapped, once a process, when the engine's
scheduler makes its connector.


The connector class that a stock vLLM node loads, and the map of this package.

Scheduler process (one per engine; all of it on the engine's thread but the listener's answers):

    Scheduler.add_request (wrapped by `unique_ids`) ─ on_new_request ──► SchedulerSide: `admission` judges whatever
        kv_transfer_params hold;
        valid → a fresh, clean dict on the request; refused → None, a log line, a count. Only then does vLLM's own
        on_new_request run (truncation on the prefill node, heartbeats on the decode node).
    schedule ─ get_num_new_matched_tokens, update_state_after_alloc, build_connector_meta ──► vLLM's, and then
        `metadata.ConnectorMetadata` with a `ReadOrder` per read, `readers` per new lease, `releases`.
    update_from_output ─ update_connector_output ──► first the `metadata.WorkerReport` (reads seen → lease table;
        reads ended → accounts and retry; stalled → quarantine), then `finished_sending` → `LeaseTable.end`,
        all of it before vLLM frees a block.
    request end ─ request_finished_all_groups ──► the signed ticket; a lease is opened.
    set_xfer_handshake_metadata ──► the node's fingerprint is complete (`node_fingerprint`): it goes into tickets, and
        decides which are taken; `side_channel.Listener(host, port, encoded, judge, accounts)`, ours in the place
        of vLLM's; it asks `SchedulerSide.judge(engine id, request id, nonce)` from its own thread.

Worker process (per rank): `worker_side.WorkerSide`, a subclass of vLLM's pull worker, made here as
`WorkerSide(vllm_config, engine_id, kv_cache_config, config)` with `config: ConnectorConfig`.
    bind_connector_metadata/start_load_kv(ConnectorMetadata) → reads, leases, releases. `handshaking` holds a read back
        until `verifier`'s thread has the prefill node's introduction, which then goes to vLLM's handshake by `relay`.
    get_transfer_results → holds a finished read back until its verdict; then finished or failed.
    build_connector_worker_meta() → `WorkerReport | None`, called by the model runner after get_transfer_results.
    get_kv_connector_stats → `stats.ConnectorStats | None`.

Accounts: both sides add to an `accounts.Accounts`, which `get_kv_connector_stats` drains into
`stats.ConnectorStats`; vLLM carries those to the API server's /metrics. What the cache holds (`capacity`, out of
`footprint`) and the fingerprint go the same way once, in an idle step for which `has_pending_push_work` asks.

On the wire (HTTP), all under `kv_transfer_params`:
    prefill leg   {"do_remote_decode": true, "pdproxy_hand_over": ID, "pdproxy_readers": n}; both of ours optional
    its answer    vLLM's ticket + {"pdproxy": {"v": 2, "digest", "fingerprint", "block_sizes", "readers", "issued_at",
                  "signature"}}
    decode leg    the answer's dict, as it is
    release       {"pdproxy_release": ID} with any one-token request to the same node and data-parallel rank

Bounds. Blocks whose proxy was killed go `kv_lease_duration` (30 s unless set) after their prefill ended; a decode node
that has the request queued or running renews them until it has read, or is gone, and then at most once more.
Versions. vLLM's NIXL handshake hashes its own version: nodes of two versions refuse each other, the read ends as
`incompatible`, and the decode node computes the prompt. An unknown ticket version is refused.
A vLLM that is not as `vllm_contracts` describes it is refused when the node starts (`shape_check`).
"""

from __future__ import annotations

import functools
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from connector.config import ConnectorConfig, from_vllm
from connector.shape_check import require_fit, vllm_names
from connector.vllm_contracts import HAND_OVERS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from connector.scheduler import ConnectorScheduler
    from connector.worker import ConnectorWorker


def node_info(vllm_config: VllmConfig, *, lease_seconds: float, signed: bool) -> dict[str, str]:
    """Label values for the info gauge, each a string.

    Read in the API server's process, where vLLM has by then copied the engine's final block sizes into the config
    (`vllm/v1/engine/core_client.py`, "Sync block_size"). Two nodes can be paired when `model`, `block_size`,
    `mamba_*`, `*dtype`, `ssm_layout` and both versions agree and their roles differ.
    """
    from vllm import __version__ as vllm_version

    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    return {
        "role": str(transfer.kv_role),
        "model": str(vllm_config.model_config.model),
        "block_size": str(cache.block_size),
        "mamba_block_size": str(cache.mamba_block_size),
        "mamba_cache_mode": str(cache.mamba_cache_mode),
        "prefix_caching": str(bool(cache.enable_prefix_caching)).lower(),
        "kv_cache_dtype": str(cache.cache_dtype),
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "tp_size": str(vllm_config.parallel_config.tensor_parallel_size),
        "ssm_layout": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", "default"),
        "failure_policy": str(transfer.kv_load_failure_policy),
        "lease_seconds": f"{lease_seconds:g}",
        "signed": str(signed).lower(),
        "connector_version": connector_version(),
        "vllm_version": str(vllm_version),
    }


def connector_version() -> str:
    """The installed distribution's version; `unknown` where the connector was put on the path by hand."""
    try:
        return version("pdproxy")
    except PackageNotFoundError:
        return "unknown"


log = logging.getLogger("vllm.pdproxy.scheduler")

_WRAPPED = "pdproxy_unique_ids"


def require_unique_ids(scheduler_class: type[Any]) -> None:
    """Wrap `add_request` of vLLM's scheduler; a second call changes nothing."""
    stock = scheduler_class.add_request
    if hasattr(stock, _WRAPPED):
        return

    @functools.wraps(stock)
    def add_request(self: Scheduler, request: Request) -> None:
        if request.abort_immediately:
            request.request_id = f"{request.request_id}-rejected-{uuid4().hex}"
        elif _is_taken(self, request):
            log.error("Request %s is dropped: its id is another living request's.", request.request_id)
            return
        stock(self, request)

    setattr(add_request, _WRAPPED, True)
    scheduler_class.add_request = add_request


def _is_taken(scheduler: Scheduler, request: Request) -> bool:
    """Whether a living request has this id. A session's next input has it rightly: it goes on under the first's id."""
    living = scheduler.requests.get(request.request_id)
    return living is not None and living.streaming_queue is None


with vllm_names():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector

    from connector.stats import ConnectorPromMetrics, ConnectorStats


class NixlConnector(NixlPullConnector):
    """vLLM's pull connector with both halves replaced by ours.

    It bears the name of vLLM's own, since platform code decides by the configured name. Raises ConfigError.
    """

    connector_scheduler: ConnectorScheduler | None
    connector_worker: ConnectorWorker | None

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        require_fit(HAND_OVERS)
        # Past NixlPullConnector's constructor, which would build vLLM's halves, the worker's with a NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        config = from_vllm(vllm_config.kv_transfer_config, os.environ)
        if role == KVConnectorRole.SCHEDULER:
            from vllm.v1.core.sched.scheduler import Scheduler

            from connector.scheduler import ConnectorScheduler

            require_unique_ids(Scheduler)
            self.connector_scheduler = ConnectorScheduler(vllm_config, self.engine_id, kv_cache_config, config)
        else:
            from connector.worker import ConnectorWorker

            self.connector_worker = ConnectorWorker(vllm_config, self.engine_id, kv_cache_config, config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM names the argument
        """No (vLLM 0.33 asks): tickets would outlive the memory that they name."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """vLLM's block pool, once it exists; scheduler's process only."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.bind_gpu_block_pool(gpu_block_pool)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this rank tells the scheduler side after a step."""
        return None if self.connector_worker is None else self.connector_worker.build_connector_worker_meta()

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Either side's stats since the last call."""
        if self.connector_scheduler is not None:
            return self.connector_scheduler.take_stats()
        return None if self.connector_worker is None else self.connector_worker.get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Stats out of the dict that came from another process, or empty ones."""
        return ConnectorStats() if data is None else ConnectorStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        """The Prometheus side, in the API server's process."""
        config: ConnectorConfig = from_vllm(vllm_config.kv_transfer_config, os.environ)
        info = node_info(vllm_config, lease_seconds=config.lease_duration, signed=bool(config.keys))
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, info)
