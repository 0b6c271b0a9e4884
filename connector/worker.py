"""One rank's side of the connector: vLLM's pull worker, whose reads are verified and whose notifs are checked.

What is overridden, and why:
    start_load_kv          puts each read's nonce behind the request id that vLLM's notif carries; leases, releases
    _read_blocks_for_req   a ticket that vLLM's own code cannot pair fails its request, not the engine
    _get_new_notifs        junk and forged notifs end nothing; what they name are aliases
    get_transfer_results   a read that has completed waits for its verdict; one that hangs is given up
    _pop_done_transfers    a step that computes nothing waits a moment for the end of a read
    _engines_with_inflight_transfers               a given-up read's engine stays registered while its transfer is live
    __init__, shutdown, _nixl_handshake            see `worker_base`
vLLM's descriptor building is left alone.

What a step does, in the thread that runs the model:
    start_load_kv          new orders ─► reads whose engine may be read from ─► vLLM posts their transfers
    get_transfer_results   transfers that ended ─► questions to their nodes;  verdicts ─► results, `WorkerReport`
Tickets to give back (`TicketReturns`) never go through vLLM's `reqs_to_recv`: a read of the same request may be there.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from connector.counters import Counters, ReadOutcome
from connector.kv_groups import group_sizes, read_size
from connector.leases import Aliases, LeaseReads
from connector.messages import Question, Verdict
from connector.metadata import ConnectorMetadata, ReadEnd, ReadOrder, WorkerReport
from connector.notifs import Heartbeat, ReadDone, nonce_of, parse_notif, with_nonce
from connector.peer_engines import MayRead, NotYet
from connector.pending_reads import PendingReads, ReturnOutcome, TicketReturn, TicketReturns
from connector.stats import ConnectorStats
from connector.worker_base import ReadSource, WorkerBase, is_awaited

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from connector.config import ConnectorConfig
    from connector.verifier import ReadVerdict

log = logging.getLogger("vllm.pdproxy.worker")

IDLE_READ_WAIT, IDLE_VERDICT_WAIT, IDLE_POLL = 0.003, 0.004, 0.0002
"""Seconds that a step with nothing to compute waits at most for the end of a read, and then for its verdict; between
two looks at the read. The next step would see them more than 1 ms later: so long vLLM's engine sleeps."""


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
        self._defer(metadata)
        super().start_load_kv(metadata)
        self._give_back(time.monotonic())
        for request_id in metadata.reqs_not_processed:
            self._lease_reads.forget(request_id)
        for request_id in metadata.reqs_to_send:
            if request_id in self._reqs_to_send:
                self._lease_reads.begin(request_id, metadata.readers.get(request_id, 1))
        self._released |= metadata.releases & self._reqs_to_send.keys()
        for request_id in metadata.retired:
            self._aliases.forget(request_id)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """vLLM's results of this step, less the reads that wait for their verdict, plus those that have it."""
        self._give_up_overdue()
        results: KVConnectorTransferResults = super().get_transfer_results()
        self._drain_stalled()
        self._clear_failed_handshakes()
        for request_id in results.failed_recving:
            self._end_read(request_id, self._explain(request_id, self._pending_reads.on_failed(request_id)))
        now = time.monotonic()
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
        """What this step reports to the scheduler; None when there is nothing."""
        report, self._report = self._report, WorkerReport()
        return report or None

    def get_kv_connector_stats(self) -> Any:
        """vLLM's transfer stats with this rank's counters."""
        self.xfer_stats.drain_from(self._counters)
        return super().get_kv_connector_stats()

    # ---- reads

    def _begin(self, request_id: str, meta: ReqMeta, metadata: ConnectorMetadata) -> None:
        """Register an order. A read is left to `_defer`, a notif without a read to `_give_back`."""
        order: ReadOrder = metadata.reads[request_id]
        remote, now = meta.remote, time.monotonic()
        question = Question(remote.engine_id, remote.request_id, order.nonce)
        remote.request_id = with_nonce(remote.request_id, order.nonce)
        if is_awaited(meta):
            metadata.reqs_to_recv[request_id] = meta
            self._sources[request_id] = ReadSource(self._request_for(meta))
            size = read_size(self._group_sizes, meta.local_block_ids, remote.block_ids, order.hit_tokens)
            self._pending_reads.begin(request_id, question, (remote.host, remote.port), size, now)
        else:
            self._returns.begin(TicketReturn(request_id, question, (remote.host, remote.port), meta), now)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if not is_awaited(meta):  # vLLM's handshake for it has ended
            ticket = self._returns.get(nonce_of(meta.remote.request_id))
            if ticket is not None:
                self._send_notif(ticket)
            return
        if self._recving_metadata.get(req_id) is not meta:
            return  # Given up while its handshake was under way: the blocks may be another request's by now.
        if self._is_elsewhere(meta.remote):
            log.warning("The ticket of %s names another address than its engine %s has.", req_id, meta.remote.engine_id)
            self._recv_failures.add(req_id)
            return
        if not self._pair(req_id, meta):
            self._sources[req_id].outcome = ReadOutcome.INCOMPATIBLE
            self._recv_failures.add(req_id)
        if req_id in self._recving_transfers:
            self._sources[req_id].incarnation = self._peer_engines.incarnation(meta.remote.engine_id)
            self._pending_reads.on_posted(req_id, time.monotonic())

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """vLLM's; of reads in a step that computes nothing, again and again for a moment, until one has ended."""
        until = time.monotonic() + (IDLE_READ_WAIT if self._idle and transfers is self._recving_transfers else 0.0)
        done, failed = super()._pop_done_transfers(transfers)
        while transfers and not done and time.monotonic() < until:
            time.sleep(IDLE_POLL)
            done, more_failed = super()._pop_done_transfers(transfers)
            failed |= more_failed
        return done, failed

    def _give_up_overdue(self) -> None:
        for late in self._pending_reads.overdue(time.monotonic()):
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

    def _on_verdict(self, answer: ReadVerdict, results: KVConnectorTransferResults, now: float) -> None:
        ticket = self._returns.on_verdict(answer, now)
        if ticket is not None:
            if answer.verdict not in (None, Verdict.HELD):
                self._end_return(ticket.nonce, ReturnOutcome.NOT_HELD)
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
        for ticket in self._returns.due(now):
            if not self._send_notif(ticket):
                self._verifier.ask(self._returns.ask(ticket))
        for ticket in self._returns.held():
            if not self._send_notif(ticket):
                self._begin_handshake(ticket)

    def _send_notif(self, ticket: TicketReturn) -> bool:
        """Send the notif, but only where a handshake was made, and with this run of the node; whether it was sent."""
        engine_id = ticket.question.engine_id
        if engine_id not in self._remote_agents:
            return False
        step = self._next_step(self._request_for(ticket.meta))
        if not isinstance(step, MayRead) or engine_id not in self._remote_agents:  # forgotten in this very step
            return False
        if not self._notify(ticket):
            self._peer_engines.mark_stale([engine_id])
            return False
        self._end_return(ticket.nonce, ReturnOutcome.SENT)
        return True

    def _notify(self, ticket: TicketReturn) -> bool:
        """vLLM's own notif, under an id that no read has. False if it failed, as its statistics or failed ids show."""
        failed = self.xfer_stats.data["num_failed_notifications"]
        before, notif_id = len(failed), with_nonce(ticket.request_id, ticket.nonce)
        paired = self._pair(notif_id, ticket.meta)
        refused = notif_id in self._recv_failures
        self._recv_failures.discard(notif_id)
        return paired and not refused and len(failed) == before

    def _begin_handshake(self, ticket: TicketReturn) -> None:
        """Have vLLM make a handshake with a node that holds the lease; `_read_blocks_for_req` is called at its end."""
        step = self._next_step(self._request_for(ticket.meta))
        if isinstance(step, MayRead) and ticket.question.engine_id not in self._remote_agents:
            self._pair(with_nonce(ticket.request_id, ticket.nonce), ticket.meta)
        if not isinstance(step, NotYet):
            self._returns.postpone(ticket.nonce)

    def _end_return(self, nonce: str, outcome: ReturnOutcome) -> None:
        self._returns.end(nonce)
        self._report.returned[nonce] = 1
        self._counters.ticket_returned(outcome.value)

    # ---- leases

    def _get_new_notifs(self) -> set[str]:
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
