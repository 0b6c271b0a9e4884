"""One rank's side of the connector: vLLM's pull worker, whose reads are verified and whose notifs are checked.

What is overridden, and why:
    start_load_kv          puts each read's nonce behind the request id that vLLM's notif carries; leases, releases
    _read_blocks_for_req   a ticket that vLLM's own code cannot pair fails its request, not the engine
    _get_new_notifs        junk and forged notifs end nothing; what they name are aliases
    get_transfer_results   a read that has completed waits for its verdict; one that hangs is given up; a step that
                           computes nothing waits a moment for the end of a read
    _engines_with_inflight_transfers               a given-up read's engine stays registered while its transfer is live
    __init__, register_kv_caches, shutdown, _nixl_handshake    see `worker_base`
vLLM's descriptor building is left alone.

What a step does, in the thread that runs the model:
    start_load_kv          new orders ─► reads whose engine may be read from ─► vLLM posts their transfers
    get_transfer_results   transfers that ended ─► questions to their nodes;  verdicts ─► results, `WorkerReport`
Tickets to give back (`TicketReturns`) never go through vLLM's `reqs_to_recv`: they need no handshake and no NIXL.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from .counters import Counters, ReadOutcome
from .kv_groups import group_sizes, read_size
from .leases import Aliases, LeaseReads
from .messages import Question
from .metadata import ConnectorMetadata, ReadEnd, ReadOrder, WorkerReport
from .notifs import Heartbeat, ReadDone, parse_notif, with_nonce
from .peer_engines import CannotRead
from .pending_reads import PendingReads, ReturnOutcome, TicketReturn, TicketReturns
from .stats import ConnectorStats
from .worker_base import ReadSource, WorkerBase, is_awaited

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from .config import ConnectorConfig
    from .verifier import ReadVerdict

log = logging.getLogger("vllm.pdproxy.worker")

IDLE_READ_WAIT, IDLE_VERDICT_WAIT, IDLE_POLL = 0.003, 0.004, 0.0002
"""Seconds that a step with nothing to compute waits at most for the end of a read, and then for its verdict; between
two looks at the read. The next step would see them more than 1 ms later: so long vLLM's engine sleeps."""

_DOES_NOT_FIT = CannotRead(ReadOutcome.INCOMPATIBLE, "the ticket's blocks do not fit what this node has")


class ConnectorWorker(WorkerBase, NixlPullConnectorWorker):
    """Both roles, as vLLM's own: a rank reads what it is ordered to read, and answers for what it has leased."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: ConnectorConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config, config)
        self.xfer_stats = ConnectorStats()
        self._counters = Counters()
        self._group_sizes = group_sizes(kv_cache_config)
        self._pending_reads = PendingReads(config.read_deadline)
        self._lease_reads = LeaseReads()
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
        orders, metadata.reqs_to_recv = metadata.reqs_to_recv, {}
        for request_id, meta in orders.items():
            self._begin(request_id, meta, metadata)
        self._probes.start(metadata.probes, time.monotonic())
        self._defer(metadata)
        super().start_load_kv(metadata)
        self._give_back(time.monotonic())
        for request_id in metadata.reqs_not_processed:
            self._lease_reads.forget(request_id)
        for request_id in metadata.reqs_to_send:
            if request_id in self._reqs_to_send:
                self._lease_reads.hold(request_id, metadata.readers.get(request_id, 1))
        for request_id, nonces in metadata.returned.items():
            if request_id in self._reqs_to_send:
                self._lease_reads.give_back(request_id, nonces)
        self._released |= metadata.releases & self._reqs_to_send.keys()
        for request_id in metadata.retired:
            self._aliases.forget(request_id)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """vLLM's results of this step, less the reads that wait for their verdict, plus those that have it."""
        self._give_up_overdue()
        results = self._await_transfers()
        self._drain_stalled()
        self._clear_failed_handshakes()
        self._advance_probes()
        now = time.monotonic()
        for request_id in results.failed_recving:
            self._end_read(request_id, self._explain(request_id, self._pending_reads.on_failed(request_id, now)))
        completed = sorted(results.finished_recving - results.failed_recving)
        self._verifier.ask(self._pending_reads.on_completed(completed, now))
        self._verifier.ask(self._pending_reads.probes(now))
        results.finished_recving &= results.failed_recving
        waits = self._idle and self._pending_reads.awaits_verdict()
        for answer in self._verifier.verdicts(IDLE_VERDICT_WAIT if waits else 0.0):
            self._on_verdict(answer, results, time.monotonic())
        self._verifier.ask(self._pending_reads.repeat_questions())
        self._report.reads_seen.update(self._lease_reads.pop_report())
        for request_id in results.finished_sending:
            self._lease_reads.forget(request_id)
        return results

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """This step's report to the scheduler; None when there is nothing."""
        report, self._report = self._report, WorkerReport()
        return report or None

    def drain_counters(self) -> None:
        """Move this rank's counters into vLLM's transfer stats, which it takes next."""
        self.xfer_stats.drain_from(self._counters)

    # ---- reads

    def _begin(self, request_id: str, meta: ReqMeta, metadata: ConnectorMetadata) -> None:
        """Register an order. A read is left to `_defer`, a ticket that is not to be read to `_give_back`."""
        order: ReadOrder = metadata.reads[request_id]
        remote, now = meta.remote, time.monotonic()
        question = Question(remote.engine_id, remote.request_id, order.nonce)
        if is_awaited(meta):
            remote.request_id = with_nonce(remote.request_id, order.nonce)
            metadata.reqs_to_recv[request_id] = meta
            self._sources[request_id] = ReadSource(self._request_for(meta))
            size = read_size(self._group_sizes, meta.local_block_ids, remote.block_ids, order.hit_tokens)
            self._pending_reads.on_ordered(request_id, question, (remote.host, remote.port), size, now)
        else:
            self._returns.add(TicketReturn(question, (remote.host, remote.port)), now)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if self._recving_metadata.get(req_id) is not meta:
            return  # Given up while its handshake was under way: the blocks may be another request's by now.
        if self._is_elsewhere(meta.remote):
            log.warning("The ticket of %s names another address than its engine %s has.", req_id, meta.remote.engine_id)
            self._recv_failures.add(req_id)
            return
        if not self._pair(req_id, meta):
            self._sources[req_id].failure = _DOES_NOT_FIT
            self._recv_failures.add(req_id)
        if req_id in self._recving_transfers:
            self._sources[req_id].incarnation = self._peer_engines.incarnation(meta.remote.engine_id)
            flying = bool(self._recving_transfers[req_id]) and req_id not in self._recv_failures
            self._sources[req_id].in_flight = flying
            self._pending_reads.on_posted(req_id, time.monotonic())

    def _await_transfers(self) -> KVConnectorTransferResults:
        """vLLM's results. A step that computes nothing asks again for a moment, until a read has ended."""
        until = time.monotonic() + IDLE_READ_WAIT
        results: KVConnectorTransferResults = super().get_transfer_results()
        while self._idle and self._recving_transfers and not results.finished_recving and time.monotonic() < until:
            time.sleep(IDLE_POLL)
            more = super().get_transfer_results()
            results.finished_sending |= more.finished_sending
            results.finished_recving |= more.finished_recving
            results.failed_recving |= more.failed_recving
        return results

    def _give_up_overdue(self) -> None:
        for late in self._pending_reads.overdue(time.monotonic()):
            log.warning("Giving up on the read for %s: overdue, or its prefill node is silent.", late.request_id)
            handles = self._recving_transfers.pop(late.request_id, None)
            if handles:
                self._stalled[late.nonce] = handles
                self._stalled_engines[late.nonce] = late.engine_id
                self._report.stalled[late.nonce] = 1
            self._recv_failures.add(late.request_id)

    def _is_live(self, nonce: str) -> bool:
        return nonce in self._stalled

    def _drain_stalled(self) -> None:
        if self._stalled:
            drained, failed = self._pop_done_transfers(self._stalled)
            self._broken |= failed
            self._peer_engines.mark_broken(self._stalled_engines[nonce] for nonce in failed)
            for nonce in drained:
                del self._stalled_engines[nonce]
                self._report.drained[nonce] = 1
                if nonce in self._broken:
                    self._broken.discard(nonce)
                    self._report.broken[nonce] = 1

    def _engines_with_inflight_transfers(self) -> set[str]:
        busy: set[str] = super()._engines_with_inflight_transfers()
        return busy | set(self._stalled_engines.values()) | self._probes.reading()

    def _advance_probes(self) -> None:
        """Probe the paths that the scheduler asked for, and report which probes have ended."""
        for number, passed in self._probes.advance(time.monotonic()).items():
            ended = self._report.paths_passed if passed else self._report.paths_failed
            ended[number] = 1

    def _on_verdict(self, answer: ReadVerdict, results: KVConnectorTransferResults, now: float) -> None:
        returned = self._returns.on_verdict(answer, now)
        if returned is not None:
            self._end_return(answer.nonce, returned)
            return
        read = self._pending_reads.on_verdict(answer, now)
        if read is None:
            return
        end = self._require_same_run(read.request_id, read.end, answer)
        self._counters.verify_seconds(read.verify_seconds)
        self._counters.bytes("attention", spared=read.spared)
        results.finished_recving.add(read.request_id)
        if end.outcome is not ReadOutcome.VERIFIED:
            log.warning("The read for %s is %s: computing it here.", read.request_id, end.outcome)
            results.failed_recving.add(read.request_id)
        self._end_read(read.request_id, end)

    def _end_read(self, request_id: str, end: ReadEnd) -> None:
        self._sources.pop(request_id, None)
        self._report.reads_ended[request_id] = end
        self._counters.read(end.outcome.value)
        self._counters.bytes("attention", pulled=end.attention_bytes)
        self._counters.bytes("state", pulled=end.state_bytes)

    # ---- tickets given back

    def _give_back(self, now: float) -> None:
        for ticket in self._returns.overdue(now):
            log.warning("Ticket of %s not given back: %s:%d is silent.", ticket.question.engine_id, *ticket.address)
            self._end_return(ticket.nonce, ReturnOutcome.UNREACHABLE)
        self._verifier.give_back(self._returns.due(now))

    def _end_return(self, nonce: str, outcome: ReturnOutcome) -> None:
        self._report.returned[nonce] = 1
        self._counters.ticket_returned(outcome.value)

    # ---- leases

    def _get_new_notifs(self) -> set[str]:
        """The requests whose leases end now: every reader has read, or the scheduler has ordered a release."""
        for messages in self.nixl_wrapper.get_new_notifs().values():
            for message in messages:
                self._on_notif(message)
        ended: set[str] = self._lease_reads.done() | (self._released & self._reqs_to_send.keys())
        self._released.clear()
        for request_id in ended:
            self._reqs_to_process.discard(request_id)
            self._reqs_to_send.pop(request_id, None)
        return ended

    def _on_notif(self, message: bytes) -> None:
        notif = parse_notif(message)
        if isinstance(notif, Heartbeat):
            known = map(self._aliases.request_id, notif.aliases)
            self._handle_heartbeat(",".join(request_id for request_id in known if request_id is not None))
        elif isinstance(notif, ReadDone):
            self._on_read_done(notif)
        else:
            self._counters.junk("notice")

    def _on_read_done(self, notif: ReadDone) -> None:
        request_id = self._aliases.request_id(notif.alias)
        if request_id is not None and (request_id in self._reqs_to_send or request_id in self._reqs_to_process):
            self._lease_reads.record(request_id, notif)
        else:
            # Late, or forged: it must end nothing here. The reader learns it from its verdict.
            self.xfer_stats.record_notification_after_expiry()
