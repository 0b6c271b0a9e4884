"""NIXL's agent with a progress thread that sleeps, for nodes whose cores are few.

NIXL's Python API fixes the delay of its progress thread to 0 (`nixl._api.nixl_agent.__init__`, 1.5.1): the thread polls
with no timeout and keeps a core busy for as long as the node lives. On two cores, a prefill and a decode node so left
nothing to the engines, and a hand-over took seconds. With a delay the thread sleeps until UCX has something for it.


The CPU cores of a worker on a machine with no accelerator.

Gives vLLM's handshake what was fetched already, through its own front door: a side channel on this host.

vLLM's `_nixl_handshake` opens a ZMQ socket, sends, and waits up to five seconds for each rank, in a thread that all
handshakes share; an answer may have any length. Pointed at a relay it waits for nobody: what the prefill node said was
fetched beside it (see `introductions`), in bounded time and memory, and proved where there are keys.
The relay listens on the loopback address for the few milliseconds that the handshake takes.


One rank's handshakes: which reads vLLM is given when, so that a prefill node that does not answer delays nobody.

vLLM makes handshakes in one thread and waits there for each node. Here a read is held back until its node has
answered `verifier`; what it said is then given to vLLM's handshake, which has nothing left to wait for. `handshakes`
decides; this carries out.
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

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

from connector.messages import Verdict
from connector.metadata import ConnectorMetadata, ReadEnd, ReadOutcome
from connector.peer_engines import CannotRead, MayRead, NotYet, PeerEngines
from connector.side_channel import Listener
from connector.stats import Counters
from connector.verifier import MOST_RANKS, EngineUnreachable, MetadataRequest, Rank, ReadVerdict, Verifier

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo, RemoteMeta, ReqMeta

    from connector.config import ConnectorConfig


CPU_PROGRESS_DELAY = 0.1
"""Seconds, on nodes without a GPU. Nodes with one sleep only when they are told to: it was not tried there."""


def progress_delay(device_type: str, configured: float | None) -> float:
    """Seconds that the thread of a worker on this kind of device may sleep; 0: it spins. `configured` wins."""
    if configured is not None:
        return configured
    return CPU_PROGRESS_DELAY if device_type == "cpu" else 0.0


class LowCpuNixlAgent(NixlWrapper):
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


@contextmanager
def preserve_cpu_affinity() -> Iterator[None]:
    """Put the calling thread back on the cores that it had, whatever happens inside.

    vLLM's NIXL worker reserves the last core of each NUMA node for transfers (`NixlBaseConnectorWorker.__init__`),
    but pins the thread that runs the model there, too. Threads started inside, NIXL's spinning progress thread
    among them, stay pinned. Does nothing where the system has no affinity.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


LOOPBACK = "127.0.0.1"


@contextmanager
def relay(payloads: Mapping[Rank, bytes]) -> Iterator[int]:
    """The port at which the payloads are answered. Raises SideChannelError."""
    listener = Listener(LOOPBACK, 0, payloads, _unknown, Counters())
    listener.start()
    try:
        yield listener.port
    finally:
        listener.stop()


def _unknown(_engine_id: str, _request_id: str, _nonce: str) -> Verdict:
    return Verdict.UNKNOWN


log = logging.getLogger("vllm.pdproxy.worker")

UNPAIRABLE = (AssertionError, IndexError, KeyError, NotImplementedError, TypeError, ValueError)
"""What vLLM raises when a ticket's blocks do not fit what this node allocated, or the peer's layout."""

NO_MATCH = (*UNPAIRABLE, RuntimeError)
"""What its handshake raises, besides, when the two nodes' versions, models or settings do not go together."""

_NO_RANKS = CannotRead(ReadOutcome.INCOMPATIBLE, "the two nodes' parallel sizes cannot go together")
_NO_ANSWER = (
    "The prefill engine %s at %s:%d cannot be reached: %s. Prompts with its tickets are computed here. Check that this "
    "node reaches the prefill node's VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, and that both have the same ticket keys."
)
_NO_HANDSHAKE = (
    "No hand-over from the prefill engine %s at %s:%d (%s): vLLM's NIXL handshake says: %s. Prompts with its tickets "
    "are computed here."
)


@dataclass(slots=True)
class ReadSource:
    """What a read was ordered from; `incarnation`: of the run whose memory it reads; `outcome`, where we know why."""

    asked: MetadataRequest
    incarnation: str = ""
    outcome: ReadOutcome | None = None


class WorkerBase(NixlPullConnectorWorker):
    """vLLM's pull worker with handshakes that wait for nobody. `_begin_handshakes` comes before vLLM's `__init__`."""

    def _begin_handshakes(self, config: ConnectorConfig) -> None:
        self._verifier = Verifier(config.verify_timeout, introduced_within=config.probe_timeout, keys=config.keys)
        self._handshakes = PeerEngines()
        self._held: dict[str, ReqMeta] = {}
        self._reads: dict[str, ReadSource] = {}
        self._half_known: set[str] = set()
        self._refusals: queue.SimpleQueue[tuple[str, CannotRead]] = queue.SimpleQueue()

    def _hold_back(self, metadata: ConnectorMetadata) -> None:
        """Leave vLLM the reads and heartbeats whose engine has answered, and keep the other reads for later."""
        self._hear_of_peers()
        held = {
            request_id: meta
            for request_id, meta in self._held.items()
            if not awaited(meta) or self._recving_metadata.get(request_id) is meta  # else it was given up
        }
        waiting, self._held = {**held, **metadata.reqs_to_recv}, {}
        metadata.reqs_to_recv = {
            request_id: meta for request_id, meta in waiting.items() if self._may_go(request_id, meta)
        }
        # A new dict: the scheduler's own may be the same object.
        metadata.heartbeat_by_engine = {
            engine_id: info
            for engine_id, info in metadata.heartbeat_by_engine.items()
            if self._is_loaded(engine_id)
            or isinstance(self._way(source_of(engine_id, info, self._ranks(info))), MayRead)
        }

    def _hear_of_peers(self) -> None:
        self._take_refusals()
        self._handshakes.lost(self._verifier.lost())
        for asked, how in self._verifier.introductions():
            if isinstance(how, EngineUnreachable):
                log.warning(_NO_ANSWER, asked.engine_id, *asked.address, how.why)
            self._handshakes.settle(asked, how, time.monotonic(), loaded=self._is_loaded(asked.engine_id))

    def _may_go(self, request_id: str, meta: ReqMeta) -> bool:
        remote = meta.remote
        way = self._way(source_of(remote.engine_id, remote, self._ranks(meta)))
        if isinstance(way, MayRead):
            return True
        if awaited(meta):
            self._recving_metadata[request_id] = meta
        if isinstance(way, NotYet):
            self._held[request_id] = meta
        elif awaited(meta):
            log.warning(
                "No read for %s from %s:%d (%s): %s.", request_id, remote.host, remote.port, way.outcome, way.why
            )
            self._reads[request_id].outcome = way.outcome
            self._recv_failures.add(request_id)
        return False

    def _way(self, asked: MetadataRequest) -> MayRead | NotYet | CannotRead:
        if not asked.ranks:
            return _NO_RANKS
        way = self._handshakes.way(asked, time.monotonic(), loaded=self._is_loaded(asked.engine_id))
        if isinstance(way, NotYet) and way.forget and self._forget(asked.engine_id):
            way = self._handshakes.way(asked, time.monotonic(), loaded=False)
        if isinstance(way, NotYet) and way.ask is not None:
            self._verifier.introduce(way.ask)
        return way

    def _explain(self, request_id: str, end: ReadEnd) -> ReadEnd:
        """Why a read failed, where more is known than that."""
        read = self._reads[request_id]
        if read.outcome is not None:
            return replace(end, outcome=read.outcome)
        if end.outcome is not ReadOutcome.PEER_UNREACHABLE:
            self._handshakes.doubt([read.asked.engine_id])
            return end
        failure = self._handshakes.failure(read.asked, time.monotonic())
        return end if failure is None else replace(end, outcome=failure.outcome)

    def _of_this_run(self, request_id: str, end: ReadEnd, judged: ReadVerdict) -> ReadEnd:
        """The end of a read, which counts only if the verdict is by the run of the node whose memory was read."""
        read = self._reads[request_id]
        if end.outcome is not ReadOutcome.VERIFIED or read.incarnation in ("", judged.incarnation):
            return end
        self._handshakes.doubt([read.asked.engine_id])
        return ReadEnd(end.nonce, ReadOutcome.UNVERIFIED)

    def _ranks(self, sizes: ReqMeta | HeartbeatInfo) -> tuple[Rank, ...]:
        """Which of the engine's workers this rank reads from; none where the two nodes' sizes cannot go together."""
        assert self.transfer_topo is not None
        try:
            targets = self.transfer_topo.handshake_target_ranks(sizes.tp_size, sizes.dcp_size)
        except UNPAIRABLE:
            return ()
        if len(targets) * sizes.pp_size > MOST_RANKS:
            return ()
        return tuple(itertools.product(range(sizes.pp_size), targets))

    def _is_loaded(self, engine_id: str) -> bool:
        """Whether vLLM has agents of the engine, or its handshake is under way (which ends in this order)."""
        return engine_id in self._handshake_futures or engine_id in self._remote_agents

    def _forget(self, engine_id: str) -> bool:
        """Have vLLM forget the engine; False while it cannot (as in `_cleanup_remote_engines`)."""
        if self._handshake_futures or engine_id in self._engines_with_inflight_transfers():
            return False
        if engine_id in self._remote_agents:
            self._cleanup_remote_engine(engine_id, log_eviction=False)
        self._handshakes.forgotten(engine_id)
        log.info("The prefill engine %s is another one than before: a new handshake will be made.", engine_id)
        return True

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        introduction = self._handshakes.take(expected_engine_id)
        if introduction is None:
            raise ConnectionError(f"the prefill node at {host}:{port} has not introduced itself")
        try:
            with relay(introduction.payloads) as local:
                return super()._nixl_handshake(LOOPBACK, local, remote_tp_size, expected_engine_id, *args, **kwargs)
        except Exception as error:  # told apart here, and raised again
            fits = not isinstance(error, NO_MATCH)
            outcome = ReadOutcome.PEER_UNREACHABLE if fits else ReadOutcome.INCOMPATIBLE
            log.error(_NO_HANDSHAKE, expected_engine_id, host, port, outcome.value, error)  # noqa: TRY400 - vLLM logs it
            self._refusals.put((expected_engine_id, CannotRead(outcome, str(error))))
            raise

    def _take_refusals(self) -> None:
        """Learn which handshakes vLLM could not make, and clear away what they left."""
        while not self._refusals.empty():
            engine_id, failure = self._refusals.get()
            self._handshakes.refused(engine_id, failure, time.monotonic())
            self._half_known.add(engine_id)
        if self._handshake_futures:
            return
        for engine_id in self._half_known - self._remote_agents.keys():
            self._remote_agents[engine_id] = {}
            self._cleanup_remote_engine(engine_id, log_eviction=False)
        self._half_known.clear()


def awaited(meta: ReqMeta) -> bool:
    """Whether the scheduler waits for this read; otherwise it only gives notice (vLLM's own distinction)."""
    return bool(meta.awaiting_kvs) or any(meta.local_block_ids)


def source_of(engine_id: str, where: RemoteMeta | HeartbeatInfo, ranks: tuple[Rank, ...]) -> MetadataRequest:
    """What to ask, and whom, before a read from there."""
    return MetadataRequest(engine_id, (where.host, where.port), ranks)
