"""The connector's scheduler side: vLLM's pull scheduler with validated tickets, leases and verified reads.

`nixl_connector` shows when vLLM calls which hook. A hook first has our own parts decide (`transfer_params`,
`prefill_tickets`, `decode_reads`); vLLM's code then acts on clean params.
"""

import logging
import os
import queue
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

from .admission import AdmissionControl
from .config import ConnectorConfig
from .decode_reads import PromptTokens, Quarantine, ReadTracker, TicketToReturn, TokenAccounting
from .fingerprint import Fingerprint
from .idle_rest import IdleRest
from .keep_orders import Orders, orders_in
from .keeps import Keeps
from .kv_groups import count_blocks, group_shapes, sequence_blocks
from .messages import Verdict
from .metadata import ConnectorMetadata, WorkerReport
from .node_fingerprint import lora_settings
from .peer_paths import Peer, PeerPaths
from .prefill_tickets import HandOverIds, TicketIssuer
from .read_reports import NOT_NEEDED, ReadReports
from .resume_order import engine_secret
from .resumed_requests import ResumedRequests, ResumeLimits
from .scheduler_base import SchedulerBase
from .shared_cache import SharedCache
from .ticket import Expected, Ticket
from .ticket_fields import Refusal, RefusalReason, prompt_digest, unsuitable
from .transfer_params import (
    Action,
    IssueTicket,
    ParamsValidator,
    ReadTicket,
    ReleaseHandOver,
    RequestFacts,
    ValidatedParams,
)
from .weights import Adapters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.pdproxy.scheduler")
_NO_ROOM = (
    "Request %s: computing its prompt. Its ticket has waited for over %.0f s for room in this node's cache, in which "
    "%d leases wait for other nodes' reads."
)
_NEVER_ISSUED = "the ticket names this engine, which has not issued it: no two nodes may have the same engine_id"
_REFUSED = "Request %s: kv_transfer_params refused (%s): %s. Computing locally."
_NO_KEEP = "Request %s: what its kv_transfer_params say of keeps is refused: %s."

ALIAS_BYTES = 18
"""Random bytes in an alias, as 24 characters: it cannot be guessed."""


class ConnectorScheduler(SchedulerBase, NixlPullConnectorScheduler):
    """One per engine (and so per data-parallel rank): what becomes of requests, on the engine's thread."""

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig", config: ConnectorConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config, config)
        self._transfer_groups, self._shapes = kv_cache_config.transfer_group_ids, group_shapes(kv_cache_config)
        self._validator = ParamsValidator(config.role, Expected(self._shapes, config.keys, config.allowed_hosts))
        self._tickets = TicketIssuer(
            leases=self._leases,
            hand_overs=HandOverIds(),
            counters=self.counters,
            keys=config.keys,
            block_sizes=tuple(shape.block_size for shape in self._shapes),
            make_alias=lambda: secrets.token_urlsafe(ALIAS_BYTES),
            now=time.monotonic,
            wall=time.time,
        )
        self.quarantine = Quarantine()
        self._sizes = sequence_blocks(vllm_config, kv_cache_config)
        self.admission = AdmissionControl(self._sizes, lambda: self.quarantine.blocks, self.local_hits)
        self.keeps = Keeps(config.keep_share, self.counters, time.monotonic)
        self._shared = SharedCache(kv_cache_config.num_blocks, decodes=config.role.decodes)
        self._reads = ReadTracker(self.counters, self.quarantine, self._ranks, lambda: secrets.token_hex(8))
        self.set_fingerprint(self._fingerprint)
        self._given_back: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._paths = PeerPaths(self._ranks, self.counters)
        self._reports = ReadReports()
        self._adapters = Adapters(lora_settings(vllm_config))
        self._token_accounting = TokenAccounting(self.counters)
        at_once = vllm_config.max_concurrent_batches
        self.rest = IdleRest(at_once, self._leases, self._reads, self.quarantine, self._paths)
        self.resumed = ResumedRequests(engine_secret(os.environ), ResumeLimits.of(vllm_config), self.counters)

    def bind(self, cache: "KVCacheManager") -> None:
        """vLLM's cache, before the first request."""
        pool = cache.block_pool
        self.quarantine.bind(pool)
        self.admission.bind(pool)
        self.local_hits.bind(pool)
        self.keeps.bind(cache)

    def set_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Issue tickets with this fingerprint, and accept only those that have the same."""
        super().set_fingerprint(fingerprint)
        self._tickets.fingerprint = fingerprint
        expected = replace(self._validator.expected, fingerprint=fingerprint)
        self._validator = replace(self._validator, expected=expected)

    # ---- a request arrives

    def on_new_request(self, request: "Request") -> None:
        """Validate the request's `kv_transfer_params`, which any client may have written. vLLM sees clean ones or
        none."""
        if isinstance(request.kv_transfer_params, ValidatedParams):
            super().on_new_request(request)
            return
        orders = self._orders(request)
        self._reports.on_new_request(request.request_id, request.kv_transfer_params)
        action = self._validator.validate(request.kv_transfer_params, self._facts(request))
        params = self._begin(request, action)
        request.kv_transfer_params = None if params is None else ValidatedParams(params)
        super().on_new_request(request)  # may shorten the prompt
        self.keeps.forget(orders.forget)
        if not request.abort_immediately:
            reads = params is not None and isinstance(action, ReadTicket)
            self.keeps.on_new_request(request, orders.keep, reads=reads)

    def _orders(self, request: "Request") -> Orders:
        orders = orders_in(request.kv_transfer_params)
        if isinstance(orders, Orders):
            return orders
        self.counters.refused(orders.reason)
        log.warning(_NO_KEEP, request.request_id, orders.detail)
        return Orders()

    def _facts(self, request: "Request") -> RequestFacts:
        ending = request.abort_immediately
        adapter = self._adapters.content(request.lora_request if request.kv_transfer_params else None)
        return RequestFacts(
            unsuitable=None if ending else unsuitable(request, self._ticket_tokens(request)) or adapter.unknown,
            expected_tokens=None if ending else self._ticket_tokens(request),
            digest=lambda num_tokens: prompt_digest(request, num_tokens, adapter.digest),
        )

    def _begin(self, request: "Request", action: Action) -> dict[str, Any] | None:
        """Carry out the action. The request's clean params, or None."""
        match action:
            case IssueTicket() if self._tickets.on_new_request(request.request_id, action):
                return action.params()
            case ReadTicket(ticket) if ticket.engine_id == self._engine_id:
                self._serve_own(request, ticket)
            case ReadTicket(ticket):
                self._reads.accept(request, ticket, time.monotonic())
                return ticket.params()
            case ReleaseHandOver(hand_over):
                self._tickets.release(hand_over)
            case Refusal(reason, detail):
                self.counters.refused(reason)
                self._reports.note(request.request_id, reason, detail)
                log.warning(_REFUSED, request.request_id, reason, detail)
        return None

    def _serve_own(self, request: "Request", ticket: Ticket) -> None:
        """An engine cannot read from itself, and need not: the blocks are in its prefix cache. The lease ends now."""
        verdict = self.take_back(ticket.engine_id, ticket.request_id, secrets.token_hex(8))
        if verdict is Verdict.UNKNOWN:
            self.counters.refused(RefusalReason.OWN_ENGINE)
            log.warning(_REFUSED, request.request_id, RefusalReason.OWN_ENGINE, _NEVER_ISSUED)
        else:
            self.counters.ticket_own()

    def take_back(self, engine_id: str, alias: str, nonce: str) -> Verdict:
        """A decode node gives a ticket back; called in the side channel's thread. Whether its blocks were held so far:
        they are let go in one of the next steps, which the lease keeps going."""
        verdict = self.verify(engine_id, alias, nonce)
        if verdict is Verdict.HELD:
            self._given_back.put((alias, nonce))
            self.rest.interrupt()
        return verdict

    # ---- a step is planned

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens are read after the local cache's. None for a request that must be looked up once more, or
        would hold others up: vLLM asks again in the next step, and allocates nothing."""
        return self.admission.answer(request, self._offer(request, num_computed_tokens))

    def _offer(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """The ticket's tokens beyond `num_computed_tokens`, the hit of this node's own cache.

        vLLM counts that hit by the attention blocks alone, for the read brings the state: its NIXL connector says so by
        `supports_divergent_local_hybrid_hits`, and `KVCacheManager.get_computed_blocks_for_connector` looks it up.
        """
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and not self._shared.admits(request.request_id, self._blocks(request)):
            return None, False
        if not params.get("do_remote_prefill"):
            return 0, False
        tokens = self._ticket_tokens(request)
        if tokens > num_computed_tokens and self._is_barred(request):
            return 0, False
        if self.local_hits.forget_without_state(request, tokens, num_computed_tokens):
            return None, False
        return max(tokens - num_computed_tokens, 0), tokens > num_computed_tokens

    def _is_barred(self, request: "Request") -> bool:
        """Whether the ticket's engine is barred. Then the ticket is given back here, before the request has blocks."""
        peer = Peer.of(request.kv_transfer_params)
        reason = self._paths.barred(peer, time.monotonic())
        if reason is None:
            return False
        self._reports.note(request.request_id, reason, self._paths.why(peer))
        self.counters.ticket_barred(reason)
        self._give_back(request)
        return True

    def _give_back(self, request: "Request") -> None:
        """Return the ticket of a request that has no blocks yet; its prompt is computed."""
        super().request_finished(request, ())  # stops its heartbeats, and orders the return
        self._reads.on_request_finished(request)

    def _give_up_waiting_reads(self) -> None:
        """Give back the tickets that wait for room here while this node's own leases wait for other nodes' reads."""
        overdue = self._reads.waiting_since(time.monotonic() - self._config.lease_duration) if len(self._leases) else ()
        for request in overdue:
            self.counters.ticket_unused()
            log.warning(_NO_ROOM, request.request_id, self._config.lease_duration, len(self._leases))
            self._give_back(request)

    def _blocks(self, request: "Request") -> int:
        return self._sizes.most(request.num_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """vLLM plans the read; ours gets its order, and the source of the prompt's tokens is recorded."""
        self.admission.on_admitted(request.request_id, num_external_tokens)
        self.keeps.on_admitted(request.request_id)
        params = request.kv_transfer_params or {}
        reads = bool(params.get("do_remote_prefill"))
        if params.get("do_remote_decode"):
            self._shared.on_admitted(request.request_id, self._blocks(request))
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.num_computed_tokens > 0:
            # Back from a load of another connector: our own reads were counted with the workers' report.
            self._token_accounting.on_loaded(request.request_id, request.num_computed_tokens)
        elif request.num_preemptions == 0:
            self._plan_tokens(request, num_external_tokens, blocks if reads else None)
        if reads:
            every = [block for group in blocks.blocks for block in group]
            hit = self._ticket_tokens(request) - num_external_tokens
            if not num_external_tokens:
                self._reports.note(request.request_id, NOT_NEEDED)
            self._reads.start(request.request_id, blocks=every, hit=hit, pull=num_external_tokens)

    def _plan_tokens(self, request: "Request", pulled: int, allocated: "KVCacheBlocks | None") -> None:
        stats = request.prefill_stats
        if stats is None:
            return
        hit = stats.num_local_cached_tokens
        loaded = stats.num_external_cached_tokens - pulled
        computed = stats.num_prompt_tokens - hit - pulled - loaded
        blocks = {}
        if allocated is not None and pulled:
            to_pull = self.get_exchange_clipped_blocks(allocated.get_unhashed_block_ids_all_groups())
            cached = [allocated.blocks[group] for group in self._transfer_groups]
            blocks = count_blocks(self._shapes, cached, to_pull)
        self._token_accounting.expect(request.request_id, PromptTokens(hit, pulled, computed, blocks, loaded))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ConnectorMetadata:
        """vLLM's metadata for the workers, with our orders."""
        self._give_up_waiting_reads()
        self.keeps.on_step()
        meta = ConnectorMetadata.extending(super().build_connector_meta(scheduler_output))
        for _ in range(self._given_back.qsize()):
            self._tickets.take_back(*self._given_back.get())
        orders = self._tickets.pop_orders()
        meta.readers, meta.releases = orders.readers, orders.releases
        meta.aliases, meta.retired = orders.aliases, orders.retired
        meta.reqs_not_processed |= orders.dropped
        meta.reads = self._reads.pop_orders(meta.reqs_to_recv)
        meta.returned, meta.probes = orders.returned, self._paths.pop_probes(time.monotonic())
        meta.idle = not self._keeps_step and scheduler_output.total_num_scheduled_tokens == 0
        self.resumed.tell_workers(scheduler_output)
        self.rest.on_step_planned(computes=not meta.idle)
        return meta

    # ---- a step is done

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take in the workers' reports of this step. vLLM frees blocks only after it."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._tickets.on_reads_seen(report.reads_seen)
            self._paths.on_probed(report.paths_passed, report.paths_failed, time.monotonic())
            for ticket in self._reads.on_worker_report(report):
                self._return_ticket(ticket)
        for request_id in connector_output.finished_sending or ():
            self._shared.on_freed(request_id)
        self._tickets.on_finished_sending(connector_output.finished_sending or ())
        super().update_connector_output(connector_output)
        self._on_reads_finished(connector_output.finished_recving or set(), connector_output.failed_recving)

    def _on_reads_finished(self, finished: set[str], failed: set[str]) -> None:
        for request_id in finished - failed:
            self._token_accounting.on_read_verified(request_id)
        for request_id in finished & failed:
            self._token_accounting.forget(request_id)
        for request, end in self._reads.ends(finished, failed):
            self._reports.note(request.request_id, end.outcome, end.why)
            self._paths.on_read_ended(Peer.of(request.kv_transfer_params), end.outcome, time.monotonic(), end.why)
        for ticket in self._reads.on_reads_finished(finished, failed):
            self._return_ticket(ticket)

    def _return_ticket(self, ticket: TicketToReturn) -> None:
        """Have vLLM give notice for a ticket that is not read, as for a request that ended before its read."""
        ticket.request.kv_transfer_params["do_remote_prefill"] = True
        super().request_finished(ticket.request, ())
        self._reads.return_ticket(ticket)

    # ---- a request ends

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Answer a prefill leg with a ticket and keep its blocks; of every other request nothing is held. What a turn
        of a conversation leaves for the next one (`keeps`) vLLM may free all the same."""
        request_id = request.request_id
        kept = self.keeps.on_request_finished(request)
        report = {**self._reports.pop(request_id), **kept}
        if request.num_output_tokens > 0:
            # The end of a load that ran within a step is not reported in any other way.
            self._token_accounting.on_loaded(request_id, request.num_computed_tokens)
        self._token_accounting.forget(request_id)
        self.admission.forget(request_id)
        self.resumed.on_request_finished(request_id)
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            held, answer = super().request_finished(request, block_ids)
            self._reads.on_request_finished(request)
            return held, {**(answer or {}), **report} if report else answer
        adapter = self._adapters.content(request.lora_request)
        wanted = self._tickets.is_wanted(request_id) and not adapter.unknown
        # Without blocks there is nothing for vLLM to hold.
        held, answer = super().request_finished(request, block_ids if wanted else ())
        if not held or answer is None:
            self._shared.on_freed(request_id)
            self._tickets.drop(request_id)
            return False, None
        digest = prompt_digest(request, answer["remote_num_tokens"], adapter.digest)
        return True, {**self._tickets.issue(request_id, answer, digest), **kept}

    # ---- the engine idles

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must step on, since only steps carry orders to workers, and reports and metrics back:
        once for its capacity, while blocks are in quarantine or paths are probed, until every order is carried out.
        `idle_rest` spaces it."""
        unfinished = self.counters.has_undrained_gauges() or self.quarantine or self._reads.has_pending_orders
        return bool(unfinished or self._paths) or bool(super().has_pending_push_work())
