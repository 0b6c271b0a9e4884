"""The worker's preparation for reads: a NIXL agent that spares the CPU, and handshakes that never block.

CPU. vLLM's worker pins the thread that runs the model to one core (`preserve_cpu_affinity` undoes it), and NIXL's
Python API fixes the delay of its progress thread to 0 (`nixl._api.nixl_agent.__init__`, 1.5.1): the thread polls with
no timeout and keeps a core busy for as long as the node lives. On two cores, a prefill and a decode node so left
nothing to the engines, and a hand-over took seconds. With a delay (`LowCpuNixlAgent`) it sleeps until UCX needs it.

Handshakes. vLLM makes them in one thread, over a ZMQ socket on which it waits up to five seconds for each rank, and an
answer may have any length. Here a read is deferred until its prefill engine's metadata has come (`verifier` fetches
it, in bounded time and memory, and authenticated where there are keys; `peer_engines` decides). vLLM's own handshake
then gets that metadata from a relay on the loopback address, which listens for the few milliseconds that it takes.

Runs in the worker's main thread, but for `_nixl_handshake`, which runs in vLLM's handshake thread.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    HeartbeatInfo,
    NixlAgentMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

from .config import NODE_ID
from .counters import ReadOutcome
from .fingerprint import backends_text
from .kv_groups import require_movable_states
from .liveness import LivenessSocket
from .metadata import ConnectorMetadata, ReadEnd
from .node_fingerprint import RankPayload
from .path_probes import PathProbes, ProbeState, ProbeTarget
from .peer_engines import (
    MOST_RANKS,
    CannotRead,
    EngineMetadata,
    MayRead,
    MetadataRequest,
    NotYet,
    PeerEngines,
    Rank,
)
from .side_channel import LOOPBACK, metadata_relay
from .verifier import ReadVerdict, Verifier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from .config import ConnectorConfig
    from .peer_paths import Peer

log = logging.getLogger("vllm.pdproxy.worker")

CPU_PROGRESS_DELAY = 0.1
"""Seconds, on nodes without a GPU. On nodes with one the thread sleeps only if configured: it was not tried there."""
UNPAIRABLE = (AssertionError, IndexError, KeyError, NotImplementedError, TypeError, ValueError)
"""Errors that vLLM raises when a ticket's blocks do not fit what this node allocated, or the peer's layout."""
INCOMPATIBLE = (*UNPAIRABLE, RuntimeError)
"""Errors of its handshake when the two nodes' versions, models or settings do not go together."""

PROBE_BYTES = 64 * 1024
"""Read by a probe at most: more than a packet of any network, since small ones may pass where large ones are lost."""

_NO_RANKS = CannotRead(ReadOutcome.INCOMPATIBLE, "the two nodes' parallel sizes cannot go together")
_UNREACHABLE = (
    "The prefill engine %s at %s:%d cannot be reached: %s. Prompts with its tickets are computed here. Check that this "
    "node reaches the prefill node's VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, and that both have the same ticket keys."
)
_HANDSHAKE_FAILED = (
    "No hand-over from the prefill engine %s at %s:%d (%s): vLLM's NIXL handshake says: %s. Prompts with its tickets "
    "are computed here."
)


class LowCpuNixlAgent(NixlWrapper):
    """The agent that `NixlBaseConnectorWorker.__init__` makes, with another delay of the progress thread."""

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


@contextmanager
def preserve_cpu_affinity() -> Iterator[None]:
    """Put the calling thread back on the cores that it had, whatever happens inside.

    vLLM's NIXL worker reserves the last core of each NUMA node for transfers (`NixlBaseConnectorWorker.__init__`), but
    pins the thread that runs the model there, too. Threads started inside, NIXL's progress thread among them, stay
    pinned. Does nothing where the system has no affinity.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@dataclass(slots=True)
class ReadSource:
    """Where a read is from. `incarnation`: of the run whose memory it reads; `failure`: why it failed, where known;
    `in_flight`: NIXL took all of its transfers."""

    request: MetadataRequest
    incarnation: str = ""
    in_flight: bool = False
    failure: CannotRead | None = None


class WorkerBase(NixlPullConnectorWorker):
    """vLLM's pull worker, whose reads are given to vLLM only once nothing can make its handshake wait."""

    xfer_handshake_metadata: NixlHandshakePayload

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: ConnectorConfig
    ) -> None:
        # Before vLLM's own: its `__del__` calls `shutdown`, which needs the verifier, also after a failed start.
        self._liveness = LivenessSocket(os.environ.get(NODE_ID, ""))
        self._engine_id = engine_id
        self._verifier = Verifier(config.verify_timeout, metadata_timeout=config.probe_timeout, keys=config.keys)
        self._peer_engines = PeerEngines()
        self._deferred: dict[str, ReqMeta] = {}
        self._sources: dict[str, ReadSource] = {}
        self._failed_handshakes: queue.SimpleQueue[tuple[str, CannotRead]] = queue.SimpleQueue()
        self._half_loaded: set[str] = set()
        self._probes = PathProbes(self)
        self._probe_memory: torch.Tensor | None = None
        self._probe_handshakes: dict[str, HeartbeatInfo] = {}
        require_movable_states(kv_cache_config)
        with preserve_cpu_affinity():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self._backends = self._read_backends(vllm_config, kv_cache_config)
        delay = config.progress_delay
        if delay is None:
            delay = CPU_PROGRESS_DELAY if self.device_type == "cpu" else 0.0
        if delay and self.nixl_backends == ["UCX"]:  # before anything is registered with the agent
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            self.nixl_wrapper = LowCpuNixlAgent(extra.get("num_threads", 4), delay)
        self._liveness.open()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's. What this rank publishes then has all its attention backends."""
        super().register_kv_caches(kv_caches)
        published = self.xfer_handshake_metadata
        self.xfer_handshake_metadata = RankPayload(
            published.compatibility_hash, published.agent_metadata_bytes, self._backends
        )

    def _read_backends(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
        blocks = (group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
        return backends_text(
            (backend.get_name() for backend in self.attn_backends),
            vllm_config.parallel_config.decode_context_parallel_size,
            vllm_config.parallel_config.cp_kv_cache_interleave_size,
            min(blocks, default=0),
        )

    def shutdown(self) -> None:
        """End the verifier, then as vLLM does."""
        self._liveness.close()
        self._verifier.close()
        super().shutdown()

    def _defer(self, metadata: ConnectorMetadata) -> None:
        """Leave vLLM the reads and heartbeats whose engine may be read from, and keep the other reads for later."""
        self._update_peer_engines()
        kept = {
            request_id: meta
            for request_id, meta in self._deferred.items()
            if self._recving_metadata.get(request_id) is meta  # else it was given up
        }
        waiting, self._deferred = {**kept, **metadata.reqs_to_recv}, {}
        metadata.reqs_to_recv = {
            request_id: meta for request_id, meta in waiting.items() if self._may_read(request_id, meta)
        }
        # A new dict: the scheduler's own may be the same object.
        metadata.heartbeat_by_engine = {
            name: info
            for name, info in metadata.heartbeat_by_engine.items()
            if self._is_loaded(name) or isinstance(self._next_step(self._request(name, info, info)), MayRead)
        } | self._probe_handshakes
        self._probe_handshakes = {}

    def _update_peer_engines(self) -> None:
        self._clear_failed_handshakes()
        self._peer_engines.on_lost(self._verifier.lost_addresses())
        for request, result in self._verifier.metadata_results():
            if isinstance(result, EngineMetadata):
                self._probes.on_metadata(request.engine_id, _probe_targets(result))
            elif not self._probes.probes(request.engine_id):  # of a barred engine the scheduler has said it once
                log.warning(_UNREACHABLE, request.engine_id, *request.address, result.why)
            loaded = self._is_loaded(request.engine_id)
            self._peer_engines.on_metadata(request, result, time.monotonic(), loaded=loaded)

    def _may_read(self, request_id: str, meta: ReqMeta) -> bool:
        """Whether vLLM may be given the read now; otherwise it is deferred, or fails."""
        request = self._request_for(meta)
        step = self._next_step(request)
        if isinstance(step, MayRead):
            return True
        self._recving_metadata[request_id] = meta
        if isinstance(step, NotYet):
            self._deferred[request_id] = meta
        else:
            log.warning("No read for %s from %s:%d (%s): %s.", request_id, *request.address, step.outcome, step.why)
            self._sources[request_id].failure = step
            self._recv_failures.add(request_id)
        return False

    def _next_step(self, request: MetadataRequest) -> MayRead | NotYet | CannotRead:
        """The next step before something is sent to or read from an engine; the first step to it is taken."""
        if not request.ranks:
            return _NO_RANKS
        step = self._peer_engines.next_step(request, time.monotonic(), loaded=self._is_loaded(request.engine_id))
        if isinstance(step, NotYet) and step.forget and self._forget(request.engine_id):
            step = self._peer_engines.next_step(request, time.monotonic(), loaded=False)
        if isinstance(step, NotYet) and step.request is not None:
            self._verifier.fetch_metadata(step.request)
        return step

    def _explain(self, request_id: str, end: ReadEnd) -> ReadEnd:
        """The end of a failed read, with its reason where more is known than that it failed."""
        source = self._sources[request_id]
        if source.failure is not None:
            return replace(end, outcome=source.failure.outcome, why=source.failure.why)
        if source.in_flight and not self._is_live(end.nonce):
            self._peer_engines.mark_broken([source.request.engine_id])
        if end.outcome is not ReadOutcome.PEER_UNREACHABLE:
            self._peer_engines.mark_stale([source.request.engine_id])
            return end
        failure = self._peer_engines.failure(source.request, time.monotonic())
        return end if failure is None else replace(end, outcome=failure.outcome, why=failure.why)

    def _is_live(self, nonce: str) -> bool:
        """Whether the transfer of a read that was given up has not ended."""
        raise NotImplementedError

    def _require_same_run(self, request_id: str, end: ReadEnd, answer: ReadVerdict) -> ReadEnd:
        """The end of a read, which counts only if the verdict is by the run of the node whose memory was read."""
        source = self._sources[request_id]
        if end.outcome is not ReadOutcome.VERIFIED or source.incarnation in ("", answer.incarnation):
            return end
        self._peer_engines.mark_stale([source.request.engine_id])
        return ReadEnd(end.nonce, ReadOutcome.UNVERIFIED)

    # ---- probes (`path_probes.ProbeHost`)

    def probe_request(self, peer: Peer) -> MetadataRequest:
        """Which workers of the engine this rank reads from."""
        return self._request(peer.engine_id, peer, peer)

    def probe_step(self, request: MetadataRequest) -> MayRead | NotYet | CannotRead:
        """The next step before a read from there; the first step to it is taken."""
        return self._next_step(request)

    def probe_anew(self, engine_id: str, *, broken: bool) -> None:
        """Ask for the engine's metadata again; where its connection is broken, make another handshake."""
        mark = self._peer_engines.mark_broken if broken else self._peer_engines.mark_stale
        mark([engine_id])

    def probe_agents(self, engine_id: str) -> Mapping[Rank, str]:
        """NIXL's agents of the engine; none before a handshake."""
        agents: Mapping[Rank, str] = self._remote_agents.get(engine_id, {})
        return agents

    def begin_probe_handshake(self, peer: Peer) -> None:
        """Have vLLM make a handshake in the next step: it makes one before it sends a heartbeat, here for nothing."""
        if not self._is_loaded(peer.engine_id):
            self._probe_handshakes[peer.engine_id] = HeartbeatInfo(
                set(), peer.host, peer.port, peer.tp_size, peer.dcp_size, peer.pp_size
            )

    def post_probe(self, agent: str, target: ProbeTarget) -> int | None:
        """Post a small read; its handle, None where NIXL refuses it."""
        if self._probe_memory is None:
            self._probe_memory = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
            whole = [(self._probe_memory.data_ptr(), PROBE_BYTES, 0, "")]
            nixl = self.nixl_wrapper
            nixl.register_memory(nixl.get_reg_descs(whole, "DRAM"), backends=self.nixl_backends)
        size = min(PROBE_BYTES, target.size)
        here = self.nixl_wrapper.get_xfer_descs([(self._probe_memory.data_ptr(), size, 0)], "DRAM")
        there = self.nixl_wrapper.get_xfer_descs([(target.address, size, target.device)], self.nixl_memory_type)
        try:
            handle: int = self.nixl_wrapper.initialize_xfer("READ", here, there, agent)
            self.nixl_wrapper.transfer(handle)
        except _nixl_errors() as error:
            log.debug("NIXL refuses a probe's read from agent %s: %r", agent, error)
            return None
        return handle

    def poll_probe(self, handle: int) -> ProbeState:
        """How a small read stands; one that is over is released."""
        try:
            state = self.nixl_wrapper.check_xfer_state(handle)
            if state == "PROC":
                return ProbeState.UNDER_WAY
            self.nixl_wrapper.release_xfer_handle(handle)
        except _nixl_errors() as error:
            log.debug("The read of a probe failed: %r", error)
            return self._release_failed(handle)
        return ProbeState.DONE if state == "DONE" else ProbeState.FAILED

    def _release_failed(self, handle: int) -> ProbeState:
        """NIXL refuses to release what may still write: it is under way then, whatever its state."""
        try:
            self.nixl_wrapper.release_xfer_handle(handle)
        except _nixl_errors():
            return ProbeState.UNDER_WAY
        return ProbeState.FAILED

    # ---- what reads, heartbeats and probes share

    def _request_for(self, meta: ReqMeta) -> MetadataRequest:
        return self._request(meta.remote.engine_id, meta.remote, meta)

    def _request(
        self, engine_id: str, where: RemoteMeta | HeartbeatInfo | Peer, sizes: ReqMeta | HeartbeatInfo | Peer
    ) -> MetadataRequest:
        """The workers of the engine that this rank reads from; none where the two nodes' sizes cannot go together."""
        assert self.transfer_topo is not None
        try:
            targets = self.transfer_topo.handshake_target_ranks(sizes.tp_size, sizes.dcp_size)
        except UNPAIRABLE:
            targets = []
        fits = 0 < len(targets) * sizes.pp_size <= MOST_RANKS
        ranks = tuple(itertools.product(range(sizes.pp_size), targets)) if fits else ()
        return MetadataRequest(engine_id, (where.host, where.port), ranks)

    def _is_loaded(self, engine_id: str) -> bool:
        """Whether vLLM has agents of the engine, or its handshake is under way (which ends in this order)."""
        return engine_id in self._handshake_futures or engine_id in self._remote_agents

    def _forget(self, engine_id: str) -> bool:
        """Have vLLM forget the engine; False while it cannot (as in `_cleanup_remote_engines`)."""
        if self._handshake_futures or engine_id in self._engines_with_inflight_transfers():
            return False
        if engine_id in self._remote_agents:
            self._cleanup_remote_engine(engine_id, log_eviction=False)
        self._peer_engines.on_forgotten(engine_id)
        log.info("The prefill engine %s is another one than before: a new handshake will be made.", engine_id)
        return True

    def _is_elsewhere(self, remote: RemoteMeta) -> bool:
        """Whether a handshake with the engine was made elsewhere: where to ask after the read is then unknown."""
        known = self._peer_engines.address(remote.engine_id)
        return remote.engine_id in self._remote_agents and known not in (None, (remote.host, remote.port))

    def _pair(self, request_id: str, meta: ReqMeta) -> bool:
        """Have vLLM read, or send a notif, after a handshake where one is needed. False for what it cannot pair."""
        try:
            super()._read_blocks_for_req(request_id, meta)
        except UNPAIRABLE:
            log.exception("The ticket of %s, from %s, does not fit this node.", request_id, meta.remote.engine_id)
            return False
        return True

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        metadata = self._peer_engines.take_offer(expected_engine_id)
        if metadata is None:
            raise ConnectionError(f"the prefill node at {host}:{port} has not sent its metadata")
        try:
            with metadata_relay(metadata.payloads) as local:
                return super()._nixl_handshake(LOOPBACK, local, remote_tp_size, expected_engine_id, *args, **kwargs)
        except Exception as error:  # classified here, and raised again
            outcome = ReadOutcome.INCOMPATIBLE if isinstance(error, INCOMPATIBLE) else ReadOutcome.PEER_UNREACHABLE
            log.error(_HANDSHAKE_FAILED, expected_engine_id, host, port, outcome.value, error)  # noqa: TRY400 - vLLM logs it
            self._failed_handshakes.put((expected_engine_id, CannotRead(outcome, str(error))))
            raise

    def _clear_failed_handshakes(self) -> None:
        """Note which handshakes vLLM could not make, and clear away what they left."""
        while not self._failed_handshakes.empty():
            engine_id, failure = self._failed_handshakes.get()
            self._peer_engines.on_handshake_failed(engine_id, failure, time.monotonic())
            if engine_id != self._engine_id:  # whose entries every read needs
                self._half_loaded.add(engine_id)
        if self._handshake_futures:
            return
        for engine_id in self._half_loaded - self._remote_agents.keys():
            self._remote_agents[engine_id] = {}
            self._cleanup_remote_engine(engine_id, log_eviction=False)
        self._half_loaded.clear()


def _probe_targets(metadata: EngineMetadata) -> dict[Rank, ProbeTarget]:
    """The beginning of each rank's first region; none where the payload is of another form, as the handshake says."""
    targets = {}
    for rank, payload in metadata.payloads.items():
        try:
            encoded = msgspec.msgpack.decode(payload, type=NixlHandshakePayload).agent_metadata_bytes
            agent = msgspec.msgpack.decode(encoded, type=NixlAgentMetadata)
        except msgspec.DecodeError:
            continue
        if agent.kv_caches_base_addr and agent.block_lens:
            size = agent.num_blocks * agent.block_lens[0]
            targets[rank] = ProbeTarget(agent.kv_caches_base_addr[0], size, agent.device_id)
    return targets


def _nixl_errors() -> tuple[type[Exception], ...]:
    """Errors that NIXL raises; its classes have nothing in common."""
    bindings = vars(sys.modules[NixlWrapper.__module__].nixlBind).values()
    own = (each for each in bindings if isinstance(each, type) and issubclass(each, Exception))
    return (RuntimeError, ValueError, *own)


def is_awaited(meta: ReqMeta) -> bool:
    """Whether the scheduler waits for this read; otherwise only a notif is to be sent (vLLM's own distinction)."""
    return bool(meta.awaiting_kvs) or any(meta.local_block_ids)
