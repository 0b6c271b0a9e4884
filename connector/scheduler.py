"""The connector's scheduler side: vLLM's pull scheduler with validated tickets, leases and verified reads.

`nixl_connector` shows when vLLM calls which hook. A hook first has our own parts decide (`transfer_params`,
`prefill_tickets`, `decode_reads`); vLLM's code then acts on clean params.
"""

import logging
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

from connector.config import ConnectorConfig
from connector.counters import Counters
from connector.decode_reads import PromptTokens, Quarantine, ReadTracker, TicketToReturn, TokenAccounting
from connector.fingerprint import Fingerprint
from connector.kv_groups import count_blocks, group_shapes, node_capacity
from connector.leases import LeaseTable
from connector.messages import Verdict
from connector.metadata import ConnectorMetadata, WorkerReport
from connector.node_fingerprint import all_parts, lora_settings, node_fingerprint, rank_parts
from connector.prefill_tickets import HandOvers, TicketIssuer
from connector.resume_boundary import LocalHits, resume_boundary
from connector.side_channel import Listener
from connector.tcp_server import Limits
from connector.ticket import Expected
from connector.ticket_fields import Refusal, has_client_named_media, is_token_prompt, is_usable_name, prompt_digest
from connector.transfer_params import (
    Action,
    IssueTicket,
    ParamsValidator,
    ReadTicket,
    ReleaseHandOver,
    RequestFacts,
    ValidatedParams,
)
from connector.weights import Adapters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


log = logging.getLogger("vllm.pdproxy.scheduler")
_REFUSED = "Request %s: kv_transfer_params refused (%s): %s. Computing locally."

ALIAS_BYTES = 18
"""Random bytes in an alias, as 24 characters: it cannot be guessed."""


class ConnectorScheduler(NixlPullConnectorScheduler):
    """One per engine (and so per data-parallel rank). Everything but `verify` runs on the engine's thread."""

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig", config: ConnectorConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._config = config
        self._engine_id = engine_id
        self._transfer_groups = kv_cache_config.transfer_group_ids
        parallel = vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self.counters = Counters()
        self.counters.capacity(node_capacity(vllm_config, kv_cache_config))
        self._shapes = group_shapes(kv_cache_config)
        self._boundary = resume_boundary(vllm_config, kv_cache_config)
        self.local_hits = LocalHits(kv_cache_config)
        self._backoff: int | None = None
        self._validator = ParamsValidator(config.role, Expected(self._shapes, config.keys, config.allowed_hosts))
        self._leases = LeaseTable(ranks=ranks)
        self._tickets = TicketIssuer(
            leases=self._leases,
            hand_overs=HandOvers(),
            counters=self.counters,
            keys=config.keys,
            block_sizes=tuple(shape.block_size for shape in self._shapes),
            make_alias=lambda: secrets.token_urlsafe(ALIAS_BYTES),
            now=time.monotonic,
            wall=time.time,
        )
        self.quarantine = Quarantine()
        self._reads = ReadTracker(
            self.counters, self.quarantine, ranks, config.read_retries, lambda: secrets.token_hex(8)
        )
        self.set_fingerprint(node_fingerprint(vllm_config, kv_cache_config, self._boundary))
        self._adapters = Adapters(lora_settings(vllm_config))
        self._token_accounting = TokenAccounting(self.counters)
        self._listener: Listener | None = None
        if not config.keys:
            log.warning(
                "Tickets are neither signed nor checked for a signature: give prefill and decode nodes a common key "
                "(pdproxy_key_file or PDPROXY_TICKET_KEYS) wherever others can reach them."
            )

    def set_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Issue tickets with this fingerprint, and accept only those that have the same."""
        self._tickets.fingerprint = self._fingerprint = fingerprint
        expected = replace(self._validator.expected, fingerprint=fingerprint)
        self._validator = replace(self._validator, expected=expected)

    # ---- a request arrives

    def on_new_request(self, request: "Request") -> None:
        """Validate the request's `kv_transfer_params`, which any client may have written. vLLM sees clean ones or
        none."""
        if not isinstance(request.kv_transfer_params, ValidatedParams):
            action = self._validator.validate(request.kv_transfer_params, self._facts(request))
            params = self._begin(request, action)
            request.kv_transfer_params = None if params is None else ValidatedParams(params)
        super().on_new_request(request)

    def _facts(self, request: "Request") -> RequestFacts:
        ending = request.abort_immediately
        adapter = self._adapters.content(request.lora_request if request.kv_transfer_params else None)
        return RequestFacts(
            unsuitable=None if ending else self._unsuitable(request) or adapter.unknown,
            expected_tokens=None if ending else self._ticket_tokens(request),
            digest=lambda num_tokens: prompt_digest(request, num_tokens, adapter.digest),
        )

    def _ticket_tokens(self, request: "Request") -> int:
        """How many of the prompt's tokens a ticket covers: those that a later request can resume after, or, where no
        state is kept, all but those that vLLM has the decode node compute."""
        return self._boundary.tokens(request, super()._prefill_backoff())

    def _prefill_backoff(self) -> int:
        return super()._prefill_backoff() if self._backoff is None else self._backoff

    def _truncate_request_for_prefill(self, request: "Request") -> None:
        """vLLM's, for this request's own number of tokens."""
        self._backoff = request.num_prompt_tokens - self._ticket_tokens(request)
        super()._truncate_request_for_prefill(request)
        self._backoff = None

    def _unsuitable(self, request: "Request") -> str | None:
        if not is_token_prompt(request):
            return "prompt embeddings have no digest"
        if has_client_named_media(request):
            return "a media item is named by its sender, not by its content"
        if request.resumable:
            return "a session's prompt still grows"
        if request.skip_reading_prefix_cache:
            return "prompt log-probabilities need every token computed here"
        if self._ticket_tokens(request) <= 0:
            return "the prompt is too short to hand over"
        return None if is_usable_name(request.request_id) else "the request id cannot stand in a ticket"

    def _begin(self, request: "Request", action: Action) -> dict[str, Any] | None:
        """Carry out the action. The request's clean params, or None."""
        match action:
            case IssueTicket() if self._tickets.on_new_request(request.request_id, action):
                return action.params()
            case ReadTicket(ticket):
                self._reads.accept(request, ticket)
                return ticket.params()
            case ReleaseHandOver(hand_over):
                self._tickets.release(hand_over)
            case Refusal(reason, detail):
                self.counters.refused(reason)
                log.warning(_REFUSED, request.request_id, reason, detail)
        return None

    # ---- a step is planned

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens are read after the local cache's; None where the request is to be asked for once more."""
        params = request.kv_transfer_params
        if params is None or not params.get("do_remote_prefill"):
            return 0, False
        tokens = self._ticket_tokens(request)
        if self.local_hits.forget_without_state(request, tokens, num_computed_tokens):
            return None, False
        return max(tokens - num_computed_tokens, 0), tokens > num_computed_tokens

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """vLLM plans the read; ours gets its order, and the source of the prompt's tokens is recorded."""
        params = request.kv_transfer_params
        reads = params is not None and bool(params.get("do_remote_prefill"))
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.num_computed_tokens > 0:
            # Back from a load of another connector: our own reads were counted with the workers' report.
            self._token_accounting.on_loaded(request.request_id, request.num_computed_tokens)
        elif request.num_preemptions == 0:
            self._plan_tokens(request, num_external_tokens, blocks if reads else None)
        if reads:
            every = [block for group in blocks.blocks for block in group]
            hit = self._ticket_tokens(request) - num_external_tokens
            self._reads.start_attempt(request.request_id, blocks=every, hit=hit, pull=num_external_tokens)

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
        self._token_accounting.plan(request.request_id, PromptTokens(hit, pulled, computed, blocks, loaded))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ConnectorMetadata:
        """vLLM's metadata for the workers, with our orders."""
        meta = ConnectorMetadata.extending(super().build_connector_meta(scheduler_output))
        orders = self._tickets.pop_orders()
        meta.readers, meta.releases = orders.readers, orders.releases
        meta.aliases, meta.retired = orders.aliases, orders.retired
        meta.reqs_not_processed |= orders.dropped
        meta.reads = self._reads.pop_orders(meta.reqs_to_recv)
        meta.idle = scheduler_output.total_num_scheduled_tokens == 0
        return meta

    # ---- a step is done

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take in the workers' reports of this step. vLLM frees blocks only after it."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._tickets.on_reads_seen(report.reads_seen)
            for ticket in self._reads.on_worker_report(report):
                self._return_ticket(ticket)
        self._tickets.on_finished_sending(connector_output.finished_sending or ())
        super().update_connector_output(connector_output)
        self._on_reads_finished(connector_output.finished_recving or set(), connector_output.failed_recving)

    def _on_reads_finished(self, finished: set[str], failed: set[str]) -> None:
        for request_id in finished - failed:
            self._token_accounting.on_read_verified(request_id)
        for request_id in finished & failed:
            self._token_accounting.forget(request_id)
        follow_up = self._reads.on_reads_finished(finished, failed)
        for request in follow_up.retry:
            request.kv_transfer_params["do_remote_prefill"] = True
            super().on_new_request(request)
        for ticket in follow_up.to_return:
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
        """Answer a prefill leg with a ticket and keep its blocks; of every other request nothing is held."""
        request_id = request.request_id
        params = request.kv_transfer_params or {}
        if request.num_output_tokens > 0:
            # The end of a load that ran within a step is not reported in any other way.
            self._token_accounting.on_loaded(request_id, request.num_computed_tokens)
        self._token_accounting.forget(request_id)
        if not params.get("do_remote_decode"):
            held, answer = super().request_finished(request, block_ids)
            self._reads.on_request_finished(request)
            return held, answer
        adapter = self._adapters.content(request.lora_request)
        wanted = self._tickets.is_wanted(request_id) and not adapter.unknown
        # Without blocks there is nothing for vLLM to hold.
        held, answer = super().request_finished(request, block_ids if wanted else ())
        if not held or answer is None:
            self._tickets.drop(request_id)
            return False, None
        digest = prompt_digest(request, answer["remote_num_tokens"], adapter.digest)
        return True, self._tickets.issue(request_id, answer, digest)

    # ---- the engine starts and stops

    def verify(self, engine_id: str, alias: str, nonce: str) -> Verdict:
        """The side channel's answer to a decode node's question after a read. Called in the listener's thread."""
        return self._leases.verify(alias, nonce) if engine_id == self._engine_id else Verdict.UNKNOWN

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Complete the fingerprint, and start our side channel in the place of vLLM's.

        Raises SideChannelError when the port is in use.
        """
        if self._listener is not None:
            return
        for payload in metadata.values():
            if not isinstance(payload, NixlHandshakePayload):
                raise TypeError(f"expected NixlHandshakePayload, got {type(payload).__name__}")
        self.set_fingerprint(self._fingerprint.extended(rank_parts(metadata.values())))
        self.counters.fingerprint(all_parts(self._fingerprint))
        log.info("Fingerprint %s: %s", self._fingerprint.digest, dict(self._fingerprint.parts))
        encoded = {ranks: msgspec.msgpack.encode(payload) for ranks, payload in metadata.items()}
        connections = self._config.side_channel_connections
        self._listener = Listener(
            self.side_channel_host,
            self.side_channel_port,
            encoded,
            self.verify,
            self.counters,
            engine_id=self._engine_id,
            keys=self._config.keys,
            limits=Limits(connections, connections // 2),
        )
        self._listener.start()

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must step on, since only steps carry orders to workers, and reports and metrics back:
        once for its capacity, while blocks are in quarantine, until every order is carried out. `worker` spaces it."""
        unfinished = self.counters.has_undrained_gauges() or self.quarantine or self._reads.has_pending_orders
        return bool(unfinished) or bool(super().has_pending_push_work())

    def shutdown(self) -> None:
        """Stop the side channel."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
        super().shutdown()
