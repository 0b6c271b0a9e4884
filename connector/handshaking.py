"""One rank's handshakes: which reads vLLM is given when, so that a prefill node that does not answer delays nobody.

vLLM makes handshakes in one thread and waits there for each node. Here a read is held back until its node has
answered `verifier`; what it said is then given to vLLM's handshake, which has nothing left to wait for. `handshakes`
decides; this carries out.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from connector.handshakes import Failure, Go, Handshakes, Wait
from connector.introductions import MOST_RANKS, Asked, Rank, Unreachable
from connector.metadata import ConnectorMetadata, ReadEnd, ReadOutcome
from connector.open_batches import Judged
from connector.relay import LOOPBACK, relay
from connector.verifier import Verifier

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo, RemoteMeta, ReqMeta

    from connector.config import ConnectorConfig

log = logging.getLogger("vllm.pdproxy.worker")

UNPAIRABLE = (AssertionError, IndexError, KeyError, NotImplementedError, TypeError, ValueError)
"""What vLLM raises when a ticket's blocks do not fit what this node allocated, or the peer's layout."""

NO_MATCH = (*UNPAIRABLE, RuntimeError)
"""What its handshake raises, besides, when the two nodes' versions, models or settings do not go together."""

_NO_RANKS = Failure(ReadOutcome.INCOMPATIBLE, "the two nodes' parallel sizes cannot go together")
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

    asked: Asked
    incarnation: str = ""
    outcome: ReadOutcome | None = None


class HandshakingWorker(NixlPullConnectorWorker):
    """vLLM's pull worker with handshakes that wait for nobody. `_begin_handshakes` comes before vLLM's `__init__`."""

    def _begin_handshakes(self, config: ConnectorConfig) -> None:
        self._verifier = Verifier(config.verify_timeout, introduced_within=config.probe_timeout, keys=config.keys)
        self._handshakes = Handshakes()
        self._held: dict[str, ReqMeta] = {}
        self._reads: dict[str, ReadSource] = {}
        self._half_known: set[str] = set()
        self._refusals: queue.SimpleQueue[tuple[str, Failure]] = queue.SimpleQueue()

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
            if self._is_loaded(engine_id) or isinstance(self._way(source_of(engine_id, info, self._ranks(info))), Go)
        }

    def _hear_of_peers(self) -> None:
        self._take_refusals()
        self._handshakes.lost(self._verifier.lost())
        for asked, how in self._verifier.introductions():
            if isinstance(how, Unreachable):
                log.warning(_NO_ANSWER, asked.engine_id, *asked.address, how.why)
            self._handshakes.settle(asked, how, time.monotonic(), loaded=self._is_loaded(asked.engine_id))

    def _may_go(self, request_id: str, meta: ReqMeta) -> bool:
        remote = meta.remote
        way = self._way(source_of(remote.engine_id, remote, self._ranks(meta)))
        if isinstance(way, Go):
            return True
        if awaited(meta):
            self._recving_metadata[request_id] = meta
        if isinstance(way, Wait):
            self._held[request_id] = meta
        elif awaited(meta):
            log.warning(
                "No read for %s from %s:%d (%s): %s.", request_id, remote.host, remote.port, way.outcome, way.why
            )
            self._reads[request_id].outcome = way.outcome
            self._recv_failures.add(request_id)
        return False

    def _way(self, asked: Asked) -> Go | Wait | Failure:
        if not asked.ranks:
            return _NO_RANKS
        way = self._handshakes.way(asked, time.monotonic(), loaded=self._is_loaded(asked.engine_id))
        if isinstance(way, Wait) and way.forget and self._forget(asked.engine_id):
            way = self._handshakes.way(asked, time.monotonic(), loaded=False)
        if isinstance(way, Wait) and way.ask is not None:
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

    def _of_this_run(self, request_id: str, end: ReadEnd, judged: Judged) -> ReadEnd:
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
            self._refusals.put((expected_engine_id, Failure(outcome, str(error))))
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


def source_of(engine_id: str, where: RemoteMeta | HeartbeatInfo, ranks: tuple[Rank, ...]) -> Asked:
    """What to ask, and whom, before a read from there."""
    return Asked(engine_id, (where.host, where.port), ranks)
