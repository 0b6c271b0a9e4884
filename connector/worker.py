"""One rank's side of the connector: vLLM's pull worker, whose reads are verified and whose notices are guarded.

What is overridden, and why:
    start_load_kv          puts each read's nonce behind the request id that vLLM's notice carries; leases, releases
    _read_blocks_for_req   a ticket that vLLM's own code cannot pair fails its request, not the engine
    __init__               gives the worker its CPU cores back, which vLLM's pins to one (see `cores`), and on a CPU
                           lets NIXL's progress thread sleep (see `progress`)
    _get_new_notifs        junk and forged notices end nothing; what they name are aliases
    get_transfer_results   a read that has landed waits for its verdict; one that hangs is given up
    _engines_with_inflight_transfers   a given-up read's engine stays registered while its transfer is live
Handshakes are `handshaking`'s. vLLM's descriptor building is left alone.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from connector.kv_groups import group_sizes, read_size
from connector.leases import Aliases, LeaseReads
from connector.messages import Heartbeat, Question, ReadDone, Verdict, nonce_of, parse_notif, with_nonce
from connector.metadata import ConnectorMetadata, ReadEnd, ReadOrder, ReadOutcome, WorkerReport
from connector.peer_engines import MayRead
from connector.pending_reads import PendingReads, ReturnOutcome, TicketReturn, TicketReturns
from connector.stats import ConnectorStats, Counters
from connector.worker_base import (
    UNPAIRABLE,
    LowCpuNixlAgent,
    ReadSource,
    WorkerBase,
    awaited,
    preserve_cpu_affinity,
    progress_delay,
    source_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from connector.config import ConnectorConfig


log = logging.getLogger("vllm.pdproxy.worker")

IDLE_PATIENCE = 0.002
"""Seconds. vLLM's engine sleeps for 1 ms after a step with nothing to compute; a verdict mostly takes half of one."""
IDLE_REST = 0.025
"""Seconds that a step with nothing to compute takes while this rank waits for nothing but the end of transfers that it
gave up, or for prefill nodes to take tickets back: it would else be run again every millisecond, for minutes."""


class ConnectorWorker(WorkerBase, NixlPullConnectorWorker):
    """Both roles, as vLLM's own: a rank reads what it is ordered to read, and answers for what it has leased."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: ConnectorConfig
    ) -> None:
        self._begin_handshakes(config)
        with preserve_cpu_affinity():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        sleeps = progress_delay(self.device_type, config.progress_delay)
        if sleeps and self.nixl_backends == ["UCX"]:  # before anything is registered with the agent
            self.nixl_wrapper = LowCpuNixlAgent(self.kv_transfer_config.get_from_extra_config("num_threads", 4), sleeps)
        self.xfer_stats = ConnectorStats()
        self._config = config
        self._accounts = Counters()
        self._sizes = group_sizes(kv_cache_config)
        self._flights = PendingReads(config.read_deadline)
        self._seen = LeaseReads()
        self._released: set[str] = set()
        self._stalled: dict[str, list[int]] = {}
        self._stalled_engines: dict[str, str] = {}
        self._broken: set[str] = set()
        self._aliases = Aliases()
        self._returns = TicketReturns(config.lease_duration)
        self._report = WorkerReport()
        self._idle = False

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """Begin the reads, leases and releases of this step."""
        self._idle = metadata.idle
        for alias, request_id in metadata.aliases.items():
            self._aliases.bind(alias, request_id)
        for request_id, meta in metadata.reqs_to_recv.items():
            self._begin(request_id, meta, metadata.reads[request_id])
        self._hold_back(metadata)
        super().start_load_kv(metadata)
        for request_id in metadata.reqs_not_processed:
            self._seen.forget(request_id)
        for request_id in metadata.reqs_to_send:
            if request_id in self._reqs_to_send:
                self._seen.begin(request_id, metadata.readers.get(request_id, 1))
        self._released |= metadata.releases & self._reqs_to_send.keys()
        for request_id in metadata.retired:
            self._aliases.forget(request_id)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """vLLM's results of this step, less the reads that wait for their verdict, plus those that have it."""
        self._give_up_overdue()
        results: KVConnectorTransferResults = super().get_transfer_results()
        self._drain_stalled()
        self._take_refusals()
        for request_id in results.failed_recving:
            self._end(request_id, self._explain(request_id, self._flights.failed(request_id)))
        now = time.monotonic()
        self._verifier.ask(self._flights.landed(sorted(results.finished_recving - results.failed_recving), now))
        self._verifier.ask(self._flights.probes(now))
        self._give_back_due(now)
        results.finished_recving &= results.failed_recving
        self._add_judged(results)
        self._report.reads_seen.update(self._seen.pop_report())
        for request_id in results.finished_sending:
            self._seen.forget(request_id)
        return results

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What the scheduler must hear of this step; None when there is nothing."""
        report, self._report = self._report, WorkerReport()
        return report or None

    def get_kv_connector_stats(self) -> Any:
        """vLLM's transfer stats with this rank's accounts."""
        self.xfer_stats.drain_from(self._accounts)
        return super().get_kv_connector_stats()

    def shutdown(self) -> None:
        """End the verifier, then as vLLM does."""
        self._verifier.close()
        super().shutdown()

    def _begin(self, request_id: str, meta: ReqMeta, order: ReadOrder) -> None:
        remote, now = meta.remote, time.monotonic()
        question = Question(remote.engine_id, remote.request_id, order.nonce)
        remote.request_id = with_nonce(remote.request_id, order.nonce)
        if awaited(meta):
            self._reads[request_id] = ReadSource(source_of(remote.engine_id, remote, self._ranks(meta)))
            size = read_size(self._sizes, meta.local_block_ids, remote.block_ids, order.hit_tokens)
            self._flights.begin(request_id, question, (remote.host, remote.port), size, now)
        else:
            self._returns.begin(TicketReturn(question, (remote.host, remote.port), (request_id, meta)), now)

    # ---- reads and notices

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if not awaited(meta):
            self._send_notice(req_id, meta)
            return
        if self._recving_metadata.get(req_id) is not meta:
            return  # Given up while its handshake was under way: the blocks may be another request's by now.
        if self._is_elsewhere(meta.remote):
            log.warning("The ticket of %s names another address than its engine %s has.", req_id, meta.remote.engine_id)
            self._recv_failures.add(req_id)
            return
        if not self._pair(req_id, meta):
            self._reads[req_id].outcome = ReadOutcome.INCOMPATIBLE
            self._recv_failures.add(req_id)
        if req_id in self._recving_transfers:
            self._reads[req_id].incarnation = self._handshakes.incarnation(meta.remote.engine_id)
            self._flights.posted(req_id, time.monotonic())

    def _pair(self, req_id: str, meta: ReqMeta) -> bool:
        """vLLM's own reading or giving notice, after a handshake where one is needed. False for what it cannot pair."""
        try:
            super()._read_blocks_for_req(req_id, meta)
        except UNPAIRABLE as error:
            self._log_failure("ticket_does_not_fit", req_id, error=error, meta=meta)
            return False
        return True

    def _send_notice(self, req_id: str, meta: ReqMeta) -> None:
        """Give a ticket back: at once where a handshake with its node was made, else when the one begun here is."""
        nonce, remote = nonce_of(meta.remote.request_id), meta.remote
        if nonce not in self._returns:
            return
        if self._is_reachable(remote.engine_id):
            self._end_return(nonce, ReturnOutcome.SENT if self._pair(req_id, meta) else ReturnOutcome.UNREACHABLE)
        elif isinstance(self._way(source_of(remote.engine_id, remote, self._ranks(meta))), MayRead):
            self._pair(req_id, meta)

    def _is_reachable(self, engine_id: str) -> bool:
        return engine_id in self._remote_agents and engine_id not in self._invalid_remote_engines

    def _give_back_due(self, now: float) -> None:
        for given in self._returns.overdue(now):
            log.warning("A ticket of %s was not given back: %s:%d is silent.", given.question.engine_id, *given.address)
            self._end_return(given.nonce, ReturnOutcome.UNREACHABLE)
        for given in self._returns.due(now):
            if self._is_reachable(given.question.engine_id):
                self._send_notice(*given.order)
            else:
                self._verifier.ask(self._returns.ask(given))

    def _take_return_answer(self, given: TicketReturn, verdict: Verdict | None) -> None:
        if verdict is Verdict.HELD:
            # It goes on with the next step, as a new order would; a read of the same request goes before it.
            request_id, meta = given.order
            self._held.setdefault(request_id, meta)
        elif verdict is not None:
            self._end_return(given.nonce, ReturnOutcome.NOT_HELD)

    def _end_return(self, nonce: str, outcome: ReturnOutcome) -> None:
        self._returns.over(nonce)
        self._report.returned[nonce] = 1
        self._accounts.ticket_returned(outcome.value)

    def _is_elsewhere(self, remote: RemoteMeta) -> bool:
        """Whether a handshake with the engine was made elsewhere: whom to ask after the read is then unknown."""
        known = self._handshakes.address(remote.engine_id)
        return remote.engine_id in self._remote_agents and known not in (None, (remote.host, remote.port))

    def _get_new_notifs(self) -> set[str]:
        for messages in self.nixl_wrapper.get_new_notifs().values():
            for message in messages:
                self._hear(message)
        ended: set[str] = self._seen.done() | (self._released & self._reqs_to_send.keys())
        self._released.clear()
        for request_id in ended:
            self._reqs_to_process.discard(request_id)
            self._reqs_to_send.pop(request_id, None)
        return ended

    def _hear(self, message: bytes) -> None:
        notice = parse_notif(message)
        if isinstance(notice, Heartbeat):
            known = map(self._aliases.request_id, notice.aliases)
            self._handle_heartbeat(",".join(request_id for request_id in known if request_id is not None))
        elif isinstance(notice, ReadDone):
            self._hear_done(notice)
        else:
            self._accounts.junk("notice")

    def _hear_done(self, notice: ReadDone) -> None:
        request_id = self._aliases.request_id(notice.alias)
        if request_id is not None and (request_id in self._reqs_to_send or request_id in self._reqs_to_process):
            self._seen.record(request_id, notice)
        else:
            # Late, or forged. The reader learns it when it asks; here it must end nothing.
            self.xfer_stats.record_notification_after_expiry()

    def _give_up_overdue(self) -> None:
        for late in self._flights.overdue(time.monotonic()):
            log.warning("Giving up on the read for %s: overdue, or its prefill node is silent.", late.request_id)
            handles = self._recving_transfers.pop(late.request_id, None)
            if handles:
                self._stalled[late.nonce] = handles
                self._stalled_engines[late.nonce] = late.engine_id
                self._report.stalled[late.nonce] = 1
            self._recv_failures.add(late.request_id)

    def _drain_stalled(self) -> None:
        if self._stalled:
            drained, failed = self._pop_done_transfers(self._stalled)
            self._broken |= failed
            for nonce in drained:
                del self._stalled_engines[nonce]
                self._report.drained[nonce] = 1
                if nonce in self._broken:
                    self._broken.discard(nonce)
                    self._report.broken[nonce] = 1

    def _engines_with_inflight_transfers(self) -> set[str]:
        busy: set[str] = super()._engines_with_inflight_transfers()
        return busy | set(self._stalled_engines.values())

    def _add_judged(self, results: KVConnectorTransferResults) -> None:
        for judged in self._verifier.answers(self._patience()):
            now = time.monotonic()
            if (answered := self._returns.answered(judged, now)) is not None:
                self._take_return_answer(*answered)
                continue
            landing = self._flights.judged(judged, now)
            if landing is None:
                continue
            end = self._of_this_run(landing.request_id, landing.end, judged)
            self._accounts.verify_seconds(landing.verify_seconds)
            self._accounts.bytes("attention", spared=landing.spared)
            results.finished_recving.add(landing.request_id)
            if end.outcome is not ReadOutcome.VERIFIED:
                log.warning("The read for %s is %s: computing it here.", landing.request_id, end.outcome)
                results.failed_recving.add(landing.request_id)
            self._end(landing.request_id, end)
        self._verifier.ask(self._flights.unanswered())

    def _patience(self) -> float:
        """How long this step waits for an answer; not at all where it delays a token."""
        if not self._idle:
            return 0.0
        if self._flights.awaits_verdict():
            return IDLE_PATIENCE
        return IDLE_REST if not len(self._flights) and (self._stalled or len(self._returns)) else 0.0

    def _end(self, request_id: str, end: ReadEnd) -> None:
        self._reads.pop(request_id, None)
        self._report.reads_ended[request_id] = end
        self._accounts.read(end.outcome.value)
        self._accounts.bytes("attention", pulled=end.attention_bytes)
        self._accounts.bytes("state", pulled=end.state_bytes)
