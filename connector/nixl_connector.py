"""The connector class that a vLLM node loads (`kv_connector_module_path: connector.nixl_connector`), and the map of
this package. vLLM makes one `NixlConnector` in the scheduler's process and one in each worker rank's.

Scheduler process: `scheduler.ConnectorScheduler`, on the engine's thread, one per engine:

    Scheduler.add_request (wrapped here) ─ on_new_request ──► `transfer_params` validates the request's
        `kv_transfer_params`: valid → a fresh, clean dict on the request; refused → None, a log line, a count. Only then
        does vLLM's own on_new_request run (truncation on the prefill node, heartbeats on the decode node).
        Before all of it `resumed_requests` carries out a resume order, if the request has one. After it `keeps` looks
        up what the prompt will resume from, which from now on is evicted last.
    schedule ─ get_num_new_matched_tokens ──► ours alone: how much of the ticket is read beyond what the node has
        cached, as `admission` allows.
    schedule ─ update_state_after_alloc, build_connector_meta ──► vLLM's; then `metadata.ConnectorMetadata` adds a
        `ReadOrder` for each read, the readers of each new lease, the releases.
    update_from_output ─ update_connector_output ──► first `metadata.WorkerReport` (reads seen → `leases`; reads ended →
        `decode_reads`: count, quarantine), then `finished_sending` → the lease ends; vLLM frees blocks after it.
    request end ─ request_finished_all_groups ──► `prefill_tickets` issues the signed `ticket` and opens a lease;
        `keeps` keeps what the conversation's next turn will resume from, if the request asked for it.
    set_xfer_handshake_metadata ──► completes the `node_fingerprint`, which goes into tickets and decides which are
        accepted; starts `side_channel.Listener` in the place of vLLM's. Its thread answers decode nodes' questions by
        `ConnectorScheduler.verify(engine id, alias, nonce)`.
    get_kv_connector_stats, at the end of every step ──► `idle_rest`: an engine that computes nothing rests.

Worker process: `worker.ConnectorWorker`, a subclass of vLLM's pull worker, one per rank:

    start_load_kv(ConnectorMetadata) ──► starts reads and leases. `worker_base` defers a read until `verifier`'s thread
        has the prefill node's engine metadata (`peer_engines`, `peers`), on which vLLM's own handshake then runs.
    get_transfer_results ──► `pending_reads` keeps a completed read until the prefill node's verdict is there;
        `path_probes` goes on with the probes of engines that `peer_paths`, in the scheduler's process, has barred.
    build_connector_worker_meta ──► the `WorkerReport` of the step.

Metrics: both processes count in `counters.Counters`; `get_kv_connector_stats` drains them into `stats.ConnectorStats`,
which vLLM carries to the API server's `/metrics`. The cache's capacity (`kv_groups`) and the fingerprint go the same
way once, in an idle step that `has_pending_push_work` requests.

On the wire (HTTP), all under `kv_transfer_params`:
    prefill leg   {"do_remote_decode": true, "pdproxy_hand_over": ID, "pdproxy_readers": n}; both of ours optional
    its answer    vLLM's ticket + {"pdproxy": {"v": 2, "digest", "fingerprint", "block_sizes", "readers", "issued_at",
                  "signature"}}
    decode leg    the answer's dict, as it is; with "pdproxy_explain": true, what became of it is in the answer
                  (`read_reports`)
    release       {"pdproxy_release": ID} with any one-token request to the same node and data-parallel rank
    keep          {"pdproxy_keep": {"id": ID, "seconds": S}} beside any of these, or alone (`keep_orders`); the answer
                  has {"pdproxy_kept": {"hit", "tokens", "blocks", "why"}} (`keeps`)
    forget        {"pdproxy_forget": [ID, ...]} beside any of these, or alone, as a release is sent
    resumed       {"pdproxy_resume": ...} beside any of these, or alone: `resume_order`; made by the node itself
On the wire between nodes (the side channel): `messages`, over `zmtp` frames, served by `tcp_server`.

Bounds. Blocks whose proxy was killed are freed `kv_lease_duration` (30 s unless set) after their prefill ended; a
decode node that has the request queued or running renews them until it has read, or is gone, and then once at most.
Versions. vLLM's NIXL handshake hashes its own version: nodes of two versions refuse each other, the read ends as
`incompatible`, and the decode node computes the prompt. An unknown ticket version is refused.
A vLLM that the connector is not tested with is refused when the node starts (`vllm_version`).

The rest: `config` (settings, errors, vLLM's plugin entry point), `weights` (digests of checkpoints and LoRA adapters),
`cpu_worker` (seeded sampling and resumed requests on CPU nodes), `tiers/` (several connectors on one node), `liveness`
(whether the node's processes run, for whoever asks at `alive_route`).
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from . import __version__
from .config import SECRET_VARIABLE, STATE_LAYOUT, ConnectorConfig, from_vllm, has_endpoints
from .ticket_keys import following
from .vllm_version import require_tested, vllm_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from .scheduler import ConnectorScheduler
    from .worker import ConnectorWorker


with vllm_names():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector

    from .resumed_requests import engine_resumes
    from .stats import ConnectorPromMetrics, ConnectorStats, drained

log = logging.getLogger("vllm.pdproxy.scheduler")

_WRAPPED = "pdproxy_wrapped"


class NixlConnector(NixlPullConnector):
    """vLLM's pull connector, with our scheduler side and our worker side.

    It has the name of vLLM's own, since platform code decides by the configured name. Raises ConfigError.
    """

    connector_scheduler: ConnectorScheduler | None
    connector_worker: ConnectorWorker | None

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        require_tested(vllm_config.kv_transfer_config.kv_connector_extra_config)
        # Skips NixlPullConnector's constructor, which would make vLLM's own two sides, the worker's with a NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        config = following(from_vllm(vllm_config.kv_transfer_config, os.environ))
        if role == KVConnectorRole.SCHEDULER:
            from vllm.v1.core.sched.scheduler import Scheduler
            from vllm.v1.engine.core import EngineCore

            from .scheduler import ConnectorScheduler

            wrap_add_request(Scheduler)
            wrap_preprocessing(EngineCore)
            self.connector_scheduler = ConnectorScheduler(vllm_config, self.engine_id, kv_cache_config, config)
        else:
            from .worker import ConnectorWorker

            self.connector_worker = ConnectorWorker(vllm_config, self.engine_id, kv_cache_config, config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a preempted request may not end by an output of before: its ticket would name freed blocks. vLLM goes
        by `kv_role`, which of a node of both roles may say that it reads alone."""
        assert self.connector_scheduler is not None  # vLLM asks in the scheduler's process
        return self.connector_scheduler.prefills

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM names the argument
        """No (vLLM 0.33 calls this): tickets would outlive the memory that they name."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM's cache, once it exists; scheduler's process only."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.connector_scheduler is not None:
            self.connector_scheduler.bind(kv_cache_manager)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This rank's report to the scheduler side after a step."""
        return None if self.connector_worker is None else self.connector_worker.build_connector_worker_meta()

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """This process's stats since the last call. In the scheduler's process vLLM asks for them at the end of every
        step, whatever came of it: the one moment before the next is planned at which it calls each time."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.rest.rest_if_idle()
            return drained(self.connector_scheduler.counters)
        if self.connector_worker is None:
            return None
        self.connector_worker.drain_counters()
        stats: ConnectorStats | None = self.connector_worker.get_kv_connector_stats()
        return stats

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
        """The Prometheus series, in the API server's process."""
        config: ConnectorConfig = from_vllm(vllm_config.kv_transfer_config, os.environ)
        info = node_info(vllm_config, config, os.environ)
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, info)


def wrap_add_request(scheduler_class: type[Any]) -> None:
    """Wrap `add_request` of vLLM's scheduler: a request id that is in use must not end the engine, and a resume order
    is carried out before any connector sees the request (`resumed_requests`).

    vLLM's scheduler asserts that a new request's id is not a running one's ("duplicate request id"), and a failed
    assertion there ends the engine. Two ways lead to it (read in 0.32 and 0.33):

    - `AsyncLLM.notify_kv_transfer_request_rejected`, for a request that the API server rejects, sends the engine a
      stand-in under the id that the client wrote into the body. Every other entry point makes the id unique first
      (`InputProcessor.assign_request_id`: 32 random bits behind the client's id; sub-requests of `n` and of a list put
      their number before or after that).
    - Those 32 bits may repeat among the running requests to which clients gave one id.

    vLLM has no hook before the assertion. A stand-in gets an id of its own; a duplicate is dropped, logged and counted.
    A second call changes nothing.
    """
    stock = scheduler_class.add_request
    if hasattr(stock, _WRAPPED):
        return

    @functools.wraps(stock)
    def add_request(self: Scheduler, request: Request) -> None:
        if request.abort_immediately:
            request.request_id = f"{request.request_id}-rejected-{uuid4().hex}"
        elif _is_in_use(self, request):
            _drop_duplicate(self, request)
            return
        for side in _our_sides(self)[:1]:
            side.resumed.carry_out_order(request, self.structured_output_manager)
        stock(self, request)

    setattr(add_request, _WRAPPED, True)
    scheduler_class.add_request = add_request


def wrap_preprocessing(engine_class: type[Any]) -> None:
    """Wrap `preprocess_add_request` of vLLM's engine, which its input thread calls with each request: one that arrives
    ends the rest of the engine's own thread (`idle_rest`). vLLM has no hook in that thread. A second call changes
    nothing."""
    stock = engine_class.preprocess_add_request
    if hasattr(stock, _WRAPPED):
        return

    @functools.wraps(stock)
    def preprocess_add_request(self: EngineCore, request: EngineCoreRequest) -> tuple[Request, int]:
        preprocessed: tuple[Request, int] = stock(self, request)
        for side in _our_sides(self.scheduler):
            side.rest.interrupt()
        return preprocessed

    setattr(preprocess_add_request, _WRAPPED, True)
    engine_class.preprocess_add_request = preprocess_add_request


def _is_in_use(scheduler: Scheduler, request: Request) -> bool:
    """Whether a running request has this id. A session's next input rightly has it: it continues the first request."""
    running = scheduler.requests.get(request.request_id)
    return running is not None and running.streaming_queue is None


def _drop_duplicate(scheduler: Scheduler, request: Request) -> None:
    log.error("Request %s is dropped: its id is another running request's.", request.request_id)
    for side in _our_sides(scheduler):
        side.counters.duplicate_request()


def _our_sides(scheduler: Scheduler) -> list[ConnectorScheduler]:
    """Our connector's scheduler side; with several connectors on the node, that of each of them that is ours."""
    connector = scheduler.get_kv_connector()
    every = (each for each in getattr(connector, "sub_connectors", (connector,)) if isinstance(each, NixlConnector))
    return [each.connector_scheduler for each in every if each.connector_scheduler is not None]


def node_info(vllm_config: VllmConfig, config: ConnectorConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Labels of the gauge `pdproxy_connector_info`, which the proxy's preflight reads.

    Read in the API server's process, where vLLM has by then copied the engine's final block sizes into the config
    (`vllm/v1/engine/core_client.py`, "Sync block_size"). Two nodes can be paired when `model`, `block_size`,
    `mamba_*`, `*dtype`, `ssm_layout` and both versions agree and their roles differ. `resume`: a stream can be sent to
    the node's own route, and go on there when its node has died. `max_num_batched_tokens`: of a prefill's step, and
    only where one ends is there a state that vLLM could keep. (`long_prefill_token_threshold` does not bound the steps
    of a prompt that is alone.) `max_num_seqs`: of a model with states vLLM wants a block for each. `side_channel`: the
    address that its tickets name (of its first data-parallel rank).
    """
    from vllm import __version__ as vllm_version
    from vllm import envs

    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    resumes = has_endpoints(environ) and SECRET_VARIABLE in environ
    return {
        "role": config.role.value,
        "model": str(vllm_config.model_config.model),
        "block_size": str(cache.block_size),
        "mamba_block_size": str(cache.mamba_block_size),
        "mamba_cache_mode": str(cache.mamba_cache_mode),
        "prefix_caching": str(bool(cache.enable_prefix_caching)).lower(),
        "kv_cache_dtype": str(cache.cache_dtype),
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "max_num_batched_tokens": str(vllm_config.scheduler_config.max_num_batched_tokens),
        "max_num_seqs": str(vllm_config.scheduler_config.max_num_seqs),
        "tp_size": str(vllm_config.parallel_config.tensor_parallel_size),
        "ssm_layout": os.environ.get(STATE_LAYOUT, "default"),
        "failure_policy": str(transfer.kv_load_failure_policy),
        "keep_share": f"{config.keep_share:g}",
        "lease_seconds": f"{config.lease_duration:g}",
        "side_channel": _address(envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT),
        "signed": str(bool(config.keys)).lower(),
        "resume": str(resumes and engine_resumes(vllm_config)).lower(),
        "connector_version": __version__,
        "vllm_version": str(vllm_version),
    }


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
